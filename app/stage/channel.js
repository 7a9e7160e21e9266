// The run of this tab: messages of Gradio's channel in, the stage and the buttons out. Nothing of the page is touched here.

import { isFinal, newRun, statusLine } from "./store.js";

const RUN_KEY = "river-explorer-run";
const LEFT_KEY = "river-explorer-left"; // set as the page is left: a reload finds it, a duplicate of a tab that is still there does not
const POLL_MS = [300, 450, 700, 1000]; // the last one for ever; the server lets go of a run that nobody asks for
const ASKED_MS = 1000; // a second press within that time is the first one's double

/**
 * Follow the run of this tab.
 *
 * `stage` is the stage, `ask(name, argument)` a function of the server (its answer, null, or undefined where there is no connection), `memo` a memory
 * of createMemo. `on` has show({ state, active, lastRun }) for the buttons, say(words, state) for the line beside them, note(words or null for "no connection"),
 * select(tab), taken() -> number, called when something takes the stage, and turn() -> the last such number. `wait(ms)` is a promise, `now()` a time in ms.
 *
 * Returns take(text) for a message of the channel, press() -> whether Run may be pressed now, showLive(), resume(id, text), follow(snapshot),
 * earlier(), forget(), left(), back(), show(), and the properties active and showsLive.
 */
export function createChannel({ stage, ask, memo, on, wait, now = () => performance.now() }) {
  const retired = new Set(); // runs of this tab that a newer one has replaced
  let live = { id: null, seq: -1, state: "idle", ours: true }; // whether or not the stage shows it; `ours`: this page hears of it
  let coming = null; // the run after it, as long as it has not begun: in line, or about to be refused
  let asked = -Infinity; // when Run was last pressed
  let fetching = null; // the id of a run that is on its way from the server

  const running = () => coming !== null || (live.ours && live.state !== "idle" && !isFinal(live));
  const showsLive = () => stage.source === "live" || stage.source === "preview";

  function show() {
    on.show({ state: (coming ?? live).state, active: running(), lastRun: live.id !== null && !showsLive() });
  }

  function take(text) {
    if (!text) return;
    const message = JSON.parse(text);
    if (retired.has(message.run_id)) return;
    const begins = message.run_id !== live.id;
    if (begins && message.run_id !== coming?.id) asked = -Infinity; // Run has been answered
    if (begins && message.events.length === 0) return holdBack(message);
    if (begins) {
      if (live.id) retired.add(live.id);
      live = { id: message.run_id, seq: -1, state: "idle", ours: true };
      coming = null;
      on.taken();
      memo.set(RUN_KEY, live.id);
      on.say("");
    }
    if (message.seq > live.seq && !isFinal(live)) live = { ...live, seq: message.seq, state: message.state };
    stage.apply(message); // shown or not: the way back to it needs no server then
    show();
  }

  /**
   * A run takes the stage with its first event. Until then, and for good if it is refused, what is open stays open, and the line beside
   * the controls says how the run stands.
   */
  function holdBack(message) {
    if (coming && coming.id !== message.run_id) retired.add(coming.id);
    const known = coming?.id === message.run_id ? coming.seq : -1;
    if (message.seq <= known) return;
    coming = { id: message.run_id, seq: message.seq, state: message.state };
    on.say(statusLine(Object.assign(newRun(), message)), message.state);
    if (isFinal(coming)) {
      retired.add(coming.id);
      coming = null;
    }
    show();
  }

  /** Whether a press of Run is a new one: not while a run is under way, and not the second half of a double click. */
  function press() {
    if (running() || now() - asked < ASKED_MS) return false;
    asked = now();
    return true;
  }

  /** Back from a recording or a file to the run of this tab, as far as it has come. */
  async function showLive() {
    const { id } = live;
    if (!stage.showLive(id)) {
      if (fetching === id) return;
      fetching = id;
      const turn = on.taken();
      const text = await ask("snapshot", id);
      fetching = null;
      if (turn !== on.turn()) return; // something else has taken the stage meanwhile
      if (!text) {
        on.note(text === null ? "The server does not hold your last run any more." : null);
        return;
      }
      const message = JSON.parse(text);
      if (message.events.length === 0) return on.say(statusLine(Object.assign(newRun(), message)), message.state);
      stage.apply(message);
    } else {
      on.taken();
    }
    on.select("run");
    show();
  }

  /** After a reload: follow the run that this tab had begun, until the server has brought it to its end. */
  async function resume(id, text) {
    on.select("run");
    for (let round = 0; text; round += 1) {
      if (live.id && live.id !== id) return; // a new run has begun meanwhile
      take(text);
      if (isFinal(live)) return;
      await wait(POLL_MS[Math.min(round, POLL_MS.length - 1)]);
      text = await ask("snapshot", id);
    }
    memo.drop(RUN_KEY);
  }

  /** A run of this tab's past, or of the tab that this one is a copy of: only the way back to it is shown. */
  function follow(snapshot) {
    const { run_id: id, seq, state } = JSON.parse(snapshot);
    if (live.id === null) live = { id, seq, state, ours: false };
    show();
  }

  return {
    take,
    press,
    showLive,
    resume,
    follow,
    show,
    /** What this tab remembers of before: { id or null, here }, `here` false in a copy of a tab that still has the run. */
    earlier() {
      const here = memo.get(LEFT_KEY) !== null;
      memo.drop(LEFT_KEY);
      return { id: memo.get(RUN_KEY), here };
    },
    forget: () => memo.drop(RUN_KEY),
    /** The page is being left, or has come back out of the browser's cache. */
    left: () => memo.set(LEFT_KEY, "1"),
    back: () => memo.drop(LEFT_KEY),
    get active() {
      return running();
    },
    get showsLive() {
      return showsLive();
    },
  };
}
