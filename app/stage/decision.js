// What decided where a token left. Similarities in a trace are rounded, so that comparing one with tau would now and then say the opposite of what
// happened: the engine's own words decide, and in traces that lack them the exit itself does.

const DIGITS = 4;
const ROUNDED = 0.5 * 10 ** -DIGITS; // how far a recorded similarity may be from the one that was compared

/**
 * Whether the rule's test passed at the layer after which the token left: true, false (something else decided), or null where the trace cannot tell.
 * `lane` has method, rule and, where there are some, tokens; `layers` is the number of backbone layers.
 */
export function testPassed(token, lane, layers) {
  if (typeof token.why === "string") return token.why === "test";
  const rule = lane.rule ?? {};
  const depth = token.exit_layer;
  const tests = typeof rule.tau === "number" || typeof rule.threshold === "number";
  if (!tests || token.from_prefill || depth === 0 || depth >= layers || token.tested < depth) return false;
  if (lane.method === "skipdecode" || lane.method === "sequence") return false;
  if (lane.method !== "monotone") return true; // nothing but its test lets it go
  const before = lane.tokens?.[token.i - 1];
  if (before && depth < before.exit_layer) return true; // it might have gone deeper
  const value = token.similarity[depth - 1];
  if (typeof rule.tau !== "number" || typeof value !== "number" || Math.abs(value - rule.tau) <= ROUNDED) return null;
  return value > rule.tau;
}

/** The score that was compared at the exit, unrounded where the trace has it: { value, exact }, or null. */
export function exitScore(token) {
  if (typeof token.score === "number") return { value: token.score, exact: true };
  const value = token.similarity[token.exit_layer - 1];
  return typeof value === "number" ? { value, exact: false } : null;
}

/** A similarity beside the threshold that it did or did not pass, in words that never contradict it: "0.9731 > tau 0.97". */
export function besideTau({ value, exact }, passed, tau) {
  const holds = (text) => Number(text) > tau === passed;
  for (let digits = DIGITS; digits <= (exact ? 17 : DIGITS); digits += 1) {
    const text = value.toFixed(digits);
    if (holds(text)) return `${text} ${passed ? ">" : "≤"} tau ${tau}`;
  }
  return `${value.toFixed(DIGITS)}, before rounding ${passed ? "above" : "not above"} tau ${tau}`;
}
