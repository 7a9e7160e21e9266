"""Tiny GGUF files (float32), which unpack in a fraction of a second."""

import gguf
import numpy as np

from tests.tiny import CHAT_TEMPLATE, SIZE, random_model, tokenizer

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tensors(config) -> dict[str, np.ndarray]:
    """The tensors of a random model of a config, named and laid out as llama.cpp's converter does."""
    found = {}
    for name, tensor in random_model(config).state_dict().items():
        inner, _, suffix = name.rpartition(".")
        if inner.startswith("model.layers."):
            layer, inner = inner.removeprefix("model.layers.").split(".", 1)
            if config.model_type == "llama" and NAMES[inner] in (
                "attn_q",
                "attn_k",
            ):  # the two halves of a rotary pair lie next to each other
                heads = config.num_attention_heads if inner.endswith("q_proj") else config.num_key_value_heads
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
            found[f"blk.{layer}.{NAMES[inner]}.{suffix}"] = tensor.numpy()
        elif not (inner == "lm_head" and config.tie_word_embeddings):
            found[f"{NAMES[inner]}.{suffix}"] = tensor.numpy()
    return found


def write(path, config, fields=(), change=lambda tensors: None, vocabulary=SIZE["vocab_size"]):
    """Write a random model of a config; returns `path`.

    fields: more keys, (name, value), without the architecture. change: called with the tensors before they are written.
    vocabulary: tokens of the tokenizer.
    """
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    known = tokenizer()
    spare = ["ab", *(f"<|spare{i}|>" for i in range(vocabulary))]
    tokens = [*known.convert_ids_to_tokens(range(len(known))), *spare][:vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(SIZE["eos_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in dict(fields).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key if key.startswith(("split.", "general.", "adapter.", "tokenizer.")) else f"{architecture}.{key}", value)
    written = tensors(config)
    change(written)
    for name, tensor in written.items():
        if isinstance(tensor, tuple):  # raw bytes of a quantised type
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
