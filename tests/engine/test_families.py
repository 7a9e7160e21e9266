"""The decoder computes what transformers computes, family by family, and says so when it cannot."""

import pytest
import torch
from transformers import GPT2Config

from river_core.decoder import SUPPORTED_MODEL_TYPES, Decoder, check_supported
from river_core.errors import LoadError
from river_core.kernels import choose_kernels
from river_core.kv_cache import BACKBONE
from tests.tiny import configs, random_model

CONFIGS = configs()


def forward(decoder, token_ids, start, cache):
    """Logits [T, V] of rows that follow what the cache holds."""
    return decoder.head(run_blocks(decoder, token_ids, start, cache))


def run_blocks(decoder, token_ids, start, cache):
    """The plain loop: hidden states [T, d] after all backbone blocks."""
    rows = decoder.rows(start, len(token_ids), cache)
    hidden = decoder.embed(token_ids)
    for layer, block in enumerate(decoder.blocks):
        hidden = decoder.run_block(block, layer, hidden, rows, cache, BACKBONE)
    cache.length = rows.stop
    return hidden


@pytest.mark.parametrize("prompt_length", [22, 40])  # below and beyond every window and original context in the configs
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits_equal_transformers_over_prefill_and_20_steps(name, prompt_length):
    config = CONFIGS[name]
    reference = random_model(config)
    plan = choose_kernels("cpu", config.hidden_size, config.intermediate_size, torch.float32)
    decoder = Decoder(config, reference.state_dict(), plan)
    ids = torch.randint(0, 256, (1, prompt_length), generator=torch.Generator().manual_seed(1))
    cache = decoder.new_cache(prompt_length + 20)
    expected = reference(ids, use_cache=True)
    held = expected.cache
    torch.testing.assert_close(forward(decoder, ids[0].tolist(), 0, cache), expected.logits[0], atol=1e-4, rtol=0)
    token = int(expected.logits[0, -1].argmax())
    for step in range(20):
        expected = reference(torch.tensor([[token]]), cache=held, use_cache=True)
        got = forward(decoder, [token], prompt_length + step, cache)
        torch.testing.assert_close(got, expected.logits[0], atol=1e-4, rtol=0)
        token = int(expected.logits[0, -1].argmax())


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen3", "phi4-mini-longrope", "ministral3"])
@torch.inference_mode()
def test_several_rows_against_a_longer_cache_equal_one_row_at_a_time(name):
    config = CONFIGS[name]
    decoder = Decoder(config, random_model(config).state_dict(), choose_kernels("cpu", 64, 128, torch.float32))
    ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    one, many = decoder.new_cache(30), decoder.new_cache(30)
    forward(decoder, ids[:24], 0, one)
    forward(decoder, ids[:24], 0, many)
    steps = torch.cat([forward(decoder, [token], 24 + i, one) for i, token in enumerate(ids[24:])])
    torch.testing.assert_close(forward(decoder, ids[24:], 24, many), steps, atol=1e-5, rtol=0)
    torch.testing.assert_close(many.keys_values, one.keys_values, atol=1e-5, rtol=0)


def test_another_architecture_gets_a_sentence_that_lists_the_supported_ones():
    with pytest.raises(LoadError) as error:
        check_supported(GPT2Config())
    assert "gpt2" in str(error.value)
    assert all(kind in str(error.value) for kind in SUPPORTED_MODEL_TYPES)


def test_a_checkpoint_that_lacks_a_tensor_gets_a_sentence():
    config = CONFIGS["llama"]
    weights = random_model(config).state_dict()
    del weights["model.layers.3.mlp.down_proj.weight"]
    with pytest.raises(LoadError, match=r"model\.layers\.3\.mlp\.down_proj\.weight"):
        Decoder(config, weights, choose_kernels("cpu", 64, 128, torch.float32))
