// The run of a tab, with a server that answers when the test says so.

import assert from "node:assert/strict";
import test from "node:test";

import { createChannel } from "../../app/stage/channel.js";
import { createFollower, createMemo } from "../../app/stage/place.js";
import { applyMessage, newRun } from "../../app/stage/store.js";

const HEADER = { model: { n_layers: 4 }, max_new_tokens: 9, prompt: "p", lanes: [{ id: "backbone", method: "backbone" }] };
const token = (i) => ({ type: "token", lane: "backbone", i, id: i, text: " t", t_ns: 1e6, exit_layer: 4, from_prefill: i === 0, similarity: [], top5: [], kv: [] });
const message = (run_id, seq, events, state = "running") => JSON.stringify({ run_id, seq, state, message: null, queue: null, from: 0, events });
const first = (id, seq = 0) => message(id, seq, [{ type: "run", header: HEADER }, token(0)]);

/** What the channel needs of a stage: the rules are those of stage.js, without a page. */
function stageOf() {
  const retired = new Set();
  let live = null;
  const stage = {
    id: null,
    source: "preview",
    get tokens() {
      return live?.lanes.get("backbone")?.count ?? 0;
    },
    apply(one) {
      if (retired.has(one.run_id)) return;
      const next = applyMessage(live ?? newRun(), one, retired);
      if (next !== live) Object.assign(stage, { id: one.run_id, source: "live" });
      live = next;
    },
    showLive(id) {
      if (live?.runId !== id || !live.header) return false;
      Object.assign(stage, { id, source: "live" });
      return true;
    },
    open(id) {
      Object.assign(stage, { id, source: "recording" });
    },
  };
  return stage;
}

function page(memory = new Map()) {
  const stage = stageOf();
  const said = [];
  const asked = [];
  let turn = 0;
  let time = 0;
  let shown = null;
  const memo = { get: (key) => memory.get(key) ?? null, set: (key, text) => memory.set(key, text), drop: (key) => memory.delete(key) };
  const channel = createChannel({
    stage,
    memo,
    ask: (name, argument) => new Promise((answer) => asked.push({ name, argument, answer })),
    on: { show: (state) => (shown = state), say: (words) => said.push(words), note: (words) => said.push(words), select() {}, taken: () => ++turn, turn: () => turn },
    wait: async () => {},
    now: () => time,
  });
  return { channel, stage, said, asked, memory, at: (ms) => (time = ms), shown: () => shown, takes: () => (turn += 1) };
}

const settled = () => new Promise((done) => setImmediate(done));

test("two presses of the way back show the run, and its messages go on reaching it", async () => {
  const { channel, stage, shown } = page();
  channel.take(first("a"));
  stage.open("recording:x");
  channel.take(message("a", 1, [token(1)]));
  assert.equal(stage.id, "recording:x", "a run does not take the stage back by itself");
  await Promise.all([channel.showLive(), channel.showLive()]);
  assert.deepEqual([stage.id, stage.tokens], ["a", 2]);
  channel.take(message("a", 2, [token(2)], "done"));
  assert.deepEqual([stage.id, stage.tokens, shown().active], ["a", 3, false]);
});

test("a run that begins while another is fetched keeps all its messages, whenever the answer comes", async () => {
  const { channel, stage, asked } = page();
  channel.follow(message("old", 4, [token(0)], "done"));
  stage.open("recording:x");
  const [one, two] = [channel.showLive(), channel.showLive()];
  assert.equal(asked.length, 1, "the second press asks for nothing twice");
  channel.take(first("new"));
  channel.take(message("new", 1, [token(1)]));
  asked[0].answer(message("old", 4, [{ type: "run", header: HEADER }, token(0)], "done"));
  await Promise.all([one, two]);
  channel.take(message("new", 2, [token(1), token(2)], "done"));
  assert.deepEqual([stage.id, stage.tokens], ["new", 3]);
});

test("a run of before is fetched when it is asked for, and only if nothing else has been opened meanwhile", async () => {
  const { channel, stage, asked, said, shown, takes } = page();
  channel.follow(message("old", 4, [token(0)], "running"));
  stage.open("recording:x");
  assert.equal(shown().active, false, "what this page does not hear of, it cannot stop either");
  let back = channel.showLive();
  takes(); // another recording
  asked[0].answer(message("old", 4, [{ type: "run", header: HEADER }, token(0)], "done"));
  await back;
  assert.equal(stage.id, "recording:x");
  back = channel.showLive();
  asked[1].answer(null);
  await back;
  assert.match(said.at(-1), /does not hold/);
  back = channel.showLive();
  asked[2].answer(message("old", 4, [{ type: "run", header: HEADER }, token(0)], "done"));
  await back;
  assert.equal(stage.id, "old");
});

test("Run is ready as soon as a run is over, and a double click is one press", () => {
  const { channel, at } = page();
  assert.ok(channel.press());
  at(200);
  assert.ok(!channel.press());
  channel.take(message("a", 0, [], "queued"));
  assert.ok(!channel.press(), "it stands in line");
  channel.take(first("a", 1));
  channel.take(message("a", 2, [token(1)], "done"));
  assert.ok(channel.press(), "at once");
  channel.take(message("b", 0, [], "failed"));
  assert.ok(channel.press(), "a refusal is an answer too");
  at(1500);
  assert.ok(channel.press(), "a server that does not answer leaves Run usable");
});

test("of two runs that were asked for, the older one's end says nothing about the newer", () => {
  const { channel, shown } = page();
  channel.take(message("a", 0, [], "queued"));
  channel.take(message("b", 0, [], "queued"));
  channel.take(message("a", 1, [], "done"));
  assert.equal(shown().active, true);
});

test("a reload finds its run again, a copy of a tab that is still there does not take it for its own", () => {
  const memory = new Map();
  const tab = page(memory);
  tab.channel.take(first("a"));
  const copy = page(new Map(memory));
  assert.deepEqual(copy.channel.earlier(), { id: "a", here: false });
  tab.channel.left();
  assert.deepEqual(page(memory).channel.earlier(), { id: "a", here: true });
  assert.deepEqual(page(memory).channel.earlier(), { id: "a", here: false }, "a copy of the reloaded tab");
});

test("a memory that the browser refuses lasts as long as the page", () => {
  const refused = () => {
    throw new DOMException("denied", "SecurityError");
  };
  const full = () => ({ getItem: () => null, setItem: refused, removeItem: refused });
  for (const find of [refused, full, () => undefined, () => null]) {
    const memo = createMemo(find);
    assert.equal(memo.get("a"), null);
    memo.set("a", "1");
    assert.equal(memo.get("a"), "1");
    memo.drop("a");
    assert.equal(memo.get("a"), null);
  }
});

test("the address follows once, after the last of many changes, and may be refused", async () => {
  const went = [];
  let place = 0;
  const follow = createFollower(() => place, (url) => {
    went.push(url);
    throw new DOMException("too many", "SecurityError");
  }, 5);
  for (place = 1; place < 200; place += 1) follow();
  assert.deepEqual(went, []);
  await new Promise((done) => setTimeout(done, 30));
  assert.deepEqual(went, [200]);
  follow();
  await new Promise((done) => setTimeout(done, 30));
  assert.equal(went.length, 2, "a refusal is not the end");
});
