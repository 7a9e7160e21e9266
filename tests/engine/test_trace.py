"""Trace files: written whole, read back equal, and refused in a sentence that names the place."""

import copy
import gzip
import json

import pytest

from river_core import Trace, TraceError, compare


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
        (lambda d: d["lanes"][1]["tokens"][3].pop("kv"), "field kv is missing in token 3 of lane 'int4'"),
        (lambda d: d["lanes"][1]["tokens"][3].update(kv=[[0, 99, "river", 1]]), "kv of token 3"),
        (lambda d: d["lanes"][0]["tokens"][2].update(exit_layer=77), "token 2 of lane 'backbone' left at layer 77"),
        (lambda d: d["lanes"][0]["tokens"][2].update(t_ns=True), "t_ns in token 2"),
        (lambda d: d["lanes"][0]["tokens"].pop(1), "token 1 of lane 'backbone' carries the number 2"),
        (lambda d: d["lanes"][0].update(id="other"), r"lanes\[0\] is not in the header"),
        (lambda d: d["header"].update(prompt_pieces=[1]), "prompt_pieces"),
        (lambda d: d["header"]["model"].update(n_layers=10**9), "has 1000000000 layers"),
        (lambda d: d["lanes"][2]["tokens"][1].update(similarity=[0.5]), "similarity of token 1 of lane 'river'"),
        (lambda d: d["lanes"][2]["tokens"][1].update(similarity=["x"] * 6), "similarity of token 1 of lane 'river'"),
        (lambda d: d["lanes"][2]["tokens"][1].update(top5=[["a"]]), "top5 of token 1"),
        (lambda d: d["lanes"][2]["tokens"][1].update(position=0), "token 1 of lane 'river' has the position 0"),
        (lambda d: d["lanes"][2]["tokens"][1].update(filled=[[1, 5, 2, "backbone"]]), "filled of token 1"),
        (lambda d: d["lanes"][2]["tokens"][1].update(split={"backbone_ns": 1}), "river_ns is missing in split of token 1"),
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
        (b"[" * 100_000, "no valid JSON"),
        (b"[]", "object is expected"),
        (b"\xff\xfe\x00", "no valid JSON"),
        (b'{"trace_version": NaN}', "no finite number"),
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
