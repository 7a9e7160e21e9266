"""Sampling: what is kept, what is drawn, what is refused."""

import pytest
import torch

from river_core.errors import InputError
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
