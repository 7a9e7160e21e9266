"""Measurements report what they measured; here on a tiny model, where exactness can be asked for."""

import json

import pytest

from river_core import InputError
from river_core.measure.fidelity import METHODS, check_verified, fidelity, format_fidelity
from river_core.measure.prompts import read_prompts
from river_core.measure.speed import spread


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
    ],
)
def test_prompt_files_that_cannot_be_used_get_a_sentence(tmp_path, content, says):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        read_prompts(path)


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


def test_verified_river_agrees_with_the_backbone_under_the_near_tie_rule(tiny):
    facts = check_verified(tiny, ["Hello", "What is a river?"], tokens=12, k=3, report=lambda line: None)
    assert facts["tokens"] == 24 and facts["near_tie_agreement"] == 1.0 and facts["worst_gap"] < 1e-3
    assert 0 <= facts["acceptance"] <= 1 <= facts["tokens_per_cycle"] <= 4


def test_spread_is_median_least_and_greatest():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
