// The depth ramp: from exit depth to colour. More ink, or more light on a dark page, means more layers were run.

const LIGHT = ["#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b"];
const DARK = ["#0e1f33", "#08306b", "#08519c", "#2171b5", "#4292c6", "#6baed6", "#9ecae1", "#c6dbef"];

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Relative luminance (WCAG 2) of an [r, g, b] colour with channels 0..255. */
export function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => {
    const c = value / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** [r, g, b] for a share 0..1 of the layers, in the "light" or "dark" theme. */
export function depthColour(share, theme) {
  const stops = theme === "dark" ? DARK : LIGHT;
  const x = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const low = Math.min(Math.floor(x), stops.length - 2);
  const a = channels(stops[low]);
  const b = channels(stops[low + 1]);
  return a.map((value, at) => Math.round(value + (b[at] - value) * (x - low)));
}

/** Black or white, whichever stands out more on the colour; the worst case is 4.58 : 1. */
export function textColour(rgb) {
  return luminance(rgb) > 0.179 ? "#000" : "#fff";
}

export function css(rgb) {
  return `rgb(${rgb.join(" ")})`;
}

/** Style rules for the classes d0 .. dL (L = layers) under `.stage`, for both themes. */
export function depthRules(layers) {
  const rules = [];
  for (const [scope, theme] of [[".stage", "light"], [".dark .stage", "dark"]]) {
    for (let depth = 0; depth <= layers; depth += 1) {
      const colour = depthColour(depth / layers, theme);
      const share = (depth / layers).toFixed(3);
      rules.push(`${scope} .d${depth}{--fill:${css(colour)};--on-fill:${textColour(colour)};--share:${share}}`);
    }
  }
  return rules.join("\n");
}
