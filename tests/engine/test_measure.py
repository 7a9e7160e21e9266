"""Measurements report what they measured; here on a tiny model, where exactness can be asked for."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from river_core import InputError, LoadError, Trace, compare
from river_core.hqq import quantise
from river_core.kernels import Dense, Int4, Int8
from river_core.measure.fidelity import METHODS, check_verified, fidelity, format_fidelity, format_verified
from river_core.measure.figures import figures
from river_core.measure.floor import Floor, bytes_of_step, of_step, read_bytes
from river_core.measure.peers import CACHES, TransformersPeer
from river_core.measure.prompts import read_prompts
from river_core.measure.record import read_recipes, record
from river_core.measure.shapes import SHAPES, _llama, shaped_model
from river_core.measure.speed import bench, format_bench, spread, turns
from tests.tiny import configs, random_model

RECORDINGS = Path(__file__).parents[2] / "assets" / "recordings"


def test_prompts_come_from_a_prompt_or_question_field(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "one", "answer": "x"}\n\n{"prompt": "two"}\n{"prompt": "three"}\n')
    assert read_prompts(path) == ["one", "two", "three"]
    assert read_prompts(path, 2) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "ok"}\nnot json\n', "Line 2"),
        ('{"text": "x"}\n', "Line 1"),
        ("[1]\n", "Line 1"),
        ('{"prompt": " "}\n', "Line 1"),
        ('{"prompt": null}\n', "Line 1"),
        ('{"prompt": 5, "question": "ok"}\n', "Line 1"),
        ('\n\n{"prompt": "cut\n', "Line 3 .* no valid JSON"),
        ('{"prompt": "ok"}\n' + "[" * 100_000 + "\n", "Line 2 .* no valid JSON"),
        ('{"prompt": "ok"}\u2028{"prompt": "no"}\n', "Line 1"),
    ],
)
def test_prompt_files_that_cannot_be_used_get_a_sentence(tmp_path, content, says):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        read_prompts(path)


ODD = "one\u2028two\u2029three\x85four\x0bfive\x1csix"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_prompts_are_read_whatever_wrote_the_file(tmp_path, encoding, newline):
    lines = [
        json.dumps({"prompt": ODD}, ensure_ascii=False),
        "",
        "   ",
        json.dumps({"prompt": None, "question": "dös?"}, ensure_ascii=False),
    ]
    (tmp_path / "p.jsonl").write_bytes(newline.join(lines).encode(encoding))
    assert read_prompts(tmp_path / "p.jsonl") == [ODD, "dös?"]


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "ok"}\n{"prompt": "d\xf6s"}\n')
    with pytest.raises(InputError, match="Line 2 .* is not UTF-8 text"):
        read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(InputError, match="at least 1"):
        read_prompts(tmp_path / "p.jsonl", 0)


def test_a_missing_prompt_file_gets_a_sentence(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")


def test_fidelity_orders_the_strategies_as_theory_does(tiny):
    methods = ["river@fixed:3" if name == "river" else name for name in METHODS]
    result = fidelity(tiny, ["Hello", "What is a river?"], methods=methods, tokens=12, report=lambda line: None)
    lanes = result["lanes"]
    assert list(lanes) == list(METHODS)
    assert lanes["recompute"]["k_cos"] == pytest.approx(1, abs=1e-5) and lanes["recompute"]["holes"] == 0
    assert 1 > lanes["river"]["v_cos"] > lanes["propagation"]["v_cos"]
    assert lanes["masking"]["holes"] > 0 == lanes["propagation"]["holes"]
    table = format_fidelity(result)
    assert all(lane["label"] in table for lane in lanes.values())
    del result["traces"]
    json.dumps(result, allow_nan=False)


def test_fidelity_says_how_sure_it_is_and_what_is_within_noise(tiny):
    prompts = ["Hello", "What is a river?", "One, two", "Sky", "The end"]
    result = fidelity(tiny, prompts, methods=("backbone", "river@fixed:6", "int4", "masking@fixed:3"), tokens=6, report=lambda line: None)
    full, int4, masking = (result["lanes"][name] for name in ("river", "int4", "masking"))
    assert full["intervals"]["top1"] == {"value": 1, "low": 1, "high": 1, "n": 5}, "every layer of the backbone ran"
    for lane in (int4, masking):
        for figure in ("top1", "kl", "k_cos", "v_cos"):
            found = lane["intervals"][figure]
            assert found["value"] == pytest.approx(lane[figure], abs=1e-4) and found["low"] <= found["value"] <= found["high"]
    assert "against" not in int4 and masking["against"]["v_cos"]["within_noise"] is False
    assert masking["against"]["v_cos"]["value"] == pytest.approx(masking["v_cos"] - int4["v_cos"], abs=1e-4)
    text = format_fidelity(result)
    assert "n = 5 prompts" in text and "tokens/s in step" in text and "paired by prompt" in text


def test_answers_of_one_token_have_no_speed_and_no_agreement(tiny):
    result = fidelity(tiny, ["Hello"], methods=("backbone", "river"), tokens=1, report=lambda line: None)
    assert "intervals" not in result["lanes"]["river"] and "| - |" in format_fidelity(result)
    facts = check_verified(tiny, ["Hello"], tokens=1, report=lambda line: None)
    assert facts["tokens"] == facts["same_answers"] == 1 and facts["speed_up"] is None
    assert "no speed" in format_verified(facts)


def test_verified_river_agrees_with_the_backbone_under_the_near_tie_rule(tiny):
    facts = check_verified(tiny, ["Hello", "What is a river?"], tokens=12, k=3, report=lambda line: None)
    assert facts["tokens"] == 24 and facts["near_tie_agreement"] == 1.0 and facts["worst_gap"] < 1e-3
    assert 0 <= facts["acceptance"] <= 1 <= facts["tokens_per_cycle"] <= 4
    assert facts["same_answers"] == facts["prompts"] == facts["speed_up"]["n"] == 2
    assert "2 of 2 answers are the backbone lane's own" in format_verified(facts)


def test_answers_of_one_token_have_no_figures_and_crash_nothing(tiny, tmp_path):
    result = fidelity(tiny, ["Hello"], tokens=1, report=lambda line: None)
    table = format_fidelity(result)
    assert table.splitlines()[-1].endswith("| - | - | - | - | - | - | - |")
    del result["traces"]
    json.dumps(result, allow_nan=False)
    facts = check_verified(tiny, ["Hello"], tokens=1, report=lambda line: None)
    assert facts["tokens"] == 1 and facts["speed_up"] is facts["acceptance"] is facts["tokens_per_cycle"] is None
    json.dumps(facts, allow_nan=False)
    said = []
    paths = figures(tiny, ["Hello"], tmp_path / "out", taus=(0.5, 0.9), tokens=1, report=said.append)
    assert [path.suffix for path in paths] == [".csv"] * 5 + [".json"] and "nothing to draw" in said[-1]
    assert pd.read_csv(tmp_path / "out" / "time_per_token.csv")["ms_per_token"].isna().all()


def test_spread_is_median_least_and_greatest():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_figures_come_with_their_data(tiny, tmp_path):
    said = []
    paths = figures(tiny, ["Hello", "What is a river?"], tmp_path / "out", taus=(0.5, 0.9), tokens=10, report=said.append)
    names = {path.name for path in paths}
    tables = {
        name: pd.read_csv(tmp_path / "out" / f"{name}.csv")
        for name in ("exit_depths", "time_per_token", "early_similarity", "kv_by_layer", "theory_and_measured")
    }
    shares = tables["exit_depths"].groupby("level")["share"].sum()
    assert shares["relaxed"] == pytest.approx(1) and shares["strict"] == pytest.approx(1)
    assert set(tables["time_per_token"]["method"]) == set(METHODS) and (tables["time_per_token"]["ms_per_token"] > 0).all()
    scatter = tables["early_similarity"]
    assert scatter["pearson_r"].iloc[0] == pytest.approx(scatter["similarity"].corr(scatter["last_v_cosine"]))
    assert len(scatter) == 18  # two prompts, nine decode steps each
    layers = tables["kv_by_layer"]
    exact = layers[layers["method"] == "recompute"]
    assert exact["cosine"].to_numpy() == pytest.approx([1.0] * len(exact), abs=1e-4)
    theory = tables["theory_and_measured"]
    share = theory["layers_share"].iloc[0]
    assert 0 < share < 1
    # Skipping all layers leaves the head and the rest: the bound stays finite, and below the number of layers over the depth.
    assert theory["at_most"].to_numpy() == pytest.approx(1 / (1 - share * theory["skipped"]).to_numpy())
    assert (theory["at_most"] < 6 / theory["depth"].clip(lower=1e-9)).all()
    assert theory["prompts"].max() <= 2 and theory["low"].isna().all()
    pictures = [path for path in paths if path.suffix in (".svg", ".html")]
    assert len(pictures) == 5 and "run.json" in names
    if shutil.which("chromium"):
        assert all(path.suffix == ".svg" and path.read_text().startswith("<svg") for path in pictures), said


def test_a_recording_is_one_whole_run_with_its_idea_and_all_speeds(tiny, tmp_path):
    recipe = {
        "slug": "s", "title": "T", "idea": "I", "headline": "river", "prompt": "Hello", "methods": ["backbone", "river:0.5"],
        "options": {"max_new_tokens": 5},
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps([recipe]))
    trace = record(tiny, read_recipes(tmp_path / "r.json")[0], repeats=3, command="how")
    assert trace.header["recording"] == {"slug": "s", "title": "T", "idea": "I", "headline": "river", "command": "how"}
    speeds = trace.header["timing"]["tokens_per_second"]
    for lane in ("backbone", "river"):
        assert len(speeds[lane]) == 3 and round(trace.lanes[lane].tokens_per_second, 2) in speeds[lane]
    trace.save(tmp_path / "s.json.gz")
    assert Trace.load(tmp_path / "s.json.gz").header == trace.header


@pytest.mark.parametrize(
    ("text", "says"),
    [("no json", "no valid JSON"), ("{}", "not a list"), ('[{"slug": "x"}]', "Recipe 1 lacks title"), (None, "cannot be read")],
)
def test_bad_recipes_get_a_sentence(tmp_path, text, says):
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_recipes(path)


def test_the_bundled_recordings_are_what_their_recipes_say():
    recipes = read_recipes(RECORDINGS / "recipes.json")
    assert len(recipes) >= 5
    for number, recipe in enumerate(recipes, 1):
        trace = Trace.load(RECORDINGS / f"{number:02d}-{recipe['slug']}.json.gz")
        about = trace.header["recording"]
        assert {name: recipe[name] for name in ("slug", "title", "idea", "headline")} == {k: v for k, v in about.items() if k != "command"}
        assert trace.header["prompt"] == recipe["prompt"] and trace.done["reason"] == "finished"
        assert all(lane.end["reason"] in ("eos", "length") for lane in trace.lanes.values())


def test_bench_reports_speed_floor_and_shares_for_every_length(tiny):
    result = bench(tiny, methods=("backbone", "river:0.5"), tokens=6, repeats=2, peers=(), contexts=(20, 60), report=lambda line: None)
    assert [part["prompt_tokens"] for part in result["contexts"]] == pytest.approx([20, 60], abs=3)
    for part in result["contexts"]:
        for lane in part["lanes"].values():
            assert lane["tokens_per_second"]["min"] > 0 and lane["prefill_s"]["min"] > 0
            for yardstick in ("step_over_products", "step_over_bytes"):
                assert lane[yardstick]["min"] > 0
            assert sum(lane["shares"].values()) == pytest.approx(1, abs=0.01)
        layers = 6
        backbone, river = part["lanes"]["backbone"], part["lanes"]["river:0.5"]
        assert backbone["mean_depth"] == layers
        assert backbone["step_bytes"] > 0 < river["step_bytes"]
    assert set(result["ratios"]) == {"river:0.5 / backbone"} and len(result["rounds"]) == 2
    assert {"step / products", "step / bytes", "GB/s"} <= set(re.findall("step / products|step / bytes|GB/s", format_bench(result)))
    json.dumps(result, allow_nan=False)


def test_the_floor_grows_with_the_layers_that_ran():
    parts = {"backbone": 2.0, "river": 1.0, "head": 5.0, "kv_read": 0.5}
    assert of_step(parts, depth=3, river_layers=27) == 2 * 3 + 1 * 27 + 5 + 0.5 * 30
    assert of_step(parts, depth=3, river_layers=0) == 2 * 3 + 5 + 0.5 * 3


def test_everybody_has_one_turn_a_round_and_nobody_the_same_place_twice_in_a_row():
    order = list(turns("abc", 2))
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c"), (2, "a"), (2, "b")]


def test_a_step_reads_its_weights_once_and_the_cache_of_every_layer_that_ran(tiny):
    sizes = Floor(tiny).bytes()
    c = tiny.config
    wide, narrow = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    weights = c.hidden_size * (wide + narrow) + wide * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
    assert sizes["backbone"] == 4 * weights == sizes["river"], "in float32 the river is dequantised"
    assert sizes["head"] == 4 * c.vocab_size * c.hidden_size and sizes["kv_position"] == 4 * narrow
    assert bytes_of_step(sizes, 2, 4, 100) == 6 * 4 * weights + sizes["head"] + 6 * 100 * 4 * narrow


def test_packed_weights_are_read_as_the_kernel_holds_them():
    codes = quantise(torch.randn(64, 128), 4, 64, solver=False)
    assert read_bytes(Int4(codes)) == 64 * 128 // 2 + 64 * 2 * 2 * 2  # half a byte a weight; a bfloat16 scale and shift per group
    assert read_bytes(Dense(torch.randn(64, 128), dtype=torch.float16, many_dtype=torch.bfloat16, keep_many=True)) == 2 * 64 * 128
    assert read_bytes(Int8(quantise(torch.randn(64, 128), 8, 128, solver=False))) == 64 * 128 + 64 * (2 + 4)


def test_the_similarity_of_compiled_layers_is_said_to_be_in_the_rest(tiny, monkeypatch):
    result = bench(tiny, methods=("backbone",), tokens=4, repeats=1, peers=(), report=lambda line: None)
    assert result["lanes"]["backbone"]["shares"]["exit_test"] is not None and "in rest" not in format_bench(result)
    parts = {part: spread["median"] for part, spread in result["floor"].items()} | {"exit_test": None}
    monkeypatch.setattr(Floor, "measure", lambda self, context: parts)
    result = bench(tiny, methods=("backbone",), tokens=4, repeats=1, peers=(), report=lambda line: None)
    assert result["lanes"]["backbone"]["shares"]["exit_test"] is None and result["floor"]["exit_test"] is None
    assert "in rest" in format_bench(result)


@pytest.mark.parametrize(
    ("peers", "says"), [(("rocket",), "no peer"), (("llama.cpp",), "llama.cpp|GGUF"), (("transformers",), "checkpoint")]
)
def test_a_peer_that_cannot_run_is_explained(tiny, peers, says):
    with pytest.raises(InputError, match=says):
        bench(tiny, methods=("backbone",), tokens=2, repeats=1, peers=peers, report=lambda line: None)


def test_a_shape_has_the_sizes_of_its_model_and_leaves_where_it_is_told(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", lambda: _llama(64, 128, 4, 4, 2, 16, 300, True))
    model = shaped_model("small", dtype="bfloat16", compiled=False)
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.decoder.lm_head.shape) == (4, 64, (300, 64))
    trace = Trace.from_events(compare(model, "Hello", ("backbone", "int4", "river@fixed:1"), max_new_tokens=5))
    assert [lane.mean_depth for lane in trace.lanes.values()] == [4, 0, 1]
    for name in SHAPES:
        layers = SHAPES[name]().num_hidden_layers
        assert layers >= 4
    with pytest.raises(InputError, match="no shape"):
        shaped_model("huge")


def test_a_shape_that_does_not_fit_says_how_much_it_needs(monkeypatch):
    monkeypatch.setattr("river_core.measure.shapes.available_memory", lambda: 1 << 30)
    with pytest.raises(LoadError, match="needs about .* GB, and 1.1 GB are free"):
        shaped_model("llama3.1-8b", dtype="bfloat16", river_kernel="dequantised")


def test_transformers_decodes_in_the_setting_that_was_fastest_in_trials(tiny, tmp_path):
    random_model(configs()["llama"]).save_pretrained(tmp_path)
    said = []
    peer = TransformersPeer(dataclasses.replace(tiny, path=tmp_path), list(range(1, 12)), 4, said.append, CACHES[:2])
    tried = {setting: rate for setting, rate in peer.trials.items() if isinstance(rate, float)}
    assert {f"{dtype}, {attention}" for dtype in ("fp16", "bf16", "fp32") for attention in ("sdpa", "eager")} <= set(peer.trials)
    chosen = {setting: rate for setting, rate in tried.items() if setting.endswith("cache")}
    assert peer.label == "transformers generate, " + max(chosen, key=chosen.get)
    assert sum(setting.endswith("cache") for setting in peer.trials) == 2 and len(said) == 3 + 2
    found = peer.run(6)
    assert found["tokens_per_second"] > 0 and found["prefill_s"] > 0
