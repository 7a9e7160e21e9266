"""Rotary position embedding for query, key and value heads at once, with frequencies from transformers' own functions."""

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from river_core.errors import LoadError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
FIRST = 512  # positions of the first table


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of some consecutive positions, each [rows, kinds, rotary_dim / 2] float32.

    kinds: 1 where queries and keys turn alike; 2 where queries are scaled with their position, which a cosine and a sine can carry: queries, then keys.
    heads: how many heads of a row are queries and how many keys. `cos` and `sin` have them head by head, for code that turns a whole row at once.
    """

    half_cos: torch.Tensor
    half_sin: torch.Tensor
    heads: tuple[int, int]
    head_dim: int

    @cached_property
    def cos(self) -> torch.Tensor:
        """[rows, heads, head_dim], heads = queries + 2 * keys. Value heads carry cosine 1 and sine 0, so that one product turns the queries and keys of a row
        and leaves its values alone; so does what lies beyond the rotary dimensions."""
        return self._by_head(torch.cat([self.half_cos, self.half_cos], -1), 1.0)

    @cached_property
    def sin(self) -> torch.Tensor:
        """As `cos`; rotate_half gives (-x2, x1), and `Rope.rotate` only swaps the halves, so the sign sits in the sine."""
        return self._by_head(torch.cat([-self.half_sin, self.half_sin], -1), 0.0)

    def _by_head(self, turned, rest):
        queries, keys = self.heads
        whole = turned.new_full((len(turned), queries + 2 * keys, self.head_dim), rest)
        whole[:, :queries, : turned.shape[-1]] = turned[:, :1]
        whole[:, queries : queries + keys, : turned.shape[-1]] = turned[:, -1:]
        return whole

    def without_queries(self) -> "Rotation":
        """The same for rows of keys and values only."""
        return Rotation(self.half_cos[:, -1:], self.half_sin[:, -1:], (0, self.heads[1]), self.head_dim)


class Rope:
    """The rotary embedding of one model; holds no state of any run, only a table that all runs share, as long as the longest of them so far.

    Args:
        config: a transformers text config with `rope_parameters`; its type is one of `ROPE_TYPES`.
        num_attention_heads, num_key_value_heads, head_dim: as in `DecoderConfig`.
        device: where the rotations live.
    """

    def __init__(self, config, num_attention_heads: int, num_key_value_heads: int, head_dim: int, device="cpu"):
        self.config = config
        self.parameters = config.rope_parameters
        self.rope_type = self.parameters["rope_type"]
        self.heads = (num_attention_heads, num_key_value_heads)
        self.head_dim = head_dim
        self.device = device
        self.rotary_dim = 2 * len(self._frequencies(1)[0])
        # Ministral 3 scales queries with their position; a rotation is linear, so the factor goes into its cosine and sine.
        self.query_beta = self.parameters.get("llama_4_scaling_beta")
        if self.query_beta is not None and self.rotary_dim != head_dim:
            raise LoadError("Queries that are scaled with their position and turned in part only are not supported.")
        # Factors that are the same for short and long texts stand for a fixed set of frequencies, such as a GGUF file's rope_freqs.
        moves = self.rope_type == "dynamic" or (
            self.rope_type == "longrope" and self.parameters["short_factor"] != self.parameters["long_factor"]
        )
        self._static = None if moves else self._frequencies(1)
        self._table: Rotation | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the table as it stands."""
        return 0 if self._table is None else self._table.half_cos.nbytes + self._table.half_sin.nbytes

    @property
    def position_bytes(self) -> int:
        """Bytes that the table takes for one position; 0 where frequencies change with the length, and no table is kept."""
        return 0 if self._static is None else 2 * 4 * (self.rotary_dim // 2) * (1 if self.query_beta is None else 2)

    def prepare(self, positions: int) -> None:
        """Make the table long enough for `positions` of them, so that no step of a run has to."""
        if self._static is not None and (self._table is None or positions > len(self._table.half_cos)):
            self._table = self._compute(0, max(FIRST, positions))

    def _frequencies(self, seq_len: int):
        """Inverse frequencies [rotary_dim / 2] and the factor on cosine and sine, when `seq_len` positions are in use."""
        if self.rope_type == "default":
            dim = int(self.head_dim * self.parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
            return 1.0 / self.parameters["rope_theta"] ** exponents, 1.0
        inv_freq, factor = ROPE_INIT_FUNCTIONS[self.rope_type](self.config, "cpu", seq_len=seq_len)
        return inv_freq.to(torch.float32), factor

    def rotation(self, start: int, rows: int, length: int | None = None) -> Rotation:
        """The rotation of positions start .. start + rows - 1, where `length` of them are in use (those and all before, unless more are known to come).

        As in transformers, long-rope and dynamic scaling choose their frequencies by the furthest position of the call;
        keys that are cached already keep the ones they were written with.
        """
        if self._static is None:
            return self._compute(start, rows, length)
        stop = start + rows
        if self._table is None or stop > len(self._table.half_cos):
            # Nobody has said how far this goes: by doubling.
            self.prepare(2 * stop)
        table = self._table
        return Rotation(table.half_cos[start:stop], table.half_sin[start:stop], self.heads, self.head_dim)

    def _compute(self, start: int, rows: int, length: int | None = None) -> Rotation:
        inv_freq, factor = self._static or self._frequencies(length or start + rows)
        positions = torch.arange(start, start + rows, dtype=torch.float32)
        angles = (positions[:, None] * inv_freq[None, :])[:, None]  # [rows, 1, rotary_dim / 2]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        if self.query_beta is not None:
            original = self.parameters["original_max_position_embeddings"]
            scale = (1 + self.query_beta * torch.log(1 + torch.floor(positions / original)))[:, None, None]
            cos, sin = torch.cat([cos * scale, cos], 1), torch.cat([sin * scale, sin], 1)
        return Rotation(cos.to(self.device), sin.to(self.device), self.heads, self.head_dim)

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Turn query, key and value heads [rows, heads, head_dim] (float32) to their positions. Of the rotation only `cos` and `sin` are read."""
        half = self.rotary_dim // 2
        if self.rotary_dim == self.head_dim:
            swapped = heads.roll(half, -1)
        else:
            swapped = torch.cat([heads[..., half : 2 * half], heads[..., :half], heads[..., 2 * half :]], -1)
        return torch.addcmul(heads * rotation.cos, swapped, rotation.sin)
