"""Sequence-level exit: one depth for prompt and answer.

Source: Balcony (Jamialahmadi et al., 2025). Layers above the depth never run and hold nothing. The answer comes from the original head on the exit state
("lens"), or through an untrained copy of the last block, which is where Balcony's training starts ("balcony").
"""

from river_core.errors import InputError
from river_core.kv_cache import PROPAGATED
from river_core.strategies import Strategy


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
        if self.depth is None:
            walk = self.read(token_ids, cache, self.rule)
            self.depth = walk.depth
        else:
            walk = self.read(token_ids, cache, None, self.depth)._replace(why="forced")
        self.why = "forced" if walk.why == "forced" else "held"  # of the tokens that come: their depth is the prompt's
        return self._answer(walk, len(token_ids), cache)

    def step(self, token_id, position, index, cache):
        walk = self.run_backbone([token_id], position, cache, None, index, cap=self.depth)._replace(why=self.why)
        return self._answer(walk, position + 1, cache)

    def _answer(self, walk, length, cache):
        decoder, state, layers = self.decoder, walk.hidden, self.depth
        if self.head == "balcony" and self.depth < self.last:
            if len(state) > 1:
                state = decoder.read_layer(decoder.blocks, self.last - 1, state, cache, PROPAGATED, walk.rows, pause=self.pause)
            else:
                state = decoder.run_blocks(decoder.blocks, self.last - 1, self.last, state, walk.rows, cache, PROPAGATED)[-1]
            layers += 1
            self.mark("backbone")
        cache.length = length
        return walk.step(self.answer(state[-1:]), layers)
