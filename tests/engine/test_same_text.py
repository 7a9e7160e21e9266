"""Comparing on the same text, and on the same exits: what is left is the method, then the KV strategy alone."""

import shutil

import pytest

from river_core import InputError, Trace, compare
from river_core.loading import cache_dir
from river_core.methods import METHODS, parse_methods
from river_core.native import NATIVE
from tests.tiny import tiny_model

ALL = ("backbone", "river", "int4", "masking", "recompute", "replay", "propagation", "monotone", "skipdecode", "sequence+depth=3")
FOLLOWERS = ("masking", "recompute", "replay", "propagation", "monotone")


def tau_of(tiny):
    """A threshold at which River leaves at different depths on this text."""
    tokens = Trace.from_events(compare(tiny, "Hello", ("backbone",), max_new_tokens=16)).lanes["backbone"].tokens
    scores = sorted(s for t in tokens for s in t["similarity"][:-1])
    return scores[int(0.7 * len(scores))]


@pytest.fixture(scope="module")
def runs(tiny):
    tau = tau_of(tiny)
    return {
        mode: Trace.from_events(compare(tiny, "Hello", ALL, tau=tau, max_new_tokens=16, mode=mode))
        for mode in ("free", "same-text", "same-exits")
    }


@pytest.mark.parametrize("mode", ["same-text", "same-exits"])
def test_every_lane_is_fed_the_backbones_tokens(runs, mode):
    trace = runs[mode]
    reference = runs["free"].lanes["backbone"].token_ids
    assert all(lane.token_ids == reference for lane in trace.lanes.values())
    assert all(trace.first_difference(lane) is None for lane in trace.lanes)
    assert trace.header["mode"] == mode


@pytest.mark.parametrize("mode", ["same-text", "same-exits"])
def test_every_step_says_how_its_scores_compare(runs, mode):
    trace = runs[mode]
    for name, lane in trace.lanes.items():
        if name == "backbone":
            assert lane.fidelity is None
            continue
        for token in lane.tokens:
            facts = token["fidelity"]
            assert facts["kl"] >= 0 and facts["agrees"] == (facts["choice"] == token["id"])
        assert 0 <= trace.agreement(name)["top1"] <= 1


def test_on_the_same_exits_every_strategy_leaves_where_river_left(runs):
    trace = runs["same-exits"]
    river = [token["exit_layer"] for token in trace.lanes["river"].tokens]
    assert len(set(river[1:])) > 1
    for name in ("masking", "propagation"):
        assert [token["exit_layer"] for token in trace.lanes[name].tokens] == river
    for name in ("recompute", "replay"):  # but where the cap forces a full step
        assert all(t["exit_layer"] in (d, trace.header["model"]["n_layers"]) for t, d in zip(trace.lanes[name].tokens, river, strict=True))
    falling = [token["exit_layer"] for token in trace.lanes["monotone"].tokens[1:]]
    assert falling == [min(river[1 : i + 1]) for i in range(1, len(river))]
    rules = {lane["id"]: lane["rule"]["name"] for lane in trace.header["lanes"]}
    assert all(rules[name] == "follow" for name in FOLLOWERS) and rules["river"] == "similarity"


def test_keys_and_values_are_exact_where_they_must_be_and_off_where_they_must(runs):
    lanes, layers = runs["same-exits"].lanes, runs["same-exits"].header["model"]["n_layers"]
    for name in ("recompute", "replay"):
        facts = lanes[name].fidelity
        assert facts["holes"] == 0 and facts["mean"]["k_cos"] == pytest.approx(1, abs=1e-5) and facts["mean"]["v_err"] < 1e-4
    depths = [token["exit_layer"] for token in lanes["river"].tokens[1:]]
    assert lanes["masking"].fidelity["holes"] == sum(layers - depth for depth in depths)
    for name in ("river", "masking", "propagation"):
        facts = lanes[name].fidelity
        assert len(facts["v_cos"]) == len(depths) and all(len(row) == layers for row in facts["v_cos"])
        assert facts["v_cos"][0][: depths[0]] == pytest.approx([1.0] * depths[0], abs=1e-4)
    assert lanes["propagation"].fidelity["v_cos"][0][depths[0]] == pytest.approx(1.0, abs=1e-4)
    mean = {name: lanes[name].fidelity["mean"]["v_cos"] for name in ("recompute", "river", "propagation", "masking")}
    assert mean["recompute"] > mean["river"] > mean["propagation"] > 0 and mean["river"] > mean["masking"]


def test_a_trace_with_fidelity_comes_back_equal(runs, tmp_path):
    runs["same-text"].save(tmp_path / "t.json.gz")
    assert Trace.load(tmp_path / "t.json.gz").to_dict() == runs["same-text"].to_dict()


@pytest.mark.parametrize(
    ("methods", "mode", "says"),
    [
        (("river", "masking"), "same-text", "needs the backbone lane"),
        (("backbone", "masking"), "same-exits", "needs the River lane"),
        (("backbone", "verified"), "same-text", "makes its own tokens"),
        (("backbone",), "sideways", "mode must be"),
    ],
)
def test_comparisons_that_cannot_be_made_get_a_sentence(tiny, methods, mode, says):
    with pytest.raises(InputError, match=says):
        list(compare(tiny, "Hello", methods, mode=mode))


def test_stop_ends_a_same_text_run_with_what_it_has(tiny):
    seen = []
    for event in compare(tiny, "Hello", ("backbone", "river"), max_new_tokens=50, mode="same-text", stop=lambda: len(seen) > 12):
        seen.append(event)
    assert (seen[-1]["type"], seen[-1]["reason"]) == ("done", "stop")
    assert [e["reason"] for e in seen if e["type"] == "end"] == ["stop", "stop"]
    assert len([e for e in seen if e["type"] == "fidelity"]) == 1


def test_a_lane_that_fails_does_not_take_the_others_with_it(tiny, monkeypatch):
    from river_core.strategies.masking import MaskingStrategy

    monkeypatch.setattr(MaskingStrategy, "step", lambda self, *args: (_ for _ in ()).throw(RuntimeError("broken on purpose")))
    events = list(compare(tiny, "Hello", ("backbone", "masking", "river"), max_new_tokens=6, mode="same-text"))
    ends = {e["lane"]: e for e in events if e["type"] == "end"}
    assert ends["masking"]["reason"] == "error" and "broken on purpose" in ends["masking"]["message"]
    assert ends["backbone"]["tokens"] == ends["river"]["tokens"] == 6


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("mode", ["same-text", "same-exits"])
def test_a_failed_backbone_ends_every_lane_with_a_sentence_and_its_advice_is_kept(tiny, monkeypatch, mode, index):
    from river_core.strategies.river import RiverStrategy

    name = "step" if index else "prefill"
    real = getattr(RiverStrategy, name)

    def overflow(self, *args):
        made = real(self, *args)
        if self.rule.name == "never" and (not index or args[2] == index):
            made.logits = made.logits * float("nan")
        return made

    monkeypatch.setattr(RiverStrategy, name, overflow)
    events = list(compare(tiny, "Hello", ("backbone", "river:0.5", "masking", "int4"), max_new_tokens=8, mode=mode))
    assert (events[-1]["type"], events[-1]["reason"]) == ("done", "finished")
    ends = {event["lane"]: event for event in events if event["type"] == "end"}
    assert set(ends) == {"backbone", "river", "masking", "int4"}
    assert {end["reason"] for end in ends.values()} == {"error"} and {end["tokens"] for end in ends.values()} == {index}
    assert "--dtype bfloat16" in ends["backbone"]["message"]
    assert all("Backbone, whose text this one reads, has failed" in ends[name]["message"] for name in ("river", "masking", "int4"))
    Trace.from_events(events)


def test_followers_of_a_failed_river_say_so(tiny, monkeypatch):
    from river_core.strategies.river import RiverStrategy

    real = RiverStrategy.step

    def step(self, token_id, position, index, cache):
        if index == 3 and self.rule.name == "similarity":
            raise IndexError("list index out of range")
        return real(self, token_id, position, index, cache)

    monkeypatch.setattr(RiverStrategy, "step", step)
    lanes = Trace.from_events(compare(tiny, "Hello", ("backbone", "river:0.5", "masking"), max_new_tokens=8, mode="same-exits")).lanes
    assert lanes["backbone"].end["reason"] == "length" and lanes["backbone"].end["message"] is None
    assert "whose exits this one follows has ended" in lanes["masking"].end["message"]


def test_figures_of_keys_and_values_that_cannot_be_made_end_their_lane_only(tiny, monkeypatch):
    from river_core.strategies.recompute import RecomputeStrategy

    monkeypatch.setattr(RecomputeStrategy, "flush", lambda self, cache: {}["x"])
    lanes = Trace.from_events(compare(tiny, "Hello", ("backbone", "recompute", "river"), max_new_tokens=5, mode="same-text")).lanes
    assert {name: lane.end["reason"] for name, lane in lanes.items()} == {"backbone": "length", "river": "length", "recompute": "error"}
    assert "Recompute failed" in lanes["recompute"].end["message"] and lanes["river"].fidelity


def test_every_method_runs_freely_and_its_events_are_whole(tiny, tmp_path):
    trace = Trace.from_events(compare(tiny, "Hello", tuple(METHODS), max_new_tokens=10, timing="sequential"))
    trace.save(tmp_path / "t.json")
    assert Trace.load(tmp_path / "t.json").to_dict() == trace.to_dict()
    assert set(trace.lanes) == set(METHODS)
    assert all(len(lane.tokens) == 10 for lane in trace.lanes.values())
    assert trace.lanes["verified"].token_ids == trace.lanes["backbone"].token_ids
    assert all(lane["untrained_head"] == METHODS[lane["method"]].leaves_through_head for lane in trace.header["lanes"])
    for lane in trace.lanes.values():  # the time of a cycle is shared out, and none is lost
        assert sum(t["t_ns"] for t in lane.tokens if not t["from_prefill"]) == lane.end["decode_ns"] == lane.decode_ns


def test_an_end_token_inside_a_draft_ends_the_answer_there(tiny):
    import dataclasses

    ids = Trace.from_events(compare(tiny, "Hello", ("backbone",), max_new_tokens=12)).lanes["backbone"].token_ids
    ending = dataclasses.replace(tiny, eos_token_ids=frozenset({ids[4]}))
    lane = Trace.from_events(compare(ending, "Hello", ("verified+k=8",), max_new_tokens=12)).lanes["verified"]
    assert lane.token_ids == ids[: ids.index(ids[4]) + 1] and lane.end["reason"] == "eos"
    assert sum(t["t_ns"] for t in lane.tokens if not t["from_prefill"]) == lane.end["decode_ns"]


@pytest.mark.parametrize(
    ("text", "rule", "options"),
    [
        ("masking@fixed:2", {"name": "fixed", "depth": 2}, {}),
        ("recompute:0.9+cap=8", {"name": "similarity", "tau": 0.9, "floor": 1, "layers": None}, {"cap": 8}),
        ("propagation@margin:0.4", {"name": "margin", "threshold": 0.4, "floor": 1, "layers": [1, 3, 4]}, {}),
        ("river:0.5+floor=2+layers=2/4", {"name": "similarity", "tau": 0.5, "floor": 2, "layers": [2, 4]}, {}),
        ("masking@entropy+layers=3+floor=2", {"name": "entropy", "threshold": 0.7, "floor": 2, "layers": [3]}, {}),
        ("masking@replay+depths=6/2/3", {"name": "replay", "depths": [6, 2, 3]}, {}),
        ("sequence+depth=2+head=balcony", {"name": "fixed", "depth": 2}, {"depth": 2, "head": "balcony"}),
    ],
)
def test_methods_are_written_with_rule_value_and_options(tiny, text, rule, options):
    method = parse_methods([text], None, tiny)[0]
    assert method.rule == rule and method.options == options


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("masking@luck", "no exit rule 'luck'"),
        ("masking@depth 0", "no exit rule"),
        ("masking@fixed:2.5", "whole number from 0 to 6"),
        ("masking@fixed:9", "whole number from 0 to 6"),
        ("recompute+cap", "no option 'cap'"),
        ("recompute+cup=3", "no option 'cup=3'"),
        ("recompute+cap=few", "not a whole number"),
        ("river+floor=0", "1 to 5"),
        ("river+layers=2/6", "1 to 5"),
        ("river@fixed:2+floor=2", "no option 'floor=2'"),
        ("masking@replay+depths=7", "0 to 6"),
        ("sequence+head=brass", "lens or balcony"),
        ("sequence+depth=0", "1 to 6"),
        ("skipdecode+n_min=0", "SkipDecode needs"),
        ("skipdecode+n_min=-3", "SkipDecode needs"),
        ("skipdecode+warm_up=-1", "SkipDecode needs"),
        ("skipdecode+horizon=0", "SkipDecode needs"),
        ("recompute+cap=-4", "no count"),
        ("replay+cap=-1", "no count"),
        ("verified+k=-1", "no count"),
        ("verified+k=2+k=3", "twice"),
        ("sequence+depth=7", "1 to 6"),
        ("river:95", "from -2"),
        ("river:-2.01", "from -2"),
        ("river:0,95", "must be a number"),
        ("masking@margin:inf", "must be a number"),
        ("masking@fixed:x", "whole number from 0 to 6"),
        ("masking@fixed:-1", "whole number from 0 to 6"),
        ("masking@fixed:nan", "whole number from 0 to 6"),
        ("river+floor=4+layers=2/3", "at or beyond the floor of 4"),
        # names that would wear a rule or a value that does not act
        ("backbone@fixed:1", "no exit rule to choose"),
        ("backbone:0.95", "takes no value"),
        ("backbone@similarity:0.95", "no exit rule to choose"),
        ("int4@similarity:0.5", "no exit rule to choose"),
        ("int4:0.5", "takes no value"),
        ("verified@fixed:3", "no exit rule to choose"),
        ("verified:0.9", "takes no value"),
        ("skipdecode@similarity:0.9", "no exit rule to choose"),
        ("river@never:1", "takes no value"),
        ("river@replay", "needs the depths"),
        ("river@replay:1+depths=2", "takes no value"),
        ("sequence@replay+depths=2", "does not take the exit rule replay"),
        ("sequence:0.5+depth=3", "not both"),
        ("sequence@fixed:2+depth=3", "not both"),
        ("sequence+depth=3+floor=2", "not both"),
    ],
)
def test_methods_that_make_no_sense_get_a_sentence(tiny, text, says):
    with pytest.raises(InputError, match=says):
        parse_methods([text], None, tiny)


@pytest.fixture(scope="module", params=["plain", "compiled"])
def every_way(request):
    """The tiny model with layers run operation by operation, and in compiled code."""
    model = tiny_model()
    if request.param == "compiled":
        if not any(map(shutil.which, ("g++", "clang++", "c++"))):
            pytest.skip("no C++ compiler")
        NATIVE.start(cache_dir() / "native")
        assert NATIVE.wait(), NATIVE.reason
        for blocks in (model.decoder.blocks, model.river.blocks):
            blocks.stack = NATIVE.stack(model.decoder, blocks, True)
    return model


VALUES = {
    "similarity": ":0.5",
    "maxprob": ":0.004",
    "margin": ":0.0005",
    "entropy": ":0.001",
    "fixed": ":3",
    "replay": "+depths=6/2/4/1",
    "never": "",
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", [None, *VALUES])
def test_every_method_with_every_rule_runs_or_is_refused_before_the_run(every_way, method, rule):
    text = method if rule is None else f"{method}@{rule}{VALUES[rule]}"
    if rule is not None and rule not in METHODS[method].rules:
        with pytest.raises(InputError, match="exit rule"):
            parse_methods([text], None, every_way)
        return
    trace = Trace.from_events(compare(every_way, "Hello", (text,), tau=0.5, max_new_tokens=8))
    (lane,) = trace.lanes.values()
    assert (lane.end["reason"], lane.end["message"], len(lane.tokens)) == ("length", None, 8)
    if rule == "fixed":
        assert {token["exit_layer"] for token in lane.steps} <= {3, 6}  # 6: a cap of pending tokens


def test_a_lane_that_follows_rivers_exits_wears_no_rule_of_its_own(tiny):
    header = next(compare(tiny, "Hello", ("backbone", "river:0.5", "masking@fixed:2", "recompute:0.9+cap=3+floor=2"), mode="same-exits"))[
        "header"
    ]
    labels = {lane["id"]: lane["label"] for lane in header["lanes"]}
    assert labels == {"backbone": "Backbone", "river": "River, tau 0.5", "masking": "KV masking", "recompute": "Recompute, cap 3"}


def test_a_floor_and_allowed_depths_bound_the_exits(tiny):
    lanes = Trace.from_events(
        compare(tiny, "Hello", ("river:-2+floor=3", "river:-2+layers=2/5", "masking@margin:-1+floor=2"), max_new_tokens=6)
    ).lanes
    depths = {name: {t["exit_layer"] for t in lane.tokens[1:]} for name, lane in lanes.items()}
    assert depths == {"river": {3}, "river-2": {2}, "masking": {3}}
