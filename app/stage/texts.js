// The prompt and the lanes' texts, token by token. Colours come from the tokens' exits; text enters the page as text only.

import { el, setText } from "./inspector.js";
import { firstDifference, isFinal, textVerdict } from "./store.js";

// Of prompts and answers nobody knows the language, and each goes in its own direction.
const MODEL_TEXT = { lang: "", dir: "auto" };
const PIECES_SHOWN = 600;
const MOST_SHOWN = 3000; // tokens of one text that are in the page at a time: more cost it seconds
const SHOWN_BY = 500; // by how many tokens that window moves
const FAR_DOWN = 1e9; // px: the browser stops at the end
const NEAR_END = 40; // px: a column that is scrolled so far follows its text
const COMPACT_FROM = 4; // lanes from which the columns are low, so that two rows of them are as high as the inspector

/** The text of a token as nodes: a line break gets a faint mark before it and stays a real break. */
function tokenNodes(text) {
  const nodes = [];
  text.split("\n").forEach((line, at) => {
    if (at > 0) nodes.push(el("i", { class: "nl", "aria-hidden": "true" }), "\n");
    if (line) nodes.push(line);
  });
  return nodes;
}

/** The tokens [first, last + 1] of a text of `length` tokens that are shown: all, or those around the kept one, or the latest. */
export function shownTokens(length, kept = null) {
  if (length <= MOST_SHOWN) return [0, length];
  const end = kept === null ? length : Math.min(length, kept + MOST_SHOWN / 2);
  const first = Math.floor(Math.max(0, end - MOST_SHOWN) / SHOWN_BY) * SHOWN_BY;
  return [first, Math.min(length, first + MOST_SHOWN + SHOWN_BY)];
}

function nearEnd({ text }) {
  return text.scrollHeight - text.scrollTop - text.clientHeight < NEAR_END;
}

function textColumn(lane, index) {
  const view = { spans: [], first: 0, flagged: -1, complete: 0, rest: null, stuck: true };
  view.cut = el("p", { class: "cut", hidden: "" });
  view.verdict = el("span", { class: "verdict" });
  view.text = el("div", {
    class: "text",
    ...MODEL_TEXT,
    tabindex: "0",
    role: "group",
    "data-lane": lane.id,
    "data-index": String(index),
    "aria-label": `Text of ${lane.label}. Left and right arrow keys walk from token to token.`,
  });
  view.text.addEventListener("scroll", () => {
    view.stuck = nearEnd(view);
  });
  view.column = el(
    "article",
    { class: "column", "data-lane": lane.id, "data-method": lane.method },
    el("header", {}, el("h3", { title: lane.label }, lane.label), view.verdict),
    lane.untrainedHead ? el("p", { class: "caution", title: lane.note }, "⚠ answers from an untrained head: expect poor text") : null,
    view.cut,
    view.text,
  );
  return view;
}

/**
 * The texts. Returns `prompt` and `columns` (elements), `rebuild(run)` for other lanes, `draw(run, marks, moving, kept)`, `select({lane, i} or null)`,
 * `reveal(lane, i)` which scrolls a column to a token without moving the page, `focus(lane)` and `tokenAt(event)`.
 */
export function createTexts() {
  const promptLine = el("p", { class: "prompt-text", tabindex: "0", ...MODEL_TEXT });
  const pieces = el("div", { class: "pieces", tabindex: "0", ...MODEL_TEXT });
  const piecesTitle = el("summary");
  const prompt = el("div", { class: "prompt", hidden: "" }, promptLine, el("details", {}, piecesTitle, pieces));
  const columns = el("div", { class: "columns" });
  let views = new Map();
  let selected = null;
  let marked = new Map(); // lane id -> the set whose tokens carry the mark

  function drawPrompt(run) {
    prompt.hidden = !run.header;
    if (!run.header || promptLine.dataset.run === run.runId) return;
    promptLine.dataset.run = run.runId;
    promptLine.textContent = run.header.prompt;
    const all = run.header.prompt_pieces ?? [];
    setText(piecesTitle, `${run.header.prompt_ids.length} tokens as the model reads them`);
    pieces.replaceChildren(
      ...all.slice(0, PIECES_SHOWN).map((piece) => el("span", { class: "piece" }, ...tokenNodes(piece))),
      ...(all.length > PIECES_SHOWN ? [` … and ${all.length - PIECES_SHOWN} more`] : []),
    );
  }

  function spanOf(token) {
    const span = el("span", { class: `tok d${token.exit_layer}`, "data-i": String(token.i) }, ...tokenNodes(token.text));
    if (token.text === "") span.classList.add("part");
    if (token.fidelity && !token.fidelity.agrees) span.classList.add("other");
    return span;
  }

  /**
   * Put the span of token `i` where it belongs. A token behind a line break begins a paragraph, a block of its own: it looks the same,
   * and a new token lays out one paragraph instead of the whole text.
   */
  function place(view, span, i) {
    let next = i + 1;
    while (next < view.spans.length && !view.spans[next]) next += 1;
    let last = i - 1;
    while (last >= 0 && !view.spans[last]) last -= 1;
    const before = view.spans[last];
    const breaks = last === i - 1 && before?.textContent.endsWith("\n");
    if (view.spans[next]) view.spans[next].before(span);
    else if (before && !breaks) before.after(span);
    else if (view.rest && before) view.rest.before(span);
    else view.text.append(el("div", {}, span));
    view.spans[i] = span;
  }

  /** Show a text from another token on. */
  function startAt(view, lane, first) {
    view.text.replaceChildren();
    marked.delete(lane);
    Object.assign(view, { spans: [], first, complete: first, flagged: -1, rest: null, stuck: true });
  }

  /** Bring a column up to its lane. Returns whether it has to be scrolled to its end. */
  function drawText(run, lane, view, marks, moving, kept) {
    const { tokens } = lane;
    const [first, last] = shownTokens(tokens.length, kept);
    if (first !== view.first) startAt(view, lane.id, first);
    view.cut.hidden = last - first === tokens.length;
    if (!view.cut.hidden) setText(view.cut, `Tokens ${first + 1} to ${last} of ${tokens.length}, around ${kept === null ? "the playhead" : "the kept token"}.`);
    const behind = view.spans.length < last || view.complete < Math.min(last, lane.count);
    // Measuring would lay out the page once a column: what the last scroll told holds, unless that was not the end.
    const follow = behind && (moving || view.spans.length > 0) && (view.stuck || nearEnd(view));
    if (behind) view.stuck = follow;
    while (view.spans.length > last) {
      const span = view.spans.pop();
      const paragraph = span?.parentNode;
      span?.remove();
      if (paragraph?.childNodes.length === 0) paragraph.remove();
    }
    view.complete = Math.min(view.complete, last);
    for (let i = Math.max(first, view.complete); i < last; i += 1) {
      if (!tokens[i] || view.spans[i]) continue;
      const span = spanOf(tokens[i]);
      if (marks?.has(i)) span.classList.add("marked");
      place(view, span, i);
    }
    view.complete = lane.count === tokens.length ? last : first;
    const differs = firstDifference(run, lane);
    if (differs !== view.flagged) {
      view.spans[view.flagged]?.classList.remove("differs");
      view.spans[differs]?.classList.add("differs");
      view.flagged = differs;
    }
    const rest = lane.end?.rest ?? ""; // characters that no token completed, such as half an emoji
    if (rest !== (view.rest?.textContent ?? "")) {
      view.rest?.remove();
      view.rest = rest ? el("span", { class: "rest" }, rest) : null;
      if (view.rest) (view.text.lastChild ?? view.text).append(view.rest);
    }
    const verdict = textVerdict(run, lane);
    if (view.verdict.title !== verdict) {
      setText(view.verdict, verdict);
      view.verdict.title = verdict;
    }
    view.verdict.classList.toggle("differs", differs >= 0);
    const busy = String(!isFinal(run) && run.state !== "idle" && !lane.end);
    if (view.text.getAttribute("aria-busy") !== busy) view.text.setAttribute("aria-busy", busy);
    return follow;
  }

  function drawMarks(marks) {
    for (const [id, view] of views) {
      const wanted = marks?.get(id);
      if (marked.get(id) === wanted) continue;
      for (const [i, span] of view.spans.entries()) span?.classList.toggle("marked", Boolean(wanted?.has(i)));
      marked.set(id, wanted);
    }
  }

  // What is copied is the text: between paragraphs the browser would put line breaks of its own.
  columns.addEventListener("copy", (event) => {
    const selection = getSelection();
    const range = selection.rangeCount > 0 ? selection.getRangeAt(0) : null;
    const inside = range?.commonAncestorContainer;
    if (!inside || selection.isCollapsed || !(inside.closest ? inside : inside.parentElement).closest(".text")) return;
    event.clipboardData.setData("text/plain", range.cloneContents().textContent);
    event.preventDefault();
  });

  return {
    prompt,
    columns,

    rebuild(run) {
      views = new Map([...run.lanes.values()].map((lane, index) => [lane.id, textColumn(lane, index)]));
      columns.replaceChildren(...[...views.values()].map((view) => view.column));
      columns.style.setProperty("--columns", String(views.size));
      columns.classList.toggle("compact", views.size >= COMPACT_FROM);
      marked = new Map();
      selected = null;
    },

    draw(run, marks, moving, kept) {
      drawPrompt(run);
      const keptIn = (lane) => (kept?.lane === lane.id && lane.tokens[kept.i] ? kept.i : null);
      const following = [...run.lanes.values()].filter((lane) => drawText(run, lane, views.get(lane.id), marks?.get(lane.id), moving, keptIn(lane)));
      drawMarks(marks);
      // All columns are scrolled after all have changed: the page is laid out once.
      for (const { id } of following) views.get(id).text.scrollTop = FAR_DOWN;
    },

    select(at) {
      const span = at ? views.get(at.lane)?.spans[at.i] : null;
      if (span === selected) return;
      selected?.classList.remove("selected");
      span?.classList.add("selected");
      selected = span;
    },

    reveal(lane, i) {
      const view = views.get(lane);
      const span = view?.spans[i];
      if (!span) return;
      const [outer, inner] = [view.text.getBoundingClientRect(), span.getBoundingClientRect()];
      if (inner.top < outer.top + 8) view.text.scrollTop -= outer.top + 40 - inner.top;
      else if (inner.bottom > outer.bottom - 8) view.text.scrollTop += inner.bottom - outer.bottom + 40;
    },

    focus(lane) {
      views.get(lane)?.text.focus({ preventScroll: true });
    },

    tokenAt(event) {
      const span = event.target.closest?.(".tok");
      const text = span?.closest(".text");
      return text ? { lane: text.dataset.lane, i: Number(span.dataset.i) } : null;
    },
  };
}
