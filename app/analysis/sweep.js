// The sweep over thresholds: its controls, and its state from the messages of its run.

import { el } from "../stage/inspector.js";

const OVER = ["done", "failed"];

/** A sweep before any message. */
export function noSweep() {
  return { id: null, seq: -1, state: "idle", message: null, queue: null, progress: null, points: null, charts: null };
}

/** The sweep after one more channel message; an older message of the same run changes nothing. */
export function applySweep(sweep, message) {
  const known = message.run_id === sweep.id ? sweep : { ...noSweep(), id: message.run_id };
  if (message.seq <= known.seq) return sweep;
  const next = { ...known, seq: message.seq, state: message.state, message: message.message, queue: message.queue };
  for (const event of message.events) {
    if (event.type === "progress") next.progress = event;
    else if (event.type === "points") next.points = event;
    else if (event.type === "charts") next.charts = event.charts;
  }
  return next;
}

/** Whether the engine may still be at it. */
export function sweeping(sweep) {
  return sweep.state !== "idle" && !OVER.includes(sweep.state);
}

/** The line under the controls. */
export function sweepLine(sweep) {
  const { state, progress, points } = sweep;
  if (state === "idle") return "";
  if (state === "failed") return sweep.message ?? "The sweep failed.";
  if (state === "queued" && sweep.queue) return `Waiting for the engine, place ${sweep.queue.place} in line.`;
  if (state === "queued") return "Waiting for the engine.";
  if (state === "waiting") return "Waiting for the model.";
  if (state === "stopping") return "Stopping.";
  if (state === "done" && !points) return sweep.message ?? "Stopped.";
  if (state === "done") {
    const lanes = `${points.points.length} lanes, ${points.repeats} ${points.repeats === 1 ? "repeat" : "repeats"}`;
    if (points.reason !== "stop") return `Done: ${lanes}.`;
    return points.repeats ? `Stopped; shown is what was finished: ${lanes}.` : "Stopped before the first repeat was finished, so there is nothing to show.";
  }
  if (!progress) return "Reading the prompt.";
  return `Repeat ${progress.repeat} of ${progress.repeats}, token ${progress.tokens}, ${Math.round(100 * progress.fraction)} % of the work.`;
}

/**
 * The controls. `start({methods, taus, tokens, repeats})`, `stop()`, `save()` and `open(file)` are called for the buttons.
 *
 * Returns { element, fill(settings), show(sweep) }.
 */
export function sweepControls({ start, stop, save, open }) {
  const boxes = el("fieldset", { class: "an-methods" }, el("legend", {}, "Methods, beside the backbone"));
  const taus = el("input", { type: "text", id: "an-taus", inputmode: "decimal", size: "28", autocomplete: "off" });
  const tokens = el("input", { type: "number", id: "an-tokens", min: "2", step: "1", value: "48" });
  const repeats = el("input", { type: "number", id: "an-repeats", min: "1", max: "5", step: "1", value: "3" });
  const run = el("button", { type: "submit", class: "an-primary", id: "an-sweep" }, "Run the sweep");
  const halt = el("button", { type: "button", id: "an-sweep-stop", disabled: "" }, "Stop");
  const keep = el("button", { type: "button", hidden: "" }, "Save the result (JSON)");
  const file = el("input", { type: "file", accept: ".json,application/json", class: "an-file", "aria-label": "Open a saved result" });
  const line = el("p", { class: "an-line", role: "status", "aria-live": "polite" });
  const bar = el("progress", { max: "1", value: "0", hidden: "", "aria-label": "Progress of the sweep" });
  const ticked = () => [...boxes.querySelectorAll("input:checked")].map((box) => box.value);
  const field = (text, input) => el("label", { class: "an-field" }, text, input);
  const element = el(
    "form",
    { class: "an-form", novalidate: "" },
    boxes,
    el("div", { class: "an-controls" }, field("Thresholds", taus), field("Tokens", tokens), field("Repeats", repeats), run, halt, keep),
    el("div", { class: "an-controls" }, line, bar),
    el("details", { class: "an-saved" }, el("summary", {}, "Show a saved result of sweep --json or bench --json"), file),
  );
  element.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!run.disabled) start({ methods: ticked(), taus: taus.value, tokens: tokens.value, repeats: repeats.value });
  });
  halt.addEventListener("click", stop);
  keep.addEventListener("click", save);
  file.addEventListener("change", () => {
    if (file.files[0]) open(file.files[0]);
    file.value = "";
  });
  return {
    element,
    fill(settings) {
      for (const [name, label] of settings.methods) {
        const box = el("input", { type: "checkbox", value: name });
        box.checked = name === "river" || name === "int4";
        boxes.append(el("label", {}, box, ` ${label}`));
      }
      taus.value = settings.taus;
    },
    say(text) {
      line.textContent = text;
    },
    show(sweep) {
      const busy = sweeping(sweep);
      run.disabled = busy;
      halt.disabled = !busy || sweep.state === "stopping";
      keep.hidden = !sweep.points?.points.length;
      bar.hidden = !busy;
      bar.value = sweep.progress?.fraction ?? 0;
      const words = sweepLine(sweep);
      if (line.textContent !== words) line.textContent = words;
    },
  };
}
