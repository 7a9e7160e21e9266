"""Nothing that the page hands on may claim that a token left where it did not pass the test."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runs import encode_event
from app.table import table_columns, token_csv, token_rows
from river_core import Trace, compare

RECORDINGS = sorted((Path(__file__).parents[2] / "assets" / "recordings").glob("*.json.gz"))


def token_event(similarity: list, exit_layer: int, **more) -> dict:
    return {"type": "token", "similarity": similarity, "top5": [[1, "a", 0.123456789]], "exit_layer": exit_layer, **more}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_token_that_left_above_its_threshold_still_does_after_the_channel(path):
    trace = Trace.load(path)
    taus = {lane["id"]: lane["rule"].get("tau") for lane in trace.header["lanes"] if lane["rule"].get("tau") is not None}
    left = 0
    for lane, tau in taus.items():
        for token in trace.lanes[lane].tokens:
            sent = json.loads(encode_event(token))
            for before, after in zip(token["similarity"], sent["similarity"], strict=True):
                assert (before is None) == (after is None)
                assert before is None or (before > tau) == (after > tau)
            left += token["exit_layer"] > 0 and (sent["similarity"][token["exit_layer"] - 1] or 0) > tau
    assert left or not taus


@given(st.floats(-1, 1), st.floats(-1e-4, 1e-4), st.integers(1, 4))
def test_no_value_changes_sides_however_near_it_is(tau, distance, exit_layer):
    values = [tau + distance] * 4
    sent = json.loads(encode_event(token_event(values, exit_layer)))["similarity"]
    assert [value > tau for value in sent] == [value > tau for value in values]


@given(st.floats(0.5, 1), st.integers(1, 3))
def test_the_score_that_was_tested_stands_at_the_exit_unrounded(score, exit_layer):
    event = token_event([round(score, 5)] * 3, exit_layer, score=score, why="test")
    sent = json.loads(encode_event(event))
    assert sent["score"] == score and sent["why"] == "test"
    assert sent["similarity"][exit_layer - 1] == score
    of_another_kind = json.loads(encode_event(event | {"score": score / 4}))  # a head's score is no similarity
    assert of_another_kind["similarity"] == event["similarity"] and of_another_kind["score"] == score / 4


def test_borderline_values_of_four_digits():
    sent = json.loads(encode_event(token_event([0.96996, 0.97004, None, float("nan")], 2)))
    assert sent["similarity"] == [0.96996, 0.97004, None, None]


def test_the_score_is_exact_in_the_trace_and_in_the_table(tiny):
    events = list(compare(tiny, "Hello", ("backbone", "river:0.5"), max_new_tokens=5))
    for event in events:
        if event["type"] == "token":
            event.update(why="test", score=0.1 + 0.2 + event["i"] / 7)
    trace = Trace.from_events(json.loads(encode_event(event)) for event in events)
    again = Trace.from_bytes(json.dumps(trace.to_dict()).encode())
    rows = list(csv.DictReader(io.StringIO(token_csv(again))))
    for row, token in zip(rows, [token for lane in again.lanes.values() for token in lane.tokens], strict=True):
        assert float(row["score"]) == token["score"] == 0.1 + 0.2 + token["i"] / 7
        assert row["why"] == "test"


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_the_table_is_written_as_a_data_frame_would_be(path):
    from app.charts import token_table

    trace = Trace.load(path)
    mine = list(csv.reader(io.StringIO(token_csv(trace))))
    other = list(csv.reader(io.StringIO(token_table(trace).to_csv(index=False))))
    assert mine[0] == other[0] == table_columns(trace)
    assert len(mine) == len(other) == 1 + sum(len(lane.tokens) for lane in trace.lanes.values())
    for a, b in zip(mine[1:], other[1:], strict=True):
        assert [_value(cell) for cell in a] == [_value(cell) for cell in b]
    assert list(next(iter(token_rows(trace)))) == mine[0]


def _value(cell: str):
    try:
        return float(cell)
    except ValueError:
        return cell
