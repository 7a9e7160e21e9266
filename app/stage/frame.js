// A frame as tall as its content, as a Space has on its host's page: it does not scroll, its outer page does, and what is fixed to the edge of the
// frame lies somewhere off the screen. Such a thing is put beside what the visitor has just done instead.

const BESIDE = 18; // px below the pointer
const MARGIN = 8; // px between what is placed and the frame's own edge

/** Whether the window is a frame that is taller than any screen it could be seen on. */
export function inTallFrame(win = window) {
  return win !== win.top && win.innerHeight > win.screen.height;
}

/**
 * Returns put(element, y), which brings an element that is `position: fixed` to where the visitor is looking: below the last press or, by keyboard, below what has
 * the focus; or to `y` pixels from the top. Outside of a tall frame it leaves the element where the style sheet has it.
 */
export function createPlacer(win = window) {
  let last = MARGIN;
  win.document.addEventListener("pointerdown", (event) => (last = event.clientY + BESIDE), { capture: true });
  win.document.addEventListener("keydown", (event) => {
    const box = event.target.getBoundingClientRect?.();
    if (box && box.height < win.screen.height) last = box.bottom + MARGIN;
  }, { capture: true });
  return {
    put(element, y = last) {
      const tall = inTallFrame(win);
      const most = win.innerHeight - element.offsetHeight - MARGIN;
      element.style.insetBlock = tall ? `${Math.round(Math.max(MARGIN, Math.min(y, most)))}px auto` : "";
      if (element.tagName === "DIALOG") element.style.marginBlock = tall ? "0" : "";
    },
  };
}
