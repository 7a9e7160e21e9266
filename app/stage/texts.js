// The prompt and the lanes' texts, token by token. Colours come from the tokens' exits; text enters the page as text only.

import { el, setText } from "./inspector.js";
import { firstDifference, isFinal, textVerdict } from "./store.js";

const PIECES_SHOWN = 600;
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

function textColumn(lane, index) {
  const view = { spans: [], flagged: -1, complete: 0, rest: null };
  view.verdict = el("span", { class: "verdict" });
  view.text = el("div", {
    class: "text",
    tabindex: "0",
    role: "group",
    "data-lane": lane.id,
    "data-index": String(index),
    "aria-label": `Text of ${lane.label}. Left and right arrow keys walk from token to token.`,
  });
  view.column = el(
    "article",
    { class: "column", "data-lane": lane.id, "data-method": lane.method },
    el("header", {}, el("h3", { title: lane.label }, lane.label), view.verdict),
    lane.untrainedHead ? el("p", { class: "caution", title: lane.note }, "⚠ answers from an untrained head: expect poor text") : null,
    view.text,
  );
  return view;
}

/**
 * The texts. Returns `prompt` and `columns` (elements), `rebuild(run)` for other lanes, `draw(run, marks, moving)`, `select({lane, i} or null)`,
 * `reveal(lane, i)` which scrolls a column to a token without moving the page, `focus(lane)` and `tokenAt(event)`.
 */
export function createTexts() {
  const promptLine = el("p", { class: "prompt-text", tabindex: "0" });
  const pieces = el("div", { class: "pieces", tabindex: "0" });
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

  function drawText(run, lane, view, marks, moving) {
    const { tokens } = lane;
    const behind = view.spans.length < tokens.length || view.complete < lane.count;
    const follow = behind && (moving || view.spans.length > 0) && view.text.scrollHeight - view.text.scrollTop - view.text.clientHeight < 40;
    while (view.spans.length > tokens.length) view.spans.pop()?.remove();
    view.complete = Math.min(view.complete, tokens.length);
    for (let i = tokens.length - 1; i >= view.complete; i -= 1) {
      if (!tokens[i] || view.spans[i]) continue;
      const span = spanOf(tokens[i]);
      if (marks?.has(i)) span.classList.add("marked");
      let next = i + 1;
      while (next < view.spans.length && !view.spans[next]) next += 1;
      view.text.insertBefore(span, view.spans[next] ?? view.rest);
      view.spans[i] = span;
    }
    view.complete = lane.count === tokens.length ? lane.count : 0;
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
      if (view.rest) view.text.append(view.rest);
    }
    if (follow) view.text.scrollTop = view.text.scrollHeight;
    const verdict = textVerdict(run, lane);
    setText(view.verdict, verdict);
    view.verdict.title = verdict;
    view.verdict.classList.toggle("differs", differs >= 0);
    view.text.setAttribute("aria-busy", String(!isFinal(run) && run.state !== "idle" && !lane.end));
  }

  function drawMarks(marks) {
    for (const [id, view] of views) {
      const wanted = marks?.get(id);
      if (marked.get(id) === wanted) continue;
      for (const [i, span] of view.spans.entries()) span?.classList.toggle("marked", Boolean(wanted?.has(i)));
      marked.set(id, wanted);
    }
  }

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

    draw(run, marks, moving) {
      drawPrompt(run);
      for (const lane of run.lanes.values()) drawText(run, lane, views.get(lane.id), marks?.get(lane.id), moving);
      drawMarks(marks);
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
