"""GGUF files of others: what they declare is computed, and what they lack is named."""

import json
import math
import shutil
import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

from river_core import LoadError, loading
from river_core.decoder import Decoder, check_supported
from river_core.kernels import choose_kernels
from river_core.loading import load_checkpoint
from river_core.measure.families import LLAMA3_ROPE
from tests import tiny_gguf
from tests.engine.test_families import forward
from tests.tiny import SIZE, random_model

SMALL = {**SIZE, "num_hidden_layers": 2}
LLAMA = LlamaConfig(**SMALL)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(path):
    return load_checkpoint(str(path), check=check_supported)


def refused(path, says):
    with pytest.raises(LoadError, match=says):
        load(path)
    assert not [folder for folder in (path.parent / "cache" / "converted").glob("*")]


@torch.inference_mode()
def same_as_transformers(path, config, ids=range(1, 49)):
    """Our decoder on the file, and transformers with the same weights and `config`."""
    reference, checkpoint = random_model(config), load(path)
    plan = choose_kernels("cpu", config.hidden_size, config.intermediate_size, torch.float32, 4, 32)
    decoder = Decoder(checkpoint.config, checkpoint.weights, plan)
    ids = list(ids)
    got = forward(decoder, ids, 0, decoder.new_cache(len(ids)))
    torch.testing.assert_close(got, reference(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)
    # The converted folder says the same to transformers.
    again = AutoModelForCausalLM.from_pretrained(checkpoint.path).eval()
    torch.testing.assert_close(again(torch.tensor([ids])).logits[0], reference(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)
    return checkpoint


def pop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (pop("blk.1.ffn_down.weight"), r"lacks blk.1.ffn_down.weight; it is incomplete"),
        (pop("blk.0.attn_q.weight", "blk.1.attn_k.weight"), r"lacks blk.0.attn_q.weight \(and 1 more\)"),
        (pop("output_norm.weight"), "lacks output_norm.weight"),
        (pop("token_embd.weight"), "lacks token_embd.weight"),
        (lambda t: t.update({"blk.0.attn_v.weight": t["blk.0.attn_v.weight"][:-4]}), r"blk.0.attn_v.weight has the shape \[28, 64\]"),
        (lambda t: t.update({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}), "holds blk.0.attn_q_norm.weight"),
        (
            lambda t: t.update({"blk.0.ffn_gate_exps.weight": t.pop("blk.0.ffn_gate.weight")}),
            "lacks blk.0.ffn_gate.weight and holds blk.0.ffn_gate_exps",
        ),
        (lambda t: t.update({"blk.2.attn_norm.weight": t["blk.1.attn_norm.weight"]}), "holds blk.2.attn_norm.weight"),
        (lambda t: t["blk.1.ffn_up.weight"].__setitem__((3, 4), np.nan), r"mlp.up_proj.weight holds NaN"),
        (lambda t: t["token_embd.weight"].__setitem__((3, 4), np.inf), r"embed_tokens.weight holds NaN or infinity"),
    ],
)
def test_files_with_wrong_tensors_are_refused_by_name(tmp_path, change, says):
    refused(tiny_gguf.write(tmp_path / "broken.gguf", LLAMA, change=change), says)


def test_a_part_of_a_model_names_the_parts_that_are_not_there(tmp_path):
    first = tiny_gguf.write(tmp_path / "big-00001-of-00003.gguf", LLAMA, {"split.count": 3}, change=pop("blk.1.ffn_down.weight"))
    refused(first, "one of 3 parts of a model, and big-00002-of-00003.gguf, big-00003-of-00003.gguf are not beside it")
    shutil.copy(first, tmp_path / "big-00002-of-00003.gguf")
    refused(first, "and big-00003-of-00003.gguf is not beside it")
    shutil.copy(first, tmp_path / "big-00003-of-00003.gguf")
    refused(first, "llama-gguf-split --merge big-00001-of-00003.gguf big.gguf")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"general.type": "adapter"}, "is an adapter"),
        ({"general.type": "mmproj"}, "vision part"),
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"logit_scale": 0.5}, "llama.logit_scale"),
        ({"attention.scale": 0.5}, "llama.attention.scale = 0.5"),
        ({"attention.causal": False}, "llama.attention.causal"),
        ({"rope.scaling.type": "ntk-aware-v9"}, "'ntk-aware-v9'"),
        ({"rope.scaling.type": "longrope"}, "lacks rope_factors_long"),
        ({"rope.scaling.type": "yarn"}, "no factor above 1"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"rope.dimension_count": 8}, "rotates 8 of 16 numbers"),
    ],
)
def test_declarations_that_are_not_computed_are_refused_by_name(tmp_path, fields, says):
    refused(tiny_gguf.write(tmp_path / "other.gguf", LLAMA, fields), says)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
ROPES = {
    "none": ({}, {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "an older linear": ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "declared none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default", "rope_theta": 10000.0}),
    "yarn": ({"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32}, YARN),
    "yarn with its options": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_attn_factor": 1.5,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        },
        {**YARN, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    "yarn with a log multiplier": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.5,
        },
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scaling_is_applied_as_transformers_does(tmp_path, rope):
    fields, parameters = ROPES[rope]
    path = tiny_gguf.write(tmp_path / "rope.gguf", LLAMA, fields)
    same_as_transformers(path, LlamaConfig(**SMALL, rope_parameters=parameters))


def llama3_factors(rope, dim=16):
    """What llama.cpp's converter writes as rope_freqs for Llama 3.1."""
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        low, high = (rope["original_max_position_embeddings"] / rope[key] for key in ("low_freq_factor", "high_freq_factor"))
        smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        yield 1.0 if wavelength < high else rope["factor"] if wavelength > low else 1 / ((1 - smooth) / rope["factor"] + smooth)


def test_llama_3s_rope_freqs_are_its_config(tmp_path):
    factors = np.array(list(llama3_factors(LLAMA3_ROPE)), np.float32)
    assert len(set(factors.tolist())) > 2
    path = tiny_gguf.write(tmp_path / "llama31.gguf", LLAMA, change=lambda t: t.update({"rope_freqs.weight": factors}))
    checkpoint = same_as_transformers(path, LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE))
    assert Decoder(checkpoint.config, checkpoint.weights, choose_kernels("cpu", 64, 128, torch.float32, 4, 32)).rope._static is not None


def test_factors_that_fit_no_head_are_refused(tmp_path):
    damage = {"rope_freqs.weight": np.array([1.0, 2.0], np.float32)}
    refused(tiny_gguf.write(tmp_path / "odd.gguf", LLAMA, change=lambda t: t.update(damage)), "rope factors do not fit")
    damage = {"rope_freqs.weight": np.full(8, np.nan, np.float32)}
    refused(tiny_gguf.write(tmp_path / "nan.gguf", LLAMA, change=lambda t: t.update(damage)), "rope factors do not fit")


@pytest.mark.parametrize("count", [24, 48])
def test_phis_long_rope_partial_heads_and_window(tmp_path, count):
    """Phi-4-mini rotates three quarters of a head, by long factors once the text is longer than 32; Phi-3 attends to a window."""
    short, long = [1.0 + 0.1 * i for i in range(6)], [2.0 + 0.3 * i for i in range(6)]
    attention = math.sqrt(1 + math.log(256 / 32) / math.log(32))
    fields = {"rope.dimension_count": 12, "rope.scaling.type": "longrope", "rope.scaling.attn_factor": attention}
    fields |= {"rope.scaling.original_context_length": 32, "attention.sliding_window": 20}
    factors = {"rope_factors_short.weight": np.array(short, np.float32), "rope_factors_long.weight": np.array(long, np.float32)}
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": short, "long_factor": long}
    parameters["original_max_position_embeddings"] = 32
    config = Phi3Config(**SMALL, rope_parameters=parameters, original_max_position_embeddings=32, sliding_window=20)
    path = tiny_gguf.write(tmp_path / "phi.gguf", config, fields, change=lambda t: t.update(factors))
    same_as_transformers(path, config, range(1, 1 + count))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (Qwen2Config(**SMALL), {}),
        (Qwen3Config(**SMALL, head_dim=32), {"attention.key_length": 32, "attention.value_length": 32}),
        (LlamaConfig(**SMALL, head_dim=32), {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}),
        (LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True), {}),
        (LlamaConfig(**SMALL, tie_word_embeddings=True), {}),
    ],
)
def test_what_transformers_passes_over_in_a_file_is_read(tmp_path, config, fields):
    same_as_transformers(tiny_gguf.write(tmp_path / "model.gguf", config, fields), config)


def test_rows_that_pad_the_embedding_are_no_mistake(tmp_path):
    config = LlamaConfig(**{**SMALL, "vocab_size": 320})
    checkpoint = same_as_transformers(tiny_gguf.write(tmp_path / "padded.gguf", config), config)
    assert len(checkpoint.tokenizer) < checkpoint.config.vocab_size == 320


def test_ends_of_answers_are_the_files_own(tmp_path):
    """A family's default ids are another vocabulary's: token 2 of this one is a letter."""
    path = tiny_gguf.write(tmp_path / "model.gguf", LLAMA, {"tokenizer.ggml.eot_token_id": 257})
    assert load(path).eos_token_ids == {256, 257, 258}


def test_types_that_the_library_does_not_know_get_a_sentence(tmp_path):
    path = tiny_gguf.write(tmp_path / "new.gguf", LLAMA)
    content, name = bytearray(path.read_bytes()), b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # after the name: the number of dimensions, two of them, and the type
    assert struct.unpack_from("<I", content, at) == (0,)
    struct.pack_into("<I", content, at, 197)
    path.write_bytes(content)
    refused(path, "GGUF type 197, which the installed gguf library .* does not know. Try pip install --upgrade gguf")
    integers = {"blk.0.ffn_up.weight": (np.zeros((128, 64), np.int8), GGMLQuantizationType.I8)}
    refused(tiny_gguf.write(tmp_path / "int.gguf", LLAMA, change=lambda t: t.update(integers)), "GGUF type I8, which .* cannot unpack")


def test_a_git_lfs_pointer_is_named(tmp_path):
    path = tmp_path / "pointer.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    refused(path, "pointer.gguf is a git-lfs pointer")


def test_another_version_of_a_library_converts_again_and_the_older_folder_goes(tmp_path, cache, monkeypatch):
    path = tiny_gguf.write(tmp_path / "model.gguf", LLAMA)
    first = load(path)
    assert first.path.name.endswith(f"-v{loading.CONVERSION_VERSION}-{loading.version('transformers')}-{loading.version('gguf')}")
    (cache / "converted" / f"{first.sha256[:32]}-v1").mkdir()
    (cache / "converted" / f"{'0' * 32}-v1").mkdir()
    real = loading.version
    monkeypatch.setattr(loading, "version", lambda name: "99.0" if name == "transformers" else real(name))
    second = load(path)
    assert second.path != first.path and "99.0" in second.path.name
    assert {folder.name for folder in (cache / "converted").iterdir()} == {second.path.name, f"{'0' * 32}-v1"}


def test_converted_weights_that_have_changed_on_the_disk_are_made_again(tmp_path):
    path = tiny_gguf.write(tmp_path / "model.gguf", LLAMA)
    first = load(path)
    kept = {name: tensor.clone() for name, tensor in first.weights.items()}
    file = first.path / "model.safetensors"
    content = bytearray(file.read_bytes())
    del first
    content[-4096:] = bytes(4096)  # a page that a power cut has lost; its size and all names are right
    file.unlink()
    file.write_bytes(content)
    healed = load(path)
    assert all(torch.equal(healed.weights[name], tensor) for name, tensor in kept.items())
    assert json.loads((healed.path / "converted.json").read_text())["sums"]
