"""River and its two limits: never leaving is the backbone, leaving at once is the full 4-bit model, and no slot stays empty."""

import pytest
import torch
import torch.nn.functional as F

from river_core.decoder import Decoder
from river_core.exit_rules import Fixed, Never, Replay, Similarity, cosine
from river_core.kernels import choose_kernels
from river_core.kv_cache import BACKBONE, NONE, RIVER
from river_core.river import River
from river_core.strategies.river import RiverStrategy
from tests.engine.test_families import run_blocks
from tests.tiny import configs, random_model, tiny_model

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
LAYERS = 6


def decode(model, rule, tokens=16, prefill="full", poison=None):
    """Greedy decoding by a strategy; returns steps, token ids and the cache."""
    strategy = RiverStrategy(model, rule)
    cache = model.decoder.new_cache(len(PROMPT) + tokens)
    if poison is not None:
        cache.keys_values.fill_(poison)
    with torch.inference_mode():
        steps = [strategy.prefill(PROMPT, cache, prefill)]
        ids = [int(steps[0].logits.argmax())]
        for index in range(1, tokens):
            steps.append(strategy.step(ids[-1], len(PROMPT) + index - 1, index, cache))
            ids.append(int(steps[-1].logits.argmax()))
    return steps, ids, cache


def last_logits(decoder, token_ids, start, cache):
    """Logits [V] of the last row by the plain loop."""
    return decoder.head(run_blocks(decoder, token_ids, start, cache)[-1:])[0]


@pytest.fixture(scope="module")
def tau(tiny):
    """A threshold at which the tiny model leaves at different depths."""
    steps, _, _ = decode(tiny, Similarity(2.0))
    scores = sorted(score for step in steps[1:] for score in step.scores.values())
    return scores[int(0.7 * len(scores))]


@torch.inference_mode()
def test_never_exit_equals_the_plain_loop_bit_for_bit(tiny):
    for rule in (Never(LAYERS), Similarity(2.0), Fixed(LAYERS)):
        steps, ids, cache = decode(tiny, rule)
        plain = tiny.decoder.new_cache(len(PROMPT) + 16)
        logits = last_logits(tiny.decoder, PROMPT, 0, plain)
        for i, step in enumerate(steps):
            assert torch.equal(step.logits, logits)
            if i + 1 < len(steps):
                logits = last_logits(tiny.decoder, [ids[i]], len(PROMPT) + i, plain)
        assert torch.equal(cache.keys_values, plain.keys_values)
        assert {step.exit_layer for step in steps} == {LAYERS}


@torch.inference_mode()
def test_forced_depth_0_equals_a_model_of_the_quantised_weights_bit_for_bit(tiny):
    config = configs()["llama"]
    weights = random_model(config).state_dict()
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for layer, block in enumerate(tiny.river.blocks):
        prefix = f"model.layers.{layer}."
        parts = dict(zip("qkv", block.qkv.dense_weight().split([heads, kv, kv]), strict=True))
        weights |= {f"{prefix}self_attn.{name}_proj.weight": part for name, part in parts.items()}
        gate, up = block.gate_up.dense_weight().chunk(2)
        weights |= {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}
        weights |= {f"{prefix}mlp.down_proj.weight": block.down.dense_weight()}
        weights |= {f"{prefix}self_attn.o_proj.weight": block.o.dense_weight()}
    quantised = Decoder(config, weights, tiny.plan)
    steps, ids, cache = decode(tiny, Fixed(0), prefill="sequence")
    plain = quantised.new_cache(len(PROMPT) + 16)
    logits = last_logits(quantised, PROMPT, 0, plain)
    for i, step in enumerate(steps):
        assert torch.equal(step.logits, logits)
        if i + 1 < len(steps):
            logits = last_logits(quantised, [ids[i]], len(PROMPT) + i, plain)
    assert torch.equal(cache.keys_values, plain.keys_values)
    assert (cache.owner[:, : cache.length] == RIVER).all()


def test_owner_table_follows_from_the_exit_depths(tiny, tau):
    steps, _, cache = decode(tiny, Similarity(tau))
    depths = [step.exit_layer for step in steps[1:]]
    assert len(set(depths)) > 1, "the threshold must make this test see different depths"
    assert (cache.owner[:, : len(PROMPT)] == BACKBONE).all()
    for index, depth in enumerate(depths):
        column = cache.owner[:, len(PROMPT) + index]
        assert (column[:depth] == BACKBONE).all() and (column[depth:] == RIVER).all()
        assert (cache.filled_at[:, len(PROMPT) + index] == len(PROMPT) + index).all()
    assert (cache.owner[:, cache.length :] == NONE).all()


def test_a_river_slot_at_the_exit_layer_comes_from_the_true_hidden_state(tiny):
    """The first river layer sees the backbone's own state, so its keys are its quantised projection of that very state."""
    steps, _, cache = decode(tiny, Fixed(3), tokens=2)
    _, _, backbone = decode(tiny, Never(LAYERS), tokens=2)
    position = len(PROMPT)
    assert torch.equal(cache.keys_values[:3, :, :, position], backbone.keys_values[:3, :, :, position])
    exit_state = steps[1].hidden_states[3]
    with torch.inference_mode():
        alone = tiny.decoder.new_cache(position + 1)
        rows = tiny.decoder.rows(position, 1, alone)
        tiny.decoder.run_block(tiny.river.blocks[3], 3, exit_state, rows, alone, RIVER)
    assert torch.equal(alone.keys_values[3, :, :, position], cache.keys_values[3, :, :, position])


def test_slots_that_nobody_wrote_are_never_read(tiny, tau):
    for rule in (Never(LAYERS), Similarity(tau), Fixed(0)):
        clean, poisoned = decode(tiny, rule), decode(tiny, rule, poison=float("nan"))
        assert clean[1] == poisoned[1]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(clean[0], poisoned[0], strict=True))


def test_sliding_window_models_never_read_outside_the_window():
    model = tiny_model(configs()["mistral-sliding"])
    clean = decode(model, Fixed(2), tokens=20)
    strategy = RiverStrategy(model, Fixed(2))
    with torch.inference_mode():
        cache = clean[2]
        position = cache.length
        cache = model.decoder.new_cache(position + 1)
        cache.copy_prefix(clean[2].snapshot())
        whole = strategy.step(clean[1][-1], position, 20, cache).logits
        cache.keys_values[:, :, :, : position - 15] = float("nan")
        assert torch.equal(strategy.step(clean[1][-1], position, 20, cache).logits, whole)


def test_lowering_tau_never_raises_the_first_tokens_depth(tiny):
    depths = [decode(tiny, Similarity(tau), tokens=2)[0][1].exit_layer for tau in (2, 0.99, 0.95, 0.9, 0.8, 0.5, -2)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == LAYERS and depths[-1] == 1


def test_the_last_layer_is_never_an_exit_and_is_never_tested(tiny):
    steps, _, _ = decode(tiny, Similarity(-2.0))
    assert {step.exit_layer for step in steps[1:]} == {1}
    steps, _, _ = decode(tiny, Similarity(2.0))
    assert all(set(step.scores) == set(range(1, LAYERS)) for step in steps[1:])


def test_a_replay_of_recorded_depths_gives_the_same_text_and_cache(tiny, tau):
    steps, ids, cache = decode(tiny, Similarity(tau))
    again = decode(tiny, Replay([step.exit_layer for step in steps]))
    assert again[1] == ids
    assert torch.equal(again[2].keys_values, cache.keys_values)


def test_sequence_level_prefill_leaves_where_the_least_similar_row_exceeds_tau(tiny):
    full, _, _ = decode(tiny, Never(LAYERS), tokens=1)
    states = full[0].hidden_states
    least = [float(F.cosine_similarity(states[i], states[i + 1], dim=-1).min()) for i in range(LAYERS)]
    tau = sorted(least[:-1])[len(least) // 2] - 1e-4
    expected = next(i + 1 for i, value in enumerate(least) if value > tau)
    steps, _, cache = decode(tiny, Similarity(tau), tokens=1, prefill="sequence")
    assert steps[0].exit_layer == expected
    assert (cache.owner[:expected, : len(PROMPT)] == BACKBONE).all()
    assert (cache.owner[expected:, : len(PROMPT)] == RIVER).all()


def test_the_score_is_the_cosine_similarity():
    torch.manual_seed(0)
    a, b = torch.randn(1, 576), torch.randn(1, 576)
    assert cosine(a, b) == pytest.approx(float(F.cosine_similarity(a, b)), abs=1e-6)
    assert cosine(a, a) == pytest.approx(1.0, abs=1e-6)
    many = torch.randn(5, 576), torch.randn(5, 576)
    assert cosine(*many) == pytest.approx(float(F.cosine_similarity(*many).min()), abs=1e-6)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi4-mini-longrope", "ministral3"])
def test_every_family_has_a_river(name):
    model = tiny_model(configs()[name])
    _, _, cache = decode(model, Fixed(2))
    backbone = decode(model, Replay([LAYERS]))[2]
    used = slice(0, len(PROMPT))
    assert torch.equal(cache.keys_values[:, :, :, used], backbone.keys_values[:, :, :, used])
    assert (cache.owner[2:, len(PROMPT) : cache.length] == RIVER).all()
    assert bool(cache.keys_values.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_river_agrees_with_the_dequantised_one(dtype):
    """Same codes through the int4 kernel and through plain products: hidden states stay close in 16 bits."""
    config = configs()["llama"]
    packed = tiny_model(config, dtype=dtype)
    if packed.plan.river != "int4":
        weights = random_model(config).state_dict()
        plan = choose_kernels("cpu", 64, 128, dtype, group_size=32, river="int4")
        packed.decoder = Decoder(config, weights, plan)
        packed.river = type(packed.river)(packed.decoder, weights)
    exact = tiny_model(config)
    got, expected = decode(packed, Fixed(0), tokens=1, prefill="sequence"), decode(exact, Fixed(0), tokens=1, prefill="sequence")
    similarity = F.cosine_similarity(got[0][0].logits, expected[0][0].logits, dim=0)
    assert similarity > 0.999


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_kept_on_disk_make_the_same_river_and_damaged_ones_are_made_again(tiny, tmp_path, bits, monkeypatch):
    config = configs()["llama"]
    weights = random_model(config).state_dict()
    plan = choose_kernels("cpu", 64, 128, torch.float32, bits=bits, group_size=32)
    decoder = Decoder(config, weights, plan)
    store = tmp_path / "rivers" / "codes.safetensors"
    fresh = River(decoder, weights, store=store)
    made = []
    real = type(plan).quantise
    monkeypatch.setattr(type(plan), "quantise", lambda self, w: made.append(w) or real(self, w))
    kept = River(decoder, weights, store=store)
    assert not made
    for one, two in zip(fresh.blocks, kept.blocks, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(getattr(one, name).dense_weight(), getattr(two, name).dense_weight())
    whole = store.read_bytes()
    store.unlink()
    store.write_bytes(whole[: len(whole) // 2])
    again = River(decoder, weights, store=store)
    assert len(made) == 4 * LAYERS and store.read_bytes() == whole
    assert torch.equal(again.blocks[0].qkv.dense_weight(), fresh.blocks[0].qkv.dense_weight())
    assert [path.name for path in store.parent.iterdir() if path.suffix != ".lock"] == [store.name]
