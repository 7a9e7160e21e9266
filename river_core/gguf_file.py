"""What a GGUF file says of itself, held against what transformers makes of it.

transformers reads the weights. It drops tensors that it does not know, fills those that are missing with noise, and reads few of the keys that change what a
model computes; here the header is compared with the model that the config describes, and the keys that were passed over go into the config or are refused.

Source of the keys: the GGUF specification (ggml, docs/gguf.md) and llama.cpp's reading of them.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from river_core.errors import LoadError

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
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Keys that change what the layers compute and that the decoder has no place for, with the value at which they change nothing.
NEUTRAL = {
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.temperature_scale": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "embedding_scale": 1,
    "residual_scale": 1,
    "logit_scale": 1,
    "expert_count": 0,
    "attention.causal": True,
    "pooling_type": 0,
    "use_parallel_residual": False,
}
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class GgufFile:
    """The header of a file that is whole.

    architecture: llama.cpp's name for it. shapes: of the tensors, by their names in the file, in PyTorch's order.
    """

    path: Path
    reader: object

    @cached_property
    def architecture(self) -> str:
        return str(self.value("general.architecture", "unknown"))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in self.reader.tensors}

    @cached_property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def value(self, key: str, default=None):
        """A field by its whole name; `default` where the file has none."""
        found = self.reader.get_field(key)
        return default if found is None else found.contents()

    def of_model(self, key: str, default=None):
        """A field of the architecture: "rope.freq_base" is llama.rope.freq_base in a Llama's file."""
        return self.value(f"{self.architecture}.{key}", default)

    def floats(self, name: str) -> list[float] | None:
        """A small tensor as numbers; None where the file has none of that name."""
        import gguf

        tensor = next((tensor for tensor in self.reader.tensors if tensor.name == name), None)
        return None if tensor is None else gguf.dequantize(tensor.data, tensor.tensor_type).ravel().tolist()


def open_gguf(path: Path) -> GgufFile:
    """Read a file's header; LoadError unless it is one whole language model whose numbers can be unpacked."""
    import gguf

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path.name} is not a GGUF file.")
    known = f"the installed gguf library ({version('gguf')})"
    try:
        file = GgufFile(path, gguf.GGUFReader(path))
        _refuse_parts(file)  # a part's own tensors may lie in another file
        end = max((tensor.data_offset + tensor.n_bytes for tensor in file.reader.tensors), default=0)
        elements = file.elements
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        why = str(error)
        if kind := re.search(r"(\d+)\)? is not a valid (GGMLQuantizationType|GGUFValueType)", why):
            raise LoadError(
                f"{path.name} holds weights or fields of GGUF type {kind[1]}, which {known} does not know. "
                "Try pip install --upgrade gguf, or take the file in another quantisation, such as Q4_K_M or Q8_0."
            ) from error
        if "file appears to be version" in why:
            raise LoadError(f"{path.name}: {known} cannot read it ({why}). Try pip install --upgrade gguf.") from error
        raise LoadError(
            f"{path.name} is damaged or cut off: its header cannot be read ({why.splitlines()[0][:200] if why else type(error).__name__})."
        ) from error
    if not elements or end > path.stat().st_size:
        raise LoadError(f"{path.name} is cut off: it ends before its last weights. Download it again.")
    for kind in {tensor.tensor_type for tensor in file.reader.tensors}:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError as error:
            raise LoadError(
                f"{path.name} holds weights of GGUF type {kind.name}, which {known} cannot unpack. "
                "Try pip install --upgrade gguf, or take the file in another quantisation, such as Q4_K_M or Q8_0."
            ) from error
    return file


def _refuse_parts(file: GgufFile) -> None:
    """LoadError for a file that is only a part of a model: a shard, an adapter, a vision tower."""
    path = file.path
    count = file.value("split.count", 0)
    if count > 1:
        named = SHARD.fullmatch(path.name)
        names = [f"{named[1]}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)] if named else []
        absent = [name for name in names if not (path.parent / name).is_file()]
        if absent:
            raise LoadError(
                f"{path.name} is one of {count} parts of a model, and {', '.join(absent[:3])}{' and others are' if absent[3:] else ' is' if len(absent) == 1 else ' are'} "
                f"not beside it. Download all parts, then join them with llama.cpp: llama-gguf-split --merge {names[0]} {named[1]}.gguf"
            )
        first = names[0] if names else path.name
        raise LoadError(
            f"{path.name} is one of {count} parts of a model. Join them with llama.cpp: llama-gguf-split --merge {first} {named[1] if named else 'whole'}.gguf, "
            "and load what it writes."
        )
    kind = file.value("general.type", "model")
    if kind == "adapter" or file.value("adapter.type") is not None:
        raise LoadError(
            f"{path.name} is an adapter (LoRA), not a model: merge it into its base model (llama.cpp: llama-export-lora) first."
        )
    if kind == "mmproj" or file.architecture == "clip":
        raise LoadError(f"{path.name} is the vision part of a model; load the language model's own .gguf file.")


def complete_config(file: GgufFile, config) -> None:
    """Write into a transformers config what the file says and transformers does not read.

    Args:
        config: what transformers made of the same file. Changed in place: biases, head size, sliding window, vocabulary, control tokens, rope.

    Raises:
        LoadError: the file asks for something that the decoder does not compute.
    """
    _refuse_unknown(file)
    d, heads = config.hidden_size, config.num_attention_heads
    head_dim = file.of_model("attention.key_length") or d // heads
    if file.of_model("attention.value_length", head_dim) != head_dim:
        raise LoadError(f"{file.path.name}: keys and values of different sizes (attention.value_length) are not supported.")
    scale = file.of_model("attention.scale", 0)
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-4):
        raise LoadError(f"{file.path.name} declares {file.architecture}.attention.scale = {scale:g}, which is not supported.")
    if hasattr(config, "head_dim") or head_dim * heads != d:
        config.head_dim = head_dim
    if "token_embd.weight" in file.shapes:  # rows that pad the vocabulary are the embedding's, and no token of the tokenizer
        config.vocab_size = file.shapes["token_embd.weight"][0]
    # A family's defaults are ids of its own vocabulary: another model's file that leaves one out must not get them.
    ends = [file.value(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    config.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None)) or None
    config.bos_token_id, config.pad_token_id = file.value("tokenizer.ggml.bos_token_id"), None
    if hasattr(config, "attention_bias"):
        config.attention_bias = "blk.0.attn_q.bias" in file.shapes
    if hasattr(config, "mlp_bias"):
        config.mlp_bias = "blk.0.ffn_up.bias" in file.shapes
    if config.model_type == "phi3" and (window := file.of_model("attention.sliding_window")):
        config.sliding_window = window
        config.layer_types = None  # made again from the window
    config.rope_parameters = _rope(file, config, head_dim)
    if config.rope_parameters["rope_type"] == "longrope" and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = config.rope_parameters["original_max_position_embeddings"]


def _refuse_unknown(file: GgufFile) -> None:
    for key, neutral in NEUTRAL.items():
        value = file.of_model(key, neutral)
        if value != neutral:
            raise LoadError(f"{file.path.name} declares {file.architecture}.{key} = {value}, which the decoder does not compute.")
    if any(file.of_model("rope.dimension_sections", [])):
        raise LoadError(
            f"{file.path.name} rotates several kinds of position (rope.dimension_sections), which the decoder does not compute."
        )


def _rope(file: GgufFile, config, head_dim: int) -> dict:
    """`rope_parameters` of a config that rotates as the file declares.

    A linear factor, YaRN and long-rope are transformers' own types. `rope_freqs` (Llama 3.1 and later) divides each frequency by a factor of its own:
    that is long-rope whose short and long factors are the same, with nothing on cosine and sine.
    """
    name, kind = file.path.name, file.of_model("rope.scaling.type")
    factor = file.of_model("rope.scaling.factor") or file.of_model("rope.scale_linear") or 1.0
    long, short = file.floats("rope_factors_long.weight"), file.floats("rope_factors_short.weight")
    freqs = file.floats("rope_freqs.weight")
    if freqs is not None and all(number == 1 for number in freqs):
        freqs = None
    if kind is None:  # as llama.cpp reads it
        kind = "longrope" if long or short else "linear"
    rotary = file.of_model("rope.dimension_count") or head_dim
    if rotary > head_dim or (rotary < head_dim and config.model_type != "phi3"):
        raise LoadError(
            f"{name} rotates {rotary} of {head_dim} numbers of a head (rope.dimension_count), which is not supported for {file.architecture}."
        )
    common = {"rope_theta": float(file.of_model("rope.freq_base") or 10000.0)}
    if rotary < head_dim:
        common["partial_rotary_factor"] = rotary / head_dim
    original = file.of_model("rope.scaling.original_context_length") or config.max_position_embeddings
    attention = file.of_model("rope.scaling.attn_factor") or 1.0
    for numbers in (freqs, long, short):
        if numbers is not None and (len(numbers) != rotary // 2 or not all(number > 0 and math.isfinite(number) for number in numbers)):
            raise LoadError(f"{name}: its rope factors do not fit heads of {head_dim} numbers; the file is damaged or of another model.")
    if kind in ("none", "linear"):
        factor = 1.0 if kind == "none" else factor
        if freqs is not None:
            factors = [factor * number for number in freqs]
            return common | _long(factors, factors, original, attention)
        if attention != 1.0:
            raise LoadError(f"{name} declares rope.scaling.attn_factor = {attention:g} without YaRN or long-rope, which is not supported.")
        return common | ({"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": float(factor)})
    if freqs is not None:
        raise LoadError(f"{name} declares both {kind} rope scaling and rope_freqs, which is not supported together.")
    if kind == "longrope":
        if long is None or short is None:
            raise LoadError(f"{name} declares long-rope and lacks rope_factors_long.weight or rope_factors_short.weight; it is incomplete.")
        stretched = config.max_position_embeddings / original
        implied = math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0
        return common | _long(short, long, original, file.of_model("rope.scaling.attn_factor") or implied)
    if kind != "yarn":
        raise LoadError(f"{name} declares rope scaling of the kind {str(kind)[:40]!r}; none, linear, yarn and longrope are known.")
    if file.of_model("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise LoadError(f"{name} declares rope.scaling.yarn_ext_factor, which is not supported.")
    if factor <= 1.0:
        raise LoadError(f"{name} declares YaRN and no factor above 1 (rope.scaling.factor); it is incomplete.")
    yarn = common | {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if (value := file.of_model(f"rope.scaling.yarn_{key}")) is not None:
            yarn[key] = value
    own, log_mul = file.of_model("rope.scaling.yarn_attn_factor"), file.of_model("rope.scaling.yarn_log_multiplier")
    if log_mul:
        yarn |= {"mscale": 1.0, "mscale_all_dim": log_mul}
    if own is not None or attention != 1.0:
        yarn["attention_factor"] = (0.1 * math.log(factor) + 1.0 if own is None else own) * attention
    return yarn


def _long(short, long, original, attention):
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": float(attention),
    }


def check_tensors(file: GgufFile, config) -> None:
    """LoadError unless the file holds every tensor of the model that `config` describes, in its shape, and none that this model has no place for."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    wanted = {_name(name): tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    given, where = file.shapes, file.path.name
    missing = [name for name in wanted if name not in given]
    extra = [name for name in given if name not in wanted and name not in ROPE_TENSORS and not name.endswith("attn_rot_embd.weight")]
    if extra:
        lacks = f" lacks {missing[0]} and" if missing else ""
        raise LoadError(
            f"{where}{lacks} holds {extra[0]}{_more(extra)}, for which a model of the architecture '{file.architecture}' with {config.num_hidden_layers} layers "
            "has no place: it is of another kind, which is not supported."
        )
    if missing:
        raise LoadError(f"{where} lacks {missing[0]}{_more(missing)}; it is incomplete. Download or convert it again.")
    for name, shape in wanted.items():
        if given[name] != shape:
            raise LoadError(
                f"{where}: {name} has the shape {list(given[name])}, and its own sizes ask for {list(shape)}; the file is damaged."
            )


def _name(name: str) -> str:
    """The name in a GGUF file of a tensor that transformers calls `name`."""
    inner, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", inner)
    return f"blk.{layer[1]}.{NAMES.get(layer[2], layer[2])}.{suffix}" if layer else f"{NAMES.get(inner, inner)}.{suffix}"


def _more(names) -> str:
    return f" (and {len(names) - 1} more)" if names[1:] else ""
