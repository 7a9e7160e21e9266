// The grids as a table, for readers who do not see the canvas.

import { el, visible } from "./inspector.js";
import { OWNER, OWNER_NAMES, newSlots, ownerRuns, updateSlots } from "./layout.js";
import { layersOf } from "./store.js";

const ROWS = 400; // a page with thousands of table rows is of no use to anybody

const SLOT_WORDS = { empty: "empty", backbone: "backbone", river: "river", propagated: "propagated", draft: "draft", unknown: "not recorded" };

/** The slots of one position in words: "1–14 backbone, 15–30 river". */
export function slotsInWords(slots, position) {
  return ownerRuns(slots, position)
    .map(([first, last, owner, by]) => {
      const range = last - first === 1 ? `${last}` : `${first + 1}–${last}`;
      return `${range} ${owner === OWNER.recomputed ? `recomputed at token ${by + 1}` : SLOT_WORDS[OWNER_NAMES[owner]]}`;
    })
    .join(", ");
}

/** A <table> of a lane's tokens: index, text, exit layer, KV slots, similarity at the exit, milliseconds. The last 400 where there are more. */
export function gridTable(run, lane) {
  const layers = layersOf(run);
  const slots = newSlots(layers, run.header?.prompt_ids?.length ?? 0);
  updateSlots(slots, lane);
  const tokens = lane.tokens.filter((token) => token);
  const shown = tokens.slice(-ROWS);
  const cut = tokens.length > shown.length ? ` The last ${shown.length} of ${tokens.length}; the CSV file has them all.` : "";
  const heads = ["Token", "Text", "Exit layer", "KV slots by layer", "Similarity at exit", "Milliseconds"];
  return el(
    "table",
    { class: "grid-table" },
    el("caption", {}, `${lane.label}: tokens and KV slots, ${layers} layers.${cut}`),
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...shown.map((token) => tokenRow(token, slots, layers))),
  );
}

function tokenRow(token, slots, layers) {
  const similarity = token.exit_layer > 0 && token.exit_layer < layers ? token.similarity[token.exit_layer - 1] : null;
  const cells = [
    visible(token.text),
    String(token.exit_layer),
    slotsInWords(slots, token.position),
    typeof similarity === "number" ? similarity.toFixed(4) : "–",
    `${(token.t_ns / 1e6).toFixed(2)}${token.from_prefill ? " (prefill)" : ""}`,
  ];
  return el("tr", {}, el("th", { scope: "row" }, String(token.i + 1)), ...cells.map((cell) => el("td", {}, cell)));
}
