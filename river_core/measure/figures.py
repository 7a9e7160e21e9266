"""The figures that the paper draws, from runs made here: data as CSV, pictures as SVG.

Plotly draws, and only here: decoding never imports it. Pictures need a Chromium on this machine; without one each figure becomes a page that opens without a network.
"""

import math
import statistics
from pathlib import Path

import pandas as pd

from river_core.errors import RiverError
from river_core.generate import compare
from river_core.measure.fidelity import METHODS, fidelity
from river_core.trace import Trace

LEVELS = ("relaxed", "strict")
COLOURS = [
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#444444",
]  # Okabe and Ito: apart in the common colour-vision deficiencies


def figures(model, prompts, folder, *, taus=None, tokens=64, report=print) -> list[Path]:
    """Run the comparisons and write the figures.

    Args:
        model: from `load`. prompts: list of texts. folder: made if it does not exist.
        taus: River's threshold at the relaxed and at the strict level; None = the model's least and greatest preset.
        tokens: per prompt. report: called with a line about what is being done.

    Returns:
        the files written: five CSV files, five pictures (none if no answer was longer than a token), and run.json with the run card.

    Raises:
        RiverError: the folder cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RiverError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    taus = taus or (min(model.tau_presets.values()), max(model.tau_presets.values()))
    levels = {}
    for level, tau in zip(LEVELS, taus, strict=True):
        report(f"{level}: every strategy on the same text and the same exits, tau {tau:g}")
        levels[level] = fidelity(model, prompts, methods=METHODS, tau=tau, tokens=tokens, report=report)
    report("fixed depths")
    sweep = _sweep(model, prompts, tokens, report)
    tables = {
        "exit_depths": exit_depths(levels, taus),
        "time_per_token": time_per_token(levels, taus),
        "early_similarity": early_similarity(sweep),
        "kv_by_layer": kv_by_layer(levels),
        "theory_and_measured": theory_and_measured(sweep),
    }
    written = []
    for name, table in tables.items():
        path = folder / f"{name}.csv"
        table.to_csv(path, index=False)
        written.append(path)
    card = levels["relaxed"]["run_card"] | {"taus": list(taus)}
    path = folder / "run.json"
    path.write_text(pd.Series(card).to_json(indent=1, default_handler=str))
    report("drawing")
    return [*written, path, *draw(tables, folder, card, report)]


def _sweep(model, prompts, tokens, report) -> dict[int, list[Trace]]:
    """Traces on the same text by fixed exit depth, River and masking beside the backbone."""
    layers = model.config.num_hidden_layers
    # Three layers in is where this family of models starts to leave, so it stands for "early".
    depths = sorted({0, min(3, layers - 1), layers // 4, layers // 2, 3 * layers // 4, layers - 1})
    runs: dict[int, list[Trace]] = {}
    for depth in depths:
        report(f"depth {depth} of {layers}")
        methods = ["backbone", f"river@fixed:{depth}"] + ([f"masking@fixed:{depth}"] if depth else [])
        runs[depth] = [Trace.from_events(compare(model, prompt, methods, max_new_tokens=tokens, mode="same-text")) for prompt in prompts]
    return runs


def exit_depths(levels, taus) -> pd.DataFrame:
    """How many tokens left River's backbone at each depth, by level."""
    rows = []
    for (level, result), tau in zip(levels.items(), taus, strict=True):
        layers = result["run_card"]["model"]["n_layers"]
        depths = [token["exit_layer"] for trace in result["traces"] for token in trace.lanes["river"].steps]
        rows += [
            {"level": level, "tau": tau, "exit_layer": d, "tokens": depths.count(d), "share": depths.count(d) / max(len(depths), 1)}
            for d in range(1, layers + 1)
        ]
    return pd.DataFrame(rows)


def time_per_token(levels, taus) -> pd.DataFrame:
    """Milliseconds of engine time per token and agreement, by strategy and level."""
    rows = []
    for (level, result), tau in zip(levels.items(), taus, strict=True):
        for name, lane in result["lanes"].items():
            speed = lane["tokens_per_second"] or math.nan  # of answers of one token there is none
            row = {"level": level, "tau": tau, "method": name, "label": lane["label"], "ms_per_token": 1000 / speed}
            rows.append(
                row | {"mean_depth": lane["mean_depth"], "top1_agreement": lane.get("top1", 1.0), "v_cosine": lane.get("v_cos", 1.0)}
            )
    return pd.DataFrame(rows)


def early_similarity(sweep) -> pd.DataFrame:
    """Per token: its similarity at an early layer, and the cosine of its last layer's values, river against backbone, when it leaves there."""
    depth = min(depth for depth in sweep if depth > 0)
    rows = []
    for number, trace in enumerate(sweep[depth]):
        fact = trace.lanes["river"].fidelity
        for token in trace.lanes["backbone"].steps:
            place = token["position"] - fact["start"] if fact else 0
            if fact and place < len(fact["v_cos"]):
                rows.append(
                    {
                        "prompt": number,
                        "position": token["position"],
                        "layer": depth,
                        "similarity": token["similarity"][depth - 1],
                        "last_v_cosine": fact["v_cos"][place][-1],
                    }
                )
    table = pd.DataFrame(rows, columns=["prompt", "position", "layer", "similarity", "last_v_cosine"])
    table["pearson_r"] = table["similarity"].corr(table["last_v_cosine"])
    return table


def kv_by_layer(levels) -> pd.DataFrame:
    """Mean K and V cosine against the backbone by layer, strategy and level."""
    rows = []
    for level, result in levels.items():
        for name, lane in result["lanes"].items():
            for letter in "kv":
                for layer, cosine in enumerate(lane.get("by_layer", {}).get(f"{letter}_cos", []), 1):
                    rows.append(
                        {"level": level, "method": name, "label": lane["label"], "cache": letter.upper(), "layer": layer, "cosine": cosine}
                    )
    return pd.DataFrame(rows, columns=["level", "method", "label", "cache", "layer", "cosine"])


def theory_and_measured(sweep) -> pd.DataFrame:
    """Share of backbone layers skipped, the speed-up that would follow if skipped layers and all else were free, and the one measured."""
    rows = []
    for depth, traces in sweep.items():
        layers = traces[0].header["model"]["n_layers"]
        for method in ("river", "masking"):
            if method not in traces[0].lanes:
                continue
            ratios = [ratio for trace in traces if (ratio := trace.speed_up(method)) is not None] or [math.nan]
            skipped = 1 - depth / layers
            rows.append(
                {
                    "method": method,
                    "depth": depth,
                    "skipped": skipped,
                    "at_most": layers / depth if depth else None,
                    "measured": statistics.median(ratios),
                    "least": min(ratios),
                    "greatest": max(ratios),
                }
            )
    return pd.DataFrame(rows)


def draw(tables, folder: Path, card, report) -> list[Path]:
    """One picture a table: SVG where a Chromium can draw it, else an HTML page with Plotly inside."""
    import plotly.express as px
    import plotly.graph_objects as go
    import plotly.io

    note = f"{card['model']['name']}, {card['prompts']} prompts, {card['dtype']}, {card['device_name']}"
    if tables["early_similarity"].empty or tables["kv_by_layer"].empty:
        report("the answers were of one token each, so there is nothing to draw")
        return []
    similarity = tables["early_similarity"]
    theory = tables["theory_and_measured"]
    times = tables["time_per_token"].assign(agreement=lambda table: table["top1_agreement"].map("agrees {:.2f}".format))
    drawn = {
        "exit_depths": px.bar(
            tables["exit_depths"], x="exit_layer", y="share", color="level", barmode="group", color_discrete_sequence=COLOURS, title="Where tokens leave the backbone",
            labels={"exit_layer": "exit depth (layers)", "share": "share of tokens"},
        ),
        "time_per_token": px.bar(
            times, x="label", y="ms_per_token", color="level", barmode="group", color_discrete_sequence=COLOURS, title="Time per token, same text and same exits",
            labels={"label": "", "ms_per_token": "ms per token (engine time)"}, text="agreement",
        ),
        "early_similarity": px.scatter(
            similarity, x="similarity", y="last_v_cosine", title=f"Early similarity and last-layer values, r = {similarity['pearson_r'].iloc[0]:.3f} ({len(similarity)} tokens)",
            labels={"similarity": f"similarity after layer {similarity['layer'].iloc[0]}", "last_v_cosine": "V cosine in the last layer"}, opacity=0.5,
        ),
        "kv_by_layer": px.line(
            tables["kv_by_layer"], x="layer", y="cosine", color="label", color_discrete_sequence=COLOURS, facet_col="cache", facet_row="level", title="Keys and values against the backbone's, same exits",
            labels={"label": ""},
        ),
    }  # fmt: skip
    lines = go.Figure(
        layout={"title": "Theory and measured", "xaxis": {"title": "share of backbone layers skipped"}, "yaxis": {"title": "speed-up"}}
    )
    bound = theory[theory["method"] == "river"].dropna(subset="at_most")
    bound = bound[bound["at_most"] <= 12]
    lines.add_scatter(
        x=bound["skipped"], y=bound["at_most"], name="at most, were skipped layers free", mode="lines+markers", line={"dash": "dash"}
    )
    for method, rows in theory.groupby("method"):
        spread = {"type": "data", "array": rows["greatest"] - rows["measured"], "arrayminus": rows["measured"] - rows["least"]}
        lines.add_scatter(x=rows["skipped"], y=rows["measured"], name=f"{method}, measured", mode="lines+markers", error_y=spread)
    drawn["theory_and_measured"] = lines
    for figure in drawn.values():
        figure.update_layout(template="plotly_white", colorway=COLOURS, font={"family": "sans-serif"}, margin={"b": 110})
        figure.add_annotation(
            text=note, xref="paper", yref="paper", x=0, y=0, yshift=-85, showarrow=False, font={"size": 10, "color": "#666"}
        )
    paths = [folder / f"{name}.svg" for name in drawn]
    try:
        plotly.io.write_images(fig=list(drawn.values()), file=[str(path) for path in paths], width=960, height=600)
    except Exception as error:  # no browser, or one that does not start: kaleido raises many kinds
        report(f"SVG pictures need a Chromium ({type(error).__name__}); writing HTML pages instead")
        paths = [folder / f"{name}.html" for name in drawn]
        for figure, path in zip(drawn.values(), paths, strict=True):
            figure.write_html(path, include_plotlyjs=True)
    return paths
