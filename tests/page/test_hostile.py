"""Files that are valid but made to be expensive: every answer comes in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import river_core
from app import export
from app.analysis.diff import diff
from app.charts import _filled, figures, token_table
from app.model_host import ModelHost
from app.runs import Runs
from river_core import Trace, TraceError
from river_core.trace import OWNERS, LaneTrace
from tests.page.server import never


@pytest.fixture(scope="module")
def small(tiny) -> dict:
    return json.loads(json.dumps(Trace.from_events(river_core.compare(tiny, "Hello", ("river",), max_new_tokens=3)).to_dict()))


def grown(small: dict, tokens: int, layers: int, **change) -> dict:
    """The small trace with so many tokens and layers, each token with what is given."""
    data = json.loads(json.dumps(small))
    data["header"]["model"]["n_layers"] = layers
    (lane,) = data["lanes"]
    first, prompt = lane["tokens"][1], len(data["header"]["prompt_ids"])
    plain = first | {"similarity": [0] * layers, "exit_layer": layers, "kv": [[0, layers, "none", 0]]} | change
    lane["tokens"] = [plain | {"i": i, "position": prompt - 1 + i, "from_prefill": i == 0} for i in range(tokens)]
    lane["prefill"] = None
    return data


@pytest.fixture
def runs():
    return Runs(ModelHost(never), river_core.compare)


def test_owners_are_a_closed_set_so_that_a_table_has_few_columns(small, runs):
    data = grown(small, 2000, 1)
    for i, token in enumerate(data["lanes"][0]["tokens"]):
        token["kv"] = [[0, 1, f"o{i}", 0]]
    with pytest.raises(TraceError, match=r"'o0' \(\$\.lanes\[0\]\.tokens\[0\]\.kv\[0\]\[2\]\)"):
        runs.open_file(gzip.compress(json.dumps(data).encode()))


def test_a_file_of_many_lanes_is_refused_at_once(small, runs):
    lane = small["header"]["lanes"][0]
    data = small | {"header": small["header"] | {"lanes": [lane | {"id": f"{i}"} for i in range(5000)]}}
    data["lanes"] = [{"id": f"{i}", "tokens": []} for i in range(5000)]
    start = time.process_time()
    with pytest.raises(TraceError, match="header holds|the most that can be read is 64"):
        runs.open_file(gzip.compress(json.dumps(data).encode()))
    assert time.process_time() - start < 5


def test_many_tokens_and_many_layers_are_analysed_in_bounded_memory(small, runs):
    data = grown(small, 1500, 1000, filled=[[0, 0, 500, "river"]] * 20)
    raw = json.dumps(data).encode()
    file_id, text = runs.open_file(gzip.compress(raw, 1))
    trace = runs.trace(file_id)
    tracemalloc.start()
    start = time.process_time()
    try:
        assert _filled(trace.lanes["river"], 1000) == 0.0
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        assert len(export.download(runs, {"id": file_id, "kind": "csv"})["text"].splitlines()) == 1501
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 20


def test_slots_that_are_filled_a_million_times_are_counted_once():
    holes = [[2 * i, 2 * i + 1, "none", 0] for i in range(500)]
    steps = [{"position": 5, "from_prefill": False, "kv": holes, "filled": [[5, i % 999, i % 999 + 1, "river"] for i in range(300_000)]}]
    start = time.process_time()
    assert _filled(LaneTrace("x", tokens=steps), 1000) == 1.0
    assert time.process_time() - start < 10


def test_everything_that_a_valid_trace_can_be_asked_is_answered(small):
    trace = Trace.from_dict(grown(small, 40, 900, kv=[[i, i + 1, OWNERS[i % 5], i] for i in range(900)]))
    assert len(figures(trace)) >= 3
    assert len(token_table(trace)) == 40
    assert diff(trace, trace)["card"] == []


RANGES = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)).filter(lambda pair: pair[0] < pair[1]), max_size=6)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(RANGES, st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7), st.integers(1, 8)), max_size=4)), min_size=1, max_size=6
    )
)
def test_slots_that_hold_something_are_counted_by_ranges_as_they_would_be_one_by_one(tokens):
    layers = 8
    steps = [
        {
            "position": position,
            "from_prefill": False,
            "kv": [[first, last, "none", 0] for first, last in holes],
            "filled": [[at, first, last, "river"] for at, first, last in filled if first < last],
        }
        for position, (holes, filled) in enumerate(tokens)
    ]
    empty = {(token["position"], layer) for token in steps for first, last, _, _ in token["kv"] for layer in range(first, last)}
    empty -= {(at, layer) for token in steps for at, first, last, _ in token["filled"] for layer in range(first, last)}
    assert _filled(LaneTrace("x", tokens=steps), layers) == pytest.approx(1 - len(empty) / (layers * len(steps)))
