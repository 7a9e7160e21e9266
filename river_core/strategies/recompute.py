"""Recompute: exited tokens stay pending and run through the layers they miss together with a later token.

Sources: hidden replay as in FREE's synchronized parallel decoding (Bae et al., 2023), generalised to any number of exit depths; token replay as
in EE-LLM (Chen et al., 2024), which starts again from the embedding. Both leave the backbone's own cache, late.

Why hidden replay needs no gather: a step that leaves at depth e lifts every shallower pending token to e, so depths never increase with position,
and the rows at work in a layer are always a contiguous run of positions that ends at the current one.
"""

import torch

from river_core.exit_rules import ExitRule
from river_core.kv_cache import BACKBONE
from river_core.strategies import Strategy

CAP = 16  # pending tokens after which a token runs the whole backbone and completes them all


class RecomputeStrategy(Strategy):
    """Hidden replay.

    Args:
        cap: longest pending run; 0 = plain decoding, None = no limit.
    """

    def __init__(self, model, rule, cap: int | None = CAP):
        super().__init__(model, rule)
        self.cap = cap
        # Positions that left before the last layer, ascending: [position, depth, hidden state [1, d]].
        self.pending: list[list] = []

    def step(self, token_id, position, index, cache):
        return self._run(token_id, position, index, cache, force=self.cap is not None and len(self.pending) >= self.cap)

    def _run(self, token_id, position, index, cache, force):
        decoder, last = self.decoder, self.last
        asked = self.rule.forced_depth(index)
        forced = last if force else asked
        hidden = decoder.embed([token_id])  # rows at work, the current token last
        states, scores, filled = [hidden], {}, []
        first, rows, layers_run, depth, passed = position, None, 0, 0, False
        while depth < last and depth != forced and not passed:
            joining = [entry for entry in self.pending if entry[1] == depth and entry[0] < first]
            if joining:
                hidden = torch.cat([entry[2] for entry in joining] + [hidden])
                first = joining[0][0]
            if rows is None or joining:
                rows = decoder.rows(first, position - first + 1, cache)
            before = hidden[-1:]
            made = decoder.run_blocks(decoder.blocks, depth, depth + 1, hidden, rows, cache, BACKBONE)
            hidden = made[-1]
            layers_run += rows.count
            filled += [(p, depth, depth + 1, BACKBONE) for p in range(first, position)]
            depth += 1
            for entry, row in zip(self._working(first, position), hidden.split(1), strict=False):
                entry[1], entry[2] = depth, row
            states.append(hidden[-1:])
            if forced is None and depth < last:
                passed = self._test(self.rule, scores, depth, before, hidden[-1:], made.similarity)
        self.pending = [entry for entry in self.pending if entry[1] < last]
        if depth < last:
            self.pending.append([position, depth, hidden[-1:]])
        self.mark("backbone")
        walk = self._walk(forced, passed, states, scores, rows, hidden)
        step = self.leave(walk._replace(why="held") if force and asked != last else walk, position, cache)
        step.layers_run = layers_run
        step.filled = _merge(filled)
        step.facts = {"pending": len(self.pending)}
        return step

    def _working(self, first, position):
        return [entry for entry in self.pending if first <= entry[0] < position]

    def flush(self, cache) -> list[tuple[int, int, int, int]]:
        """Complete every pending token now, as a continued chat would; returns the slots that were filled."""
        filled = []
        while self.pending:
            # Without a current token, the deepest group of rows is lifted layer by layer; shallower ones join as it passes.
            depth = min(entry[1] for entry in self.pending)
            group = [entry for entry in self.pending if entry[1] == depth]
            rows = self.decoder.rows(group[0][0], len(group), cache)
            hidden = torch.cat([entry[2] for entry in group])
            hidden = self.decoder.run_blocks(self.decoder.blocks, depth, depth + 1, hidden, rows, cache, BACKBONE)[-1]
            for entry, row in zip(group, hidden.split(1), strict=True):
                entry[1], entry[2] = depth + 1, row
                filled.append((entry[0], depth, depth + 1, BACKBONE))
            self.pending = [entry for entry in self.pending if entry[1] < self.last]
        return _merge(filled)


class TokenReplayStrategy(Strategy):
    """Token replay: every step feeds all positions since the first incomplete one again, from the embedding."""

    def __init__(self, model, rule, cap: int | None = CAP):
        super().__init__(model, rule)
        self.cap = cap
        self.tokens: list[tuple[int, int]] = []  # pending (position, token id), ascending
        self.reached: dict[int, int] = {}

    def step(self, token_id, position, index, cache):
        force = self.cap is not None and len(self.tokens) >= self.cap
        self.tokens.append((position, token_id))
        first = self.tokens[0][0]
        rule = None if force else self.rule
        walk = self.run_backbone([token for _, token in self.tokens], first, cache, _LastRow(rule), index)
        if force and self.rule.forced_depth(index) != self.last:
            walk = walk._replace(why="held")
        depth = walk.depth
        filled = []
        for earlier, _ in self.tokens[:-1]:
            reached = self.reached[earlier]
            if depth > reached:
                filled.append((earlier, reached, depth, BACKBONE))
                self.reached[earlier] = depth
        self.reached[position] = depth
        step = self.leave(walk, position, cache)
        step.layers_run = depth * len(self.tokens)
        if depth == self.last:
            self.tokens = []
        step.filled = filled
        step.facts = {"pending": len(self.tokens)}
        return step

    def flush(self, cache):
        """Complete every pending token now."""
        if not self.tokens:
            return []
        self.run_backbone([token for _, token in self.tokens], self.tokens[0][0], cache)
        filled = [(p, self.reached[p], self.last, BACKBONE) for p, _ in self.tokens if self.reached[p] < self.last]
        self.tokens = []
        return filled


class _LastRow(ExitRule):
    """A rule that looks at the current token only, however many rows are replayed; None = never leave."""

    def __init__(self, rule):
        self.rule = rule

    def next_test(self, layer):
        return self.rule.next_test(layer)

    def tau_beyond(self, layer):
        return self.rule.tau_beyond(layer)

    def forced_depth(self, index):
        return 10**9 if self.rule is None else self.rule.forced_depth(index)

    def should_exit(self, layer, h_in, h_out, similarity=None):
        return self.rule.should_exit(layer, h_in[-1:], h_out[-1:], similarity)


def _merge(filled):
    """Join slots of one position in neighbouring layers into ranges."""
    merged: dict[int, list] = {}
    for position, low, high, owner in filled:
        if position in merged:
            merged[position][2] = high
        else:
            merged[position] = [position, low, high, owner]
    return [tuple(entry) for entry in merged.values()]
