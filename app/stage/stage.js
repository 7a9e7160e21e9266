// The stage: race, transport, texts, inspector, grids and memory of one run, whether live, recorded or from a file. It knows nothing
// of Gradio; whoever has messages or a trace (the page, or a replay) calls `apply` or `open`. Drawing happens once a frame, from the
// store, whatever the number of messages. One cursor goes through all of it.

import { createPlacer } from "./frame.js";
import { createGrids } from "./grids.js";
import { headline } from "./headline.js";
import { el, inspectorContent, setText, TOKEN_FACTS, tokenSentence } from "./inspector.js";
import { createHelp, keyAction } from "./keys.js";
import { createMemory } from "./memory.js";
import { createPlayer, traceOfRun } from "./player.js";
import { createRace, RACE_FACTS } from "./race.js";
import { depthRules } from "./ramp.js";
import { createRunCard, deviceWords } from "./runcard.js";
import { saveBlob } from "./save.js";
import { applyMessage, isFinal, isOver, lanesDone, layersOf, newRun, previewRun, statusLine, timingWords } from "./store.js";
import { gridTable } from "./table.js";
import { createTexts } from "./texts.js";
import { createTransport, speedFor } from "./transport.js";

const LONGEST_FRAME_MS = 1000; // a page that could not draw for longer does not jump ahead by more
const SOURCES = { live: "live", recording: "recorded", replay: "recorded", file: "file" };

const shortType = (dtype) => String(dtype).replace("bfloat", "bf").replace("float", "fp");

/** Where what is shown comes from, on what it was made and when, in words. */
function badgeWords(header, source) {
  const made = [deviceWords(header), ...(header.threads ? [`${header.threads} threads`] : []), shortType(header.dtype)].join(", ");
  return source === "live" ? made : `${made} · ${String(header.created).slice(0, 10)}`;
}

/**
 * Build the stage inside `root`.
 *
 * onState(run) is called when the state of a live run changes or a trace is opened, onCursor({ lane, i } or null) when a token is
 * kept or let go, onMarks() when marks are taken away here, onEscape() when Esc has no token to let go; it returns whether it took the key.
 * `actions` are buttons for the toolbar: { name, label, title, run() }; `placer` puts what floats.
 *
 * Returns apply(message), open(trace, options), showLive(id), play(), pause(), setCursor(at), mark(marks), gridImage(kind), and the
 * properties run, whole, source, id, how, earlier, cursor and element; `how` is how its numbers are known (measured or recorded), `earlier` a
 * Map id -> { source, prompt } of the runs and files that were shown. The element dispatches river:opened, river:state and river:cursor.
 */
export function createStage(root, { onState = () => {}, onCursor = () => {}, onMarks = () => {}, onEscape = () => false, actions = [], placer = createPlacer() } = {}) {
  let source = "preview";
  let id = null;
  let whole = previewRun(); // everything that is known of the run
  let run = whole; // what of it is shown
  let live = null; // the run that messages belong to, whether or not it is shown
  let retired = new Set(); // ids of runs that a newer one has replaced
  let player = null; // of a run that has ended
  let clock = 0; // nanoseconds of engine time
  let playing = false;
  let speed = 1;
  let speedChosen = false;
  let ticked = null; // when the clock was last moved on, or null while it stands
  let cursor = null; // the token that a click or a key keeps: { lane, i }
  let hovered = null; // the token under the pointer or at the playhead, which goes before the kept one
  let marks = null;
  let revealing = false; // whether the column has to be scrolled to the kept token
  let spoken = ""; // what was said about a token that the keyboard reached
  let inspectedFor = "";
  let placedFor = null; // the kept token that the inspector's sheet lies beside
  let headlineFor = "";
  let rulesFor = 0;
  let builtFor = "";
  let opened = 0;
  const earlier = new Map();
  let frame = 0;

  const calm = matchMedia("(prefers-reduced-motion: reduce)");

  const rules = el("style");
  const title = el("h2", { class: "title" });
  const badge = el("span", { class: "badge" });
  const badgeKind = el("b");
  const badgeRest = el("span");
  badge.append(badgeKind, badgeRest);
  const sentence = el("p", { class: "headline", title: "Computed from the tokens that have been played" });
  const status = el("p", { class: "status", role: "status", "aria-live": "polite" });
  const notices = el("ul", { class: "notices", hidden: "" });
  const timing = el("span", { class: "timing" });
  const known = el("span", { class: "tag" }, "measured");
  const keyEntry = (kind, words) => el("span", {}, el("i", { class: `key-${kind}`, "aria-hidden": "true" }), words);
  const riverKey = keyEntry("river", "river layers");
  const key = el("span", { class: "key" }, keyEntry("backbone", "backbone layers"), riverKey, keyEntry("prefill", "prefill"));
  const race = createRace(drawLater);
  const evenly = el("p", { class: "evenly" }, "Layers are spread evenly over a token’s time; layer times are not measured.");
  const card = createRunCard(() => [whole, source]);
  // The same words are titles of the numbers, which neither a finger nor a key can reach.
  const facts = [...RACE_FACTS, ...TOKEN_FACTS].flatMap(([name, words]) => [el("dt", {}, name), el("dd", {}, words)]);
  const knownHowList = el("details", { class: "known-how" }, el("summary", {}, "How each number is known"), el("dl", {}, ...facts));
  const transport = createTransport({ toggle, step, layer, edge, seek: (share) => seek(share * (player?.durationNs ?? 0)), speed: setSpeed });
  const help = createHelp({ place: placer.put });
  const ramp = el("span", { class: "legend-ramp", "aria-hidden": "true" });
  const rampEnds = [el("span"), el("span")];
  const legend = el(
    "div",
    { class: "legend", role: "img" },
    el("span", { class: "legend-title" }, "Backbone layers that a token ran"),
    rampEnds[0],
    ramp,
    rampEnds[1],
  );
  const markWords = el("span");
  const unmark = el("button", { type: "button" }, "Clear marks");
  const marked = el("p", { class: "marks", hidden: "" }, markWords, unmark);
  const texts = createTexts();
  const inspected = el("div", { class: "inspected" });
  const close = el("button", { class: "close", type: "button", "aria-label": "Close the token card" }, "×");
  const inspector = el("aside", { class: "inspector", tabindex: "0", "aria-label": "Token" }, close, inspected);
  const gridsRoot = el("div", { class: "grids-root" });
  const grids = createGrids(gridsRoot, {
    onHover: (slot) => hover(slot && slot.i !== null ? { lane: slot.lane, i: slot.i } : null),
    onClick: (slot) => slot.i !== null && toggleCursor({ lane: slot.lane, i: slot.i }),
  });
  const memory = createMemory();
  const tableLane = el("select", { "aria-label": "Lane of the table" });
  const tableRoot = el("div", { class: "table-scroll", tabindex: "0", role: "group", "aria-label": "Table of tokens" });
  const table = el("section", { class: "table-view", "aria-label": "Table of tokens and KV slots", hidden: "" }, tableLane, tableRoot);
  const tool = ({ name, label, title: words, run: act }) => {
    const button = el("button", { type: "button", "data-action": name, title: words }, label);
    button.addEventListener("click", () => act());
    return button;
  };
  const tableButton = tool({ name: "table", label: "Table view", title: "Tokens and KV slots of a lane as a table", run: toggleTable });
  tableButton.setAttribute("aria-pressed", "false");
  const failed = el("span", { class: "tool-note", role: "alert" });
  const tools = el(
    "div",
    { class: "stage-tools", role: "group", "aria-label": "Keep and view" },
    ...actions.map(tool),
    tool({ name: "png", label: "Grids as PNG", title: "The grids with labels and legend as a picture", run: () => saveGrids("png") }),
    tool({ name: "svg", label: "Grids as SVG", title: "The grids with labels and legend as a vector picture", run: () => saveGrids("svg") }),
    tableButton,
    tool({ name: "keys", label: "Keyboard ?", title: "What the keys do (?)", run: help.open }),
    failed,
  );
  const stage = el(
    "div",
    { class: "stage" },
    rules,
    el("header", { class: "stage-head" }, title, badge),
    sentence,
    status,
    notices,
    el(
      "section",
      { class: "race", "aria-label": "Race" },
      el("header", {}, el("h2", {}, "Race"), known, timing, key),
      race.rows,
      race.axis,
      evenly,
      card.element,
      knownHowList,
    ),
    transport.element,
    tools,
    el("div", { class: "under" }, legend, marked),
    el("section", { class: "reading", "aria-label": "Texts" }, texts.prompt, texts.columns, inspector),
    table,
    gridsRoot,
    memory.element,
    help.element,
  );
  root.replaceChildren(stage);

  /* The playhead */

  function drawLater() {
    // A hidden page gets no frames; everything is in the store and is drawn when it is seen again.
    if (!frame && !document.hidden) frame = requestAnimationFrame(tick);
  }

  function tick(now) {
    frame = 0;
    if (document.hidden) return;
    if (playing) {
      if (ticked !== null) clock = Math.min(player.durationNs, clock + Math.round(Math.min(now - ticked, LONGEST_FRAME_MS) * 1e6 * speed));
      ticked = now;
      if (clock >= player.durationNs) playing = false;
    }
    draw();
    if (playing) drawLater();
  }

  const atEnd = () => !player || clock >= player.durationNs;

  function play() {
    if (!player) return;
    if (atEnd()) clock = 0;
    playing = true;
    ticked = null;
    spoken = "";
    hovered = null;
    drawLater();
  }

  function pause() {
    playing = false;
    drawLater();
  }

  function toggle() {
    if (!player) return false;
    if (playing) pause();
    else play();
    return true;
  }

  function seek(to) {
    if (!player) return;
    pause();
    spoken = "";
    clock = Math.min(player.durationNs, Math.max(0, Math.round(to)));
  }

  function setSpeed(value) {
    speed = value;
    speedChosen = true;
    drawLater();
  }

  /** Whose tokens the keys step through: those of the text that has the focus, or of the kept token; null for all lanes. */
  function steppedLane() {
    const focused = document.activeElement?.closest?.(".text")?.dataset.lane;
    return focused !== undefined && whole.lanes.has(focused) ? focused : (cursor?.lane ?? null);
  }

  /** Stand at a token of a lane and keep it. */
  function standAt(lane, i) {
    if (player) {
      pause();
      clock = player.momentOf(lane, i);
      run = shownRun();
    }
    choose({ lane, i }, { speak: true });
  }

  function step(count) {
    const lane = steppedLane();
    if (lane !== null) {
      const last = whole.lanes.get(lane).tokens.length - 1;
      if (last < 0) return false;
      const there = player ? player.tokenAt(lane, clock) : last;
      const kept = cursor?.lane === lane ? Math.min(cursor.i, there) : player ? there : -1;
      const between = player && kept === there && clock > player.momentOf(lane, kept);
      const from = count < 0 && between && kept >= 0 && !atEnd() ? kept + 1 : kept;
      standAt(lane, Math.min(last, Math.max(0, from + count)));
      return true;
    }
    if (!player) return false;
    pause();
    for (let k = 0; k < Math.abs(count); k += 1) clock = count > 0 ? player.nextToken(clock) : player.previousToken(clock);
    showPlayhead();
    return true;
  }

  function layer(count) {
    if (!player) return false;
    pause();
    const lane = steppedLane();
    if (lane !== null && cursor?.lane === lane) clock = Math.min(clock, Math.max(player.momentOf(lane, cursor.i + 1) - 1, player.momentOf(lane, cursor.i)));
    clock = count > 0 ? player.nextLayer(clock, lane) : player.previousLayer(clock, lane);
    if (lane === null) {
      showPlayhead();
    } else {
      run = shownRun();
      const i = player.tokenAt(lane, clock);
      if (i >= 0) choose({ lane, i }, { speak: false });
    }
    return true;
  }

  function edge(which) {
    const lane = steppedLane();
    const last = lane === null ? -1 : whole.lanes.get(lane).tokens.length - 1;
    if (last < 0 && !player) return false;
    if (last >= 0) standAt(lane, which === "start" ? 0 : last);
    if (player && (which === "end" || last < 0)) seek(which === "end" ? player.durationNs : 0);
    return true;
  }

  /** Without a kept token the inspector shows the one that has just been written. */
  function showPlayhead() {
    run = shownRun();
    spoken = "";
    hovered = latest();
    drawLater();
  }

  function latest() {
    let found = null;
    let moment = -1;
    for (const lane of run.lanes.values()) {
      const i = lane.tokens.length - 1;
      const at = i < 0 ? -1 : player ? player.momentOf(lane.id, i) : lane.prefillNs + lane.decodeNs;
      if (at > moment) [found, moment] = [{ lane: lane.id, i }, at];
    }
    return found;
  }

  function shownRun() {
    if (!player) return whole;
    return source === "live" && atEnd() ? whole : player.runAt(clock);
  }

  /* The cursor */

  const tokenOf = (at) => (at ? run.lanes.get(at.lane)?.tokens[at.i] : undefined);

  function choose(at, { speak }) {
    const token = tokenOf(at);
    if (!token) return;
    const moved = cursor?.lane !== at.lane || cursor.i !== at.i;
    cursor = { lane: at.lane, i: at.i };
    hovered = null;
    const lane = run.lanes.get(at.lane);
    if (speak) spoken = tokenSentence(run, lane, token);
    revealing = speak;
    drawLater();
    if (moved) tellCursor();
  }

  function clear() {
    const had = cursor !== null;
    cursor = null;
    hovered = null;
    spoken = "";
    drawLater();
    if (had) tellCursor();
  }

  function tellCursor() {
    onCursor(cursor);
    stage.dispatchEvent(new CustomEvent("river:cursor", { detail: cursor ?? { lane: null, i: null }, bubbles: true }));
  }

  function toggleCursor(at) {
    if (cursor?.lane === at.lane && cursor.i === at.i) clear();
    else choose(at, { speak: false });
  }

  function hover(at) {
    if (hovered?.lane === at?.lane && hovered?.i === at?.i) return;
    hovered = at;
    drawLater();
  }

  function goToLane(number) {
    const lane = [...run.lanes.values()][number];
    if (!lane) return false;
    // The same token in every lane: at rest the playhead goes to a lane that has not come so far, while the film runs the key takes what is there.
    const there = lane.tokens.length - 1;
    const last = playing ? there : whole.lanes.get(lane.id).tokens.length - 1;
    if (last < 0) return false;
    if (document.activeElement?.closest?.(".text")) texts.focus(lane.id);
    const i = Math.min(cursor?.i ?? Math.max(0, there), last);
    if (i <= there) choose({ lane: lane.id, i }, { speak: true });
    else standAt(lane.id, i);
    return true;
  }

  function lock() {
    if (cursor) return clear(), true;
    const at = hovered ?? latest();
    if (!tokenOf(at)) return false;
    choose(at, { speak: true });
    return true;
  }

  function unlock() {
    if (!cursor) return onEscape();
    clear();
    return true;
  }

  function setMarks(next) {
    marks = next && [...next.values()].some((set) => set.size > 0) ? next : null;
    const count = marks ? [...marks.values()].reduce((sum, set) => sum + set.size, 0) : 0;
    marked.hidden = count === 0;
    setText(markWords, `${count} ${count === 1 ? "token" : "tokens"} marked ▲ in texts and grids.`);
    drawLater();
  }

  /* Drawing */

  const theme = (style) => (style.getPropertyValue("--stage-theme").trim() === "dark" ? "dark" : "light");

  /** How the numbers of this run are known to this page. */
  function knownHow() {
    return source === "live" || source === "preview" ? "measured" : "recorded";
  }

  function drawHead() {
    const { header } = whole;
    setText(title, header?.recording?.title ?? (source === "live" ? "Live run" : source === "file" ? "Trace file" : header ? "Replay" : "No run yet"));
    badge.hidden = !header || !SOURCES[source];
    if (!badge.hidden) {
      setText(badgeKind, SOURCES[source]);
      setText(badgeRest, ` · ${badgeWords(header, source)}`);
    }
    setText(known, knownHow());
    known.title = "Engine times, measured on the machine named above; speed-ups and means are computed from them.";
    const bits = header?.quantiser?.bits;
    setText(riverKey.lastChild, bits ? `layers in ${bits} bits` : "river layers");
    setText(timing, timingWords(whole));
    evenly.style.visibility = player ? "" : "hidden"; // its line is kept: a run that ends must not move what is below
    const said = Array.isArray(header?.notices) ? header.notices : [];
    notices.hidden = said.length === 0;
    if (notices.dataset.text !== said.join("\n")) {
      notices.dataset.text = said.join("\n");
      notices.replaceChildren(...said.map((notice) => el("li", {}, notice)));
    }
    const lanes = [...run.lanes.values()];
    const now = `${run.runId}/${lanes.map((lane) => lane.count).join()}/${lanes.map((lane) => Boolean(lane.end)).join()}/${isOver(run)}/${Boolean(run.header)}`;
    if (now !== headlineFor) {
      headlineFor = now;
      setText(sentence, headline(run));
    }
    setText(status, spoken || statusWords());
  }

  function statusWords() {
    if (source === "live" || source === "preview") {
      if (!player || atEnd()) return statusLine(whole);
    } else if (atEnd()) {
      return "At the end.";
    }
    return playing ? lanesDone(run) || "Playing." : "Paused.";
  }

  function drawLegend() {
    const layers = layersOf(run);
    if (rulesFor === layers) return;
    rulesFor = layers;
    rules.textContent = depthRules(layers);
    ramp.replaceChildren(...Array.from({ length: layers + 1 }, (_, depth) => el("i", { class: `cell d${depth}` })));
    setText(rampEnds[0], "0");
    setText(rampEnds[1], `${layers}`);
    legend.setAttribute("aria-label", `Colour and bar height show the exit depth, from 0 to ${layers} layers.`);
  }

  function drawInspector(dark) {
    const at = tokenOf(hovered) ? hovered : tokenOf(cursor) ? cursor : null;
    const lane = at && run.lanes.get(at.lane);
    const others = at ? [...run.lanes.values()].map((one) => (one.tokens[at.i] ? 1 : 0)).join("") : "";
    const now = `${run.runId}/${at ? `${at.lane}/${at.i}/${others}/${lane.slotsFilled}/${Boolean(lane.fidelity)}` : ""}/${dark}`;
    if (now !== inspectedFor) {
      inspectedFor = now;
      inspected.replaceChildren(...inspectorContent(run, lane, at ? tokenOf(at) : null, dark, knownHow()));
    }
    const kept = tokenOf(cursor);
    stage.classList.toggle("has-token", Boolean(kept));
    if (kept && kept !== placedFor) placer.put(inspector); // on a phone it is a sheet
    placedFor = kept;
    texts.select(at);
    if (revealing && tokenOf(cursor)) texts.reveal(cursor.lane, cursor.i);
    revealing = false;
  }

  /** Where the playhead is, for the keys' lane or for the one that is furthest. */
  function placeWords() {
    if (!player) return source === "preview" ? "" : "The time line is for runs that have ended.";
    const lane = run.lanes.get(steppedLane() ?? "") ?? null;
    if (!lane) {
      const count = Math.max(0, ...[...run.lanes.values()].map((one) => one.count));
      return `furthest lane: token ${count} of ${player.longest}`;
    }
    return `${lane.label}: token ${lane.count} of ${whole.lanes.get(lane.id).tokens.length}`;
  }

  function drawTransport(inflight) {
    const duration = player?.durationNs ?? 0;
    const work = inflight?.get(steppedLane() ?? "");
    transport.draw({
      enabled: Boolean(player),
      playing,
      atEnd: atEnd(),
      clockNs: clock,
      durationNs: duration,
      ends: player ? [...player.ends].map(([lane, at]) => [whole.lanes.get(lane)?.label ?? lane, at]) : [],
      speed,
      work: work ? `next token: layer ${work.layers} of ${work.of}` : "",
      words: placeWords(),
    });
  }

  function draw() {
    run = shownRun();
    // A lane's label and caution come with the header, which may arrive after its first token.
    const built = JSON.stringify([run.runId, Boolean(run.header), [...run.lanes.keys()]]);
    if (built !== builtFor) {
      builtFor = built;
      race.rebuild(run);
      texts.rebuild(run);
      tableLane.replaceChildren(...[...run.lanes.values()].map((lane) => el("option", { value: lane.id }, lane.label)));
    }
    stage.dataset.runState = whole.state;
    stage.dataset.source = source;
    stage.dataset.playing = String(playing);
    stage.dataset.clock = String(player ? clock : Math.max(0, ...[...run.lanes.values()].map((lane) => lane.prefillNs + lane.decodeNs)));
    stage.dataset.seq = String(whole.seq);
    const style = getComputedStyle(stage);
    const dark = theme(style);
    const partial = player && !atEnd();
    const inflight = partial ? player.inflight(clock) : null;
    const moving = playing || (source === "live" && !isFinal(whole));
    drawHead();
    drawLegend();
    race.draw(run, { theme: dark, style, cursor: hovered ?? cursor, clockNs: partial ? clock : null, inflight });
    texts.draw(run, marks, moving, cursor);
    drawInspector(dark);
    drawTransport(inflight);
    grids.draw(run, { theme: dark, how: knownHow(), moving, lane: gridLane(), cursor, hover: hovered, marks, inflight, length: player?.longest });
    memory.draw(run, whole, source === "live");
    card.draw(`${whole.runId}/${whole.state}/${Boolean(whole.header)}`);
    if (!table.hidden && !playing) drawTable();
  }

  /** The lane whose similarities and errors are shown: the cursor's, or River's, or the last. */
  function gridLane() {
    const at = hovered ?? cursor;
    if (at && run.lanes.has(at.lane)) return at.lane;
    const lanes = [...run.lanes.values()];
    return (lanes.find((lane) => lane.method === "river") ?? lanes.at(-1))?.id;
  }

  /* Table and pictures */

  function toggleTable() {
    table.hidden = !table.hidden;
    tableButton.setAttribute("aria-pressed", String(!table.hidden));
    if (cursor) tableLane.value = cursor.lane;
    drawLater();
  }

  function drawTable() {
    const lane = run.lanes.get(tableLane.value);
    const now = lane ? `${run.runId}/${lane.id}/${lane.count}/${lane.slotsFilled}` : "";
    if (tableRoot.dataset.shows === now) return;
    tableRoot.dataset.shows = now;
    tableRoot.replaceChildren(...(lane ? [gridTable(run, lane)] : []));
  }

  async function saveGrids(kind) {
    setText(failed, "");
    try {
      saveBlob(`river-grids.${kind}`, await grids.image(kind));
    } catch (error) {
      setText(failed, error.message);
    }
  }

  /* Pointer and keys */

  stage.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch" || gridsRoot.contains(event.target)) return;
    const at = texts.tokenAt(event) ?? race.tokenAt(event);
    if (at || hovered) hover(at);
  });
  stage.addEventListener("pointerleave", () => hover(null));
  stage.addEventListener("click", (event) => {
    if (gridsRoot.contains(event.target)) return;
    const at = texts.tokenAt(event) ?? race.tokenAt(event);
    if (at) toggleCursor(at);
  });
  close.addEventListener("click", clear);
  unmark.addEventListener("click", () => {
    setMarks(null);
    onMarks();
    stage.dispatchEvent(new CustomEvent("river:unmarked", { bubbles: true }));
  });
  tableLane.addEventListener("change", drawLater);

  const perform = { toggle, step, layer, edge, lock, unlock, lane: goToLane, help: () => (help.open(), true) };
  document.addEventListener("keydown", (event) => {
    const action = help.on ? keyAction(event, event.target, transport.slider) : null;
    if (action && perform[action[0]](action[1]) !== false) event.preventDefault();
  });

  document.addEventListener("visibilitychange", () => {
    ticked = null;
    drawLater();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawLater);
  new MutationObserver(drawLater).observe(document.body, { attributes: true, attributeFilter: ["class"] });

  /* What is shown */

  /** A live run that has ended gets a playhead, which stands at its end; messages may still fill holes. */
  function followLive(changed) {
    if (!changed || !isFinal(whole) || !whole.header) return;
    const stood = atEnd();
    player = createPlayer(traceOfRun(whole), whole.runId);
    if (stood) clock = player.durationNs;
    if (!speedChosen) speed = speedFor(player.durationNs);
  }

  /** Show another run from its start; nothing of the one before is left. */
  function begin(nextSource, nextId, nextRun) {
    source = nextSource;
    id = nextId;
    whole = nextRun;
    run = nextRun;
    player = null;
    clock = 0;
    playing = false;
    setMarks(null);
    clear();
  }

  function tellState(of = whole) {
    onState(of);
    stage.dispatchEvent(new CustomEvent("river:state", { detail: { state: of.state }, bubbles: true }));
  }

  function tellOpened() {
    if (id !== null && source !== "recording") earlier.set(id, { source, prompt: whole.header.prompt });
    stage.dispatchEvent(new CustomEvent("river:opened", { detail: { source, id }, bubbles: true }));
  }

  draw();

  return {
    element: stage,
    get run() {
      return run;
    },
    get whole() {
      return whole;
    },
    get source() {
      return source;
    },
    get id() {
      return id;
    },
    get how() {
      return knownHow();
    },
    get earlier() {
      return earlier;
    },
    get cursor() {
      return cursor;
    },

    /**
     * One message of a live run. The first one of a new run, which holds its header, takes the stage; later ones do not take it back from
     * a trace.
     */
    apply(message) {
      if (retired.has(message.run_id)) return;
      const next = applyMessage(live ?? newRun(), message, retired);
      const before = next === live ? live.state : null;
      if (next !== live) {
        live = next;
        begin("live", message.run_id, live);
        tellOpened();
      }
      if (whole === live) followLive(message.events.length > 0 || live.state !== before);
      if (live.state !== before) tellState(live);
      if (whole === live) drawLater();
    },

    /** Back to the live run of that id, as far as its messages have told. Returns false if it is not the one that is known here. */
    showLive(wanted) {
      if (live?.runId !== wanted || !live.header) return false;
      if (whole === live) return true;
      begin("live", wanted, live);
      followLive(true);
      tellOpened();
      tellState();
      drawLater();
      return true;
    },

    /**
     * Show a finished trace. `play` starts the film (not where motion is unwanted: then it stands at the end); `lane` and `token` keep a
     * token and stand at its moment; `at` is a moment in nanoseconds. Otherwise it stands at the end.
     */
    open(trace, { source: from = "file", id: known = null, play: wanted = false, at = null, lane = null, token = null } = {}) {
      opened += 1;
      const name = `open-${opened}`;
      const full = createPlayer(trace, name); // throws before anything is changed
      const everything = full.runAt(full.durationNs);
      everything.playback = null;
      begin(from, known, everything);
      player = createPlayer(trace, name);
      if (!speedChosen) speed = speedFor(player.durationNs);
      clock = player.durationNs;
      run = shownRun();
      if (lane !== null && whole.lanes.get(lane)?.tokens[token ?? 0]) standAt(lane, token ?? 0);
      else if (at !== null) seek(at);
      else if (wanted && !calm.matches) play();
      tellOpened();
      tellState();
      drawLater();
    },

    play,
    pause,
    setCursor(at) {
      if (at === null) clear();
      else if (whole.lanes.get(at.lane)?.tokens[at.i]) {
        if (player && !tokenOf(at)) standAt(at.lane, at.i);
        else choose(at, { speak: false });
        revealing = true;
      }
    },
    mark: setMarks,
    gridImage: (kind) => grids.image(kind),
  };
}
