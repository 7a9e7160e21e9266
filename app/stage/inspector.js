// The docked card about one token. Text of the prompt and of the model enters the page through textContent only.

import { css, depthColour } from "./ramp.js";
import { layersOf, slotFidelity } from "./store.js";

/** A DOM element with attributes and children; strings become text nodes, null children are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** A token's text with its white space made visible, for places where a single token stands alone. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

const OWNERS = {
  backbone: "backbone",
  river: "river",
  propagated: "propagated",
  draft: "draft",
  none: "nobody",
};

function fact(name, ...value) {
  return el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, ...value));
}

function exitSentence(token, lane, layers) {
  if (token.from_prefill) return "Written by the prefill.";
  const depth = token.exit_layer;
  if (depth >= layers) return `Ran all ${layers} layers.`;
  if (depth === 0) return "Ran in the 4-bit river from the first layer on.";
  if (lane.rule?.name === "follow") return `Left after layer ${depth}, where River left.`;
  if (lane.rule?.name === "fixed") return `Left after layer ${depth}, as in every token.`;
  const score = token.similarity[depth - 1];
  const tau = lane.rule?.tau;
  const why = typeof score === "number" ? `similarity ${score.toFixed(4)}` : "the rule was met";
  return `Left after layer ${depth}: ${why}${typeof tau === "number" ? ` > tau ${tau}` : ""}.`;
}

/** Similarity by layer as a small line; the part that the exit test used is solid, the rest was only looked at. */
function similarityPlot(token, lane, layers) {
  const values = token.similarity;
  const known = values.filter((value) => typeof value === "number");
  if (known.length < 2) return null;
  const tau = typeof lane.rule?.tau === "number" && lane.rule.tau <= 1 ? lane.rule.tau : null;
  // The first layer turns the state round completely; drawn to scale it would flatten all the others.
  const low = tau === null ? [...known].sort((a, b) => a - b)[Math.ceil(known.length / 10)] : tau - 0.12;
  const high = Math.max(...known, tau ?? 0);
  const width = 240;
  const height = 64;
  const x = (layer) => 2 + ((width - 4) * layer) / Math.max(1, layers - 1);
  const y = (value) => 4 + ((height - 8) * (high - Math.max(low, value))) / Math.max(1e-6, high - low);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const add = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    svg.append(node);
  };
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "similarity");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Similarity by layer, at most ${high.toFixed(3)}`);
  if (tau !== null) add("line", { x1: 0, x2: width, y1: y(tau), y2: y(tau), class: "tau" });
  const path = (from, to) =>
    values
      .map((value, layer) => [value, layer])
      .filter(([value, layer]) => typeof value === "number" && layer >= from && layer < to)
      .map(([value, layer], at) => `${at ? "L" : "M"}${x(layer).toFixed(1)} ${y(value).toFixed(1)}`)
      .join("");
  add("path", { d: path(Math.max(0, token.tested - 1), layers), class: "looked" });
  add("path", { d: path(0, token.tested), class: "tested" });
  const exit = token.exit_layer;
  if (exit > 0 && exit < layers && typeof values[exit - 1] === "number") {
    add("circle", { cx: x(exit - 1), cy: y(values[exit - 1]), r: 3.5, class: "exit" });
  }
  return svg;
}

function slots(token) {
  const bar = el("div", { class: "slots", "aria-hidden": "true" });
  const words = [];
  for (const [first, last, owner] of token.kv) {
    if (last <= first) continue;
    const part = el("span", { class: `slot slot-${OWNERS[owner] ? owner : "none"}` });
    part.style.flexGrow = last - first;
    bar.append(part);
    words.push(`${first + 1}–${last} ${OWNERS[owner] ?? owner}`);
  }
  return [bar, el("span", { class: "slot-words" }, words.join(", "))];
}

/** What only some strategies and modes have to say. */
function extraFacts(token, lane) {
  const facts = [];
  const close = slotFidelity(lane, token);
  if (close) {
    facts.push(
      fact(
        "Against the backbone",
        `K cosine ${close.kCos.toFixed(3)}, V ${close.vCos.toFixed(3)}; relative error K ${close.kErr.toFixed(2)}, V ${close.vErr.toFixed(2)}; ` +
          `V is furthest off in layer ${close.layer} (${close.least.toFixed(3)})`,
      ),
    );
  }
  if (token.fidelity) {
    const agrees = token.fidelity.agrees ? "the backbone’s token" : "another token than the backbone";
    facts.push(fact("Would take", `${agrees} · KL ${token.fidelity.kl.toFixed(3)} nats`));
  }
  if (token.cycle) facts.push(fact("Draft", `${token.cycle.accepted} of ${token.cycle.drafted} accepted in cycle ${token.cycle.number}`));
  if (token.pending !== undefined) facts.push(fact("Pending", `${token.pending} tokens wait for their missing layers`));
  if (token.filled) facts.push(fact("Filled now", `slots of ${new Set(token.filled.map(([position]) => position)).size} earlier tokens`));
  return facts;
}

function candidates(token) {
  const list = el("ol", { class: "top5" });
  for (const [id, text, probability] of token.top5) {
    const share = typeof probability === "number" ? probability : 0;
    const bar = el("span", { class: "top5-bar", "aria-hidden": "true" });
    bar.style.inlineSize = `${(share * 100).toFixed(1)}%`;
    list.append(
      el(
        "li",
        id === token.id ? { class: "chosen" } : {},
        bar,
        el("span", { class: "top5-text" }, visible(text)),
        el("span", { class: "top5-share" }, `${(share * 100).toFixed(1)} %`),
      ),
    );
  }
  return list;
}

/** One spoken sentence about a token, for the status line when it is reached by keyboard. */
export function tokenSentence(run, lane, token) {
  return `${lane.label}, token ${token.i + 1}, “${visible(token.text)}”. ${exitSentence(token, lane, layersOf(run))}`;
}

/** The children of the inspector for one token of one lane, or a hint without a token. */
export function inspectorContent(run, lane, token, theme) {
  if (!token) {
    return [el("p", { class: "hint" }, "Point at a token, or click to keep it. Arrow keys walk through the text.")];
  }
  const layers = layersOf(run);
  const swatch = el("span", { class: "swatch" });
  swatch.style.background = css(depthColour(token.exit_layer / layers, theme));
  const plot = similarityPlot(token, lane, layers);
  return [
    el("div", { class: "token-title" }, swatch, el("code", {}, visible(token.text))),
    el("p", { class: "token-place" }, `${lane.label} · token ${token.i + 1} · position ${token.position} · id ${token.id}`),
    el("p", { class: "why" }, exitSentence(token, lane, layers)),
    plot,
    el(
      "dl",
      {},
      fact("Layers", `${token.exit_layer} backbone + ${token.river_layers} river`),
      fact("Engine time", `${(token.t_ns / 1e6).toFixed(2)} ms${token.from_prefill ? " (prefill)" : ""}`),
      fact("KV slots", ...slots(token)),
      ...extraFacts(token, lane),
    ),
    el("h4", {}, "Most likely here"),
    candidates(token),
  ].filter((child) => child !== null);
}
