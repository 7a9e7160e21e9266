"""Tiny random models of every supported family, in float32, with a byte-level tokenizer: exact tests need no download."""

import torch

from river_core.measure.families import CHAT_TEMPLATE, SIZE, configs, random_model, tiny_model_on, tokenizer
from river_core.model import Model

__all__ = ["CHAT_TEMPLATE", "SIZE", "configs", "random_model", "tiny_model", "tokenizer"]


def tiny_model(config=None, bits: int = 4, group_size: int = 32, dtype=torch.float32, seed: int = 0) -> Model:
    """A loaded `Model` around a tiny random one."""
    return tiny_model_on("cpu", config or configs()["llama"], dtype, bits, group_size, seed)
