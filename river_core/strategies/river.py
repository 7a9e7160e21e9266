"""River: an exiting token goes on through the quantised twins, so its cache entries are complete as a by-product of the exit.

Source: River-LLM (ACL 2026). With the rule `Never` this is the plain backbone, with a fixed depth of 0 the full 4-bit model.
"""

from river_core.kv_cache import RIVER
from river_core.strategies import Step, Strategy


class RiverStrategy(Strategy):
    """Blocks 1..e in the backbone, e + 1..L in the river, then the original norm and head."""

    def prefill(self, token_ids, cache, mode="full"):
        """With mode "sequence", the paper's sequence-level exit: all rows leave after the first block at which the least similar row exceeds
        tau (or at the rule's forced depth), and go on through the river."""
        return self._run(token_ids, 0, 0, cache, self.rule if mode == "sequence" else None)

    def step(self, token_id, position, index, cache):
        return self._run([token_id], position, index, cache, self.rule)

    def _run(self, token_ids, start, index, cache, rule) -> Step:
        decoder, last = self.decoder, self.last
        states, scores, rows = self.run_backbone(token_ids, start, cache, rule, index)
        depth = len(states) - 1
        if depth < last:
            states += decoder.run_blocks(self.river.blocks, depth, last, states[-1], rows, cache, RIVER)
        self.mark("river")
        cache.length = start + len(token_ids)
        logits = self.answer(states[-1][-1:])
        return Step(logits, depth, depth, last - depth, scores=scores, hidden_states=states)
