"""Runs of decoder layers for one row, captured once and replayed.

On a GPU a small layer is some 25 kernels of a few microseconds, and starting them one by one from Python takes longer than running them. A CUDA graph starts
them all at once, but it remembers addresses and scalars, not Python values: a captured run may depend on nothing but the contents of buffers that stay where
they are. Here those buffers are a `Workspace`: the cache's storage, the hidden states, the slot being written and the rotation. Attention goes over a bucket of
slots (256, 512, ... up to the storage) under a mask made from the slot inside the run, so that one capture serves every position of a bucket.

The layers themselves are `Decoder.run_block`, on rows and a cache that are made of such buffers. Capturing is done by an object that is handed in: `CudaCapture`
on a GPU; `EagerCapture` runs the same closure again, which is how the logic is tested without one.
"""

import weakref
from collections import OrderedDict

import torch
import torch.nn.functional as F

from river_core.kv_cache import KVCache

BUCKET = 256  # fewest slots that a captured run attends to, if the cache has as many
SPARE = 8  # workspaces that wait for another lane,
SPARE_BYTES = 1 << 30  # and the most they may hold together


class CudaCapture:
    """Captures CUDA graphs that share one memory pool: what a run keeps is in its workspace, so intermediates of one may overwrite those of another.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        # PyTorch refuses a pool whose graphs have all been freed; one that is never freed keeps it.
        self.keeper = self._record(lambda: torch.zeros(1, device=device))

    def __call__(self, work):
        """Run `work` once, then record it; returns a callable that replays it on the current stream.

        `work` takes and returns nothing; it must read and write buffers that outlive the graph, and must not wait for the device.
        """
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                work()  # libraries set themselves up on first use, which a capture does not allow
            torch.cuda.current_stream().wait_stream(self.stream)
            return self._record(work).replay

    def _record(self, work):
        # Not torch.cuda.graph(), which empties the allocator's cache every time; captures may come in the middle of an answer.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


class EagerCapture:
    """Captures nothing: a replay runs the closure again. The twin of `CudaCapture` for machines without a GPU.

    count: closures captured so far.
    """

    def __init__(self):
        self.count = 0

    def __call__(self, work):
        self.count += 1
        work()
        return work


class Workspace:
    """The storage of one cache, the fixed buffers of the row that is decoded on it, and what was captured over them.

    keys_values: [L, 2, num_key_value_heads, room, head_dim].
    states: [L + 1, d] float32: before the first layer and after every layer.
    slots: [L] int64: where each layer keeps the row's keys and values; also the last slot that it attends to.
    cos, sin: [1, heads, head_dim] float32, see `Rotation`.
    similarity: [L + 1] float32: cos(input, output) of block l (counted from 1), made by a run of the backbone that ends there.

    Args:
        config: `DecoderConfig`. keys_values: a cache's storage.
        limit: captured runs that are kept; the one unused for longest goes first.
    """

    def __init__(self, config, keys_values: torch.Tensor, limit: int | None = None):
        layers, device = config.num_hidden_layers, keys_values.device
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.keys_values, self.room = keys_values, keys_values.shape[3]
        self.limit = limit or 3 * layers  # a run for each layer, a river suffix for each, and as many again around a change of bucket
        with torch.inference_mode(False):  # buffers that are written in and out of inference mode
            self.states = torch.zeros(layers + 1, config.hidden_size, device=device)
            self.slots = torch.zeros(layers, dtype=torch.long, device=device)
            self.cos = torch.zeros(1, heads, config.head_dim, device=device)
            self.sin = torch.zeros_like(self.cos)
            self.similarity = torch.zeros(layers + 1, device=device)
            self.indices = torch.arange(self.room, device=device)
            self.nothing = torch.zeros(self.room, dtype=keys_values.dtype, device=device)
        self.graphs: OrderedDict = OrderedDict()
        # What the buffers hold, as far as the host knows.
        self.rotation, self.placed = None, [-1] * layers
        self.latest, self.depth = None, -1

    @property
    def nbytes(self) -> int:
        return self.keys_values.nbytes + self.states.nbytes

    def place(self, hidden_states, first: int, last: int, entries: list[int], rotation) -> None:
        """Put the row's input, slots and rotation into the buffers, unless they are there already, as after the run that ended where this one begins."""
        if rotation is not self.rotation:
            self.cos.copy_(rotation.cos)
            self.sin.copy_(rotation.sin)
            self.rotation = rotation
        if hidden_states is not self.latest or first != self.depth:
            self.states[first].copy_(hidden_states[0])
        if len(entries) == 1 and self.placed[first:last] != entries * (last - first):
            self.slots.fill_(entries[0])
            self.placed = entries * len(self.placed)
        elif len(entries) > 1 and self.placed[first:last] != entries:
            self.slots[first:last].copy_(torch.tensor(entries))
            self.placed[first:last] = entries

    def captured(self, key, make):
        """The replay kept under `key`, made by `make()` if there is none."""
        if key not in self.graphs:
            while len(self.graphs) >= self.limit:
                self.graphs.popitem(last=False)
            self.graphs[key] = make()
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def take(self, first: int, last: int) -> list[torch.Tensor]:
        """Copies of the states after layers first .. last - 1, each [1, d]; a later run overwrites the buffers."""
        made = list(self.states[first + 1 : last + 1].clone().split(1))
        self.latest, self.depth = made[-1], last
        return made


class Workspaces:
    """Workspaces that caches take turns with, so that what was captured while one lane decoded serves the next.

    Args:
        config, dtype, device: of the caches.
        spare: workspaces kept while no cache uses them.
        limit: see `Workspace`.
    """

    def __init__(self, config, dtype, device, spare: int = SPARE, limit: int | None = None):
        self.config, self.dtype, self.device, self.spare, self.limit = config, dtype, device, spare, limit
        self.free: list[Workspace] = []

    def cache(self, kind: type[KVCache], capacity: int) -> KVCache:
        """An empty cache of class `kind` on storage of its own until it is freed; storages come in multiples of `BUCKET` slots."""
        room = -(-capacity // BUCKET) * BUCKET
        workspace = next((spare for spare in self.free if spare.room == room), None)
        if workspace is None:
            c = self.config
            shape = (c.num_hidden_layers, 2, c.num_key_value_heads, room, c.head_dim)
            with torch.inference_mode(False):
                keys_values = torch.zeros(shape, dtype=self.dtype, device=self.device)
            workspace = Workspace(c, keys_values, self.limit)
        else:
            self.free.remove(workspace)
            workspace.keys_values.zero_()  # a masked slot still takes part with weight 0, and 0 times an overflow of another run is no number
        cache = kind(self.config, capacity, self.dtype, self.device, workspace.keys_values)
        cache.workspace = workspace
        weakref.finalize(cache, self._give_back, workspace).atexit = False
        return cache

    def _give_back(self, workspace):
        workspace.latest = workspace.rotation = None
        self.free.append(workspace)
        while len(self.free) > self.spare or sum(spare.nbytes for spare in self.free) > SPARE_BYTES:
            self.free.pop(0)


class GraphStack:
    """The blocks of a backbone or of a river as captured runs of layers; what `Blocks.stack` holds on a GPU. It never leaves by itself.

    Args:
        decoder: for its `run_block`.
        blocks: all of the backbone's or all of the river's.
        capture: callable (work) -> replay, such as `CudaCapture`.
        measures: runs also make the similarity of their last layer's input and output.
        bucket: see `BUCKET`.
    """

    def __init__(self, decoder, blocks, capture, measures: bool = False, bucket: int = BUCKET):
        self.decoder = weakref.proxy(decoder)  # the decoder's blocks hold this stack
        self.blocks = tuple(blocks)
        self.capture, self.measures, self.bucket = capture, measures, bucket

    def run(self, hidden_states, first: int, last: int, cache: KVCache, entries: list[int], rows):
        """Layers first .. last - 1 over one row, see `Decoder.run_blocks`; `entries` as from `KVCache.entries_at`.

        Returns:
            the state after each of them, [1, d] float32, and the similarity of the last one's input and output, 0-d on the device, until the next run
            overwrites it; None from a stack that does not measure. No similarities of the layers between.
        """
        if cache.workspace is None:
            cache.workspace = Workspace(self.decoder.config, cache.keys_values)
        workspace = cache.workspace
        workspace.place(hidden_states, first, last, entries, rows.rotation)
        length, together = self._length(max(entries) + 1, workspace.room), len(entries) == 1
        replay = workspace.captured(
            (self, first, last, length, together), lambda: self.capture(self._work(workspace, first, last, length, together))
        )
        replay()
        return workspace.take(first, last), workspace.similarity[last] if self.measures else None, []

    def _length(self, needed: int, room: int) -> int:
        """Slots to attend to, so that `needed` of them are among them: the bucket size doubled as often as it takes, or the whole storage."""
        length = self.bucket
        while length < needed:
            length *= 2
        return min(length, room)

    def _work(self, workspace, first, last, length, together):
        """The closure that is captured; everything in it that changes from step to step is read from the workspace."""
        decoder, blocks, measures = self.decoder, self.blocks, self.measures
        workspace = weakref.proxy(workspace)  # which holds what is made of this closure

        def work():
            hidden, made = workspace.states[first : first + 1], []
            for layer in range(first, last):
                if layer == first or not together:
                    row = _StaticRow(workspace, decoder.windows, layer, length)
                hidden = decoder.run_block(blocks[layer], layer, hidden, row, row, None)
                made.append(hidden)
            torch.cat(made, out=workspace.states[first + 1 : last + 1])
            if measures:
                before, after = workspace.states[last - 1 : last + 1].unbind(0)
                workspace.similarity[last].copy_(F.cosine_similarity(before, after, dim=0))

        return work


class _StaticRow:
    """What `Decoder.run_block` asks of `Rows` and of the cache, over a workspace: nothing in it depends on the position but the contents of tensors.

    Args:
        layer: whose slot is meant. length: slots to attend to.
    """

    count = 1

    def __init__(self, workspace, windows, layer, length):
        self.keys_values, self.rotation, self.slots = workspace.keys_values, workspace, self
        self.slot = workspace.slots[layer : layer + 1]
        keys, values = workspace.keys_values[:, :, None, :, :length].unbind(1)  # each [L, 1, key/value heads, length, head_dim]
        self.read = dict.fromkeys(windows, (keys, values))
        self.masks = {window: self._mask(workspace, window, length) for window in windows}

    def _mask(self, workspace, window, length):
        """What is added to the scores of one row, [1, 1, 1, length]: minus infinity beyond the slot and before the window."""
        indices = workspace.indices[:length]
        hidden = indices > self.slot
        if window is not None:
            hidden = hidden | (indices <= self.slot - window)
        return workspace.nothing[:length].masked_fill(hidden, -torch.inf).view(1, 1, 1, -1)

    def write(self, layer, slots, keys_values, owner):
        """As `KVCache.write`, at the slot that the buffer says; `Decoder.run_blocks` notes the owner."""
        self.keys_values[layer].index_copy_(2, self.slot, keys_values.to(self.keys_values.dtype))
