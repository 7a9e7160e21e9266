// Joins the stage to Gradio: channel messages in, run state to the buttons, model progress to the pill.

import { createStage } from "./stage.js";
import { isFinal } from "./store.js";

const RUN_KEY = "river-explorer-run";
const MODEL_POLL_MS = 400;
const RUN_POLL_MS = 300;

/** Called once by gr.HTML's js_on_load with the tools that Gradio hands it. */
function connect({ element, props, server, trigger, watch }) {
  const app = element.closest(".gradio-container") ?? document.body;
  const stage = createStage(element.querySelector(".stage-root"), { onState: showState });
  const button = (id) => app.querySelector(`#${id}`);

  function showState(run) {
    app.dataset.runState = run.state;
    const active = run.state !== "idle" && !isFinal(run);
    button("run")?.setAttribute("aria-disabled", String(active));
    button("stop")?.setAttribute("aria-disabled", String(!active || run.state === "stopping"));
    if (run.runId) sessionStorage.setItem(RUN_KEY, run.runId);
  }

  function take(text) {
    if (text) stage.apply(JSON.parse(text));
  }

  /** After a reload: show the run that this tab had begun, until the server has brought it to its end. */
  async function resume(id) {
    for (;;) {
      const text = await server.snapshot(id);
      if (!text) break;
      if (stage.run.runId && stage.run.runId !== id) return; // a new run has begun meanwhile
      take(text);
      if (isFinal(stage.run)) return;
      await pause(RUN_POLL_MS);
    }
    sessionStorage.removeItem(RUN_KEY);
  }

  async function followModel() {
    for (;;) {
      // Gradio answers undefined, or throws, when the server cannot be reached.
      const answer = await server.model_status().catch(() => undefined);
      const model = answer ?? { state: "lost", text: "no connection to the server", fraction: null };
      showModel(app.querySelector("#model-pill"), model);
      if (model.state === "ready") {
        trigger("model_ready");
        return;
      }
      await pause(model.state === "loading" ? MODEL_POLL_MS : 10 * MODEL_POLL_MS);
    }
  }

  watch("value", () => take(props.value));
  take(props.value);
  showState(stage.run);
  document.addEventListener("keydown", (event) => {
    const active = stage.run.state !== "idle" && !isFinal(stage.run);
    if (event.key === "Escape" && active && !event.defaultPrevented) button("stop")?.click();
  });
  const earlier = sessionStorage.getItem(RUN_KEY);
  if (earlier) resume(earlier);
  followModel();
  element.dataset.ready = "true";
}

function showModel(pill, model) {
  if (!pill) return;
  const percent = typeof model.fraction === "number" ? Math.round(100 * model.fraction) : null;
  const text = model.state === "loading" && percent !== null ? `${model.text} ${percent} %` : model.text;
  pill.dataset.modelState = model.state;
  pill.style.setProperty("--progress", `${percent ?? 0}%`);
  const line = pill.querySelector(".pill-text");
  if (line.textContent !== text) line.textContent = text;
}

function pause(ms) {
  return new Promise((done) => setTimeout(done, ms));
}
