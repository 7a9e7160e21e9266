"""KV masking: a skipped slot stays empty, and nobody ever attends to it.

Source: D-LLM's cache masking, taken from per-layer skipping to exits. The cache is compact: a layer appends only what it computed, so
that a skipped entry costs neither attention time nor memory (D-LLM's eviction). Keys carry their rotary position, so nothing is renumbered.
Logits come from the original head on the exit state, which a model that was never trained for it answers poorly.
"""

import bisect
from dataclasses import dataclass

import torch

from river_core.kv_cache import KVCache
from river_core.strategies import Strategy


class CompactCache(KVCache):
    """A cache whose layers hold only the positions that they computed.

    keys_values: entry j of layer l belongs to position `positions[l][j]`. The owner table stays by position.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.positions: list[list[int]] = [[] for _ in range(len(self.owner))]

    def open(self, start, count, windows):
        return CompactSlots(self, start, start + count)

    def write(self, layer, slots, keys_values, owner):
        super().write(layer, slots, keys_values, owner)
        held = self.positions[layer]
        del held[bisect.bisect_left(held, slots.start) :]
        held.extend(range(slots.start, slots.stop))

    def entries_at(self, first, last, position, windows):
        # A window counts positions, of which a compact layer holds only some.
        return [bisect.bisect_left(self.positions[layer], position) for layer in range(first, last)] if windows == {None} else None

    def note(self, first, last, position, owner):
        super().note(first, last, position, owner)
        for held in self.positions[first:last]:
            del held[bisect.bisect_left(held, position) :]
            held.append(position)

    def copy_prefix(self, other):
        super().copy_prefix(other)  # a prompt is complete in every layer, so it is compact as it stands
        self.positions = [list(range(other.length)) for _ in self.positions]

    def at(self, layer, position):
        held = self.positions[layer]
        j = bisect.bisect_left(held, position)
        if j == len(held) or held[j] != position:
            return None
        return self.keys_values[layer, :, :, j]

    @property
    def entries(self) -> int:
        """Slots in use, over all layers."""
        return sum(len(held) for held in self.positions)


@dataclass(frozen=True)
class CompactSlots:
    """As `Slots`, but every layer has a length of its own, so views are made when a layer asks for them."""

    cache: CompactCache
    start: int
    stop: int

    @property
    def written(self):
        return _ByLayer(lambda layer: self._slice(layer, self._entry(layer), self._entry(layer) + self.stop - self.start))

    @property
    def read(self):
        return _ByLayer(lambda window: (_ByLayer(self._reader(window, 0)), _ByLayer(self._reader(window, 1))))

    def _entry(self, layer):
        """Where this call's first position lies in the layer's entries."""
        return bisect.bisect_left(self.cache.positions[layer], self.start)

    def _slice(self, layer, first, stop):
        return self.cache.keys_values[layer, :, :, first:stop]

    def _reader(self, window, which):
        def read(layer):
            held = self.cache.positions[layer]
            first = 0
            if window is not None and self.stop - self.start == 1:
                first = bisect.bisect_left(held, self.stop - window)
            return self.cache.keys_values[layer, which : which + 1, :, first : self._entry(layer) + self.stop - self.start]

        return read


class _ByLayer:
    """Indexing by calling."""

    def __init__(self, view):
        self.view = view

    def __getitem__(self, key) -> torch.Tensor:
        return self.view(key)


class MaskingStrategy(Strategy):
    """Blocks 1..e in the backbone, nothing above; head on the exit state."""

    def new_cache(self, capacity):
        return self.decoder.new_cache(capacity, CompactCache)

    def step(self, token_id, position, index, cache):
        return self.leave(self.run_backbone([token_id], position, cache, self.rule, index), position, cache)
