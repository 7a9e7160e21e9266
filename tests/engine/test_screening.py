"""The screened head gives the full head's token, always, and says nothing about the others."""

import copy
import dataclasses

import pytest
import torch

from river_core import Trace, compare
from river_core.decoder import rms_norm
from river_core.loading import cache_dir
from river_core.methods import parse_methods
from river_core.native import NATIVE, find_compiler
from river_core.screening import MOST, Screen
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def library():
    NATIVE.start(cache_dir() / "native")
    assert NATIVE.wait(), NATIVE.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_the_best_row_is_the_full_heads_for_easy_and_for_crowded_races(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2000, 96, generator=generator)
    weight[1000:1040] = weight[7] * (1 + 1e-3 * torch.randn(40, 1, generator=generator))  # rows that all but tie
    weight[1500] = weight[20]  # and two that do
    weight = (weight * 0.2).to(dtype)
    screen, found = Screen(weight), 0
    for i in range(300):
        x = (torch.randn(1, 96, generator=generator) + 3 * (weight[7 if i % 3 else 20].float())).to(dtype)
        state, norm = x.float(), torch.rand(96, generator=generator) + 0.5
        read = torch.ops.river_native.head_input(state, norm, 1e-5, dtype)
        torch.testing.assert_close(read, rms_norm(state, norm, 1e-5, dtype))
        full, screened = torch.ops.river_native.dense_rows(read, weight)[0], screen(state, norm, 1e-5)
        if screened is None:
            continue
        found += 1
        assert screened.argmax() == int(full.argmax())
        assert 0 < len(screened.rows) <= MOST
        assert torch.equal(screened.exact, full[screened.rows])
    assert found > 200


@torch.inference_mode()
def test_no_row_is_further_from_its_score_than_the_bound_says():
    weight = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    weight[3] *= 50  # one coordinate's step must not be another row's
    screen = Screen(weight)
    restored = screen.codes.float() * screen.scales[:, None]
    assert torch.allclose((restored - weight).norm(dim=1), screen.errors, rtol=1e-5)
    for _ in range(50):
        x = torch.randn(64)
        assert bool(((restored @ x - weight @ x).abs() <= screen.errors * x.norm() * (1 + 1e-5) + 1e-5).all())


@torch.inference_mode()
def test_when_too_many_rows_are_in_the_race_the_full_head_runs():
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(2)).expand(MOST + 1, 64).contiguous()
    assert Screen(weight)(weight[:1], torch.ones(64), 0.0) is None
    assert Screen(weight[:9])(weight[:1], torch.ones(64), 0.0).token == 0  # the first of equals
    assert Screen(weight[:9])(torch.full((1, 64), torch.nan), torch.ones(64), 0.0) is None
    model = tiny_model()
    model.decoder.screen = Screen(weight)
    lane = parse_methods(("backbone",), None, model)[0].build(model)
    lane.greedy = True
    assert bool(lane.answer(torch.randn(1, 64)).isfinite().all())


@pytest.mark.parametrize(
    "method", ["backbone", "river:0.5", "masking:0.5", "recompute:0.5", "verified+k=2", "river@maxprob:0.01", "sequence@fixed"]
)
def test_greedy_lanes_write_the_same_and_their_traces_keep_true_probabilities(tiny, method):
    def run(model, **options):
        return next(iter(Trace.from_events(compare(model, "Hello there", (method,), max_new_tokens=20, **options)).lanes.values()))

    screened = tiny_model()
    screened.decoder.screen = Screen(screened.decoder.lm_head.weight)
    for a, b in zip(run(tiny).tokens, run(screened).tokens, strict=True):
        assert a["id"] == b["id"] and a["exit_layer"] == b["exit_layer"] and a["top5"] == b["top5"]
    drawn = run(tiny, temperature=1.0, seed=3), run(screened, temperature=1.0, seed=3)
    assert drawn[0].token_ids == drawn[1].token_ids


def test_same_text_runs_compare_whole_distributions(tiny):
    screened = tiny_model()
    screened.decoder.screen = Screen(screened.decoder.lm_head.weight)
    found = [
        Trace.from_events(compare(model, "Hello", ("backbone", "int4"), max_new_tokens=8, mode="same-text")) for model in (tiny, screened)
    ]
    # The final norm differs in its last bit, and similarities and divergences of a trace are rounded.
    assert found[0].agreement("int4") == pytest.approx(found[1].agreement("int4"), abs=1e-6)
    assert 0 < found[1].agreement("int4")["kl"] < 100


@pytest.mark.parametrize(
    ("wanted", "dtype", "microseconds", "screened"),
    [
        ("auto", torch.bfloat16, (900, 500), True),
        ("auto", torch.bfloat16, (500, 900), False),
        ("auto", torch.float32, None, False),  # the exact mode
        (True, torch.bfloat16, None, True),
        (True, torch.float32, None, True),
        (False, torch.bfloat16, None, False),
    ],
)
def test_the_head_is_screened_where_that_is_asked_for_or_faster(monkeypatch, wanted, dtype, microseconds, screened):
    model = tiny_model(dtype=dtype)
    model.compiled, model.screens, model.products_wanted = None, wanted, "aten"
    took = iter(microseconds or ())
    monkeypatch.setattr("river_core.model.time_on_one_core", lambda layers, x: next(took))  # full, then screened
    assert model.compile(), model.notes
    facts = model.describe()
    assert (model.decoder.screen is not None) == screened == ("screened" in facts["head"]) == (facts["head"] != "full")
    assert ("head" in facts["pinned"]) == (wanted != "auto")
    if microseconds:
        assert f"{microseconds[1]} us screened in 8 bits, {microseconds[0]} us in full" in " ".join(facts["reasons"])
    assert model.decoder.lm_head.ours or not screened  # a token may not hang on which of the two ran


def test_the_default_models_screened_head_gives_the_full_heads_tokens(default_model):
    """Screened whatever the stopwatch said here."""
    decoder = copy.copy(default_model.decoder)
    decoder.lm_head = copy.copy(decoder.lm_head)
    decoder.lm_head.ours, decoder.screen = True, Screen(decoder.lm_head.weight)
    model = dataclasses.replace(default_model, decoder=decoder)
    seen, screened = [], decoder.largest

    def spy(hidden_state):
        found = screened(hidden_state)
        if found is not None:
            seen.append((found.argmax(), int(decoder.head(hidden_state)[0].argmax()), len(found.rows)))
        return found

    decoder.largest = spy
    lanes = Trace.from_events(compare(model, "Why is the sky blue?", ("river:0.95", "backbone"), max_new_tokens=16)).lanes
    tokens = sum(len(lane.tokens) for lane in lanes.values())
    assert len(seen) > 0.8 * tokens and all(a == b for a, b, _ in seen)
    assert min(kept for _, _, kept in seen) < 100  # it did screen
