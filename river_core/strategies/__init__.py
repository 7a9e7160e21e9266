"""What happens to the layers that an exiting token skips: one file a strategy, all of them subclasses of `Strategy`.

To add one: write a file with a subclass that implements `step`, and give it a line in `methods.METHODS`.
"""

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from river_core.decoder import PIECE, Decoder, DecoderConfig, Rows
from river_core.exit_rules import ExitRule
from river_core.kv_cache import BACKBONE, KVCache
from river_core.screening import Largest

TRACED = 1 << 16  # similarities of prompt tokens that a trace takes; those of longer prompts are left out,
TRACED_BYTES = 1 << 28  # as are those of prompts whose states would take more than this


@dataclass
class Step:
    """What one generated token left behind.

    logits: [V] float32, from which it is drawn; in a step of a greedy lane perhaps only the largest, until the clock has stopped.
    exit_layer: backbone blocks that the fed token ran before it left; L = no exit.
    layers_run, river_layers: backbone and river blocks executed for it, once for every row that went through (a recomputed token counts again).
    token: the id, filled in by `advance`.
    scores: the exit rule's score by layer (counted from 1), where it was asked.
    why: what decided `exit_layer`: "test" (the rule's test passed there), "end" (no test passed before the last layer), "forced" (the depth was known beforehand),
        "held" (a limit of the strategy's own, not the rule), "draft" and "check" (of a lane that drafts and checks).
    score: what the test at `exit_layer` compared, unrounded; None where nothing was tested.
    hidden_states: the residual stream before the first block and after every block that ran, each [T, d] float32; its last row is the fed token. Of a
        prompt that is too long to trace, the last row alone.
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
    why: str = "forced"
    score: float | None = None
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    layers: list[int] | None = None
    filled: list[tuple[int, int, int, int]] = field(default_factory=list)
    facts: dict = field(default_factory=dict)


class Walk(NamedTuple):
    """Rows on their way through the backbone, as far as they went.

    states: before the first block and after every block, [T, d]; the depth is one less than their number. scores, why, score: as in `Step`.
    rows: of this call, with which further blocks can go on. hidden: the last of the states, all rows of it even where `states` have only the last one.
    """

    states: list[torch.Tensor]
    scores: dict[int, float]
    why: str
    score: float | None
    rows: Rows | None
    hidden: torch.Tensor

    @property
    def depth(self) -> int:
        return len(self.states) - 1

    def step(self, logits, layers_run: int, river_layers: int = 0) -> Step:
        """The step that ended this way."""
        return Step(
            logits, self.depth, layers_run, river_layers, scores=self.scores, why=self.why, score=self.score, hidden_states=self.states
        )


class Strategy:
    """One lane's KV strategy; belongs to the lane and may keep state.

    Args:
        model: anything with a `decoder` and a `river`, shared by all lanes.
        rule: this lane's exit rule.
    """

    greedy = False  # True: the lane takes the largest logit, and nothing in its steps needs the others
    reads_prompt_itself = False  # True: the prompt pass that other lanes share is of no use to this strategy
    pause = None  # called between the pieces of a prompt; it raises where the prompt is not to be read on

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
        walk = self.read(token_ids, cache)
        cache.length = len(token_ids)
        return walk.step(self.answer(walk.hidden[-1:]), self.last)

    def step(self, token_id: int, position: int, index: int, cache: KVCache) -> Step:
        """Feed one token at `position`, for the logits of generated token `index`."""
        raise NotImplementedError

    def advance(self, token_id: int, position: int, index: int, cache: KVCache, sampler, room: int) -> list[Step]:
        """Decode at least one token and at most `room`, drawn by `sampler`; one for most strategies."""
        step = self.step(token_id, position, index, cache)
        step.token = sampler(step.logits)
        return [step]

    def leave(self, walk: Walk, position: int, cache: KVCache) -> Step:
        """The step of a token that answers from its exit state and goes no further."""
        cache.length = position + 1
        return walk.step(self.exit_logits(walk.hidden[-1:], walk.depth), walk.depth)

    def exit_logits(self, state: torch.Tensor, layer: int) -> torch.Tensor | Largest:
        """`answer` on the output [1, d] of block `layer`. Taken from the exit rule if its test made them."""
        made, self.rule.logits = self.rule.logits, None
        if made is not None and made[0] == layer:
            return made[1]
        return self.answer(state)

    def flush(self, cache: KVCache) -> list[tuple[int, int, int, int]]:
        """Complete whatever the strategy left pending; returns the slots that were filled. Nothing for most strategies."""
        return []

    def run_backbone(self, token_ids, start, cache, rule=None, index=0, cap=None) -> Walk:
        """Backbone blocks over some rows until the rule says leave, `cap` blocks ran, or all of them did."""
        decoder = self.decoder
        forced, limit = self._limit(rule, index, cap)
        rows = decoder.rows(start, len(token_ids), cache)
        states, scores, depth, passed = [decoder.embed(token_ids)], {}, 0, False
        itself = forced is None and decoder.tests_itself(rows, cache)
        while depth < limit and not passed:
            tau = rule.tau_beyond(depth) if itself else None
            stop = limit if forced is not None or tau is not None else min(rule.next_test(depth), limit)
            made = decoder.run_blocks(decoder.blocks, depth, stop, states[-1], rows, cache, BACKBONE, tau)
            states += made
            if tau is not None:
                scores |= {depth + i: score for i, score in enumerate(made.similarities, 1) if depth + i < self.last}
                passed = scores.get(len(states) - 1, -math.inf) > tau
                break
            depth = stop
            if forced is None and depth < self.last:
                passed = self._test(rule, scores, depth, states[-2], states[-1], made.similarity)
        self.mark("backbone")
        return self._walk(forced, passed, states, scores, rows, states[-1])

    def read(self, token_ids, cache, rule=None, cap=None) -> Walk:
        """`run_backbone` over a prompt, in pieces (see `Decoder.read_layer`): all of its rows leave after the same block."""
        count, decoder = len(token_ids), self.decoder
        if count == 1:
            return self.run_backbone(token_ids, 0, cache, rule, 0, cap)
        forced, limit = self._limit(rule, 0, cap)
        rows = decoder.rows(0, count, cache) if count <= PIECE else None
        hidden = decoder.embed(token_ids)
        states, scores, depth, passed = [self.kept(hidden)], {}, 0, False
        while depth < limit and not passed:
            stop = limit if forced is not None else min(rule.next_test(depth), limit)
            while depth < stop:
                before = hidden
                hidden = decoder.read_layer(decoder.blocks, depth, before, cache, BACKBONE, rows, depth + 1 < stop, self.pause)
                states.append(self.kept(hidden))
                depth += 1
            if forced is None and depth < self.last:
                passed = self._test(rule, scores, depth, before, hidden, None)
        self.mark("backbone")
        return self._walk(forced, passed, states, scores, rows, hidden)

    def kept(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a trace needs of a prompt's states [T, d] after one block: all rows of a short prompt, the last one of a long one."""
        return hidden if traces_prompt(self.decoder.config, len(hidden)) else hidden[-1:].clone()

    def _limit(self, rule, index, cap) -> tuple[int | None, int]:
        """The depth if it is known beforehand, and the deepest that may be reached."""
        limit = self.last if cap is None else min(cap, self.last)
        forced = self.last if rule is None else rule.forced_depth(index)
        return forced, limit if forced is None else min(forced, limit)

    @staticmethod
    def _test(rule, scores, depth, before, after, similarity) -> bool:
        leave, score = rule.should_exit(depth, before, after, similarity)
        if score is not None:
            scores[depth] = score
        return leave

    def _walk(self, forced, passed, states, scores, rows, hidden) -> Walk:
        depth = len(states) - 1
        if forced is not None:
            why = "forced" if depth == min(forced, self.last) else "held"
        else:
            why = "test" if passed else "end" if depth == self.last else "held"
        return Walk(states, scores, why, scores.get(depth), rows, hidden)


def traces_prompt(config: DecoderConfig, tokens: int) -> bool:
    """Whether the similarities of all tokens of a prompt go into the trace, and its states are kept until they are made."""
    layers = config.num_hidden_layers
    return tokens * layers <= TRACED and tokens * (layers + 1) * config.hidden_size * 4 <= TRACED_BYTES


def prompt_bytes(config: DecoderConfig, tokens: int) -> int:
    """About the most that reading a prompt takes beside weights and caches: states of two layers and what is kept for the trace, the intermediates of one piece, its
    mask, and its rotation."""
    piece, heads = min(tokens, PIECE), config.num_attention_heads + 2 * config.num_key_value_heads
    states = 2 + (config.num_hidden_layers if traces_prompt(config, tokens) else 0)
    row = 4 * (3 * config.intermediate_size + 6 * heads * config.head_dim + 2 * config.hidden_size)
    return tokens * states * config.hidden_size * 4 + piece * row + 5 * piece * tokens * (tokens > PIECE)
