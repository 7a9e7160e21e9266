// One sentence about a run that completes itself while the run is played. Every number in it is of what has been played, and the
// words are chosen by the numbers: a lane that is slower is called slower.

import { visible } from "./inspector.js";
import { backboneOf, firstDifference, isOver, layersOf, meanDepth, sameText, speed, speedEstimate, speedUp } from "./store.js";

const KINDS = new Map([
  ["difficulty", difficultyWords],
  ["holes", holesWords],
  ["recompute", recomputeWords],
  ["drift", driftWords],
  ["river", thresholdWords],
  ["limits", thresholdWords],
]);

/** The sentence for a run as far as it has been played; a recording says in its header which one it is for. */
export function headline(run) {
  if (!run.header) return "";
  const lanes = [...run.lanes.values()];
  if (!lanes.some((lane) => lane.decoded > 0)) {
    if (lanes.length > 0 && lanes.every((lane) => lane.end || lane.error)) return "No lane wrote more than the prompt’s own token.";
    return `Every lane starts from the same prompt of ${run.header.prompt_ids.length} tokens.`;
  }
  const words = KINDS.get(run.header.recording?.headline)?.(run, isOver(run));
  return words || plainWords(run, isOver(run));
}

const grouped = (number) => number.toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)} %`;
const begun = (over, words) => (over ? words : `So far, ${words}`);
const lanesOf = (run, method) => [...run.lanes.values()].filter((lane) => lane.method === method && lane.decoded > 0);
const others = (run) => [...run.lanes.values()].filter((lane) => lane.method !== "backbone" && lane.decoded > 0);

function listed(items) {
  return items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;
}

/** Of lane and backbone, how fast one is beside the other. */
function paceWords(ratio) {
  if (ratio >= 1.02) return `is ${ratio.toFixed(2)}× as fast as the backbone`;
  if (ratio <= 0.98) return `is slower than the backbone (${ratio.toFixed(2)}×)`;
  return `is about as fast as the backbone (${ratio.toFixed(2)}×)`;
}

/** The share of steps in which a lane on the backbone's text would have taken its token, in words; empty in other runs. */
function agreementWords(lane) {
  return lane.compared > 0 ? `${percent(lane.agreed / lane.compared)} of the steps` : "";
}

function exitWords(token, layers) {
  if (token.exit_layer >= layers) return `ran all ${layers}`;
  return token.exit_layer === 0 ? "ran none of them" : `left after layer ${token.exit_layer}`;
}

/** A token of that exit depth: a word or a number rather than a mark. */
function extreme(tokens, words, depth) {
  const one = (token) => token.exit_layer === depth;
  return words.find(one) ?? tokens.find(one);
}

/** Tokens differ in difficulty. */
function difficultyWords(run, over) {
  const lane = lanesOf(run, "river")[0] ?? others(run)[0];
  if (!lane) return "";
  const layers = layersOf(run);
  const tokens = lane.tokens.filter((token) => token && !token.from_prefill);
  const words = tokens.filter((token) => /[\p{L}\p{N}]/u.test(token.text));
  const depths = tokens.map((token) => token.exit_layer);
  if (Math.min(...depths) === Math.max(...depths)) {
    return begun(over, `each of ${lane.label}’s ${depths.length} tokens ran ${depths[0]} of the ${layers} backbone layers.`);
  }
  const third = Math.max(1, Math.floor(layers / 3));
  const early = depths.filter((depth) => depth <= third).length;
  const all = depths.filter((depth) => depth >= layers).length;
  const soon = `${early || "none"} left within the first ${third} of ${layers} layers`;
  const said = `of ${depths.length} tokens that ${lane.label} wrote, ${soon} and ${all || "none"} ran all of them`;
  const light = extreme(tokens, words, Math.min(...depths));
  const heavy = extreme(tokens, words, Math.max(...depths));
  const pair = `“${visible(light.text)}” ${exitWords(light, layers)}, “${visible(heavy.text)}” ${exitWords(heavy, layers)}`;
  return `${begun(over, said).replace(/^o/, "O")}: ${pair}.`;
}

/** The slots that a naive exit leaves empty. */
function holesWords(run, over) {
  const lane = lanesOf(run, "masking")[0];
  if (!lane) return "";
  const slots = lane.decoded * layersOf(run);
  const left = lane.slotsLeft - lane.slotsFilled;
  const has = over ? "left" : "has left";
  const first =
    left > 0
      ? `${lane.label} ${has} ${grouped(left)} of ${grouped(slots)} slots empty (${percent(left / slots)})`
      : `${lane.label} ${has} none of ${grouped(slots)} slots empty`;
  const said = [`${begun(over, first)}${consequence(run, lane)}.`];
  const river = lanesOf(run, "river")[0];
  if (river) {
    const open = river.slotsLeft - river.slotsFilled;
    said.push(`${river.label} left ${open > 0 ? grouped(open) : "none"} empty${consequence(run, river)}.`);
  }
  return said.join(" ");
}

/** What a lane's cache does to its tokens. */
function consequence(run, lane) {
  if (lane.compared > 0) return ` and would have taken the backbone’s token in ${agreementWords(lane)}`;
  const at = firstDifference(run, lane);
  return at >= 0 ? ` and its text parts from the backbone’s at token ${at + 1}` : "";
}

/** Missing slots are filled later, by the backbone itself. */
function recomputeWords(run, over) {
  const lane = lanesOf(run, "recompute")[0] ?? lanesOf(run, "replay")[0];
  if (!lane) return "";
  const said = [];
  if (lane.slotsLeft === 0) {
    said.push(begun(over, `${lane.label} ${over ? "left" : "has left"} no slot open.`));
  } else {
    const start = run.header.prompt_ids.length - 1; // the position that token 0 belongs to
    let waited = 0;
    for (const token of lane.tokens) {
      for (const [position, first, last] of token?.filled ?? []) waited += (last - first) * (token.i - (position - start));
    }
    const late = (waited / lane.slotsFilled).toFixed(1);
    const filled = lane.slotsFilled > 0 ? `filled ${grouped(lane.slotsFilled)} of them, on average ${late} tokens late` : "filled none of them";
    said.push(begun(over, `${lane.label} ${over ? "left" : "has left"} ${grouped(lane.slotsLeft)} slots open and ${filled}.`));
  }
  const v = over ? lane.fidelity?.mean?.v_cos : undefined;
  if (v >= 0.999) said.push("Completed, its cache is the backbone’s but for rounding.");
  else if (typeof v === "number") said.push(`Completed, its values are at cosine ${v.toFixed(3)} to the backbone’s.`);
  const ratio = speedUp(run, lane);
  const bound = speedEstimate(run, lane);
  if (ratio && bound) {
    const but = bound.whole && ratio < 0.9 * bound.times ? `; its early exits alone would allow ${bound.times.toFixed(2)}×` : "";
    said.push(`It ${paceWords(ratio)}${but}.`);
  }
  return said.join(" ");
}

const KEPT = 0.95; // cosine of values from which a cache counts as kept

/** How far caches are from the backbone's. */
function driftWords(run, over) {
  const lanes = others(run).filter((lane) => lane.compared > 0);
  if (lanes.length === 0) return "";
  const share = (lane) => percent(lane.agreed / lane.compared);
  const closeness = (lane) => lane.fidelity?.mean?.v_cos;
  if (!over || !lanes.every((lane) => typeof closeness(lane) === "number")) {
    const shares = lanes.map((lane) => `${share(lane)} (${lane.label})`);
    return begun(over, `on its text the backbone’s token would have been taken in ${listed(shares)} of the steps.`).replace(/^o/, "O");
  }
  const gone = lanes.filter((lane) => closeness(lane) < KEPT);
  const kept = lanes.filter((lane) => closeness(lane) >= KEPT);
  const named = (some, verb) => (some.length ? [`${verb} ${listed(some.map((lane) => `${lane.label} (${closeness(lane).toFixed(2)})`))}`] : []);
  const drift = [...named(gone, "far off in"), ...named(kept, "near in")].join(", ");
  return `Cosine of the cached values to the backbone’s: ${drift}. Its next token would have been taken in ${listed([...gone, ...kept].map(share))} of the steps.`;
}

const LITTLE = 1.1; // speed-up below which a lane gains little

/** River at one threshold or several: what each gains, and what becomes of its text. */
function thresholdWords(run, over) {
  const lanes = lanesOf(run, "river");
  const clauses = lanes.filter((lane) => speedUp(run, lane)).map((lane, at) => gainWords(run, lane, over, at > 0));
  return clauses.length ? `${begun(over, clauses.join("; "))}.` : "";
}

/** `brief`: a clause before it has said what "as fast" and "the text" are compared with. */
function gainWords(run, lane, over, brief) {
  const ratio = speedUp(run, lane);
  const little = ratio >= 1.02 && ratio < LITTLE;
  const words = little ? `gains little (${ratio.toFixed(2)}×)` : paceWords(ratio);
  const pace = brief ? words.replace(/ (as|than) the backbone/, "") : words;
  if (lane.compared > 0) return `${lane.label} ${pace} and would have taken the backbone’s token in ${agreementWords(lane)}`;
  const at = firstDifference(run, lane);
  const shared = Math.min(lane.count, backboneOf(run).count);
  const whose = brief || !little ? "its text" : "the backbone’s text";
  const text = at >= 0 ? `parts from ${whose} at token ${at + 1}` : `${over ? "keeps" : "has kept"} ${whose} (${shared} tokens)`;
  const good = ratio >= LITTLE;
  return `${lane.label} ${pace}${good === at >= 0 ? ", but" : " and"} ${text}`;
}

/** About any other run: its River lane, or the last one. */
function plainWords(run, over) {
  const stopped = over && run.reason === "stop" ? "Stopped. " : "";
  const lane = lanesOf(run, "river")[0] ?? [...run.lanes.values()].filter((one) => one.decoded > 0).at(-1);
  const rate = speed(lane);
  if (!rate) return stopped;
  const layers = layersOf(run);
  const verb = sameText(run) ? "read" : "wrote";
  const said = [begun(over, `${lane.label} ${verb} ${lane.count} tokens at ${rate.toFixed(1)} tokens/s`)];
  if (lane === backboneOf(run)) return `${stopped}${said[0]}, running all ${layers} layers for each.`;
  const ratio = speedUp(run, lane);
  if (ratio) said.push(ratio < 1 ? `slower than the backbone (${ratio.toFixed(2)}×)` : `${ratio.toFixed(2)}× the backbone`);
  said.push(`running ${meanDepth(lane).toFixed(1)} of ${layers} layers per token`);
  if (sameText(run)) {
    const agrees = lane.compared ? `; it would have taken the backbone’s token in ${agreementWords(lane)}` : "";
    return `${stopped}${said.join(", ")}${agrees}.`;
  }
  const at = firstDifference(run, lane);
  const texts = at >= 0 ? `the texts part at token ${at + 1}` : over ? "the texts agree" : "the texts agree up to here";
  return `${stopped}${said.join(", ")}${ratio ? `; ${texts}` : ""}.`;
}
