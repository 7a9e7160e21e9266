// One drawing surface, twice: a canvas for the screen and for PNG, text for SVG. What is drawn does not know on which.
//
// A fill is a colour, or { pattern, ink, paper }: a tile of PATTERNS in ink on paper.

/** Tiles by size in pixels and path. They tell kinds apart without colour. */
export const PATTERNS = {
  hatch: { size: 6, path: "M0 6L6 0H3L0 3ZM6 6V3L3 6Z" },
  stripes: { size: 4, path: "M0 0H2V4H0Z" },
  dots: { size: 4, path: "M1 2a1 1 0 1 0 2 0a1 1 0 1 0-2 0Z" },
  crosses: { size: 8, path: "M1.5 2.2L2.2 1.5L6.5 5.8L5.8 6.5ZM5.8 1.5L6.5 2.2L2.2 6.5L1.5 5.8Z" },
};

const SURFACE_FONT = 'system-ui, -apple-system, "Segoe UI", sans-serif';

/**
 * A surface on a canvas. `begin(width, height, scale)` sizes and clears it; `scale` is device pixels per pixel.
 *
 * rects(fill, boxes): boxes is a flat list x, y, width, height, ...
 * cells(x, y, width, height, rows, levels, colours): columns of cells, `levels` by column and then by row from below; a level without a colour stays clear.
 * polygon(fill, points), text(x, y, runs, { size, align }) with runs = [[text, fill, bold], ...],
 * inside(box, dx, dy, draw): what `draw` draws is shifted and cut off at the box [x, y, width, height].
 */
export function canvasSurface(canvas) {
  const context = canvas.getContext("2d");
  const patterns = new Map();
  let scale = 1;
  const image = document.createElement("canvas");

  function style(fill) {
    if (typeof fill === "string") return fill;
    const key = `${fill.pattern}/${fill.ink}/${fill.paper}/${scale}`;
    if (!patterns.has(key)) patterns.set(key, tile(fill));
    return patterns.get(key);
  }

  function tile({ pattern, ink, paper }) {
    const { size, path } = PATTERNS[pattern];
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = Math.round(size * scale);
    const at = canvas.getContext("2d");
    at.fillStyle = paper;
    at.fillRect(0, 0, canvas.width, canvas.height);
    at.scale(canvas.width / size, canvas.height / size);
    at.fillStyle = ink;
    at.fill(new Path2D(path));
    const made = context.createPattern(canvas, "repeat");
    made.setTransform(new DOMMatrix().scale(size / canvas.width));
    return made;
  }

  return {
    begin(width, height, deviceScale) {
      scale = deviceScale;
      const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
      if (canvas.width !== w || canvas.height !== h) {
        canvas.width = w;
        canvas.height = h;
      }
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, width, height);
    },
    rects(fill, boxes) {
      context.fillStyle = style(fill);
      for (let at = 0; at < boxes.length; at += 4) context.fillRect(boxes[at], boxes[at + 1], boxes[at + 2], boxes[at + 3]);
    },
    cells(x, y, width, height, rows, levels, colours) {
      const columns = levels.length / rows;
      if (columns === 0) return;
      image.width = columns;
      image.height = rows;
      const at = image.getContext("2d");
      const data = at.createImageData(columns, rows);
      const pixels = new Uint32Array(data.data.buffer);
      const packed = colours.map((hex) => (0xff000000 | (parseInt(hex.slice(5, 7), 16) << 16) | (parseInt(hex.slice(3, 5), 16) << 8) | parseInt(hex.slice(1, 3), 16)) >>> 0);
      for (let column = 0; column < columns; column += 1) {
        for (let row = 0; row < rows; row += 1) {
          const level = levels[column * rows + row];
          if (level < packed.length) pixels[(rows - 1 - row) * columns + column] = packed[level];
        }
      }
      at.putImageData(data, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(image, x, y, columns * width, rows * height);
    },
    polygon(fill, points) {
      context.fillStyle = style(fill);
      context.beginPath();
      for (let at = 0; at < points.length; at += 2) context.lineTo(points[at], points[at + 1]);
      context.fill();
    },
    text(x, y, runs, { size = 11, align = "left" } = {}) {
      const font = (bold) => `${bold ? 650 : 400} ${size}px ${SURFACE_FONT}`;
      let left = x;
      context.textAlign = runs.length > 1 ? "left" : align;
      for (const [words, fill, bold] of runs) {
        context.font = font(bold);
        context.fillStyle = fill;
        context.fillText(words, left, y);
        left += context.measureText(words).width;
      }
    },
    inside([x, y, width, height], dx, dy, draw) {
      context.save();
      context.beginPath();
      context.rect(x, y, width, height);
      context.clip();
      context.translate(dx, dy);
      draw();
      context.restore();
    },
  };
}

// XML 1.0 has no place for most control characters, not even escaped; they are shown as the replacement character.
// Pairs of surrogates are found too, so that the single ones are the rest: looking behind is a syntax error in older browsers.
const FORBIDDEN = /[\ud800-\udbff][\udc00-\udfff]|[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff\ud800-\udfff]/g;

/** Text as it may stand between tags and in attributes of XML. */
export function xmlText(text) {
  return text
    .replace(FORBIDDEN, (found) => (found.length === 2 ? found : "\ufffd"))
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll('"', "&quot;");
}

const compact = (value) => String(Math.round(value * 100) / 100);

/** The same surface as SVG; `toString()` gives the document. */
export function svgSurface(width, height, title) {
  const parts = [];
  const patterns = new Map();
  let clips = 0;

  function paint(fill) {
    if (typeof fill === "string") return fill;
    const key = `${fill.pattern}-${fill.ink.slice(1)}-${fill.paper.slice(1)}`;
    patterns.set(key, fill);
    return `url(#${key})`;
  }

  function tiles() {
    return [...patterns].map(([key, { pattern, ink, paper }]) => {
      const { size, path } = PATTERNS[pattern];
      return (
        `<pattern id="${key}" width="${size}" height="${size}" patternUnits="userSpaceOnUse">` +
        `<rect width="${size}" height="${size}" fill="${paper}"/><path d="${path}" fill="${ink}"/></pattern>`
      );
    });
  }

  function path(fill, boxes) {
    let d = "";
    for (let at = 0; at < boxes.length; at += 4) {
      const w = compact(boxes[at + 2]);
      d += `M${compact(boxes[at])} ${compact(boxes[at + 1])}h${w}v${compact(boxes[at + 3])}h-${w}z`;
    }
    if (d) parts.push(`<path fill="${paint(fill)}" d="${d}"/>`);
  }

  return {
    rects: path,
    cells(x, y, w, h, rows, levels, colours) {
      // Cells of one colour that lie above one another are one rectangle.
      const boxes = colours.map(() => []);
      for (let column = 0; column * rows < levels.length; column += 1) {
        for (let row = 0, next; row < rows; row = next) {
          const level = levels[column * rows + row];
          for (next = row + 1; next < rows && levels[column * rows + next] === level; ) next += 1;
          if (level < colours.length) boxes[level].push(x + column * w, y + (rows - next) * h, w, (next - row) * h);
        }
      }
      boxes.forEach((list, level) => path(colours[level], list));
    },
    polygon(fill, points) {
      const list = points.map(compact).join(" ");
      parts.push(`<polygon fill="${paint(fill)}" points="${list}"/>`);
    },
    text(x, y, runs, { size = 11, align = "left" } = {}) {
      const anchor = { left: "", right: ' text-anchor="end"', center: ' text-anchor="middle"' }[align];
      const spans = runs.map(([words, fill, bold]) => `<tspan fill="${fill}"${bold ? ' font-weight="650"' : ""}>${xmlText(words)}</tspan>`);
      parts.push(`<text x="${compact(x)}" y="${compact(y)}" font-size="${size}"${anchor} xml:space="preserve">${spans.join("")}</text>`);
    },
    inside([x, y, w, h], dx, dy, draw) {
      clips += 1;
      parts.push(`<clipPath id="clip${clips}"><rect x="${compact(x)}" y="${compact(y)}" width="${compact(w)}" height="${compact(h)}"/></clipPath>`);
      parts.push(`<g clip-path="url(#clip${clips})"><g transform="translate(${compact(dx)} ${compact(dy)})">`);
      draw();
      parts.push("</g></g>");
    },
    toString() {
      return (
        `<svg xmlns="http://www.w3.org/2000/svg" width="${compact(width)}" height="${compact(height)}" viewBox="0 0 ${compact(width)} ${compact(height)}" ` +
        `font-family="${xmlText(SURFACE_FONT)}" shape-rendering="crispEdges"><title>${xmlText(title)}</title><defs>${tiles().join("")}</defs>${parts.join("")}</svg>`
      );
    },
  };
}
