// What the page answers to an action.

import { el } from "./inspector.js";

const NOTE_MS = 7000;

/** The line that answers an action: a sentence, perhaps with one thing to do about it. It floats; `put` brings it to where it can be seen. */
export function createNote(root, put) {
  const words = el("span");
  const way = el("button", { type: "button", class: "note-way" });
  const close = el("button", { type: "button", class: "note-close", "aria-label": "Close this message" }, "×");
  let timer = 0;
  let run = null;
  const hide = () => {
    root.hidden = true;
  };
  close.addEventListener("click", hide);
  way.addEventListener("click", () => {
    hide();
    run();
  });
  root.replaceChildren(words, way, close);
  root.setAttribute("role", "alert");
  return {
    show(text, { label = "", run: action = null, brief = false } = {}) {
      clearTimeout(timer);
      words.textContent = text;
      way.textContent = label;
      way.hidden = !label;
      run = action;
      root.hidden = false;
      put(root);
      if (brief) timer = setTimeout(hide, NOTE_MS);
    },
  };
}
