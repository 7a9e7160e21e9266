"""Small real models as files: a folder of safetensors, and a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
from transformers import LlamaConfig

from tests.tiny import CHAT_TEMPLATE, SIZE, random_model, tokenizer

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def endless(**sizes) -> LlamaConfig:
    """A tiny Llama that names no end token and reads far: an answer is as long as it was asked to be."""
    return LlamaConfig(**{**SIZE, "max_position_embeddings": 8192, "eos_token_id": None, **sizes})


def write_folder(folder: Path, config: LlamaConfig | None = None, seed: int = 0) -> Path:
    """A checkpoint folder with random weights of a config (`endless` by default), without a chat template."""
    model = random_model(config or endless(), seed)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    known = tokenizer()
    known.chat_template, known.eos_token = None, None
    known.save_pretrained(folder)
    return folder


def write_gguf(path: Path, config: LlamaConfig | None = None, seed: int = 0) -> Path:
    """A Llama with random weights as a GGUF file (float32)."""
    config = config or endless()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    known = tokenizer()
    spare = ["ab", *(f"<|spare{i}|>" for i in range(config.vocab_size))]
    tokens = [*known.convert_ids_to_tokens(range(len(known))), *spare][: config.vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(SIZE["pad_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in random_model(config, seed).state_dict().items():
        inner = name.removesuffix(".weight")
        if inner.startswith("model.layers."):
            layer, inner = inner.removeprefix("model.layers.").split(".", 1)
            if GGUF_NAMES[inner] in ("attn_q", "attn_k"):  # llama.cpp keeps the two halves of a rotary pair next to each other
                heads = config.num_attention_heads if inner.endswith("q_proj") else config.num_key_value_heads
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[inner]}.weight", tensor.numpy())
        else:
            writer.add_tensor(f"{GGUF_NAMES[inner]}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
