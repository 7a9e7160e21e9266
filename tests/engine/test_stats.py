"""Intervals over prompts hold what they promise, and say when they can promise nothing."""

import json

import numpy as np
import pytest

from river_core.measure.stats import FEWEST, correlation, in_words, interval, interval_of, verdict


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    """Answers that differ as wholes: an interval over tokens would hold the truth in about a third of these cases."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        quality = rng.beta(8, 2, size=20)  # of an answer; mean 0.8
        found = interval(rng.binomial(64, quality), [64] * 20, draws=999)
        held += found["low"] <= 0.8 <= found["high"]
    assert 0.88 <= held / 200 <= 0.99  # 95 % nominal, 20 prompts


def test_pairing_sees_a_difference_that_is_smaller_than_the_spread_of_prompts():
    rng = np.random.default_rng(2)
    hard = rng.integers(20, 60, size=20)
    own, other = hard + rng.integers(1, 4, size=20), hard
    paired = interval(own, [64] * 20, other=other)
    assert paired["within_noise"] is False and 0 < paired["low"] < paired["value"] < paired["high"]
    a, b = interval(own, [64] * 20), interval(other, [64] * 20)
    assert a["low"] < b["high"], "unpaired, the two overlap"
    assert verdict(paired) == "beyond noise"


def test_what_covers_zero_is_within_noise():
    found = interval([60, 50, 55, 58, 52, 60], [64] * 6, other=[58, 52, 56, 57, 53, 59])
    assert found["within_noise"] is True and verdict(found) == "within noise"
    assert found["value"] == pytest.approx(0, abs=0.01)


def test_longer_answers_weigh_more_and_empty_ones_nothing():
    assert interval([10, 0, 0], [10, 90, 0]) == {"value": 0.1, "low": None, "high": None, "n": 2}
    assert interval([], []) == {"value": None, "low": None, "high": None, "n": 0}


def test_few_prompts_get_no_interval():
    few = interval([1] * (FEWEST - 1), [2] * (FEWEST - 1), other=[0] * (FEWEST - 1))
    assert few["low"] is few["within_noise"] is None and "too few" in verdict(few)
    assert interval([1, 2, 1, 2, 1], [2] * 5)["low"] is not None


def test_prompts_that_all_say_the_same_have_an_interval_without_width():
    same = interval([64] * 8, [64] * 8, other=[64] * 8)
    assert (same["value"], same["low"], same["high"], same["within_noise"]) == (0, 0, 0, True)
    assert interval_of([2.0] * 6, np.median) == {"value": 2.0, "low": 2.0, "high": 2.0, "n": 6}


def test_the_same_numbers_give_the_same_interval_and_json():
    rng = np.random.default_rng(3)
    values = rng.normal(size=12)
    assert interval_of(values, np.median) == interval_of(values, np.median)
    json.dumps(interval(values, [1] * 12, other=values[::-1]), allow_nan=False)


def test_correlation_is_pearsons_over_all_tokens():
    rng = np.random.default_rng(4)
    pairs = [np.stack([x := rng.normal(size=30), x + rng.normal(size=30)], 1) for _ in range(10)]
    found = correlation(pairs)
    assert found["value"] == pytest.approx(np.corrcoef(np.concatenate(pairs).T)[0, 1])
    assert found["low"] < found["value"] < found["high"] and found["n"] == 10
    assert correlation([[[1, 1], [1, 1]]] * 6)["value"] is None  # no spread, no correlation
    assert correlation([])["value"] is None


def test_figures_are_written_with_their_interval():
    assert in_words({"value": 0.8741, "low": 0.851, "high": 0.8964}) == "0.874 (0.851 - 0.896)"
    assert in_words({"value": -0.01, "low": -0.02, "high": 0.005}, signed=True) == "-0.010 (-0.020 to +0.005)"
    assert in_words({"value": 1.0, "low": None, "high": None}, 1) == "1.0"
