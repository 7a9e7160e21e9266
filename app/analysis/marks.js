// From what was brushed in a chart to the tokens that the stage marks: Map of lane id -> Set of token indices.

/** Tokens behind the points that Plotly reports: each point's trace names its lane, its custom data the token indices. */
export function tokensOf(points) {
  const marks = new Map();
  for (const point of points ?? []) {
    const lane = point.data?.meta?.lane;
    if (lane === undefined || !Array.isArray(point.customdata)) continue;
    for (const i of point.customdata) addMark(marks, lane, i);
  }
  return marks;
}

/** Tokens of a run (as the stage holds it) that a decode step made and that left at depth `from` to `to`, both included. */
export function tokensAtDepth(run, from, to) {
  const marks = new Map();
  for (const lane of run.lanes.values()) {
    for (const token of lane.tokens) {
      if (token && !token.from_prefill && token.exit_layer >= from && token.exit_layer <= to) addMark(marks, lane.id, token.i);
    }
  }
  return marks;
}

function addMark(marks, lane, i) {
  if (!marks.has(lane)) marks.set(lane, new Set());
  marks.get(lane).add(i);
}

/** "37 tokens marked, in River and Backbone"; empty if there are none. `labels` maps lane ids to names. */
export function marksLine(marks, labels) {
  const count = [...marks.values()].reduce((sum, tokens) => sum + tokens.size, 0);
  if (count === 0) return "";
  const names = [...marks.keys()].map((id) => labels.get(id) ?? id);
  const last = names.pop();
  const where = names.length ? `${names.join(", ")} and ${last}` : last;
  return `${count} ${count === 1 ? "token" : "tokens"} marked, in ${where}`;
}
