// The live view of a run: race, coloured text, inspector. It knows nothing of Gradio; whoever has messages (the page,
// or a replay) calls `apply`. Drawing happens once a frame, from the store, whatever the number of messages.

import { css, depthColour, depthRules } from "./ramp.js";
import { el, inspectorContent, tokenSentence } from "./inspector.js";
import {
  applyMessage,
  firstDifference,
  isFinal,
  laneStatus,
  layersOf,
  meanDepth,
  previewRun,
  speed,
  speedUp,
  statusLine,
  textVerdict,
  timeSpan,
  timingWords,
} from "./store.js";

const DASH = "–";
const METRICS = [
  ["speed", "tokens/s", "Tokens after the first, over their engine time"],
  ["ratio", "speed-up", "Times the backbone's tokens/s in this run"],
  ["depth", "backbone layers", "Mean number of backbone layers per token"],
  ["count", "tokens", "Tokens written"],
  ["time", "seconds", "Engine time of this lane, prefill included"],
];
const RIBBON_CELLS = 34; // px of height for the cells; the rest of the canvas carries the token counts
const COUNT_EVERY = [8, 16, 32, 64, 128, 256, 512];
const PIECES_SHOWN = 600;

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function metricsOf(run, lane) {
  const rate = speed(lane);
  const ratio = speedUp(run, lane);
  const depth = meanDepth(lane);
  return {
    speed: rate ? rate.toFixed(1) : DASH,
    ratio: ratio ? `${ratio.toFixed(2)}×` : DASH,
    depth: depth === null ? DASH : depth.toFixed(1),
    count: lane.count ? String(lane.count) : DASH,
    time: lane.count ? ((lane.prefillNs + lane.decodeNs) / 1e9).toFixed(2) : DASH,
  };
}

/** The text of a token as nodes: a line break gets a faint mark before it and stays a real break. */
function tokenNodes(text) {
  const nodes = [];
  text.split("\n").forEach((line, at) => {
    if (at > 0) nodes.push(el("i", { class: "nl", "aria-hidden": "true" }), "\n");
    if (line) nodes.push(line);
  });
  return nodes;
}

/** One lane's share of the page: a row of the race and a column of text. */
function laneView(lane, index) {
  const view = { id: lane.id, spans: [], marked: -1, ends: [] };
  view.metrics = Object.fromEntries(METRICS.map(([name]) => [name, el("b", {}, DASH)]));
  view.status = el("span", { class: "lane-status" });
  view.canvas = el("canvas", { class: "ribbon", "aria-hidden": "true" });
  view.row = el(
    "div",
    { class: "lane", "data-lane": lane.id },
    el(
      "div",
      { class: "lane-name" },
      el("div", { class: "lane-head" }, el("h3", {}, lane.label), view.status),
      el("p", {}, lane.about),
    ),
    view.canvas,
    el(
      "dl",
      { class: "metrics" },
      ...METRICS.map(([name, label, title]) =>
        el("div", { class: `metric metric-${name}`, title }, el("dt", {}, label), el("dd", {}, view.metrics[name])),
      ),
    ),
  );
  view.verdict = el("span", { class: "verdict" });
  view.text = el("div", {
    class: "text",
    tabindex: "0",
    role: "group",
    "data-lane": lane.id,
    "data-index": String(index),
    "aria-label": `Text of ${lane.label}. Arrow keys walk from token to token.`,
  });
  view.column = el(
    "article",
    { class: "column", "data-lane": lane.id },
    el("header", {}, el("h3", {}, lane.label), view.verdict),
    lane.untrainedHead ? el("p", { class: "caution", title: lane.note }, "⚠ answers from an untrained head: expect poor text") : null,
    view.text,
  );
  return view;
}

/**
 * Build the stage inside `root`.
 *
 * Returns `apply(message)` for one message of the channel, `reset()` for the view before any run, and `run`, the store
 * as it stands. `onState(run)` is called whenever a message changed the run's state.
 */
export function createStage(root, { onState = () => {} } = {}) {
  let run = previewRun();
  let retired = new Set();
  let views = new Map();
  let locked = null; // the token that a click or a key chose: { lane, i }
  let hovered = null; // the token under the pointer, which goes before the locked one
  let shown = ""; // which token the inspector shows
  let rulesFor = 0;
  let frame = 0;

  const rules = el("style");
  const status = el("p", { class: "status", role: "status", "aria-live": "polite" });
  const notices = el("ul", { class: "notices", hidden: "" });
  const timing = el("span", { class: "timing" });
  const keyEntry = (kind, words) =>
    el("span", {}, el("i", { class: `key-${kind}`, "aria-hidden": "true" }), words);
  const key = el(
    "span",
    { class: "key" },
    keyEntry("backbone", "backbone layers"),
    keyEntry("river", "layers in 4 bits"),
    keyEntry("prefill", "prefill"),
  );
  const rows = el("div", { class: "lanes" });
  const axis = el("div", { class: "axis", "aria-hidden": "true" });
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
  const promptLine = el("p", { class: "prompt-text", tabindex: "0" });
  const pieces = el("div", { class: "pieces", tabindex: "0" });
  const piecesTitle = el("summary");
  const prompt = el(
    "div",
    { class: "prompt", hidden: "" },
    promptLine,
    el("details", {}, piecesTitle, pieces),
  );
  const columns = el("div", { class: "columns" });
  const inspected = el("div", { class: "inspected" });
  const close = el("button", { class: "close", type: "button", "aria-label": "Close the token card" }, "×");
  const inspector = el("aside", { class: "inspector", tabindex: "0", "aria-label": "Token" }, close, inspected);
  const stage = el(
    "div",
    { class: "stage" },
    rules,
    status,
    notices,
    el(
      "section",
      { class: "race", "aria-label": "Race" },
      el("header", {}, el("h2", {}, "Race"), el("span", { class: "tag" }, "measured"), timing, key),
      rows,
      axis,
    ),
    legend,
    el("section", { class: "reading", "aria-label": "Texts" }, prompt, columns, inspector),
  );
  root.replaceChildren(stage);

  const theme = () => (getComputedStyle(stage).getPropertyValue("--stage-theme").trim() === "dark" ? "dark" : "light");

  function drawLater() {
    // A hidden page gets no frames; everything is in the store and is drawn when it is seen again.
    if (!frame && !document.hidden) frame = requestAnimationFrame(draw);
  }

  function rebuildLanes() {
    views = new Map([...run.lanes.values()].map((lane, index) => [lane.id, laneView(lane, index)]));
    rows.replaceChildren(...[...views.values()].map((view) => view.row));
    columns.replaceChildren(...[...views.values()].map((view) => view.column));
    columns.style.setProperty("--columns", String(views.size));
    for (const view of views.values()) resized.observe(view.canvas);
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

  function drawPrompt() {
    prompt.hidden = !run.header;
    if (!run.header) return;
    if (promptLine.dataset.run === run.runId) return;
    promptLine.dataset.run = run.runId;
    promptLine.textContent = run.header.prompt;
    const all = run.header.prompt_pieces ?? [];
    setText(piecesTitle, `${run.header.prompt_ids.length} tokens as the model reads them`);
    pieces.replaceChildren(
      ...all.slice(0, PIECES_SHOWN).map((piece) => el("span", { class: "piece" }, ...tokenNodes(piece))),
      ...(all.length > PIECES_SHOWN ? [` … and ${all.length - PIECES_SHOWN} more`] : []),
    );
  }

  function drawText(view, lane) {
    const follow = view.text.scrollHeight - view.text.scrollTop - view.text.clientHeight < 32;
    let added = false;
    for (let i = lane.tokens.length - 1; i >= 0; i -= 1) {
      const token = lane.tokens[i];
      if (!token) continue;
      if (view.spans[i]) {
        if (view.complete > i) break;
        continue;
      }
      const span = el("span", { class: `tok d${token.exit_layer}`, "data-i": String(i) }, ...tokenNodes(token.text));
      if (token.text === "") span.classList.add("part");
      if (token.fidelity && !token.fidelity.agrees) span.classList.add("other");
      let next = i + 1;
      while (next < view.spans.length && !view.spans[next]) next += 1;
      view.text.insertBefore(span, view.spans[next] ?? null);
      view.spans[i] = span;
      added = true;
    }
    view.complete = lane.count === lane.tokens.length ? lane.count : 0;
    const differs = firstDifference(run, lane);
    if (differs !== view.marked) {
      view.spans[view.marked]?.classList.remove("differs");
      view.spans[differs]?.classList.add("differs");
      view.marked = differs;
    }
    const rest = lane.end?.rest; // characters that no token completed, such as half an emoji
    if (rest && !view.rest) {
      view.rest = el("span", { class: "rest" }, rest);
      view.text.append(view.rest);
    }
    if (added && follow) view.text.scrollTop = view.text.scrollHeight;
  }

  function drawRibbon(view, lane, span) {
    const canvas = view.canvas;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width || !height) return;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const ctx = canvas.getContext("2d");
    const style = getComputedStyle(stage);
    const dark = theme();
    const layers = layersOf(run);
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.fillStyle = style.getPropertyValue("--track");
    ctx.fillRect(0, RIBBON_CELLS - 1, width, 1);
    const perNs = width / (span * 1e9);
    const every = COUNT_EVERY.find((step) => (step * lane.decodeNs * perNs) / Math.max(1, lane.decoded) > 44) ?? 1024;
    const muted = style.getPropertyValue("--muted");
    const riverColour = style.getPropertyValue("--river-layers");
    ctx.font = "10px system-ui, sans-serif";
    ctx.textAlign = "center";
    view.ends = [];
    let at = 0;
    for (const token of lane.tokens) {
      if (!token) continue;
      const x = at * perNs;
      at += token.t_ns;
      const w = at * perNs - x;
      view.ends.push([at, token.i]);
      if (token.from_prefill) {
        ctx.fillStyle = style.getPropertyValue("--prefill");
        ctx.fillRect(x, RIBBON_CELLS * 0.5, Math.max(1, w - 1), RIBBON_CELLS * 0.5 - 1);
        continue;
      }
      // One column is one token: its width is its time, its foot the backbone layers, the rest the layers in 4 bits.
      const share = token.exit_layer / layers;
      const foot = RIBBON_CELLS * share;
      const river = (RIBBON_CELLS * token.river_layers) / layers;
      const wide = Math.max(0.6, w > 3 ? w - 0.75 : w);
      ctx.fillStyle = riverColour;
      ctx.fillRect(x, RIBBON_CELLS - foot - river, wide, river);
      ctx.fillStyle = css(depthColour(0.3 + 0.7 * share, dark)); // the ramp's palest third would drown beside the river's
      ctx.fillRect(x, RIBBON_CELLS - foot, wide, foot);
      if ((token.i + 1) % every === 0) {
        ctx.fillStyle = muted;
        ctx.fillRect(at * perNs - 0.5, RIBBON_CELLS + 1, 1, 3);
        ctx.fillText(String(token.i + 1), Math.min(at * perNs, width - 10), height - 1);
      }
    }
  }

  function drawAxis(span) {
    const digits = span < 2 ? 2 : 1;
    const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => `${(span * share).toFixed(share ? digits : 0)} s`);
    if (axis.dataset.marks === marks.join()) return;
    axis.dataset.marks = marks.join();
    axis.replaceChildren(...marks.map((mark) => el("span", {}, mark)));
  }

  function current() {
    const at = hovered ?? locked;
    const lane = at && run.lanes.get(at.lane);
    return lane?.tokens[at.i] ? { lane, token: lane.tokens[at.i] } : null;
  }

  function drawInspector() {
    const at = current();
    const key = `${run.runId}/${at ? `${at.lane.id}/${at.token.i}` : ""}/${theme()}`;
    if (key !== shown) {
      shown = key;
      inspected.replaceChildren(...inspectorContent(run, at?.lane, at?.token, theme()));
    }
    stage.classList.toggle("has-token", Boolean(locked && current()));
    for (const span of stage.querySelectorAll(".tok.selected")) span.classList.remove("selected");
    if (at) views.get(at.lane.id)?.spans[at.token.i]?.classList.add("selected");
  }

  function draw() {
    frame = 0;
    const ids = [...run.lanes.keys()];
    const known = [...views.keys()];
    // A lane's label and caution come with the header, which may arrive after its first token.
    const built = `${run.runId}/${run.header ? "with" : "without"} header`;
    if (ids.join("\n") !== known.join("\n") || views.built !== built) {
      rebuildLanes();
      views.built = built;
    }
    stage.dataset.runState = run.state;
    stage.dataset.seq = String(run.seq);
    setText(status, statusLine(run));
    const said = run.header?.notices ?? [];
    notices.hidden = said.length === 0;
    if (notices.dataset.text !== said.join("\n")) {
      notices.dataset.text = said.join("\n");
      notices.replaceChildren(...said.map((notice) => el("li", {}, notice)));
    }
    setText(timing, timingWords(run));
    drawLegend();
    drawPrompt();
    const span = timeSpan(run);
    drawAxis(span);
    for (const lane of run.lanes.values()) {
      const view = views.get(lane.id);
      const words = laneStatus(run, lane);
      setText(view.status, words);
      view.row.dataset.laneState = words.split(":")[0] || "idle";
      view.text.setAttribute("aria-busy", String(!isFinal(run) && run.state !== "idle" && !lane.end));
      const metrics = metricsOf(run, lane);
      for (const [name] of METRICS) setText(view.metrics[name], metrics[name]);
      setText(view.verdict, textVerdict(run, lane));
      view.verdict.classList.toggle("differs", firstDifference(run, lane) >= 0);
      drawText(view, lane);
      drawRibbon(view, lane, span);
    }
    drawInspector();
  }

  function choose(laneId, i, { lock, speak = false }) {
    const lane = run.lanes.get(laneId);
    if (!lane?.tokens[i]) return;
    if (lock) locked = { lane: laneId, i };
    hovered = lock ? null : { lane: laneId, i };
    drawInspector();
    if (speak) {
      const span = views.get(laneId).spans[i];
      span?.scrollIntoView({ block: "nearest" });
      status.textContent = tokenSentence(run, lane, lane.tokens[i]);
    }
  }

  function clear() {
    locked = null;
    hovered = null;
    drawInspector();
  }

  function tokenUnder(event) {
    const span = event.target.closest?.(".tok");
    const text = span?.closest(".text");
    return text ? { lane: text.dataset.lane, i: Number(span.dataset.i) } : null;
  }

  function tokenInRibbon(event) {
    const canvas = event.target.closest?.(".ribbon");
    const id = canvas?.closest(".lane").dataset.lane;
    const view = id && views.get(id);
    if (!view) return null;
    const at = (event.offsetX / canvas.clientWidth) * timeSpan(run) * 1e9;
    const found = view.ends.find(([end]) => end >= at);
    return found ? { lane: id, i: found[1] } : null;
  }

  stage.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    const at = tokenUnder(event) ?? tokenInRibbon(event);
    if (at) {
      if (hovered?.lane !== at.lane || hovered?.i !== at.i) choose(at.lane, at.i, { lock: false });
    } else if (hovered) {
      hovered = null;
      drawInspector();
    }
  });
  stage.addEventListener("pointerleave", () => {
    hovered = null;
    drawInspector();
  });
  stage.addEventListener("click", (event) => {
    const at = tokenUnder(event) ?? tokenInRibbon(event);
    if (!at) return;
    if (locked?.lane === at.lane && locked?.i === at.i) clear();
    else choose(at.lane, at.i, { lock: true });
  });
  close.addEventListener("click", clear);

  columns.addEventListener("keydown", (event) => {
    const text = event.target.closest?.(".text");
    if (!text || event.altKey || event.ctrlKey || event.metaKey) return;
    const ids = [...run.lanes.keys()];
    const id = text.dataset.lane;
    const count = run.lanes.get(id).tokens.length;
    if (!count) return;
    const i = locked?.lane === id ? locked.i : -1;
    const step = event.shiftKey ? 10 : 1;
    const target = {
      ArrowRight: Math.min(count - 1, i + step),
      ArrowLeft: Math.max(0, i - step),
      Home: 0,
      End: count - 1,
    }[event.key];
    if (target !== undefined) {
      choose(id, target, { lock: true, speak: true });
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const other = ids[ids.indexOf(id) + (event.key === "ArrowDown" ? 1 : -1)];
      if (!other) return;
      views.get(other).text.focus();
      choose(other, Math.min(Math.max(0, i), run.lanes.get(other).tokens.length - 1), { lock: true, speak: true });
    } else if (event.key === "Escape") {
      clear();
      setText(status, statusLine(run));
    } else {
      return;
    }
    event.preventDefault();
  });

  const resized = new ResizeObserver(drawLater);
  document.addEventListener("visibilitychange", drawLater);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawLater);
  new MutationObserver(drawLater).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  draw();

  return {
    get run() {
      return run;
    },
    apply(message) {
      const before = run.state;
      const next = applyMessage(run, message, retired);
      if (next !== run) {
        locked = null;
        hovered = null;
        // A run that failed before it began leaves the lanes of the page as they were.
        if (next.lanes.size === 0) for (const [id, lane] of previewRun().lanes) next.lanes.set(id, lane);
      }
      run = next;
      if (run.state !== before) onState(run);
      drawLater();
    },
    reset() {
      run = previewRun();
      retired = new Set();
      clear();
      drawLater();
    },
  };
}
