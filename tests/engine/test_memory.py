"""Memory of a method against context length: what is computed is what is measured, and what does not fit is only computed."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from river_core.cli import main
from river_core.decoder import DecoderConfig
from river_core.errors import InputError
from river_core.measure.memory import (
    GIB,
    PAPER,
    beside,
    computed_sizes,
    default_depth,
    format_memory,
    measured_caches,
    measured_sizes,
    memory,
    memory_of_shape,
    shape_sizes,
    table,
)
from river_core.measure.shapes import SHAPES
from river_core.offload import ROOM
from tests.engine.test_offload import MEDIUM, needs_linux
from tests.tiny import configs, tiny_model


def silent(line):
    pass


@pytest.fixture(scope="module")
def medium():
    """A model of some hundred megabytes in float32, with a river in the packed kernel's layout."""
    model = tiny_model(MEDIUM)
    model.decoder.new_cache(1)
    return model


@needs_linux
def test_what_is_computed_is_what_is_measured(medium):
    measured = measured_sizes(medium)
    computed = computed_sizes(medium.config, medium.plan, tied=False)
    assert measured.how == "measured" and computed.how == "computed"
    for part in ("layer", "river", "head", "kv_token"):
        assert getattr(measured, part) == pytest.approx(getattr(computed, part), rel=0.01)
    caches = measured_caches(medium, [1000, 3000], silent)
    for context, (size, how) in caches.items():
        assert how == "measured" and size == pytest.approx(computed.kv_token * context, rel=0.01)
    assert set(caches) == {1000, 3000}


@pytest.mark.parametrize(("bits", "kernel"), [(4, "int4"), (4, "dequantised"), (8, "int8")])
def test_every_layout_of_the_river_is_computed_right(bits, kernel):
    from river_core.decoder import Decoder
    from river_core.kernels import choose_kernels
    from river_core.river import River
    from tests.tiny import random_model

    config = configs()["llama"]
    weights = random_model(config).state_dict()
    plan = choose_kernels("cpu", 64, 128, torch.bfloat16, bits, 32, river=kernel)
    decoder = Decoder(config, weights, plan)
    sizes = computed_sizes(decoder.config, plan, tied=False)
    assert sizes.river == River(decoder, weights).nbytes
    assert sizes.backbone() == sum(block.nbytes for block in decoder.blocks)
    assert sizes.kv_token * 7 == decoder.new_cache(7).nbytes


def test_a_cache_that_does_not_fit_is_computed_and_never_allocated(medium, monkeypatch):
    monkeypatch.setattr("river_core.measure.memory.available_memory", lambda: 10 << 20)
    caches = measured_caches(medium, [100, 1 << 24], silent)
    assert set(caches) == {100}
    rows = table(measured_sizes(medium), 2, [100, 1 << 24], caches)
    assert {(row["context"], row["how"]["kv"]) for row in rows} == {(100, caches[100][1]), (1 << 24, "computed")}
    assert all(row["how"]["total"] == "computed" for row in rows if row["context"] == 1 << 24)


def test_a_shape_is_computed_from_its_config_alone(monkeypatch):
    for name in ("empty", "zeros", "randint"):
        monkeypatch.setattr(torch, name, lambda *args, **kwargs: pytest.fail("something was allocated"))
    result = memory_of_shape("llama3.1-8b", SHAPES["llama3.1-8b"](), torch.bfloat16, 5)
    rows = {row["method"]: row for row in result["rows"] if row["context"] == 65536}
    # Weights and cache of the backbone are the paper's peak to the last digit, in units of 2^30 bytes.
    assert rows["backbone"]["total"] / GIB == pytest.approx(PAPER["llama3.1-8b"][65536]["backbone"], abs=0.005)
    assert rows["backbone"]["paper"] == 22.96 and "masking" not in rows
    assert rows["river, offloaded"]["backbone"] == (5 + ROOM) * rows["river"]["backbone"] // 32
    assert all(set(row["how"].values()) == {"computed"} for row in result["rows"])
    assert "peak memory of a process" in format_memory(result) and result["beside"]["rest"] is None
    assert "paper: 22.96" in format_memory(result) and "(computed)" in format_memory(result)


def test_what_no_row_counts_is_told_apart(tiny, medium):
    sizes = measured_sizes(medium)
    apart = beside(sizes, [100, 1000], medium)
    assert apart["context"] == 1000 and apart["rope"] == 1000 * medium.config.head_dim * 4
    assert apart["prompt"] == max(row["prompt"] for row in table(sizes, 2, [100, 1000]))
    weights = sizes.backbone() + sizes.river + sizes.head
    assert apart["process"] > weights, "the system counts everything, libraries included"
    assert apart["rest"] == pytest.approx(apart["process"] - weights, abs=1)
    assert beside(sizes, [100])["process"] is None
    result = memory(tiny, 2, [32], [], tokens=4, repeats=1, report=silent)
    text = format_memory(result)
    assert "not in the table" in text and "this process holds" in text


@needs_linux
def test_second_copies_of_the_weights_are_counted_and_said(monkeypatch):
    from river_core.decoder import Decoder
    from river_core.kernels import choose_kernels
    from tests.tiny import random_model

    model = tiny_model(MEDIUM, dtype=torch.bfloat16)
    plan = replace(choose_kernels("cpu", 64, 128, torch.float16, 4, 32, river="dequantised"), many_dtype=torch.bfloat16, keep_many=True)
    model.decoder = Decoder(MEDIUM, random_model(MEDIUM).state_dict(), plan)
    before = measured_sizes(model)
    model.decoder.forward(list(range(64)), 0, model.decoder.new_cache(64))
    after = measured_sizes(model)
    assert before.many == 0 and after.many == pytest.approx(before.backbone(), rel=0.01)
    assert after.backbone() == pytest.approx(2 * before.backbone(), rel=0.01)


def test_what_a_prompt_takes_is_bounded_by_its_piece_and_the_rotary_table_is_counted(medium):
    sizes = shape_sizes(SHAPES["llama3.1-8b"](), torch.bfloat16, 4, 64)
    short, long = (next(iter(table(sizes, 4, [context]))) for context in (32768, 65536))
    layers, states = 32, 65536 * 4096 * 4
    assert 2 * states < long["prompt"] < 4 * states < layers * states / 4  # two layers' states, not those of all
    assert long["prompt"] < 2.1 * short["prompt"] and long["rope"] == 65536 * 128 * 4
    medium.decoder.rope.prepare(2048)
    assert next(iter(table(measured_sizes(medium), 2, [2048])))["rope"] == medium.decoder.rope.nbytes
    assert "rotary table" in format_memory(memory_of_shape("llama3.1-8b", SHAPES["llama3.1-8b"](), torch.bfloat16, 5))


def test_a_method_is_the_sum_of_what_it_needs():
    sizes = shape_sizes(SHAPES["llama3.2-1b"](), torch.bfloat16, 4, 64)
    rows = {row["method"]: row for row in table(sizes, 4, [4096], share=0.25)}
    assert rows["river"]["total"] - rows["river, offloaded"]["total"] == sizes.layer * (16 - 4 - ROOM)
    assert rows["river"]["total"] - rows["int4"]["total"] == sizes.layer * 16
    assert rows["masking"]["kv"] == rows["backbone"]["kv"] // 4 == sizes.kv_token * 1024
    assert all(row["total"] == row["backbone"] + row["river"] + row["head"] + row["kv"] for row in rows.values())
    assert sizes.backbone(15) == sizes.backbone(16) == sizes.backbone()  # room for two is not more than there are


def test_cost_compares_the_two_ways_of_one_model(tiny):
    result = memory(tiny, 2, [32, 64], ["backbone", "river@fixed:2"], tokens=6, repeats=2, report=silent)
    backbone, river = result["cost"].values()
    assert backbone["same_tokens"] and river["same_tokens"]
    assert backbone["fetched"]["layers"] == 4 and river["fetched"]["layers"] == 0 and backbone["prompt_fetched"] == 4
    assert backbone["ratio"]["min"] <= backbone["ratio"]["median"] <= backbone["ratio"]["max"]
    assert result["after"] == 2 and 0 < result["masking_share"] <= 1
    assert {row["method"] for row in result["rows"]} == {"backbone", "int4", "river", "river, offloaded", "masking"}
    assert result["offload"]["layers"] == 4 and json.loads(json.dumps(result)) == result
    text = format_memory(result)
    assert "same tokens" in text and "offloaded to file" in text


@needs_linux
def test_an_offloaded_backbone_is_measured_at_its_fullest(tiny, medium):
    result = memory(medium, 2, [32], [], tokens=4, repeats=1, report=silent)
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["river, offloaded"]["how"]["backbone"] == "measured"
    assert rows["river, offloaded"]["backbone"] == pytest.approx(rows["river"]["backbone"] * 4 / 6, rel=0.02)
    assert result["offload"]["resident_bytes"] == 0
    everything = memory(tiny, 6, [32], [], tokens=4, repeats=1, report=silent)
    assert everything["offload"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [({"after": 7}, "after layer 0 to 6"), ({"contexts": []}, "Context lengths"), ({"contexts": [0]}, "Context lengths"), ({"repeats": 0}, "one round")],
)  # fmt: skip
def test_what_cannot_be_used_gets_a_sentence(tiny, options, says):
    with pytest.raises(InputError, match=says):
        memory(tiny, **{"after": 2, "contexts": [8], "report": silent} | options)


def test_a_quarter_of_the_layers_stays_unless_it_is_said():
    assert [default_depth(layers) for layers in (1, 6, 30, 32)] == [1, 1, 7, 8]
    assert DecoderConfig.from_transformers(SHAPES["llama3.2-1b"]()).num_hidden_layers == 16


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(tiny, monkeypatch):
    monkeypatch.setattr("river_core.model.load", lambda *args, **kwargs: tiny)


def test_the_command_prints_memory_and_cost(loaded, capsys):
    arguments = [
        "memory",
        "--offload-after",
        "2",
        "--contexts",
        "32,64",
        "--tokens",
        "4",
        "--repeats",
        "1",
        "--methods",
        "backbone,river@fixed:2",
    ]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["after"] == 2 and list(result["cost"]) == ["backbone", "river@fixed:2"]
    assert main([*arguments[:-1], "none"]) == 0
    out = capsys.readouterr().out
    assert "river, offloaded" in out and "tokens/s" not in out


def test_a_shape_that_does_not_fit_is_computed_by_the_command(capsys, monkeypatch):
    monkeypatch.setattr("river_core.loading.available_memory", lambda: 1 << 30)
    assert main(["memory", "--shape", "llama3.1-8b", "--contexts", "65536", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {tag for row in rows for tag in row["how"].values()} == {"computed"}
    assert main(["memory", "--shape", "llama3.2-1b", "--contexts", "4096", "--computed", "--offload-after", "4"]) == 0
    assert "4 of 16 layers stay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "nope"], "no shape"),
        (["--computed"], "goes with --shape"),
        (["--contexts", "many"], "whole numbers"),
        (["--offload-after", "99"], "layer 0 to 6"),
        (["--shape", "llama3.1-8b", "--computed", "--dtype", "int3"], "dtype must be"),
    ],
)
def test_bad_input_gets_a_sentence(loaded, capsys, arguments, says):
    assert main(["memory", *arguments]) == 1
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err


def test_the_option_reaches_every_command_and_the_page(monkeypatch, capsys, tiny):
    seen = {}
    monkeypatch.setattr("river_core.model.load", lambda *args, **kwargs: seen.update(kwargs) or tiny)
    assert main(["generate", "Hi", "--max-new-tokens", "2", "--offload-after", "3"]) == 0 and seen["offload_after"] == 3
    assert main(["compare", "Hi", "--max-new-tokens", "2"]) == 0 and seen["offload_after"] is None
    # The page's program and its package share a name; the file itself is what users start.
    spec = importlib.util.spec_from_file_location("page_program", Path(__file__).parents[2] / "app.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.parse(["--offload-after", "4"]).offload_after == 4
