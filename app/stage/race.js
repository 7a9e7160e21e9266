// The race: one row per lane with its progress on the engine's clock, its numbers, and what leaving early could gain at most.

import { css, depthColour } from "./ramp.js";
import { el, setText } from "./inspector.js";
import {
  backboneOf,
  firstDifference,
  laneStatus,
  layersOf,
  meanDepth,
  meanLayersRun,
  recentSpeed,
  ruleWords,
  speed,
  speedEstimate,
  speedUp,
  timeSpan,
} from "./store.js";

const DASH = "–";
const METRICS = [
  ["speed", "tokens/s", "From measured times. While a lane runs: over its last 16 tokens. At its end: all tokens after the first, over their engine time."],
  ["ratio", "speed-up", "Computed: the lane’s tokens/s over the backbone’s, both over all tokens so far"],
  ["depth", "backbone layers", "Mean number of backbone layers that a token was taken through before it left"],
  ["count", "tokens", "Tokens written so far"],
  ["time", "seconds", "Measured engine time of this lane so far, prefill included"],
];
export const RACE_FACTS = [
  ...METRICS.map(([, label, words]) => [label, words]),
  ["layers skipped would allow", "Computed: what leaving early would gain if layers that were skipped cost nothing, and the head and the rest of a step what they were measured to cost the backbone. A measured speed-up may lie above it, since other times differ too."],
];
const RIBBON_CELLS = 34; // px of height for the cells; the rest of the canvas carries the token counts
const COUNT_EVERY = [8, 16, 32, 64, 128, 256, 512];
const LEAST_APART = 24; // px between two token counts, also where tokens took less time than most

function metricsOf(run, lane) {
  const rate = lane.end ? speed(lane) : recentSpeed(lane);
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

/** What the skipped layers would allow and what was measured, as [words, explanation]. */
export function boundWords(run, lane) {
  if (lane.method === "backbone") return ["runs every layer: what the others are compared with", ""];
  const bound = speedEstimate(run, lane);
  const ratio = speedUp(run, lane);
  const measured = ratio ? `measured ${ratio.toFixed(2)}×` : "no backbone lane to measure it against";
  if (lane.decoded === 0) return ["", ""];
  if (!bound) return [`no backbone layer runs; ${measured}`, "Every layer runs quantised, so skipping sets no limit."];
  const times = `${bound.times.toFixed(2)}×`;
  const layers = layersOf(run);
  const cost = bound.whole
    ? "if layers that were skipped cost nothing, and the head and the rest of a step what they were measured to cost the backbone"
    : "as if a step were nothing but layers; the parts of the backbone’s steps were not measured";
  const more = meanLayersRun(lane) - meanDepth(lane);
  const later =
    more > 0.05 && lane.cycles.size === 0
      ? ` Rows of earlier tokens ride along: with them, ${meanLayersRun(lane).toFixed(1)} rows times layers were run per token.`
      : "";
  const what = lane.cycles.size > 0 ? "one check for several tokens" : bound.share === 0 ? "no backbone layer at all" : "layers skipped";
  const would = `${what} would allow ${bound.whole ? "" : "less than "}${times}`;
  // Shown with the same digits: what is said of the two can be seen in them.
  const above = ratio !== null && Number(ratio.toFixed(2)) > Number(bound.times.toFixed(2)) ? ", above it" : "";
  const why = `Computed: a mean of ${(layers * bound.share).toFixed(1)} of ${layers} layers that a token was taken through, ${cost}. Measured: the speed-up${above ? "; what else a step costs differs between the lanes and from one measurement to the next" : ""}.`;
  return [`${would}; ${measured}${above}`, why + later];
}

/**
 * The race. Returns `element`, `rebuild(run)` for other lanes, `draw(run, view)` and `tokenAt(event)`, the { lane, i } under a pointer or null.
 * view = { theme, style, cursor, clockNs (a playhead to draw, or null), inflight }.
 */
export function createRace(onResize) {
  const rows = el("div", { class: "lanes" });
  const axis = el("div", { class: "axis", "aria-hidden": "true" });
  const sizes = new WeakMap(); // canvas -> [width, height]; asked of the page once, and told by it when they change
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) sizes.delete(target);
    onResize();
  });
  let coloursFor = "";
  let colours = {};
  let depths = [];
  let views = new Map();
  let spanNs = 1;

  function laneRow(lane) {
    const view = { tokens: [] };
    view.metrics = Object.fromEntries(METRICS.map(([name]) => [name, el("b", {}, DASH)]));
    view.status = el("span", { class: "lane-status" });
    view.canvas = el("canvas", { class: "ribbon", "aria-hidden": "true" });
    view.bound = el("p", { class: "bound" });
    const said = !lane.rule || lane.rule.name === "never" || lane.method === "int4" || lane.label.includes(ruleWords(lane.rule));
    const rule = said ? "" : ` · ${ruleWords(lane.rule)}`;
    view.row = el(
      "div",
      { class: "lane", "data-lane": lane.id },
      el(
        "div",
        { class: "lane-name" },
        el("h3", {}, lane.label),
        el("p", {}, `${lane.about}${rule}`),
      ),
      view.canvas,
      el(
        "dl",
        { class: "metrics" },
        ...METRICS.map(([name, label, title]) =>
          el("div", { class: `metric metric-${name}`, title }, el("dt", {}, label), el("dd", {}, view.metrics[name])),
        ),
      ),
      el("div", { class: "lane-foot" }, view.status, view.bound),
    );
    return view;
  }

  function readColours(layers, theme, style) {
    if (coloursFor === `${layers}/${theme}`) return;
    coloursFor = `${layers}/${theme}`;
    const names = { ink: "ink", muted: "muted", track: "track", prefill: "prefill", riverLayers: "river-layers", flag: "flag", panel: "panel" };
    colours = Object.fromEntries(Object.entries(names).map(([name, variable]) => [name, style.getPropertyValue(`--${variable}`)]));
    // The ramp's palest third would drown beside the river's layers.
    depths = Array.from({ length: layers + 1 }, (_, depth) => css(depthColour(0.3 + (0.7 * depth) / layers, theme)));
  }

  function drawRibbon(view, lane, layers, differs, frame) {
    const { canvas } = view;
    if (!sizes.has(canvas)) sizes.set(canvas, [canvas.clientWidth, canvas.clientHeight]);
    const [width, height] = sizes.get(canvas);
    if (!width || !height) return;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const ctx = canvas.getContext("2d");
    const { ink, muted, track, prefill, riverLayers, flag, panel } = frame.colours;
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.fillStyle = track;
    ctx.fillRect(0, RIBBON_CELLS - 1, width, 1);
    const perNs = width / spanNs;
    const every = COUNT_EVERY.find((step) => (step * lane.decodeNs * perNs) / Math.max(1, lane.decoded) > 44) ?? 1024;
    ctx.font = "10px system-ui, sans-serif";
    ctx.textAlign = "center";
    view.tokens = lane.tokens;
    let at = 0;
    let flagged = -1;
    let chosen = null;
    let numbered = 0;
    const column = { x: -1, ns: 0, exit: 0, river: 0 }; // tokens that are narrower than a pixel share one, by their time
    const fill = (x, wide, exit, river) => {
      const foot = RIBBON_CELLS * exit;
      const rest = RIBBON_CELLS * Math.min(1 - exit, river);
      ctx.fillStyle = riverLayers;
      ctx.fillRect(x, RIBBON_CELLS - foot - rest, wide, rest);
      ctx.fillStyle = frame.depths[Math.round(exit * layers)];
      ctx.fillRect(x, RIBBON_CELLS - foot, wide, foot);
    };
    const flush = () => {
      if (column.ns > 0) fill(column.x, 1, column.exit / column.ns, column.river / column.ns);
      column.ns = 0;
    };
    for (const token of lane.tokens) {
      if (!token) continue;
      const x = at * perNs;
      at += token.t_ns;
      const w = at * perNs - x;
      if (token.i === differs) flagged = x;
      if (frame.cursor?.lane === lane.id && frame.cursor.i === token.i) chosen = [x, w];
      if (token.from_prefill) {
        ctx.fillStyle = prefill;
        ctx.fillRect(x, RIBBON_CELLS * 0.5, Math.max(1, w - 1), RIBBON_CELLS * 0.5 - 1);
        continue;
      }
      // One column is one token: its width is its time, its foot the backbone layers, the rest the quantised layers.
      const share = token.exit_layer / layers;
      const river = token.river_layers / layers;
      if (w >= 1) {
        flush();
        fill(x, w > 3 ? w - 0.75 : w, share, river);
      } else {
        if (Math.floor(x) !== column.x) flush();
        if (column.ns === 0) Object.assign(column, { x: Math.floor(x), exit: 0, river: 0 });
        column.ns += token.t_ns;
        column.exit += share * token.t_ns;
        column.river += river * token.t_ns;
      }
      if ((token.i + 1) % every === 0 && at * perNs - numbered >= LEAST_APART) {
        numbered = at * perNs;
        ctx.fillStyle = muted;
        ctx.fillRect(at * perNs - 0.5, RIBBON_CELLS + 1, 1, 3);
        ctx.fillText(String(token.i + 1), Math.min(at * perNs, width - 10), height - 1);
      }
    }
    flush();
    const work = frame.inflight?.get(lane.id);
    if (work) {
      // The token at work: as wide as the time it has had, as high as the layers that are done.
      const share = work.layers / layers;
      ctx.fillStyle = track;
      ctx.fillRect(at * perNs, RIBBON_CELLS * (1 - share), Math.max(1, (frame.clockNs - at) * perNs), RIBBON_CELLS * share);
    }
    if (frame.clockNs !== null) {
      ctx.fillStyle = ink;
      ctx.fillRect(Math.min(width - 1, frame.clockNs * perNs - 0.5), 0, 1, RIBBON_CELLS + 3);
    }
    if (chosen) {
      ctx.strokeStyle = ink;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(chosen[0] + 0.25, 0.75, Math.max(3, chosen[1] - 0.5), RIBBON_CELLS - 1.5);
    }
    if (flagged >= 0) {
      ctx.font = "12px system-ui, sans-serif";
      ctx.textAlign = "left";
      ctx.lineWidth = 3;
      ctx.strokeStyle = panel;
      ctx.strokeText("⚑", Math.min(flagged, width - 10), 11);
      ctx.fillStyle = flag;
      ctx.fillText("⚑", Math.min(flagged, width - 10), 11);
    }
  }

  function drawAxis(span) {
    const digits = span < 2 ? 2 : 1;
    const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => `${(span * share).toFixed(share ? digits : 0)} s`);
    if (axis.dataset.marks === marks.join()) return;
    axis.dataset.marks = marks.join();
    axis.replaceChildren(...marks.map((mark) => el("span", {}, mark)));
  }

  return {
    rows,
    axis,

    rebuild(run) {
      resized.disconnect();
      views = new Map([...run.lanes.values()].map((lane) => [lane.id, laneRow(lane)]));
      rows.replaceChildren(...[...views.values()].map((view) => view.row));
      for (const view of views.values()) resized.observe(view.canvas);
    },

    draw(run, { theme, style, cursor, clockNs, inflight }) {
      readColours(layersOf(run), theme, style);
      const span = timeSpan(run);
      spanNs = span * 1e9;
      drawAxis(span);
      const layers = layersOf(run);
      const backbone = backboneOf(run);
      for (const lane of run.lanes.values()) {
        const view = views.get(lane.id);
        const words = laneStatus(run, lane);
        setText(view.status, words);
        view.row.dataset.laneState = words.split(":")[0] || "idle";
        const metrics = metricsOf(run, lane);
        for (const [name] of METRICS) setText(view.metrics[name], metrics[name]);
        const [bound, why] = boundWords(run, lane);
        setText(view.bound, bound);
        if (view.bound.title !== why) view.bound.title = why;
        const differs = lane === backbone ? -1 : firstDifference(run, lane);
        drawRibbon(view, lane, layers, differs, { depths, colours, cursor, clockNs, inflight });
      }
    },

    tokenAt(event) {
      const canvas = event.target.closest?.(".ribbon");
      const id = canvas?.closest(".lane").dataset.lane;
      const view = id && views.get(id);
      if (!view) return null;
      const at = (event.offsetX / canvas.clientWidth) * spanNs;
      let end = 0;
      for (const token of view.tokens) if (token && (end += token.t_ns) >= at) return { lane: id, i: token.i };
      return null;
    },
  };
}
