"""The rotary table: one cosine and one sine for each pair of a position, made before a run and never inside a step."""

import pytest
import torch

from river_core import compare
from river_core.rope import FIRST, Rope
from tests.tiny import configs, tiny_model

STATIC = [name for name in configs() if tiny_model(configs()[name]).decoder.rope.position_bytes]


@pytest.mark.parametrize("name", STATIC)
def test_the_table_holds_half_a_head_for_a_position_and_no_more(name):
    rope = tiny_model(configs()[name]).decoder.rope
    assert rope.nbytes <= FIRST * rope.position_bytes
    rope.prepare(3000)
    kinds = 2 if rope.query_beta is not None else 1
    assert rope.nbytes == 3000 * rope.position_bytes == 3000 * kinds * rope.rotary_dim * 4
    rope.prepare(2000)
    assert rope.nbytes == 3000 * rope.position_bytes, "a shorter run shares it"


@pytest.mark.parametrize("name", configs())
def test_a_longer_table_turns_every_position_as_a_shorter_one_did(name):
    rope, other = (tiny_model(configs()[name]).decoder.rope for _ in range(2))
    other.prepare(1500)
    for start, rows in ((0, 5), (7, 1), (40, 3)):
        short, long = rope.rotation(start, rows), other.rotation(start, rows)
        assert torch.equal(short.cos, long.cos) and torch.equal(short.sin, long.sin)


def test_values_and_what_lies_beyond_the_rotary_dimensions_keep_their_place():
    model = tiny_model(configs()["phi4-mini-longrope"])
    c, rope = model.config, model.decoder.rope
    heads = torch.randn(3, c.num_attention_heads + 2 * c.num_key_value_heads, c.head_dim)
    turned = rope.rotate(heads, rope.rotation(11, 3))
    values = c.num_attention_heads + c.num_key_value_heads
    assert torch.equal(turned[:, values:], heads[:, values:])
    assert torch.equal(turned[:, :values, rope.rotary_dim :], heads[:, :values, rope.rotary_dim :])
    assert not torch.equal(turned[:, :values, : rope.rotary_dim], heads[:, :values, : rope.rotary_dim])


def test_no_step_of_a_run_makes_the_table_longer(tiny, monkeypatch):
    prompt = "x" * (tiny.context_length - 60)
    events = compare(tiny, prompt, ("backbone", "verified", "river:0.5"), max_new_tokens=40)
    next(events)

    def compute(self, *args):
        raise AssertionError("a table is made inside a run")

    monkeypatch.setattr(Rope, "_compute", compute)
    assert [event["reason"] for event in events if event["type"] == "end"] == ["length"] * 3
    assert tiny.describe()["rope_bytes"] == tiny.decoder.rope.nbytes > 0
