"""Compiled layers agree with the plain ones, are swapped in only when they do, and are never waited for unasked."""

import shutil
import time

import pytest
import torch

from river_core import Trace, compare
from river_core.kernels import Dense
from river_core.kv_cache import BACKBONE, RIVER
from river_core.loading import cache_dir
from river_core.native import NATIVE, Native
from tests.tiny import configs, tiny_model

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


@pytest.mark.parametrize("name", configs())
@torch.inference_mode()
def test_every_family_gives_the_same_states_and_cache(name):
    model = tiny_model(configs()[name])
    for blocks, owner in ((model.decoder.blocks, BACKBONE), (model.river.blocks, RIVER)):
        plain, plain_cache = decode(model, blocks, owner)
        blocks.stack = NATIVE.stack(model.decoder, blocks)
        assert blocks.stack is not None
        compiled, cache = decode(model, blocks, owner)
        torch.testing.assert_close(compiled, plain, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(cache.keys_values, plain_cache.keys_values, atol=2e-4, rtol=1e-4)
        assert (cache.owner == plain_cache.owner).all() and (cache.filled_at == plain_cache.filled_at).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_16_bit_layers_stay_within_their_rounding(dtype):
    model = tiny_model(dtype=dtype)
    for blocks, owner in ((model.decoder.blocks, BACKBONE), (model.river.blocks, RIVER)):
        plain, _ = decode(model, blocks, owner)
        blocks.stack = NATIVE.stack(model.decoder, blocks)
        compiled, _ = decode(model, blocks, owner)
        apart = (compiled - plain).norm() / plain.norm()
        assert 0 < apart < (2e-3 if (dtype, owner) == (torch.float16, BACKBONE) else 2e-2)  # 4-bit products compute in bfloat16


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


def test_layers_that_disagree_are_not_used(monkeypatch):
    model = tiny_model()
    model.compiled = None
    right = NATIVE.stack

    def wrong(decoder, blocks):
        broken = tiny_model(seed=1)
        return right(broken.decoder, broken.decoder.blocks)

    monkeypatch.setattr(NATIVE, "stack", wrong)
    assert model.compile() is False and model.decoder.blocks.stack is None
    assert "not used" in model.notes[-1]


@torch.inference_mode()
def test_what_the_compiled_code_does_not_know_runs_plainly():
    model = tiny_model(bits=8, group_size=32, dtype=torch.bfloat16)
    stacks = [NATIVE.stack(model.decoder, blocks) for blocks in (model.decoder.blocks, model.river.blocks)]
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
