// A finished trace as a film: what has happened at a moment, steps by token and by layer, and the sentence, card and numbers that go with it.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import test from "node:test";
import { gunzipSync } from "node:zlib";

import { headline } from "../../app/stage/headline.js";
import { keyAction } from "../../app/stage/keys.js";
import { memoryParts } from "../../app/stage/memory.js";
import { createPlayer, traceOfRun } from "../../app/stage/player.js";
import { boundWords } from "../../app/stage/race.js";
import { runCard } from "../../app/stage/runcard.js";
import { applyMessage, isOver, laneStatus, newRun, slotsHeld, timeSpan } from "../../app/stage/store.js";
import { speedFor } from "../../app/stage/transport.js";

const LAYERS = 4;
const PROMPT = 3;

function token(lane, i, exit, tNs, fields = {}) {
  const kv = exit < LAYERS ? [[0, exit, "backbone", PROMPT - 1 + i], [exit, LAYERS, "river", PROMPT - 1 + i]] : [[0, LAYERS, "backbone", PROMPT - 1 + i]];
  return {
    type: "token", lane, i, id: 10 + i, text: ` w${i}`, t_ns: tNs, from_prefill: i === 0, position: PROMPT - 1 + i, exit_layer: exit, layers_run: exit,
    river_layers: LAYERS - exit, similarity: [0.1, 0.2, 0.3, 0.4], tested: exit, top5: [], kv, ...fields,
  };
}

function lane(id, tokens, reason = "length", fields = {}) {
  const prefill = { type: "prefill", lane: id, t_ns: tokens[0]?.t_ns ?? 0, exit_layer: LAYERS, shared: false, kv: [[0, LAYERS, "backbone", PROMPT - 1]] };
  return { id, prefill, tokens, fidelity: null, end: { type: "end", lane: id, reason, tokens: tokens.length, rest: "", text: "", kv_bytes: 700 }, ...fields };
}

function traceOf(lanes, header = {}) {
  return {
    trace_version: 1,
    header: {
      created: "2026-12-01T05:17:57+00:00",
      model: { name: "tiny", n_layers: LAYERS, source: "here", sha256: "abc" },
      device: "cpu", device_name: "A processor", threads: 2, dtype: "float32",
      quantiser: { name: "hqq", bits: 4, group_size: 64 },
      bytes: { backbone: 1000, river: 250, head: 100, kv_slot: 10 },
      prompt: "p", prompt_ids: [1, 2, 3], prompt_pieces: ["a", "b", "c"], max_new_tokens: 8, sampler: { temperature: 0, seed: 0 },
      timing: { mode: "race", protocol: "Lanes take turns.", repeats: 3 }, mode: "free", versions: { torch: "2.13" },
      lanes: lanes.map(({ id }) => ({ id, method: id.replace(/-.*/, ""), label: id, rule: { name: "similarity", tau: 0.35 } })),
      ...header,
    },
    lanes,
    done: { reason: "finished", memory: { peak_bytes: 5000, of: "process" } },
  };
}

const TRACE = traceOf([
  lane("backbone", [token("backbone", 0, 4, 100), token("backbone", 1, 4, 40), token("backbone", 2, 4, 40), token("backbone", 3, 4, 40)]),
  lane("river", [token("river", 0, 4, 100), token("river", 1, 1, 20), token("river", 2, 2, 20, { id: 99 })], "eos"),
]);

const counts = (run) => [...run.lanes.values()].map((one) => one.count);

test("at a moment there is what the lanes' own clocks have reached, and nothing else", () => {
  const player = createPlayer(TRACE);
  assert.equal(player.durationNs, 220);
  assert.equal(player.longest, 4);
  assert.deepEqual(counts(player.runAt(0)), [0, 0]);
  assert.deepEqual(counts(player.runAt(99)), [0, 0]);
  assert.deepEqual(counts(player.runAt(100)), [1, 1]);
  assert.deepEqual(counts(player.runAt(139)), [1, 2]);
  assert.deepEqual(counts(player.runAt(140)), [2, 3]);
  assert.equal(player.runAt(139).lanes.get("river").end, null);
  assert.equal(player.runAt(140).lanes.get("river").end.reason, "eos");
  assert.equal(player.runAt(219).memory, null);
  assert.equal(player.runAt(220).memory.peak_bytes, 5000);
  assert.ok(isOver(player.runAt(220)));
});

test("playing forward keeps the run and its tokens; scrubbing back leads to the same as playing up to there", () => {
  const player = createPlayer(TRACE);
  const early = player.runAt(100);
  assert.equal(player.runAt(150), early);
  const first = player.runAt(220).lanes.get("river").tokens[1];
  for (const moment of [180, 140, 120, 60, 220]) {
    const back = player.runAt(moment);
    const fresh = createPlayer(TRACE).runAt(moment);
    assert.deepEqual(back, fresh);
  }
  assert.equal(player.runAt(220).lanes.get("river").tokens[1], first, "the same event object, by which pages know what they have drawn");
});

test("the race's axis spans the whole film, and a lane runs until its own end", () => {
  const player = createPlayer(TRACE);
  assert.equal(timeSpan(player.runAt(10)), 220e-9);
  assert.equal(laneStatus(player.runAt(10), player.runAt(10).lanes.get("river")), "reading the prompt");
  assert.equal(laneStatus(player.runAt(125), player.runAt(125).lanes.get("river")), "running");
  assert.equal(laneStatus(player.runAt(150), player.runAt(150).lanes.get("river")), "done: end of text");
});

test("a token at work has its layers spread evenly over its time", () => {
  const player = createPlayer(TRACE);
  const done = (clock, id = "backbone") => player.inflight(clock).get(id)?.layers;
  assert.deepEqual([100, 109, 110, 119, 120, 139].map((clock) => done(clock)), [0, 0, 1, 1, 2, 3]);
  assert.equal(player.inflight(130).get("backbone").token.i, 1);
  assert.equal(done(105, "river"), 1, "river layers count too: four in 20 ns");
  assert.equal(done(140, "river"), undefined, "the lane has ended");
  assert.equal(done(220), undefined);
});

test("steps go to the neighbouring token of a lane or of all, and stay within the film", () => {
  const player = createPlayer(TRACE);
  assert.deepEqual([0, 100, 120, 140, 220].map((clock) => player.nextToken(clock)), [100, 120, 140, 180, 220]);
  assert.deepEqual([220, 180, 150, 140, 100, 0].map((clock) => player.previousToken(clock)), [180, 140, 140, 120, 0, 0]);
  assert.equal(player.nextToken(100, "backbone"), 140);
  assert.equal(player.nextToken(200, "river"), 200, "never back");
  assert.equal(player.momentOf("river", 2), 140);
  assert.equal(player.tokenAt("river", 139), 1);
  assert.equal(player.tokenAt("river", 99), -1);
});

test("steps by layer visit every layer once, forward and back", () => {
  for (const lengths of [[100, 40, 40], [101, 37, 53], [7, 3, 2]]) {
    const player = createPlayer(traceOf([lane("backbone", lengths.map((t, i) => token("backbone", i, 4, t)))]));
    const forward = [0];
    while (forward.at(-1) < player.durationNs) forward.push(player.nextLayer(forward.at(-1), "backbone"));
    for (const [at, clock] of forward.entries()) {
      const work = player.inflight(clock).get("backbone");
      if (work && lengths[0] > 50) assert.equal(4 * work.token.i + work.layers, at);
    }
    const back = [player.durationNs];
    while (back.at(-1) > 0) back.push(player.previousLayer(back.at(-1), "backbone"));
    assert.deepEqual(back.reverse(), forward);
  }
});

test("a lane that failed and one without a token do not stop the film", () => {
  const failed = { ...lane("river", [token("river", 0, 4, 100), token("river", 1, 1, 20)], "error"), end: { type: "end", lane: "river", reason: "error", message: "Out of memory." } };
  const empty = { id: "masking", prefill: null, tokens: [], fidelity: null, end: { type: "end", lane: "masking", reason: "stop", message: null } };
  const player = createPlayer(traceOf([TRACE.lanes[0], failed, empty]));
  assert.equal(laneStatus(player.runAt(119), player.runAt(119).lanes.get("river")), "running");
  assert.equal(laneStatus(player.runAt(120), player.runAt(120).lanes.get("river")), "failed: Out of memory.");
  assert.equal(player.runAt(0).lanes.get("masking").end.reason, "stop");
  assert.equal(headline(player.runAt(220)).includes("NaN"), false);
  assert.equal(createPlayer(traceOf([empty])).durationNs, 0);
});

test("a live run that has ended becomes the same film as its trace", () => {
  const events = TRACE.lanes.flatMap((one) => [one.prefill, ...one.tokens, one.end]);
  const message = { run_id: "a", seq: 3, state: "done", message: null, queue: null, events: [{ type: "run", header: TRACE.header }, ...events, { type: "done", ...TRACE.done }] };
  const run = applyMessage(newRun(), message, new Set());
  const player = createPlayer(traceOfRun(run));
  assert.deepEqual(player.runAt(139), createPlayer(TRACE).runAt(139));
});

test("five lanes of two thousand tokens are scrubbed in the time in which they are read, or less", () => {
  const ids = ["backbone", "masking", "recompute", "propagation", "river"];
  const long = traceOf(ids.map((id) => lane(id, Array.from({ length: 2000 }, (_, i) => token(id, i, i % 5, 1000 + (i % 7))))));
  const player = createPlayer(long);
  const text = JSON.stringify(long);
  const least = (act) => {
    let best = Infinity;
    for (let k = 8; k >= 1; k -= 1) {
      const start = performance.now();
      act(k);
      best = Math.min(best, performance.now() - start);
    }
    return best;
  };
  const scrubbed = least((k) => player.runAt((player.durationNs * k) / 8)); // every one builds anew
  const read = least(() => JSON.parse(text));
  assert.ok(scrubbed < 3 * read, `${scrubbed.toFixed(1)} ms beside ${read.toFixed(1)} ms`);
});

test("short films are played slowly enough to follow, unless they are longer than that anyway", () => {
  assert.equal(speedFor(1.2e9), 0.25);
  assert.equal(speedFor(3.5e9), 0.5);
  assert.equal(speedFor(60e9), 4);
});

test("what skipping would allow counts the head and the rest of a step, and what was measured stands beside it", () => {
  const words = (split, clock = 220) => {
    const trace = structuredClone(TRACE);
    for (const one of trace.lanes.find(({ id }) => id === "backbone").tokens) if (split && !one.from_prefill) one.split = split;
    const run = createPlayer(trace).runAt(clock);
    return Object.fromEntries([...run.lanes.values()].map((lane) => [lane.id, boundWords(run, lane)]));
  };
  // Two tokens through 1 and 2 of 4 layers: 3 / 8 of the layers. A step of the backbone is 40 ns: 24 for layers, 16 for the rest.
  const [said, why] = words({ backbone_ns: 24, river_ns: 0, head_ns: 10 }).river;
  assert.equal(said, `layers skipped would allow ${(40 / (24 * 0.375 + 16)).toFixed(2)}×; measured 2.00×, above it`);
  assert.match(why, /head and the rest of a step what they were measured to cost the backbone/);
  assert.match(words({ backbone_ns: 39, river_ns: 0, head_ns: 1 }).river[0], /would allow 2\.56×; measured 2\.00×$/);
  // Where the parts were not measured, no more is promised than is known.
  assert.equal(words(null).river[0], "layers skipped would allow less than 2.67×; measured 2.00×");
  assert.match(words(null).backbone[0], /every layer/);
  assert.equal(words(null, 100).river[0], "");
});

test("no recording shows a measured speed-up above what is said to be possible without saying so", () => {
  for (const name of readdirSync(RECORDINGS).filter((one) => one.endsWith(".json.gz"))) {
    const player = createPlayer(JSON.parse(gunzipSync(readFileSync(new URL(name, RECORDINGS)))), name);
    for (const share of [0.3, 0.6, 1]) {
      const run = player.runAt(Math.round(player.durationNs * share));
      for (const lane of run.lanes.values()) {
        const [said] = boundWords(run, lane);
        assert.doesNotMatch(said, /at most/);
        const numbers = said.match(/would allow ([\d.]+)×; measured ([\d.]+)×/);
        if (numbers) assert.equal(Number(numbers[2]) > Number(numbers[1]), said.includes("above it"), said);
      }
    }
  }
});

test("slots that are held grow with every step and with what is filled later", () => {
  const hole = token("recompute", 1, 1, 20, { kv: [[0, 1, "backbone", 3], [1, 4, "none", -1]] });
  const filling = token("recompute", 2, 4, 20, { filled: [[3, 1, 4, "backbone"]] });
  const player = createPlayer(traceOf([lane("recompute", [token("recompute", 0, 4, 100), hole, filling])]));
  const held = (clock) => slotsHeld(player.runAt(clock), player.runAt(clock).lanes.get("recompute"));
  assert.deepEqual([0, 100, 120, 140].map(held), [0, 12, 13, 20]);
});

test("the memory meter says of every part how it is known", () => {
  const whole = createPlayer(TRACE).runAt(220);
  const { parts, peak, sum } = memoryParts(createPlayer(TRACE).runAt(100), whole, false);
  assert.deepEqual(parts.map(({ name, bytes, how }) => [name, bytes, how]), [
    ["Backbone", 1000, "recorded"], ["LM head", 100, "recorded"], ["River", 250, "recorded"],
    ["KV, backbone", 700, "recorded"], ["KV, river", 700, "recorded"],
    ["Rest of the peak: program, libraries, buffers, the file’s pages", 2250, "computed"],
  ]);
  assert.equal(parts[3].held, 120, "12 slots of the prompt, 10 bytes each");
  assert.equal(peak - sum, 2250);
  assert.equal(memoryParts(whole, whole, true).parts[0].how, "measured");
  const bare = createPlayer({ ...TRACE, header: { ...TRACE.header, bytes: undefined }, done: null }).runAt(220);
  assert.equal(memoryParts(bare, bare, false).peak, null);
});

test("the run card holds what is needed to make the numbers again", () => {
  const card = runCard(createPlayer(TRACE).runAt(220), "recording");
  for (const part of [
    "A processor (cpu), 2 threads", "decode float32", "hqq, 4 bits, groups of 64", "tiny, 4 layers", "sha256 abc", "3 tokens", "greedy", "Repeats: 3",
    "Lanes take turns.", "torch 2.13", "2.000x the backbone", "1.50 of 4 backbone layers", "2026-12-01", "recorded",
  ]) {
    assert.ok(card.includes(part), `${part} in\n${card}`);
  }
  assert.equal(/undefined|null|NaN/.test(card), false);
  const old = createPlayer({ ...TRACE, header: { ...TRACE.header, timing: undefined, versions: undefined, quantiser: undefined, device_name: undefined }, done: null });
  assert.equal(/undefined|null|NaN/.test(runCard(old.runAt(220))), false);
  assert.equal(runCard(newRun()), "");
});

const RECORDINGS = new URL("../../assets/recordings/", import.meta.url);
const recordings = readdirSync(RECORDINGS)
  .filter((name) => name.endsWith(".json.gz"))
  .map((name) => JSON.parse(gunzipSync(readFileSync(new URL(name, RECORDINGS)))));

test("the sentence of every bundled recording is whole at every moment and tells of its lanes", () => {
  assert.ok(recordings.length >= 5);
  for (const trace of recordings) {
    const player = createPlayer(trace);
    for (let k = 0; k <= 40; k += 1) {
      const words = headline(player.runAt((player.durationNs * k) / 40));
      assert.ok(words.endsWith("."), words);
      assert.equal(/undefined|null|NaN|Infinity/.test(words), false, words);
      assert.equal(/So far|same prompt/.test(words), k < 40, words);
    }
  }
});

test("the numbers of the sentence are those of the tokens", () => {
  const withKind = (kind, lanes) => createPlayer(traceOf(lanes, { recording: { headline: kind } }));
  const masked = (i, exit) => token("masking", i, exit, 20, { kv: exit < 4 ? [[0, exit, "backbone", 2 + i], [exit, 4, "none", -1]] : [[0, 4, "backbone", 2 + i]] });
  const holes = withKind("holes", [TRACE.lanes[0], lane("masking", [masked(0, 4), masked(1, 1), masked(2, 2)]), TRACE.lanes[1]]);
  assert.match(headline(holes.runAt(220)), /masking left 5 of 8 slots empty \(63 %\)/);
  assert.match(headline(holes.runAt(220)), /river left none empty and its text parts from the backbone’s at token 3/);
  const filling = token("recompute", 3, 4, 20, { filled: [[3, 1, 4, "backbone"]] });
  const recompute = withKind("recompute", [
    TRACE.lanes[0],
    lane("recompute", [token("recompute", 0, 4, 100), token("recompute", 1, 1, 20, { kv: [[0, 1, "backbone", 3], [1, 4, "none", -1]] }), token("recompute", 2, 4, 20), filling]),
  ]);
  assert.match(headline(recompute.runAt(130)), /^So far, recompute has left 3 slots open and filled none of them\./);
  assert.match(headline(recompute.runAt(220)), /^recompute left 3 slots open and filled 3 of them, on average 2\.0 tokens late\./);
  assert.match(headline(withKind("difficulty", TRACE.lanes).runAt(220)), /“␣w1” left after layer 1, “␣w2” left after layer 2/);
});

test("a lane that is slower than the backbone is called slower", () => {
  const slow = traceOf([TRACE.lanes[0], lane("river", [token("river", 0, 4, 100), token("river", 1, 1, 60), token("river", 2, 2, 60)])]);
  for (const kind of ["river", "limits", undefined]) {
    const run = createPlayer({ ...slow, header: { ...slow.header, recording: { headline: kind } } }).runAt(1e9);
    assert.match(headline(run), /slower than the backbone \(0\.67×\)/);
  }
  const strange = createPlayer({ ...slow, header: { ...slow.header, recording: { headline: "constructor" } } }).runAt(1e9);
  assert.match(headline(strange), /slower/);
});

test("a key has one meaning, and none while somebody types", () => {
  const focus = (...matches) => ({ closest: (selector) => (selector.split(", ").some((part) => matches.includes(part)) ? {} : null) });
  const key = (name, fields = {}) => ({ key: name, ...fields });
  const body = { ...focus(), tagName: "BODY" };
  assert.deepEqual(keyAction(key(" "), body), ["toggle"]);
  assert.deepEqual(keyAction(key("ArrowLeft", { shiftKey: true }), body), ["step", -10]);
  assert.deepEqual(keyAction(key("ArrowUp"), body), ["layer", 1]);
  assert.deepEqual(keyAction(key("3"), body), ["lane", 2]);
  assert.deepEqual(keyAction(key("?", { shiftKey: true }), body), ["help"]);
  for (const name of [" ", "ArrowLeft", "3", "?", "Enter", "Escape"]) {
    assert.equal(keyAction(key(name), focus("textarea")), null);
    assert.equal(keyAction(key(name), focus("dialog")), null);
    assert.equal(keyAction(key(name, { ctrlKey: true }), body), null);
    assert.equal(keyAction(key(name, { metaKey: true }), body), null);
  }
  assert.equal(keyAction(key(" "), focus("button")), null, "the button is pressed, and nothing else happens");
  assert.equal(keyAction(key("Enter"), focus("summary")), null);
  assert.deepEqual(keyAction(key("ArrowRight"), focus("button")), ["step", 1]);
  assert.equal(keyAction(key("ArrowRight"), focus("[role=tab]")), null);
  const slider = focus("input");
  assert.deepEqual(keyAction(key("ArrowRight"), slider, slider), ["step", 1]);
  assert.equal(keyAction(key("x"), body), null);
});

test("keys that print something are the stage's only in the stage, and a box with the focus is scrolled by its own", () => {
  const focus = (...matches) => ({ closest: (selector) => (selector.split(", ").some((part) => matches.includes(part)) ? {} : null) });
  const act = (name, target, fields = {}) => keyAction({ key: name, ...fields }, target);
  for (const name of ["1", "9", "?"]) {
    assert.equal(act(name, focus("button")), null);
    assert.notEqual(act(name, focus("button", ".stage")), null);
    assert.notEqual(act(name, null), null);
  }
  for (const box of [".inspector", ".table-scroll", ".memory-scroll", ".prompt-text", ".an-scroll"]) {
    for (const name of ["ArrowUp", "ArrowDown", "ArrowLeft", "Home", "End", " "]) assert.equal(act(name, focus(box, ".stage")), null, `${name} in ${box}`);
  }
  const text = focus(".text", ".stage");
  assert.equal(act("ArrowDown", text), null);
  assert.deepEqual(act("ArrowRight", text), ["step", 1]);
  assert.deepEqual(act("Escape", focus("button")), ["unlock"]);
  for (const fields of [{ isComposing: true }, { defaultPrevented: true }]) assert.equal(act("Escape", focus("button"), fields), null);
  const behind = { ...focus(), ownerDocument: { querySelector: (what) => (what === "dialog[open]" ? {} : null) } };
  assert.equal(keyAction({ key: "Escape", target: behind }, behind), null, "the dialog's");
});
