// Joins the stage to Gradio: channel messages in, run state to the buttons, model progress to the pill; and to the rest
// of the page: the recordings of the Watch tab, links, files that are dropped or saved.

import { createChannel } from "./channel.js";
import { createPlacer } from "./frame.js";
import { el, setText } from "./inspector.js";
import { linkTo, placeOf, readLink } from "./link.js";
import { createNote } from "./note.js";
import { createFollower, createMemo } from "./place.js";
import { saveText } from "./save.js";
import { createStage } from "./stage.js";
import { packTraceFile } from "./upload.js";
import { createWatch } from "./watch.js";

const MODEL_POLL_MS = 400;
const DRAG_OVER_MS = 200; // a drag over the page reports itself at least this often
const RECORDING = "recording:";
const NO_SERVER = "There is no connection to the server.";
const FILE_TYPES = { json: "application/json", csv: "text/csv", html: "text/html" };

/** Called once by gr.HTML's js_on_load with the tools that Gradio hands it. */
function connect({ element, props, server, trigger, watch }) {
  const app = element.closest(".gradio-container") ?? document.body;
  const button = (id) => app.querySelector(`#${id}`);
  const placer = createPlacer();
  const note = createNote(element.querySelector(".page-note"), placer.put);
  const followAddress = createFollower(addressOf, (url) => url !== location.href && history.replaceState(history.state, "", url));
  const stage = createStage(element.querySelector(".stage-root"), {
    placer,
    onCursor: followAddress,
    onEscape: stopByKey,
    actions: [
      keep("json", "Download trace", "The open run as a JSON file, which this page can open again"),
      keep("csv", "Token table", "Every token of every lane as a CSV file"),
      keep("html", "Download replay", "One .html file that plays this run anywhere, without a network"),
      { name: "link", label: "Copy link", title: "A link to this recording, at the locked token", run: copyLink },
    ],
  });
  const list = createWatch(el("div", { class: "watch" }), { pick: (slug) => openRecording(slug), own: tryOwn, last: () => channel.showLive(), file: openFile });
  const texts = new Map(); // recordings that were fetched, by slug
  let opening = 0; // grows with everything that takes the stage, so that a slow answer cannot take it back
  const channel = createChannel({
    stage,
    ask,
    memo: createMemo(() => sessionStorage),
    on: { show: showState, say, note: (words) => note.show(words ?? NO_SERVER), select, taken: () => ++opening, turn: () => opening },
    wait: sleepMs,
  });

  function showState({ state, active, lastRun }) {
    app.dataset.runState = state;
    button("run")?.setAttribute("aria-disabled", String(active));
    button("stop")?.setAttribute("aria-disabled", String(!active || state === "stopping"));
    list.lastRun(lastRun);
  }

  function say(words, state = "") {
    const line = button("run-line");
    if (!line) return;
    line.dataset.state = state;
    line.hidden = !words;
    setText(line, words);
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
  function addressOf() {
    const slug = openSlug();
    const named = slug !== null && (stage.cursor !== null || readLink(location.search)?.slug === slug);
    return linkTo(location.href, named ? slug : null, stage.cursor, { keep: true });
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

  /** The Run tab, filled in as the open trace was made. */
  async function tryOwn() {
    const { id, source } = stage;
    select("run");
    const box = await mounted(app, "#prompt textarea");
    if (id !== null && source !== "live") trigger("own", { id });
    box.focus({ preventScroll: true });
  }

  function pressed() {
    if (!channel.press()) return false;
    stage.pause();
    say("");
    return true;
  }

  /** Esc without a kept token; everything that has a use of its own for the key has had it before. */
  function stopByKey() {
    if (!channel.active || !channel.showsLive) return false;
    button("stop")?.click();
    return true;
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
    const { id: earlier, here } = channel.earlier();
    const asked = [ask("recordings"), link || !earlier ? ask("recording", link?.slug ?? "") : null, earlier ? ask("snapshot", earlier) : null];
    const turn = opening;
    asked[0].then((recordings) => {
      list.list(recordings ?? []);
      list.current(stage.id);
    });
    const snapshot = await asked[2];
    if (snapshot && !link && here) return channel.resume(earlier, snapshot);
    if (earlier && !snapshot) channel.forget();
    let text = await (asked[1] ?? ask("recording", ""));
    if (turn === opening) {
      const unknown = link && text === null;
      if (unknown) text = await ask("recording", "");
      if (text && turn === opening) showRecording(text, unknown ? {} : { link });
      if (unknown) note.show("The link names a recording that this page does not have, so the first one is shown.");
    }
    if (snapshot) channel.follow(snapshot);
  }

  stage.element.river = stage; // how the Analyse tab, a component of its own, finds the stage
  stage.element.addEventListener("river:opened", () => {
    list.current(stage.id);
    followAddress();
    channel.show();
  });
  watch("value", () => channel.take(props.value));
  channel.take(props.value);
  channel.show();
  // Before Gradio hears of it: a press that is not meant as one goes no further, and every other one counts.
  app.addEventListener("click", (event) => event.target.closest("#run") && !pressed() && refuse(event), { capture: true });
  app.addEventListener("click", (event) => event.target.closest("#stop[aria-disabled=true]") && refuse(event), { capture: true });
  app.addEventListener("keydown", (event) => submits(event) && !pressed() && refuse(event), { capture: true });
  app.addEventListener("click", (event) => {
    if (event.target.closest("#run-tab-button")) mounted(app, "#stop").then(channel.show);
  });
  addEventListener("pagehide", channel.left);
  addEventListener("pageshow", (event) => event.persisted && channel.back());
  mounted(app, "#watch").then((panel) => panel.replaceChildren(list.element));
  takeDrops(openFile, placer);
  begin();
  followModel();
  element.dataset.ready = "true";
}

/** Whether a key press is one that Gradio takes for a press of Run. */
function submits(event) {
  if (event.key !== "Enter" || event.isComposing || !event.target.closest("#prompt, #more")) return false;
  return event.target.matches("input") || event.shiftKey || event.target.rows === 1;
}

function refuse(event) {
  event.stopImmediatePropagation();
  event.preventDefault();
}

/** Files dropped anywhere on the page go to `open`; while one is dragged over it the page says what a drop would do. */
function takeDrops(open, placer) {
  const words = el("b", {}, "Drop a trace file (.json or .json.gz) to open it");
  const hint = el("div", { class: "drop-hint", hidden: "" }, words);
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
    placer.put(words, event.clientY);
    clearTimeout(timer);
    timer = setTimeout(hide, DRAG_OVER_MS);
  });
  document.addEventListener("drop", (event) => {
    if (!carriesFile(event)) return;
    hide();
    if (event.target.closest?.("input[type=file]")) return; // it is meant for that one
    event.preventDefault();
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
