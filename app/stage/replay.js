// A replay: one .html file with the stage and one trace, without Gradio, server or network.

import { saveText } from "./save.js";
import { createStage } from "./stage.js";
import { themeButton } from "./theme.js";

/** Play the trace that lies in the page's <script id="trace"> on the stage in its <main id="stage">. */
export function openReplay() {
  const text = document.getElementById("trace").textContent;
  const stage = createStage(document.getElementById("stage"), {
    actions: [
      {
        name: "json",
        label: "Download trace",
        title: "The whole trace as a JSON file, which the explorer can open",
        run: () => saveText("river-trace.json", text, "application/json"),
      },
    ],
  });
  themeButton();
  stage.open(JSON.parse(text), { source: "replay", id: null, play: !matchMedia("(prefers-reduced-motion: reduce)").matches });
}
