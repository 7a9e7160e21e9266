"""The exit river: a quantised twin of every backbone block, writing into the same cache slots (River-LLM, section on the KV-shared exit river)."""

from concurrent.futures import ThreadPoolExecutor

import torch

from river_core.decoder import BlockWeights, Decoder


class River:
    """Twins of all blocks of a decoder. Immutable once built; lanes share one.

    Norms and biases are the backbone's own; only the four products of a block are quantised. Embedding, final norm and head
    are not copied: a token that left the backbone ends in the original head.

    Args:
        decoder: the backbone, already in place.
        weights: the checkpoint's tensors under transformers' names, as for `Decoder`; quantised from there, not from the backbone's
            16-bit copy.
        progress: called with the fraction of layers that are quantised.
    """

    def __init__(self, decoder: Decoder, weights: dict[str, torch.Tensor], progress=None):
        layers = range(decoder.config.num_hidden_layers)

        def twin(layer):
            return decoder.make_block(BlockWeights.read(weights, layer), layer, decoder.plan.quantised)

        self.blocks = []
        for block in _in_threads(twin, layers) if decoder.device.type == "cpu" else map(twin, layers):
            self.blocks.append(block)
            if progress:
                progress(len(self.blocks) / len(layers))

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
