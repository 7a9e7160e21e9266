// What is known of a run, built from messages that may arrive twice, late or out of order.
// Everything here is pure data: no page, no clock but the engine's.

export const METHODS = {
  backbone: { label: "Backbone", about: "the original model, every layer" },
  int4: { label: "Full 4-bit", about: "every layer, weights in 4 bits" },
  river: { label: "River", about: "leaves early and goes on in 4 bits" },
  verified: { label: "River, verified", about: "drafts in 4 bits, the backbone checks" },
  recompute: { label: "Recompute", about: "skipped layers run later, with another token" },
  replay: { label: "Recompute, token replay", about: "incomplete tokens are fed again" },
  propagation: { label: "State propagation", about: "skipped slots are guessed from the exit state" },
  masking: { label: "KV masking", about: "skipped slots stay empty" },
  monotone: { label: "Monotone exit", about: "never deeper than the token before" },
  skipdecode: { label: "SkipDecode schedule", about: "fewer layers with every position" },
  sequence: { label: "Sequence-level exit", about: "one depth for the whole answer" },
};

const FINAL = new Set(["done", "failed"]);

/** An empty run. `lanes` is a Map from lane id to lane, in the order in which they are shown. */
export function newRun(runId = null) {
  return {
    runId,
    seq: -1,
    state: "idle",
    message: null,
    queue: null,
    header: null,
    lanes: new Map(),
    reason: null,
    memory: null, // the most memory that was used, of the done event
    playback: null, // of a run that is played back: { durationNs, over }
  };
}

export function newLane(id) {
  return {
    id,
    method: id,
    label: METHODS[id]?.label ?? id,
    about: METHODS[id]?.about ?? "",
    rule: null,
    tokens: [], // by index; a hole is a token that has not arrived yet
    count: 0,
    decoded: 0, // tokens that count for the speed: all but the first, which the prefill wrote
    decodeNs: 0,
    prefillNs: 0,
    prefill: null, // the prefill event
    depthSum: 0,
    layersSum: 0, // rows times layers of the backbone, those made up for included
    slotsLeft: 0, // slots that decode steps left empty
    slotsFilled: 0, // ... and that later steps have written
    slotsWritten: 0, // by decode steps, at their own position
    note: "",
    untrainedHead: false, // it answers from the LM head on a state that the model was never trained for
    cycles: new Map(), // of verified River: cycle number -> { drafted, accepted }
    compared: 0, // decoded tokens of a run on the same text
    agreed: 0, // ... of which the lane would have taken the backbone's
    klSum: 0,
    fidelity: null, // how far keys and values are from the backbone's, at the end
    end: null,
    error: null,
  };
}

/** A fresh set of lanes for a page that has not run anything yet. */
export function previewRun(methods = ["backbone", "int4", "river"]) {
  const run = newRun();
  for (const id of methods) run.lanes.set(id, newLane(id));
  return run;
}

function laneOf(run, id) {
  if (!run.lanes.has(id)) run.lanes.set(id, newLane(id));
  return run.lanes.get(id);
}

/** Lanes of one label get their threshold with it, or a number where that is the same too. */
function tellApart(lanes) {
  for (const words of [(lane) => ruleWords(lane.rule), (lane, at) => String(at + 1)]) {
    for (const label of new Set(lanes.map((lane) => lane.label))) {
      const same = lanes.filter((lane) => lane.label === label);
      if (same.length > 1) same.forEach((lane, at) => (lane.label = `${label}, ${words(lane, at)}`));
    }
  }
}

/** An exit rule in two words, such as "tau 0.97". */
export function ruleWords(rule) {
  if (!rule) return "no rule";
  if (typeof rule.tau === "number") return `tau ${rule.tau}`;
  if (typeof rule.threshold === "number") return `${rule.name} ${rule.threshold}`;
  if (typeof rule.depth === "number") return `depth ${rule.depth}`;
  if (rule.name === "follow") return "River’s exits";
  return rule.name;
}

/** Apply one event. Applying it again, or in another order, leads to the same run. */
export function applyEvent(run, event) {
  switch (event.type) {
    case "run": {
      run.header = event.header;
      const lanes = new Map();
      for (const about of event.header.lanes) {
        const lane = laneOf(run, about.id);
        const method = METHODS[about.method];
        lane.method = about.method;
        lane.label = about.label ?? method?.label ?? about.id;
        lane.about = method?.about ?? about.note ?? "";
        lane.rule = about.rule ?? null;
        lane.note = about.note ?? "";
        lane.untrainedHead = about.untrained_head === true;
        lanes.set(about.id, lane);
      }
      tellApart([...lanes.values()]);
      run.lanes = lanes;
      break;
    }
    case "token": {
      const lane = laneOf(run, event.lane);
      if (lane.tokens[event.i]) break;
      lane.tokens[event.i] = event;
      lane.count += 1;
      if (event.from_prefill) {
        lane.prefillNs = event.t_ns;
      } else {
        lane.decoded += 1;
        lane.decodeNs += event.t_ns;
        lane.depthSum += event.exit_layer;
        lane.layersSum += event.layers_run ?? event.exit_layer;
        for (const [first, last, owner] of event.kv) {
          if (owner === "none") lane.slotsLeft += last - first;
          else lane.slotsWritten += last - first;
        }
        for (const [, first, last] of event.filled ?? []) lane.slotsFilled += last - first;
        if (event.cycle) lane.cycles.set(event.cycle.number, event.cycle);
        if (event.fidelity) {
          lane.compared += 1;
          lane.agreed += event.fidelity.agrees ? 1 : 0;
          lane.klSum += event.fidelity.kl;
        }
      }
      break;
    }
    case "prefill": {
      const lane = laneOf(run, event.lane);
      lane.prefill = event;
      lane.prefillNs ||= event.t_ns;
      break;
    }
    case "fidelity":
      laneOf(run, event.lane).fidelity = event;
      break;
    case "end":
      laneOf(run, event.lane).end = event;
      break;
    case "error":
      laneOf(run, event.lane).error = event.message;
      break;
    case "done":
      run.reason = event.reason;
      run.memory = event.memory ?? null;
      break;
  }
}

/**
 * Take in one message of the channel. `retired` is the set of run ids that a newer run has replaced: what still
 * arrives for them is dropped. Returns the run to show, which is a new object when another run has begun.
 */
export function applyMessage(run, message, retired) {
  if (retired.has(message.run_id)) return run;
  let current = run;
  if (message.run_id !== run.runId) {
    if (run.runId) retired.add(run.runId);
    current = newRun(message.run_id);
  }
  for (const event of message.events) applyEvent(current, event);
  if (message.seq > current.seq && !FINAL.has(current.state)) {
    current.seq = message.seq;
    current.state = message.state;
    current.message = message.message;
    current.queue = message.queue;
  }
  return current;
}

export function isFinal(run) {
  return FINAL.has(run.state);
}

/** Whether everything of the run is in it: it has ended, and has been played to its end. */
export function isOver(run) {
  return isFinal(run) && (!run.playback || run.playback.over);
}

export function layersOf(run) {
  return run.header?.model?.n_layers ?? 30;
}

/** Tokens per second of engine time, or null before the second token. */
export function speed(lane) {
  return lane.decoded > 0 && lane.decodeNs > 0 ? lane.decoded / (lane.decodeNs / 1e9) : null;
}

const RECENT = 16;

/** Tokens per second over the last 16 tokens, of engine time, or null before the second token. */
export function recentSpeed(lane) {
  let count = 0;
  let ns = 0;
  for (let i = lane.tokens.length - 1; i >= 0 && count < RECENT; i -= 1) {
    const token = lane.tokens[i];
    if (!token || token.from_prefill) continue;
    count += 1;
    ns += token.t_ns;
  }
  return count > 0 && ns > 0 ? count / (ns / 1e9) : null;
}

/** How many times the backbone's speed, or null without a backbone lane. */
export function speedUp(run, lane) {
  const backbone = backboneOf(run);
  const base = backbone && speed(backbone);
  const own = speed(lane);
  return base && own ? own / base : null;
}

/** Mean number of backbone layers per decoded token, or null. */
export function meanDepth(lane) {
  return lane.decoded > 0 ? lane.depthSum / lane.decoded : null;
}

/** Mean number of rows times backbone layers per decoded token, layers that were made up for later included; or null. */
export function meanLayersRun(lane) {
  return lane.decoded > 0 ? lane.layersSum / lane.decoded : null;
}

/** What a step of the backbone's lane took, on average: { layersNs, restNs }, its layers and everything else (head, sampling). Null where it was not measured. */
export function backboneStep(run) {
  let count = 0;
  let layersNs = 0;
  let restNs = 0;
  for (const token of backboneOf(run)?.tokens ?? []) {
    if (!token || token.from_prefill || !token.split?.backbone_ns) continue;
    count += 1;
    layersNs += token.split.backbone_ns;
    restNs += Math.max(0, token.t_ns - token.split.backbone_ns);
  }
  return count > 0 ? { layersNs: layersNs / count, restNs: restNs / count } : null;
}

/**
 * What leaving early would gain if the layers that a token skipped cost nothing, and everything else what it cost the backbone: { times, share, whole }. `share` is
 * the mean share of the backbone's layers that a token was taken through; a check of several drafts takes them through the layers, and through the head,
 * together. `whole` is false where the backbone's step was not measured in parts: then the step counts as nothing but layers, which promises more than can be had.
 * Null before the second token. An estimate from measured times: another measurement may lie above it.
 */
export function speedEstimate(run, lane) {
  if (lane.decoded === 0) return null;
  const steps = lane.cycles.size > 0 ? lane.cycles.size / lane.decoded : 1; // of which every one has a head
  const share = lane.cycles.size > 0 ? steps : lane.depthSum / (layersOf(run) * lane.decoded);
  const step = backboneStep(run);
  if (!step) return share > 0 ? { times: 1 / share, share, whole: false } : null;
  const { layersNs, restNs } = step;
  return { times: (layersNs + restNs) / (share * layersNs + steps * restNs), share, whole: true };
}

/** Slots of the KV cache that have been written so far, the prompt's included. */
export function slotsHeld(run, lane) {
  if (lane.count === 0 && !lane.prefill) return 0;
  const prompt = run.header?.prompt_ids?.length ?? 0;
  const kept = lane.prefill?.kv
    ? lane.prefill.kv.reduce((sum, [first, last, owner]) => sum + (owner === "none" ? 0 : last - first), 0)
    : layersOf(run);
  return prompt * kept + lane.slotsWritten + lane.slotsFilled;
}

/** The steps after token `i` that wrote slots of its position: a list of { i, first, last }. */
export function fillingsOf(lane, token) {
  const found = [];
  for (const later of lane.tokens) {
    for (const [position, first, last] of later?.filled ?? []) if (position === token.position) found.push({ i: later.i, first, last });
  }
  return found;
}

export function backboneOf(run) {
  for (const lane of run.lanes.values()) if (lane.method === "backbone") return lane;
  return null;
}

/** Index of the first token whose id differs from the backbone's at the same place, or -1 as far as both have come. */
export function firstDifference(run, lane) {
  const backbone = backboneOf(run);
  if (!backbone || backbone === lane) return -1;
  const shared = Math.min(lane.tokens.length, backbone.tokens.length);
  for (let i = 0; i < shared; i += 1) {
    const a = lane.tokens[i];
    const b = backbone.tokens[i];
    if (!a || !b) return -1;
    if (a.id !== b.id) return i;
  }
  return -1;
}

/** The seconds that the shared time axis spans: a round number while lanes run, the slowest lane's time at the end. */
export function timeSpan(run) {
  if (run.playback) return run.playback.durationNs / 1e9 || 1;
  let longest = 0;
  let expected = 0;
  for (const lane of run.lanes.values()) {
    const seconds = (lane.prefillNs + lane.decodeNs) / 1e9;
    longest = Math.max(longest, seconds);
    const rate = speed(lane);
    if (rate && !lane.end && run.header) {
      expected = Math.max(expected, lane.prefillNs / 1e9 + run.header.max_new_tokens / rate);
    }
  }
  if (isFinal(run)) return longest || 1;
  const wanted = Math.max(longest * 1.02, expected, 0.5);
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= wanted);
}

/** What drafting is worth, in words; `at` is the first token that differs from the backbone's, or -1. */
function draftWords(lane, backbone, at) {
  let drafted = 0;
  let accepted = 0;
  for (const cycle of lane.cycles.values()) {
    drafted += cycle.drafted;
    accepted += cycle.accepted;
  }
  const share = drafted ? `${Math.round((100 * accepted) / drafted)} % of drafts accepted` : "no drafts";
  const pace = `${(lane.decoded / lane.cycles.size).toFixed(1)} tokens per cycle`;
  return `${share} · ${pace}${at >= 0 ? ` · ⚑ ${differenceWords(lane, backbone, at)}` : ""}`;
}

const NEAR_TIE = 0.25; // logits: two units in the last place of bfloat16 at the size that logits have

/** Up to the first difference both texts are the same, so the backbone's own candidates tell how far apart the two choices were. */
function differenceWords(lane, backbone, at) {
  const chance = (id) => backbone.tokens[at].top5.find(([candidate]) => candidate === id)?.[2];
  const own = chance(backbone.tokens[at].id);
  const other = chance(lane.tokens[at].id);
  const gap = own && other ? Math.log(own / other) : Infinity;
  return Math.abs(gap) <= NEAR_TIE
    ? `near tie at token ${at + 1}: ${gap.toFixed(2)} logits apart, decided by rounding`
    : `differs from token ${at + 1}`;
}

/**
 * How close the cache slots that a token's step wrote are to the backbone's, over the layers: mean cosines and relative errors of K and V, and
 * the layer where V is furthest off. Null for prompt positions, for runs on texts of their own, and before the lane has ended.
 */
export function slotFidelity(lane, token) {
  const at = lane.fidelity ? token.position - lane.fidelity.start : -1;
  const v = lane.fidelity?.v_cos?.[at];
  if (!v) return null;
  const mean = (name) => lane.fidelity[name][at].reduce((sum, value) => sum + value, 0) / v.length;
  const least = Math.min(...v);
  return {
    kCos: mean("k_cos"),
    vCos: mean("v_cos"),
    kErr: mean("k_err"),
    vErr: mean("v_err"),
    least,
    layer: v.indexOf(least) + 1,
  };
}

/** Whether every lane was fed the backbone's tokens. */
export function sameText(run) {
  return run.header?.mode === "same-text" || run.header?.mode === "same-exits";
}

/** How the lanes were timed, in words. */
export function timingWords(run) {
  switch (run.header?.timing?.mode) {
    case "sequential":
      return "Lanes ran one after another, each on its own clock.";
    case "in step":
      return `Same text${run.header.mode === "same-exits" ? " and exits" : ""}, in step; each clock counts its own steps.`;
    default:
      return "Each lane’s clock counts only its own steps (race).";
  }
}

/** How a lane stands, in words. */
export function laneStatus(run, lane) {
  if (lane.end) {
    if (lane.end.reason === "eos") return "done: end of text";
    if (lane.end.reason === "length") return "done: length reached";
    if (lane.end.reason === "stop") return "stopped";
    return `failed: ${lane.error ?? lane.end.message ?? "no reason given"}`;
  }
  if (lane.error) return `failed: ${lane.error}`;
  if (run.state === "idle") return "";
  if (isOver(run)) return lane.count > 0 ? "stopped" : "";
  if (run.playback) return lane.count > 0 ? "running" : "reading the prompt";
  return lane.count > 0 ? "running" : "waiting";
}

/** What the text of a lane is worth against the backbone's, in words; empty for the backbone itself. */
export function textVerdict(run, lane) {
  const backbone = backboneOf(run);
  if (!backbone || backbone === lane || lane.count === 0) return "";
  if (sameText(run)) {
    if (lane.compared === 0) return "";
    const share = `agrees on ${Math.round((100 * lane.agreed) / lane.compared)} %`;
    const mean = lane.fidelity?.mean;
    return mean ? `${share} · K ${mean.k_cos.toFixed(3)} V ${mean.v_cos.toFixed(3)}` : share;
  }
  const at = firstDifference(run, lane);
  if (lane.cycles.size > 0) return draftWords(lane, backbone, at);
  if (at >= 0) return `⚑ differs from token ${at + 1}`;
  const shared = Math.min(lane.count, backbone.count);
  return shared > 0 ? `= same text, ${shared} tokens` : "";
}

const ORDINALS = { one: "st", two: "nd", few: "rd", other: "th" };
const ordinalRules = new Intl.PluralRules("en", { type: "ordinal" });

export function ordinal(n) {
  return `${n}${ORDINALS[ordinalRules.select(n)]}`;
}

/** The one status line of a live run: it changes when a run or a lane changes its state, not with every token. */
export function statusLine(run) {
  switch (run.state) {
    case "idle":
      return "Press Run, and the lanes answer the same prompt side by side.";
    case "queued":
    case "waiting":
      if (run.queue) return `You are ${ordinal(run.queue.place)} in line. Your run starts by itself.`;
      return run.state === "waiting"
        ? "Waiting for the model. Your run starts as soon as it is ready."
        : "Your run is about to start.";
    case "running":
      return lanesDone(run) || (run.header ? "Running." : "Reading the prompt.");
    case "stopping":
      return "Stopping after the current token.";
    case "failed":
      return run.message ?? "The run failed.";
    default:
      return run.message ?? speedLine(run);
  }
}

/** The lanes that have ended, while others go on; empty otherwise. */
export function lanesDone(run) {
  const ended = [...run.lanes.values()].filter((lane) => lane.end);
  return ended.length === run.lanes.size ? "" : ended.map((lane) => `${lane.label} is done.`).join(" ");
}

function speedLine(run) {
  const speeds = [...run.lanes.values()].filter((lane) => speed(lane)).map((lane) => `${lane.label} ${speed(lane).toFixed(1)}`);
  return `${run.reason === "stop" ? "Stopped." : "Done."}${speeds.length ? ` ${speeds.join(" · ")} tokens/s.` : ""}`;
}
