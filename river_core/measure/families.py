"""Tiny random models of every supported family and of every trait that the decoder treats specially: exact checks need no download."""

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from river_core.decoder import Decoder
from river_core.kernels import choose_kernels
from river_core.measure.shapes import byte_tokenizer
from river_core.model import Model
from river_core.river import River

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|eos|>", "<|start|>", "<|end|>"]
SIZE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": 256,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.3 * i for i in range(6)],
    "original_max_position_embeddings": 32,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
MINISTRAL_ROPE = {
    **YARN_ROPE,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def configs() -> dict:
    """A config for every family and every trait that the decoder treats specially."""
    return {
        "llama": LlamaConfig(**SIZE),
        "llama-tied-biased": LlamaConfig(**SIZE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        "llama-3-rope": LlamaConfig(**SIZE, rope_parameters=LLAMA3_ROPE),
        "llama-yarn": LlamaConfig(**SIZE, rope_parameters=YARN_ROPE),
        "llama-dynamic-rope": LlamaConfig(
            **{**SIZE, "max_position_embeddings": 24},
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        ),
        "mistral-sliding": MistralConfig(**SIZE, sliding_window=16),
        "qwen2": Qwen2Config(**SIZE),
        "qwen2-half-sliding": Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=8, max_window_layers=3),
        "qwen3": Qwen3Config(**SIZE, head_dim=32),
        "phi3-sliding": Phi3Config(**SIZE, sliding_window=20),
        "phi4-mini-longrope": Phi3Config(**SIZE, rope_parameters=LONG_ROPE, original_max_position_embeddings=32),
        "ministral3": Ministral3Config(**SIZE, head_dim=16, rope_parameters=MINISTRAL_ROPE),
    }


def random_model(config, seed: int = 0):
    """A transformers model with random weights; norms and biases are moved off 1 and 0, or a mistake in them would not show."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def tokenizer():
    """A tokenizer of single bytes and three special tokens, with a chat template."""
    fast = byte_tokenizer(SPECIAL)
    fast.eos_token, fast.chat_template = "<|eos|>", CHAT_TEMPLATE
    return fast


def tiny_model_on(device, config, dtype=torch.float32, bits: int = 4, group_size: int = 32, seed: int = 0, weights=None) -> Model:
    """A loaded `Model` with random weights; the same config and seed give the same weights on every device.

    Args:
        device: torch device. config: a transformers config. dtype: of the backbone, "auto" = the device's own. bits, group_size: of the river.
        seed: of the weights. weights: to take instead, under transformers' names.
    """
    weights = random_model(config, seed).state_dict() if weights is None else weights
    # On a CPU the river's kernel is chosen by measuring, and between products this small chance would choose.
    sixteen_bits = dtype in (torch.float16, torch.bfloat16)
    river = "int4" if torch.device(device).type == "cpu" and bits == 4 and sixteen_bits else "auto"
    plan = choose_kernels(device, config.hidden_size, config.intermediate_size, dtype, bits, group_size, river)
    decoder = Decoder(config, weights, plan)
    river = River(decoder, weights)
    return Model("tiny", "folder", decoder, river, tokenizer(), eos_token_ids=frozenset({256, 258}))
