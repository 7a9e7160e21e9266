"""State propagation: the layers that an exiting token skips get keys and values projected from its exit state.

Source: CALM (Schuster et al., 2022). Every slot is present, but its input is the state of layer e instead of the layer before its own, so the
error grows with the distance. Logits come from the original head on the exit state.
"""

from river_core.kv_cache import PROPAGATED
from river_core.strategies import Strategy


class PropagationStrategy(Strategy):
    """Blocks 1..e in the backbone; for the rest only norm and the key and value projections of h^e."""

    def step(self, token_id, position, index, cache):
        walk = self.run_backbone([token_id], position, cache, self.rule, index)
        for layer in range(walk.depth, self.last):
            with self.decoder.blocks.at(layer, ("qkv",), following=layer + 1 < self.last) as block:
                self.decoder.write_keys_values(block, layer, walk.hidden, walk.rows, cache, PROPAGATED)
        self.mark("backbone")
        return self.leave(walk, position, cache)
