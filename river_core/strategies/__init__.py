"""What happens to the layers that an exiting token skips: one file a strategy, all of them subclasses of `Strategy`.

To add one: write a file with a subclass that implements `step`, and give it a line in `methods.METHODS`.
"""

import time
from dataclasses import dataclass, field

import torch

from river_core.decoder import Decoder
from river_core.exit_rules import ExitRule
from river_core.kv_cache import BACKBONE, KVCache
from river_core.screening import Largest


@dataclass
class Step:
    """What one generated token left behind.

    logits: [V] float32, from which it is drawn; in a step of a greedy lane perhaps only the largest, until the clock has stopped.
    exit_layer: backbone blocks that the fed token ran before it left; L = no exit.
    layers_run, river_layers: backbone and river blocks executed for it, once for every row that went through (a recomputed token counts again).
    token: the id, filled in by `advance`.
    scores: the exit rule's score by layer (counted from 1), where it was asked.
    hidden_states: the residual stream before the first block and after every block that ran, each [T, d] float32; its last row is the fed token.
    layers: the blocks (0-based) that the hidden states went through, where they are not the first ones in order.
    filled: slots of earlier positions written in this step: (position, first layer, last layer + 1, owner).
    facts: what only this strategy has to say, JSON-ready.
    """

    logits: torch.Tensor | Largest
    exit_layer: int
    layers_run: int
    river_layers: int
    token: int = -1
    scores: dict[int, float] = field(default_factory=dict)
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    layers: list[int] | None = None
    filled: list[tuple[int, int, int, int]] = field(default_factory=list)
    facts: dict = field(default_factory=dict)


class Strategy:
    """One lane's KV strategy; belongs to the lane and may keep state.

    Args:
        model: anything with a `decoder` and a `river`, shared by all lanes.
        rule: this lane's exit rule.
    """

    greedy = False  # True: the lane takes the largest logit, and nothing in its steps needs the others
    reads_prompt_itself = False  # True: the prompt pass that other lanes share is of no use to this strategy

    def __init__(self, model, rule: ExitRule):
        self.decoder: Decoder = model.decoder
        self.river = model.river
        self.rule = rule
        self.last = model.decoder.config.num_hidden_layers
        self.begin()

    def begin(self) -> None:
        """A step begins: forget what the last one left for its observer."""
        self.marks: list[tuple[str, int]] = []  # what has just ended, and when (ns)
        self._answered: torch.Tensor | None = None

    def mark(self, part: str) -> None:
        """Note that the work since the last mark was `part`: "backbone" (exit tests included), "river" or "head"."""
        self.marks.append((part, time.perf_counter_ns()))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The original norm and head on states [T, d] -> logits [T, V]."""
        logits = self.decoder.head(hidden_states)
        self._answered = None
        self.mark("head")
        return logits

    def answer(self, state: torch.Tensor) -> torch.Tensor | Largest:
        """The original norm and head on one state [1, d] -> logits [V], or in a greedy lane perhaps only the largest of them."""
        largest = self.decoder.largest(state) if self.greedy else None
        if largest is None:
            return self.logits(state)[0]
        self._answered = state
        self.mark("head")
        return largest

    def all_logits(self) -> torch.Tensor | None:
        """All logits [V] of the last answer, if its step did without most of them; for the observer, after the clock has stopped."""
        return None if self._answered is None else self.decoder.head(self._answered)[0]

    def new_cache(self, capacity: int) -> KVCache:
        """The cache that this strategy writes to."""
        return self.decoder.new_cache(capacity)

    def prefill(self, token_ids: list[int], cache: KVCache, mode: str = "full") -> Step:
        """Feed the prompt through the whole backbone; its last row gives the first token's logits.

        Args:
            token_ids: T ids.
            cache: empty, with room for them.
            mode: "full", or "sequence" where the strategy has its own way of leaving for a whole prompt.
        """
        states, _, _ = self.run_backbone(token_ids, 0, cache)
        cache.length = len(token_ids)
        return Step(self.answer(states[-1][-1:]), self.last, self.last, 0, hidden_states=states)

    def step(self, token_id: int, position: int, index: int, cache: KVCache) -> Step:
        """Feed one token at `position`, for the logits of generated token `index`."""
        raise NotImplementedError

    def advance(self, token_id: int, position: int, index: int, cache: KVCache, sampler, room: int) -> list[Step]:
        """Decode at least one token and at most `room`, drawn by `sampler`; one for most strategies."""
        step = self.step(token_id, position, index, cache)
        step.token = sampler(step.logits)
        return [step]

    def leave(self, states: list[torch.Tensor], scores: dict[int, float], position: int, cache: KVCache) -> Step:
        """The step of a token that answers from its exit state and goes no further."""
        depth = len(states) - 1
        cache.length = position + 1
        return Step(self.exit_logits(states[-1][-1:], depth), depth, depth, 0, scores=scores, hidden_states=states)

    def exit_logits(self, state: torch.Tensor, layer: int) -> torch.Tensor | Largest:
        """`answer` on the output [1, d] of block `layer`. Taken from the exit rule if its test made them."""
        made, self.rule.logits = self.rule.logits, None
        if made is not None and made[0] == layer:
            return made[1]
        return self.answer(state)

    def flush(self, cache: KVCache) -> list[tuple[int, int, int, int]]:
        """Complete whatever the strategy left pending; returns the slots that were filled. Nothing for most strategies."""
        return []

    def run_backbone(self, token_ids, start, cache, rule=None, index=0, cap=None):
        """Backbone blocks over some rows until the rule says leave, `cap` blocks ran, or all of them did.

        Returns:
            hidden states before the first block and after every block, the rule's scores by layer, and the `Rows` of this call, with which further
            blocks can go on. The depth is one less than the number of states.
        """
        decoder = self.decoder
        limit = self.last if cap is None else min(cap, self.last)
        rows = decoder.rows(start, len(token_ids), cache)
        states, scores, depth = [decoder.embed(token_ids)], {}, 0
        forced = self.last if rule is None else rule.forced_depth(index)
        limit = limit if forced is None else min(forced, limit)
        itself = forced is None and decoder.tests_itself(rows, cache)
        while depth < limit:
            tau = rule.tau_beyond(depth) if itself else None
            stop = limit if forced is not None or tau is not None else min(rule.next_test(depth), limit)
            made = decoder.run_blocks(decoder.blocks, depth, stop, states[-1], rows, cache, BACKBONE, tau)
            states += made
            if tau is not None:
                scores |= {depth + i: score for i, score in enumerate(made.similarities, 1) if depth + i < self.last}
                break
            depth = stop
            if forced is None and depth < self.last:
                leave, score = rule.should_exit(depth, states[-2], states[-1], made.similarity)
                if score is not None:
                    scores[depth] = score
                if leave:
                    break
        self.mark("backbone")
        return states, scores, rows
