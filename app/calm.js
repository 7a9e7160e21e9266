// Gradio counts the seconds of whatever is loading, a change of state in every frame, and those of the page's own loading it goes on counting
// when that is long over: a browser would draw sixty frames a second for ever, and on a laptop the engine pays for them. Nothing here shows
// such seconds, so they tick once in a second. What is not recognised is passed on as it is.
(() => {
  const request = window.requestAnimationFrame.bind(window);
  const counts = (tick) => /^\(\)=>\{[\w$]+\([\w$]+,\(performance\.now\(\)-/.test(Function.prototype.toString.call(tick));
  window.requestAnimationFrame = (tick) => (counts(tick) ? (setTimeout(request, 1000, tick), 0) : request(tick));
})();
