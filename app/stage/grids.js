// The grids under the texts: who wrote each slot of the KV cache, how much each layer changed the state, and how far keys and
// values are from the backbone's. All share one x axis, one scrollbar and one cursor.

import { besideTau, exitScore, testPassed } from "./decision.js";
import { el, setText, visible } from "./inspector.js";
import {
  AXIS,
  AXIS_FOOT,
  CELL_SIZES,
  ERROR_LIMITS,
  LEVELS,
  OWNER,
  columnX,
  columnsOf,
  fitCell,
  layersInRow,
  newSlots,
  ownerRuns,
  rowOfLayer,
  rowsOf,
  scrollFor,
  slotAt,
  stackOf,
  updateSlots,
  zoomCell,
} from "./layout.js";
import {
  OWNER_WORDS,
  fillsAtEnd,
  paintError,
  paintOwners,
  paintSimilarity,
  palette,
  promptOf,
  rowWords,
  sharesInWords,
  similaritiesAt,
  similarityLimits,
  tauOf,
  testNeeded,
  tokenAt,
} from "./paint.js";
import { layersOf } from "./store.js";
import { canvasSurface, svgSurface } from "./surface.js";

const HEAT_TITLE = 12; // above the heatmaps: room for marks and triangles
const HEAT_LANES = 2; // a heatmap is as tall as a lane beside one other
const EMPTY_AXIS = 64; // tokens that the axis shows before there is a run
const EXPORT_CELL = 6; // narrowest column of a picture
const EXPORT_SIDE = 16000; // pixels; canvases have a largest size

const LEGEND = [
  ["backbone", "backbone"],
  ["river", "4-bit river"],
  ["propagated", "propagated: guessed from the exit state"],
  ["recomputed", "recomputed: filled by a later token"],
  ["draft", "draft, not checked yet"],
  ["empty", "empty: skipped and never written"],
];

/** The legend's entries for a run; drafts only where something drafts. */
function legendOf(run) {
  const drafts = [...run.lanes.values()].some((lane) => lane.method === "verified");
  const bits = run.header?.quantiser?.bits;
  return LEGEND.filter(([name]) => name !== "draft" || drafts).map(([name, words]) => [name, name === "river" && bits ? `${bits}-bit river` : words]);
}

/** Runs whose lanes read one text are compared slot by slot at the end. */
function comparesSlots(run) {
  return run.header?.mode === "same-text" || run.header?.mode === "same-exits" || [...run.lanes.values()].some((lane) => lane.fidelity);
}

/** Positions of the answer that the axis has room for: those to come as well, so that the scale holds while tokens arrive. */
function generatedOf(run, view) {
  let most = 0;
  for (const lane of run.lanes.values()) {
    const wanted = lane.end ? lane.tokens.length : (view.length ?? run.header?.max_new_tokens ?? EMPTY_AXIS);
    most = Math.max(most, lane.tokens.length, wanted);
  }
  return Math.max(1, most - 1); // nothing was fed behind the last token
}

/** What a slot is, in words: who wrote it and when. */
export function slotWords(run, lane, slots, position, layer) {
  if (position >= slots.positions) return "not reached yet";
  const at = position * slots.layers + layer;
  const by = slots.by[at];
  const token = tokenAt(run, lane, position);
  const bits = run.header?.quantiser?.bits ?? 4;
  switch (slots.owner[at]) {
    case OWNER.backbone:
      if (position < promptOf(run)) return "written by the backbone with the prompt";
      if (token?.cycle && token.cycle.place < token.cycle.drafted) return `backbone; its check overwrote the draft of cycle ${token.cycle.number}`;
      return "written by the backbone";
    case OWNER.river:
      return `written by the ${bits}-bit river`;
    case OWNER.propagated:
      return `propagated: guessed from the state after layer ${token?.exit_layer ?? "?"}`;
    case OWNER.recomputed:
      return `recomputed by the backbone, filled at token ${by + 1}`;
    case OWNER.draft:
      return `draft of the ${bits}-bit river`;
    case OWNER.empty:
      return lane.method === "recompute" || lane.method === "replay" ? "empty: skipped and not filled yet" : "empty: skipped and never written";
    default:
      return "not recorded";
  }
}

/** What the step at a position read and wrote, in words. */
function placeWords(run, lane, position) {
  const prompt = promptOf(run);
  const read = position < prompt ? run.header.prompt_pieces?.[position] : lane.tokens[position - prompt]?.text;
  const made = tokenAt(run, lane, position);
  const words = [lane.label];
  if (made) words.push(`token ${made.i + 1} “${visible(made.text)}”`);
  words.push(`position ${position}${position < prompt ? " of the prompt" : ""}${read === undefined ? "" : ` reads “${visible(read)}”`}`);
  return words.join(" · ");
}

/** Similarity of a layer at a position in words, empty where it did not run. */
function similarityWords(run, lane, position, layer) {
  const value = similaritiesAt(run, lane, position)?.[layer];
  if (typeof value !== "number") return "";
  const token = tokenAt(run, lane, position);
  if (!token || !testNeeded(lane, token, layer)) return ` · similarity ${value.toFixed(4)}`;
  const exit = layer + 1 === token.exit_layer;
  const passed = exit ? testPassed(token, lane, layersOf(run)) : false; // below the exit no test has passed
  if (passed === null || (exit && passed === false)) return ` · similarity ${value.toFixed(4)}`;
  return ` · similarity ${besideTau(exit ? exitScore(token) : { value, exact: false }, passed, lane.rule.tau)}`;
}

/** The runs of owners of one column in words, for a token that is pointed at elsewhere. */
function columnWords(slots, position) {
  const names = Object.keys(OWNER);
  const runs = [];
  for (const [first, last, owner] of ownerRuns(slots, position)) {
    const words = OWNER_WORDS[names[owner]] ?? "not recorded";
    const before = runs.at(-1);
    if (before?.words === words) before.last = last;
    else runs.push({ first, last, words });
  }
  return runs.map(({ first, last, words }) => `${last - first === 1 ? `layer ${last}` : `layers ${first + 1}–${last}`} ${words}`).join(", ");
}

/** One sentence that sums up the owners' grids. */
export function gridSummary(run, slotsOf) {
  const lanes = [...run.lanes.values()];
  const positions = Math.max(0, ...lanes.map((lane) => slotsOf.get(lane.id)?.positions ?? 0));
  if (positions === 0) return "KV slots: nothing has been written yet.";
  const shares = lanes.map((lane) => `${lane.label} ${sharesInWords(slotsOf.get(lane.id)).join(", ") || "prompt only"}`);
  return `KV slots of ${lanes.length} ${lanes.length === 1 ? "lane" : "lanes"}, ${positions} positions, ${layersOf(run)} layers. Behind the prompt: ${shares.join("; ")}.`;
}

/**
 * Build the grids inside `container`. `onHover` and `onClick` get { lane, i, position, layer } (layer from 0; i = index of the token
 * whose step wrote the position, null where there is none: in the prompt but for its last position, and ahead of the text) or, for hover, null.
 *
 * Returns draw(run, view), image("png" | "svg") -> Promise<Blob>, element, destroy(). view = { theme, how, moving, lane, cursor, hover, marks,
 * inflight, length }: `how` says how the numbers are known (measured or recorded), `moving` whether the next picture follows at once;
 * `inflight` is a Map lane id -> { token, layers }, the event of the next token and how many of its layers have run; `length` (optional) is the
 * number of tokens that the longest lane will have, where that is known.
 */
export function createGrids(container, { onHover = () => {}, onClick = () => {} } = {}) {
  let run = null;
  let view = {};
  let slots = new Map();
  let slotsFor = null; // the header that the slots belong to
  let cell = null; // null = as wide as fits
  let which = "v";
  let following = true;
  let newest = -1;
  let wasAt = ""; // the cursor that was last scrolled to
  let scene = null;
  let pointed = null; // the slot under the pointer
  let colours = null;
  let legendFor = "";
  let limitsFor = null;
  let frame = 0;
  let inSight = true; // while a run moves, what nobody sees is described but not painted

  const button = (name, label, words) => el("button", { type: "button", class: name, "aria-label": words, title: words }, label);
  const out = button("zoom", "−", "Narrower columns");
  const fit = button("zoom", "fit", "Fit all columns");
  const into = button("zoom", "+", "Wider columns");
  const legend = el("ul", { class: "grids-legend" });
  const canvases = { owners: el("canvas", { role: "img", tabindex: "0" }), change: el("canvas", { role: "img" }), error: el("canvas", { role: "img" }) };
  const ramp = () => ({ swatch: el("canvas", { class: "ramp", "aria-hidden": "true" }), low: el("span"), high: el("span") });
  const ramps = { change: ramp(), error: ramp() };
  const changeTitle = el("span");
  const errorTitle = el("span");
  const tau = el("span", { class: "heat-tau" }, el("i", { class: "key-tau", "aria-hidden": "true" }), el("span"));
  const keys = button("which", "K", "Show keys");
  const values = button("which", "V", "Show values");
  const pending = el("span", { class: "pending" });
  const errorPart = el(
    "div",
    { class: "heat" },
    el(
      "div",
      { class: "heat-head" },
      el("h3", {}, errorTitle, "K/V error against the backbone"),
      el("span", { class: "segments", role: "group", "aria-label": "Keys or values" }, keys, values),
      el("span", { class: "scale" }, el("span", {}, "1 − cos"), ramps.error.low, ramps.error.swatch, ramps.error.high),
      pending,
    ),
    canvases.error,
  );
  const pinned = el(
    "div",
    { class: "grids-pinned" },
    canvases.owners,
    el(
      "div",
      { class: "heat" },
      el(
        "div",
        { class: "heat-head" },
        el("h3", {}, changeTitle, "similarity of each layer’s input and output"),
        el("span", { class: "scale" }, el("span", {}, "1 − cos"), ramps.change.low, ramps.change.swatch, ramps.change.high),
        el("span", {}, el("i", { class: "key-exit", "aria-hidden": "true" }), "exit"),
        tau,
        el("span", { class: "heat-note" }, "paler: the exit test did not need it, instrumented for this picture · blank: did not run"),
      ),
      canvases.change,
    ),
    errorPart,
  );
  const wide = el("div", { class: "grids-wide" }, pinned);
  const scroller = el("div", { class: "grids-scroll" }, wide);
  const readout = el("p", { class: "grids-readout" });
  const known = el("span", { class: "tag" });
  const rowsNote = el("span", { class: "about" });
  const element = el(
    "section",
    { class: "grids", "aria-label": "KV cache" },
    el(
      "header",
      {},
      el("h2", {}, "KV cache"),
      known,
      el("span", { class: "about" }, "who wrote each slot: a column is a position, a row a layer, layer 1 at the bottom"),
      rowsNote,
      el("span", { class: "tools", role: "group", "aria-label": "Width of the columns" }, out, fit, into),
    ),
    legend,
    scroller,
    readout,
  );
  container.append(element);

  const surfaces = Object.fromEntries(Object.entries(canvases).map(([name, canvas]) => [name, canvasSurface(canvas)]));

  function drawLater() {
    if (!frame && run) frame = requestAnimationFrame(redraw);
  }

  function redraw() {
    frame = 0;
    if (run) draw(run, view);
  }

  function readColours() {
    if (colours?.theme === view.theme) return;
    const style = getComputedStyle(element);
    colours = palette((name) => style.getPropertyValue(`--${name}`).trim(), view.theme);
    legendFor = "";
  }

  function readSlots() {
    const layers = layersOf(run);
    if (slotsFor !== run.header) {
      slotsFor = run.header;
      slots = new Map();
      limitsFor = null;
      newest = -1;
      following = true;
    }
    for (const id of slots.keys()) if (!run.lanes.has(id)) slots.delete(id);
    for (const lane of run.lanes.values()) {
      if (!slots.has(lane.id)) slots.set(lane.id, newSlots(layers, promptOf(run)));
      updateSlots(slots.get(lane.id), lane);
    }
  }

  /** The limits of the similarity scale; those that the prompt gives hold for the whole run. */
  function limits() {
    const lanes = [...run.lanes.values()];
    const known = lanes.some((lane) => lane.prefill?.similarity) ? "prompt" : lanes.map((lane) => Math.min(99, lane.tokens.length)).join();
    if (limitsFor?.known !== known) limitsFor = { known, limits: similarityLimits(run) };
    return limitsFor.limits;
  }

  /** Everything that a picture `width` pixels wide needs to be drawn. */
  function sceneOf(width, scroll, columns) {
    const layers = layersOf(run);
    const ids = [...run.lanes.keys()];
    const rows = rowsOf(layers, ids.length);
    const heatRows = rowsOf(layers, Math.max(HEAT_LANES, Math.min(3, ids.length)));
    const base = { run, view, colours, slots, columns, scroll, width, which, limits: limits() };
    return {
      owners: { ...base, rows, stack: stackOf(ids, rows) },
      change: { ...base, rows: heatRows, stack: stackOf([view.lane], heatRows, HEAT_TITLE) },
      error: { ...base, rows: heatRows, stack: stackOf([view.lane], heatRows, HEAT_TITLE) },
    };
  }

  function draw(nextRun, nextView) {
    run = nextRun;
    view = nextView;
    if (!run.lanes.has(view.lane)) view = { ...view, lane: run.lanes.keys().next().value };
    readColours();
    readSlots();
    const width = scroller.clientWidth;
    if (!width) return;
    const inner = width - AXIS - 2;
    const generated = generatedOf(run, view);
    const columns = columnsOf(promptOf(run), generated, cell ?? fitCell(inner, promptOf(run), generated));
    wide.style.inlineSize = `${Math.max(width, AXIS + columns.width + 2)}px`;
    pinned.style.inlineSize = `${width}px`;
    keepInView(columns, inner);
    scene = sceneOf(width, scroller.scrollLeft, columns);
    const compares = comparesSlots(run);
    errorPart.hidden = !compares;
    paint("owners", paintOwners);
    paint("change", paintSimilarity);
    if (compares) paint("error", paintError);
    out.disabled = columns.cell <= CELL_SIZES[0];
    into.disabled = columns.cell >= CELL_SIZES.at(-1);
    fit.setAttribute("aria-pressed", String(cell === null));
    drawLegend();
    drawWords();
  }

  function paint(name, painter) {
    const { stack, width } = scene[name];
    const canvas = canvases[name];
    canvas.style.inlineSize = `${width}px`;
    canvas.style.blockSize = `${stack.height}px`;
    if (view.moving && !inSight) return;
    surfaces[name].begin(width, stack.height, window.devicePixelRatio || 1);
    painter(surfaces[name], scene[name]);
  }

  /** Follow the newest column unless the reader has scrolled away from it, and show the cursor when it has moved. */
  function keepInView(columns, inner) {
    const last = Math.max(-1, ...[...slots.values()].map((one) => one.positions - 1));
    let target = scroller.scrollLeft;
    if (last !== newest) {
      newest = last;
      if (following && last >= 0) {
        const there = scrollFor(columns, last, target, inner);
        // Going back, what is behind the newest column is worth more room than what is ahead of it.
        target = there < target ? scrollFor(columns, last, 0, inner) : there;
      }
    }
    const at = view.cursor ? `${view.cursor.lane}/${view.cursor.i}` : "";
    if (at !== wasAt) {
      wasAt = at;
      if (view.cursor) target = scrollFor(columns, promptOf(run) - 1 + view.cursor.i, target, inner);
    }
    if (Math.abs(target - scroller.scrollLeft) > 0.5) scroller.scrollLeft = target;
  }

  function drawLegend() {
    const lane = run.lanes.get(view.lane);
    const found = tauOf(run, lane);
    const [low, high] = limits();
    const key = [view.theme, lane?.label, found?.tau, found?.lane.label, low, high, which, ...legendOf(run).flat(), Boolean(lane?.fidelity), lane?.method].join("/");
    if (key === legendFor) return;
    legendFor = key;
    legend.replaceChildren(
      ...legendOf(run).map(([name, words]) => {
        const canvas = el("canvas", { class: "swatch", "aria-hidden": "true" });
        swatch(canvas, 22, 13, (surface) => surface.rects(colours.owners[name], [0, 0, 22, 13]));
        return el("li", {}, canvas, words);
      }),
    );
    changeTitle.textContent = lane ? `${lane.label} · ` : "";
    errorTitle.textContent = lane ? `${lane.label} · ` : "";
    tau.hidden = !found;
    if (found) tau.lastChild.textContent = `similarity > tau ${found.tau}${found.lane === lane ? "" : ` (${found.lane.label}’s)`}`;
    for (const [name, [from, to]] of [["change", [low, high]], ["error", ERROR_LIMITS]]) {
      ramps[name].low.textContent = `≤ ${from}`;
      ramps[name].high.textContent = to >= 1 ? `${to}` : `≥ ${to}`;
      swatch(ramps[name].swatch, LEVELS * 2, 12, (surface) => rampOn(surface, name, 0, 0));
    }
    keys.setAttribute("aria-pressed", String(which === "k"));
    values.setAttribute("aria-pressed", String(which === "v"));
    pending.textContent = errorNote(lane);
  }

  function errorNote(lane) {
    if (lane?.method === "backbone") return "the other lanes are compared with this one";
    if (!lane?.fidelity) return "compared at the end of the run";
    return fillsAtEnd(lane) ? "once pending layers had run" : lane.fidelity.holes ? "× empty slot" : "";
  }

  /** A scale as a strip: full, and below it the paler half of the colours where there is one. */
  function rampOn(surface, name, x, y) {
    const scale = colours.scales[name];
    for (let level = 0; level < LEVELS; level += 1) {
      surface.rects(scale[level], [x + 2 * level, y, 2, 12]);
      if (scale[level + LEVELS]) surface.rects(scale[level + LEVELS], [x + 2 * level, y + 7, 2, 5]);
    }
  }

  function swatch(canvas, width, height, paintIt) {
    canvas.style.inlineSize = `${width}px`;
    canvas.style.blockSize = `${height}px`;
    const surface = canvasSurface(canvas);
    surface.begin(width, height, window.devicePixelRatio || 1);
    paintIt(surface);
  }

  function setLabel(canvas, words) {
    if (canvas.getAttribute("aria-label") !== words) canvas.setAttribute("aria-label", words);
  }

  function drawWords() {
    setText(known, view.how ?? "measured");
    setText(rowsNote, scene ? rowsWords(scene) : "");
    const lane = run.lanes.get(view.lane);
    setLabel(canvases.owners, gridSummary(run, slots));
    setLabel(canvases.change, `Similarity by layer and position, lane ${lane?.label}. The table of tokens has the value at each exit.`);
    setLabel(canvases.error, `${which === "v" ? "V" : "K"} error against the backbone by layer and position, lane ${lane?.label}.`);
    setText(readout, readoutWords());
  }

  /** In which grids a row is more than one layer. */
  function rowsWords({ owners, change }) {
    const words = rowWords(owners.rows.stride > 1 ? owners.rows : change.rows);
    if (!words) return "";
    return owners.rows.stride === change.rows.stride ? words : `${owners.rows.stride > 1 ? "here" : "below"}, ${words}`;
  }

  function readoutWords() {
    if (pointed && run.lanes.has(pointed.lane)) {
      const lane = run.lanes.get(pointed.lane);
      const { position, layer } = pointed;
      const error = lane.fidelity?.[`${which}_cos`]?.[position - lane.fidelity.start]?.[layer];
      const close = typeof error === "number" ? ` · ${which.toUpperCase()} cosine ${error.toFixed(4)}` : "";
      return `${placeWords(run, lane, position)} · layer ${layer + 1}: ${slotWords(run, lane, slots.get(lane.id), position, layer)}${similarityWords(run, lane, position, layer)}${close}`;
    }
    const at = view.hover ?? view.cursor;
    const lane = at && run.lanes.get(at.lane);
    const position = at ? promptOf(run) - 1 + at.i : -1;
    if (lane?.tokens[at.i]) return `${placeWords(run, lane, position)} · ${columnWords(slots.get(lane.id), position)}`;
    if (newest < 0) return "Slots appear here as they are written.";
    return "Point at a slot to read who wrote it; click to keep the column.";
  }

  // Pointer, scroll and buttons

  function under(event) {
    const name = Object.keys(canvases).find((one) => canvases[one] === event.target);
    if (!name || !scene) return null;
    const { stack, rows, columns, scroll } = scene[name];
    const slot = slotAt(stack, rows, columns, scroll, event.offsetX, event.offsetY);
    if (!slot) return null;
    const i = slot.position - promptOf(run) + 1;
    slot.layer = tellingLayer(slot, rows);
    return { lane: slot.lane, i: run.lanes.get(slot.lane)?.tokens[i] ? i : null, position: slot.position, layer: slot.layer };
  }

  /** Of the layers that a row stands for, the one to read out: a hole, if there is one. */
  function tellingLayer({ lane, position, layer }, rows) {
    const known = slots.get(lane);
    const [first, last] = layersInRow(rows, rowOfLayer(rows, layer), known.layers);
    for (let one = first; one < last && position < known.positions; one += 1) if (known.owner[position * known.layers + one] === OWNER.empty) return one;
    return layer;
  }

  function point(slot) {
    const before = pointed;
    pointed = slot;
    if (!run || (!slot && !before)) return;
    drawWords();
    if (slot?.lane !== before?.lane || slot?.position !== before?.position || slot?.layer !== before?.layer) onHover(slot);
  }

  pinned.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "touch") point(under(event));
  });
  pinned.addEventListener("pointerleave", () => point(null));
  pinned.addEventListener("click", (event) => {
    const slot = under(event);
    if (!slot) return;
    if (event.pointerType === "touch") pointed = slot;
    onClick(slot);
    drawWords();
  });
  scroller.addEventListener("scroll", () => {
    if (!scene) return;
    const { columns, width } = scene.owners;
    const x = columnX(columns, Math.max(0, newest));
    following = x >= scroller.scrollLeft && x < scroller.scrollLeft + width - AXIS;
    drawLater();
  });

  function zoom(next) {
    if (!scene) return;
    const { columns, width } = scene.owners;
    // The column in the middle stays in the middle.
    const middle = (scroller.scrollLeft + (width - AXIS) / 2) / columns.width;
    cell = next;
    draw(run, view);
    scroller.scrollLeft = middle * scene.owners.columns.width - (width - AXIS) / 2;
    draw(run, view);
  }
  out.addEventListener("click", () => zoom(zoomCell(scene.owners.columns.cell, -1)));
  into.addEventListener("click", () => zoom(zoomCell(scene.owners.columns.cell, 1)));
  fit.addEventListener("click", () => zoom(null));
  for (const [one, name] of [[keys, "k"], [values, "v"]]) {
    one.addEventListener("click", () => {
      which = name;
      drawLater();
    });
  }

  const resized = new ResizeObserver(drawLater);
  resized.observe(scroller);
  const sighted = new IntersectionObserver(
    (entries) => {
      inSight = entries.at(-1).isIntersecting;
      if (inSight) drawLater();
    },
    { rootMargin: "100px" },
  );
  sighted.observe(scroller);

  // Pictures

  /** All grids with title, axes and legend on one surface made by `make(width, height, title)`. */
  function picture(make) {
    const margin = 20;
    const generated = Math.max(1, ...[...slots.values()].map((one) => one.positions - one.prompt));
    const now = scene?.owners.columns.cell ?? EXPORT_CELL;
    const columns = columnsOf(promptOf(run), generated, Math.max(EXPORT_CELL, now));
    const inner = Math.max(640, AXIS + columns.width + 2);
    const parts = sceneOf(inner, 0, columns);
    const lane = run.lanes.get(view.lane);
    const found = tauOf(run, lane);
    const model = run.header?.model?.name ?? "";
    const title = `KV cache · ${model}`;
    const prompt = (run.header?.prompt ?? "").replace(/\s+/g, " ").trim();
    const most = Math.floor((inner - 60) / 6.2);
    const { ink, muted } = colours;
    const entries = legendOf(run);
    // Legend entries flow into lines; widths are estimated, since text is not measured alike everywhere.
    const lines = [[]];
    let used = 0;
    for (const [name, words] of entries) {
      const width = 22 + 6 + words.length * 6.6 + 14;
      if (used + width > inner && used > 0) {
        lines.push([]);
        used = 0;
      }
      lines.at(-1).push([name, words, used]);
      used += width;
    }
    const compares = comparesSlots(run) && Boolean(lane?.fidelity);
    const head = 62;
    const heats = [
      ["change", paintSimilarity, `${lane?.label} · similarity of each layer’s input and output`, limits(), [
        found ? `dots: similarity > tau ${found.tau}${found.lane === lane ? "" : ` (${found.lane.label}’s)`}; ` : "",
        "bars: exit; paler: the exit test did not need it, instrumented for this picture; blank: did not run",
      ].join("")],
      ...(compares ? [["error", paintError, `${lane.label} · ${which.toUpperCase()} error against the backbone`, ERROR_LIMITS, errorNote(lane)]] : []),
    ];
    const heatHead = 62;
    const height = 2 * margin + head + lines.length * 20 + parts.owners.stack.height + heats.reduce((sum, [name]) => sum + heatHead + parts[name].stack.height, 0);
    const width = inner + 2 * margin;
    const surface = make(width, height, title);
    surface.rects(colours.panel, [0, 0, width, height]);
    const place = (x, y, w, h, paintIt) => surface.inside([x, y, w, h], x, y, paintIt);
    let y = margin;
    surface.text(margin, y + 14, [[title, ink, true]], { size: 16 });
    surface.text(margin, y + 34, [[`${[...run.lanes.values()].map((one) => one.label).join(", ")} · “${prompt.length > most ? `${prompt.slice(0, most)}…` : prompt}”`, muted]], { size: 12 });
    surface.text(margin, y + 52, [[`Who wrote each slot: a column is a position, a row a layer, layer 1 at the bottom${parts.owners.rows.stride > 1 ? `; ${rowWords(parts.owners.rows)}` : ""}.`, muted]], { size: 12 });
    y += head;
    for (const line of lines) {
      for (const [name, words, x] of line) {
        surface.rects(colours.owners[name], [margin + x, y + 2, 22, 13]);
        surface.text(margin + x + 28, y + 13, [[words, ink]], { size: 12 });
      }
      y += 20;
    }
    place(margin, y, inner, parts.owners.stack.height, () => paintOwners(surface, parts.owners));
    y += parts.owners.stack.height;
    for (const [name, painter, words, [low, high], note] of heats) {
      surface.text(margin, y + 22, [[words, ink, true]], { size: 13 });
      surface.text(margin, y + 41, [[`1 − cos   ${low}`, muted]], { size: 11 });
      place(margin + 84, y + 31, LEVELS * 2, 12, () => rampOn(surface, name, 0, 0));
      surface.text(margin + 92 + LEVELS * 2, y + 41, [[`${high}    ${note}`, muted]], { size: 11 });
      y += heatHead - 12;
      place(margin, y, inner, parts[name].stack.height, () => painter(surface, parts[name]));
      y += parts[name].stack.height + 12;
    }
    return { surface, width, height };
  }

  async function image(kind) {
    if (!run || !colours) throw new Error("Nothing has been drawn yet.");
    if (kind === "svg") {
      const { surface } = picture(svgSurface);
      return new Blob([surface.toString()], { type: "image/svg+xml" });
    }
    const canvas = document.createElement("canvas");
    picture((width, height) => {
      const surface = canvasSurface(canvas);
      surface.begin(width, height, Math.min(2, EXPORT_SIDE / width, EXPORT_SIDE / height));
      return surface;
    });
    return new Promise((resolve, reject) => {
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("The picture is too large for this browser. SVG has no such limit."))), "image/png");
    });
  }

  return {
    draw,
    image,
    element,
    destroy() {
      cancelAnimationFrame(frame);
      resized.disconnect();
      sighted.disconnect();
      element.remove();
    },
  };
}
