"""Models of a published shape with random weights: their speed can be measured without the checkpoints."""

import dataclasses

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, Ministral3Config, Phi3Config, PreTrainedTokenizerFast

from river_core.decoder import Decoder
from river_core.errors import InputError, LoadError
from river_core.hqq import Quantised
from river_core.kernels import KernelPlan, choose_kernels
from river_core.loading import available_memory, cache_dir
from river_core.model import DTYPES, Model, offload_folder, offload_notes, resolve_device, set_threads
from river_core.native import NATIVE
from river_core.offload import ROOM, make_offload, trim_heap
from river_core.river import River


def _llama(hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, tied):
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=131072,
    )  # fmt: skip


# Sizes as in the models' config.json. A shape is sizes only: rope scaling and the like cost no time.
SHAPES = {
    "smollm2-135m": lambda: _llama(576, 1536, 30, 9, 3, 64, 49152, True),
    "smollm2-360m": lambda: _llama(960, 2560, 32, 15, 5, 64, 49152, True),
    "llama3.2-1b": lambda: _llama(2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama3.2-3b": lambda: _llama(3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama3.1-8b": lambda: _llama(4096, 14336, 32, 32, 8, 128, 128256, False),
    "phi4-mini": lambda: Phi3Config(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=24, num_key_value_heads=8, vocab_size=200064,
        tie_word_embeddings=True, max_position_embeddings=131072, partial_rotary_factor=0.75, pad_token_id=0,
    ),
    "ministral3-8b": lambda: Ministral3Config(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=34, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=131072, tie_word_embeddings=False, max_position_embeddings=262144,
    ),
}  # fmt: skip


class RandomPlan(KernelPlan):
    """A plan whose river has random codes: quantising weights that mean nothing would only take time."""

    def quantise(self, weight):
        rows, columns = weight.shape
        group = self.group_size or columns
        codes = torch.randint(0, 2**self.bits, (rows, columns), dtype=torch.uint8, device=self.device)
        scales = torch.full((rows, columns // group), 0.02 / 2**self.bits, device=self.device)
        return Quantised(codes, scales, torch.full_like(scales, 2.0 ** (self.bits - 1)), self.bits, group)


class Weights(dict):
    """Random tensors of a config's names and shapes, made when they are asked for, so that no second copy of the model is held."""

    def __init__(self, config, dtype, device):
        self.shapes, self.dtype, self.device = dict(_tensors(config)), dtype, device
        super().__init__()

    def __contains__(self, name):
        return name in self.shapes

    def get(self, name, default=None):
        return self[name] if name in self.shapes else default

    def __missing__(self, name):
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        # Uniform numbers with the spread that a linear layer starts from: activations stay of the same size from layer to layer.
        bound = (3.0 / shape[-1]) ** 0.5
        return torch.empty(shape, dtype=self.dtype, device=self.device).uniform_(-bound, bound)


def _tensors(config):
    """Names and shapes of a checkpoint of this config."""
    d, wide, head_dim = (
        config.hidden_size,
        config.intermediate_size,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, d)
    yield "model.norm.weight", (d,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, d)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (d,)
        yield f"{prefix}post_attention_layernorm.weight", (d,)
        yield f"{prefix}self_attn.q_proj.weight", (queries, d)
        yield f"{prefix}self_attn.k_proj.weight", (keys, d)
        yield f"{prefix}self_attn.v_proj.weight", (keys, d)
        yield f"{prefix}self_attn.o_proj.weight", (d, queries)
        yield f"{prefix}mlp.gate_proj.weight", (wide, d)
        yield f"{prefix}mlp.up_proj.weight", (wide, d)
        yield f"{prefix}mlp.down_proj.weight", (d, wide)


def bytes_needed(config, itemsize: int, offload_after: int | None = None) -> float:
    """Bytes that a model of a config takes: weights of `itemsize` bytes each and its river; without the layers that are offloaded."""
    sizes = {name: torch.Size(shape).numel() for name, shape in _tensors(config)}
    river = 1.1 * sum(sizes.values())  # its packed codes and those that its prefill needs are half a byte each
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    away = 0 if offload_after is None else max(0, config.num_hidden_layers - offload_after - ROOM) * layer
    return itemsize * (sum(sizes.values()) - away) + river


def byte_tokenizer(special=()) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and some special tokens."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def shaped_model(
    shape: str,
    *,
    device="auto",
    dtype="auto",
    kv_dtype="auto",
    bits=4,
    group_size=64,
    threads=None,
    river_kernel="auto",
    compiled=True,
    products="auto",
    screen_head="auto",
    offload_after=None,
    progress=None,
) -> Model:
    """A model of a published shape with random weights: right for speed, and for nothing else.

    Args:
        shape: a key of `SHAPES`. The others: as for `load`.

    Raises:
        InputError: an unknown shape. LoadError: it does not fit into memory.
    """
    if shape not in SHAPES:
        raise InputError(f"There is no shape {shape[:40]!r}; choose from {', '.join(SHAPES)}.")
    report = progress or (lambda stage, fraction, message: None)
    target = resolve_device(device)
    set_threads(threads)
    config = SHAPES[shape]()
    wanted, wanted_kv = (value if value == "auto" else DTYPES[value] for value in (dtype, kv_dtype))
    plan = choose_kernels(target, config.hidden_size, config.intermediate_size, wanted, bits, group_size, river_kernel, wanted_kv)
    offload = make_offload(offload_after, config.num_hidden_layers, target, offload_folder())
    needed = bytes_needed(config, plan.dtype.itemsize, offload.after if offload else None)
    available = available_memory()
    if target.type == "cpu" and available is not None and needed > 0.9 * available:
        raise LoadError(f"The shape {shape} needs about {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are free.")
    plan = RandomPlan(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)})
    torch.manual_seed(0)
    weights = Weights(config, plan.dtype, target)
    decoder = Decoder(config, weights, plan, lambda f: report("weights", f, f"making weights, {round(100 * f)} %"), offload)
    river = River(decoder, weights, lambda f: report("river", f, f"making the river, {round(100 * f)} %"))
    if offload:
        trim_heap()
    if compiled and target.type == "cpu":
        NATIVE.start(cache_dir() / "native")
    model = Model(f"{shape} (random weights)", "random", decoder, river, byte_tokenizer(), frozenset(), notes=offload_notes(decoder))
    model.compiled, model.screens = (None if compiled and target.type in ("cpu", "cuda") else False), screen_head
    model.products_wanted = products
    return model
