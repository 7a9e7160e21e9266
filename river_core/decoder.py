"""The decoder: a Llama-shaped transformer built for decoding one token at a time on a preallocated cache.

Shapes: T rows (1 when decoding, the prompt's length when prefilling), d = hidden_size, V = vocab_size. The residual stream is
float32 whatever the products compute in; there is no batch axis, because every lane decodes one sequence.
"""

import contextlib
import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from river_core.errors import LoadError
from river_core.kernels import KernelPlan
from river_core.kv_cache import BACKBONE, KVCache, Slots
from river_core.rope import ROPE_TYPES, Rope, Rotation
from river_core.screening import Largest, Screen

PIECE = 512  # most rows of a prompt that go through a layer at once: what they need beside the cache is bounded, and a Stop is heard between two pieces

SUPPORTED_MODEL_TYPES = {
    "llama": "Llama, SmolLM2 and other models of the Llama architecture",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "phi3": "Phi-3, Phi-4-mini",
    "ministral3": "Ministral 3 (text model)",
}


def check_supported(config) -> None:
    """Raise LoadError, naming the supported architectures, unless the decoder can run a transformers text config."""
    model_type = getattr(config, "model_type", None)
    if model_type not in SUPPORTED_MODEL_TYPES:
        known = "; ".join(f"{kind} ({models})" for kind, models in SUPPORTED_MODEL_TYPES.items())
        raise LoadError(f"The architecture '{model_type}' is not supported. Supported are: {known}.")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else None
    if kind not in ROPE_TYPES:
        raise LoadError(f"The rope scaling {str(kind)[:40]!r} of this model is not supported. Supported are: {', '.join(ROPE_TYPES)}.")
    if config.hidden_act not in ACT2FN:
        raise LoadError(f"The activation {str(config.hidden_act)[:40]!r} of this model is not known.")
    heads, key_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if min(heads, key_heads, config.num_hidden_layers, config.hidden_size, config.intermediate_size) < 1 or heads % key_heads:
        raise LoadError("The sizes in this model's config do not fit together.")


@dataclass(frozen=True)
class DecoderConfig:
    """What the decoder needs to know of a model; names as in transformers.

    sliding_window: per layer, how many positions a token attends to (itself included), or None for all.
    qk_norm: queries and keys are normalised per head before the rotary embedding (Qwen3).
    """

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    sliding_window: tuple[int | None, ...]
    qk_norm: bool

    @classmethod
    def from_transformers(cls, config) -> "DecoderConfig":
        """Read a transformers text config; LoadError for an architecture that the decoder does not know."""
        check_supported(config)
        window = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        return cls(
            model_type=config.model_type,
            num_hidden_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            hidden_act=config.hidden_act,
            max_position_embeddings=config.max_position_embeddings,
            sliding_window=tuple(window if kind == "sliding_attention" else None for kind in layer_types),
            qk_norm=config.model_type == "qwen3",
        )


@dataclass(frozen=True)
class Block:
    """The weights of one decoder layer. A backbone block and its river twin differ in the class of their four products.

    qkv: d -> (num_attention_heads + 2 num_key_value_heads) head_dim, fused; o: back to d.
    gate_up: d -> 2 intermediate_size, fused; down: back to d.
    input_norm, post_norm: [d] float32. qk_norm: [num_attention_heads + num_key_value_heads, head_dim] float32, or None.
    """

    qkv: object
    o: object
    gate_up: object
    down: object
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qk_norm: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (self.qkv, self.o, self.gate_up, self.down))


class Blocks(list):
    """The blocks of a backbone or of a river, in order, and the compiled or captured code that runs them; `stack` is None where there is none.

    A stack has `run(hidden_states, first, last, cache, entries, rows)`, which does for one row what `Decoder.run_blocks` does, except for noting the owner, and
    returns the states, the similarity and the similarities of `States`; `entries` are those of `KVCache.entries_at`. One with `tests` also takes `tau`.

    offload: what brings the blocks from `resident` on back into memory (see `river_core.offload`); None: all of them are always there.
    """

    stack = None
    offload = None

    @property
    def resident(self) -> int:
        """How many blocks, from the first on, are always in memory."""
        return len(self) if self.offload is None else self.offload.after

    def at(self, layer: int, names=("qkv", "o", "gate_up", "down"), following: bool = False):
        """A block whose products `names` are in memory while the context lasts; `following`: the next block is certain to be asked for too."""
        if layer < self.resident:
            return contextlib.nullcontext(self[layer])
        return self.offload.layer(layer, names, following)


class States(list):
    """Hidden states after each of some blocks, [T, d] float32.

    similarity: cos(input, output) of the last of them, a float or 0-d on the device, where the code that ran it has made it; it holds until that code runs again.
        Else None.
    similarities: of each of them, floats, where the code has made those too.
    """

    def __init__(self, states=(), similarity=None, similarities=()):
        super().__init__(states)
        self.similarity, self.similarities = similarity, similarities


@dataclass(frozen=True)
class BlockWeights:
    """The tensors of one layer as the checkpoint has them, fused where the decoder fuses; the input of both kinds of block."""

    qkv: tuple[torch.Tensor, torch.Tensor | None]
    o: tuple[torch.Tensor, torch.Tensor | None]
    gate_up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]

    @classmethod
    def read(cls, weights: dict[str, torch.Tensor], layer: int) -> "BlockWeights":
        """Collect layer `layer` (0-based) from tensors under transformers' names."""
        prefix = f"model.layers.{layer}."

        def fused(*names):
            parts = [weights[f"{prefix}{name}.weight"] for name in names]
            biases = [weights.get(f"{prefix}{name}.bias") for name in names]
            weight = parts[0] if len(parts) == 1 else torch.cat(parts)
            if all(bias is None for bias in biases):
                return weight, None
            filled = [p.new_zeros(p.shape[0]) if b is None else b for p, b in zip(parts, biases, strict=True)]
            return weight, torch.cat(filled)

        packed = f"{prefix}self_attn.qkv_proj.weight" in weights  # Phi-3 stores the fused matrices
        return cls(
            qkv=fused("self_attn.qkv_proj") if packed else fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o=fused("self_attn.o_proj"),
            gate_up=fused("mlp.gate_up_proj") if packed else fused("mlp.gate_proj", "mlp.up_proj"),
            down=fused("mlp.down_proj"),
        )


@dataclass(frozen=True)
class Rows:
    """What every layer of one forward call shares: positions start .. start + count - 1, their rotation, cache slots and masks.

    masks: by window (None = unlimited), a bool mask [count, keys] aligned at the bottom right, or None where none is needed.
    """

    start: int
    count: int
    rotation: Rotation
    cache: KVCache
    masks: dict

    @cached_property
    def slots(self) -> Slots:
        """Views into the cache; compiled code, which finds its own way, never asks for them."""
        return self.cache.open(self.start, self.count, self.masks.keys())

    @cached_property
    def keys_rotation(self) -> Rotation:
        """The rotation of rows that have no queries."""
        return self.rotation.without_queries()

    @property
    def stop(self) -> int:
        return self.start + self.count


class Decoder:
    """The backbone: embeddings, full-precision blocks, final norm and head. Immutable once built; lanes share one.

    Args:
        config: transformers text config.
        weights: the checkpoint's tensors under transformers' names.
        plan: dtypes, kernels and device.
        progress: called with the fraction of layers that are in place.
        offload: an `Offload`, which takes the blocks from its depth on, one by one as they are made; None = all stay.

    Raises:
        LoadError: an architecture that is not supported, or a checkpoint that lacks a tensor.
    """

    def __init__(self, config, weights: dict[str, torch.Tensor], plan: KernelPlan, progress=None, offload=None):
        self.config = DecoderConfig.from_transformers(config)
        self.plan = plan
        self.device = plan.device
        c = self.config
        self.rope = Rope(config, c.num_attention_heads, c.num_key_value_heads, c.head_dim, plan.device)
        self.windows = set(c.sliding_window)
        self.act = F.silu if c.hidden_act == "silu" else ACT2FN[c.hidden_act]  # the function itself, without a module call around it
        try:
            self.norms = [self._norms(weights, layer) for layer in range(c.num_hidden_layers)]
            self.blocks = Blocks()
            self.blocks.offload = offload
            for layer in range(c.num_hidden_layers):
                tensors = BlockWeights.read(weights, layer)
                block = self.make_block(layer, lambda name, tensors=tensors: plan.dense(*getattr(tensors, name)))
                self.blocks.append(block if offload is None or layer < offload.after else offload.take(layer, block))
                if progress:
                    progress((layer + 1) / c.num_hidden_layers)
            self.final_norm = weights["model.norm.weight"].to(plan.device, torch.float32)
            embedding = weights["model.embed_tokens.weight"]
            self.lm_head = plan.dense(weights.get("lm_head.weight", embedding))
        except KeyError as error:
            raise LoadError(f"The checkpoint lacks the tensor {error}; it is incomplete or of another architecture.") from error
        self.screen: Screen | None = None
        self.lookup = None  # compiled: (embedding, id) -> [1, d] float32
        self.workspaces = None  # where layers are captured (see `graphs`): the storages that caches take turns with
        tied = "lm_head.weight" not in weights or weights["lm_head.weight"].data_ptr() == embedding.data_ptr()
        self.embedding = self.lm_head.weight if tied else embedding.to(plan.device, plan.dtype)

    def _norms(self, weights, layer):
        prefix = f"model.layers.{layer}."

        def norm(name):
            return weights[prefix + name].to(self.device, torch.float32)

        qk_norm = None
        if self.config.qk_norm:
            heads = [norm("self_attn.q_norm.weight")] * self.config.num_attention_heads
            heads += [norm("self_attn.k_norm.weight")] * self.config.num_key_value_heads
            qk_norm = torch.stack(heads)
        return norm("input_layernorm.weight"), norm("post_attention_layernorm.weight"), qk_norm

    def make_block(self, layer: int, product) -> Block:
        """A block of layer `layer` whose products are made by `product(name)`; norms are shared, never copied."""
        input_norm, post_norm, qk_norm = self.norms[layer]
        products = {name: product(name) for name in ("qkv", "o", "gate_up", "down")}
        return Block(**products, input_norm=input_norm, post_norm=post_norm, qk_norm=qk_norm)

    def new_cache(self, capacity: int, kind: type[KVCache] = KVCache) -> KVCache:
        """An empty cache of class `kind` for `capacity` positions, in the plan's `kv_dtype` and on its device."""
        if self.workspaces is not None:
            return self.workspaces.cache(kind, capacity)
        return kind(self.config, capacity, self.plan.kv_dtype, self.device)

    def embed(self, token_ids) -> torch.Tensor:
        """Token ids (list of T ints) -> hidden states [T, d], float32."""
        if self.lookup is not None and len(token_ids) == 1:
            return self.lookup(self.embedding, token_ids[0])
        ids = torch.tensor(token_ids, dtype=torch.long, device=self.device)
        return F.embedding(ids, self.embedding).to(torch.float32)

    def rows(self, start: int, count: int, cache: KVCache, length: int | None = None) -> Rows:
        """The shared part of a forward call over `count` positions from `start` on; everything before `start` is in `cache`. `length`: of the prompt that they are a
        piece of."""
        masks = {}
        for window in self.windows:
            if count == 1 or (start == 0 and (window is None or count <= window)):
                masks[window] = None  # one row sees its whole slice; a fresh prompt has the kernel's own causal mask
                continue
            queries = torch.arange(start, start + count, device=self.device)[:, None]
            keys = torch.arange(start + count, device=self.device)[None, :]
            allowed = keys <= queries
            masks[window] = allowed if window is None else allowed & (keys > queries - window)
        return Rows(start, count, self.rope.rotation(start, count, length), cache, masks)

    def run_blocks(
        self, blocks, first: int, last: int, hidden_states, rows: Rows, cache: KVCache, owner: int, tau: float | None = None
    ) -> States:
        """Blocks first .. last - 1 (0-based) one after another, in compiled or captured code where there is some and one row is decoded.

        Args:
            blocks: the backbone's or the river's, all of them. The others: as for `run_block`.
            tau: leave after a block whose input and output have a cosine above it; only where `tests_itself`.

        Returns:
            the hidden states after each of them that ran, [T, d] float32.
        """
        if tau is not None:
            return self._run_in_place(blocks, first, last, hidden_states, rows, cache, owner, tau)
        offload = getattr(blocks, "offload", None)
        if offload is not None and last > offload.after:
            return self._run_offloaded(blocks, first, last, hidden_states, rows, cache, owner)
        return self._run_in_place(blocks, first, last, hidden_states, rows, cache, owner)

    def tests_itself(self, rows: Rows, cache: KVCache) -> bool:
        """Whether `run_blocks` of the backbone can leave by itself: one row, compiled code, all layers and slots within its reach."""
        blocks = self.blocks
        return (
            rows.count == 1
            and getattr(blocks.stack, "tests", False)
            and blocks.offload is None
            and cache.entries_at(0, 1, rows.start, self.windows) is not None
        )

    def _run_offloaded(self, blocks, first, last, hidden_states, rows, cache, owner):
        """`run_blocks` where some are not in memory: those that are in one go, then the others one by one as they come back."""
        offload = blocks.offload
        states = States()
        if first < offload.after:
            states = self._run_in_place(blocks, first, offload.after, hidden_states, rows, cache, owner)
        for layer in range(max(first, offload.after), last):
            before = states[-1] if states else hidden_states
            with blocks.at(layer, following=layer + 1 < last) as block:
                if offload.in_place:
                    states += self._run_in_place(blocks, layer, layer + 1, before, rows, cache, owner)
                else:
                    states.append(self.run_block(block, layer, before, rows, cache, owner))
            states.similarity = None  # of the last layer, which captured code has not run
        return states

    def _run_in_place(self, blocks, first, last, hidden_states, rows, cache, owner, tau=None):
        """`run_blocks` where every block asked for is in memory."""
        stack = getattr(blocks, "stack", None)
        if stack is not None and rows.count == 1 and last > first:
            entries = cache.entries_at(first, last, rows.start, self.windows)
            if entries is not None:
                made = States(*stack.run(hidden_states, first, last, cache, entries, rows, *([] if tau is None else [tau])))
                cache.note(first, first + len(made), rows.start, owner)
                return made
        states = States()
        for layer in range(first, last):
            hidden_states = self.run_block(blocks[layer], layer, hidden_states, rows, cache, owner)
            states.append(hidden_states)
        return states

    def read_layer(
        self, blocks, layer: int, hidden_states, cache: KVCache, owner: int, rows: Rows | None = None, following: bool = False, pause=None
    ):
        """One decoder layer over a whole prompt at positions 0 .. T - 1, in pieces of at most `PIECE` rows of about the same length.

        Layer by layer rather than piece by piece: an exit that the least similar row decides sees all rows, an offloaded layer is brought back once, and states of
        two layers are all that a prompt of any length holds.

        Args:
            blocks, layer, cache, owner: as for `run_blocks`. hidden_states: [T, d] float32.
            rows: of the whole prompt, where it is one piece and the caller has them. following: the next layer is certain to be asked for too.
            pause: called before every piece; it may raise.

        Returns:
            [T, d] float32.
        """
        count = len(hidden_states)
        pieces = -(-count // PIECE)
        edges = [count * i // pieces for i in range(pieces + 1)]
        made = []
        with (
            contextlib.nullcontext(blocks[layer])
            if getattr(blocks, "offload", None) is None
            else blocks.at(layer, following=following) as block
        ):
            for start, stop in itertools.pairwise(edges):
                if pause:
                    pause()
                piece = rows or self.rows(start, stop - start, cache, count)
                made.append(self.run_block(block, layer, hidden_states[start:stop], piece, cache, owner))
        return made[0] if len(made) == 1 else torch.cat(made)

    def run_block(self, block: Block, layer: int, hidden_states, rows: Rows, cache: KVCache, owner: int) -> torch.Tensor:
        """One decoder layer over T rows; writes their keys and values, and who wrote them, before it attends.

        Args:
            block: the backbone's block of this layer, or its river twin.
            layer: 0-based; picks the cache slots, which both kinds of block share.
            hidden_states: [T, d] float32; left as it is.
            rows: from `rows()`.
            cache: the lane's.
            owner: `kv_cache.BACKBONE`, `RIVER`, ...

        Returns:
            [T, d] float32, a new tensor.
        """
        c = self.config
        x = rms_norm(hidden_states, block.input_norm, c.rms_norm_eps, block.qkv.dtype)
        heads = self._heads(block.qkv(x), block.qk_norm, rows.rotation)  # [T, query + key + value heads, head_dim]
        queries, new = heads.split([c.num_attention_heads, 2 * c.num_key_value_heads], 1)
        new = new.unflatten(1, (2, c.num_key_value_heads)).permute(1, 2, 0, 3)  # [2, key/value heads, T, head_dim]
        cache.write(layer, rows.slots, new, owner)
        attended = self._attend(queries, layer, rows)
        hidden_states = hidden_states + block.o(attended)
        x = rms_norm(hidden_states, block.post_norm, c.rms_norm_eps, block.gate_up.dtype)
        gate, up = block.gate_up(x).chunk(2, -1)
        return hidden_states + block.down(self.act(gate) * up)

    def write_keys_values(self, block: Block, layer: int, hidden_states, rows: Rows, cache: KVCache, owner: int) -> None:
        """Only what a layer leaves in the cache: norm, key and value projections, rotation. No attention, no MLP, no output.

        Arguments as for `run_block`; the queries' part of the fused product is not computed.
        """
        c = self.config
        x = rms_norm(hidden_states, block.input_norm, c.rms_norm_eps, block.qkv.dtype)
        queries = c.num_attention_heads
        qk_norm = None if block.qk_norm is None else block.qk_norm[queries:]
        new = self._heads(block.qkv.tail(queries * c.head_dim)(x), qk_norm, rows.keys_rotation)
        cache.write(layer, rows.slots, new.unflatten(1, (2, c.num_key_value_heads)).permute(1, 2, 0, 3), owner)

    def _heads(self, projected, qk_norm, rotation):
        """A fused projection [T, heads * head_dim] -> its heads [T, heads, head_dim] float32, normalised and turned to their positions."""
        heads = projected.to(torch.float32).view(len(projected), -1, self.config.head_dim)
        if qk_norm is not None:
            normed = len(qk_norm)
            scaled = F.rms_norm(heads[:, :normed], (self.config.head_dim,), eps=self.config.rms_norm_eps) * qk_norm
            heads = torch.cat([scaled, heads[:, normed:]], 1)
        return self.rope.rotate(heads, rotation)

    def _attend(self, queries, layer, rows):
        """Attention of T rows over the valid slice of one layer's cache -> [T, num_attention_heads * head_dim]."""
        c = self.config
        window = c.sliding_window[layer]
        keys, values = rows.slots.read[window]
        keys, values = keys[layer], values[layer]  # [1, key/value heads, S, head_dim]
        queries, mask = queries.to(keys.dtype), rows.masks[window]
        if rows.count == 1:
            # The query heads of one key/value head become rows of its query: four times faster than enable_gqa for one token.
            grouped = queries.view(1, c.num_key_value_heads, -1, c.head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(1, -1)
        queries = queries.transpose(0, 1).unsqueeze(0)  # [1, query heads, T, head_dim]
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return attended.squeeze(0).transpose(0, 1).reshape(rows.count, -1)

    def forward(self, token_ids: list[int], start: int, cache: KVCache) -> torch.Tensor:
        """The plain loop: all backbone blocks over T tokens at positions from `start` on -> hidden states [T, d], float32."""
        rows, hidden_states = self.rows(start, len(token_ids), cache), self.embed(token_ids)
        states = self.run_blocks(self.blocks, 0, len(self.blocks), hidden_states, rows, cache, BACKBONE)
        cache.length = rows.stop
        return states[-1]

    def head(self, hidden_state: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: the last block's output [T, d] -> logits [T, V], float32."""
        return self.lm_head(self.head_input(hidden_state)).to(torch.float32)

    def head_input(self, hidden_state: torch.Tensor) -> torch.Tensor:
        """The final norm: the last block's output [T, d] -> [T, d] in the head's dtype."""
        if self.screen is not None and len(hidden_state) == 1:
            # Compiled, as in `screening`: to the last bit what the screened head reads.
            return torch.ops.river_native.head_input.default(hidden_state, self.final_norm, self.config.rms_norm_eps, self.lm_head.dtype)
        return rms_norm(hidden_state, self.final_norm, self.config.rms_norm_eps, self.lm_head.dtype)

    def largest(self, hidden_state: torch.Tensor) -> Largest | None:
        """The largest of one state's logits without the others (see `screening`); None where only `head` can tell.

        Args:
            hidden_state: [1, d] float32.
        """
        return None if self.screen is None else self.screen(hidden_state, self.final_norm, self.config.rms_norm_eps)


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Root-mean-square norm of [T, d] float32 rows, cast to the dtype of the product that follows."""
    size = hidden_states.shape[-1]
    if hidden_states.shape[0] == 1 and hidden_states.device.type == "cpu":
        # F.rms_norm is seven small operations on a CPU; one dot product and one fused 0 + s * h * w take a third of its time.
        row = hidden_states.view(size)
        scale = 1.0 / math.sqrt(float(torch.dot(row, row)) / size + eps)
        return torch.addcmul(_zero, hidden_states, weight, value=scale).to(dtype)
    return F.rms_norm(hidden_states, (size,), weight, eps).to(dtype)


_zero = torch.zeros(())
