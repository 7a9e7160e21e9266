"""Backbone offloading: layers beyond a depth are kept out of memory and come back for a token that needs them, while the river stays.

Source: River-LLM (ACL 2026), section on backbone offloading. The policy is the simplest that bounds memory: a layer comes back right before it runs, the next one is on
its way meanwhile if it is certain to run, and a layer goes again as soon as it has run. No strategy runs a layer twice in one step, so nothing is brought back twice,
and at most `ROOM` offloaded layers are in memory at any time, during a prompt pass too.

On a CPU the layers lie in a file without a name and are mapped into memory, always at the same addresses, so compiled code needs to know nothing of it. On a GPU
they lie in the host's pinned memory and take turns in two places on the device.
"""

import contextlib
import copy
import ctypes
import dataclasses
import errno
import mmap
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from river_core.decoder import Block, Blocks
from river_core.default_model import need_disk
from river_core.errors import InputError, LoadError
from river_core.kernels import Dense

PRODUCTS = ("qkv", "o", "gate_up", "down")
ROOM = 2  # offloaded layers in memory at once: the one that runs and the one on its way
PAGE = mmap.PAGESIZE
READ_AHEAD = 128 << 10  # one request to the disk; the kernel cuts longer ones off without a word
MADV_DONTNEED, MADV_POPULATE_READ = 4, 22  # Linux; the second since 5.14

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc:
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Offload:
    """The backbone's layers from `after` on, and what brings them back.

    Args:
        after: layers that stay, 0 .. num_hidden_layers.
        store: `MappedLayers` or `HostLayers`.

    in_place: whether a layer comes back to the very addresses that it had, so code that was made for them stays right.
    fetched, fetched_bytes: layers brought back since loading, and their bytes.
    nbytes: of all offloaded layers. layers: how many they are. most_bytes: what `ROOM` of them take.
    """

    def __init__(self, after: int, store):
        self.after, self.store, self.in_place = after, store, store.in_place
        self.fetched = self.fetched_bytes = 0
        self.sizes: dict[int, dict[str, int]] = {}  # bytes by layer and product

    def take(self, layer: int, block: Block) -> Block:
        """Put a layer away; returns the block that stands in its place."""
        self.sizes[layer] = {name: getattr(block, name).weight.nbytes for name in PRODUCTS}
        return self.store.take(layer, block)

    @contextlib.contextmanager
    def layer(self, layer: int, names=PRODUCTS, following: bool = False):
        """A layer in place, for the length of the block.

        Args:
            names: the products that are needed. following: the next layer is certain to be needed too, and may set out.
        """
        self.store.begin(layer, names)
        block = self.store.ready(layer, names)
        if following:
            self.store.begin(layer + 1, names)
        self.fetched += 1
        self.fetched_bytes += sum(self.sizes[layer][name] for name in names)
        try:
            yield block
        finally:
            self.store.release(layer, names)

    def since(self, totals: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Layers and bytes brought back since the totals were `totals`."""
        return self.fetched - totals[0], self.fetched_bytes - totals[1]

    @property
    def layers(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        return sum(sum(sizes.values()) for sizes in self.sizes.values())

    @property
    def most_bytes(self) -> int:
        return sum(sorted((sum(sizes.values()) for sizes in self.sizes.values()), reverse=True)[:ROOM])

    def describe(self) -> dict:
        """JSON-ready: after, layers, bytes; to: "file" or "host memory"; resident_bytes of them at this moment, and how that is known."""
        resident, how = self.store.resident_bytes()
        return {
            "after": self.after, "layers": self.layers, "bytes": self.nbytes, "to": self.store.place, "resident_bytes": resident, "how": how,
        }  # fmt: skip


def check_offload(after, layers: int, device: torch.device) -> int | None:
    """The depth after which layers are offloaded; None if none are.

    Raises:
        InputError: it is no depth of this model, or the device has no offloading.
    """
    if after is None:
        return None
    if isinstance(after, bool) or not isinstance(after, int) or not 0 <= after <= layers:
        raise InputError(f"Layers can be offloaded after layer 0 to {layers} of this model, not {str(after)[:40]!r}.")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"Offloading works on a CPU and on an NVIDIA GPU, not on {device.type}. Leave --offload-after out.")
    return after if after < layers else None


def make_offload(after: int | None, layers: int, device: torch.device, folder: Path) -> Offload | None:
    """What takes the layers from `after` on out of memory; None if there are none.

    Args:
        after: see `check_offload`, as is what it raises. layers: of the model. device: of the plan.
        folder: where a CPU's layers are written; the file has no name and vanishes with the process.
    """
    after = check_offload(after, layers, device)
    if after is None:
        return None
    return Offload(after, MappedLayers(folder, layers - after) if device.type == "cpu" else HostLayers(device))


def offloaded(model, after: int, folder: Path):
    """A second `Model` over the same weights that brings the layers from `after` on back when they are needed: for comparing the two ways in one process.

    The plain model keeps its layers, so this one saves no memory; `load(offload_after=)` does.
    """
    plain = model.decoder
    offload = make_offload(after, len(plain.blocks), plain.device, folder)
    decoder = copy.copy(plain)
    decoder.blocks = Blocks(
        block if offload is None or layer < offload.after else offload.take(layer, block) for layer, block in enumerate(plain.blocks)
    )
    decoder.blocks.offload = offload
    # The screen of the head is shared; trying it anew might choose otherwise, and the two would differ in more than one thing.
    return dataclasses.replace(model, decoder=decoder, notes=list(model.notes), compiled=None if model.compiled else False, screens=False)


def _standing_in(block: Block, weights: dict[str, torch.Tensor]) -> Block:
    """The same block with its weights elsewhere. Products of many rows cast them for the call: a copy kept for those would fill the memory again."""
    products = {name: getattr(block, name) for name in PRODUCTS}
    return dataclasses.replace(block, **{name: Dense(weights[name], p.bias, p.dtype, p.many_dtype) for name, p in products.items()})


# -- CPU ---------------------------------------------------------------------------------------------------------------


class MappedLayers:
    """Layers in a file without a name that is mapped into memory, each at its own address for good.

    Args:
        folder: of the file; it should be on a disk. count: layers that are to come, for the check of the room on the disk.

    Raises (`take`):
        LoadError: the disk has no room for them, or cannot be written.
    """

    in_place, place = True, "file"

    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count
        self.file = None
        self.blocks: dict[int, Block] = {}
        self.parts: dict[
            int, dict[str, tuple[int, int, int]]
        ] = {}  # by layer and product: address, offset in the file, length; in whole pages

    def take(self, layer: int, block: Block) -> Block:
        weights = {name: getattr(block, name).weight for name in PRODUCTS}
        try:
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                need_disk(self.folder, self.count * sum(_whole_pages(weight.nbytes) for weight in weights.values()))
                self.file = tempfile.TemporaryFile(prefix=".offload-", dir=self.folder)  # noqa: SIM115 - it lives as long as the model
            start, offsets, length = self._write(weights)
            mapping = mmap.mmap(self.file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
        except OSError as error:
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise LoadError(
                f"Layers cannot be offloaded to {self.folder}: {why}. Free some space, or set RIVER_CACHE to another folder."
            ) from error
        views, self.parts[layer] = {}, {}
        for name, weight in weights.items():
            view = torch.frombuffer(mapping, dtype=weight.dtype, count=weight.numel(), offset=offsets[name]).view(weight.shape)
            views[name] = view
            self.parts[layer][name] = (view.data_ptr(), start + offsets[name], _whole_pages(weight.nbytes))
        self.release(layer, PRODUCTS)
        self.blocks[layer] = _standing_in(block, views)
        return self.blocks[layer]

    def _write(self, weights) -> tuple[int, dict[str, int], int]:
        """Append a layer; returns where it starts, where its products start in it, and its length. On the disk when this returns: a page that still has to be
        written cannot be given back."""
        file = self.file
        file.seek(0, os.SEEK_END)
        file.write(bytes(-file.tell() % mmap.ALLOCATIONGRANULARITY))
        start, offsets = file.tell(), {}
        for name, weight in weights.items():
            offsets[name] = file.tell() - start
            file.write(memoryview(weight.detach().contiguous().view(-1).view(torch.uint8).numpy()))
            file.write(bytes(-file.tell() % PAGE))
        file.flush()
        os.fsync(file.fileno())
        return start, offsets, file.tell() - start

    def begin(self, layer: int, names) -> None:
        """Ask the disk for a layer; returns while it is reading."""
        if not hasattr(os, "posix_fadvise"):
            return
        for name in names:
            _, offset, length = self.parts[layer][name]
            for at in range(offset, offset + length, READ_AHEAD):
                os.posix_fadvise(self.file.fileno(), at, min(READ_AHEAD, offset + length - at), os.POSIX_FADV_WILLNEED)

    def ready(self, layer: int, names) -> Block:
        """Wait until a layer is in memory. Where the system cannot be told to, its products do."""
        for name in names:
            address, _, length = self.parts[layer][name]
            if _libc:
                _libc.madvise(address, length, MADV_POPULATE_READ)  # an older kernel refuses, and the pages come when they are touched
        return self.blocks[layer]

    def release(self, layer: int, names) -> None:
        """Give a layer's pages back: out of this process first, then out of the system's file cache. Other systems than Linux decide for themselves."""
        for name in names:
            address, offset, length = self.parts[layer][name]
            if _libc:
                _libc.madvise(address, length, MADV_DONTNEED)
                os.posix_fadvise(self.file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)

    def resident_bytes(self) -> tuple[int, str]:
        """Bytes of all layers that are in memory, the system's file cache included; "measured", or "computed" where the system does not say."""
        if not _libc:
            return 0, "computed"
        parts = [part for layer in self.parts.values() for part in layer.values()]
        return sum(_resident_pages(address, length) * PAGE for address, _, length in parts), "measured"


def trim_heap() -> None:
    """Give back what the allocator kept of layers that were written away while loading; it would hold those pages for later. Only glibc can be asked."""
    if _libc and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def resident_bytes(tensors) -> tuple[int, str]:
    """Bytes of some tensors that are in memory: "measured" page by page on Linux, "allocated" on a GPU, else their sizes, "computed"."""
    total, how = 0, "measured" if _libc else "computed"
    for tensor in tensors:
        if tensor.device.type == "cuda":
            total, how = total + tensor.nbytes, "allocated"
        elif _libc and tensor.nbytes:
            start = tensor.data_ptr() - tensor.data_ptr() % PAGE
            length = tensor.data_ptr() + tensor.nbytes - start
            total += round(tensor.nbytes * _resident_pages(start, length) / (_whole_pages(length) // PAGE))
        else:
            total += tensor.nbytes
    return total, how


def _resident_pages(address: int, length: int) -> int:
    pages = (ctypes.c_ubyte * (_whole_pages(length) // PAGE))()
    if _libc.mincore(address, length, pages):
        raise OSError(ctypes.get_errno(), "the system does not say which pages are in memory")
    return int((np.frombuffer(pages, np.uint8) & 1).sum())


def _whole_pages(length: int) -> int:
    return length + -length % PAGE


# -- GPU ---------------------------------------------------------------------------------------------------------------


class Copies:
    """Copies from pinned host memory to a CUDA device, on a stream of their own: one layer travels while another runs."""

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where a weight lies while it is offloaded."""
        return tensor.cpu().pin_memory()

    def start(self, pairs, free):
        """Begin to copy (target, source) pairs once `free` has happened on the device; returns the event of their arrival."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(free)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, arrival) -> None:
        """Everything that is launched from now on comes after the arrival; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(arrival)

    def done(self):
        """The event of everything that was launched so far having ended."""
        return torch.cuda.current_stream(self.device).record_event()


class HostLayers:
    """Layers in the host's memory; layer l runs in place l % 2 on the device, so that the next one can arrive while it does.

    Args:
        device: torch device. copies: how they travel; tests put in their own.
    """

    in_place, place = False, "host memory"

    def __init__(self, device, copies=None):
        self.device, self.copies = device, copies or Copies(device)
        self.homes: dict[int, dict[str, torch.Tensor]] = {}
        self.blocks: dict[int, Block] = {}  # as they are on the device
        self.places: list[dict[str, torch.Tensor]] = []
        self.free: list = []  # by place: the event after which it may be overwritten
        self.coming: list = [None] * ROOM  # by place: (layer, products, event of their arrival)

    def take(self, layer: int, block: Block) -> Block:
        weights = {name: getattr(block, name).weight for name in PRODUCTS}
        if not self.places:
            self.places = [{name: torch.empty_like(weight) for name, weight in weights.items()} for _ in range(ROOM)]
            self.free = [self.copies.done() for _ in self.places]  # their memory may have been somebody's a moment ago
        self.homes[layer] = {name: self.copies.home(weight) for name, weight in weights.items()}
        self.blocks[layer] = _standing_in(block, self.places[layer % ROOM])
        return _standing_in(block, self.homes[layer])

    def begin(self, layer: int, names) -> None:
        place = layer % ROOM
        if self.coming[place] is None or self.coming[place][:2] != (layer, names):
            pairs = [(self.places[place][name], self.homes[layer][name]) for name in names]
            self.coming[place] = (layer, names, self.copies.start(pairs, self.free[place]))

    def ready(self, layer: int, names) -> Block:
        self.copies.wait(self.coming[layer % ROOM][2])
        return self.blocks[layer]

    def release(self, layer: int, names) -> None:
        self.coming[layer % ROOM], self.free[layer % ROOM] = None, self.copies.done()

    def resident_bytes(self) -> tuple[int, str]:
        """Bytes that the two places take on the device, whatever is in them."""
        return sum(tensor.nbytes for place in self.places for tensor in place.values()), "allocated"
