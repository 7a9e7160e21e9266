// The pure parts of the stage: what a run looks like after messages in any order, and the colours of depth.

import assert from "node:assert/strict";
import test from "node:test";

import { seeded } from "./seeded.mjs";
import { depthColour, depthRules, luminance, textColour } from "../../app/stage/ramp.js";
import { exitSentence } from "../../app/stage/inspector.js";
import {
  applyMessage,
  fillingsOf,
  firstDifference,
  laneStatus,
  meanDepth,
  newRun,
  ordinal,
  recentSpeed,
  slotFidelity,
  speed,
  speedUp,
  statusLine,
  textVerdict,
  timeSpan,
} from "../../app/stage/store.js";

const header = {
  model: { n_layers: 4 },
  max_new_tokens: 3,
  lanes: [{ id: "backbone", method: "backbone" }, { id: "river", method: "river", rule: { tau: 0.9 } }],
};

function token(lane, i, id, exit_layer, t_ns = 10e6) {
  return { type: "token", lane, i, id, text: ` ${id}`, t_ns, exit_layer, from_prefill: i === 0, similarity: [], top5: [], kv: [] };
}

const EVENTS = [
  { type: "run", header },
  token("backbone", 0, 5, 4, 50e6),
  token("backbone", 1, 6, 4),
  token("backbone", 2, 7, 4),
  token("river", 0, 5, 4, 50e6),
  token("river", 1, 6, 2, 5e6),
  token("river", 2, 8, 1, 5e6),
  { type: "end", lane: "backbone", reason: "length", tokens: 3, decode_ns: 20e6, text: "" },
  { type: "end", lane: "river", reason: "eos", tokens: 3, decode_ns: 10e6, text: "" },
  { type: "done", reason: "finished" },
];

function message(events, fields = {}) {
  return { run_id: "a", seq: 0, state: "running", message: null, queue: null, events, ...fields };
}

function facts(run) {
  return [...run.lanes.values()].map((lane) => [
    lane.id, lane.count, speed(lane), speedUp(run, lane), meanDepth(lane), firstDifference(run, lane), laneStatus(run, lane),
  ]);
}

const whole = applyMessage(newRun(), message(EVENTS, { state: "done", seq: 9 }), new Set());

test("counters come from engine time alone and leave out the prefill's token", () => {
  const [backbone, river] = facts(whole);
  assert.deepEqual(backbone, ["backbone", 3, 100, 1, 4, -1, "done: length reached"]);
  assert.deepEqual(river, ["river", 3, 200, 2, 1.5, 2, "done: end of text"]);
  assert.equal(textVerdict(whole, whole.lanes.get("river")), "⚑ differs from token 3");
  assert.equal(timeSpan(whole).toFixed(3), "0.070");
});

test("events may come twice and in any order", () => {
  const random = seeded(1);
  for (let round = 0; round < 50; round += 1) {
    const shuffled = [...EVENTS, ...EVENTS].map((event) => [random(), event]).sort(([a], [b]) => a - b);
    let run = newRun();
    for (const [, event] of shuffled) run = applyMessage(run, message([event]), new Set());
    run = applyMessage(run, message([], { state: "done", seq: 9 }), new Set());
    assert.deepEqual(facts(run), facts(whole));
  }
});

test("an older message does not bring an older state back", () => {
  let run = applyMessage(newRun(), message([], { seq: 5, state: "running" }), new Set());
  run = applyMessage(run, message([], { seq: 4, state: "queued", queue: { place: 2, waiting: 1 } }), new Set());
  assert.equal(run.state, "running");
  assert.equal(run.queue, null);
});

test("what still arrives for a run that was replaced is dropped", () => {
  const retired = new Set();
  const first = applyMessage(newRun(), message(EVENTS), retired);
  const second = applyMessage(first, message([], { run_id: "b", state: "queued" }), retired);
  assert.notEqual(second, first);
  const same = applyMessage(second, message(EVENTS), retired);
  assert.equal(same, second);
  assert.equal(same.lanes.size, 0);
});

test("the status line names the place in line", () => {
  const run = applyMessage(newRun(), message([], { state: "queued", queue: { place: 2, waiting: 1 } }), new Set());
  assert.match(statusLine(run), /2nd in line/);
  assert.deepEqual([1, 3, 11, 21, 112].map(ordinal), ["1st", "3rd", "11th", "21st", "112th"]);
});

test("more layers mean a greater distance from the page, and text always stands out", () => {
  for (const theme of ["light", "dark"]) {
    const ramp = Array.from({ length: 101 }, (_, step) => depthColour(step / 100, theme));
    const lights = ramp.map(luminance);
    const sorted = [...lights].sort((a, b) => (theme === "light" ? b - a : a - b));
    assert.deepEqual(lights, sorted);
    for (const colour of ramp) {
      const pair = [luminance(colour), textColour(colour) === "#000" ? 0 : 1].sort((a, b) => a - b);
      assert.ok((pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5);
    }
  }
});

test("there is a rule for every depth in both themes", () => {
  assert.equal(depthRules(30).split("\n").length, 62);
});

test("on the same text a lane is judged by the tokens it would have taken, and by its cache", () => {
  const message = {
    run_id: "same",
    seq: 1,
    state: "running",
    message: null,
    queue: null,
    events: [
      { type: "run", header: { ...header, mode: "same-text", timing: { mode: "in step" } } },
      token("backbone", 0, 1, 4),
      token("river", 0, 1, 2),
      { ...token("river", 1, 2, 2), fidelity: { agrees: true, kl: 0.1, choice: 2 } },
      { ...token("river", 2, 3, 2), fidelity: { agrees: false, kl: 0.3, choice: 9 } },
    ],
  };
  let run = applyMessage(newRun(), message, new Set());
  assert.equal(textVerdict(run, run.lanes.get("river")), "agrees on 50 %");
  const mean = { k_cos: 0.9971, v_cos: 0.9784 };
  run = applyMessage(run, { ...message, seq: 2, events: [{ type: "fidelity", lane: "river", mean }] }, new Set());
  assert.equal(textVerdict(run, run.lanes.get("river")), "agrees on 50 % · K 0.997 V 0.978");
});

test("a lane that drafts says what its drafts are worth, counting every cycle once", () => {
  const cycle = (number, drafted, accepted) => ({ cycle: { number, drafted, accepted, place: 0 } });
  const events = [
    { type: "run", header: { ...header, lanes: [header.lanes[0], { id: "verified", method: "verified" }] } },
    token("backbone", 0, 1, 4),
    token("verified", 0, 1, 4),
    { ...token("verified", 1, 2, 4), ...cycle(1, 3, 1) },
    { ...token("verified", 2, 3, 4), ...cycle(1, 3, 1) },
    { ...token("verified", 3, 4, 4), ...cycle(2, 1, 1) },
  ];
  const run = applyMessage(newRun(), { run_id: "v", seq: 1, state: "running", message: null, queue: null, events }, new Set());
  assert.equal(textVerdict(run, run.lanes.get("verified")), "50 % of drafts accepted · 1.5 tokens per cycle");
});

test("the slots of a token are compared layer by layer, and only where there is something to compare", () => {
  const fidelity = { start: 10, k_cos: [[1, 0.9]], v_cos: [[1, 0.5]], k_err: [[0, 0.2]], v_err: [[0, 0.6]] };
  const lane = { fidelity };
  const close = slotFidelity(lane, { position: 10 });
  assert.equal(close.kCos.toFixed(3), "0.950");
  assert.equal(close.vErr.toFixed(3), "0.300");
  assert.deepEqual([close.least, close.layer], [0.5, 2]);
  assert.equal(slotFidelity(lane, { position: 9 }), null);
  assert.equal(slotFidelity({ fidelity: null }, { position: 10 }), null);
});

test("a draft lane that differs where the backbone was undecided is called a near tie, and elsewhere a difference", () => {
  const verdict = (probabilities) => {
    const backbone = { ...token("backbone", 1, 7, 4), top5: [[7, "a", probabilities[0]], [8, "b", probabilities[1]]] };
    const verified = { ...token("verified", 1, 8, 4), cycle: { number: 1, drafted: 1, accepted: 1, place: 0 } };
    const events = [
      { type: "run", header: { ...header, lanes: [header.lanes[0], { id: "verified", method: "verified" }] } },
      token("backbone", 0, 1, 4),
      token("verified", 0, 1, 4),
      backbone,
      verified,
    ];
    const run = applyMessage(newRun(), { run_id: "n", seq: 1, state: "running", message: null, queue: null, events }, new Set());
    return textVerdict(run, run.lanes.get("verified"));
  };
  assert.match(verdict([0.41, 0.4]), /near tie at token 2: 0.02 logits apart/);
  assert.match(verdict([0.8, 0.1]), /differs from token 2$/);
});

test("prefill and memory are kept, whatever the order, and what is filled later is counted once", () => {
  const recompute = { ...header, lanes: [{ id: "recompute", method: "recompute" }] };
  const prefill = { type: "prefill", lane: "recompute", t_ns: 50e6, kv: [[0, 4, "backbone", 1]], shared: true };
  const hole = { ...token("recompute", 1, 6, 1), kv: [[0, 1, "backbone", 3], [1, 4, "none", -1]], layers_run: 1 };
  const filling = { ...token("recompute", 2, 7, 4), kv: [[0, 4, "backbone", 4]], layers_run: 7, filled: [[3, 1, 4, "backbone"]], position: 4 };
  const memory = { peak_bytes: 9, of: "device" };
  const events = [{ type: "run", header: recompute }, prefill, token("recompute", 0, 5, 4, 50e6), hole, filling, { type: "done", reason: "finished", memory }];
  for (const order of [events, [...events].reverse(), [...events, ...events]]) {
    let run = newRun();
    for (const event of order) run = applyMessage(run, message([event]), new Set());
    const lane = run.lanes.get("recompute");
    assert.equal(lane.prefill, prefill);
    assert.equal(lane.prefillNs, 50e6);
    assert.deepEqual(run.memory, memory);
    assert.deepEqual([lane.slotsLeft, lane.slotsFilled, lane.slotsWritten, lane.layersSum], [3, 3, 5, 8]);
    assert.deepEqual(fillingsOf(lane, { position: 3 }), [{ i: 2, first: 1, last: 4 }]);
  }
});

test("two lanes of one method have names that differ", () => {
  const labels = (lanes) => [...applyMessage(newRun(), message([{ type: "run", header: { ...header, lanes } }]), new Set()).lanes.values()].map((lane) => lane.label);
  const river = (id, label, tau) => ({ id, method: "river", label, rule: { name: "similarity", tau } });
  assert.deepEqual(labels([river("river", "River", 0.95), river("river-2", "River", 0.98)]), ["River, tau 0.95", "River, tau 0.98"]);
  assert.deepEqual(labels([river("river", "River", 0.95), river("river-2", "River, tau 0.98", 0.98)]), ["River", "River, tau 0.98"]);
  assert.equal(new Set(labels([river("river", "River", 0.95), river("river-2", "River", 0.95)])).size, 2);
});

test("while a lane runs its speed is that of the last 16 tokens", () => {
  const tokens = Array.from({ length: 40 }, (_, i) => token("backbone", i, i, 4, i < 20 ? 10e6 : 5e6));
  const run = applyMessage(newRun(), message([{ type: "run", header }, ...tokens]), new Set());
  const lane = run.lanes.get("backbone");
  assert.equal(recentSpeed(lane), 200);
  assert.equal(speed(lane).toFixed(1), (39 / (19 * 0.01 + 20 * 0.005)).toFixed(1));
  assert.equal(recentSpeed(newRun().lanes.get("none") ?? { tokens: [] }), null);
});

test("why a token left is said with the number that decided, for every rule", () => {
  const at = (exit_layer, fields = {}) => ({ ...token("x", 1, 6, exit_layer), tested: exit_layer, similarity: [0.2, 0.95, 0.5, 0.4], top5: [[6, " 6", 0.83], [7, " 7", 0.1]], ...fields });
  const lane = (rule, fields = {}) => ({ method: "masking", rule, untrainedHead: true, ...fields });
  const tau = { name: "similarity", tau: 0.9, floor: 2, layers: null };
  assert.equal(exitSentence(at(2), lane(tau), 4), "Left after layer 2: similarity 0.9500 > tau 0.9; it may not leave before layer 2.");
  assert.match(exitSentence(at(4, { similarity: [0.99, 0.5, 0.6, 0.1], tested: 3 }), lane(tau), 4), /reached 0\.6000 at most \(layer 3\), not above tau 0\.9/);
  assert.match(exitSentence(at(3), lane(tau, { method: "monotone" }), 4), /no token may go deeper/);
  const head = (name) => ({ name, threshold: 0.7, floor: 1, layers: [2, 3] });
  assert.match(exitSentence(at(2), lane(head("maxprob")), 4), /probability of its best token, 0\.830, passed 0\.7; it may leave after layers 2, 3 only/);
  assert.match(exitSentence(at(2), lane(head("margin")), 4), /margin between its two best tokens, 0\.730, passed 0\.7/);
  assert.match(exitSentence(at(2), lane(head("entropy")), 4), /certainty \(1 less the normalised entropy\) passed 0\.7/);
  // River answers from another state than the one that was tested: the score is not in the trace and is not made up.
  assert.match(exitSentence(at(2), lane(head("maxprob"), { untrainedHead: false, method: "river" }), 4), /best token passed 0\.7/);
  assert.match(exitSentence(at(4, { tested: 0 }), lane(tau, { method: "recompute" }), 4), /too many tokens were waiting/);
  assert.match(exitSentence(at(2, { tested: 0 }), lane({ name: "follow", leader: "river" }), 4), /where River left/);
});
