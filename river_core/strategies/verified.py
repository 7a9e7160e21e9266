"""River, verified: the river drafts on the shared cache, the backbone checks the drafts in one pass and overwrites their slots.

Self-speculation with the quantised twin as the draft model (after QuantSpec, QSpec and LayerSkip's loop). While drafting, position p + i attends to backbone entries
up to p - 1 and to draft entries after. Greedy output is the backbone's; sampling keeps the backbone's distribution by rejection (Leviathan et al., 2023).
"""

import torch

from river_core.kv_cache import DRAFT
from river_core.sampling import probabilities
from river_core.strategies import Step, Strategy

LONGEST = 8
SMOOTHING = 0.8  # weight of the past in the running acceptance rate


class VerifiedStrategy(Strategy):
    """Cycles of k drafts and one check.

    Args:
        k: drafts per cycle; None = adapted to the acceptance seen so far, 1 to 8. 0 = plain decoding.
        draft_blocks: what drafts; None = the river.
    """

    def __init__(self, model, rule, k: int | None = None, draft_blocks=None):
        super().__init__(model, rule)
        self.k = k
        self.draft_blocks = draft_blocks if draft_blocks is not None else (model.river.blocks if model.river else None)
        self.acceptance = 0.8  # running estimate; only the length of the next draft depends on it
        self.cycles = self.drafted = self.accepted = 0

    def draft_length(self, room: int) -> int:
        """Drafts of the next cycle: bounded by the tokens still wanted, one of which the check itself brings."""
        wanted = self.k
        if wanted is None:
            # The longest draft that is more likely than not to be accepted whole.
            wanted = 1
            while wanted < LONGEST and self.acceptance ** (wanted + 1) > 0.5:
                wanted += 1
        return max(0, min(wanted, room - 1))

    def advance(self, token_id, position, index, cache, sampler, room):
        drafts: list[int] = []
        beliefs: list[torch.Tensor] = []  # the draft's distribution at each drafted token
        token = token_id
        for i in range(self.draft_length(room)):
            logits = self._draft(token, position + i, cache)
            token = sampler(logits)
            drafts.append(token)
            beliefs.append(logits)
        rows = [token_id, *drafts]
        states = self.run_backbone(rows, position, cache).states  # overwrites the drafts' slots layer by layer, before that layer attends
        logits = self.logits(states[-1])  # [k + 1, V]
        tokens, accepted = _judge(drafts, beliefs, logits, sampler)
        cache.length = position + accepted + 1
        cache.forget(position + accepted + 1)
        self._note(len(drafts), accepted)
        steps = []
        for i, made in enumerate(tokens):
            step = Step(logits[i], self.last, self.last, self.last if i < len(drafts) else 0, token=made)
            step.why = "draft" if i < accepted else "check"
            step.hidden_states = [state[i : i + 1] for state in states]
            step.facts = {"cycle": {"number": self.cycles, "drafted": len(drafts), "accepted": accepted, "place": i}}
            steps.append(step)
        return steps

    def _draft(self, token_id, position, cache):
        decoder = self.decoder
        rows = decoder.rows(position, 1, cache)
        hidden = decoder.embed([token_id])
        hidden = decoder.run_blocks(self.draft_blocks, 0, self.last, hidden, rows, cache, DRAFT)[-1]
        self.mark("river")
        return self.answer(hidden)

    def _note(self, drafted, accepted):
        self.cycles += 1
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self.acceptance = SMOOTHING * self.acceptance + (1 - SMOOTHING) * accepted / drafted


def _judge(drafts, beliefs, logits, sampler):
    """Which drafts stand, and the token that the check itself brings.

    Greedy: a draft stands while it is the backbone's own choice. Sampling: it stands with probability min(1, p / q), and at the first refusal the token
    is drawn from max(0, p - q), normalised; p and q are the backbone's and the draft's distributions after temperature, top-k and top-p.

    Returns:
        the tokens of this cycle (accepted drafts and one more), and how many drafts were accepted.
    """
    sampling = sampler.sampling
    if sampling.temperature == 0:
        choices = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        return [*drafts[:accepted], choices[accepted]], accepted
    for i, draft in enumerate(drafts):
        p, q = probabilities(logits[i], sampling), probabilities(beliefs[i], sampling)
        if sampler.uniform() * float(q[draft]) < float(p[draft]):
            continue
        rest = (p - q).clamp_min(0)
        # Where p and q agree up to rounding nothing is left over; the refusal itself was rounding, and p is the answer.
        return [*drafts[:i], sampler.draw(rest if float(rest.sum()) > 0 else p)], i
    return [*drafts, sampler(logits[len(drafts)])], len(drafts)
