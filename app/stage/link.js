// Links that open a recording at a lane and a token. Tokens are counted from 1, as everywhere on the page.

const KEYS = ["recording", "lane", "token"];

/** What a query string asks for: { slug, lane, token } with null for what it leaves out; null if it names no recording. */
export function readLink(search) {
  const query = new URLSearchParams(search);
  const [slug, lane, token] = KEYS.map((key) => query.get(key));
  return slug ? { slug, lane, token } : null;
}

/**
 * The address of a moment: `href` with the parts of a link set, or without them if `slug` is null. `cursor` is { lane, i } or null.
 * Other parts of the query stay only where `keep` says so, in the visitor's own address: in a private Space one of them is a key.
 */
export function linkTo(href, slug, cursor, { keep = false } = {}) {
  const url = new URL(href);
  for (const key of keep ? KEYS : [...url.searchParams.keys()]) url.searchParams.delete(key);
  if (slug) {
    url.searchParams.set("recording", slug);
    if (cursor) {
      url.searchParams.set("lane", cursor.lane);
      url.searchParams.set("token", String(cursor.i + 1));
    }
  }
  return url.href;
}

/** The place that a link means in a trace: { lane, token } with token as an index, {} for the whole, or { error } with one sentence. */
export function placeOf(link, trace) {
  if (link.lane === null && link.token === null) return {};
  const lane = trace.lanes.find((one) => one.id === link.lane);
  if (!lane) {
    const ids = trace.lanes.map((one) => one.id).join(", ");
    return { error: `The link names no lane of this recording (${ids}), so it opens at the start.` };
  }
  const token = Number(link.token ?? 1);
  if (!Number.isInteger(token) || token < 1 || token > lane.tokens.length) {
    return { error: `The link names no token of this lane, which wrote ${lane.tokens.length}, so it opens at the start.` };
  }
  return { lane: lane.id, token: token - 1 };
}
