"""Sampling: what is kept, what is drawn, what is refused."""

import pytest
import torch

from river_core.errors import InputError, NotFinite
from river_core.sampling import Sampler, Sampling, probabilities

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])


def test_greedy_takes_the_most_probable_token():
    assert Sampler(Sampling())(LOGITS) == 4
    assert probabilities(LOGITS, Sampling()).tolist() == [0, 0, 0, 0, 1]


def test_top_k_and_top_p_keep_what_they_say():
    assert (probabilities(LOGITS, Sampling(1.0, top_k=2)) > 0).tolist() == [True, False, False, False, True]
    p = LOGITS.softmax(-1)
    nucleus = probabilities(LOGITS, Sampling(1.0, top_p=float(p[4]) + 0.01))
    assert (nucleus > 0).tolist() == [True, False, False, False, True]
    assert (probabilities(LOGITS, Sampling(1.0, top_p=0.01)) > 0).sum() == 1
    torch.testing.assert_close(probabilities(LOGITS, Sampling(1.0)), p)
    torch.testing.assert_close(probabilities(LOGITS, Sampling(0.5)), (LOGITS / 0.5).softmax(-1))


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-7])
def test_a_temperature_near_0_is_greedy(temperature):
    sampling = Sampling(temperature)
    assert sampling == Sampling(0.0) and Sampler(sampling)(LOGITS) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-6},
        {"temperature": 1e-6, "top_k": 3},
        {"temperature": 1e-6, "top_p": 1e-300},
        {"temperature": 1.0, "top_p": 5e-324},
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_sharp_settings_draw_the_most_probable_token_and_stay_numbers(options, scale):
    p = probabilities(LOGITS * scale, Sampling(**options))
    assert p.isfinite().all() and float(p.sum()) == pytest.approx(1) and int(p.argmax()) == 4
    assert {Sampler(Sampling(**options, seed=seed))(LOGITS * scale) for seed in range(5)} == {4}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_scores_that_are_no_numbers_are_never_drawn_from(value, options):
    logits = LOGITS.clone()
    logits[1] = value
    with pytest.raises(NotFinite, match="not finite"):
        Sampler(Sampling(1.0, **options))(logits)


def test_draws_follow_the_distribution():
    sampler = Sampler(Sampling(1.0, seed=3))
    counts = torch.bincount(torch.tensor([sampler(LOGITS) for _ in range(4000)]), minlength=5)
    expected = LOGITS.softmax(-1) * 4000
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 23.5  # the 0.9999 quantile at 4 degrees of freedom


def test_a_seed_repeats_and_another_differs():
    draws = {seed: [Sampler(Sampling(1.5, seed=seed))(torch.zeros(1000)) for _ in range(3)] for seed in (1, 2)}
    assert draws[1][0] == draws[1][1] and draws[1] != draws[2]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1}, {"temperature": "warm"}, {"temperature": float("nan")}, {"temperature": None},
        {"top_k": -1}, {"top_k": 2.5}, {"top_p": 0}, {"top_p": 1.5}, {"top_p": "x"}, {"seed": -1}, {"seed": float("inf")},
    ],
)  # fmt: skip
def test_values_out_of_range_get_a_sentence(bad):
    with pytest.raises(InputError, match="must be"):
        Sampling(**bad)
