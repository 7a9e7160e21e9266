// Draws the grids on a surface, for the screen and for export alike. A scene says what and where:
//   run, view            as given to the panel
//   colours              of the theme: see `palette` below
//   slots                Map lane id -> slots of layout.js
//   rows, columns, stack from layout.js; width of the whole picture, scroll of the columns

import {
  AXIS,
  AXIS_FOOT,
  BLANK,
  ERROR_LIMITS,
  LANE_TITLE,
  LEVELS,
  OWNER,
  OWNER_NAMES,
  changeLimits,
  columnWidth,
  columnX,
  layerTicks,
  layersInRow,
  levelOf,
  mixed,
  ownerRows,
  ownerShares,
  rowOfLayer,
  rowsBelow,
  scaleColours,
  tickStep,
  visiblePositions,
} from "./layout.js";
import { layersOf } from "./store.js";

/** What the owners are called in titles, legend and readout. */
export const OWNER_WORDS = {
  backbone: "backbone",
  river: "river",
  propagated: "propagated",
  recomputed: "recomputed",
  draft: "draft",
  empty: "empty",
};

/** Colours and fills of a theme, from the style sheet's variables: `value(name)` gives the one called --name. */
export function palette(value, theme) {
  const [panel, ink, muted, line, flag, accent] = ["panel", "ink", "muted", "line", "flag", "accent"].map(value);
  const kv = Object.fromEntries(Object.keys(OWNER_WORDS).map((name) => [name, value(`kv-${name}`)]));
  const pale = (colour) => mixed(colour, panel, 0.72);
  const owners = {
    backbone: kv.backbone,
    river: kv.river,
    propagated: { pattern: "hatch", ink: kv.propagated, paper: pale(kv.propagated) },
    recomputed: { pattern: "dots", ink: mixed(kv.recomputed, panel, 0.8), paper: kv.recomputed },
    draft: { pattern: "stripes", ink: kv.draft, paper: pale(kv.draft) },
    empty: { pattern: "crosses", ink: value("kv-cross"), paper: kv.empty },
  };
  const scales = Object.fromEntries(["change", "error"].map((name) => [name, scaleColours(name, theme)]));
  // What was measured for the picture only is paler: the second half of the levels.
  scales.change = [...scales.change, ...scales.change.map((colour) => mixed(colour, panel, 0.5))];
  const ownerOf = OWNER_NAMES.map((name) => owners[name] ?? panel);
  // The prompt is the same in all lanes and written at one go: it stands back.
  const promptOwnerOf = OWNER_NAMES.map((name) => (kv[name] ? mixed(kv[name], panel, 0.3) : panel));
  return { theme, panel, ink, muted, line, flag, accent, owners, ownerOf, promptOwnerOf, scales };
}

// What a run says

export function promptOf(run) {
  return run.header?.prompt_ids?.length ?? 0;
}

/** The token whose step wrote a position, or null: for the prompt but its last position, and for what has not come yet. */
export function tokenAt(run, lane, position) {
  return lane.tokens[position - Math.max(0, promptOf(run) - 1)] ?? null;
}

/** cos of input and output by layer at a position, or null. The prompt's come with the pass that lanes share. */
export function similaritiesAt(run, lane, position) {
  const token = tokenAt(run, lane, position);
  if (token) return token.similarity;
  if (position >= promptOf(run)) return null;
  return promptSimilarities(run, lane)?.[position] ?? null;
}

function promptSimilarities(run, lane) {
  if (!lane.prefill?.shared) return lane.prefill?.similarity ?? null;
  for (const other of run.lanes.values()) if (other.prefill?.similarity && !other.prefill.shared) return other.prefill.similarity;
  return null;
}

/** The similarity above which tokens leave, and the lane whose rule says so: the lane itself, or else the first that has one. Or null. */
export function tauOf(run, lane) {
  const asks = (one) => one.rule?.name === "similarity" && typeof one.rule.tau === "number" && Math.abs(one.rule.tau) <= 1;
  const found = lane && asks(lane) ? lane : [...run.lanes.values()].find(asks);
  return found ? { tau: found.rule.tau, lane: found } : null;
}

/** Whether the exit test needed the similarity of a layer (0-based), rather than it having been measured for the picture only. */
export function testNeeded(lane, token, layer) {
  const { rule } = lane;
  if (rule?.name !== "similarity" || !token?.tested) return false;
  const number = layer + 1;
  return number <= token.exit_layer && number < token.similarity.length && number >= (rule.floor ?? 1) && (!rule.layers || rule.layers.includes(number));
}

/** What a row stands for where it is not one layer; empty where it is. */
export function rowWords(rows) {
  return rows.stride > 1 ? `a row stands for ${rows.stride} layers, and shows a hole or the largest change in any of them` : "";
}

const SAMPLED = 32; // tokens a lane

/**
 * Limits of the similarity scale, the same for all lanes: from the prompt where it was recorded, so that they hold while the answer comes; else
 * from the first tokens of every lane.
 */
export function similarityLimits(run) {
  const values = [];
  for (const lane of run.lanes.values()) for (const row of lane.prefill?.similarity ?? []) values.push(...row);
  if (values.length === 0) {
    for (const lane of run.lanes.values()) for (const token of lane.tokens.slice(0, SAMPLED)) if (token) values.push(...token.similarity);
  }
  return changeLimits(values.filter((value) => typeof value === "number"), tauOf(run)?.tau ?? null);
}

/** "70 % empty", or "under 1 %" of something that is there all the same. */
export function shareWords(share) {
  const percent = Math.round(100 * share);
  return percent < 1 ? "under 1 %" : `${share < 1 ? Math.min(99, percent) : percent} %`;
}

/** The shares of the owners of a lane's slots in words, largest first. */
export function sharesInWords(slots) {
  return ownerShares(slots).map(([name, share]) => `${shareWords(share)} ${OWNER_WORDS[name] ?? name}`);
}

// Parts that all grids have

function grids(surface, scene, draw) {
  const { columns, scroll, width } = scene;
  const [first, last] = visiblePositions(columns, scroll, width - AXIS);
  for (const grid of scene.stack.grids) {
    surface.inside([AXIS, grid.top - LANE_TITLE, width - AXIS, grid.height + LANE_TITLE + AXIS_FOOT], AXIS - scroll, grid.top, () => draw(grid, first, last));
  }
}

function frameBoxes(x, y, width, height, line = 1) {
  return [x, y, width, line, x, y + height - line, width, line, x, y, line, height, x + width - line, y, line, height];
}

function frames(surface, scene, grid) {
  const { columns, colours } = scene;
  const boxes = frameBoxes(columns.start - 1, -1, columns.generated * columns.cell + 2, grid.height + 2);
  surface.rects(colours.line, boxes);
  if (columns.prompt) surface.rects(colours.muted, frameBoxes(-1, -1, columns.prompt * columns.promptCell + 2, grid.height + 2));
}

/** Thin gaps between the columns of the answer, where there is room for them. */
function gaps(surface, scene, grid, first, last) {
  const { columns, colours } = scene;
  if (columns.cell < 6) return;
  const boxes = [];
  for (let position = Math.max(first, columns.prompt + 1); position <= last; position += 1) {
    boxes.push(columnX(columns, position) - 1, 0, 1, grid.height);
  }
  surface.rects(colours.panel, boxes);
}

function layerNumbers(surface, scene) {
  const { rows, colours } = scene;
  for (const grid of scene.stack.grids) {
    for (const layer of layerTicks(rows)) {
      const y = grid.top + grid.height - (rowOfLayer(rows, layer) + 0.5) * rows.height;
      surface.text(AXIS - 5, y + 3.5, [[String(layer + 1), colours.muted]], { size: 10, align: "right" });
    }
  }
}

/** Width and middle of what is seen of the prompt's columns. */
function promptSpan({ columns, scroll }) {
  const right = columns.prompt * columns.promptCell;
  return [right - scroll, (Math.max(0, scroll) + right) / 2];
}

function tokenNumbers(surface, scene) {
  const { columns, colours, scroll, width } = scene;
  const bottom = scene.stack.grids.at(-1);
  if (!bottom) return;
  const y = bottom.top + bottom.height;
  const [first, last] = visiblePositions(columns, scroll, width - AXIS);
  surface.inside([AXIS, y, width - AXIS, AXIS_FOOT], AXIS - scroll, y, () => {
    const [room, middle] = promptSpan(scene);
    const words = [`prompt, ${columns.prompt} tokens`, "prompt"].find((text) => text.length * 5.5 < room);
    if (words) surface.text(middle, 14, [[words, colours.muted]], { size: 10, align: "center" });
    const step = tickStep(columns.cell);
    for (let position = Math.max(first - 1, columns.prompt); position < last + 1 && position < columns.prompt + columns.generated; position += 1) {
      const number = position - columns.prompt + 2; // token 1 belongs to the prompt's last position
      if (number % step !== 0) continue;
      const x = columnX(columns, position) + columns.cell / 2;
      surface.rects(colours.muted, [Math.round(x), 1, 1, 3]);
      surface.text(x, 14, [[String(number), colours.muted]], { size: 10, align: "center" });
    }
  });
}

/** Marked tokens as ticks, the cursor and the token under the pointer as outlined columns with a triangle. */
function markers(surface, scene, grid) {
  const { columns, colours, view } = scene;
  const start = columns.prompt - 1; // the position of token 0
  const ticks = [];
  for (const i of view.marks?.get(grid.lane) ?? []) {
    const position = start + i;
    if (position >= 0) ticks.push(columnX(columns, position), -6, Math.max(2, columnWidth(columns, position) - 1), 4);
  }
  surface.rects(colours.flag, ticks);
  for (const [at, colour] of [[view.hover, colours.accent], [view.cursor, colours.ink]]) {
    if (!at || start + at.i < 0 || start + at.i >= columns.prompt + columns.generated) continue;
    const x = columnX(columns, start + at.i);
    const w = columnWidth(columns, start + at.i);
    surface.rects(colours.panel, frameBoxes(x - 3, -3, w + 5, grid.height + 6));
    surface.rects(colour, frameBoxes(x - 2, -2, w + 3, grid.height + 4, at.lane === grid.lane ? 2 : 1));
    const tip = x + w / 2 - 0.5;
    surface.polygon(colour, [tip - 4, -9, tip + 4, -9, tip, -3]);
  }
}

function titles(surface, scene, runsOf) {
  for (const grid of scene.stack.grids) {
    surface.inside([0, grid.top - LANE_TITLE, scene.width, LANE_TITLE], 0, grid.top, () => surface.text(AXIS, -11, runsOf(grid), { size: 12 }));
  }
}

// Who wrote each slot

export function paintOwners(surface, scene) {
  const { run, view, colours, rows, columns } = scene;
  titles(surface, scene, (grid) => {
    const lane = run.lanes.get(grid.lane);
    const words = sharesInWords(scene.slots.get(grid.lane));
    const room = (scene.width - AXIS) / 6.6 - lane.label.length * 1.15; // characters, about
    let said = words[0] ?? "";
    for (const more of words.slice(1)) if (said.length + more.length + 3 <= room) said += ` · ${more}`;
    return [[`${lane.label}  `, colours.ink, true], [said, colours.muted]];
  });
  layerNumbers(surface, scene);
  grids(surface, scene, (grid, first, last) => {
    frames(surface, scene, grid);
    const edge = Math.min(Math.max(first, columns.prompt), last);
    ownerBoxes(scene, grid, first, edge).forEach((list, owner) => surface.rects(colours.promptOwnerOf[owner], list));
    const boxes = ownerBoxes(scene, grid, edge, last);
    const [holes] = boxes.splice(OWNER.empty, 1, []);
    boxes.forEach((list, owner) => surface.rects(colours.ownerOf[owner], list));
    gaps(surface, scene, grid, first, last);
    surface.rects(colours.owners.empty, holes); // what is not there has no columns either
    const coming = view.inflight?.get(grid.lane);
    if (coming?.token) growing(surface, scene, grid, coming);
    markers(surface, scene, grid);
  });
  tokenNumbers(surface, scene);
}

/** Boxes by owner. Equal runs of layers in neighbouring columns are one box, so that a whole lane is drawn in few strokes. */
function ownerBoxes(scene, grid, first, last) {
  const { rows, columns } = scene;
  const slots = scene.slots.get(grid.lane);
  const boxes = OWNER_NAMES.map(() => []);
  let open = [];
  for (let position = first; position < last; position += 1) {
    const x = columnX(columns, position);
    const w = columnWidth(columns, position);
    const next = [];
    for (const [low, high, owner] of ownerRows(slots, position, rows)) {
      if (owner === OWNER.unknown) continue;
      const same = open.find((run) => run.low === low && run.high === high && run.owner === owner);
      if (same) boxes[owner][same.at + 2] += w;
      else boxes[owner].push(x, grid.height - high * rows.height, w, (high - low) * rows.height);
      next.push(same ?? { low, high, owner, at: boxes[owner].length - 4 });
    }
    open = next;
  }
  return boxes;
}

const WRITES = { backbone: "backbone", river: "river", propagated: "propagated", draft: "draft" };

/** The token in flight: its column as far up as its layers have been run, the holes that it fills, and the drafts that wait for their check. */
function growing(surface, scene, grid, { token, layers }) {
  const { rows, columns, colours } = scene;
  const box = (position, first, last, owner) => {
    const [low, high] = [rowsBelow(rows, first), rowsBelow(rows, Math.min(last, layers))];
    if (high <= low || position >= columns.prompt + columns.generated) return;
    surface.rects(colours.owners[owner], [columnX(columns, position), grid.height - high * rows.height, columnWidth(columns, position), (high - low) * rows.height]);
  };
  const { cycle } = token;
  if (cycle) {
    
    for (let place = cycle.place; place < cycle.drafted; place += 1) {
      const position = token.position + place - cycle.place;
      if (position >= columns.prompt + columns.generated) break;
      surface.rects(colours.owners.draft, [columnX(columns, position), 0, columnWidth(columns, position), grid.height]);
    }
  }
  for (const [position, first, last] of token.filled ?? []) box(position, first, last, "recomputed");
  for (const [first, last, name] of token.kv) if (WRITES[name]) box(token.position, first, last, WRITES[name]);
  gaps(surface, scene, grid, Math.max(columns.prompt, token.position - 20), Math.min(token.position + 8, columns.prompt + columns.generated));
}

// How much each layer changes the state

export function paintSimilarity(surface, scene) {
  const { run, view, colours, rows, columns, limits } = scene;
  const lane = run.lanes.get(view.lane);
  layerNumbers(surface, scene);
  if (lane) {
    const tau = tauOf(run, lane)?.tau ?? Infinity;
    grids(surface, scene, (grid, first, last) => {
      frames(surface, scene, grid);
      heat(surface, scene, grid, first, last, colours.scales.change, (position) => {
        const values = similaritiesAt(run, lane, position);
        if (!values) return null;
        const token = tokenAt(run, lane, position);
        return (layer) => {
          const value = values[layer];
          if (typeof value !== "number") return BLANK;
          return levelOf(1 - value, limits) + (token && testNeeded(lane, token, layer) ? 0 : LEVELS);
        };
      });
      gaps(surface, scene, grid, first, last);
      surface.rects(colours.accent, aboveTau(scene, grid, lane, tau, first, last));
      surface.rects(colours.flag, exits(scene, grid, lane, first, last));
      markers(surface, scene, grid);
    });
  }
  tokenNumbers(surface, scene);
}

function heat(surface, scene, grid, first, last, scale, columnLevels) {
  const { rows, columns } = scene;
  const count = rows.shown.length;
  for (const [from, to] of [[first, Math.min(last, columns.prompt)], [Math.max(first, columns.prompt), last]]) {
    if (to <= from) continue;
    const levels = new Uint8Array((to - from) * count).fill(BLANK);
    for (let position = from; position < to; position += 1) {
      const level = columnLevels(position);
      if (level) for (let row = 0; row < count; row += 1) levels[(position - from) * count + row] = greatest(level, ...layersInRow(rows, row, layersOf(scene.run)));
    }
    surface.cells(columnX(columns, from), 0, columnWidth(columns, from), rows.height, count, levels, scale);
  }
}

/** Of the layers that a row stands for, the level that means most. */
function greatest(level, first, last) {
  let most = level(first);
  for (let layer = first + 1; layer < last; layer += 1) {
    const other = level(layer);
    if (other !== BLANK && (most === BLANK || other % LEVELS > most % LEVELS)) most = other;
  }
  return most;
}

/**
 * A dot in every cell whose similarity, as recorded, is above tau; the one at the exit, which the exit's bar stands for, is left out. Where the exit test
 * asked before, the answer was no, whatever the rounded number says.
 */
function aboveTau(scene, grid, lane, tau, first, last) {
  const { run, rows, columns } = scene;
  const boxes = [];
  for (let position = first; position < last; position += 1) {
    const values = similaritiesAt(run, lane, position);
    if (!values) continue;
    const w = columnWidth(columns, position);
    const size = w < 6 || rows.height < 4 ? 1 : 2;
    const x = columnX(columns, position) + Math.floor((w - size) / 2);
    const token = position < columns.prompt ? null : tokenAt(run, lane, position);
    const exit = token?.exit_layer ?? 0;
    const dotted = (layer) => values[layer] > tau && layer + 1 !== exit && !(token && testNeeded(lane, token, layer));
    rows.shown.forEach((_, row) => {
      const [low, high] = layersInRow(rows, row, layersOf(run));
      let some = false;
      for (let layer = low; layer < high; layer += 1) some ||= dotted(layer);
      if (some) boxes.push(x, grid.height - (row + 0.5) * rows.height - size / 2, size, size);
    });
  }
  return boxes;
}

/** A bar on top of the last backbone layer of every token of the answer. */
function exits(scene, grid, lane, first, last) {
  const { run, rows, columns } = scene;
  const boxes = [];
  for (let position = Math.max(first, columns.prompt); position < last; position += 1) {
    const token = tokenAt(run, lane, position);
    if (!token) continue;
    const y = grid.height - rowsBelow(rows, token.exit_layer) * rows.height;
    boxes.push(columnX(columns, position), Math.min(grid.height - 2, Math.max(0, y - 1)), columns.cell - (columns.cell < 6 ? 0 : 1), 2);
  }
  return boxes;
}

// How far keys and values are from the backbone's

/** `scene.which` is "k" or "v". */
export function paintError(surface, scene) {
  const { run, view, colours, rows, columns, which } = scene;
  const lane = run.lanes.get(view.lane);
  const fidelity = lane?.fidelity;
  layerNumbers(surface, scene);
  grids(surface, scene, (grid, first, last) => {
    frames(surface, scene, grid);
    const [room, middle] = promptSpan(scene);
    if (room > 110) {
      const words = room > 190 ? "prompt: same slots in all lanes" : "same in all lanes";
      surface.text(middle, grid.height / 2 + 4, [[words, colours.muted]], { align: "center" });
    }
    if (!fidelity) return;
    const slots = scene.slots.get(view.lane);
    // Slots that stayed empty to the end: a comparison with nothing, whatever number it gives.
    const hole = (position, layer) => !fillsAtEnd(lane) && slots.owner[position * slots.layers + layer] === OWNER.empty;
    const empty = [];
    heat(surface, scene, grid, first, last, colours.scales.error, (position) => {
      const values = fidelity[`${which}_cos`]?.[position - fidelity.start];
      if (!values || position >= slots.positions) return null;
      return (layer) => (typeof values[layer] !== "number" || hole(position, layer) ? BLANK : levelOf(1 - values[layer], ERROR_LIMITS));
    });
    for (let position = Math.max(first, fidelity.start); position < Math.min(last, slots.positions); position += 1) {
      for (const [low, high, owner] of ownerRows(slots, position, rows)) {
        if (owner !== OWNER.empty || fillsAtEnd(lane)) continue;
        empty.push(columnX(columns, position), grid.height - high * rows.height, columns.cell, (high - low) * rows.height);
      }
    }
    gaps(surface, scene, grid, first, last);
    surface.rects(colours.owners.empty, empty);
    markers(surface, scene, grid);
  });
  tokenNumbers(surface, scene);
}

/** Recompute completes what is pending before its slots are compared, without a token to show it by. */
export function fillsAtEnd(lane) {
  return lane.method === "recompute" || lane.method === "replay";
}
