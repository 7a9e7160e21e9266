"""Sequence-level exit: one depth for prompt and answer.

Source: Balcony (Jamialahmadi et al., 2025). Layers above the depth never run and hold nothing. The answer comes from the original head on the exit state
("lens"), or through an untrained copy of the last block, which is where Balcony's training starts ("balcony").
"""

from river_core.errors import InputError
from river_core.kv_cache import PROPAGATED
from river_core.strategies import Step, Strategy


class SequenceStrategy(Strategy):
    """Blocks 1..e for every row.

    Args:
        depth: e; None = chosen from the prompt: the first block at which the rule holds for all rows, or the rule's forced depth.
        head: "lens" or "balcony". The balcony's keys and values go into the last layer's slots, which nothing else uses; their owner is
            "propagated", since they are that layer's projections of an earlier state.
    """

    reads_prompt_itself = True

    def __init__(self, model, rule, depth: int | None = None, head: str = "lens"):
        super().__init__(model, rule)
        if head not in ("lens", "balcony"):
            raise InputError(f"A sequence-level exit has the head lens or balcony, not {head!r}.")
        if depth is not None and not 1 <= depth <= self.last:
            raise InputError(f"The depth of a sequence-level exit is 1 to {self.last}, not {depth}.")
        self.depth = depth
        self.head = head

    def prefill(self, token_ids, cache, mode="full"):
        rule, cap = (self.rule, None) if self.depth is None else (None, self.depth)
        states, scores, rows = self.run_backbone(token_ids, 0, cache, rule, 0, cap)
        self.depth = len(states) - 1
        return self._answer(rows, states, scores, cache)

    def step(self, token_id, position, index, cache):
        states, _, rows = self.run_backbone([token_id], position, cache, None, index, cap=self.depth)
        return self._answer(rows, states, {}, cache)

    def _answer(self, rows, states, scores, cache):
        decoder, state, layers = self.decoder, states[-1], self.depth
        if self.head == "balcony" and self.depth < self.last:
            state = decoder.run_blocks(decoder.blocks, self.last - 1, self.last, state, rows, cache, PROPAGATED)[-1]
            layers += 1
            self.mark("backbone")
        cache.length = rows.stop
        logits = self.answer(state[-1:])
        return Step(logits, self.depth, layers, 0, scores=scores, hidden_states=states)
