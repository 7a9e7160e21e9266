"""The exit river: a quantised twin of every backbone block, writing into the same cache slots (River-LLM, section on the KV-shared exit river)."""

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from river_core.decoder import Blocks, BlockWeights, Decoder
from river_core.files import appears_whole, one_at_a_time
from river_core.hqq import HQQ_VERSION, Quantised


class River:
    """Twins of all blocks of a decoder. Immutable once built; lanes share one.

    Norms and biases are the backbone's own; only the four products of a block are quantised. Embedding, final norm and head
    are not copied: a token that left the backbone ends in the original head.

    Args:
        decoder: the backbone, already in place.
        weights: the checkpoint's tensors under transformers' names, as for `Decoder`; quantised from there, not from the backbone's
            16-bit copy.
        progress: called with the fraction of layers that are in place.
        store: a file that keeps the codes from one start to the next, or None. It is read if it fits this model and quantiser, else written,
            by one process at a time.
        waiting: called about once a second while another process makes the codes of `store`.
    """

    def __init__(self, decoder: Decoder, weights: dict[str, torch.Tensor], progress=None, store: Path | None = None, waiting=None):
        self.blocks = Blocks()
        kept = self._kept(store, decoder)
        if kept or not store:
            self._build(decoder, weights, progress, kept)
            return
        with one_at_a_time(store.with_suffix(".lock"), waiting):
            kept = self._kept(store, decoder)  # another process may have made them meanwhile
            made = self._build(decoder, weights, progress, kept, keep=not kept)
            if made:
                write_codes(store, made)

    @staticmethod
    def _kept(store, decoder) -> dict[str, Quantised] | None:
        """The codes of `store`, if there is one for each product of this backbone and of its size."""
        kept = read_codes(store, decoder.plan.bits) if store else None
        names = {f"{layer}.{name}" for layer in range(decoder.config.num_hidden_layers) for name in ("qkv", "o", "gate_up", "down")}
        return kept if kept and set(kept) == names else None

    def _build(self, decoder, weights, progress, kept, keep=False) -> dict[str, Quantised]:
        """Make the twins, from codes that were kept or from the weights; with `keep`, returns the codes that were made."""
        layers = range(decoder.config.num_hidden_layers)
        plan = decoder.plan
        made: dict[str, Quantised] = {}

        def twin(layer):
            tensors = BlockWeights.read(weights, layer)

            def product(name):
                weight, bias = getattr(tensors, name)
                key = f"{layer}.{name}"
                codes = kept[key].to(plan.device) if kept else plan.quantise(weight)
                if keep:
                    made[key] = codes
                return plan.river_layer(codes, bias)

            return decoder.make_block(layer, product)

        for block in _in_threads(twin, layers) if decoder.device.type == "cpu" else map(twin, layers):
            self.blocks.append(block)
            if progress:
                progress(len(self.blocks) / len(layers))
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that the twins hold beside the backbone."""
        return sum(block.nbytes for block in self.blocks)


def _in_threads(work, items):
    """`map`, one layer a thread and one core a layer. The quantiser is a long chain of small operations: splitting each of them over the cores
    costs a barrier per operation, which takes ten times as long as the work once anything else wants a core."""
    cores = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(work, items)
    finally:
        torch.set_num_threads(cores)  # PyTorch keeps one count for threads to come, and the pool's threads have set it


def read_codes(path: Path, bits: int) -> dict[str, Quantised] | None:
    """Codes by "layer.product" from a file that `write_codes` wrote; None if there is none, or it is damaged or of another version of the quantiser."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("hqq") != HQQ_VERSION:
                return None
            names = {key.removesuffix(".codes") for key in file.keys() if key.endswith(".codes")}  # noqa: SIM118 - not a dict
            return {
                name: Quantised.unpack(*(file.get_tensor(f"{name}.{part}") for part in ("codes", "scales", "zeros")), bits=bits)
                for name in names
            }
    except (SafetensorError, OSError, ValueError, IndexError):  # the two latter: tensors that belong to no codes
        return None


def write_codes(path: Path, codes: dict[str, Quantised]) -> None:
    """Keep codes for the next start, whole or not at all; a disk without room for them, or a folder that cannot be written, is no reason to fail."""
    tensors = {}
    for name, quantised in codes.items():
        tensors |= {
            f"{name}.codes": quantised.pack().cpu(),
            f"{name}.scales": quantised.scales.cpu(),
            f"{name}.zeros": quantised.zeros.cpu(),
        }
    # Kept or not, the river is there: a cache that is full, read-only or gone costs the next start its time, and nothing else.
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < 4 * sum(tensor.nbytes for tensor in tensors.values()):
            return
        with appears_whole(path) as partial:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"hqq": HQQ_VERSION})
