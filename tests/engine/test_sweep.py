"""The sweep measures each method at each threshold on the backbone's text; here on a tiny model."""

import json
import time

import pytest

from river_core import InputError
from river_core.cli import main
from river_core.measure.sweep import at_threshold, format_sweep, lanes_of, read_taus, sweep

NEVER, ALWAYS = 1.5, -1.0  # a cosine is never above the first and nearly always above the second


def points_of(events) -> dict:
    *progress, last = events
    assert all(event["type"] == "progress" for event in progress)
    assert last["type"] == "points"
    return last


@pytest.fixture(scope="module")
def result(tiny):
    return points_of(sweep(tiny, "Hello", ("river", "masking", "int4"), (ALWAYS, 0.5, NEVER), max_new_tokens=10, repeats=2))


def test_each_method_gets_a_point_at_each_threshold_and_one_where_it_has_none(result):
    points = [(point["method"], point["tau"]) for point in result["points"]]
    thresholds = [ALWAYS, 0.5, NEVER]
    assert points == [("backbone", None), *(("river", t) for t in thresholds), *(("masking", t) for t in thresholds), ("int4", None)]
    assert len({point["lane"] for point in result["points"]}) == len(points)
    assert result["repeats"] == 2 and result["reason"] == "finished"
    json.dumps(result, allow_nan=False)


def test_a_lane_that_never_leaves_is_the_backbone_and_agrees_with_it(result):
    layers = result["header"]["model"]["n_layers"]
    for point in result["points"]:
        if point["tau"] == NEVER or point["method"] == "backbone":
            assert point["agreement"] == 1 and point["kl"] == pytest.approx(0, abs=1e-5) and point["mean_depth"] == layers


def test_a_lower_threshold_runs_fewer_layers_and_agrees_no_more_than_always(result):
    for method in ("river", "masking"):
        low, middle, high = (point for point in result["points"] if point["method"] == method)
        assert low["mean_depth"] <= middle["mean_depth"] <= high["mean_depth"]
        assert low["mean_depth"] < high["mean_depth"]
        assert 0 <= low["agreement"] <= 1
        assert low["kl"] > high["kl"]
    assert next(point for point in result["points"] if point["method"] == "int4")["mean_depth"] == 0


def test_speeds_carry_their_spread_and_speed_ups_belong_to_the_backbone(result):
    for point in result["points"]:
        for key in ("tokens_per_second", "speed_up"):
            spread = point[key]
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert result["points"][0]["speed_up"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert all(point["label"] in format_sweep(result) for point in result["points"])


def test_progress_goes_from_the_first_token_to_the_end(tiny):
    events = list(sweep(tiny, "Hello", ("river",), (0.5,), max_new_tokens=4, repeats=2))
    fractions = [event["fraction"] for event in events[:-1]]
    assert fractions == sorted(fractions) and 0 < fractions[0] < fractions[-1] <= 1
    assert [event["repeat"] for event in events[:-1]] == sorted(event["repeat"] for event in events[:-1])


def test_stop_ends_it_before_the_next_token_and_keeps_finished_repeats_only(tiny):
    seen = []
    events = sweep(tiny, "Hello", ("river",), (0.5,), max_new_tokens=100, repeats=50, stop=lambda: len(seen) >= 3)
    start = time.monotonic()
    for event in events:
        seen.append(event)
    assert time.monotonic() - start < 5
    assert len(seen) == 4
    assert seen[-1] | {"header": None} == {"type": "points", "header": None, "repeats": 0, "prompts": 1, "reason": "stop", "points": []}


def test_a_stop_between_two_repeats_keeps_the_finished_ones(tiny):
    seen = []
    events = sweep(tiny, "Hello", ("river",), (0.5,), max_new_tokens=4, repeats=50, stop=lambda: bool(seen) and seen[-1]["repeat"] == 3)
    for event in events:
        seen.append(event)
    result = seen[-1]
    assert result["reason"] == "stop" and result["repeats"] == 2 and len(result["points"]) == 2
    assert all(point["speed_up"]["min"] > 0 for point in result["points"])


def test_several_prompts_give_intervals_and_paired_differences_from_full_4_bit(tiny):
    prompts = ["Hello", "What is a river?", "One, two", "Sky", "The end"]
    result = points_of(sweep(tiny, prompts, ("river", "int4"), (ALWAYS, NEVER), max_new_tokens=6, repeats=1))
    backbone, low, never, int4 = result["points"]
    assert result["prompts"] == 5 and never["tokens"] == low["tokens"] > 5
    assert backbone["intervals"] == {} and int4["against"] == {}
    assert never["intervals"]["top1"] == {"value": 1, "low": 1, "high": 1, "n": 5}
    assert low["intervals"]["kl"]["low"] <= low["kl"] <= low["intervals"]["kl"]["high"]
    difference = never["against"]["top1"]["value"]
    assert difference == pytest.approx(1 - int4["agreement"], abs=1e-4)
    text = format_sweep(result)
    assert "less Full 4-bit, paired by prompt" in text and ("within noise" in text or "beyond noise" in text) and "n = 5 prompts" in text
    json.dumps(result, allow_nan=False)


def test_one_prompt_gets_no_interval_and_no_verdict(result):
    assert all(point["intervals"]["top1"]["low"] is None for point in result["points"] if point["intervals"])
    assert "too few prompts to tell" in format_sweep(result)


def test_thresholds_come_from_a_text_in_order_and_once():
    assert read_taus("0.97, 0.9;0.95 0.9") == (0.9, 0.95, 0.97)
    assert read_taus("0.9,0.95,1") == (0.9, 0.95, 1.0) and read_taus("-1,0.5 2") == (-1.0, 0.5, 2.0) and read_taus("0, 1") == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "at least one"),
        ("0.9, near one", "must be a number"),
        ("nan", "must be a number"),
        ("0,95", "decimal point"),
        ("0,9; 0,95", "decimal point"),
        ("0.9 0,1", "decimal point"),
        ("95", "from -2"),
        ("0.9, 97", "from -2"),
    ],
)
def test_thresholds_that_cannot_be_used_get_a_sentence(text, says):
    with pytest.raises(InputError, match=says):
        read_taus(text)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("river", "river:0.9"),
        ("recompute+cap=4", "recompute:0.9+cap=4"),
        ("river@margin", "river@margin:0.9"),
        ("int4", None),
        ("river:0.5", None),
        ("masking@fixed", None),
    ],
)
def test_a_threshold_goes_where_the_name_has_room_for_one(method, name):
    assert at_threshold(method, 0.9) == name


def test_the_backbone_is_always_there_and_never_twice():
    assert [name for name, _, _ in lanes_of(("river", "backbone", "river"), (0.5,))] == ["backbone", "river:0.5"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"methods": ("verified",)}, "cannot be fed"),
        ({"methods": ("stream",)}, "no method"),
        ({"methods": ("backbone",)}, "beside the backbone"),
        ({"methods": ("river",), "taus": [i / 100 for i in range(50)]}, "at most"),
        ({"methods": ("river",), "repeats": 0}, "at least one repeat"),
        ({"prompt": []}, "needs a prompt"),
    ],
)
def test_what_cannot_be_swept_is_refused_with_a_sentence(tiny, arguments, says):
    with pytest.raises(InputError, match=says):
        next(sweep(tiny, **{"prompt": "Hello"} | arguments))


def test_the_command_prints_the_result_that_the_page_can_show(tiny, monkeypatch, capsys):
    monkeypatch.setattr("river_core.cli._load", lambda args: tiny)
    command = ["sweep", "Hello", "--taus", "0.5", "--methods", "river,int4", "--max-new-tokens", "4", "--repeats", "1"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [point["lane"] for point in result["points"]] == ["backbone", "river", "int4"]
    assert main(command) == 0
    assert "River, tau 0.5" in capsys.readouterr().out


def test_the_command_takes_a_file_of_prompts_instead(tiny, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("river_core.cli._load", lambda args: tiny)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n{"question": "two"}\n{"prompt": "three"}\n')
    command = ["sweep", "--taus", "0.5", "--methods", "river", "--max-new-tokens", "3", "--repeats", "1"]
    assert main([*command, "--prompts", str(path), "--limit", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 2
    for wrong in (command, [*command, "Hello", "--prompts", str(path)]):
        assert main(wrong) == 1
        assert "either a prompt or --prompts" in capsys.readouterr().err


def test_a_sweep_over_answers_of_one_token_says_so(tiny):
    result = points_of(sweep(tiny, "Hello", ("river", "int4"), (0.5,), max_new_tokens=1, repeats=2))
    assert all(point["tokens"] == 1 and point["speed_up"] is point["tokens_per_second"] is None for point in result["points"])
    assert format_sweep(result).count("one token only") == 3
    json.dumps(result, allow_nan=False)


def test_a_method_with_a_depth_of_its_own_has_no_threshold():
    assert at_threshold("sequence+depth=3", 0.9) is None and at_threshold("sequence", 0.9) == "sequence:0.9"
