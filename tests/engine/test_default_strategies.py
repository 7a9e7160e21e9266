"""The strategies on the packaged model. Bounds are asked of float32, whose numbers no processor changes; of the 16-bit model that a user gets, only what holds with any kernels."""

import pytest
import torch

from river_core.exit_rules import Never
from river_core.measure.fidelity import check_verified, fidelity
from river_core.methods import parse_methods
from river_core.strategies.river import RiverStrategy
from river_core.text import encode

PROMPTS = [
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "Write a short poem about a river.",
]


def test_on_the_same_exits_the_caches_differ_as_the_strategies_do(exact_model):
    lanes = fidelity(exact_model, PROMPTS, tokens=24, report=lambda line: None)["lanes"]
    assert lanes["recompute"]["k_cos"] > 0.9995 and lanes["recompute"]["v_cos"] > 0.9995
    assert lanes["river"]["v_cos"] > 0.96 and lanes["river"]["k_cos"] > 0.99
    assert max(lanes["propagation"]["v_cos"], lanes["masking"]["v_cos"]) < lanes["river"]["v_cos"]
    assert lanes["river"]["top1"] > 0.7 > max(lanes["masking"]["top1"], lanes["propagation"]["top1"])
    assert lanes["river"]["holes"] == lanes["recompute"]["holes"] == 0 < lanes["masking"]["holes"]


@pytest.mark.parametrize("k", [4, None])
def test_verified_river_is_the_backbones_text_under_the_near_tie_rule(default_model, k):
    facts = check_verified(default_model, PROMPTS, tokens=24, k=k, report=lambda line: None)
    assert facts["near_tie_agreement"] == 1.0 and facts["tokens"] > 0


def test_the_backbone_takes_some_of_the_rivers_drafts(exact_model):
    assert check_verified(exact_model, PROMPTS, tokens=24, k=4, report=lambda line: None)["acceptance"] > 0.3


@pytest.mark.parametrize("name", ["masking", "recompute", "propagation", "monotone"])
@torch.inference_mode()
def test_without_exits_every_strategy_is_the_plain_loop_bit_for_bit(default_model, name):
    ids = encode(default_model.tokenizer, PROMPTS[0], chat=True)
    plain = RiverStrategy(default_model, Never(default_model.config.num_hidden_layers))
    other = parse_methods([f"{name}:2"], None, default_model)[0].build(default_model)
    caches = plain.new_cache(len(ids) + 6), other.new_cache(len(ids) + 6)
    steps = plain.prefill(ids, caches[0]), other.prefill(ids, caches[1])
    for i in range(6):
        assert torch.equal(steps[0].logits, steps[1].logits)
        token = int(steps[0].logits.argmax())
        steps = plain.step(token, len(ids) + i, i + 1, caches[0]), other.step(token, len(ids) + i, i + 1, caches[1])
    assert torch.equal(caches[0].keys_values, caches[1].keys_values)
