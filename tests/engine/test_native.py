"""Compiled layers agree with the plain ones, are swapped in only when they do, and are never waited for unasked."""

import dataclasses
import itertools
import platform
import shutil
import subprocess
import sys
import time

import pytest
import torch
from transformers import LlamaConfig

from river_core import Trace, compare
from river_core.hqq import quantise
from river_core.kernels import Dense, Int4
from river_core.kv_cache import BACKBONE, RIVER
from river_core.loading import cache_dir
from river_core.native import NATIVE, Native
from tests.tiny import SIZE, configs, tiny_model

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def library():
    NATIVE.start(cache_dir() / "native")
    assert NATIVE.wait(), NATIVE.reason


def decode(model, blocks, owner, steps=30):
    """States of every block over some steps, and the cache."""
    decoder = model.decoder
    cache = decoder.new_cache(steps + 1)
    decoder.forward([7], 0, cache)
    found = []
    for position in range(1, steps + 1):
        rows = decoder.rows(position, 1, cache)
        found += decoder.run_blocks(blocks, 0, len(blocks), decoder.embed([position % 250]), rows, cache, owner)
        cache.length = position + 1
    return torch.cat(found), cache


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("name", configs())
@torch.inference_mode()
def test_every_family_gives_the_same_states_and_cache(name, ours):
    model = tiny_model(configs()[name])
    for blocks, owner in ((model.decoder.blocks, BACKBONE), (model.river.blocks, RIVER)):
        plain, plain_cache = decode(model, blocks, owner)
        blocks.stack = NATIVE.stack(model.decoder, blocks, ours)
        assert blocks.stack is not None
        compiled, cache = decode(model, blocks, owner)
        torch.testing.assert_close(compiled, plain, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(cache.keys_values, plain_cache.keys_values, atol=2e-4, rtol=1e-4)
        assert (cache.owner == plain_cache.owner).all() and (cache.filled_at == plain_cache.filled_at).all()


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_16_bit_layers_stay_within_their_rounding(dtype, ours):
    model = tiny_model(dtype=dtype)
    for blocks, owner in ((model.decoder.blocks, BACKBONE), (model.river.blocks, RIVER)):
        plain, _ = decode(model, blocks, owner)
        blocks.stack = NATIVE.stack(model.decoder, blocks, ours)
        compiled, _ = decode(model, blocks, owner)
        apart = (compiled - plain).norm() / plain.norm()
        # The plain path rounds every row to 16 bits before a product, ours does not: they differ by that rounding.
        assert 0 < apart < (5e-3 if (dtype, owner) == (torch.float16, BACKBONE) else 2e-2)


@torch.inference_mode()
def test_any_number_of_threads_makes_the_same_states():
    """Threads meet between the parts of a layer; one that went on too early would read what another has not written yet."""
    model = tiny_model()
    threads = torch.get_num_threads()
    try:
        for blocks, owner in ((model.decoder.blocks, BACKBONE), (model.river.blocks, RIVER)):
            blocks.stack = NATIVE.stack(model.decoder, blocks, True)
            torch.set_num_threads(1)
            alone, _ = decode(model, blocks, owner, steps=100)
            for several in (2, 3, 5):  # 3 and 5 share heads and rows unevenly, and are more than most machines that run this have
                torch.set_num_threads(several)
                together, _ = decode(model, blocks, owner, steps=100)
                assert torch.equal(together, alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "method", ["backbone", "int4", "river:0.5", "masking:0.5", "recompute:0.5", "propagation:0.5", "monotone:0.5", "sequence@fixed", "verified+k=2", "skipdecode", "river@maxprob:0.01"]
)  # fmt: skip
def test_every_strategy_decodes_the_same_tokens_and_slots(tiny, method):
    def run(model):
        return next(iter(Trace.from_events(compare(model, "Hello there", (method,), max_new_tokens=24)).lanes.values()))

    compiled_model = tiny_model()
    compiled_model.compiled = None
    plain, compiled = run(tiny), run(compiled_model)
    assert compiled_model.compiled and compiled_model.describe()["layers"] == "compiled" and not tiny.compiled
    for a, b in zip(plain.tokens, compiled.tokens, strict=True):
        for name in ("id", "exit_layer", "layers_run", "river_layers", "kv", "tested"):
            assert a[name] == b[name]
        assert a["similarity"] == pytest.approx(b["similarity"], abs=1e-3)


@pytest.mark.parametrize("rows, columns, group", [(16, 32, 32), (48, 192, 64), (576, 1536, 64), (32, 256, 128), (64, 512, 256)])
@torch.inference_mode()
def test_4_bit_products_in_blocks_are_finer_than_in_bfloat16(rows, columns, group):
    torch.manual_seed(0)
    layer, bias = quantise(torch.randn(rows, columns), 4, group), torch.randn(rows)
    aten, ours = Int4(layer, bias), Int4(layer, bias)
    weight = aten.dense_weight()
    ours.adopt()
    assert torch.equal(ours.dense_weight(), weight) and ours.nbytes < aten.nbytes
    x = torch.randn(3, columns)
    x[1, 5] = 80  # an outlier costs its own group precision, and no other
    x[2] = 0
    exact = x.double() @ weight.double().T + bias
    apart = [float((product(x) - exact).norm()) for product in (aten, ours)]
    assert apart[1] < 0.1 * apart[0]
    many = torch.randn(40, columns)
    torch.testing.assert_close(ours(many), aten(many))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_dense_products_sum_in_float32_for_any_width(dtype):
    for rows, columns in ((1, 1), (5, 7), (33, 100), (300, 576)):
        weight, x = torch.randn(rows, columns).to(dtype), torch.randn(2, columns)
        exact = x.double() @ weight.double().T
        torch.testing.assert_close(torch.ops.river_native.dense_rows(x, weight).double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("context", [1, 2, 63, 64, 65, 129, 700, 2000])
@torch.inference_mode()
def test_attention_over_short_and_long_contexts(context):
    """One layer of a model that can read that far, against the plain path; chunks and their borders are the point."""
    model = tiny_model(LlamaConfig(**{**SIZE, "num_hidden_layers": 1, "max_position_embeddings": 4096}))
    decoder, found = model.decoder, []
    keys_values = torch.randn(decoder.new_cache(context).keys_values.shape)
    for stack in (None, NATIVE.stack(decoder, decoder.blocks, True)):
        decoder.blocks.stack = stack
        cache = decoder.new_cache(context)
        cache.keys_values.copy_(keys_values)
        rows = decoder.rows(context - 1, 1, cache)
        found.append(decoder.run_blocks(decoder.blocks, 0, 1, decoder.embed([3]), rows, cache, BACKBONE)[0])
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-5)


OLDER = """
import sys, torch
from river_core import native
native._machine_flags = lambda: [*sys.argv[2].split(), "-fopenmp"]
from pathlib import Path
from river_core.native import NATIVE
NATIVE.start(Path(sys.argv[1]))
assert NATIVE.wait(), NATIVE.reason
from river_core.hqq import quantise
from river_core.kernels import Int4
from river_core.screening import Screen
torch.manual_seed(0)
ops = torch.ops.river_native
weight, x = torch.randn(48, 200), torch.randn(1, 200)
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    torch.testing.assert_close(ops.dense_rows(x, weight.to(dtype)), x @ weight.to(dtype).float().T, atol=1e-4, rtol=1e-4)
screen, norm = Screen(weight), torch.ones(200)
read = ops.head_input(x, norm, 0.0, torch.float32)
torch.testing.assert_close(read, torch.nn.functional.rms_norm(x, (200,)))
assert screen(x, norm, 0.0).token == int((read @ weight.T).argmax())
layer = Int4(quantise(torch.randn(48, 192), 4, 64))
dense, x = layer.dense_weight(), torch.randn(1, 192)
if ops.has_int4():
    layer.adopt()
    torch.testing.assert_close(layer(x), x @ dense.T, atol=1e-3, rtol=1e-3)
print("has int4", ops.has_int4())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64 processors")
def test_processors_without_avx512_compute_the_same(tmp_path):
    builds = {"-march=x86-64-v3": True, "-march=x86-64": False}
    running = [
        (
            subprocess.Popen(
                [sys.executable, "-c", OLDER, str(tmp_path), flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ),
            int4,
        )
        for flags, int4 in builds.items()
    ]
    for process, int4 in running:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        assert f"has int4 {int4}" in out


def test_the_faster_products_are_chosen_by_measuring(monkeypatch):
    for slow, kind in ((("ours"), "ATen's"), (("ATen's"), "ours")):
        model = tiny_model(dtype=torch.bfloat16)
        model.compiled = None
        kinds = iter(("ours", "ATen's") * 2)
        monkeypatch.setattr("river_core.model._products_us", lambda stack, layers, kinds=kinds, slow=slow: 1 + (next(kinds) == slow))
        assert model.compile()
        assert all(f"products: {kind}" in reason for reason in model.product_reasons) and len(model.product_reasons) == 2
        assert (model.river.blocks[0].qkv.packed is None) == (kind == "ours") == model.decoder.lm_head.ours


def test_a_second_model_over_products_that_were_adopted_compiles_too(monkeypatch):
    model = tiny_model(dtype=torch.bfloat16)
    model.compiled = None
    tried = itertools.count()  # ours is tried first, so it is the faster one
    monkeypatch.setattr("river_core.model._products_us", lambda stack, layers: next(tried))
    assert model.compile() and model.products == {"backbone": "ours", "river": "ours"}
    second = dataclasses.replace(model, compiled=None, products={}, product_reasons=[])
    assert second.compile() and second.products["river"] == "ours"


def test_layers_that_disagree_are_not_used(monkeypatch):
    model = tiny_model()
    model.compiled = None
    right = NATIVE.stack

    def wrong(decoder, blocks, ours):
        broken = tiny_model(seed=1)
        return right(broken.decoder, broken.decoder.blocks, ours)

    monkeypatch.setattr(NATIVE, "stack", wrong)
    assert model.compile() is False and model.decoder.blocks.stack is None
    assert "not used" in model.notes[-1]


@torch.inference_mode()
def test_what_the_compiled_code_does_not_know_runs_plainly():
    model = tiny_model(bits=8, group_size=32, dtype=torch.bfloat16)
    stacks = [NATIVE.stack(model.decoder, blocks, True) for blocks in (model.decoder.blocks, model.river.blocks)]
    assert stacks[0] is not None
    assert (stacks[1] is None) == (not isinstance(model.river.blocks[0].qkv, Dense))


def test_compiling_is_not_waited_for_and_its_failure_is_a_sentence(tmp_path, monkeypatch):
    fresh = Native()
    start = time.perf_counter()
    monkeypatch.setattr("river_core.native.FLAGS", ["-no-such-flag"])
    fresh.start(tmp_path)
    assert time.perf_counter() - start < 1
    assert fresh.wait() is False and fresh.state == "failed"
    assert "could not be compiled" in fresh.reason and not list(tmp_path.iterdir())


def test_without_a_compiler_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("river_core.native.shutil.which", lambda name: None)
    fresh = Native()
    fresh.start(tmp_path)
    assert (fresh.state, fresh.wait()) == ("failed", False) and "no C++ compiler" in fresh.reason
