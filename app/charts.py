"""Charts and tables of a trace, as Plotly figures and data frames: pure functions, without a page and without a model.

A figure carries its data, axes and ticks, but no colours of a theme: the page puts those in, so that one figure serves light and dark. Traces that are made of
tokens carry their lane in `meta` and, for every mark, the token indices behind it in `customdata`: what is brushed can be found again in the stage.
"""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.table import table_columns, token_rows

if TYPE_CHECKING:
    from river_core.trace import LaneTrace, Trace

COLOURS = {
    "backbone": "#77808b",
    "int4": "#8d6cc0",
    "river": "#1b7fc4",
    "verified": "#2f9e8f",
    "recompute": "#c2578f",
    "replay": "#b04a80",
    "propagation": "#b07d10",
    "masking": "#d1601f",
    "monotone": "#5f8f2f",
    "skipdecode": "#8a6d3b",
    "sequence": "#c0504d",
}
"""By method. Each stands out by 3 : 1 on the light panel and on the dark one; a lane is told apart by its symbol and its name as well."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "hexagon", "x")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
UNKNOWN = "#77808b"


def figures(trace: Trace, columns: int = 3) -> list[dict[str, Any]]:
    """Everything that one finished trace can show.

    Args:
        trace: any trace, also an older one; a chart whose data it lacks is left out.
        columns: small multiples side by side.

    Returns:
        list of {name, title, tag ("measured" or "computed from shapes"), note, figure (Plotly JSON as text)}.
    """
    made = [
        _entry(
            "exit-depths",
            "Where tokens leave the backbone",
            "measured",
            "Tokens per exit depth, one panel a lane; the dashed line is the mean. The token that comes from the prompt is left out. Drag over bars to mark their tokens below.",
            exit_depths(trace, columns),
        ),
        _entry(
            "latency",
            "Time of every token",
            "measured",
            "Engine time of each decode step, by token; at the right the same times as boxes, lanes in the order of the legend. The first token comes from the prompt and is left out. "
            "Drag to mark tokens, click one to go there.",
            latency(trace),
        ),
        _entry(
            "similarity",
            "Similarity by layer",
            "measured",
            "Cosine between what goes into a layer and what comes out. Line: median of all tokens; band: 10 to 90 %; dashed: the threshold tau; "
            "circles: tokens that left at that layer, with their mean similarity there.",
            similarity(trace, columns),
        ),
        _entry("memory", "Memory against context length", "computed from shapes", _memory_note(trace), memory(trace)),
    ]
    return [entry for entry in made if entry["figure"] is not None]


def _entry(name: str, title: str, tag: str, note: str, figure: go.Figure | None) -> dict[str, Any]:
    return {"name": name, "title": title, "tag": tag, "note": note, "figure": None if figure is None else figure.to_json()}


# What every figure shares


def plain(text: Any) -> str:
    """A text from a trace for a label: Plotly reads a little HTML, so that what looks like it is escaped."""
    return html.escape(str(text), quote=False)


def style_of(header: dict[str, Any], lane_id: str) -> dict[str, str]:
    """Colour by method, symbol and dash by how many lanes of that method came before; and the lane's label."""
    lanes = header["lanes"]
    lane = next(entry for entry in lanes if entry["id"] == lane_id)
    same = [entry["id"] for entry in lanes if entry["method"] == lane["method"]]
    at = same.index(lane_id)
    order = [entry["id"] for entry in lanes].index(lane_id)
    return {
        "colour": COLOURS.get(lane["method"], UNKNOWN),
        "symbol": SYMBOLS[(order if len(same) == 1 else at) % len(SYMBOLS)],
        "dash": DASHES[at % len(DASHES)],
        "label": plain(lane["label"]),
    }


def _shape(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    """The layout that all figures share: transparent, no template, room for ticks, dragging selects."""
    figure.update_layout(
        template=go.layout.Template(),
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 56, "r": 14, "t": 30, "b": 46},
        font={"size": 12},
        hoverlabel={"align": "left"},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "y": 0.005, "yanchor": "bottom", "font": {"size": 12}},
        **layout,
    )
    axis = {"automargin": True, "showgrid": True, "zeroline": False, "ticks": "outside", "ticklen": 4, "title": {"standoff": 8}}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure


def _panels(lanes: list[LaneTrace], columns: int, titles: list[str], gap: int) -> tuple[go.Figure, list[tuple[int, int]], int]:
    """Small multiples with one panel a lane: the figure, each lane's (row, column), the number of rows. `gap`: pixels between rows."""
    columns = max(1, min(columns, len(lanes)))
    rows = -(-len(lanes) // columns)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        shared_xaxes=False,
        shared_yaxes="all",
        subplot_titles=titles,
        horizontal_spacing=0.03,
        vertical_spacing=gap / (200 * rows) if rows > 1 else 0,
    )
    figure.update_annotations(font={"size": 12.5}, yshift=4)
    figure.update_yaxes(showticklabels=True, col=1)
    return figure, [(at // columns + 1, at % columns + 1) for at in range(len(lanes))], rows


def _with_steps(trace: Trace) -> list[LaneTrace]:
    return [lane for lane in trace.lanes.values() if lane.steps]


# The charts of one trace


def exit_depths(trace: Trace, columns: int = 3) -> go.Figure | None:
    """Histogram of exit depths, one panel a lane, with the mean and the share of tokens at full depth in its title."""
    lanes = _with_steps(trace)
    if not lanes:
        return None
    layers = trace.header["model"]["n_layers"]
    titles = []
    for lane in lanes:
        full = sum(token["exit_layer"] == layers for token in lane.steps) / len(lane.steps)
        label = style_of(trace.header, lane.id)["label"]
        titles.append(f"<b>{label}</b><br>mean {lane.mean_depth:.1f} of {layers} layers · {full:.0%} at full depth")
    figure, places, rows = _panels(lanes, columns, titles, 92)
    for lane, (row, column) in zip(lanes, places, strict=True):
        tokens: list[list[int]] = [[] for _ in range(layers + 1)]
        for token in lane.steps:
            tokens[token["exit_layer"]].append(token["i"])
        style = style_of(trace.header, lane.id)
        figure.add_bar(
            x=list(range(layers + 1)),
            y=[len(indices) for indices in tokens],
            customdata=tokens,
            meta={"lane": lane.id},
            name=style["label"],
            marker={"color": style["colour"], "line": {"width": 0}},
            hovertemplate="depth %{x}: %{y} tokens<extra></extra>",
            row=row,
            col=column,
        )
        figure.add_vline(x=lane.mean_depth, line={"dash": "dash", "width": 1.5}, row=row, col=column)
    figure.update_xaxes(range=[-0.7, layers + 0.7], dtick=_step(layers), tick0=0)
    for row, column in places[-min(columns, len(places)) :]:
        figure.update_xaxes(title_text="exit depth (layers)", row=row, col=column)
    for row in range(1, rows + 1):
        figure.update_yaxes(title_text="tokens", row=row, col=1)
    figure.update_yaxes(rangemode="tozero")
    _shape(figure, 90 + 200 * rows, showlegend=False, bargap=0.15, dragmode="select", selectdirection="h")
    figure.update_layout(margin={"t": 74, "b": 50})
    return figure


def _step(layers: int) -> int:
    """A tick distance that leaves about six of them."""
    return next((step for step in (1, 2, 5, 10, 20, 50, 100, 200) if layers / step <= 7), 500)


def latency(trace: Trace) -> go.Figure | None:
    """Milliseconds of every decode step: points over the token, counted from 1, and one box a lane."""
    lanes = _with_steps(trace)
    if not lanes:
        return None
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, column_widths=[0.78, 0.22], horizontal_spacing=0.02)
    for lane in lanes:
        style = style_of(trace.header, lane.id)
        steps = lane.steps
        times = np.array([token["t_ns"] / 1e6 for token in steps], dtype=np.float32)
        figure.add_scatter(
            x=np.array([token["i"] + 1 for token in steps], dtype=np.int32),
            y=times,
            mode="markers",
            name=style["label"],
            legendgroup=lane.id,
            meta={"lane": lane.id},
            customdata=[[token["i"]] for token in steps],
            text=[f"{plain(json.dumps(token['text'], ensure_ascii=False))}, depth {token['exit_layer']}" for token in steps],
            hovertemplate="token %{x}: %{text}<br>%{y:.2f} ms<extra>%{fullData.name}</extra>",
            marker={"color": style["colour"], "symbol": style["symbol"], "size": 6},
            row=1,
            col=1,
        )
        figure.add_box(
            y=times,
            name=style["label"],
            legendgroup=lane.id,
            showlegend=False,
            marker={"color": style["colour"], "size": 3},
            line={"width": 1.5},
            boxpoints=False,
            hoverinfo="y",
            row=1,
            col=2,
        )
    figure.update_xaxes(title_text="token", row=1, col=1)
    figure.update_xaxes(showticklabels=False, ticks="", row=1, col=2)
    figure.update_yaxes(title_text="milliseconds", row=1, col=1)
    # One slow step (a garbage collection, another program) would flatten all others: it stays reachable by zooming out.
    times = np.concatenate([[token["t_ns"] / 1e6 for token in lane.steps] for lane in lanes])
    figure.update_yaxes(range=[0, float(max(np.percentile(times, 99) * 1.25, np.percentile(times, 50) * 2))])
    return _shape(figure, 340, dragmode="select")


SIMILARITY_TICKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)


def similarity(trace: Trace, columns: int = 3) -> go.Figure | None:
    """Similarity over the layers, one panel a lane: median, 10 to 90 % band, tau, and the layers at which tokens left.

    The axis is logarithmic towards 1: thresholds lie between 0.9 and 0.99, where a linear one would show nothing.
    """
    lanes = [lane for lane in _with_steps(trace) if any(value is not None for token in lane.steps for value in token["similarity"])]
    if not lanes:
        return None
    layers = trace.header["model"]["n_layers"]
    titles = []
    for lane in lanes:
        tau, label = _tau(trace, lane), style_of(trace.header, lane.id)["label"]
        titles.append(f"<b>{label}</b>" + (f" · tau {tau:g}" if tau is not None and "tau" not in label else ""))
    figure, places, rows = _panels(lanes, columns, titles, 66)
    least = 0.5
    for lane, (row, column) in zip(lanes, places, strict=True):
        style = style_of(trace.header, lane.id)
        values = np.array([[np.nan if v is None else v for v in token["similarity"]] for token in lane.steps], dtype=np.float64)
        ran = ~np.isnan(values).all(axis=0)
        depth = np.arange(1, layers + 1)[ran]
        low, middle, high = np.nanpercentile(values[:, ran], [10, 50, 90], axis=0)
        least = min(least, float(low.min()))
        near = {"row": row, "col": column}
        figure.add_scatter(x=depth, y=_far(low), mode="lines", line={"width": 0}, hoverinfo="skip", **near)
        figure.add_scatter(
            x=depth,
            y=_far(high),
            mode="lines",
            line={"width": 0},
            fill="tonexty",
            fillcolor=_pale(style["colour"]),
            hoverinfo="skip",
            **near,
        )
        figure.add_scatter(
            x=depth,
            y=_far(middle),
            mode="lines",
            line={"color": style["colour"], "width": 2},
            customdata=np.stack([low, middle, high], axis=-1).round(4),
            hovertemplate="layer %{x}: median %{customdata[1]}, 10 to 90 %: %{customdata[0]} to %{customdata[2]}<extra></extra>",
            **near,
        )
        exits = _exits(lane, layers)
        if exits:
            most = max(count for _, count, _ in exits)
            figure.add_scatter(
                x=[layer for layer, _, _ in exits],
                y=_far(np.array([mean for _, _, mean in exits])),
                mode="markers",
                marker={
                    "color": style["colour"],
                    "symbol": "circle-open",
                    "size": [5 + 11 * (count / most) ** 0.5 for _, count, _ in exits],
                    "line": {"width": 1.75},
                },
                customdata=[[count, round(mean, 4)] for _, count, mean in exits],
                hovertemplate="%{customdata[0]} tokens left at layer %{x}, similarity %{customdata[1]} in the mean<extra></extra>",
                **near,
            )
        tau = _tau(trace, lane)
        if tau is not None and tau < 1:
            figure.add_hline(y=float(_far(np.array([tau]))[0]), line={"dash": "dash", "width": 1.25}, **near)
    figure.update_xaxes(range=[0.3, layers + 0.7], dtick=_step(layers), tick0=0)
    ticks = [tick for tick in SIMILARITY_TICKS if tick >= min(0.5, np.floor(least * 10) / 10)]
    figure.update_yaxes(
        type="log",
        autorange="reversed",
        tickvals=[1 - tick for tick in ticks],
        ticktext=[f"{tick:g}" for tick in ticks],
    )
    for row, column in places[-min(columns, len(places)) :]:
        figure.update_xaxes(title_text="layer", row=row, col=column)
    for row in range(1, rows + 1):
        figure.update_yaxes(title_text="similarity", row=row, col=1)
    _shape(figure, 90 + 200 * rows, showlegend=False)
    figure.update_layout(margin={"t": 58})
    return figure


def _tau(trace: Trace, lane: LaneTrace) -> float | None:
    """The lane's threshold on similarity; None if its rule has none."""
    tau = next(entry["rule"].get("tau") for entry in trace.header["lanes"] if entry["id"] == lane.id)
    return tau if isinstance(tau, (int, float)) else None


def _far(values: np.ndarray) -> np.ndarray:
    """1 - cosine, for a logarithmic axis."""
    return np.maximum(1 - values, 1e-5).astype(np.float32)


def _exits(lane: LaneTrace, layers: int) -> list[tuple[int, int, float]]:
    """(layer, tokens that left there, their mean similarity there), for tokens that left behind a layer and before the last."""
    found: dict[int, list[float]] = {}
    for token in lane.steps:
        depth = token["exit_layer"]
        if 0 < depth < layers and token["similarity"][depth - 1] is not None:
            found.setdefault(depth, []).append(token["similarity"][depth - 1])
    return [(depth, len(values), float(np.mean(values))) for depth, values in sorted(found.items())]


def _pale(colour: str, alpha: float = 0.22) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def memory(trace: Trace) -> go.Figure | None:
    """Bytes of weights, river and KV cache against the context length, stacked, and where this run stood; None for a trace that lacks the sizes."""
    header, model = trace.header, trace.header["model"]
    sizes, context = header.get("bytes"), model.get("context_length")
    if not (isinstance(sizes, dict) and _size(context) and all(_size(sizes.get(key)) for key in ("backbone", "river", "head", "kv_slot"))):
        return None
    per_token = sizes["kv_slot"] * model["n_layers"]
    length = np.linspace(0, context, 33, dtype=np.float32)
    figure = go.Figure()
    parts = [
        ("backbone and head", "#1d4e89", np.full_like(length, sizes["backbone"] + sizes["head"])),
        ("river, the 4-bit twins", "#2aa5c9", np.full_like(length, sizes["river"])),
        ("KV cache of one lane, every layer", "#b07d10", per_token * length),
    ]
    for name, colour, values in parts:
        figure.add_scatter(
            x=length,
            y=(values / 1e6).astype(np.float32),
            name=name,
            mode="lines",
            stackgroup="bytes",
            line={"width": 1, "color": colour},
            fillcolor=_pale(colour, 0.5),
            hovertemplate="%{y:.1f} MB<extra>%{fullData.name}</extra>",
        )
    fixed = sizes["backbone"] + sizes["head"] + sizes["river"]
    for lane in trace.lanes.values():
        share = _filled(lane, model["n_layers"])
        if share is not None and share < 0.995:
            style = style_of(header, lane.id)
            figure.add_scatter(
                x=length,
                y=((fixed + share * per_token * length) / 1e6).astype(np.float32),
                name=f"written by {style['label']}: {share:.0%} of the slots",
                mode="lines",
                line={"width": 2, "dash": "dot", "color": style["colour"]},
                hovertemplate="%{y:.1f} MB<extra>%{fullData.name}</extra>",
            )
    held = [lane.end["kv_bytes"] for lane in trace.lanes.values() if lane.end and _size(lane.end.get("kv_bytes"))]
    if held:
        used = len(header["prompt_ids"]) + header["max_new_tokens"]
        figure.add_scatter(
            x=[used],
            y=[(fixed + max(held)) / 1e6],
            name=f"this run: {max(held) / 1e6:.1f} MB of KV a lane, measured",
            mode="markers",
            marker={"symbol": "diamond", "size": 12, "color": "#ffffff", "line": {"width": 2.5, "color": "#d1601f"}},
            hovertemplate=f"{used} positions, {max(held) / 1e6:.2f} MB of KV<extra>this run, measured</extra>",
        )
    figure.update_xaxes(title_text="context length (tokens)", rangemode="tozero")
    figure.update_yaxes(title_text="megabytes", rangemode="tozero")
    _shape(figure, 360, hovermode="x unified")
    figure.update_layout(legend_traceorder="normal")
    return figure


def _size(value: Any) -> bool:
    """Whether this is a number of bytes or tokens: an opened file may hold anything in the fields that older traces lack."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e18


def _filled(lane: LaneTrace, layers: int) -> float | None:
    """Share of the answer's cache slots that hold something at the end; None without tokens."""
    if not lane.steps:
        return None
    # Ranges of layers by position, each list gone through once: none is taken apart into its slots.
    holes: dict[int, list[tuple[int, int]]] = {}
    filled: dict[int, list[tuple[int, int]]] = {}
    for token in lane.steps:
        holes.setdefault(token["position"], []).extend((first, last) for first, last, owner, _ in token["kv"] if owner == "none")
        for position, first, last, _ in token.get("filled", []):
            filled.setdefault(position, []).append((first, last))
    left = sum(_uncovered(_joined(ranges), _joined(filled.get(position, []))) for position, ranges in holes.items())
    return 1 - left / (layers * len(lane.steps))


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same layers, in order and each in one range only."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def _uncovered(ranges: list[tuple[int, int]], by: list[tuple[int, int]]) -> int:
    """How many layers of `ranges` are in none of `by`; both are joined."""
    left = sum(last - first for first, last in ranges)
    at = 0
    for first, last in ranges:
        while at < len(by) and by[at][1] <= first:
            at += 1
        over = at
        while over < len(by) and by[over][0] < last:
            left -= min(last, by[over][1]) - max(first, by[over][0])
            over += 1
    return left


def _memory_note(trace: Trace) -> str:
    note = "Weights as they lie in memory, and keys and values of one lane up to the model's context. Every lane has a cache of this size; slots that a lane leaves empty are allocated all the same."
    peak = (trace.done or {}).get("memory")
    if not isinstance(peak, dict) or not _size(peak.get("peak_bytes")):
        return note
    place = "on the GPU" if peak.get("of") == "device" else "of the whole process, libraries included"
    return f"{note} Measured peak {place}: {peak['peak_bytes'] / 1e6:,.0f} MB."


# The charts of a sweep and of a benchmark


def sweep_figures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Charts of a sweep.

    Args:
        result: the "points" event of `river_core.measure.sweep.sweep`, or a file of `python -m river_core sweep --json`.

    Returns:
        as `figures`; an empty list if no repeat was finished.

    Raises:
        ValueError: the result is none of a sweep.
    """
    try:
        points = [point for point in result["points"] if point["speed_up"] and point["agreement"] is not None]
        header, repeats = result["header"], int(result["repeats"])
        if not points:
            return []
        layers = int(header["model"]["n_layers"])
        setting = (
            f"{'This prompt only' if result.get('prompts', 1) == 1 else str(result['prompts']) + ' prompts'}, {max(point['tokens'] for point in points)} tokens, {repeats} repeats: median, bars from least to greatest. "
            f"{header['model']['name']}, {header['device_name']}, {header['threads']} threads, {header['dtype']}. "
            "Speed is of each lane alone and in turn. Agreement is on the backbone's text: the share of steps in which the lane would have taken the backbone's token; it is not accuracy."
        )
        return [
            _entry("pareto", "Agreement against speed", "measured", setting, pareto(points)),
            _entry(
                "thresholds",
                "What the threshold does",
                "measured",
                "Speed-up, agreement and mean depth of the same lanes, by threshold.",
                thresholds(points, layers),
            ),
        ]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"This is not the result of a sweep: {type(error).__name__} at {error}.") from error


def pareto(points: list[dict[str, Any]]) -> go.Figure:
    """Agreement over speed-up: a line a method through its thresholds; hollow marks, as they are of one prompt; the frontier dotted."""
    figure = go.Figure()
    for at, method in enumerate(dict.fromkeys(point["method"] for point in points)):
        own = [point for point in points if point["method"] == method]
        colour = COLOURS.get(method.partition("@")[0].partition(":")[0].partition("+")[0], UNKNOWN)
        ratio = [point["speed_up"]["median"] for point in own]
        # Points lie close together: the ends of a line carry their thresholds, the others tell theirs under the pointer.
        labels = ["" if point["tau"] is None or point not in (own[0], own[-1]) else f"tau {point['tau']:g}" for point in own]
        figure.add_scatter(
            x=ratio,
            y=[point["agreement"] for point in own],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [point["speed_up"]["max"] - value for point, value in zip(own, ratio, strict=True)],
                "arrayminus": [value - point["speed_up"]["min"] for point, value in zip(own, ratio, strict=True)],
                "thickness": 1,
                "width": 3,
                "color": colour,
            },
            mode="lines+markers+text",
            text=labels,
            textposition="top center",
            textfont={"size": 11},
            name=_method_label(own[0]),
            line={"color": colour, "width": 1.5},
            marker={"color": colour, "symbol": f"{SYMBOLS[at % len(SYMBOLS)]}-open", "size": 10, "line": {"width": 2}},
            customdata=[[plain(point["label"]), point["mean_depth"]] for point in own],
            hovertemplate="%{customdata[0]}<br>speed-up %{x:.2f}, agreement %{y:.3f}<br>mean depth %{customdata[1]:.1f}<extra></extra>",
        )
    best = frontier([(point["speed_up"]["median"], point["agreement"]) for point in points])
    figure.add_scatter(
        x=[x for x, _ in best],
        y=[y for _, y in best],
        mode="lines",
        name="frontier: none faster agrees more",
        line={"dash": "dot", "width": 2, "shape": "vh", "color": UNKNOWN},
        hoverinfo="skip",
    )
    figure.update_xaxes(title_text="speed-up over the backbone")
    figure.update_yaxes(title_text="agreement with the backbone<br>(not accuracy)", tickformat=".0%", range=_near_one(points))
    return _shape(figure, 400)


def _near_one(points: list[dict[str, Any]]) -> list[float]:
    """A range for agreements that ends at 1 and leaves room for the marks."""
    least = min(point["agreement"] for point in points)
    room = max(0.1 * (1 - least), 0.01)
    return [least - room, 1 + room]


def _method_label(point: dict[str, Any]) -> str:
    return plain(str(point["label"]).split(", tau ")[0])


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (x, y): those to which no other is at least equal in both; by rising x."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best[::-1]


def thresholds(points: list[dict[str, Any]], layers: int) -> go.Figure | None:
    """Speed-up, agreement and mean depth over tau, one line a method; None if no method has thresholds."""
    swept = [point for point in points if point["tau"] is not None]
    if not swept:
        return None
    figure = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        subplot_titles=["speed-up", "agreement", f"mean depth, of {layers} layers"],
    )
    figure.update_annotations(font={"size": 12}, x=0, xanchor="left")
    taus = sorted({point["tau"] for point in swept})
    for at, method in enumerate(dict.fromkeys(point["method"] for point in swept)):
        own = sorted((point for point in swept if point["method"] == method), key=lambda point: point["tau"])
        colour = COLOURS.get(method.partition("@")[0].partition("+")[0], UNKNOWN)
        for row, (value, digits) in enumerate(
            [(lambda p: p["speed_up"]["median"], 2), (lambda p: p["agreement"], 3), (lambda p: p["mean_depth"], 1)], 1
        ):
            figure.add_scatter(
                # Thresholds are spaced evenly: 0.9 to 0.95 is no longer way than 0.98 to 0.99.
                x=[taus.index(point["tau"]) for point in own],
                y=[value(point) for point in own],
                mode="lines+markers",
                name=_method_label(own[0]),
                legendgroup=method,
                showlegend=row == 1,
                line={"color": colour, "width": 1.75},
                marker={"color": colour, "symbol": f"{SYMBOLS[at % len(SYMBOLS)]}-open", "size": 9, "line": {"width": 2}},
                text=[f"tau {point['tau']:g}" for point in own],
                hovertemplate=f"%{{text}}: %{{y:.{digits}f}}<extra>%{{fullData.name}}</extra>",
                row=row,
                col=1,
            )
    figure.update_xaxes(tickvals=list(range(len(taus))), ticktext=[f"{tau:g}" for tau in taus])
    figure.update_xaxes(title_text="threshold tau", row=3, col=1)
    figure.update_yaxes(tickformat=".0%", range=_near_one(swept), row=2, col=1)
    figure.update_yaxes(rangemode="tozero", row=3, col=1)
    return _shape(figure, 480)


def bench_figures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Charts of a file of `python -m river_core bench --json`: tokens per second and ratios, each with its spread.

    Raises:
        ValueError: the result is none of a benchmark.
    """
    try:
        lanes, card = result["lanes"], result.get("run_card", {})
        model = card.get("model") or {}
        facts = [
            model.get("name"),
            card.get("device_name"),
            f"{card['threads']} threads" if card.get("threads") else None,
            card.get("dtype"),
            f"prompt of {card['prompt_tokens']} tokens" if card.get("prompt_tokens") else None,
            f"{card['repeats']} rounds" if card.get("repeats") else None,
            card.get("timing"),
        ]
        note = "Median; bars from least to greatest. " + ", ".join(str(fact) for fact in facts if fact) + "."
        speeds = [(lane.get("label") or name, lane["tokens_per_second"]) for name, lane in lanes.items()]
        ratios = list((result.get("ratios") or {}).items())
        return [
            entry
            for entry in (
                _entry("bench-speed", "Benchmark: tokens per second", "measured", note, _spread_bars(speeds, "tokens per second")),
                _entry(
                    "bench-ratios",
                    "Benchmark: ratios",
                    "measured",
                    "Each ratio is taken within one round, so that a machine that slows down slows both sides.",
                    _spread_bars(ratios, "times as fast"),
                ),
            )
            if entry["figure"] is not None
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"This is not the result of a benchmark: {type(error).__name__} at {error}.") from error


def _spread_bars(rows: list[tuple[str, dict[str, float]]], axis: str) -> go.Figure | None:
    """Horizontal bars of medians, with whiskers from least to greatest."""
    if not rows:
        return None
    middle = [float(spread["median"]) for _, spread in rows]
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[plain(name) for name, _ in rows],
            x=middle,
            text=[f"{value:.3g}" for value in middle],
            textposition="inside",
            insidetextanchor="start",
            insidetextfont={"color": "#ffffff"},
            marker={"color": COLOURS["river"]},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [float(spread["max"]) - value for (_, spread), value in zip(rows, middle, strict=True)],
                "arrayminus": [value - float(spread["min"]) for (_, spread), value in zip(rows, middle, strict=True)],
                "thickness": 1.5,
                "width": 4,
                "color": UNKNOWN,
            },
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text=axis, rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return _shape(figure, 90 + 34 * len(rows), showlegend=False, bargap=0.3)


# The table of tokens


def token_table(trace: Trace) -> pd.DataFrame:
    """`app.table.token_rows` as a data frame."""
    columns = table_columns(trace)
    return pd.DataFrame(list(token_rows(trace)), columns=columns)
