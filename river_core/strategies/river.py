"""River: an exiting token goes on through the quantised twins, so its cache entries are complete as a by-product of the exit.

Source: River-LLM (ACL 2026). With the rule `Never` this is the plain backbone, with a fixed depth of 0 the full 4-bit model.
"""

from river_core.kv_cache import RIVER
from river_core.strategies import Step, Strategy, Walk


class RiverStrategy(Strategy):
    """Blocks 1..e in the backbone, e + 1..L in the river, then the original norm and head."""

    def prefill(self, token_ids, cache, mode="full"):
        """With mode "sequence", the paper's sequence-level exit: all rows leave after the first block at which the least similar row exceeds
        tau (or at the rule's forced depth), and go on through the river."""
        walk = self.read(token_ids, cache, self.rule if mode == "sequence" else None)
        if len(token_ids) == 1:
            return self._go_on(walk, cache)
        hidden, made = walk.hidden, []
        for layer in range(walk.depth, self.last):
            hidden = self.decoder.read_layer(self.river.blocks, layer, hidden, cache, RIVER, walk.rows, pause=self.pause)
            made.append(self.kept(hidden))
        return self._answer(walk, made, hidden, len(token_ids), cache)

    def step(self, token_id, position, index, cache):
        return self._go_on(self.run_backbone([token_id], position, cache, self.rule, index), cache)

    def _go_on(self, walk: Walk, cache) -> Step:
        """The rest of a token's way, through the river."""
        made = []
        if walk.depth < self.last:
            made = self.decoder.run_blocks(self.river.blocks, walk.depth, self.last, walk.hidden, walk.rows, cache, RIVER)
        return self._answer(walk, made, made[-1] if made else walk.hidden, walk.rows.stop, cache)

    def _answer(self, walk, made, hidden, length, cache) -> Step:
        self.mark("river")
        cache.length = length
        step = walk.step(self.answer(hidden[-1:]), walk.depth, self.last - walk.depth)
        step.hidden_states = walk.states + made
        return step
