// What the grids hold and where it lies: who wrote which slot, which pixel is which slot, and the limits of the colour scales.
// Plain arithmetic, without a page.

/** Who wrote a slot. `unknown`: nothing is known of it (yet). */
export const OWNER = { unknown: 0, empty: 1, backbone: 2, river: 3, propagated: 4, recomputed: 5, draft: 6 };
export const OWNER_NAMES = Object.keys(OWNER);

const WRITTEN_BY = { none: OWNER.empty, backbone: OWNER.backbone, river: OWNER.river, propagated: OWNER.propagated, draft: OWNER.draft };

const NOBODY = -1; // written by no token of the answer: by the prompt's pass, or not at all

/**
 * The slots of one lane, empty. `owner` and `by` hold a code of OWNER and the index of the token whose step wrote the slot, at
 * position * layers + layer. `counts` counts the owners over the positions behind the prompt.
 */
export function newSlots(layers, prompt) {
  return {
    layers,
    prompt,
    positions: 0,
    owner: new Uint8Array(0),
    by: new Int32Array(0),
    counts: new Uint32Array(OWNER_NAMES.length),
    applied: [], // the token events that are in, by index
    prefill: null,
  };
}

function clearSlots(slots) {
  Object.assign(slots, newSlots(slots.layers, slots.prompt));
}

function reserveSlots(slots, positions) {
  if (positions > slots.positions) slots.positions = positions;
  const size = positions * slots.layers;
  if (size <= slots.owner.length) return;
  const room = Math.max(size, 2 * slots.owner.length);
  const owner = new Uint8Array(room);
  const by = new Int32Array(room).fill(NOBODY);
  owner.set(slots.owner);
  by.set(slots.by);
  slots.owner = owner;
  slots.by = by;
}

function putOwner(slots, at, owner, by) {
  if (at >= slots.prompt * slots.layers) {
    slots.counts[slots.owner[at]] -= slots.owner[at] === OWNER.unknown ? 0 : 1;
    slots.counts[owner] += 1;
  }
  slots.owner[at] = owner;
  slots.by[at] = by;
}

function applyRuns(slots, position, runs, by) {
  reserveSlots(slots, position + 1);
  for (const [first, last, name] of runs) {
    const owner = WRITTEN_BY[name] ?? OWNER.unknown;
    for (let layer = first; layer < Math.min(last, slots.layers); layer += 1) {
      const at = position * slots.layers + layer;
      if (slots.by[at] <= by) putOwner(slots, at, owner, by);
      // A later step has written the slot already. It was a hole that was filled, unless somebody had written it before.
      else if (owner !== OWNER.empty && slots.owner[at] === OWNER.recomputed) putOwner(slots, at, OWNER.backbone, slots.by[at]);
    }
  }
}

function applyFilled(slots, token) {
  for (const [position, first, last, name] of token.filled ?? []) {
    if (position < 0) continue;
    reserveSlots(slots, position + 1);
    for (let layer = Math.max(0, first); layer < Math.min(last, slots.layers); layer += 1) {
      const at = position * slots.layers + layer;
      // The first token that fills a hole is the one that is remembered, in whatever order the events come.
      if (slots.owner[at] === OWNER.recomputed && slots.by[at] < token.i) continue;
      const hole = slots.owner[at] <= OWNER.empty || slots.owner[at] === OWNER.recomputed;
      putOwner(slots, at, hole && name === "backbone" ? OWNER.recomputed : WRITTEN_BY[name] ?? OWNER.unknown, token.i);
    }
  }
}

/**
 * Bring the slots up to what the lane's events say. Events may have come in any order; a lane that has lost tokens since the
 * last call (the playhead went back), or that is another lane, is read from the start.
 */
export function updateSlots(slots, lane) {
  const { tokens } = lane;
  const { applied } = slots;
  const prefill = lane.prefill?.kv ? lane.prefill : null;
  if (applied.length > tokens.length || applied.some((token, i) => token !== tokens[i]) || (slots.prefill && slots.prefill !== prefill)) {
    clearSlots(slots);
  }
  if (prefill && !slots.prefill) {
    slots.prefill = prefill;
    for (let position = 0; position < slots.prompt; position += 1) applyRuns(slots, position, prefill.kv, NOBODY);
  }
  for (let i = 0; i < tokens.length; i += 1) {
    const token = tokens[i];
    if (!token || slots.applied[i]) continue;
    slots.applied[i] = token;
    applyRuns(slots, token.position, token.kv, token.i);
    applyFilled(slots, token);
  }
}

/** The owners of one position as [first layer, last layer + 1, owner code, index of the token that wrote them], shallow to deep. */
export function ownerRuns(slots, position) {
  const runs = [];
  if (position >= slots.positions) return runs;
  for (let layer = 0; layer < slots.layers; layer += 1) {
    const at = position * slots.layers + layer;
    const last = runs.at(-1);
    if (last && last[2] === slots.owner[at] && last[3] === slots.by[at]) last[1] = layer + 1;
    else runs.push([layer, layer + 1, slots.owner[at], slots.by[at]]);
  }
  return runs;
}

/** Shares 0..1 of the owners behind the prompt, largest first: [[owner name, share], ...]. */
export function ownerShares(slots) {
  const known = slots.counts.reduce((sum, count, owner) => (owner === OWNER.unknown ? sum : sum + count), 0);
  return OWNER_NAMES.map((name, owner) => [name, owner === OWNER.unknown || !known ? 0 : slots.counts[owner] / known])
    .filter(([, share]) => share > 0)
    .sort((a, b) => b[1] - a[1]);
}

// Rows

const LANE_HEIGHT = [0, 210, 160, 128, 104, 100]; // pixels for the layers of one lane, by number of lanes; more lanes are as five
const LEAST_ROW = 2;
const TALLEST_ROW = 10;

/**
 * The rows, shallow to deep, and the height of one in pixels: `shown` has the first layer of each. In a model with more layers than there are rows, a row stands
 * for `stride` layers; the last layer has a row of its own.
 */
export function rowsOf(layers, lanes) {
  const height = LANE_HEIGHT[Math.min(Math.max(1, lanes), LANE_HEIGHT.length - 1)];
  const stride = Math.ceil((layers * LEAST_ROW) / height);
  const shown = [];
  for (let layer = 0; layer < layers; layer += stride) shown.push(layer);
  if (shown.at(-1) !== layers - 1) shown.push(layers - 1);
  return { shown, stride, height: Math.min(TALLEST_ROW, Math.max(LEAST_ROW, Math.floor(height / shown.length))) };
}

/** The layers [first, last + 1] that a row (0 = lowest) stands for. */
export function layersInRow(rows, row, layers) {
  return [rows.shown[row], rows.shown[row + 1] ?? layers];
}

/**
 * The owners of one position by row, as ownerRuns has them by layer: [[first row, last row + 1, owner], ...]. Where a row stands for several layers it is empty if
 * one of them is, so that no hole can be out of sight; otherwise it shows who wrote most of them.
 */
export function ownerRows(slots, position, rows) {
  const runs = [];
  if (position >= slots.positions) return runs;
  const tally = rows.stride > 1 ? new Uint16Array(OWNER_NAMES.length) : null;
  for (let row = 0; row < rows.shown.length; row += 1) {
    const [first, last] = layersInRow(rows, row, slots.layers);
    let owner = slots.owner[position * slots.layers + first];
    if (last - first > 1) {
      tally.fill(0);
      for (let layer = first; layer < last; layer += 1) tally[slots.owner[position * slots.layers + layer]] += 1;
      if (tally[OWNER.empty] > 0) owner = OWNER.empty;
      else for (let other = 0; other < tally.length; other += 1) if (tally[other] > tally[owner]) owner = other;
    }
    const before = runs.at(-1);
    if (before?.[2] === owner) before[1] = row + 1;
    else runs.push([row, row + 1, owner]);
  }
  return runs;
}

/** The row (0 = lowest) that shows a layer: its own, or the one that stands for it. */
export function rowOfLayer(rows, layer) {
  if (layer >= rows.shown.at(-1)) return rows.shown.length - 1;
  return Math.floor(layer / rows.stride);
}

/** How many rows the layers below `layer` take: where a run that ends before `layer` ends. */
export function rowsBelow(rows, layer) {
  let low = 0;
  let high = rows.shown.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows.shown[middle] < layer) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Columns

export const CELL_SIZES = [3, 4, 5, 6, 8, 10, 12, 16];
const PROMPT_GAP = 7;
const LEAST_PROMPT = 2;

/**
 * The columns of all grids: the prompt's positions, a gap, the positions of the answer. Prompt columns, which are all alike in
 * who wrote them, are narrower.
 */
export function columnsOf(prompt, generated, cell) {
  const promptCell = Math.max(LEAST_PROMPT, Math.round(cell / 3));
  const gap = prompt > 0 ? PROMPT_GAP : 0;
  return { prompt, generated, cell, promptCell, gap, start: prompt * promptCell + gap, width: prompt * promptCell + gap + generated * cell };
}

/** The widest cell at which all columns fit into `width` pixels, between the smallest and the largest size. */
export function fitCell(width, prompt, generated) {
  let cell = CELL_SIZES.at(-1);
  while (cell > CELL_SIZES[0] && columnsOf(prompt, generated, cell).width > width) cell -= 1;
  return cell;
}

/** The next cell size, larger (`direction` 1) or smaller (-1). */
export function zoomCell(cell, direction) {
  return direction > 0
    ? (CELL_SIZES.find((size) => size > cell) ?? CELL_SIZES.at(-1))
    : (CELL_SIZES.findLast((size) => size < cell) ?? CELL_SIZES[0]);
}

/** Left edge of a position's column, in pixels from the first column. */
export function columnX(columns, position) {
  return position < columns.prompt ? position * columns.promptCell : columns.start + (position - columns.prompt) * columns.cell;
}

export function columnWidth(columns, position) {
  return position < columns.prompt ? columns.promptCell : columns.cell;
}

/** The position whose column is at `x`, or -1 in the gap and outside. */
export function positionAt(columns, x) {
  if (x < 0 || x >= columns.width) return -1;
  if (x < columns.prompt * columns.promptCell) return Math.floor(x / columns.promptCell);
  return x < columns.start ? -1 : columns.prompt + Math.floor((x - columns.start) / columns.cell);
}

/** The positions [first, last + 1] that are seen, at least in part, through a window of `width` pixels at `scroll`. */
export function visiblePositions(columns, scroll, width) {
  const all = columns.prompt + columns.generated;
  const behind = (x) => columns.prompt + (x - columns.start) / columns.cell;
  const inPrompt = columns.prompt * columns.promptCell;
  const first = scroll < inPrompt ? Math.floor(scroll / columns.promptCell) : Math.max(columns.prompt, Math.floor(behind(scroll)));
  const end = scroll + width;
  const last = end <= inPrompt ? Math.ceil(end / columns.promptCell) : Math.max(columns.prompt, Math.ceil(behind(end)));
  return [Math.max(0, Math.min(first, all)), Math.max(0, Math.min(last, all))];
}

/** Where to scroll so that a position is seen with some room beside it; `scroll` itself if it is. */
export function scrollFor(columns, position, scroll, width) {
  const room = Math.min(64, width / 4);
  const x = columnX(columns, position);
  const right = x + columnWidth(columns, position);
  const most = Math.max(0, columns.width - width);
  if (right + room > scroll + width) return Math.min(most, Math.max(scroll, right + room - width));
  if (x - room < scroll) return Math.min(most, Math.max(0, Math.min(scroll, x - room)));
  return scroll;
}

// Grids one above the other

export const AXIS = 26; // pixels left of the columns, for the layer numbers
export const LANE_TITLE = 29; // above each grid: the lane's name, the marks, the cursor's triangle
export const AXIS_FOOT = 20; // under the last grid: the token numbers

/** One grid for each lane id, top to bottom, and the height of them all. */
export function stackOf(lanes, rows, title = LANE_TITLE) {
  const height = rows.shown.length * rows.height;
  const grids = lanes.map((lane, i) => ({ lane, top: title + i * (height + title), height }));
  return { grids, height: lanes.length * (height + title) + AXIS_FOOT };
}

/** The slot under a point of a stack: { lane, position, layer }, or null beside the grids. `scroll` as in visiblePositions. */
export function slotAt(stack, rows, columns, scroll, x, y) {
  const grid = stack.grids.find(({ top, height }) => y >= top && y < top + height);
  const position = x < AXIS ? -1 : positionAt(columns, x - AXIS + scroll);
  if (!grid || position < 0) return null;
  const row = rows.shown.length - 1 - Math.floor((y - grid.top) / rows.height);
  return { lane: grid.lane, position, layer: rows.shown[row] };
}

/** The other way: the box { x, y, width, height } of a slot in a grid of a stack. */
export function slotBox(grid, rows, columns, scroll, position, layer) {
  return {
    x: AXIS + columnX(columns, position) - scroll,
    y: grid.top + grid.height - (rowOfLayer(rows, layer) + 1) * rows.height,
    width: columnWidth(columns, position),
    height: rows.height,
  };
}

/** Every how many tokens the axis carries a number, so that two of them are at least `apart` pixels from one another. */
export function tickStep(cell, apart = 40) {
  return [5, 10, 20, 25, 50, 100, 200, 250, 500].find((step) => step * cell >= apart) ?? 1000;
}

/** The layers (0-based) whose numbers the axis of one grid carries, `apart` pixels from one another or more: round ones, the first and the last. */
export function layerTicks(rows, apart = 22) {
  const layers = rows.shown.at(-1) + 1;
  const perLayer = (rows.height * rows.shown.length) / layers;
  const step = [1, 2, 5, 10, 20, 25, 50, 100, 250].find((one) => one * perLayer >= apart) ?? layers;
  const ticks = [0];
  for (let number = step; number < layers; number += step) {
    if (number > 1 && (number - 1) * perLayer >= 0.6 * apart && (layers - number) * perLayer >= 0.6 * apart) ticks.push(number - 1);
  }
  if (layers > 1) ticks.push(layers - 1);
  return ticks;
}

// Colour scales

/** Levels of a colour scale, and the level of a value that is not known. */
export const LEVELS = 64;
export const BLANK = 255;

const ROUND = [1, 2, 5];

/** The nearest of ..., 0.1, 0.2, 0.5, 1, ... that is not above (or, upwards, not below) a positive value. */
function rounding(value, upwards) {
  const power = 10 ** Math.floor(Math.log10(value));
  const steps = [...ROUND.map((step) => step * power), 10 * power];
  const near = value * 1e-9; // 0.03 / 0.01 is not 3
  return upwards ? steps.find((step) => step >= value - near) : steps.findLast((step) => step <= value + near);
}

/**
 * Limits of the scale for 1 - cos, the same for all lanes of a run: what the middle nine tenths of `values` (similarities)
 * span, rounded outwards, with 1 - tau inside. Without values, three decades.
 */
export function changeLimits(values, tau = null) {
  const changes = values.map((value) => 1 - value).filter((value) => value > 0);
  if (changes.length === 0) return [0.001, 1];
  changes.sort((a, b) => a - b);
  const at = (share) => changes[Math.min(changes.length - 1, Math.floor(share * changes.length))];
  const needed = typeof tau === "number" && tau < 1 ? 1 - tau : Infinity;
  const low = rounding(Math.max(1e-6, Math.min(at(0.05), needed)), false);
  return [low, Math.max(10 * low, rounding(Math.min(1, Math.max(at(0.95), needed === Infinity ? 0 : needed)), true))];
}

/** K and V are compared over three decades in every run, so that pictures of different runs can be compared too. */
export const ERROR_LIMITS = [0.001, 1];

/** Level 0 .. LEVELS - 1 of a change (1 - cos) on a logarithmic scale; what lies outside the limits takes the nearest. */
export function levelOf(change, [low, high]) {
  if (!(change > low)) return 0;
  return Math.min(LEVELS - 1, Math.floor((Math.log(change / low) / Math.log(high / low)) * LEVELS));
}

const CHANGE_LIGHT = ["#f8f6fc", "#e4def2", "#c9bce4", "#aa94d2", "#8a6abb", "#6c439d", "#4e2477", "#2f0f4c"];
const CHANGE_DARK = ["#1d1530", "#35225a", "#4f3585", "#6d52ab", "#8d77c6", "#ad9edb", "#cfc6ec", "#f0ecfa"];
const ERROR_LIGHT = ["#fff6ec", "#fde0c0", "#fbbf88", "#f29650", "#d96c22", "#ad480c", "#762d06", "#421703"];
const ERROR_DARK = ["#2a1809", "#4d2a0d", "#7a4010", "#a95a1a", "#d17c35", "#eba263", "#f8c99e", "#fdeede"];

/** [r, g, b] of a "#rrggbb" colour. */
export function rgbOf(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** The "#rrggbb" colour that lies a share 0..1 of the way from one to another. */
export function mixed(from, to, share) {
  const [a, b] = [rgbOf(from), rgbOf(to)];
  return `#${a.map((value, at) => Math.round(value + (b[at] - value) * share).toString(16).padStart(2, "0")).join("")}`;
}

/** The LEVELS colours of a scale, "change" (similarity) or "error" (K/V), for a theme: further from the page means more. */
export function scaleColours(scale, theme) {
  const stops = { change: { light: CHANGE_LIGHT, dark: CHANGE_DARK }, error: { light: ERROR_LIGHT, dark: ERROR_DARK } }[scale][theme];
  return Array.from({ length: LEVELS }, (_, level) => {
    const x = (level / (LEVELS - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(x), stops.length - 2);
    return mixed(stops[low], stops[low + 1], x - low);
  });
}
