"""One preallocated key/value cache per lane, and who wrote each of its slots."""

from dataclasses import dataclass

import numpy as np
import torch

# Values of the owner table; the names are the ones a trace carries.
NONE, BACKBONE, RIVER, PROPAGATED, DRAFT = range(5)
OWNER_NAMES = ("none", "backbone", "river", "propagated", "draft")


@dataclass(frozen=True)
class Slots:
    """Views into a cache for one forward call; made for all layers together, since slicing layer by layer costs more than the copy.

    written: per layer [2, num_key_value_heads, count, head_dim]. read: by window, keys and values, each per layer
    [1, num_key_value_heads, S, head_dim].
    """

    start: int
    stop: int
    written: tuple[torch.Tensor, ...]
    read: dict


class KVCache:
    """Keys and values of every layer for up to `capacity` positions.

    keys_values: [num_hidden_layers, 2, num_key_value_heads, capacity, head_dim]; keys carry their rotary position already.
    owner: uint8 [num_hidden_layers, capacity], one of the constants above: written by whoever writes the slot, read by tests and drawn by
        the page.
    filled_at: int32 [num_hidden_layers, capacity], the position that was being decoded when the slot was written; -1 while empty.
    length: positions that have been fed.
    workspace: buffers and captured layers over this storage (see `graphs`), where layers are captured; else None.

    Args:
        storage: zeros to keep keys and values in, with room for at least `capacity` positions; None = new ones.
    """

    workspace = None

    def __init__(self, config, capacity: int, dtype: torch.dtype, device, storage: torch.Tensor | None = None):
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, capacity, config.head_dim)
        self.keys_values = torch.zeros(shape, dtype=dtype, device=device) if storage is None else storage
        self._owner = np.zeros((config.num_hidden_layers, capacity), dtype=np.uint8)
        self._filled_at = np.full((config.num_hidden_layers, capacity), -1, dtype=np.int32)
        self._noted: list[tuple[int, int, int, int]] = []
        self.capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.keys_values.nbytes

    def open(self, start: int, count: int, windows) -> "Slots":
        """Views of the slots that a forward call over positions start .. start + count - 1 writes and reads, for all layers at once.

        Args:
            windows: the set of attention windows in use; None = everything before.
        """
        stop = start + count
        written = self.keys_values[:, :, :, start:stop].unbind(0)
        read = {}
        for window in windows:
            # One row sees exactly its window; several rows need the whole slice and a mask.
            first = 0 if window is None or count > 1 else max(0, stop - window)
            keys, values = self.keys_values[:, :, None, :, first:stop].unbind(1)
            read[window] = (keys.unbind(0), values.unbind(0))
        return Slots(start, stop, written, read)

    def write(self, layer: int, slots: "Slots", keys_values: torch.Tensor, owner: int) -> None:
        """Store keys and values of the opened positions in one layer, and note who computed them.

        Args:
            layer: 0-based.
            slots: from `open`.
            keys_values: [2, num_key_value_heads, count, head_dim]; cast to the cache's dtype.
            owner: one of the constants above.
        """
        slots.written[layer].copy_(keys_values)
        self.owner[layer, slots.start : slots.stop] = owner
        self.filled_at[layer, slots.start : slots.stop] = slots.stop - 1

    def entries_at(self, first: int, last: int, position: int, windows) -> list[int] | None:
        """For compiled code: where layers first .. last - 1 keep `position`, one entry for each or one for all; None if it cannot be said so simply."""
        return [position]

    def note(self, first: int, last: int, position: int, owner: int) -> None:
        """Note that layers first .. last - 1 have just written `position`. The tables follow when somebody looks at them: not in a step's time."""
        self._noted.append((first, last, position, owner))

    @property
    def owner(self) -> np.ndarray:
        return self._settled()[0]

    @property
    def filled_at(self) -> np.ndarray:
        return self._settled()[1]

    def _settled(self):
        for first, last, position, owner in self._noted:
            self._owner[first:last, position] = owner
            self._filled_at[first:last, position] = position
        self._noted.clear()
        return self._owner, self._filled_at

    def forget(self, start: int) -> None:
        """Drop every position from `start` on, as when drafted tokens were refused."""
        self.owner[:, start:] = NONE
        self.filled_at[:, start:] = -1
        self.length = min(self.length, start)

    def at(self, layer: int, position: int) -> torch.Tensor | None:
        """Keys and values of one slot, [2, num_key_value_heads, head_dim]; None if nobody wrote it."""
        if self.owner[layer, position] == NONE:
            return None
        return self.keys_values[layer, :, :, position]

    def copy_prefix(self, other: "KVCache") -> None:
        """Take over everything that `other` holds so far; both caches then go their own ways."""
        n = other.length
        self.keys_values[:, :, :, :n].copy_(other.keys_values[:, :, :, :n])
        self.owner[:, :n] = other.owner[:, :n]
        self.filled_at[:, :n] = other.filled_at[:, :n]
        self.length = n

    def runs(self, position: int) -> list[list]:
        """The owners of one position as a run-length list, shallow to deep: [first layer, last layer + 1, owner name, filled at]."""
        owners = self.owner[:, position].tolist()
        filled = self.filled_at[:, position].tolist()
        result: list[list] = []
        for layer, (owner, at) in enumerate(zip(owners, filled, strict=True)):
            name = OWNER_NAMES[owner]
            if result and result[-1][2] == name and result[-1][3] == at:
                result[-1][1] = layer + 1
            else:
                result.append([layer, layer + 1, name, at])
        return result

    def snapshot(self) -> "KVCache":
        """A compact, independent copy of what is held so far, for `copy_prefix`."""
        copy = object.__new__(KVCache)
        n = copy.length = copy.capacity = self.length
        copy.keys_values = self.keys_values[:, :, :, :n].clone()
        copy._owner, copy._filled_at, copy._noted = self.owner[:, :n].copy(), self.filled_at[:, :n].copy(), []
        return copy
