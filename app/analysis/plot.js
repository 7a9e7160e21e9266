// Plotly: fetched from this server when it is first needed, and given the colours of the page.

const PLOT_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const THEMES = {
  light: { ink: "#17212b", muted: "#5a6774", grid: "#e3e8ed", line: "#b9c3cd", panel: "#ffffff", accent: "#2171b5" },
  dark: { ink: "#e4ebf2", muted: "#97a5b3", grid: "#26313d", line: "#4a5766", panel: "#1c2530", accent: "#6baed6" },
};
const PLOT_CONFIG = {
  displaylogo: false,
  responsive: true,
  displayModeBar: true,
  showSendToCloud: false, // nothing leaves the machine
  plotlyServerURL: "",
  toImageButtonOptions: { format: "svg", filename: "river-chart" },
};

let plotly = null;
const drawnAs = new WeakMap(); // element -> what it shows: { figure, theme, width }

/** The library, as a promise; `path` is relative to the root of the page, so that it holds behind any prefix. */
export function loadPlotly(path) {
  plotly ??= new Promise((done, fail) => {
    const root = String(window.gradio_config?.root ?? document.baseURI).replace(/\/?$/, "/");
    const script = document.createElement("script");
    script.src = new URL(path, root).href;
    script.onload = () => done(window.Plotly);
    script.onerror = () => {
      plotly = null; // the next chart tries again
      fail(new Error("The drawing library did not arrive from the server."));
    };
    document.head.append(script);
  });
  return plotly;
}

/** A figure in the colours of a theme, "light" or "dark"; what has a colour of its own keeps it. */
export function themed(figure, theme) {
  const colours = THEMES[theme];
  const layout = structuredClone(figure.layout);
  layout.font = { ...layout.font, color: colours.ink, family: PLOT_FONT };
  for (const [name, axis] of Object.entries(layout)) {
    if (!/^[xy]axis\d*$/.test(name)) continue;
    Object.assign(axis, { gridcolor: colours.grid, linecolor: colours.line, tickcolor: colours.line, zerolinecolor: colours.line });
    axis.tickfont = { ...axis.tickfont, color: colours.muted };
    if (axis.title) axis.title.font = { ...axis.title.font, color: colours.muted, size: 12 };
  }
  for (const shape of layout.shapes ?? []) shape.line = { color: colours.ink, ...shape.line };
  layout.hoverlabel = {
    ...layout.hoverlabel,
    bgcolor: colours.panel,
    bordercolor: colours.line,
    font: { color: colours.ink, family: PLOT_FONT },
  };
  layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: colours.muted, activecolor: colours.accent };
  layout.uirevision = "kept"; // zoom and selection survive a change of theme or size
  layout.newselection = { line: { color: colours.accent, width: 1.5 } };
  layout.activeselection = { fillcolor: colours.accent, opacity: 0.15 };
  return { data: figure.data, layout };
}

/** The theme that the page is in. */
export function pageTheme() {
  return document.body.classList.contains("dark") ? "dark" : "light";
}

/** Draw a figure into `root`, unless it shows it already, in this theme and width; `brushed` adds the tools that select. */
export async function drawFigure(path, root, figure, brushed) {
  const library = await loadPlotly(path);
  const before = drawnAs.get(root);
  const now = { figure, theme: pageTheme(), width: root.clientWidth };
  if (before?.figure === figure && before.theme === now.theme && before.width === now.width) return;
  drawnAs.set(root, now);
  const { data, layout } = themed(figure, now.theme);
  const remove = ["autoScale2d", "zoomIn2d", "zoomOut2d", ...(brushed ? [] : ["select2d", "lasso2d"])];
  await library.react(root, data, layout, { ...PLOT_CONFIG, modeBarButtonsToRemove: remove });
  if (before && before.width !== now.width) await library.Plots.resize(root);
}

/** Take away what `root` shows: Plotly would keep its zoom and its selection for the next figure. */
export function clearFigure(root) {
  if (drawnAs.delete(root)) window.Plotly.purge(root);
}
