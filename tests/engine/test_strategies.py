"""Every KV strategy against its invariants: exact where it claims to be exact, and different exactly where it must be."""

import copy
from types import SimpleNamespace

import pytest
import torch

from river_core.errors import InputError
from river_core.exit_rules import Entropy, Fixed, Margin, MaxProbability, Never, Replay, Similarity
from river_core.kv_cache import BACKBONE, DRAFT, NONE, PROPAGATED
from river_core.sampling import Sampler, Sampling, probabilities
from river_core.strategies.masking import MaskingStrategy
from river_core.strategies.monotone import MonotoneStrategy, SkipDecodeStrategy
from river_core.strategies.propagation import PropagationStrategy
from river_core.strategies.recompute import RecomputeStrategy, TokenReplayStrategy
from river_core.strategies.river import RiverStrategy
from river_core.strategies.sequence import SequenceStrategy
from river_core.strategies.verified import VerifiedStrategy
from tests.engine.test_families import run_blocks
from tests.tiny import configs, tiny_model

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
LAYERS = 6
TOKENS = 20
ZIGZAG = [6, 3, 5, 2, 2, 6, 1, 4, 4, 3, 6, 6, 2, 5, 1, 1, 3, 6, 2, 4]  # exit depths, index 0 is the prompt's
FALLING = [6, 6, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1]
EXACT = [RecomputeStrategy, TokenReplayStrategy]
HEAD_ON_EXIT = [MaskingStrategy, PropagationStrategy, *EXACT, MonotoneStrategy]


def decode(model, strategy, tokens=TOKENS, sampling=None, poison=None, text=None, check=None):
    """Decode with a strategy, greedily unless told otherwise or fed a text; returns steps, token ids and the cache."""
    sampler = Sampler(sampling or Sampling())
    cache = strategy.new_cache(len(PROMPT) + tokens)
    if poison is not None:
        cache.keys_values.fill_(poison)
    with torch.inference_mode():
        steps = [strategy.prefill(PROMPT, cache)]
        ids = [sampler(steps[0].logits) if text is None else text[0]]
        while len(ids) < tokens:
            position = len(PROMPT) + len(ids) - 1
            if text is None:
                made = strategy.advance(ids[-1], position, len(ids), cache, sampler, tokens - len(ids))
            else:
                made = [strategy.step(ids[-1], position, len(ids), cache)]
                made[0].token = text[len(ids)]
            steps += made
            ids += [step.token for step in made]
            if check:
                check(strategy, cache, len(ids))
    return steps, ids, cache


def oracle(model, ids):
    """One plain pass over prompt and answer: the hidden states after every block [L + 1, T, d], and the cache it writes."""
    tokens = PROMPT + ids[:-1]
    cache = model.decoder.new_cache(len(tokens))
    with torch.inference_mode():
        rows = model.decoder.rows(0, len(tokens), cache)
        states = [model.decoder.embed(tokens)]
        for layer, block in enumerate(model.decoder.blocks):
            states.append(model.decoder.run_block(block, layer, states[-1], rows, cache, BACKBONE))
    return states, cache


def plain(model, tokens=TOKENS):
    return decode(model, RiverStrategy(model, Never(LAYERS)), tokens)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        *[lambda m, s=s: s(m, Similarity(2.0)) for s in HEAD_ON_EXIT],
        *[lambda m, s=s: s(m, Never(LAYERS)) for s in HEAD_ON_EXIT],
        lambda m: RecomputeStrategy(m, Fixed(1), cap=0),
        lambda m: TokenReplayStrategy(m, Fixed(1), cap=0),
        lambda m: SkipDecodeStrategy(m, Never(LAYERS), n_min=LAYERS, n_max=LAYERS),
        lambda m: SequenceStrategy(m, Never(LAYERS)),
        lambda m: SequenceStrategy(m, Similarity(2.0)),
        lambda m: SequenceStrategy(m, Never(LAYERS), depth=LAYERS, head="balcony"),
        lambda m: VerifiedStrategy(m, Never(LAYERS), k=0),
    ],
)
def test_without_exits_every_strategy_is_the_plain_loop_bit_for_bit(tiny, make):
    steps, ids, cache = decode(tiny, make(tiny))
    expected_steps, expected_ids, expected_cache = plain(tiny)
    assert ids == expected_ids
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(steps, expected_steps, strict=True))
    assert torch.equal(cache.keys_values, expected_cache.keys_values)
    assert (cache.owner[:, : cache.length] == BACKBONE).all()


# -- exact methods against a single plain pass --------------------------------------------------------------------------


@pytest.mark.parametrize("depths", [ZIGZAG, FALLING, [6] + [1] * 19, [6] + [5, 1] * 10])
@pytest.mark.parametrize("cap", [1, 3, None])
@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_recompute_gives_the_backbones_cache_and_the_lens_of_its_states(family, strategy, cap, depths):
    model = tiny_model(configs()[family])
    seen = []

    def check(strategy, cache, made):
        held = strategy.pending if isinstance(strategy, RecomputeStrategy) else strategy.tokens
        seen.append(len(held))
        if isinstance(strategy, RecomputeStrategy):
            reached = [entry[1] for entry in held]
            assert reached == sorted(reached, reverse=True), "depths never increase with position"
        if not held:
            assert (cache.owner[:, : cache.length] == BACKBONE).all(), "after a full step nothing is missing"

    steps, ids, cache = decode(model, strategy(model, Replay(depths), cap=cap), check=check)
    states, truth = oracle(model, ids)
    for i, step in enumerate(steps):
        t = len(PROMPT) + i - 1
        with torch.inference_mode():
            close(step.logits, model.decoder.head(states[step.exit_layer][t : t + 1])[0])
    written = torch.from_numpy(cache.owner[:, : cache.length] == BACKBONE)
    for layer in range(LAYERS):
        close(cache.keys_values[layer, :, :, : cache.length][:, :, written[layer]], truth.keys_values[layer, :, :, written[layer]])
    if cap is not None:
        assert max(seen) <= cap
        assert {step.exit_layer for step in steps} >= {LAYERS}, "the cap was reached and forced a full step"


@pytest.mark.parametrize("strategy", EXACT)
def test_a_flush_completes_what_is_pending(tiny, strategy):
    one = strategy(tiny, Replay(ZIGZAG), cap=None)
    steps, ids, cache = decode(tiny, one)
    assert (cache.owner[:, : cache.length] == NONE).any()
    with torch.inference_mode():
        filled = one.flush(cache)
    assert filled and (cache.owner[:, : cache.length] == BACKBONE).all()
    close(cache.keys_values[:, :, :, : cache.length], oracle(tiny, ids)[1].keys_values[:, :, :, : cache.length])


def test_token_replay_equals_hidden_replay(tiny):
    hidden, token = (decode(tiny, strategy(tiny, Replay(ZIGZAG), cap=4)) for strategy in EXACT)
    assert hidden[1] == token[1]
    for a, b in zip(hidden[0], token[0], strict=True):
        close(a.logits, b.logits)
    assert (hidden[2].owner == token[2].owner).all()
    close(hidden[2].keys_values, token[2].keys_values)
    work = [sum(step.layers_run for step in run[0]) for run in (hidden, token)]
    assert work[0] < work[1], "replaying from the embedding costs more"


def test_recompute_reports_what_it_filled_and_when(tiny):
    steps, _, cache = decode(tiny, RecomputeStrategy(tiny, Replay([6, 2, 3, 6, 6]), cap=None), tokens=5)
    first = len(PROMPT)
    assert steps[1].filled == [] and steps[2].filled == [(first, 2, 3, BACKBONE)]
    assert sorted(steps[3].filled) == [(first, 3, 6, BACKBONE), (first + 1, 3, 6, BACKBONE)]
    assert [step.facts.get("pending") for step in steps[1:]] == [1, 2, 0, 0]
    assert cache.runs(first) == [[0, 2, "backbone", first], [2, 3, "backbone", first + 1], [3, 6, "backbone", first + 2]]


def test_monotone_equals_recompute_on_falling_depths_and_never_rises(tiny):
    monotone = decode(tiny, MonotoneStrategy(tiny, Replay(FALLING)))
    recompute = decode(tiny, RecomputeStrategy(tiny, Replay(FALLING), cap=None))
    for a, b in zip(monotone[0], recompute[0], strict=True):
        close(a.logits, b.logits)
    depths = [step.exit_layer for step in decode(tiny, MonotoneStrategy(tiny, Replay(ZIGZAG)))[0]]
    assert depths == sorted(depths, reverse=True)
    steps, ids, cache = decode(tiny, MonotoneStrategy(tiny, Replay(ZIGZAG)))
    states, _ = oracle(tiny, ids)
    for i, step in enumerate(steps):
        with torch.inference_mode():
            close(step.logits, tiny.decoder.head(states[step.exit_layer][len(PROMPT) + i - 1 :][:1])[0])
    for i, step in enumerate(steps[1:]):  # every active slot sees all positions before it
        assert (cache.owner[: step.exit_layer, : len(PROMPT) + i + 1] == BACKBONE).all()


# -- propagation and masking --------------------------------------------------------------------------------------------


def test_propagated_slots_follow_the_formula_and_the_first_one_is_exact(tiny):
    steps, ids, cache = decode(tiny, PropagationStrategy(tiny, Replay(ZIGZAG)))
    c = tiny.config
    for i, step in enumerate(steps[1:]):
        position, depth = len(PROMPT) + i, step.exit_layer
        assert (cache.owner[:depth, position] == BACKBONE).all() and (cache.owner[depth:, position] == PROPAGATED).all()
        for layer in range(depth, LAYERS):
            block = tiny.decoder.blocks[layer]
            with torch.inference_mode():
                normed = torch.nn.functional.rms_norm(step.hidden_states[-1], (c.hidden_size,), block.input_norm, c.rms_norm_eps)
                heads = block.qkv(normed).view(1, -1, c.head_dim)
                turned = tiny.decoder.rope.rotate(heads, tiny.decoder.rope.rotation(position, 1))[0, c.num_attention_heads :]
            close(cache.keys_values[layer, :, :, position].flatten(0, 1), turned)
    # Layer e + 1 reads the true state of layer e, so for the first exiting token, whose past is complete, it is the backbone's own.
    first, depth = len(PROMPT), steps[1].exit_layer
    truth = oracle(tiny, ids)[1]
    close(cache.keys_values[: depth + 1, :, :, first], truth.keys_values[: depth + 1, :, :, first])
    assert not torch.allclose(cache.keys_values[depth + 1, :, :, first], truth.keys_values[depth + 1, :, :, first], atol=1e-3)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi4-mini-longrope", "ministral3", "llama-tied-biased"])
def test_propagation_at_the_last_layer_but_one_leaves_the_plain_cache_in_every_family(family):
    model = tiny_model(configs()[family])
    text = plain(model)[1]
    _, _, cache = decode(model, PropagationStrategy(model, Fixed(LAYERS - 1)), text=text)
    close(cache.keys_values[:, :, :, : cache.length], oracle(model, text)[1].keys_values[:, :, :, : cache.length])


def test_masking_holds_only_what_was_computed(tiny):
    steps, _, cache = decode(tiny, MaskingStrategy(tiny, Replay(ZIGZAG)))
    assert cache.entries == LAYERS * len(PROMPT) + sum(step.exit_layer for step in steps[1:])
    for i, step in enumerate(steps[1:]):
        column = cache.owner[:, len(PROMPT) + i]
        assert (column[: step.exit_layer] == BACKBONE).all() and (column[step.exit_layer :] == NONE).all()
        assert cache.at(LAYERS - 1, len(PROMPT) + i) is None or step.exit_layer == LAYERS


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen2-half-sliding"])
@torch.inference_mode()
def test_the_compact_cache_equals_masked_attention(family):
    """An independent computation with -inf columns over a cache that has a place for every position."""
    model = tiny_model(configs()[family])
    steps, ids, _ = decode(model, MaskingStrategy(model, Replay(ZIGZAG)))
    c, decoder = model.config, model.decoder
    full = decoder.new_cache(len(PROMPT) + TOKENS)
    run_blocks(decoder, PROMPT, 0, full)
    for i, step in enumerate(steps[1:]):
        position = len(PROMPT) + i
        hidden = decoder.embed([ids[i]])
        for layer in range(step.exit_layer):
            block = decoder.blocks[layer]
            rows = decoder.rows(position, 1, full)
            normed = torch.nn.functional.rms_norm(hidden, (c.hidden_size,), block.input_norm, c.rms_norm_eps)
            heads = decoder.rope.rotate(block.qkv(normed).view(1, -1, c.head_dim), rows.rotation)[0]
            q, k, v = heads.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads])
            full.write(layer, rows.slots, torch.stack([k, v])[:, :, None], BACKBONE)
            seen = torch.from_numpy(full.owner[layer, : position + 1] != NONE)
            if c.sliding_window[layer]:
                seen[: max(0, position + 1 - c.sliding_window[layer])] = False
            bias = torch.where(seen, 0.0, float("-inf"))
            keys, values = full.keys_values[layer, :, :, : position + 1]
            group = c.num_attention_heads // c.num_key_value_heads
            scores = torch.einsum("hd,hsd->hs", q, keys.repeat_interleave(group, 0)) * c.head_dim**-0.5 + bias
            hidden = hidden + block.o(torch.einsum("hs,hsd->hd", scores.softmax(-1), values.repeat_interleave(group, 0)).view(1, -1))
            normed = torch.nn.functional.rms_norm(hidden, (c.hidden_size,), block.post_norm, c.rms_norm_eps)
            gate, up = block.gate_up(normed).chunk(2, -1)
            hidden = hidden + block.down(torch.nn.functional.silu(gate) * up)
        close(step.logits, decoder.head(hidden)[0])


def test_if_only_the_last_token_exits_all_earlier_scores_are_untouched(tiny):
    depths = [LAYERS] * (TOKENS - 1) + [2]
    for strategy in HEAD_ON_EXIT:
        steps = decode(tiny, strategy(tiny, Replay(depths)))[0]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(steps[:-1], plain(tiny)[0][:-1], strict=True))


@pytest.mark.parametrize("strategy", [*HEAD_ON_EXIT, SequenceStrategy])
def test_slots_that_nobody_wrote_are_never_read(tiny, strategy):
    def make():
        return strategy(tiny, Fixed(3) if strategy is SequenceStrategy else Replay(ZIGZAG))

    clean, poisoned = decode(tiny, make()), decode(tiny, make(), poison=float("nan"))
    assert clean[1] == poisoned[1]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(clean[0], poisoned[0], strict=True))


# -- sequence-level and schedule ----------------------------------------------------------------------------------------


def test_sequence_level_equals_a_truncated_model(tiny):
    steps, _, cache = decode(tiny, SequenceStrategy(tiny, Never(LAYERS), depth=3))
    short = SimpleNamespace(river=None, decoder=copy.copy(tiny.decoder))
    short.decoder.blocks = tiny.decoder.blocks[:3]
    short.decoder.config = copy.copy(tiny.decoder.config)
    object.__setattr__(short.decoder.config, "num_hidden_layers", 3)
    expected = decode(short, RiverStrategy(short, Never(3)))
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(steps, expected[0], strict=True))
    assert (cache.owner[3:] == NONE).all() and {step.exit_layer for step in steps} == {3}


def test_sequence_level_can_choose_its_depth_from_the_prompt(tiny):
    states, _ = oracle(tiny, [0])
    least = [float(torch.cosine_similarity(states[i], states[i + 1], dim=-1).min()) for i in range(LAYERS - 1)]
    tau = sorted(least)[2] - 1e-4
    steps = decode(tiny, SequenceStrategy(tiny, Similarity(tau)))[0]
    assert {step.exit_layer for step in steps} == {next(i + 1 for i, value in enumerate(least) if value > tau)}


def test_the_untrained_balcony_is_the_last_block_on_the_exit_state(tiny):
    steps, ids, cache = decode(tiny, SequenceStrategy(tiny, Never(LAYERS), depth=3, head="balcony"))
    assert (cache.owner[LAYERS - 1, : cache.length] == PROPAGATED).all() and (cache.owner[3 : LAYERS - 1] == NONE).all()
    states, _ = oracle(tiny, ids)
    with torch.inference_mode():
        other = tiny.decoder.new_cache(len(states[0]))
        rows = tiny.decoder.rows(0, len(states[0]), other)
        out = tiny.decoder.run_block(tiny.decoder.blocks[-1], LAYERS - 1, states[3], rows, other, PROPAGATED)
        for i, step in enumerate(steps):
            close(step.logits, tiny.decoder.head(out[len(PROMPT) + i - 1 :][:1])[0])


def test_the_skipdecode_schedule_runs_exactly_its_budget(tiny):
    strategy = SkipDecodeStrategy(tiny, Never(LAYERS), n_min=2, n_max=5, warm_up=1, horizon=10)
    assert strategy.blocks(0) == [0, 2, 3, 4, 5] and strategy.blocks(10) == strategy.blocks(99) == [0, 5]
    steps, _, cache = decode(tiny, strategy)
    planned = [strategy.blocks(i) for i in range(1, TOKENS)]
    assert [step.layers_run for step in steps[1:]] == [len(blocks) for blocks in planned]
    for i, blocks in enumerate(planned):
        assert (cache.owner[:, len(PROMPT) + i] == BACKBONE).nonzero()[0].tolist() == blocks
        for layer in blocks:  # a layer that is active now was active for every token before
            assert (cache.owner[layer, : len(PROMPT) + i + 1] == BACKBONE).all()


@pytest.mark.parametrize("bad", [{"n_min": 1}, {"n_max": 7}, {"n_min": 5, "n_max": 4}, {"horizon": 0}])
def test_impossible_schedules_are_refused(tiny, bad):
    with pytest.raises(InputError, match="SkipDecode needs"):
        SkipDecodeStrategy(tiny, Never(LAYERS), **bad)


# -- River, verified ------------------------------------------------------------------------------------------------------


def random_blocks(model):
    """Blocks that draft nonsense: the river of another random model."""
    return tiny_model(seed=99).river.blocks


def near_tie(model, ids, tolerance):
    """Teacher-forced through one plain pass: every token is the backbone's choice, or within `tolerance` of it in logits."""
    states, _ = oracle(model, ids)
    with torch.inference_mode():
        logits = model.decoder.head(states[-1][len(PROMPT) - 1 :])
    gaps = logits.max(-1).values - logits[torch.arange(len(ids)), ids]
    return bool((gaps <= tolerance).all())


@pytest.mark.parametrize("k", [1, 2, 5, None])
def test_verified_river_writes_the_backbones_text_and_leaves_only_backbone_slots(tiny, k):
    def check(strategy, cache, made):
        assert cache.length == len(PROMPT) + made - 1
        assert (cache.owner[:, : cache.length] == BACKBONE).all() and (cache.owner[:, cache.length :] == NONE).all()
        assert not (cache.owner == DRAFT).any()

    steps, ids, cache = decode(tiny, VerifiedStrategy(tiny, Never(LAYERS), k=k), check=check)
    assert near_tie(tiny, ids, 1e-4)
    states, truth = oracle(tiny, ids)
    close(cache.keys_values[:, :, :, : cache.length], truth.keys_values[:, :, :, : cache.length])
    for i, step in enumerate(steps):
        with torch.inference_mode():
            close(step.logits, tiny.decoder.head(states[-1][len(PROMPT) + i - 1 :][:1])[0], 1e-4)


def test_drafts_by_the_backbone_itself_are_always_accepted(tiny):
    strategy = VerifiedStrategy(tiny, Never(LAYERS), k=3, draft_blocks=tiny.decoder.blocks)
    decode(tiny, strategy)
    assert strategy.accepted == strategy.drafted > 0


def test_hopeless_drafts_cost_time_and_never_the_text(tiny):
    strategy = VerifiedStrategy(tiny, Never(LAYERS), k=3, draft_blocks=random_blocks(tiny))
    _, ids, _ = decode(tiny, strategy)
    assert near_tie(tiny, ids, 1e-4)
    assert strategy.accepted < strategy.drafted / 2


def test_the_draft_length_follows_the_acceptance(tiny):
    strategy = VerifiedStrategy(tiny, Never(LAYERS))
    strategy.acceptance = 0.99
    assert strategy.draft_length(100) == 8
    strategy.acceptance = 0.1
    assert strategy.draft_length(100) == 1
    assert strategy.draft_length(1) == 0 and VerifiedStrategy(tiny, Never(LAYERS), k=5).draft_length(3) == 2


@pytest.mark.parametrize(("top_k", "draft"), [(0, "random"), (40, "random"), (4, "river")])
def test_rejection_sampling_keeps_the_backbones_distribution(top_k, draft):
    """Second generated token over many seeds against the exact distribution, with a draft that is wrong often."""
    model = tiny_model()
    sampling = Sampling(2.0, top_k=top_k)
    first = 65
    with torch.inference_mode():
        base = model.decoder.new_cache(len(PROMPT) + 4)
        strategy = VerifiedStrategy(model, Never(LAYERS), k=2, draft_blocks=random_blocks(model) if draft == "random" else None)
        strategy.prefill(PROMPT, base)
        reference = model.decoder.new_cache(len(PROMPT) + 4)
        reference.copy_prefix(base)
        p = probabilities(model.decoder.head(run_blocks(model.decoder, [first], len(PROMPT), reference))[0], sampling)
        # Merge into a few cells of about equal weight, so that every expected count is large.
        order = p.argsort(descending=True)
        cells = torch.empty(len(p), dtype=torch.long)
        cells[order] = (p[order].cumsum(0) * 8).long().clamp(max=7)
        counts, draws, accepted = torch.zeros(8), 1500, 0
        for seed in range(draws):
            cache = model.decoder.new_cache(len(PROMPT) + 4)
            cache.copy_prefix(base)
            steps = strategy.advance(first, len(PROMPT), 1, cache, Sampler(Sampling(2.0, top_k=top_k, seed=seed)), 3)
            counts[cells[steps[0].token]] += 1
            accepted += steps[0].facts["cycle"]["accepted"] > 0
    expected = torch.zeros(8).index_add_(0, cells, p) * draws
    used = expected > 0
    assert (counts[~used] == 0).all()
    chi_square = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    assert chi_square < 29.9  # 0.9999 quantile at 7 degrees of freedom
    assert 0 < accepted < draws, "both branches must have been taken"


# -- exit rules on the head ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "never", "always"), [(MaxProbability, 1.1, -0.1), (Margin, 1.1, -0.1), (Entropy, 1.1, -0.1)])
def test_head_rules_test_only_allowed_layers_and_their_scores_are_what_they_say(tiny, rule, never, always):
    steps = decode(tiny, MaskingStrategy(tiny, rule(tiny.decoder, never, [2, 4])))[0]
    assert all(set(step.scores) == {2, 4} and step.exit_layer == LAYERS for step in steps[1:])
    p = tiny.decoder.head(steps[1].hidden_states[2])[0].softmax(-1)
    top = p.topk(2).values
    expected = {
        MaxProbability: top[0],
        Margin: top[0] - top[1],
        Entropy: 1 + (p * p.log()).sum() / torch.log(torch.tensor(float(len(p)))),
    }[rule]
    assert steps[1].scores[2] == pytest.approx(float(expected), abs=1e-5)
    steps = decode(tiny, MaskingStrategy(tiny, rule(tiny.decoder, always, [2, 4])))[0]
    assert {step.exit_layer for step in steps[1:]} == {2}
    with torch.inference_mode():
        assert torch.equal(steps[1].logits, tiny.decoder.head(steps[1].hidden_states[2])[0])
