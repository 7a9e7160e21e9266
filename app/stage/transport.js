// The transport: play, steps, speed, and the time line of a finished trace. It only shows and asks; the stage decides.

import { el, setText } from "./inspector.js";

export const SPEEDS = [0.25, 0.5, 1, 2, 4];
const SLIDER_STEPS = 10000;
const LEAST_SECONDS = 6; // a trace that is shorter than this is played slower, as long as nobody has chosen a speed

const ICONS = {
  start: "M3 3h2v10H3zM13 3v10L6 8z",
  end: "M11 3h2v10h-2zM3 3v10l7-5z",
  previous: "M10 3v10L4 8z",
  next: "M6 3v10l6-5z",
  play: "M4 2.5v11l9-5.5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  down: "M8 13L3.5 7h9zM3.5 4h9v1.6h-9z",
  up: "M8 3l4.5 6h-9zM3.5 10.4h9V12h-9z",
};

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** The fastest speed at which a trace of so many nanoseconds can be followed by eye. */
export function speedFor(durationNs) {
  return SPEEDS.filter((speed) => durationNs / 1e9 / speed >= LEAST_SECONDS).at(-1) ?? SPEEDS[0];
}

/**
 * The transport. `on` has toggle(), step(count), layer(count), seek(share 0..1), edge("start" | "end") and speed(number).
 * Returns `element` and `draw({ enabled, playing, atEnd, clockNs, durationNs, ends, speed, work, words })`; `ends` is a list of
 * [label, clock], `work` and `words` say what is at work and where the playhead is.
 */
export function createTransport(on) {
  const button = (name, label, run) => {
    const made = el("button", { type: "button", class: `to-${name}`, title: label, "aria-label": label.replace(/ \(.*/, "") }, icon(name));
    made.addEventListener("click", run);
    return made;
  };
  const playIcon = icon("play");
  const play = el("button", { type: "button", class: "to-play", "aria-label": "Play", title: "Play (Space)" }, playIcon);
  play.addEventListener("click", () => on.toggle());
  const buttons = [
    button("start", "To the start (Home)", () => on.edge("start")),
    button("previous", "A token back (←)", () => on.step(-1)),
    button("down", "A layer back (↓)", () => on.layer(-1)),
    play,
    button("up", "A layer forward (↑)", () => on.layer(1)),
    button("next", "A token forward (→)", () => on.step(1)),
    button("end", "To the end (End)", () => on.edge("end")),
  ];
  const speed = el(
    "select",
    { class: "to-speed", "aria-label": "Speed of the film", title: "Seconds of the engine per second here" },
    ...SPEEDS.map((value) => el("option", { value: String(value) }, `${value}×`)),
  );
  speed.addEventListener("change", () => on.speed(Number(speed.value)));
  const slider = el("input", { type: "range", class: "to-slider", min: "0", max: String(SLIDER_STEPS), step: "1", value: "0", "aria-label": "Time line" });
  slider.addEventListener("input", () => on.seek(Number(slider.value) / SLIDER_STEPS));
  const ticks = el("div", { class: "to-ticks", "aria-hidden": "true" });
  const time = el("span", { class: "to-time" });
  const place = el("span", { class: "to-place" });
  const element = el(
    "section",
    { class: "transport", "aria-label": "Playback" },
    el("div", { class: "to-buttons", role: "group", "aria-label": "Play and step" }, ...buttons, speed),
    el("div", { class: "to-line" }, slider, ticks),
    el("p", { class: "to-words" }, time, place),
  );
  let ticksFor = "";

  function drawTicks(ends, durationNs) {
    const key = JSON.stringify([ends, durationNs]);
    if (key === ticksFor) return;
    ticksFor = key;
    ticks.replaceChildren(
      ...ends.map(([label, at]) => {
        const tick = el("i", { title: `${label} ends at ${(at / 1e9).toFixed(2)} s` });
        tick.style.setProperty("--at", String(durationNs ? at / durationNs : 0));
        return tick;
      }),
    );
  }

  return {
    element,
    slider,
    draw({ enabled, playing, atEnd, clockNs, durationNs, ends, speed: rate, work, words }) {
      for (const one of [...buttons, speed, slider]) if (one.disabled === enabled) one.disabled = !enabled;
      const label = playing ? "Pause" : atEnd ? "Play again" : "Play";
      if (play.getAttribute("aria-label") !== label) {
        play.setAttribute("aria-label", label);
        play.title = `${label} (Space)`;
        playIcon.firstChild.setAttribute("d", ICONS[playing ? "pause" : "play"]);
      }
      if (speed.value !== String(rate)) speed.value = String(rate);
      const at = durationNs ? Math.round((SLIDER_STEPS * clockNs) / durationNs) : 0;
      if (slider.value !== String(at)) slider.value = String(at);
      slider.style.setProperty("--played", `${(100 * at) / SLIDER_STEPS}%`);
      const seconds = enabled ? `${(clockNs / 1e9).toFixed(2)} of ${(durationNs / 1e9).toFixed(2)} s` : "";
      setText(time, work ? `${seconds} · ${work}` : seconds);
      setText(place, words);
      if (!playing) slider.setAttribute("aria-valuetext", [seconds, words, work].filter(Boolean).join(", "));
      drawTicks(enabled ? ends : [], durationNs);
    },
  };
}
