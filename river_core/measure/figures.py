"""The figures that the paper draws, from runs made here: data as CSV, pictures as SVG.

Plotly draws, and only here: decoding never imports it. Figures of several prompts carry 95 % intervals over them (see `stats`), and how many they are. Pictures need a Chromium on this machine; without one each figure becomes a page that opens without a network.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from river_core.errors import RiverError
from river_core.generate import compare
from river_core.measure.fidelity import METHODS, fidelity
from river_core.measure.speed import lane_alone, settle, turns
from river_core.measure.stats import correlation, in_words, interval_of
from river_core.trace import Trace

LEVELS = ("relaxed", "strict")
EARLY = 3  # three layers in is where this family of models starts to leave
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
    layers = model.config.num_hidden_layers
    early = min(EARLY, layers - 1)
    report(f"leaving at depth {early} of {layers}, on the same text")
    same_text = [
        Trace.from_events(compare(model, prompt, ["backbone", f"river@fixed:{early}"], max_new_tokens=tokens, mode="same-text"))
        for prompt in prompts
    ]
    tables = {
        "exit_depths": exit_depths(levels, taus),
        "time_per_token": time_per_token(levels, taus),
        "early_similarity": early_similarity(same_text, early),
        "kv_by_layer": kv_by_layer(levels),
        "theory_and_measured": theory_and_measured(fixed_depths(model, prompts, tokens, report), layers),
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


def fixed_depths(model, prompts, tokens, report) -> dict[tuple[str, int], list]:
    """(method, depth) -> its lanes, one a prompt: the backbone, and River and masking leaving at fixed depths; each alone and in turn (`speed.turns`)."""
    layers = model.config.num_hidden_layers
    depths = sorted({0, min(EARLY, layers - 1), layers // 4, layers // 2, 3 * layers // 4, layers - 1})
    names = {"backbone": ("backbone", layers)}
    names |= {
        f"{method}@fixed:{depth}": (method, depth) for depth in depths for method in ("river", "masking") if depth or method == "river"
    }
    settle(model)
    found: dict[tuple[str, int], list] = {key: [] for key in names.values()}
    for round_, name in turns(names, len(prompts)):
        if name == "backbone":
            report("fixed depths, warm-up" if not round_ else f"fixed depths, prompt {round_} of {len(prompts)}")
        _, lane = lane_alone(model, prompts[max(round_, 1) - 1], name, tokens if round_ else min(tokens, 8))
        if round_:
            found[names[name]].append(lane)
    return found


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
    """Milliseconds of engine time per token in step (see `fidelity`), and agreement with its interval over prompts, by strategy and level."""
    rows = []
    for (level, result), tau in zip(levels.items(), taus, strict=True):
        for name, lane in result["lanes"].items():
            speed, found = lane["tokens_per_second"], lane.get("intervals", {}).get("top1", {"value": 1.0, "low": None, "high": None})
            rows.append(
                {
                    "level": level, "tau": tau, "method": name, "label": lane["label"], "ms_per_token": 1000 / speed if speed else None, "mean_depth": lane["mean_depth"],
                    "top1_agreement": found["value"], "top1_low": found["low"], "top1_high": found["high"], "prompts": result["run_card"]["prompts"],
                    "v_cosine": lane.get("v_cos", 1.0),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def early_similarity(traces, depth: int) -> pd.DataFrame:
    """Per token: its similarity at an early layer, and the cosine of its last layer's values, river against backbone, when it leaves there. Pearson's r over all tokens,
    with its interval over prompts."""
    rows = []
    for number, trace in enumerate(traces):
        fact = trace.lanes["river"].fidelity
        for token in trace.lanes["backbone"].steps if fact else ():
            place = token["position"] - fact["start"]
            if place < len(fact["v_cos"]):
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
    r = correlation([own[["similarity", "last_v_cosine"]].to_numpy() for _, own in table.groupby("prompt")])
    return table.assign(pearson_r=r["value"], r_low=r["low"], r_high=r["high"], prompts=r["n"])


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


def theory_and_measured(lanes, layers: int) -> pd.DataFrame:
    """Share of backbone layers skipped, the speed-up that would follow if skipped layers were free, and the one measured: median over prompts, with its interval.

    What is skipped are layers only: the head and what else a step of the backbone does stay (Amdahl's law), with the shares that they were measured to have in the backbone's
    own steps. On a GPU, where a step's parts are not timed, there is no bound.
    """
    base, rows = lanes["backbone", layers], []
    share = layers_share(base)
    for (method, depth), own in lanes.items():
        if method == "backbone":
            continue
        ratios = [
            lane.tokens_per_second / b.tokens_per_second
            for lane, b in zip(own, base, strict=True)
            if lane.tokens_per_second and b.tokens_per_second
        ]
        found = interval_of(ratios, np.median)
        rows.append(
            {
                "method": method, "depth": depth, "skipped": 1 - depth / layers, "layers_share": share,
                "at_most": None if share is None else 1 / (1 - share + share * depth / layers),
                "measured": found["value"], "low": found["low"], "high": found["high"], "prompts": found["n"],
                "least": min(ratios, default=None), "greatest": max(ratios, default=None),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def layers_share(lanes) -> float | None:
    """Share of the decode time of some lanes that their backbone layers took; None where it was not measured, or no step was made."""
    steps = [step for lane in lanes for step in lane.steps]
    if not steps or not all("split" in step for step in steps):
        return None
    return sum(step["split"]["backbone_ns"] for step in steps) / sum(step["t_ns"] for step in steps)


def none(value: float | None) -> float | None:
    """A cell of a table, in which pandas writes NaN for None."""
    return None if value is None or pd.isna(value) else float(value)


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
    theory = tables["theory_and_measured"].dropna(subset="measured")
    times = tables["time_per_token"].assign(agreement=lambda table: table["top1_agreement"].map("agrees {:.2f}".format))
    r = similarity.iloc[0] if len(similarity) else None
    r = (
        "not defined"
        if r is None or pd.isna(r["pearson_r"])
        else in_words({"value": r["pearson_r"], "low": none(r["r_low"]), "high": none(r["r_high"])}, 2)
    )
    drawn = {
        "exit_depths": px.bar(
            tables["exit_depths"], x="exit_layer", y="share", color="level", barmode="group", color_discrete_sequence=COLOURS, title="Where tokens leave the backbone",
            labels={"exit_layer": "exit depth (layers)", "share": "share of tokens"},
        ),
        "time_per_token": px.bar(
            times, x="label", y="ms_per_token", color="level", barmode="group", color_discrete_sequence=COLOURS, title="Time per token with all lanes in step, same text and same exits",
            labels={"label": "", "ms_per_token": "ms per token (engine time, in step: bench is faster)"}, text="agreement",
        ),
        "early_similarity": px.scatter(
            similarity, x="similarity", y="last_v_cosine", title=f"Early similarity and last-layer values, r = {r} ({len(similarity)} tokens of {similarity['prompt'].nunique()} prompts)",
            labels={"similarity": f"similarity after layer {similarity['layer'].iloc[0] if len(similarity) else EARLY}", "last_v_cosine": "V cosine in the last layer"}, opacity=0.5,
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
    lines.add_scatter(
        x=bound["skipped"],
        y=bound["at_most"],
        name="at most, were skipped layers free<br>(head and the rest counted)",
        mode="lines+markers",
        line={"dash": "dash"},
    )
    for method, rows in theory.groupby("method"):
        spread = {"type": "data", "array": rows["greatest"] - rows["measured"], "arrayminus": rows["measured"] - rows["least"]}
        lines.add_scatter(
            x=rows["skipped"],
            y=rows["measured"],
            name=f"{method}, measured<br>(median, least, greatest)",
            mode="lines+markers",
            error_y=spread,
        )
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
