// Two traces side by side: tables of what differs, and the texts of one lane with the place where they part.

import { el } from "../stage/inspector.js";
import { css, depthColour, textColour } from "../stage/ramp.js";

const NONE = "–";

const NUMBERS = ["tokens", "tokens/s", "speed-up", "mean depth"];

/** The cells of one lane of a diff: for each of NUMBERS the value in A and in B, then where the texts part. */
export function laneCells(lane) {
  const pair = (values, show) => values.map((value, at) => (value === null ? NONE : show(value, at)));
  return [
    ...pair(lane.tokens, String),
    ...pair(lane.speed, (value) => value.toFixed(1)),
    ...pair(lane.ratio, (value) => `${value.toFixed(2)}×`),
    ...pair(lane.depth, (value, at) => `${value.toFixed(1)} of ${lane.layers[at]}`),
    lane.first === null ? "no difference" : `token ${lane.first + 1}`,
  ];
}

/** Where the texts of a lane part, in words. */
export function partingWords(lane) {
  if (lane.first !== null) return `The texts part at token ${lane.first + 1}.`;
  const [a, b] = lane.tokens;
  return a === b ? "The texts are the same, token by token." : `The texts agree as far as both go, ${Math.min(a, b)} tokens.`;
}

function diffTable(caption, heads, rows) {
  return el(
    "div",
    { class: "an-scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows.map(([head, ...cells]) => el("tr", {}, el("th", { scope: "row" }, head), ...cells.map((cell) => el("td", {}, cell))))),
    ),
  );
}

function laneTable(diff) {
  const caption = "What came out, lane by lane";
  return el(
    "div",
    { class: "an-scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      { class: "an-numbers" },
      el("caption", {}, caption),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col", rowspan: "2" }, "lane"),
          ...NUMBERS.map((name) => el("th", { scope: "colgroup", colspan: "2" }, name)),
          el("th", { scope: "col", rowspan: "2" }, "texts part at"),
        ),
        el("tr", {}, ...NUMBERS.flatMap(() => ["A", "B"].map((side) => el("th", { scope: "col" }, side)))),
      ),
      el(
        "tbody",
        {},
        ...diff.lanes.map((lane) => el("tr", {}, el("th", { scope: "row" }, lane.label), ...laneCells(lane).map((cell) => el("td", {}, cell)))),
      ),
    ),
  );
}

function tokenSpan([text, depth], i, layers, first) {
  const span = el("span", { class: "an-token", title: `token ${i + 1}, depth ${depth} of ${layers}` }, text);
  for (const theme of ["light", "dark"]) {
    const colour = depthColour(layers ? depth / layers : 0, theme);
    span.style.setProperty(`--fill-${theme}`, css(colour));
    span.style.setProperty(`--on-${theme}`, textColour(colour));
  }
  if (i === first) {
    span.classList.add("first");
    span.prepend(el("span", { class: "an-flag", role: "img", "aria-label": "first difference" }, "⚑"));
  }
  return span;
}

function textColumn(title, tokens, rest, layers, first) {
  return el(
    "article",
    { class: "an-text" },
    el("h3", {}, title),
    el(
      "div",
      { class: "an-tokens", tabindex: "0", role: "group", "aria-label": `Text of ${title}, coloured by exit depth` },
      ...tokens.map((token, i) => tokenSpan(token, i, layers, first)),
      rest ? el("i", {}, ` … and ${rest} more tokens`) : null,
    ),
  );
}

/** The whole comparison as nodes. `choice` is the id of the lane whose texts are shown; `pick(id)` is called for another one. */
export function compareContent(diff, choice, pick) {
  const [nameA, nameB] = diff.names;
  const heads = ["setting", `A: ${nameA}`, `B: ${nameB}`];
  const nodes = [];
  if (diff.lanes.length) {
    const lane = diff.lanes.find((one) => one.id === choice) ?? diff.lanes[0];
    const select = el("select", { id: "an-lane" }, ...diff.lanes.map((one) => el("option", { value: one.id }, one.label)));
    select.value = lane.id;
    select.addEventListener("change", () => pick(select.value));
    const parting = partingWords(lane);
    nodes.push(
      laneTable(diff),
      el("div", { class: "an-controls" }, el("label", { class: "an-field" }, "Texts of lane ", select), el("p", { class: "an-parting" }, parting)),
      el(
        "div",
        { class: "an-texts" },
        textColumn(`A: ${nameA}`, lane.texts.a, lane.rest[0], lane.layers[0], lane.first),
        textColumn(`B: ${nameB}`, lane.texts.b, lane.rest[1], lane.layers[1], lane.first),
      ),
    );
  } else {
    nodes.push(el("p", {}, "The two traces have no lane in common, so only their settings can be compared."));
  }
  const only = [["a", "A"], ["b", "B"]].filter(([side]) => diff.only[side].length);
  for (const [side, name] of only) nodes.push(el("p", { class: "an-note" }, `Only in ${name}: ${diff.only[side].join(", ")}.`));
  const same = `${diff.same} further fields of the run cards are the same.`;
  if (diff.card.length) nodes.push(diffTable("What was set differently", heads, diff.card), el("p", { class: "an-note" }, same));
  else nodes.push(el("p", { class: "an-note" }, `The run cards are the same in all ${diff.same} fields.`));
  return nodes;
}
