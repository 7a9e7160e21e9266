"""Monotone exit: a token may never go deeper than the one before it, so that no layer ever misses a key.

Source: SkipDecode (Del Corro et al., 2023), in two forms. `MonotoneStrategy` caps a confidence rule by the depth of the token before. `SkipDecodeStrategy`
follows the published schedule: the number of blocks falls with the position, whatever the token, and it is the lower-middle blocks that are skipped.
Both answer from the original head on a state that it was not trained for.
"""

from river_core.errors import InputError
from river_core.kv_cache import BACKBONE
from river_core.strategies import Step, Strategy


class MonotoneStrategy(Strategy):
    """Blocks 1..e with e at most the previous token's; reaching the cap ends the token even if the rule says no."""

    def __init__(self, model, rule):
        super().__init__(model, rule)
        self.cap = self.last

    def step(self, token_id, position, index, cache):
        walk = self.run_backbone([token_id], position, cache, self.rule, index, cap=self.cap)
        self.cap = walk.depth
        return self.leave(walk, position, cache)


class SkipDecodeStrategy(Strategy):
    """n blocks for generated token i: the first `warm_up` and the last n - warm_up; the residual stream jumps over the gap.

    n falls from `n_max` to `n_min` over `horizon` tokens. The exit depth of its steps is n, the number of blocks run.

    Raises:
        InputError: unless warm_up < n_min <= n_max <= L.
    """

    def __init__(self, model, rule, n_min: int | None = None, n_max: int | None = None, warm_up: int = 1, horizon: int = 64):
        super().__init__(model, rule)
        self.n_max = self.last if n_max is None else n_max
        self.n_min = max(warm_up + 1, self.last // 2) if n_min is None else n_min
        self.warm_up, self.horizon = warm_up, horizon
        if not (0 <= warm_up < self.n_min <= self.n_max <= self.last) or horizon < 1:
            raise InputError(
                f"SkipDecode needs warm-up < n_min <= n_max <= {self.last} and a horizon of at least 1 token, not {warm_up}, {self.n_min}, {self.n_max}, {horizon}."
            )

    def blocks(self, index: int) -> list[int]:
        """0-based blocks that run for generated token `index`."""
        fall = (self.n_max - self.n_min) * min(index, self.horizon) / self.horizon
        n = round(self.n_max - fall)
        return list(range(self.warm_up)) + list(range(self.last - (n - self.warm_up), self.last))

    def step(self, token_id, position, index, cache):
        decoder = self.decoder
        rows = decoder.rows(position, 1, cache)
        states = [decoder.embed([token_id])]
        chosen = self.blocks(index)
        for layer in chosen:
            states += decoder.run_blocks(decoder.blocks, layer, layer + 1, states[-1], rows, cache, BACKBONE)
        self.mark("backbone")
        cache.length = position + 1
        logits = self.answer(states[-1])
        return Step(logits, len(chosen), len(chosen), 0, hidden_states=states, layers=chosen)
