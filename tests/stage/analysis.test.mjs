import assert from "node:assert/strict";
import { test } from "node:test";

import { laneCells, partingWords } from "../../app/analysis/compare.js";
import { marksLine, tokensAtDepth, tokensOf } from "../../app/analysis/marks.js";
import { themed } from "../../app/analysis/plot.js";
import { applySweep, noSweep, sweeping, sweepLine } from "../../app/analysis/sweep.js";

const point = (lane, ...tokens) => ({ data: { meta: { lane } }, customdata: tokens });

test("brushed points become the tokens behind them, lane by lane and each once", () => {
  const marks = tokensOf([point("river", 3, 4), point("river", 4, 9), point("backbone", 1), { data: {} }, { data: { meta: {} }, customdata: [7] }]);
  assert.deepEqual(marks, new Map([["river", new Set([3, 4, 9])], ["backbone", new Set([1])]]));
  assert.deepEqual(tokensOf(undefined), new Map());
});

test("a range of depths marks decode steps only, both ends included", () => {
  const token = (i, exit_layer) => ({ i, exit_layer, from_prefill: i === 0 });
  const run = { lanes: new Map([["river", { id: "river", tokens: [token(0, 5), token(1, 5), undefined, token(3, 7), token(4, 8)] }]]) };
  assert.deepEqual(tokensAtDepth(run, 5, 7), new Map([["river", new Set([1, 3])]]));
  assert.equal(tokensAtDepth(run, 20, 30).size, 0);
});

test("the line counts the marks and names their lanes", () => {
  const labels = new Map([["river", "River"], ["backbone", "Backbone"]]);
  assert.equal(marksLine(new Map(), labels), "");
  assert.equal(marksLine(new Map([["river", new Set([1])]]), labels), "1 token marked, in River");
  const more = new Map([["river", new Set([1, 2])], ["backbone", new Set([0])], ["x", new Set([5])]]);
  assert.equal(marksLine(more, labels), "4 tokens marked, in River, Backbone and x");
});

test("a theme colours text and axes, keeps colours that a figure brings, and changes no figure", () => {
  const figure = { data: [{ marker: { color: "#123456" } }], layout: { xaxis: { title: { text: "x" } }, yaxis2: {}, font: { size: 12 }, shapes: [{ line: { width: 1 } }, { line: { color: "#abcdef" } }] } };
  const before = structuredClone(figure);
  const light = themed(figure, "light");
  const dark = themed(figure, "dark");
  assert.deepEqual(figure, before);
  assert.notEqual(light.layout.font.color, dark.layout.font.color);
  assert.equal(light.layout.font.size, 12);
  assert.equal(dark.layout.xaxis.gridcolor, dark.layout.yaxis2.gridcolor);
  assert.equal(dark.layout.shapes[0].line.color, dark.layout.font.color);
  assert.equal(dark.layout.shapes[1].line.color, "#abcdef");
  assert.equal(dark.data[0].marker.color, "#123456");
});

const message = (seq, state, events = [], run_id = "r") => ({ run_id, seq, state, message: null, queue: null, events });

test("messages of a sweep may come late, twice or out of order", () => {
  const progress = { type: "progress", repeat: 1, repeats: 3, tokens: 8, fraction: 0.1 };
  const points = { type: "points", repeats: 3, reason: "finished", points: [{}, {}] };
  let sweep = applySweep(noSweep(), message(0, "running"));
  assert.equal(sweepLine(sweep), "Reading the prompt.");
  sweep = applySweep(sweep, message(2, "running", [progress]));
  assert.equal(sweepLine(sweep), "Repeat 1 of 3, token 8, 10 % of the work.");
  assert.equal(applySweep(sweep, message(1, "queued")), sweep);
  sweep = applySweep(sweep, message(3, "done", [progress, points, { type: "charts", charts: [] }]));
  assert.equal(sweepLine(sweep), "Done: 2 lanes, 3 repeats.");
  assert.equal(sweeping(sweep), false);
  assert.equal(applySweep(sweep, message(2, "running")), sweep);
  const next = applySweep(sweep, message(0, "queued", [], "another"));
  assert.equal(next.points, null);
  assert.equal(sweeping(next), true);
});

test("a sweep says where it waits, why it failed, and what a stop left", () => {
  const at = (state, rest = {}) => sweepLine({ ...noSweep(), state, ...rest });
  assert.equal(at("idle"), "");
  assert.equal(at("queued", { queue: { place: 2, waiting: 2 } }), "Waiting for the engine, place 2 in line.");
  assert.equal(at("failed", { message: "No method is ticked." }), "No method is ticked.");
  assert.equal(at("done", { message: "Stopped before it began." }), "Stopped before it began.");
  assert.match(at("done", { points: { points: [], repeats: 0, reason: "stop" } }), /nothing to show/);
  assert.match(at("done", { points: { points: [{}], repeats: 1, reason: "stop" } }), /1 lanes, 1 repeat\./);
});

test("cells of a compared lane say what there is and leave a dash where there is nothing", () => {
  const lane = { label: "River", tokens: [5, 7], speed: [10.04, null], ratio: [1.5, null], depth: [6.25, 30], layers: [30, 30], first: 3 };
  assert.deepEqual(laneCells(lane), ["5", "7", "10.0", "–", "1.50×", "–", "6.3 of 30", "30.0 of 30", "token 4"]);
  assert.equal(partingWords(lane), "The texts part at token 4.");
  assert.equal(partingWords({ ...lane, first: null }), "The texts agree as far as both go, 5 tokens.");
  assert.equal(partingWords({ ...lane, first: null, tokens: [5, 5] }), "The texts are the same, token by token.");
});
