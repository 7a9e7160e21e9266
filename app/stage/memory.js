// The memory meter: what holds how many bytes, and how each number is known.

import { el, setText } from "./inspector.js";
import { slotsHeld } from "./store.js";

/** Bytes in words: 424.7 MB. */
export function bytesWords(bytes) {
  const [unit, digits] = bytes >= 1e9 ? [1e9, 2] : bytes >= 1e6 ? [1e6, 1] : [1e3, 0];
  return `${(bytes / unit).toFixed(digits)} ${{ 1e9: "GB", 1e6: "MB", 1e3: "kB" }[unit]}`;
}

/**
 * The parts as a list of { name, kind, bytes, how }, with `held` and `lane` for the cache of a lane: kind is "backbone", "head", "river",
 * "kv" or "rest"; how is "measured", "recorded" (measured when the trace was made) or "computed". `run` is what is shown, `whole`
 * everything that is known of it; the allocated caches and the peak are known at the end of a run only.
 */
export function memoryParts(run, whole, live) {
  const header = whole.header;
  const sizes = header?.bytes ?? {};
  const measured = live ? "measured" : "recorded";
  const parts = [
    { name: "Backbone", kind: "backbone", bytes: sizes.backbone, how: measured },
    { name: "LM head", kind: "head", bytes: sizes.head, how: measured },
    { name: "River", kind: "river", bytes: sizes.river, how: measured },
  ].filter((part) => typeof part.bytes === "number" && part.bytes > 0);
  for (const lane of whole.lanes.values()) {
    const shown = run.lanes.get(lane.id);
    const held = sizes.kv_slot && shown ? slotsHeld(run, shown) * sizes.kv_slot : null;
    const allocated = lane.end?.kv_bytes;
    if (typeof allocated === "number" && allocated > 0) parts.push({ name: `KV, ${lane.label}`, kind: "kv", lane: lane.id, bytes: allocated, held, how: measured });
    else if (held) parts.push({ name: `KV, ${lane.label}`, kind: "kv", lane: lane.id, bytes: held, held, how: "computed" });
  }
  const peak = typeof whole.memory?.peak_bytes === "number" ? whole.memory.peak_bytes : null;
  const sum = parts.reduce((total, part) => total + part.bytes, 0);
  if (peak > sum) {
    const what = whole.memory.of === "device" ? "Rest of the peak: buffers" : "Rest of the peak: program, libraries, buffers, the file’s pages";
    parts.push({ name: what, kind: "rest", bytes: peak - sum, how: "computed" });
  }
  const offloaded = typeof sizes.offloaded === "number" ? sizes.offloaded : 0;
  return { parts, peak, of: whole.memory?.of ?? null, sum, measured, offloaded };
}

/** The meter. Returns `element` and `draw(run, whole, live)`. */
export function createMemory() {
  const bar = el("div", { class: "memory-bar", "aria-hidden": "true" });
  const body = el("tbody");
  const tag = el("span", { class: "tag" });
  const total = el("span", { class: "memory-total" });
  const element = el(
    "section",
    { class: "memory", "aria-label": "Memory" },
    el("header", {}, el("h2", {}, "Memory"), tag, total),
    bar,
    el(
      "div",
      { class: "memory-scroll", tabindex: "0", role: "group", "aria-label": "Memory by part" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el("tr", {}, ...["", "Bytes", "Written so far", "Known how"].map((head) => el(head ? "th" : "td", head ? { scope: "col" } : {}, head))),
        ),
        body,
      ),
    ),
  );
  let builtFor = "";
  let helds = new Map();

  function build({ parts, peak, of, sum, measured, offloaded }) {
    helds = new Map();
    setText(tag, measured);
    const least = peak === null ? "" : `peak of the ${of} ${bytesWords(peak)} · `;
    const away = offloaded ? ` · ${bytesWords(offloaded)} of the backbone offloaded` : "";
    setText(total, `${least}parts named here ${bytesWords(sum)}${away}`);
    bar.replaceChildren(
      ...parts.map((part) => {
        const piece = el("span", { class: `memory-${part.kind}`, title: `${part.name}: ${bytesWords(part.bytes)}, ${part.how}` });
        if (part.bytes / Math.max(1, peak ?? sum) > 0.12) piece.append(part.name.split(":")[0]);
        piece.style.flexGrow = String(part.bytes);
        return piece;
      }),
    );
    body.replaceChildren(
      ...parts.map((part) => {
        const held = el("td");
        if (part.lane) helds.set(part.lane, held);
        return el(
          "tr",
          {},
          el("th", { scope: "row" }, el("i", { class: `memory-${part.kind}`, "aria-hidden": "true" }), part.name),
          el("td", {}, part.kind === "kv" && part.how !== "computed" ? `${bytesWords(part.bytes)} allocated` : bytesWords(part.bytes)),
          held,
          el("td", {}, part.how),
        );
      }),
    );
    if (peak === null) body.append(el("tr", {}, el("th", { scope: "row" }, "Peak"), el("td", { colspan: "3" }, "not recorded")));
  }

  return {
    element,
    draw(run, whole, live) {
      const known = memoryParts(run, whole, live);
      element.hidden = known.parts.length === 0;
      if (element.hidden) return;
      const key = known.parts.map((part) => `${part.name}/${part.kind === "kv" && part.how === "computed" ? "" : part.bytes}/${part.how}`).join("\n") + known.peak;
      if (key !== builtFor) {
        builtFor = key;
        build(known);
      }
      for (const part of known.parts) {
        const held = helds.get(part.lane);
        if (held) setText(held, part.held === null ? "not recorded" : `${bytesWords(part.held)}, computed`);
      }
    },
  };
}
