// The keyboard: one meaning for each key, wherever the focus is, except where the key belongs to what has the focus.

import { el } from "./inspector.js";

const KEY_LIST = [
  ["Space", "play or pause"],
  ["← →", "a token back or forward; with Shift ten. The kept token goes along"],
  ["↓ ↑", "a layer back or forward"],
  ["Home End", "to the start or the end"],
  ["1 … 9", "go to a lane, from the top"],
  ["Enter", "keep the token at the playhead, or let it go"],
  ["Esc", "let the kept token go; without one, stop a live run"],
  ["?", "this list"],
];

// Elements that have a use of their own for the arrow keys, and for Space and Enter.
const TYPING = "input, textarea, select, [contenteditable]:not([contenteditable=false]), [role=textbox], [role=combobox], [role=listbox], [role=slider]";
const MOVING = "[role=tab], [role=radio], [role=menuitem], [role=option], [role=grid], [role=gridcell], [role=treeitem], audio, video, td, th";
const PRESSING = "button, a[href], summary, label, [role=button], [role=checkbox], [role=switch], " + MOVING;

/**
 * What a key asks of the stage, as [name, argument], or null. `target` is the element that has the focus; `slider` is the stage's own
 * time line, on which the arrow keys mean what they mean elsewhere.
 */
export function keyAction(event, target, slider = null) {
  if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return null;
  const inside = (selector) => Boolean(target?.closest?.(selector));
  const own = target !== null && target === slider;
  if ((!own && inside(TYPING)) || inside("dialog")) return null;
  const count = event.shiftKey ? 10 : 1;
  switch (event.key) {
    case "ArrowRight":
    case "ArrowLeft":
      return inside(MOVING) ? null : ["step", event.key === "ArrowRight" ? count : -count];
    case "ArrowUp":
    case "ArrowDown":
      return inside(MOVING) ? null : ["layer", event.key === "ArrowUp" ? 1 : -1];
    case "Home":
    case "End":
      return inside(MOVING) ? null : ["edge", event.key === "Home" ? "start" : "end"];
    case " ":
      return inside(PRESSING) ? null : ["toggle"];
    case "Enter":
      return inside(PRESSING) ? null : ["lock"];
    case "Escape":
      return ["unlock"];
    case "?":
      return ["help"];
    default:
      return /^[1-9]$/.test(event.key) ? ["lane", Number(event.key) - 1] : null;
  }
}

/** The dialog that lists the keys; `open()` shows it, and the focus returns to where it was. */
export function createHelp() {
  const close = el("button", { type: "button", class: "help-close", autofocus: "" }, "Close");
  const title = el("h2", { id: "stage-keys-title" }, "Keyboard");
  const caps = (keys) => keys.split(" ").map((key) => (key === "…" ? key : el("kbd", {}, key)));
  const list = el("dl", {}, ...KEY_LIST.flatMap(([keys, words]) => [el("dt", {}, ...caps(keys)), el("dd", {}, words)]));
  const element = el("dialog", { class: "help", "aria-labelledby": "stage-keys-title" }, title, list, el("p", {}, "Keys do nothing here while you type."), close);
  let before = null;
  close.addEventListener("click", () => element.close());
  element.addEventListener("click", (event) => {
    if (event.target === element) element.close(); // beside the list
  });
  element.addEventListener("close", () => before?.focus?.({ preventScroll: true }));
  return {
    element,
    open() {
      if (element.open) return;
      before = document.activeElement;
      element.showModal();
    },
  };
}
