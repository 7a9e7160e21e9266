"""Trace files: written whole, read back equal, and refused in a sentence that names the place."""

import copy
import gzip
import json
import time
import tracemalloc

import pytest

from river_core import Trace, TraceError, compare
from river_core.kv_cache import OWNER_NAMES
from river_core.trace import OWNERS


@pytest.fixture(scope="module")
def trace(tiny):
    return Trace.from_events(compare(tiny, "Hello", max_new_tokens=6))


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_comes_back_equal(trace, tmp_path, name):
    trace.save(tmp_path / name)
    assert Trace.load(tmp_path / name).to_dict() == trace.to_dict()
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith(".gz") else b'{"')


def test_derived_figures_follow_from_the_tokens(trace):
    lane = trace.lanes["int4"]
    assert lane.mean_depth == 0
    assert lane.tokens_per_second == pytest.approx(5 / (sum(t["t_ns"] for t in lane.tokens[1:]) / 1e9))
    assert trace.speed_up("backbone") == 1
    assert trace.first_difference("backbone") is None


def damaged(trace, change):
    data = copy.deepcopy(trace.to_dict())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(trace_version=3), "version '3'"),
        (lambda d: d.pop("trace_version"), "version 'None'"),
        (lambda d: d.pop("header"), "the header is missing"),
        (lambda d: d["header"].pop("prompt_ids"), "field prompt_ids is missing in the header"),
        (lambda d: d["header"]["model"].update(n_layers="6"), "field n_layers in header.model"),
        (lambda d: d["lanes"].pop(), "has no data"),
        (lambda d: d["lanes"][1]["tokens"][3].pop("kv"), r"field kv is missing in token 3 of lane 'int4' \(\$\.lanes\[1\]\.tokens\[3\]\)"),
        (lambda d: d["lanes"][1]["tokens"][3].update(kv="none"), r"\(\$\.lanes\[1\]\.tokens\[3\]\.kv\)"),
        (lambda d: d["lanes"][1]["tokens"][3]["kv"][0].__setitem__(2, "me"), r"kv of token 3 of lane 'int4' .*'me'"),
        (lambda d: d["lanes"][1]["tokens"][3].update(why=1), r"why of token 3 of lane 'int4'"),
        (lambda d: d["lanes"][1]["tokens"][3].update(score="high"), r"score of token 3 of lane 'int4'"),
        (lambda d: d["lanes"][0]["tokens"][2].update(t_ns=-1), r"t_ns of token 2 of lane 'backbone'"),
        (lambda d: d["header"].update(new=["x" * 100] * 10_000), "the header holds 1,0.* bytes beside what is known of it"),
        (lambda d: d["lanes"][0]["end"].update(new=[[]] * 40_000), "the end of lane 'backbone' holds"),
        (lambda d: d["done"].update(new="x" * 100_000), "done holds"),
        (lambda d: d["header"].update(lanes=d["header"]["lanes"] * 40), "has 120 lanes, and the most that can be read is 64"),
        (lambda d: d.update(lanes=d["lanes"] * 40), "has 120 lanes, and the most that can be read is 64"),
        (lambda d: d.update(lanes=d["lanes"] * 2), "or there twice"),
        (lambda d: d["lanes"][1]["tokens"][3].update(kv=[[0, 99, "river", 1]]), "kv of token 3"),
        (lambda d: d["lanes"][0]["tokens"][2].update(exit_layer=77), "token 2 of lane 'backbone' left at layer 77"),
        (
            lambda d: d["lanes"][0]["tokens"][2].update(t_ns=True),
            r"t_ns of token 2 .*Expected `int`, got `bool` \(\$\.lanes\[0\]\.tokens\[2\]\.t_ns\)",
        ),
        (lambda d: d["lanes"][0]["tokens"].pop(1), "token 1 of lane 'backbone' carries the number 2"),
        (lambda d: d["lanes"][0].update(id="other"), r"lanes\[0\] is not in the header"),
        (lambda d: d["header"].update(prompt_pieces=[1]), "prompt_pieces"),
        (lambda d: d["header"]["model"].update(n_layers=10**9), "has 1000000000 layers"),
        (lambda d: d["lanes"][2]["tokens"][1].update(similarity=[0.5]), "similarity of token 1 of lane 'river'"),
        (lambda d: d["lanes"][2]["tokens"][1].update(similarity=["x"] * 6), "similarity of token 1 of lane 'river'"),
        (lambda d: d["lanes"][2]["tokens"][1].update(top5=[["a"]]), "top5 of token 1"),
        (lambda d: d["lanes"][2]["tokens"][1].update(position=0), "token 1 of lane 'river' has the position 0"),
        (lambda d: d["lanes"][2]["tokens"][1].update(filled=[[1, 5, 2, "backbone"]]), "filled of token 1"),
        (lambda d: d["lanes"][2]["tokens"][1].update(split={"backbone_ns": 1}), "river_ns is missing in split of token 1 of lane 'river'"),
        (lambda d: d["lanes"][0]["prefill"].update(similarity=[[1]]), "similarity of the prefill of lane 'backbone'"),
        (lambda d: d["lanes"][0]["end"].pop("rest"), "rest is missing in the end of lane 'backbone'"),
        (lambda d: d.update(done=3), "done is missing or not an object"),
    ],
)
def test_damage_is_named_with_its_place(trace, change, says):
    with pytest.raises(TraceError, match=says):
        Trace.from_dict(damaged(trace, change))


def test_files_that_are_no_traces_get_a_sentence(trace, tmp_path):
    whole = gzip.compress(json.dumps(trace.to_dict()).encode())
    for raw, says in (
        (whole[: len(whole) // 2], "ends too early|damaged"),
        (b"\x1f\x8bnonsense", "damaged"),
        (b"not json", "no valid JSON"),
        (b"[" * 100_000, "object is expected"),
        (b'{"header": ' + b"[" * 100_000, "no valid JSON"),
        (b"[]", "object is expected"),
        (b"\xff\xfe\x00", "no valid JSON"),
        (b'{"trace_version": NaN}', "no valid JSON"),
        (b'{"trace_version": 1e999}', "no finite number"),
    ):
        with pytest.raises(TraceError, match=says):
            Trace.from_bytes(raw)
    with pytest.raises(TraceError, match="cannot be read"):
        Trace.load(tmp_path / "absent.json")
    with pytest.raises(TraceError, match="could not be written"):
        trace.save(tmp_path / "absent" / "t.json")


def test_a_decompression_bomb_is_refused():
    with pytest.raises(TraceError, match="unpacks to more than 1 MB"):
        Trace.from_bytes(gzip.compress(b" " * (8 << 20)), max_bytes=1 << 20)
    with pytest.raises(TraceError, match="larger than 1 MB"):
        Trace.from_bytes(b" " * (8 << 20), max_bytes=1 << 20)


@pytest.mark.parametrize("mode", ["free", "same-exits"])
def test_every_strategy_leaves_a_trace_that_is_read_back(tiny, mode):
    methods = ["backbone", "int4", "river:0.5", "recompute", "propagation", "masking", "monotone", "sequence@fixed"]
    methods += ["verified", "replay", "skipdecode"] if mode == "free" else []
    trace = Trace.from_events(compare(tiny, "Hello", methods, max_new_tokens=6, mode=mode))
    again = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert again.to_dict() == trace.to_dict()
    assert again.done["reason"] == "finished" and again.done["memory"]["peak_bytes"] > 0


def test_what_decided_an_exit_is_kept_unrounded(trace):
    def decide(data):
        data["lanes"][2]["tokens"][1].update(why="test", score=0.9700400471687317)
        data["lanes"][2]["tokens"][2].update(why="forced", score=None)

    lane = Trace.from_bytes(json.dumps(damaged(trace, decide)).encode()).lanes["river"]
    assert [(token.get("why"), token.get("score")) for token in lane.tokens[1:3]] == [("test", 0.9700400471687317), ("forced", None)]
    assert "why" not in Trace.from_dict(damaged(trace, lambda d: d["lanes"][2]["tokens"][1].pop("why", None))).lanes["river"].tokens[1]


def test_the_owners_that_a_file_may_name_are_those_of_the_cache():
    assert OWNERS == OWNER_NAMES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text, lane: text.replace(lane, f"[{lane[1:-1]}" + f",{lane[1:-1]}" * 20_000 + "]"), "lanes"),
        (lambda text, lane: text.replace('"created"', '"new":[' + "[]," * 4_000_000 + '[]],"created"'), "the header holds"),
        (lambda text, lane: text.replace('"trace_version"', '"new":[' + "[]," * 4_000_000 + '[]],"trace_version"', 1), None),
    ],
    ids=["lanes", "header", "top"],
)
def test_a_large_file_with_odd_content_is_judged_before_it_becomes_objects(trace, change, says):
    lane = '[{"id":"a","tokens":[]}]'
    whole = damaged(trace, lambda d: None)
    text = json.dumps(whole if says != "lanes" else whole | {"lanes": "here"}).replace('"here"', lane)
    raw = change(text, lane).encode()
    tracemalloc.start()
    start = time.process_time()
    try:
        if says:
            with pytest.raises(TraceError, match=says):
                Trace.from_bytes(raw)
        else:
            assert Trace.from_bytes(raw).to_dict() == trace.to_dict()
        assert tracemalloc.get_traced_memory()[1] < 3 * len(raw) + (8 << 20)
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 20
