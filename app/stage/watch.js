// The Watch tab: the recordings in teaching order, what the model is doing meanwhile, and the ways on from here.

import { el } from "./inspector.js";

const MODEL_WORDS = {
  loading: "The model for runs of your own is still loading.",
  ready: "The model is ready for runs of your own.",
  failed: "Runs of your own are off, because the model could not be loaded.",
  lost: "There is no connection to the server.",
};

/**
 * Draw the tab into `root`.
 *
 * `on` has pick(slug) and, where there is a server for it, own(), last() and file(file). Returns `element`, `list(recordings)`, `current(id)` with the id of the open
 * trace or null, `model(state)` and `lastRun(known)`.
 */
export function createWatch(root, on) {
  const cards = new Map();
  let order = [];
  let open = null;
  const list = el("ol", { class: "recordings", "aria-label": "Recordings" });
  const idea = el("p", { class: "watch-idea" });
  const model = el("span", { class: "watch-model" });
  const next = watchButton("next", "", () => on.pick(following()));
  const last = watchButton("last-run", "Your last run", on.last);
  const picker = el("input", { type: "file", accept: ".json,.gz", hidden: "", tabindex: "-1", "aria-label": "Trace file" });
  const file = watchButton("open-trace", "Open trace", () => picker.click());
  file.title = "A trace as a .json or .json.gz file; it can also be dropped anywhere on the page";
  last.hidden = true;
  next.hidden = true;
  picker.addEventListener("change", () => {
    if (picker.files[0]) on.file(picker.files[0]);
    picker.value = "";
  });
  root.replaceChildren(
    list,
    idea,
    el(
      "div",
      { class: "watch-foot" },
      el("p", {}, "These are recordings of real runs and need no model. ", model),
      el("div", { class: "watch-ways" }, ...(on.file ? [last, file, picker, watchButton("own", "Try your own", on.own)] : []), next),
    ),
  );

  function following() {
    return order[(order.indexOf(open) + 1) % order.length];
  }

  function mark() {
    for (const [slug, card] of cards) {
      if (slug === open) card.setAttribute("aria-current", "true");
      else card.removeAttribute("aria-current");
    }
    idea.textContent = cards.get(open)?.title ?? "";
    next.hidden = order.length === 0;
    if (next.hidden) return;
    next.textContent = `Next: ${cards.get(following()).dataset.title} ›`;
    next.title = cards.get(following()).title;
  }

  return {
    element: root,
    list(recordings) {
      order = recordings.map((recording) => recording.slug);
      cards.clear();
      list.replaceChildren(
        ...recordings.map((recording, at) => {
          const card = el(
            "button",
            { type: "button", class: "recording", "data-slug": recording.slug, "data-title": recording.title },
            el("i", {}, `${at + 1}`),
            recording.title,
          );
          card.title = recording.idea;
          card.addEventListener("click", () => on.pick(recording.slug));
          cards.set(recording.slug, card);
          return el("li", {}, card);
        }),
      );
      if (recordings.length === 0) list.append(el("li", { class: "none" }, "No recordings are bundled with this copy."));
      mark();
    },
    current(id) {
      open = id?.startsWith("recording:") ? id.slice("recording:".length) : null;
      mark();
      const card = cards.get(open);
      // Only sideways, inside the strip: the page itself must not move.
      if (card) list.scrollLeft = Math.max(0, card.offsetLeft - list.offsetLeft - 24);
    },
    model(state) {
      const words = MODEL_WORDS[state] ?? "";
      if (model.textContent !== words) model.textContent = words;
    },
    lastRun(known) {
      last.hidden = !known;
    },
  };
}

function watchButton(name, label, run) {
  const button = el("button", { type: "button", class: "watch-button", "data-way": name }, label);
  button.addEventListener("click", () => run());
  return button;
}
