// What the page says about exits is true, also of traces whose similarities are rounded.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import test from "node:test";
import { gunzipSync } from "node:zlib";

import { besideTau, testPassed } from "../../app/stage/decision.js";
import { exitSentence } from "../../app/stage/inspector.js";
import { createPlayer } from "../../app/stage/player.js";
import { seeded } from "./seeded.mjs";

const FOLDER = new URL("../../assets/recordings/", import.meta.url);
const recordings = readdirSync(FOLDER).filter((name) => name.endsWith(".json.gz"));
const read = (name) => JSON.parse(gunzipSync(readFileSync(new URL(name, FOLDER))));

/** Every comparison with tau that stands in a sentence holds as it is written. */
function assertHolds(sentence) {
  for (const [words, left, sign, right] of sentence.matchAll(/(-?[\d.]+) ([>≤]) tau (-?\d+(?:\.\d+)?)/g)) {
    assert.equal(sign === ">", Number(left) > Number(right), `${words} in: ${sentence}`);
  }
  for (const [words, left, right] of sentence.matchAll(/reached (-?[\d.]+) at most \(layer \d+\), not above tau (-?\d+(?:\.\d+)?)/g)) {
    assert.ok(Number(left) <= Number(right), words);
  }
}

test("in every recording, rounded to any digits, a token that its rule let go is said to have passed", () => {
  assert.ok(recordings.length > 0);
  let asked = 0;
  for (const name of recordings) {
    for (const digits of [null, 4, 3, 2]) {
      const trace = read(name);
      const layers = trace.header.model.n_layers;
      if (digits !== null) {
        for (const { tokens } of trace.lanes) for (const token of tokens) token.similarity = token.similarity.map((value) => (value === null ? null : Number(value.toFixed(digits))));
      }
      const player = createPlayer(trace, name);
      for (const lane of player.runAt(player.durationNs).lanes.values()) {
        for (const token of lane.tokens) {
          const sentence = exitSentence(token, lane, layers);
          assertHolds(sentence);
          const free = lane.rule?.name === "similarity" && !["monotone", "sequence", "skipdecode", "verified"].includes(lane.method);
          if (!free || token.from_prefill || token.exit_layer === 0 || token.exit_layer >= layers) continue;
          asked += 1;
          assert.equal(testPassed(token, lane, layers), true);
          assert.doesNotMatch(sentence, /it had to|≤|not above/, `${name} ${lane.id} ${token.i}`);
        }
      }
    }
  }
  assert.ok(asked > 2000);
});

test("the engine's words decide, and its unrounded score is shown with the digits that it takes", () => {
  const random = seeded(10);
  const lane = { method: "river", rule: { name: "similarity", tau: 0.97, floor: 1, layers: null } };
  for (let round = 0; round < 2000; round += 1) {
    const tau = Number(random().toFixed(2));
    const score = tau + (random() - 0.5) * 10 ** -Math.floor(2 + 8 * random());
    const token = { i: 3, exit_layer: 2, tested: 2, from_prefill: false, why: score > tau ? "test" : "held", score, similarity: [0.1, Number(score.toFixed(4)), null, null], top5: [] };
    const sentence = exitSentence(token, { ...lane, rule: { ...lane.rule, tau } }, 4);
    assertHolds(sentence);
    assert.match(sentence, score > tau ? /^Left after layer 2: similarity .* > tau/ : /it had to/);
  }
  assert.equal(besideTau({ value: 0.97004, exact: true }, true, 0.97), "0.97004 > tau 0.97");
  assert.equal(besideTau({ value: 0.97, exact: false }, true, 0.97), "0.9700, before rounding above tau 0.97");
});

test("a monotone lane's token was held where it went no deeper than it might, and free where it stayed below", () => {
  const token = (i, exit_layer, value, fields = {}) => ({ i, exit_layer, tested: exit_layer, from_prefill: false, similarity: Array(4).fill(value), top5: [], ...fields });
  const lane = { method: "monotone", rule: { name: "similarity", tau: 0.9 }, tokens: [token(0, 3, 0.95)] };
  assert.equal(testPassed(token(1, 3, 0.5), lane, 4), false);
  assert.equal(testPassed(token(1, 2, 0.9), lane, 4), true, "0.9 is a rounded number; it might have gone one deeper");
  assert.equal(testPassed(token(1, 3, 0.9), lane, 4), null);
  assert.match(exitSentence(token(1, 3, 0.9), lane, 4), /the trace does not tell more/);
  for (const why of ["held", "forced", "end"]) assert.doesNotMatch(exitSentence(token(1, 4, why === "end" ? 0.5 : 0.95, { why, tested: 3 }), lane, 4), /0\.95/, why);
  assert.match(exitSentence(token(1, 4, 0.95, { why: "held", tested: 3 }), { ...lane, method: "recompute" }, 4), /too many tokens were waiting/);
  assert.match(exitSentence(token(1, 3, 0.95, { why: "held", score: 0.95 }), lane, 4), /no token may go deeper.*0\.9500 > tau 0\.9/);
});
