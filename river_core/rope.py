"""Rotary position embedding for query, key and value heads at once, with frequencies from transformers' own functions."""

from dataclasses import dataclass

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class Rotation:
    """Cosines and signed sines of some consecutive positions, laid out head by head: [rows, heads, head_dim], float32.

    heads = num_attention_heads + 2 * num_key_value_heads. Value heads carry cosine 1 and sine 0, so that one product turns the
    queries and keys of a row and leaves its values alone.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class Rope:
    """The rotary embedding of one model; holds no state of any run, only a table that all runs share.

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
        # Factors that are the same for short and long texts stand for a fixed set of frequencies, such as a GGUF file's rope_freqs.
        moves = self.rope_type == "dynamic" or (
            self.rope_type == "longrope" and self.parameters["short_factor"] != self.parameters["long_factor"]
        )
        self._static = None if moves else self._frequencies(1)
        self._table = None
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the table, one by one: a step asks for nothing else

    def _frequencies(self, seq_len: int):
        """Inverse frequencies [rotary_dim / 2] and the factor on cosine and sine, when `seq_len` positions are in use."""
        if self.rope_type == "default":
            dim = int(self.head_dim * self.parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
            return 1.0 / self.parameters["rope_theta"] ** exponents, 1.0
        inv_freq, factor = ROPE_INIT_FUNCTIONS[self.rope_type](self.config, "cpu", seq_len=seq_len)
        return inv_freq.to(torch.float32), factor

    def rotation(self, start: int, rows: int) -> Rotation:
        """The rotation of positions start .. start + rows - 1.

        As in transformers, long-rope and dynamic scaling choose their frequencies by the furthest position of the call;
        keys that are cached already keep the ones they were written with.
        """
        if self._static is None:
            return self._compute(start, rows)
        table = self._table
        if table is None or start + rows > len(table.cos):
            # Frequencies that never change are turned into a table once, which grows by doubling.
            table = self._compute(0, max(512, 2 * (start + rows)))
            self._rows = list(zip(table.cos.split(1), table.sin.split(1), strict=True))
            self._table = table
        if rows == 1:
            return Rotation(*self._rows[start])
        return Rotation(table.cos[start : start + rows], table.sin[start : start + rows])

    def _compute(self, start: int, rows: int) -> Rotation:
        inv_freq, factor = self._static or self._frequencies(start + rows)
        positions = torch.arange(start, start + rows, dtype=torch.float32)
        angles = positions[:, None] * inv_freq[None, :]  # [rows, rotary_dim / 2]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        rest = torch.ones(rows, self.head_dim - self.rotary_dim)
        # rotate_half gives (-x2, x1); `rotate` below only swaps the halves, so the sign sits in the sine.
        cos = torch.cat([cos, cos, rest], 1)
        sin = torch.cat([-sin, sin, rest * 0], 1)
        queries, keys = self.heads
        cos_all = torch.ones(rows, queries + 2 * keys, self.head_dim)
        sin_all = torch.zeros_like(cos_all)
        cos_all[:, : queries + keys] = cos[:, None]
        sin_all[:, : queries + keys] = sin[:, None]
        if self.query_beta is not None:
            original = self.parameters["original_max_position_embeddings"]
            scale = 1 + self.query_beta * torch.log(1 + torch.floor(positions / original))
            cos_all[:, :queries] *= scale[:, None, None]
            sin_all[:, :queries] *= scale[:, None, None]
        return Rotation(cos_all.to(self.device), sin_all.to(self.device))

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Turn query, key and value heads [rows, heads, head_dim] (float32) to their positions."""
        half = self.rotary_dim // 2
        if self.rotary_dim == self.head_dim:
            swapped = heads.roll(half, -1)
        else:
            swapped = torch.cat([heads[..., half : 2 * half], heads[..., :half], heads[..., 2 * half :]], -1)
        return torch.addcmul(heads * rotation.cos, swapped, rotation.sin)
