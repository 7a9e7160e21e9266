// The docked card about one token. Text of the prompt and of the model enters the page through textContent only.

import { besideTau, exitScore, testPassed } from "./decision.js";
import { css, depthColour } from "./ramp.js";
import { backboneOf, fillingsOf, layersOf, slotFidelity } from "./store.js";

/** A DOM element with attributes and children; strings become text nodes, null children are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Set a node's text, without touching a page that shows it already. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A token's text with its white space made visible, for places where a single token stands alone. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

const SLOT_OWNERS = {
  backbone: "backbone",
  river: "river",
  propagated: "propagated",
  draft: "draft",
  recomputed: "recomputed",
  none: "empty",
};

// How the facts are known.
const KNOWN = {
  Layers: "Counted by the engine: blocks of the backbone and of the river that this token was taken through",
  "Engine time": "Measured around this step, the drawing of the token included",
  "Time split": "Measured parts of the step; other is the rest, computed",
  "KV slots": "Who holds the slots of this position, as the engine’s cache says",
  "Against the backbone": "Computed from both caches when the run had ended",
  "Would take": "Computed from this lane’s and the backbone’s scores for the next token",
  Draft: "Counted by the engine",
  Pending: "Counted by the engine",
  "Filled now": "As the engine’s cache says",
};

/** How facts are known, in words, for a list: [[fact, words], ...]. */
export const TOKEN_FACTS = Object.entries(KNOWN);

function fact(name, ...value) {
  return el("div", { class: "fact", title: KNOWN[name] ?? null }, el("dt", {}, name), el("dd", {}, ...value));
}

/** The highest score that the exit test saw, as [score, layer], or null. */
function highest(token, rule) {
  let best = null;
  token.similarity.forEach((score, at) => {
    const layer = at + 1;
    const tested = layer <= token.tested && layer >= (rule.floor ?? 1) && (!Array.isArray(rule.layers) || rule.layers.includes(layer));
    if (tested && typeof score === "number" && (!best || score > best[0])) best = [score, layer];
  });
  return best;
}

const SCORES = {
  maxprob: ["the probability of its best token", (top5) => top5[0]?.[2]],
  margin: ["the margin between its two best tokens", (top5) => top5[0]?.[2] - top5[1]?.[2]],
  entropy: ["its certainty (1 less the normalised entropy)", () => undefined],
};

/** Why a head rule let a token go. Where the trace lacks the score, the candidates give it if the answer comes from the exit state itself. */
function headRuleWords(token, lane) {
  const [what, score] = SCORES[lane.rule.name];
  const value = typeof token.score === "number" ? token.score : lane.untrainedHead ? score(token.top5) : undefined;
  const shown = Number.isFinite(value) ? value.toFixed(3) : "";
  const fits = shown && Number(shown) > lane.rule.threshold; // a rounded one may not
  return `${what}${fits ? `, ${shown},` : ""} passed ${lane.rule.threshold}`;
}

function limitsOfRule(rule) {
  if (Array.isArray(rule.layers)) return `; it may leave after layers ${rule.layers.join(", ")} only`;
  return rule.floor > 1 ? `; it may not leave before layer ${rule.floor}` : "";
}

/** Why a token left where it did, in words with the numbers that decided. */
export function exitSentence(token, lane, layers) {
  const rule = lane.rule ?? {};
  const depth = token.exit_layer;
  if (token.from_prefill) return depth < layers ? `Written by the prefill, which left after layer ${depth}.` : "Written by the prefill.";
  if (depth >= layers) return fullDepthWords(token, lane, layers);
  if (depth === 0) return "Ran in the river from the first layer on.";
  if (lane.method === "skipdecode") return `Ran ${depth} of ${layers} layers: what the schedule gives to this place.`;
  if (lane.method === "sequence") return `Left after layer ${depth}, as every token of this answer.`;
  if (rule.name === "follow") return `Left after layer ${depth}, where River left.`;
  if (rule.name === "fixed") return `Left after layer ${depth}, as in every token.`;
  if (rule.name === "replay") return `Left after layer ${depth}, as prescribed.`;
  if (token.why === "forced") return `Left after layer ${depth}, as prescribed.`;
  if (Object.hasOwn(SCORES, rule.name ?? "")) {
    if (testPassed(token, lane, layers) === false) return `Left after layer ${depth}: it had to.`;
    return `Left after layer ${depth}: ${headRuleWords(token, lane)}${limitsOfRule(rule)}.`;
  }
  const score = exitScore(token);
  const passed = testPassed(token, lane, layers);
  if (!score || typeof rule.tau !== "number") return `Left after layer ${depth}: ${passed === false ? "it had to" : "the rule was met"}.`;
  if (passed === null) return `Left after layer ${depth}: similarity ${score.value.toFixed(4)}, which is tau ${rule.tau} but for rounding; the trace does not tell more.`;
  if (passed) return `Left after layer ${depth}: similarity ${besideTau(score, true, rule.tau)}${limitsOfRule(rule)}.`;
  const why = lane.method === "monotone" ? "no token may go deeper than the one before it" : "it had to";
  // What did not decide is compared only where it is known exactly.
  const known = score.exact ? besideTau(score, score.value > rule.tau, rule.tau) : `${score.value.toFixed(4)} at tau ${rule.tau}`;
  return `Left after layer ${depth}: ${why}; similarity ${known}.`;
}

function fullDepthWords(token, lane, layers) {
  const rule = lane.rule ?? {};
  const all = `Ran all ${layers} layers`;
  if (lane.method === "verified") return `${all}: checked by the backbone.`;
  if (rule.name === "follow") return `${all}, as River did.`;
  if (token.why === "forced") return `${all}.`;
  if (token.why === "held") return lane.method === "recompute" || lane.method === "replay" ? `${all}: too many tokens were waiting.` : `${all}: it had to.`;
  if (!token.tested) return lane.method === "recompute" || lane.method === "replay" ? `${all}, without a test: too many tokens were waiting.` : `${all}.`;
  if (typeof rule.threshold === "number") return `${all}: its confidence did not pass ${rule.threshold} (${rule.name})${limitsOfRule(rule)}.`;
  const best = highest(token, rule);
  if (!best || typeof rule.tau !== "number") return `${all}: the rule was not met.`;
  const reached = best[0].toFixed(4);
  // The highest may round to more than tau, which it did not pass.
  const most = Number(reached) > rule.tau ? `did not pass tau ${rule.tau} (${reached} when rounded, layer ${best[1]})` : `reached ${reached} at most (layer ${best[1]}), not above tau ${rule.tau}`;
  return `${all}: similarity ${most}${limitsOfRule(rule)}.`;
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

/** Who holds the slots of a token's position by now, as [first, last, owner, words]. */
function slotRuns(token, lane, layers) {
  const owners = Array(layers).fill(["none", ""]);
  for (const [first, last, owner] of token.kv) owners.fill([owner, ""], first, Math.min(last, layers));
  for (const { i, first, last } of fillingsOf(lane, token)) {
    for (let layer = first; layer < Math.min(last, layers); layer += 1) {
      if (owners[layer][0] === "none") owners[layer] = ["recomputed", ` at token ${i + 1}`];
    }
  }
  const runs = [];
  owners.forEach(([owner, when], layer) => {
    const before = runs.at(-1);
    if (before?.[2] === owner && before[3] === when) before[1] = layer + 1;
    else runs.push([layer, layer + 1, owner, when]);
  });
  return runs;
}

function slotFact(token, lane, layers) {
  const bar = el("div", { class: "slots", "aria-hidden": "true" });
  const words = [];
  for (const [first, last, owner, when] of slotRuns(token, lane, layers)) {
    const part = el("span", { class: `slot slot-${Object.hasOwn(SLOT_OWNERS, owner) ? owner : "none"}` });
    part.style.flexGrow = last - first;
    bar.append(part);
    words.push(`${last - first === 1 ? last : `${first + 1}–${last}`} ${Object.hasOwn(SLOT_OWNERS, owner) ? SLOT_OWNERS[owner] : owner}${when}`);
  }
  return [bar, el("span", { class: "slot-words" }, words.join(", "))];
}

function layersWords(token, lane) {
  const words = `${token.exit_layer} backbone + ${token.river_layers} river`;
  const more = token.layers_run - token.exit_layer;
  return more > 0 && (lane.method === "recompute" || lane.method === "replay") ? `${words}, and ${more} for earlier tokens` : words;
}

const ms = (ns) => `${(ns / 1e6).toFixed(2)} ms`;

/** Where a token's time went; null where that was not recorded. */
function splitFact(token) {
  if (!token.split) return null;
  const { backbone_ns: backbone = 0, river_ns: river = 0, head_ns: head = 0 } = token.split;
  const other = Math.max(0, token.t_ns - backbone - river - head);
  const parts = [["backbone", backbone], ["river", river], ["head", head], ["other", other]].filter(([, ns]) => ns > 0);
  const bar = el("div", { class: "split", "aria-hidden": "true" });
  const words = el("ul", { class: "split-words" });
  for (const [name, ns] of parts) {
    const part = el("span", { class: `split-${name}` });
    part.style.flexGrow = String(ns);
    bar.append(part);
    words.append(el("li", {}, el("i", { class: `split-${name}`, "aria-hidden": "true" }), `${name === "other" ? "other" : name} ${ms(ns)}`));
  }
  return fact("Time split", bar, words);
}

/** The token of the same number in every lane. */
function acrossLanes(run, lane, token) {
  if (run.lanes.size < 2) return [];
  const reference = backboneOf(run)?.tokens[token.i] ?? token;
  const rows = [...run.lanes.values()].map((other) => {
    const same = other.tokens[token.i];
    const name = el("th", { scope: "row" }, other.label);
    const attributes = other === lane ? { class: "own", "aria-current": "true" } : {};
    if (!same) return el("tr", attributes, name, el("td", { colspan: "4" }, "not there"));
    const text = same.id === reference.id ? "=" : visible(same.text);
    return el(
      "tr",
      attributes,
      name,
      el("td", {}, String(same.exit_layer)),
      el("td", {}, String(same.layers_run + same.river_layers)),
      el("td", {}, (same.t_ns / 1e6).toFixed(1)),
      el("td", { class: same.id === reference.id ? "same" : "text-of" }, text),
    );
  });
  const heads = [
    ["", ""],
    ["exit", "Layer after which it left the backbone"],
    ["layers", "Backbone and river layers that its step ran, rows of earlier tokens included"],
    ["ms", "Engine time of its step"],
    ["text", "Its token where it is another one than the backbone’s; = is the same"],
  ];
  return [
    el("h4", {}, `Token ${token.i + 1} in every lane`),
    el(
      "table",
      { class: "across" },
      el("thead", {}, el("tr", {}, ...heads.map(([head, title]) => el(head ? "th" : "td", head ? { scope: "col", title } : {}, head)))),
      el("tbody", {}, ...rows),
    ),
  ];
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
  if (token.fetched !== undefined) facts.push(fact("Brought back", `${token.fetched} offloaded layers, ${(token.fetched_bytes / 1e6).toFixed(1)} MB`));
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
        el("bdi", { class: "top5-text", lang: "" }, visible(text)),
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

/** The children of the inspector for one token of one lane, or a hint without a token. `how` is "measured", or "recorded" on another occasion. */
export function inspectorContent(run, lane, token, theme, how = "measured") {
  if (!token) {
    return [el("p", { class: "hint" }, "Point at a token or a column, or click to keep it. The arrow keys walk from token to token.")];
  }
  const layers = layersOf(run);
  const swatch = el("span", { class: "swatch" });
  swatch.style.background = css(depthColour(token.exit_layer / layers, theme));
  const plot = similarityPlot(token, lane, layers);
  return [
    el("div", { class: "token-title" }, swatch, el("code", { lang: "", dir: "auto" }, visible(token.text)), el("span", { class: "tag" }, how)),
    el("p", { class: "token-place" }, `${lane.label} · token ${token.i + 1} · position ${token.position} · id ${token.id}`),
    el("p", { class: "why" }, exitSentence(token, lane, layers)),
    plot,
    el(
      "dl",
      {},
      fact("Layers", layersWords(token, lane)),
      fact("Engine time", `${ms(token.t_ns)}${token.from_prefill ? " (prefill)" : ""}`),
      splitFact(token),
      fact("KV slots", ...slotFact(token, lane, layers)),
      ...extraFacts(token, lane),
    ),
    ...acrossLanes(run, lane, token),
    el("h4", {}, "Most likely here"),
    candidates(token),
  ].filter((child) => child !== null);
}
