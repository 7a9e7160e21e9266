// The keyboard: one meaning for each key, except where the key belongs to what has the focus. Keys that print something act only in the stage
// or where nothing has the focus, and all of them can be switched off.

import { el } from "./inspector.js";
import { createMemo } from "./place.js";

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
const KEYS_OFF = "river-explorer-keys-off";

// Elements that have a use of their own for the arrow keys, and for Space and Enter.
const TYPING = "input, textarea, select, [contenteditable]:not([contenteditable=false]), [role=textbox], [role=combobox], [role=listbox], [role=slider]";
const MOVING = "[role=tab], [role=radio], [role=menuitem], [role=option], [role=grid], [role=gridcell], [role=treeitem], audio, video, td, th";
// Boxes that have the focus in order to be scrolled; in a lane's text the arrows to the sides, Home and End walk from token to token.
const SCROLLED = ".inspector, .table-scroll, .memory-scroll, .prompt-text, .pieces, .an-tokens, .an-scroll";
const UP_AND_DOWN = `.text, ${SCROLLED}`;
const PRESSING = "button, a[href], summary, label, [role=button], [role=checkbox], [role=switch], " + MOVING;

/**
 * What a key asks of the stage, as [name, argument], or null. `target` is the element that has the focus; `slider` is the stage's own
 * time line, on which the arrow keys mean what they mean elsewhere.
 */
export function keyAction(event, target, slider = null) {
  if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return null;
  const inside = (selector) => Boolean(target?.closest?.(selector));
  const own = target !== null && target === slider;
  if ((!own && inside(TYPING)) || inside("dialog") || event.target?.ownerDocument?.querySelector("dialog[open]")) return null;
  const moving = inside(`${MOVING}, ${SCROLLED}`);
  const count = event.shiftKey ? 10 : 1;
  switch (event.key) {
    case "ArrowRight":
    case "ArrowLeft":
      return moving ? null : ["step", event.key === "ArrowRight" ? count : -count];
    case "ArrowUp":
    case "ArrowDown":
      return moving || inside(UP_AND_DOWN) ? null : ["layer", event.key === "ArrowUp" ? 1 : -1];
    case "Home":
    case "End":
      return moving ? null : ["edge", event.key === "Home" ? "start" : "end"];
    case " ":
      return inside(PRESSING) || inside(SCROLLED) ? null : ["toggle"];
    case "Enter":
      return inside(PRESSING) ? null : ["lock"];
    case "Escape":
      return ["unlock"];
    default:
      return elsewhere(target) ? null : printed(event.key);
  }
}

/** What a key asks for that prints something. */
function printed(key) {
  if (key === "?") return ["help"];
  return /^[1-9]$/.test(key) ? ["lane", Number(key) - 1] : null;
}

/** Whether something outside the stage has the focus. */
function elsewhere(target) {
  return Boolean(target?.closest) && !["HTML", "BODY"].includes(target.tagName) && target.closest(".stage") === null;
}

/** The dialog that lists the keys and switches them off: `open()` shows it, and the focus returns to where it was; `on` is whether keys act. */
export function createHelp({ place = () => {}, memo = createMemo(() => localStorage) } = {}) {
  const close = el("button", { type: "button", class: "help-close" }, "Close");
  const box = el("input", { type: "checkbox" });
  const title = el("h2", { id: "stage-keys-title" }, "Keyboard");
  const caps = (keys) => keys.split(" ").map((key) => (key === "…" ? key : el("kbd", {}, key)));
  const list = el("dl", {}, ...KEY_LIST.flatMap(([keys, words]) => [el("dt", {}, ...caps(keys)), el("dd", {}, words)]));
  const element = el("dialog", { class: "help", autofocus: "", tabindex: "-1", "aria-labelledby": "stage-keys-title" }, title, list, el("p", {}, "Keys do nothing here while you type."), el("label", { class: "help-switch" }, box, " Keys control the film and the texts"), close);
  let before = null;
  box.checked = memo.get(KEYS_OFF) === null;
  box.addEventListener("change", () => (box.checked ? memo.drop(KEYS_OFF) : memo.set(KEYS_OFF, "1")));
  close.addEventListener("click", () => element.close());
  element.addEventListener("click", (event) => {
    if (event.target === element) element.close(); // beside the list
  });
  element.addEventListener("close", () => before?.focus?.({ preventScroll: true }));
  return {
    element,
    get on() {
      return box.checked;
    },
    open() {
      if (element.open) return;
      before = document.activeElement;
      place(element); // before it is opened: what has the focus is scrolled to
      element.showModal();
    },
  };
}
