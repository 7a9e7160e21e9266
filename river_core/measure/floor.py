"""What a decode step is measured against: its own products, each measured alone, and the bytes that it has to read at the speed of this machine's memory."""

import statistics
import time

import torch
import torch.nn.functional as F

from river_core.exit_rules import cosine
from river_core.kernels import Dense, Int4
from river_core.loading import available_memory

STREAM = 1 << 29  # bytes of the block that is read to measure memory: larger than the caches of any processor or GPU


class Floor:
    """Two yardsticks of a step on this machine, neither of which is perfect.

    Products: all products of a stack run in the order of a step and nothing else does, so that weights come from where they come from in a real step. They are this
    engine's own kernels; faster ones would lower it. Bytes: what the step has to read, over the rate at which memory can be read here. That is a floor for any program
    as long as weights come from memory; what a processor keeps in its caches from one step to the next comes faster.

    Measured again in every round: a machine that slows down slows step and yardstick alike.

    Args:
        model: from `load`. repeats: of every measurement; the median counts.
    """

    def __init__(self, model, repeats: int = 7):
        self.model, self.repeats = model, repeats
        self.layers = model.config.num_hidden_layers
        # Captured layers start their kernels all at once; started one by one, the floor's own would take longer than a whole step.
        self.capture = model.decoder.blocks.stack.capture if model.captured else None
        self._stream = None

    @torch.inference_mode()
    def measure(self, context: int) -> dict[str, float]:
        """Milliseconds of: one backbone layer's products, one river layer's, the head as greedy lanes use it, reading and attending to one layer's cache of
        `context` positions, one exit test where it is a call of its own (None in compiled and in captured layers, which compute the similarity within every layer). And
        read_gb_per_s: the rate of a streaming read."""
        decoder, c = self.model.decoder, self.model.config
        cache = decoder.new_cache(context)
        cache.keys_values.normal_()
        hidden = torch.randn(1, c.hidden_size, device=decoder.device)
        queries = torch.randn(c.num_attention_heads, c.head_dim, device=decoder.device)
        # A state that the head has seen: on noise hardly any row could be ruled out, and screening would measure its worst case.
        answered = decoder.forward([1], 0, decoder.new_cache(1))
        normed = decoder.head_input(answered)
        screened = decoder.largest(answered) is not None
        as_floats = cache.keys_values.view(torch.float32) if c.head_dim * cache.keys_values.element_size() % 4 == 0 else cache.keys_values
        river = self.model.river.blocks
        return {
            "backbone": self._products(decoder.blocks),
            "river": self._products(river),
            # After a river's products, as in a step: they leave nothing of the head in the processor's caches.
            "head": self._time(
                lambda: decoder.largest(answered) if screened else decoder.lm_head(normed), before=self._work_of(river, river)
            ),
            "kv_read": self._time(lambda: as_floats.sum()) / self.layers,
            "attention": self._attention(cache, queries) / self.layers,
            "exit_test": None
            if self.model.compiled
            else self._time(lambda: [cosine(hidden, hidden) for _ in range(self.layers)], waits=True) / self.layers,
            "read_gb_per_s": self._read_rate(),
        }

    def bytes(self) -> dict[str, float]:
        """Bytes that a step reads at least: of one backbone layer, of one river layer, of the head as greedy lanes use it, and of one layer's keys and values at one
        position. Norms and biases, and the rows that screening multiplies exactly, are left out."""
        decoder, resident = self.model.decoder, max(1, self.model.decoder.blocks.resident)
        with decoder.blocks.at(0) as first:
            backbone = sum(map(_layer_bytes, [first, *decoder.blocks[1:resident]])) / resident
        return {
            "backbone": backbone,
            "river": sum(map(_layer_bytes, self.model.river.blocks)) / self.layers,
            "head": decoder.screen.nbytes if decoder.screen else read_bytes(decoder.lm_head),
            "kv_position": self.model.kv_slot_bytes,
        }

    def _read_rate(self) -> float:
        """10^9 bytes per second of reading a block from memory with all threads: the best of a sum and of a product of one row."""
        if self._stream is None:
            free = available_memory()
            size = STREAM if free is None else min(STREAM, free // 4)
            self._stream = torch.ones(size // 4096, 1024, device=self.model.plan.device)
        rows, one = self._stream, torch.ones(1, 1024, device=self.model.plan.device)
        least = min(self._time(work, of=min, waits=True) for work in (rows.sum, lambda: F.linear(one, rows)))
        return rows.nbytes / least / 1e6

    def _attention(self, cache, queries):
        """One row over every layer of a full cache, in the way of a step."""
        if self.model.compiled and not self.model.captured:
            layers = cache.keys_values.unbind(0)
            return self._time(lambda: [torch.ops.river_native.attend(queries, layer) for layer in layers])
        heads = cache.keys_values.shape[2]
        keys, values = (part.unbind(0) for part in cache.keys_values[:, :, None].unbind(1))
        grouped = queries.view(1, heads, -1, queries.shape[1]).to(cache.keys_values.dtype)
        return self._time(
            lambda: [torch.nn.functional.scaled_dot_product_attention(grouped, k, v) for k, v in zip(keys, values, strict=True)]
        )

    def _products(self, blocks):
        # Of a backbone with offloaded layers, those that stay; the first one is brought back if none does.
        with blocks.at(0) as first:
            count = max(1, blocks.resident)
            return self._time(self._work_of(blocks, [first, *blocks[1:count]])) / count

    def _work_of(self, blocks, some):
        """All products of some blocks, the first ones of `blocks`, in the order of a step."""
        if blocks.stack is not None and not self.capture:
            return lambda: blocks.stack.products_only(0, len(some))
        return self._products_in_place(some)

    def _products_in_place(self, blocks):
        rows = {}
        for name in ("qkv", "o", "gate_up", "down"):
            product = getattr(blocks[0], name)
            rows[name] = torch.randn(1, product.shape[1], device=self.model.plan.device).to(product.dtype)

        def all_of_them():
            for block in blocks:
                for name, x in rows.items():
                    getattr(block, name)(x)

        return all_of_them

    def _time(self, work, waits: bool = False, before=None, of=statistics.median) -> float:
        """Milliseconds of some calls after one that warms up; by default their median.

        Not `torch.utils.benchmark`: its timer has no place for work that precedes every call and is not counted.

        waits: `work` waits for the device or is one long kernel, so it is not captured. before: what is done ahead of every call, and not measured.
        """
        if self.capture and not waits:
            work = self.capture(work)
        cuda = self.model.plan.device.type == "cuda"
        times = []
        for _ in range(self.repeats + 1):
            if before:
                before()
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return of(times[1:])


def read_bytes(product) -> int:
    """Bytes of weights that a product of one row reads; copies for many rows are not among them."""
    if isinstance(product, Int4):
        return sum(tensor.nbytes for tensor in product.blocks or (product.packed, product.scales_and_zeros))
    if isinstance(product, Dense):
        return product.weight.nbytes
    return product.nbytes


def _layer_bytes(block) -> int:
    return sum(read_bytes(getattr(block, name)) for name in ("qkv", "o", "gate_up", "down"))


def of_step(parts: dict[str, float], depth: float, river_layers: float) -> float:
    """The products of a step, in milliseconds: `depth` backbone layers, `river_layers` river layers, the head, and one read of the cache of all layers that ran."""
    return parts["backbone"] * depth + parts["river"] * river_layers + parts["head"] + parts["kv_read"] * (depth + river_layers)


def bytes_of_step(sizes: dict[str, float], depth: float, river_layers: float, context: float) -> float:
    """Bytes that such a step has to read behind `context` positions; `sizes` as from `Floor.bytes`."""
    layers = depth + river_layers
    return sizes["backbone"] * depth + sizes["river"] * river_layers + sizes["head"] + sizes["kv_position"] * context * layers
