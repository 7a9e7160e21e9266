// A finished trace as a film on the engine's clock: which events have happened at a moment, and which token is at work.
//
// Every lane has a clock of its own that starts at 0; token i of a lane is there once the times of its tokens up to i have passed.
// All clocks are shown as one. Within a token the layers are spread evenly over its time, since times of layers are not measured.

import { applyEvent, layersOf, newRun } from "./store.js";

/** A trace as its file has it, from a run of the store that has ended; tokens behind a hole are left out. */
export function traceOfRun(run) {
  const lanes = [...run.lanes.values()].map((lane) => {
    const hole = Array.from(lane.tokens).findIndex((token) => !token);
    const { id, prefill, fidelity, end } = lane;
    return { id, prefill, tokens: hole < 0 ? lane.tokens : lane.tokens.slice(0, hole), fidelity, end };
  });
  return { header: run.header, lanes, done: run.reason === null ? null : { reason: run.reason, memory: run.memory } };
}

/** Index of the first of the ascending `values` that is greater than `value`. */
function firstAbove(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Layers that a token was taken through, in full precision or quantised: as many cells as its column has. */
function layersThrough(token, layers) {
  return Math.max(1, Math.min(layers, token.exit_layer + token.river_layers));
}

/**
 * A player of a trace: { header, lanes: [{ id, prefill, tokens, fidelity, end }], done }. Times are nanoseconds of engine time.
 *
 * durationNs           the slowest lane's clock at its end
 * longest              tokens of the longest lane
 * ends                 Map lane id -> clock of that lane at its end
 * runAt(clock)         the run with exactly what has happened by then; the same object while the clock moves forward
 * inflight(clock)      Map lane id -> { token, layers, of }: the token at work, how many of its layers are done, and of how many
 * momentOf(lane, i)    when token i of a lane is there
 * tokenAt(lane, clock) index of the last token that is there, -1 before the first
 * nextToken, previousToken, nextLayer, previousLayer (clock, lane or null for all): the neighbouring boundary, or the end or start
 */
export function createPlayer(trace, runId = null) {
  const lanes = new Map();
  const events = []; // [moment, event], by moment
  for (const { id, prefill, tokens, fidelity, end } of trace.lanes) {
    const times = [];
    let at = 0;
    for (const token of tokens) times.push((at += token.t_ns));
    lanes.set(id, { tokens, times, end: at });
    if (prefill) events.push([Math.min(prefill.t_ns, times[0] ?? prefill.t_ns), { ...prefill, type: "prefill", lane: id }]);
    tokens.forEach((token, i) => events.push([times[i], { ...token, type: "token", lane: id }]));
    if (fidelity) events.push([at, { ...fidelity, type: "fidelity", lane: id }]);
    if (end?.reason === "error") events.push([at, { type: "error", lane: id, message: end.message }]);
    if (end) events.push([at, { ...end, type: "end", lane: id }]);
  }
  const durationNs = Math.max(0, ...[...lanes.values()].map((lane) => lane.end));
  if (trace.done) events.push([durationNs, { ...trace.done, type: "done" }]);
  events.sort(([a], [b]) => a - b); // stable: what happens at one moment stays in order
  const layers = layersOf(trace);
  const all = [...new Set([...lanes.values()].flatMap((lane) => lane.times))].sort((a, b) => a - b);

  let run = null;
  let applied = 0;

  function begin() {
    run = newRun(runId);
    run.state = "done";
    run.playback = { durationNs, over: false };
    applyEvent(run, { type: "run", header: trace.header });
    applied = 0;
  }

  const timesOf = (id) => lanes.get(id)?.times ?? all;

  /** The token of a lane that is at work: its start, length, layers, and how many of those are done. */
  function atWork(lane, clock) {
    const i = firstAbove(lane.times, clock);
    if (i >= lane.tokens.length) return null;
    const start = lane.times[i - 1] ?? 0;
    const length = lane.times[i] - start;
    const of = layersThrough(lane.tokens[i], layers);
    return { token: lane.tokens[i], start, length, of, layers: Math.floor(((clock - start) * of) / length) };
  }

  /** When layer k of a token at work is done; whole nanoseconds, so that `atWork` counts it from this moment on. */
  const layerEnd = ({ start, length, of }, k) => start + Math.ceil((length * k) / of);

  const chosen = (id) => (lanes.has(id) ? [lanes.get(id)] : [...lanes.values()]);

  return {
    durationNs,
    longest: Math.max(0, ...[...lanes.values()].map((lane) => lane.tokens.length)),
    ends: new Map([...lanes].map(([id, lane]) => [id, lane.end])),

    runAt(clock) {
      if (!run || (applied > 0 && events[applied - 1][0] > clock)) begin();
      while (applied < events.length && events[applied][0] <= clock) applyEvent(run, events[applied++][1]);
      run.playback.over = clock >= durationNs;
      return run;
    },

    inflight(clock) {
      const found = new Map();
      for (const [id, lane] of lanes) {
        const work = atWork(lane, clock);
        if (work) found.set(id, { token: work.token, layers: work.layers, of: work.of });
      }
      return found;
    },

    momentOf: (id, i) => lanes.get(id)?.times[i] ?? durationNs,

    tokenAt: (id, clock) => firstAbove(lanes.get(id)?.times ?? [], clock) - 1,

    nextToken(clock, id = null) {
      const times = timesOf(id);
      return times[firstAbove(times, clock)] ?? Math.max(clock, times.at(-1) ?? 0);
    },

    previousToken(clock, id = null) {
      const times = timesOf(id);
      let at = firstAbove(times, clock) - 1;
      if (times[at] === clock) at -= 1;
      return times[at] ?? 0;
    },

    nextLayer(clock, id = null) {
      const ends = chosen(id).flatMap((lane) => {
        const work = atWork(lane, clock);
        return work ? [layerEnd(work, work.layers + 1)] : [];
      });
      return ends.length ? Math.min(...ends) : Math.max(clock, timesOf(id).at(-1) ?? 0);
    },

    previousLayer(clock, id = null) {
      const ends = chosen(id).map((lane) => {
        // A moment before: the layer that ends exactly now is the one to go back over.
        const work = atWork(lane, Math.min(clock, lane.end) - 1);
        if (!work || clock <= 0) return 0;
        const end = layerEnd(work, work.layers);
        return clock > lane.end ? lane.end : end;
      });
      return ends.length ? Math.max(0, ...ends) : 0;
    },
  };
}
