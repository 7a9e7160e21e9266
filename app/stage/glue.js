// Joins the stage to Gradio: channel messages in, run state to the buttons, model progress to the pill; and to the rest
// of the page: the recordings of the Watch tab, links, files that are dropped or saved.

import { el, setText } from "./inspector.js";
import { linkTo, placeOf, readLink } from "./link.js";
import { saveText } from "./save.js";
import { createStage } from "./stage.js";
import { isFinal, newRun, statusLine } from "./store.js";
import { packTraceFile } from "./upload.js";
import { createWatch } from "./watch.js";

const RUN_KEY = "river-explorer-run";
const MODEL_POLL_MS = 400;
const RUN_POLL_MS = 300;
const DRAG_OVER_MS = 200; // a drag over the page reports itself at least this often
const NOTE_MS = 7000;
const RECORDING = "recording:";
const NO_SERVER = "There is no connection to the server.";
const FILE_TYPES = { json: "application/json", csv: "text/csv", html: "text/html" };

/** Called once by gr.HTML's js_on_load with the tools that Gradio hands it. */
function connect({ element, props, server, trigger, watch }) {
  const app = element.closest(".gradio-container") ?? document.body;
  const button = (id) => app.querySelector(`#${id}`);
  const note = createNote(element.querySelector(".page-note"));
  const stage = createStage(element.querySelector(".stage-root"), {
    onCursor: followAddress,
    actions: [
      keep("json", "Download trace", "The open run as a JSON file, which this page can open again"),
      keep("csv", "Token table", "Every token of every lane as a CSV file"),
      keep("html", "Download replay", "One .html file that plays this run anywhere, without a network"),
      { name: "link", label: "Copy link", title: "A link to this recording, at the locked token", run: copyLink },
    ],
  });
  const list = createWatch(el("div", { class: "watch" }), { pick: (slug) => openRecording(slug), own: tryOwn, last: showLive, file: openFile });
  const texts = new Map(); // recordings that were fetched, by slug
  const retired = new Set(); // runs of this tab that a newer one has replaced
  let live = { id: null, seq: -1, state: "idle" }; // the run of this tab, whether or not the stage shows it
  let coming = null; // the run after it, as long as it has not begun: in line, or about to be refused
  let held = null; // messages that arrive while the whole run is fetched again
  let opening = 0; // grows with everything that takes the stage, so that a slow answer cannot take it back

  /* The run of this tab */

  const active = () => coming !== null || (live.state !== "idle" && !isFinal(live));
  const showsLive = () => stage.source === "live" || stage.source === "preview";

  function showState() {
    const { state } = coming ?? live;
    app.dataset.runState = state;
    button("run")?.setAttribute("aria-disabled", String(active()));
    button("stop")?.setAttribute("aria-disabled", String(!active() || state === "stopping"));
    list.lastRun(live.id !== null && !showsLive());
  }

  function take(text) {
    if (!text) return;
    const message = JSON.parse(text);
    if (retired.has(message.run_id)) return;
    const begins = message.run_id !== live.id;
    if (begins && message.events.length === 0) return holdBack(message);
    if (begins) {
      if (live.id) retired.add(live.id);
      live = { id: message.run_id, seq: -1, state: "idle" };
      opening += 1;
      sessionStorage.setItem(RUN_KEY, live.id);
      coming = null;
      say("");
    }
    if (message.seq > live.seq && !isFinal(live)) live = { ...live, seq: message.seq, state: message.state };
    if (held) held.push(message);
    else if (begins || stage.id === live.id) stage.apply(message);
    showState();
  }

  /**
   * A run takes the stage with its first event. Until then, and for good if it is refused, what is open stays open, and the line beside
   * the controls says how the run stands.
   */
  function holdBack(message) {
    const known = coming?.id === message.run_id ? coming.seq : -1;
    if (message.seq <= known) return;
    coming = { id: message.run_id, seq: message.seq, state: message.state };
    say(statusLine(Object.assign(newRun(), message)), message.state);
    if (isFinal(coming)) {
      retired.add(coming.id);
      coming = null;
    }
    showState();
  }

  function say(words, state = "") {
    const line = button("run-line");
    if (!line) return;
    line.dataset.state = state;
    line.hidden = !words;
    setText(line, words);
  }

  /** Back from a recording or a file to the run of this tab, as far as it has come. */
  async function showLive() {
    const turn = ++opening;
    held = [];
    const text = await ask("snapshot", live.id);
    const missed = held;
    held = null;
    if (turn !== opening) return;
    if (!text) {
      note.show(text === null ? "The server does not hold your last run any more." : NO_SERVER);
      return;
    }
    select("run");
    stage.reset();
    for (const message of [JSON.parse(text), ...missed]) stage.apply(message);
    showState();
  }

  /** After a reload: follow the run that this tab had begun, until the server has brought it to its end. */
  async function resume(id, text) {
    select("run");
    while (text) {
      if (live.id && live.id !== id) return; // a new run has begun meanwhile
      take(text);
      if (isFinal(live)) return;
      await sleepMs(RUN_POLL_MS);
      text = await ask("snapshot", id);
    }
    sessionStorage.removeItem(RUN_KEY);
  }

  /* Recordings, files, links */

  async function openRecording(slug, place = {}) {
    const turn = ++opening;
    const text = texts.get(slug) ?? (await ask("recording", slug));
    if (turn !== opening) return;
    if (!text) note.show(text === null ? "There is no such recording." : NO_SERVER);
    else showRecording(text, place);
  }

  function showRecording(text, place) {
    const trace = JSON.parse(text);
    const slug = trace.header.recording.slug;
    texts.set(slug, text);
    const at = place.link ? placeOf(place.link, trace) : {};
    if (at.error) note.show(at.error);
    stage.open(trace, { source: "recording", id: RECORDING + slug, ...at, play: true });
  }

  async function openFile(file) {
    const turn = ++opening;
    try {
      const data = await packTraceFile(file, props.limits);
      const answer = await ask("open_trace", { name: file.name, data });
      if (turn !== opening) return;
      if (!answer) throw new Error(NO_SERVER);
      if (answer.error) throw new Error(`${file.name} was not opened. ${answer.error}`);
      stage.open(JSON.parse(answer.trace), { source: "file", id: answer.id, play: false });
      note.show(`${file.name} is open.`, { brief: true });
    } catch (error) {
      note.show(error.message);
    }
  }

  const openSlug = () => (stage.source === "recording" ? stage.id.slice(RECORDING.length) : null);

  /** The address names a token only while one is locked in a recording, and a recording only if it named it before. */
  function followAddress() {
    const slug = openSlug();
    const named = slug !== null && (stage.cursor !== null || readLink(location.search)?.slug === slug);
    const url = linkTo(location.href, named ? slug : null, stage.cursor);
    if (url !== location.href) history.replaceState(history.state, "", url);
  }

  async function copyLink() {
    if (openSlug() === null) {
      note.show("Only recordings have links, because this run is known to your tab alone. A replay file can be passed on.", {
        label: "Download replay",
        run: () => download("html"),
      });
      return;
    }
    const url = linkTo(location.href, openSlug(), stage.cursor);
    try {
      await navigator.clipboard.writeText(url);
      note.show("The link is copied.", { brief: true });
    } catch {
      note.show(`The clipboard is not available here. The link is ${url}`);
    }
  }

  async function download(kind) {
    if (stage.id === null) {
      note.show("Nothing is open yet. Open a recording or press Run first.");
      return;
    }
    const answer = await ask("download", { id: stage.id, kind });
    if (!answer || answer.error) note.show(answer?.error ?? NO_SERVER);
    else saveText(answer.name, answer.text, FILE_TYPES[kind]);
  }

  function keep(kind, label, title) {
    return { name: kind, label, title, run: () => download(kind) };
  }

  /* The page around */

  /** Gradio answers undefined, or throws, when the server cannot be reached. */
  function ask(name, argument = "") {
    return server[name](argument).catch(() => undefined);
  }

  function select(tab) {
    button(`${tab}-tab-button`)?.click();
  }

  async function tryOwn() {
    const prompt = stage.whole.header?.prompt;
    select("run");
    const box = await mounted(app, "#prompt textarea");
    if (prompt) {
      box.value = prompt;
      box.dispatchEvent(new Event("input", { bubbles: true }));
    }
    box.focus({ preventScroll: true });
  }

  async function followModel() {
    for (;;) {
      const model = (await ask("model_status")) ?? { state: "lost", text: "no connection to the server", fraction: null };
      showModel(app.querySelector("#model-pill"), model);
      list.model(model.state);
      if (model.state === "ready") {
        trigger("model_ready");
        return;
      }
      await sleepMs(model.state === "loading" ? MODEL_POLL_MS : 10 * MODEL_POLL_MS);
    }
  }

  /** What the page shows first: what a link asks for, the run of this tab, or the first recording. */
  async function begin() {
    const link = readLink(location.search);
    const earlier = sessionStorage.getItem(RUN_KEY);
    const asked = [ask("recordings"), link || !earlier ? ask("recording", link?.slug ?? "") : null, earlier ? ask("snapshot", earlier) : null];
    const turn = opening;
    asked[0].then((recordings) => {
      list.list(recordings ?? []);
      list.current(stage.id);
    });
    const snapshot = await asked[2];
    if (snapshot && !link) return resume(earlier, snapshot);
    if (earlier && !snapshot) sessionStorage.removeItem(RUN_KEY);
    let text = await (asked[1] ?? ask("recording", ""));
    if (turn !== opening) return; // the visitor was faster
    const unknown = link && text === null;
    if (unknown) text = await ask("recording", "");
    if (text) showRecording(text, unknown ? {} : { link });
    if (unknown) note.show("The link names a recording that this page does not have, so the first one is shown.");
    if (snapshot) resumeQuietly(snapshot);
  }

  /** A run of this tab is known, but a link goes before it: only the way back to it is shown. */
  function resumeQuietly(snapshot) {
    const { run_id: id, seq, state } = JSON.parse(snapshot);
    if (live.id === null) live = { id, seq, state };
    showState();
  }

  stage.element.river = stage; // how the Analyse tab, a component of its own, finds the stage
  stage.element.addEventListener("river:opened", () => {
    list.current(stage.id);
    followAddress();
    showState();
  });
  watch("value", () => take(props.value));
  take(props.value);
  showState();
  app.addEventListener("click", (event) => {
    if (event.target.closest("#run") && !active()) {
      stage.pause();
      say("");
    }
    if (event.target.closest("#run-tab-button")) mounted(app, "#stop").then(showState);
  });
  mounted(app, "#watch").then((panel) => panel.replaceChildren(list.element));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && active() && showsLive() && !event.defaultPrevented) button("stop")?.click();
  });
  takeDrops(openFile);
  begin();
  followModel();
  element.dataset.ready = "true";
}

/** The line at the foot of the page that answers an action: a sentence, perhaps with one thing to do about it. */
function createNote(root) {
  const words = el("span");
  const way = el("button", { type: "button", class: "note-way" });
  const close = el("button", { type: "button", class: "note-close", "aria-label": "Close this message" }, "×");
  let timer = 0;
  let run = null;
  const hide = () => {
    root.hidden = true;
  };
  close.addEventListener("click", hide);
  way.addEventListener("click", () => {
    hide();
    run();
  });
  root.replaceChildren(words, way, close);
  root.setAttribute("role", "alert");
  return {
    show(text, { label = "", run: action = null, brief = false } = {}) {
      clearTimeout(timer);
      words.textContent = text;
      way.textContent = label;
      way.hidden = !label;
      run = action;
      root.hidden = false;
      if (brief) timer = setTimeout(hide, NOTE_MS);
    },
  };
}

/** Files dropped anywhere on the page go to `open`; while one is dragged over it the page says what a drop would do. */
function takeDrops(open) {
  const hint = el("div", { class: "drop-hint", hidden: "" }, el("b", {}, "Drop a trace file (.json or .json.gz) to open it"));
  document.body.append(hint);
  let timer = 0;
  const carriesFile = (event) => event.dataTransfer?.types.includes("Files");
  const hide = () => {
    hint.hidden = true;
  };
  document.addEventListener("dragover", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    hint.hidden = false;
    clearTimeout(timer);
    timer = setTimeout(hide, DRAG_OVER_MS);
  });
  document.addEventListener("drop", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    hide();
    if (event.dataTransfer.files[0]) open(event.dataTransfer.files[0]);
  });
}

function showModel(pill, model) {
  if (!pill) return;
  const percent = typeof model.fraction === "number" ? Math.round(100 * model.fraction) : null;
  const text = model.state === "loading" && percent !== null ? `${model.text} ${percent} %` : model.text;
  pill.dataset.modelState = model.state;
  pill.style.setProperty("--progress", `${percent ?? 0}%`);
  const line = pill.querySelector(".pill-text");
  if (line.textContent !== text) line.textContent = text;
}

/** Gradio puts the content of the first tab into the page after the stage, and that of another when it is first opened. */
async function mounted(app, selector) {
  for (;;) {
    const element = app.querySelector(selector);
    if (element) return element;
    await sleepMs(10);
  }
}

function sleepMs(ms) {
  return new Promise((done) => setTimeout(done, ms));
}
