// The Analyse tab: one view at a time, above the stage, so that what is brushed here can be seen marked there.

import { el } from "../stage/inspector.js";
import { saveText } from "../stage/save.js";
import { isFinal } from "../stage/store.js";
import { packTraceFile } from "../stage/upload.js";
import { compareContent } from "./compare.js";
import { marksLine, tokensAtDepth, tokensOf } from "./marks.js";
import { clearFigure, drawFigure } from "./plot.js";
import { applySweep, noSweep, sweepControls, sweeping } from "./sweep.js";

const VIEWS = [
  ["exit-depths", "Exit depths"],
  ["latency", "Time per token"],
  ["similarity", "Similarity"],
  ["memory", "Memory"],
  ["tokens", "Token table"],
  ["sweep", "Sweep"],
  ["compare", "Compare traces"],
];
const CHART_VIEWS = ["exit-depths", "latency", "similarity", "memory"];
const BRUSHED = ["exit-depths", "latency"];
const PANEL_WIDTH = 380; // px that a small multiple needs
const DOUBLE_MS = 1000;
const NOT_FINISHED = "The charts appear when the run has ended.";
const NOT_OPEN = "Nothing is open yet. Open a recording in Watch, or make a run.";
const LOST = "There is no connection to the server.";

/** Whether an element is shown; older browsers do not say so themselves. */
function inView(element) {
  return element.checkVisibility?.() ?? element.getClientRects().length > 0;
}

/** Called once by gr.HTML's js_on_load with the tools that Gradio hands it. */
function connectAnalysis({ element, props, server, trigger, watch }) {
  const app = element.closest(".gradio-container") ?? document.body;
  const river = () => app.querySelector(".stage")?.river ?? null;
  let view = VIEWS[0][0];
  let held = { id: null, columns: 0, charts: new Map() }; // figures of the trace that is open
  let asking = 0; // grows with every question, so that a slow answer cannot replace a newer one
  let controlsFor = null; // the trace that the controls were last set for
  let comparing = 0; // ... and with every comparison
  let marks = new Map();
  let sweep = noSweep();
  let swept = -Infinity; // when the last one was asked for
  let result = []; // charts of the last sweep, or of a saved result
  let diff = null;
  let diffLane = null;
  let drawn = Promise.resolve(); // one drawing after another

  /* The parts */

  const what = el("p", { class: "an-what" });
  const buttons = VIEWS.map(([name, label]) =>
    el("button", { type: "button", role: "tab", id: `an-tab-${name}`, "aria-controls": "an-view", "data-view": name }, label),
  );
  const tabs = el("div", { class: "an-tabs", role: "tablist", "aria-label": "What is analysed" }, ...buttons);

  const title = el("h2");
  const tag = el("span", { class: "an-tag" });
  const note = el("p", { class: "an-note" });
  const plot = el("div", { class: "an-plot" });
  const from = el("input", { type: "number", min: "0", step: "1", value: "0", "aria-label": "from layer" });
  const to = el("input", { type: "number", min: "0", step: "1", value: "0", "aria-label": "to layer" });
  const marked = el("p", { class: "an-line", role: "status", "aria-live": "polite" });
  const unmark = el("button", { type: "button", hidden: "" }, "Clear the marks");
  const brush = el(
    "form",
    { class: "an-controls an-brush" },
    el("span", {}, "Mark tokens that left at layer "),
    from,
    el("span", {}, " to "),
    to,
    el("button", { type: "submit" }, "Mark"),
    marked,
    unmark,
  );
  const chartPart = el("section", { class: "an-part" }, el("header", {}, title, tag), note, plot, brush);

  const laneChoice = el("select", { id: "an-table-lane" });
  const csv = el("button", { type: "button" }, "Download all tokens (CSV)");
  const tableLine = el("p", { class: "an-line", role: "status" });
  const tablePart = el(
    "section",
    { class: "an-part" },
    el("div", { class: "an-controls" }, el("label", { class: "an-field" }, "Lane ", laneChoice), csv, tableLine),
  );

  const sweepPrompt = el("p", { class: "an-prompt" });
  const controls = sweepControls({ start: startSweep, stop: () => trigger("sweep_stop"), save: saveSweep, open: openResult });
  const resultRoot = el("div", { class: "an-results" });
  const sweepPart = el(
    "section",
    { class: "an-part" },
    el("p", { class: "an-note" }, "Every method at every threshold is a lane of one run on the engine; all of them read the text that the backbone writes to the prompt of the open trace:"),
    sweepPrompt,
    controls.element,
    resultRoot,
  );

  const other = el("select", { id: "an-other" });
  const otherFile = el("input", { type: "file", accept: ".json,.gz,application/json,application/gzip", class: "an-file", "aria-label": "Trace file for B" });
  const compareLine = el("p", { class: "an-line", role: "status" });
  const compared = el("div", { class: "an-compared" });
  const comparePart = el(
    "section",
    { class: "an-part" },
    el(
      "div",
      { class: "an-controls" },
      el("span", {}, "A is what is open below. "),
      el("label", { class: "an-field" }, "B ", other),
      el("label", { class: "an-field" }, el("span", { class: "an-nowrap" }, "or a file "), otherFile),
      compareLine,
    ),
    compared,
  );

  const parts = [chartPart, tablePart, sweepPart, comparePart];
  for (const one of parts) one.hidden = true; // until it is known what there is to show
  const panel = el("div", { class: "an-view", id: "an-view", role: "tabpanel" }, ...parts);
  element.querySelector(".analysis").replaceChildren(what, tabs, panel);

  /* What is open */

  const seen = () => inView(element);
  const finished = (stage) => stage.source !== "live" || isFinal(stage.whole ?? stage.run);
  const wholeOf = (stage) => stage.whole ?? stage.run;
  const labelsOf = (stage) => new Map([...wholeOf(stage).lanes.values()].map((lane) => [lane.id, lane.label]));

  /** Words for a stage whose trace cannot be analysed yet; null if it can. */
  function obstacle(stage) {
    if (!stage || stage.source === "preview") return NOT_OPEN;
    if (!finished(stage)) return NOT_FINISHED;
    return stage.id ? null : NOT_OPEN;
  }

  /** Gradio answers undefined, or throws, when the server cannot be reached. */
  async function ask(name, argument = null) {
    const answer = await server[name](argument).catch(() => undefined);
    if (!answer) return { error: LOST };
    return answer;
  }

  /** Follow the stage: called when something else is open there, and when this tab is seen. */
  async function refresh() {
    const stage = river();
    if (!seen()) return;
    const words = obstacle(stage);
    const name = stage && wholeOf(stage).header;
    what.textContent = words ?? `Of ${sourceWords(stage, name)}.`;
    panel.hidden = view !== "sweep" && (words !== null || held.id === null);
    if (words) {
      held = { id: null, columns: 0, charts: new Map() };
      return show();
    }
    const columns = Math.max(1, Math.min(3, Math.floor(element.clientWidth / PANEL_WIDTH)));
    if (held.id === stage.id && held.columns === columns) return show();
    const turn = ++asking;
    const changed = held.id !== stage.id;
    if (controlsFor !== stage.id) {
      controlsFor = stage.id;
      diff = null;
      compared.replaceChildren();
      compareLine.textContent = "";
      setMarks(new Map(), { tell: false });
      to.value = String(name.model.n_layers);
      to.max = from.max = to.value;
      laneChoice.replaceChildren(...[["", "all lanes"], ...labelsOf(stage)].map(([id, label]) => el("option", { value: id }, label)));
      tableLine.textContent = "";
    }
    const answer = await ask("charts", { id: stage.id, columns });
    if (turn !== asking) return;
    if (answer.error) {
      what.textContent = answer.error;
      panel.hidden = true;
      return;
    }
    held = { id: stage.id, columns, charts: new Map(answer.charts.map((entry) => [entry.name, { ...entry, figure: JSON.parse(entry.figure) }])) };
    element.dataset.trace = stage.id;
    panel.hidden = false;
    show();
    if (view === "tokens" && changed) fillTable();
    if (view === "compare") fillOthers();
  }

  function sourceWords(stage, header) {
    const kind = { recording: "the recording", file: "the opened file", live: "your run", replay: "the replay" }[stage.source];
    const title = header.recording?.title;
    return `${kind} ${title ? `“${title}”` : ""} on ${header.model.name}, ${header.device_name ?? header.device}`.replace(/\s+/g, " ");
  }

  /* Views */

  function show() {
    for (const button of buttons) {
      const here = button.dataset.view === view;
      button.setAttribute("aria-selected", String(here));
      button.tabIndex = here ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `an-tab-${view}`);
    const part = CHART_VIEWS.includes(view) ? chartPart : { tokens: tablePart, sweep: sweepPart, compare: comparePart }[view];
    for (const one of parts) one.hidden = one !== part;
    const stage = river();
    const open = held.id !== null;
    // The table is a component of Gradio's, beside this one.
    app.dataset.analysis = open ? view : "";
    brush.hidden = !BRUSHED.includes(view);
    if (part === chartPart && open) showChart();
    if (part === sweepPart) {
      sweepPrompt.textContent = (stage && !obstacle(stage) && wholeOf(stage).header?.prompt) || NOT_OPEN;
      drawResult();
    }
  }

  function showChart() {
    const entry = held.charts.get(view);
    title.textContent = entry?.title ?? VIEWS.find(([name]) => name === view)[1];
    // What was measured when the trace was made is recorded here, as the stage calls it.
    tag.textContent = entry?.tag === "measured" ? (river()?.how ?? "measured") : (entry?.tag ?? "");
    tag.hidden = !entry;
    note.textContent = entry?.note ?? "This trace does not hold what the chart is made of: it was not recorded.";
    plot.hidden = !entry;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", title.textContent);
    if (entry) draw(plot, entry, view);
  }

  function draw(root, entry, name) {
    const figure = entry.figure;
    const now = () => root.isConnected && inView(root) && (root !== plot || (view === name && held.charts.get(name) === entry));
    drawn = drawn
      .then(async () => {
        if (!now()) return;
        if (root.dataset.chart !== name) clearFigure(root);
        root.style.minHeight = `${figure.layout.height}px`;
        await drawFigure(props.plotly, root, figure, root === plot && BRUSHED.includes(name));
        root.dataset.chart = name;
        if (root === plot) listen(root);
      })
      .catch((error) => {
        note.textContent = `The chart could not be drawn: ${error.message}`;
      });
  }

  /** Plotly's events are lost when a chart is purged, so that they are asked for at every drawing, once each. */
  function listen(root) {
    for (const name of ["plotly_selected", "plotly_deselect", "plotly_click"]) root.removeAllListeners(name);
    root.on("plotly_selected", (event) => event && setMarks(tokensOf(event.points)));
    root.on("plotly_deselect", () => setMarks(new Map()));
    root.on("plotly_click", (event) => {
      const point = event.points[0];
      const lane = point?.data.meta?.lane;
      if (view === "latency" && lane !== undefined) river()?.setCursor({ lane, i: point.customdata[0] });
    });
  }

  function choose(name, { focus = false } = {}) {
    view = name;
    if (focus) buttons.find((button) => button.dataset.view === name).focus();
    refresh();
    if (name === "tokens") fillTable();
    if (name === "compare") fillOthers();
  }

  tabs.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose(button.dataset.view);
  });
  tabs.addEventListener("keydown", (event) => {
    const at = VIEWS.findIndex(([name]) => name === view);
    const target = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: VIEWS.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    event.stopPropagation(); // the arrows are the stage's elsewhere on the page
    choose(VIEWS[(target + VIEWS.length) % VIEWS.length][0], { focus: true });
  });

  /* Marks */

  function setMarks(next, { tell = true } = {}) {
    marks = next;
    const stage = river();
    if (tell) stage?.mark(marks.size ? marks : null);
    marked.textContent = stage ? marksLine(marks, labelsOf(stage)) : "";
    unmark.hidden = marks.size === 0;
  }

  brush.addEventListener("submit", (event) => {
    event.preventDefault();
    const stage = river();
    if (!stage) return;
    const [low, high] = [Number(from.value), Number(to.value)].sort((a, b) => a - b);
    setMarks(tokensAtDepth(wholeOf(stage), low, high));
    if (!marks.size) marked.textContent = "No token left there.";
  });
  /** Take the brush out of the chart that is shown. */
  function unbrush() {
    if (plot.dataset.chart) window.Plotly.update(plot, { selectedpoints: [null] }, { selections: [] });
  }

  unmark.addEventListener("click", () => {
    setMarks(new Map());
    unbrush();
  });

  /* Table */

  function fillTable() {
    app.querySelector("#analysis-table .search-input")?.setAttribute("aria-label", "Search the tokens");
    if (held.id !== null) trigger("tokens", { id: held.id, lane: laneChoice.value });
  }

  laneChoice.addEventListener("change", fillTable);
  csv.addEventListener("click", async () => {
    const answer = await ask("table_csv", { id: held.id });
    tableLine.textContent = answer.error ?? "";
    if (!answer.error) saveText(answer.name, answer.text, "text/csv");
  });

  /* Sweep */

  function startSweep(settings) {
    const stage = river();
    const words = obstacle(stage);
    if (words) return controls.say(words);
    if (performance.now() - swept < DOUBLE_MS) return; // the second half of a double click
    swept = performance.now();
    trigger("sweep", { id: stage.id, ...settings });
  }

  function takeSweep(text) {
    if (!text) return;
    const before = sweep;
    sweep = applySweep(sweep, JSON.parse(text));
    controls.show(sweep);
    element.dataset.sweep = sweep.state;
    if (!sweeping(sweep)) swept = -Infinity; // what is pressed now is meant
    if (sweep.charts && sweep.charts !== before.charts) setResult(sweep.charts);
  }

  function saveSweep() {
    saveText("river-sweep.json", JSON.stringify(sweep.points, null, 1), "application/json");
  }

  async function openResult(file) {
    if (file.size > props.limits.result) {
      controls.say(`${file.name} is larger than ${props.limits.result >> 20} MB, which no result is.`);
      return;
    }
    const answer = await ask("saved_result", await file.text());
    if (!sweeping(sweep)) controls.say(answer.error ? `${file.name} was not opened. ${answer.error}` : `Shown is ${file.name}.`);
    if (!answer.error) setResult(answer.charts);
  }

  function setResult(charts) {
    result = charts.map((entry) => ({ ...entry, figure: JSON.parse(entry.figure), root: el("div", { class: "an-plot", role: "group", "aria-label": entry.title }) }));
    resultRoot.replaceChildren(
      ...result.map((entry) =>
        el(
          "section",
          { class: "an-result" },
          el("header", {}, el("h2", {}, entry.title), el("span", { class: "an-tag" }, entry.tag)),
          el("p", { class: "an-note" }, entry.note),
          entry.root,
        ),
      ),
    );
    if (view === "sweep") drawResult();
  }

  function drawResult() {
    for (const entry of result) draw(entry.root, entry, entry.name);
  }

  /* Compare */

  async function fillOthers() {
    const known = await ask("recordings");
    const recorded = known.error ? [] : known;
    const own = [...(river()?.earlier ?? [])].map(([id, { source, prompt }]) => [id, `${source === "file" ? "File" : "Run"}: ${prompt.replace(/\s+/g, " ").slice(0, 48)}`]);
    const options = [...recorded, ...own].filter(([id]) => id !== river()?.id);
    const choice = other.value;
    other.replaceChildren(el("option", { value: "" }, "choose a trace"), ...options.map(([id, label]) => el("option", { value: id }, label)));
    other.value = options.some(([id]) => id === choice) ? choice : "";
  }

  async function compare(question) {
    const turn = ++comparing;
    const a = river()?.id ?? null; // also while its charts are still on their way
    compareLine.textContent = "Comparing.";
    const answer = await ask("compare_with", { a, ...question });
    if (turn !== comparing || a !== river()?.id) return;
    compareLine.textContent = answer.error ?? "";
    if (!answer.diff) return; // what was compared before stays
    diff = answer.diff;
    diffLane = diff.lanes.some((lane) => lane.id === "river") ? "river" : null;
    showDiff();
  }

  function showDiff() {
    compared.replaceChildren(
      ...(diff
        ? compareContent(diff, diffLane, (lane) => {
            diffLane = lane;
            showDiff();
            compared.querySelector("select").focus();
          })
        : []),
    );
  }

  other.addEventListener("change", () => other.value && compare({ b: other.value }));
  otherFile.addEventListener("change", async () => {
    const file = otherFile.files[0];
    if (!file) return;
    try {
      await compare({ file: await packTraceFile(file, props.limits) });
    } catch (error) {
      compareLine.textContent = error.message;
    }
    otherFile.value = "";
  });

  /* The page around */

  const later = () => void refresh();
  app.addEventListener("river:opened", later);
  app.addEventListener("river:state", later);
  app.addEventListener("river:unmarked", () => {
    setMarks(new Map(), { tell: false });
    unbrush();
  });
  new ResizeObserver(later).observe(element);
  new MutationObserver(later).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  watch("value", () => takeSweep(props.value));
  ask("sweep_start").then((settings) => !settings.error && controls.fill(settings));
  controls.show(sweep);
  refresh();
  element.dataset.ready = "true";
}
