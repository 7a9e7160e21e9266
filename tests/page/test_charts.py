"""Charts and tables say what is in the trace. Traces of a tiny model, and the recordings as they are bundled."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from app.analysis.diff import diff, settings
from app.charts import COLOURS, bench_figures, figures, frontier, style_of, sweep_figures, token_table
from river_core import Trace, compare
from river_core.measure.sweep import sweep

RECORDINGS = sorted((Path(__file__).parents[2] / "assets" / "recordings").glob("*.json.gz"))
METHODS = ("backbone", "int4", "river:0.5", "river@fixed:3", "masking@fixed:3", "recompute@fixed:2+cap=4")


@pytest.fixture(scope="module")
def trace(tiny) -> Trace:
    return Trace.from_events(compare(tiny, "Hello", METHODS, max_new_tokens=16))


@pytest.fixture(scope="module")
def same_text(tiny) -> Trace:
    return Trace.from_events(compare(tiny, "Hello", ("backbone", "river@fixed:2", "masking@fixed:2"), max_new_tokens=8, mode="same-text"))


@pytest.fixture(scope="module")
def swept(tiny) -> dict:
    return list(sweep(tiny, "Hello", ("river", "int4"), (0.5, 0.9), max_new_tokens=6, repeats=2))[-1]


def chart(entries: list[dict], name: str) -> dict:
    return json.loads(next(entry["figure"] for entry in entries if entry["name"] == name))


def numbers(values) -> list:
    """Plotly's JSON carries arrays of numbers as base64."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).tolist()
    return values


def of_lane(figure: dict, lane: str) -> dict:
    return next(data for data in figure["data"] if (data.get("meta") or {}).get("lane") == lane)


def test_the_histogram_counts_every_decode_step_once_and_knows_its_tokens(trace):
    figure = chart(figures(trace), "exit-depths")
    for lane in trace.lanes.values():
        bars = of_lane(figure, lane.id)
        counts = dict(zip(numbers(bars["x"]), numbers(bars["y"]), strict=True))
        expected = Counter(token["exit_layer"] for token in lane.steps)
        assert {depth: count for depth, count in counts.items() if count} == expected
        brushed = [i for tokens in bars["customdata"] for i in tokens]
        assert sorted(brushed) == [token["i"] for token in lane.steps]
        for depth, tokens in enumerate(bars["customdata"]):
            assert all(lane.tokens[i]["exit_layer"] == depth for i in tokens)
    titles = [note["text"] for note in figure["layout"]["annotations"]]
    assert any("Backbone" in title and "100% at full depth" in title for title in titles)
    assert any("mean 0.0 of 6" in title for title in titles)


def test_latency_leaves_the_prompt_token_out_and_counts_from_one(trace):
    figure = chart(figures(trace), "latency")
    for lane in trace.lanes.values():
        points = of_lane(figure, lane.id)
        assert numbers(points["x"]) == [token["i"] + 1 for token in lane.steps]
        assert points["customdata"] == [[token["i"]] for token in lane.steps]
        assert numbers(points["y"]) == pytest.approx([token["t_ns"] / 1e6 for token in lane.steps], rel=1e-5)
    assert sum(data["type"] == "box" for data in figure["data"]) == len(trace.lanes)


def test_similarity_shows_the_median_of_the_layers_that_ran(trace):
    figure = chart(figures(trace), "similarity")
    lane = trace.lanes["backbone"]
    line = next(data for data in figure["data"] if data.get("mode") == "lines" and data.get("hovertemplate"))
    medians = np.median([token["similarity"] for token in lane.steps], axis=0)
    assert numbers(line["x"]) == list(range(1, 7))
    assert numbers(line["y"]) == pytest.approx(1 - medians, abs=1e-3)
    rules = [entry["rule"].get("tau") for entry in trace.header["lanes"]]
    dashed = [shape["y0"] for shape in figure["layout"].get("shapes", [])]
    assert dashed == pytest.approx([1 - tau for tau in rules if tau is not None], rel=1e-5)


def test_memory_is_computed_from_shapes_and_meets_what_the_run_measured(trace):
    figure = chart(figures(trace), "memory")
    weights, river, cache = figure["data"][:3]
    sizes, model = trace.header["bytes"], trace.header["model"]
    assert numbers(weights["y"])[-1] == pytest.approx((sizes["backbone"] + sizes["head"]) / 1e6)
    assert numbers(river["y"])[-1] == pytest.approx(sizes["river"] / 1e6)
    assert numbers(cache["y"])[-1] == pytest.approx(sizes["kv_slot"] * model["n_layers"] * model["context_length"] / 1e6)
    here = figure["data"][-1]
    positions = len(trace.header["prompt_ids"]) + trace.header["max_new_tokens"]
    assert here["x"] == [positions]
    computed = sum(sizes[part] for part in ("backbone", "head", "river")) + sizes["kv_slot"] * model["n_layers"] * positions
    assert here["y"][0] == pytest.approx(computed / 1e6)
    names = [data["name"] for data in figure["data"]]
    assert any("KV masking" in name and "50%" in name for name in names)


def test_a_trace_without_sizes_or_similarities_gets_the_charts_that_it_can(trace):
    data = json.loads(json.dumps(trace.to_dict()))
    data["header"]["bytes"] = "unknown"
    data["done"] = {"reason": "finished", "memory": "much"}
    for lane in data["lanes"]:
        lane["end"]["kv_bytes"] = None
        for token in lane["tokens"]:
            token["similarity"] = [None] * 6
    entries = figures(Trace.from_dict(data))
    assert [entry["name"] for entry in entries] == ["exit-depths", "latency"]
    data["lanes"] = [lane | {"tokens": lane["tokens"][:1]} for lane in data["lanes"]]
    assert figures(Trace.from_dict(data)) == []


def test_figures_bring_no_colours_of_a_theme_and_fit_the_columns_asked_for(trace):
    for entry in figures(trace, 1):
        layout = json.loads(entry["figure"])["layout"]
        assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
        assert "layout" not in layout.get("template", {})
        assert "color" not in layout["font"]
    one, three = (chart(figures(trace, columns), "exit-depths")["layout"]["height"] for columns in (1, 3))
    assert one > three


def test_text_of_a_trace_is_never_markup_in_a_figure(trace):
    data = json.loads(json.dumps(trace.to_dict()))
    data["header"]["lanes"][0]["label"] = '<a href="http://example.org">x</a>'
    data["lanes"][0]["tokens"][1]["text"] = "<b>%{x}</b>"
    for entry in figures(Trace.from_dict(data)):
        assert "<a" not in entry["figure"] and "<b>%{" not in entry["figure"]
        assert "\\u003ca" not in entry["figure"]


def test_two_lanes_of_a_method_share_its_colour_and_differ_in_symbol(trace):
    first, second = style_of(trace.header, "river"), style_of(trace.header, "river-2")
    assert first["colour"] == second["colour"] == COLOURS["river"]
    assert first["symbol"] != second["symbol"]


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("panel", ["#ffffff", "#131a22"])
def test_lane_colours_stand_out_on_both_panels(panel):
    for name, colour in COLOURS.items():
        low, high = sorted((luminance(colour), luminance(panel)))
        assert (high + 0.05) / (low + 0.05) >= 3, name


def test_the_table_has_a_row_for_every_token_and_its_slots_add_up(trace):
    table = token_table(trace)
    assert len(table) == sum(len(lane.tokens) for lane in trace.lanes.values())
    slots = [name for name in table if name.startswith("slots_")]
    assert (table[slots].sum(axis=1) == 6).all()
    row = table[(table["lane"] == "river-2") & (table["token"] == 5)].iloc[0]
    token = trace.lanes["river-2"].tokens[4]
    assert row["exit_layer"] == token["exit_layer"] == 3
    assert row["slots_backbone"] == row["slots_river"] == 3
    assert row["similarity"] == token["similarity"][2]
    assert row["t_ms"] == pytest.approx(token["t_ns"] / 1e6, abs=1e-4)
    assert table["similarity"][table["lane"] == "int4"].iloc[1:].isna().all()
    assert "agrees" not in table


def test_the_table_of_a_run_on_the_same_text_says_who_agrees(same_text):
    table = token_table(same_text)
    lane = table[table["lane"] == "masking"].iloc[1:]
    assert lane["agrees"].mean() == pytest.approx(same_text.agreement("masking")["top1"])
    assert lane["kl"].mean() == pytest.approx(same_text.agreement("masking")["kl"])


def test_a_spreadsheet_never_sees_a_formula(trace):
    data = json.loads(json.dumps(trace.to_dict()))
    for lane, text in zip(data["lanes"], ["=1+1", "+1", "-1", "@x", "\tx", '"="'], strict=True):
        lane["tokens"][1]["text"] = text
    data["header"]["lanes"][0]["id"] = data["lanes"][0]["id"] = "=cmd"
    text = token_table(Trace.from_dict(data)).to_csv(index=False)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert json.loads(rows[1]["text"]) == "=1+1"
    for row in rows:
        assert row["text"].startswith('"')
        assert not row["lane"].startswith(("=", "+", "-", "@"))


def test_no_cell_begins_a_formula_where_semicolons_part_them_either(trace):
    data = json.loads(json.dumps(trace.to_dict()))
    data["lanes"][0]["tokens"][1]["text"] = 'a";=1+1;"'
    data["header"]["lanes"][0]["id"] = data["lanes"][0]["id"] = "river;=cmd"
    text = token_table(Trace.from_dict(data)).to_csv(index=False)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert json.loads(rows[1]["text"]) == 'a";=1+1;"'
    assert json.loads(rows[1]["lane"]) == "river;=cmd"
    assert ";" not in text


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_recording_has_all_its_charts_and_its_table(path):
    recorded = Trace.load(path)
    entries = figures(recorded)
    assert [entry["name"] for entry in entries] == ["exit-depths", "latency", "similarity", "memory"]
    assert all(entry["title"] and entry["note"] for entry in entries)
    assert sum(len(entry["figure"]) for entry in entries) < 400_000
    assert isinstance(token_table(recorded), pd.DataFrame)


# Sweep and benchmark


def test_the_pareto_scatter_holds_the_points_hollow_and_names_what_it_measures(swept):
    figure = chart(sweep_figures(swept), "pareto")
    river = next(data for data in figure["data"] if data["name"] == "River")
    points = [point for point in swept["points"] if point["method"] == "river"]
    assert numbers(river["x"]) == [point["speed_up"]["median"] for point in points]
    assert numbers(river["y"]) == [point["agreement"] for point in points]
    assert list(river["text"]) == ["tau 0.5", "tau 0.9"]
    assert river["marker"]["symbol"].endswith("-open")
    assert "not accuracy" in figure["layout"]["yaxis"]["title"]["text"]


def test_the_frontier_is_what_nothing_beats():
    assert frontier([(1, 1.0), (1.5, 0.9), (1.2, 0.8), (2, 0.5), (0.9, 0.99), (1.5, 0.7)]) == [(1, 1.0), (1.5, 0.9), (2, 0.5)]


def test_the_threshold_chart_has_a_line_a_method_in_each_of_three_rows(swept):
    figure = chart(sweep_figures(swept), "thresholds")
    assert len(figure["data"]) == 3  # int4 has no threshold
    assert numbers(figure["data"][2]["y"]) == [point["mean_depth"] for point in swept["points"] if point["method"] == "river"]
    assert list(figure["layout"]["xaxis3"]["ticktext"]) == ["0.5", "0.9"]


def test_a_sweep_that_was_stopped_early_has_no_charts(swept):
    assert sweep_figures(swept | {"points": [], "repeats": 0}) == []


BENCH = {
    "run_card": {"model": {"name": "tiny"}, "device_name": "CPU", "threads": 2, "dtype": "float16", "prompt_tokens": 9, "repeats": 5},
    "lanes": {
        "backbone": {"label": "Backbone", "tokens_per_second": {"median": 70.0, "min": 68.0, "max": 71.0}, "mean_depth": 30},
        "river": {"label": "River", "tokens_per_second": {"median": 95.0, "min": 90.0, "max": 99.0}, "mean_depth": 8, "later": {"more": 1}},
    },
    "ratios": {"river / backbone": {"median": 1.36, "min": 1.3, "max": 1.4}},
    "rounds": [],
}


def test_a_benchmark_becomes_bars_with_their_spread():
    entries = bench_figures(BENCH)
    bars = chart(entries, "bench-speed")["data"][0]
    assert (list(bars["x"]), list(bars["y"])) == ([70.0, 95.0], ["Backbone", "River"])
    assert bars["error_x"]["array"] == pytest.approx([1, 4])
    assert bars["error_x"]["arrayminus"] == pytest.approx([2, 5])
    assert "2 threads" in entries[0]["note"] and "5 rounds" in entries[0]["note"]
    assert [entry["name"] for entry in bench_figures(BENCH | {"ratios": {}})] == ["bench-speed"]


@pytest.mark.parametrize("broken", [{"lanes": []}, {"lanes": {"a": {}}}, {"lanes": {"a": {"tokens_per_second": {"median": "fast"}}}}])
def test_a_file_that_is_no_benchmark_gets_a_sentence(broken):
    with pytest.raises(ValueError, match="not the result of a benchmark"):
        bench_figures(BENCH | broken)


@pytest.mark.parametrize("broken", [{"points": [1]}, {"points": [{}]}, {"header": {}}, {"header": None}])
def test_a_file_that_is_no_sweep_gets_a_sentence(swept, broken):
    with pytest.raises(ValueError, match="not the result of a sweep"):
        sweep_figures(swept | broken)


# Two traces


def test_a_trace_differs_from_itself_in_nothing(trace):
    found = diff(trace, trace)
    assert found["card"] == [] and found["same"] == len(settings(trace)) > 20
    assert [lane["id"] for lane in found["lanes"]] == list(trace.lanes)
    assert all(lane["first"] is None and lane["texts"]["a"] == lane["texts"]["b"] for lane in found["lanes"])


def test_a_diff_names_the_settings_that_differ_and_the_token_at_which_texts_part(trace, tiny):
    other = Trace.from_events(compare(tiny, "Hello there", ("backbone", "river:0.5", "propagation@fixed:3"), max_new_tokens=12))
    found = diff(trace, other)
    card = {name: (a, b) for name, a, b in found["card"]}
    assert card["prompt"] == ("Hello", "Hello there")
    assert card["max_new_tokens"] == ("16", "12")
    assert "model.name" not in card
    assert found["only"]["b"] == ["State propagation, fixed 3"]
    lane = next(lane for lane in found["lanes"] if lane["id"] == "backbone")
    a, b = trace.lanes["backbone"], other.lanes["backbone"]
    assert lane["tokens"] == [len(a.tokens), len(b.tokens)]
    assert lane["speed"] == [a.tokens_per_second, b.tokens_per_second]
    assert lane["depth"] == [6, 6]
    assert lane["texts"]["a"] == [[token["text"], token["exit_layer"]] for token in a.tokens]
    expected = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
    assert lane["first"] == expected
    json.dumps(found, allow_nan=False)
