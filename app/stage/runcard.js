// The run card: everything that is needed to make a run's numbers again, as text.

import { el } from "./inspector.js";
import { backboneOf, isOver, layersOf, meanDepth, sameText, speed, speedUp, timingWords } from "./store.js";

const MODES = {
  free: "each lane writes its own text",
  "same-text": "every lane reads the backbone's text",
  "same-exits": "every lane reads the backbone's text and leaves where River left",
};

/** A device in words: its name where it is known. */
export function deviceWords(header) {
  return header.device_name ?? header.device;
}

function samplerWords({ temperature, top_k: topK, top_p: topP, seed }) {
  if (!temperature) return "greedy";
  const parts = [`temperature ${temperature}`];
  if (topK) parts.push(`top-k ${topK}`);
  if (topP < 1) parts.push(`top-p ${topP}`);
  return [...parts, `seed ${seed}`].join(", ");
}

function dtypeWords(header) {
  const parts = [`decode ${header.dtype}`];
  if (header.prefill_dtype) parts.push(`prefill ${header.prefill_dtype}`);
  if (header.kv_dtype) parts.push(`KV cache ${header.kv_dtype}`);
  return parts.join(", ");
}

function modelWords({ name, n_layers: layers, source, revision, sha256 }) {
  const parts = [`${name}, ${layers} layers`];
  if (source) parts.push(`source ${source}`);
  if (revision) parts.push(`revision ${revision}`);
  if (sha256) parts.push(`sha256 ${sha256}`);
  return parts.join(", ");
}

function ruleOfLane(lane) {
  const rule = lane.rule;
  if (!rule) return "";
  const parts = Object.entries(rule)
    .filter(([key, value]) => key !== "name" && value !== null && typeof value !== "object")
    .map(([key, value]) => `${key} ${value}`);
  return `rule ${[rule.name, ...parts].join(" ")}`;
}

function laneLine(run, lane) {
  const rate = speed(lane);
  const ratio = speedUp(run, lane);
  const depth = meanDepth(lane);
  const repeats = run.header.timing?.tokens_per_second?.[lane.id];
  return [
    `  ${lane.label}: ${rate ? `${rate.toFixed(2)} tokens/s` : "no decode step"}`,
    ...(ratio && lane !== backboneOf(run) ? [`${ratio.toFixed(3)}x the backbone`] : []),
    ...(depth === null ? [] : [`${depth.toFixed(2)} of ${layersOf(run)} backbone layers per token`]),
    `${lane.decoded} decode steps`,
    ...(lane.rule ? [ruleOfLane(lane)] : []),
    ...(lane.end ? [`ended: ${lane.end.reason}`] : []),
    ...(Array.isArray(repeats) && isOver(run) ? [`repeats ${repeats.join(" / ")} tokens/s`] : []),
  ].join(", ");
}

/** The run card as text; lines whose facts the trace does not hold are left out. `source` is "live", "recording", "file" or "replay". */
export function runCard(run, source = "live") {
  const header = run.header;
  if (!header) return "";
  const { kernels, quantiser, timing, versions } = header;
  const steps = [...run.lanes.values()].map((lane) => lane.decoded);
  const peak = run.memory?.peak_bytes;
  const lines = [
    ["Run", `${header.created}${source === "live" ? "" : ", recorded"}${isOver(run) ? "" : ", not finished here"}`],
    ["Model", modelWords(header.model)],
    ["Device", `${deviceWords(header)} (${header.device})${header.threads ? `, ${header.threads} threads` : ""}`],
    ["Number types", dtypeWords(header)],
    ["Kernels", kernels && `river ${kernels.river ?? "none"}`],
    ["Quantiser", quantiser && `${quantiser.name}, ${quantiser.bits} bits, groups of ${quantiser.group_size}`],
    ["Prompt", `${header.prompt_ids.length} tokens${header.chat ? ", chat template" : ""}, prefill ${header.prefill ?? "full"}`],
    ["Decode", `batch 1, at most ${header.max_new_tokens} tokens, ${Math.min(...steps)} to ${Math.max(...steps)} steps here`],
    ["Sampler", samplerWords(header.sampler)],
    ["Compared", MODES[header.mode] ?? (sameText(run) ? MODES["same-text"] : MODES.free)],
    ["Timing", [timing?.protocol ?? timingWords(run), timing?.instrumented && `Outside the clock: ${timing.instrumented}.`].filter(Boolean).join(" ")],
    ["Repeats", timing?.repeats && `${timing.repeats}${timing.kept ? `; kept: ${timing.kept}` : ""}`],
    ["Peak memory", typeof peak === "number" && `${(peak / 1e6).toFixed(0)} MB (${run.memory.of})`],
    ["Versions", versions && Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ")],
    ["Command", header.recording?.command],
  ];
  return [
    "River Explorer run card",
    ...lines.filter(([, value]) => value).map(([name, value]) => `${name}: ${value}`),
    "Lanes (batch 1; tokens per second of engine time, first token excluded):",
    ...[...run.lanes.values()].map((lane) => laneLine(run, lane)),
  ].join("\n");
}

/**
 * The card on the page: a button that copies it and a fold that shows it. `read()` gives [run, source]. Returns `element` and
 * `draw(key)`, which renews what is shown when the key is another one.
 */
export function createRunCard(read) {
  const copy = el("button", { type: "button", class: "copy-card", title: "Everything that is needed to make these numbers again, as text" }, "Copy run card");
  const answer = el("span", { class: "copied", role: "status" });
  const text = el("textarea", { class: "card-text", readonly: "", rows: "14", spellcheck: "false", "aria-label": "Run card" });
  const fold = el("details", {}, el("summary", {}, "Run card"), text);
  const element = el("footer", { class: "run-card", hidden: "" }, copy, answer, fold);
  let shows = "";

  copy.addEventListener("click", async () => {
    text.value = runCard(...read());
    try {
      await navigator.clipboard.writeText(text.value);
      answer.textContent = "Copied.";
    } catch {
      // Without a secure context, or without leave, there is no clipboard: the text is put before the reader, selected.
      fold.open = true;
      text.focus();
      text.select();
      answer.textContent = "Press Ctrl+C to copy.";
    }
  });
  fold.addEventListener("toggle", () => {
    text.value = runCard(...read());
  });

  return {
    element,
    draw(key) {
      if (key === shows) return;
      shows = key;
      element.hidden = !read()[0].header;
      answer.textContent = "";
      if (fold.open) text.value = runCard(...read());
    },
  };
}
