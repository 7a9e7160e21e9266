"""When a token leaves the backbone. "Exit at e" = blocks 1..e ran in the backbone; depth L, the last, is never tested."""

import math

import torch
import torch.nn.functional as F

from river_core.errors import InputError


class ExitRule:
    """One lane's exit decision.

    A rule either knows the depth beforehand (`forced_depth` returns it) or is asked after every block (`should_exit`). Rules
    belong to a lane and may keep state.
    """

    name = ""
    logits: tuple[int, torch.Tensor] | None = None  # (layer, [V]) if the last answer took the LM head; a strategy may use them

    def forced_depth(self, index: int) -> int | None:
        """The depth of the step that produces generated token `index`, if it does not depend on hidden states; else None."""
        return None

    def next_test(self, layer: int) -> int:
        """The shallowest depth beyond `layer` at which the rule may say leave; until there it need not be asked."""
        return layer + 1

    def tau_beyond(self, layer: int) -> float | None:
        """tau, if every layer beyond `layer` is tested, and by its similarity alone: code that runs layers may then test by itself. Else None."""
        return None

    def should_exit(
        self, layer: int, h_in: torch.Tensor, h_out: torch.Tensor, similarity: torch.Tensor | None = None
    ) -> tuple[bool, float | None]:
        """Whether to leave after block `layer` (counted from 1), and the score behind it; None = not an allowed exit, nothing was tested.

        Args:
            layer: 1 .. L - 1.
            h_in, h_out: the block's input and output, [T, d] float32; with several rows (a prompt) all of them must agree.
            similarity: their cosine, where the code that ran the block has made it already (see `States`).
        """
        raise NotImplementedError

    def describe(self) -> dict:
        """The rule as a trace carries it."""
        return {"name": self.name}


class Never(ExitRule):
    """Every token runs the whole backbone of `num_hidden_layers` blocks."""

    name = "never"

    def __init__(self, num_hidden_layers: int):
        self.depth = num_hidden_layers

    def forced_depth(self, index):
        return self.depth


class Fixed(ExitRule):
    """Every token leaves at the same depth; 0 keeps it out of the backbone altogether."""

    name = "fixed"

    def __init__(self, depth: int):
        self.depth = depth

    def forced_depth(self, index):
        return self.depth

    def describe(self):
        return {"name": self.name, "depth": self.depth}


class Replay(ExitRule):
    """The depths of another run, token by token: what makes strategies comparable. Past the end of the list, the last depth holds."""

    name = "replay"

    def __init__(self, depths: list[int]):
        if not depths:
            raise InputError("A replay needs at least one exit depth.")
        self.depths = list(depths)

    def forced_depth(self, index):
        return self.depths[min(index, len(self.depths) - 1)]

    def describe(self):
        return {"name": self.name, "depths": self.depths}


class Similarity(ExitRule):
    """State-transition similarity: leave after a block when cos(input, output) > tau (River-LLM, section on the exit decision).

    Args:
        tau: threshold; 2 never exits, -2 always exits at the floor.
        floor: shallowest depth that may be an exit, from 1.
        layers: allowed exit depths; None = all.
    """

    name = "similarity"

    def __init__(self, tau: float, floor: int = 1, layers: list[int] | None = None):
        self.tau = check_tau(tau)
        self.floor = floor
        self.layers = None if layers is None else sorted(layers)

    def next_test(self, layer):
        return next_allowed(layer, self.layers, self.floor)

    def tau_beyond(self, layer):
        return self.tau if self.layers is None and layer + 1 >= self.floor else None

    def should_exit(self, layer, h_in, h_out, similarity=None):
        if layer < self.floor or (self.layers is not None and layer not in self.layers):
            return False, None
        score = cosine(h_in, h_out) if similarity is None else float(similarity)
        return score > self.tau, score

    def describe(self):
        return {"name": self.name, "tau": self.tau, "floor": self.floor, "layers": self.layers}


class HeadRule(ExitRule):
    """Confidence of the LM head on the block's output. A test costs a pass of the head, several layers' worth on a small model, so only a few
    depths are allowed.

    Args:
        decoder: for its head.
        threshold: the score must exceed it.
        layers: allowed exit depths.
        floor: shallowest of them that counts, from 1.
    """

    def __init__(self, decoder, threshold: float, layers: list[int], floor: int = 1):
        self.decoder = decoder
        self.threshold = check_tau(threshold)
        self.layers = sorted(layers)
        self.floor = floor
        self.allowed = {layer for layer in layers if layer >= floor}

    def next_test(self, layer):
        return next_allowed(layer, self.layers, self.floor)

    def should_exit(self, layer, h_in, h_out, similarity=None):
        if layer not in self.allowed:
            return False, None
        logits = self.decoder.head(h_out[-1:])[0]
        self.logits = (layer, logits)
        score = self.score(logits.softmax(-1))
        return score > self.threshold, score

    def score(self, p: torch.Tensor) -> float:
        """From probabilities [V] to a confidence."""
        raise NotImplementedError

    def describe(self):
        return {"name": self.name, "threshold": self.threshold, "floor": self.floor, "layers": self.layers}


class MaxProbability(HeadRule):
    """The probability of the best token (EE-LLM)."""

    name = "maxprob"

    def score(self, p):
        return float(p.max())


class Margin(HeadRule):
    """The best token's probability less the second's (CALM's softmax response, FREE)."""

    name = "margin"

    def score(self, p):
        first, second = p.topk(2).values.tolist()
        return first - second


class Entropy(HeadRule):
    """1 - H(p) / ln V: 1 = certain, 0 = uniform."""

    name = "entropy"

    def score(self, p):
        return 1.0 - float(torch.special.entr(p).sum()) / math.log(len(p))


def next_allowed(layer: int, layers: list[int] | None, floor: int) -> int:
    """The next of the allowed depths beyond `layer`, none of them shallower than `floor`; beyond the last one, a depth that no model has."""
    first = max(layer + 1, floor)
    if layers is None:
        return first
    return next((depth for depth in layers if depth >= first), 1 << 30)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The least cosine similarity over the rows of a and b, [T, d] float32."""
    if a.shape[0] == 1 and a.device.type == "cpu":
        x, y = a[0], b[0]
        # Three dot products take half the time of F.cosine_similarity for one row.
        return float(torch.dot(x, y)) / math.sqrt(max(float(torch.dot(x, x)) * float(torch.dot(y, y)), 1e-30))
    return float(F.cosine_similarity(a, b, dim=-1).min())


def check_tau(tau) -> float:
    """A threshold as a float.

    Raises:
        InputError: it is not a number, or none from -2 to 2: every score is a cosine, a probability or a share, and a value beyond those is a slip.
    """
    try:
        value = float(tau)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"The threshold tau must be a number such as 0.97, not {str(tau)[:40]!r}.")
    if not -2 <= value <= 2:
        raise InputError(
            f"The threshold tau must be a number from -2 (every token leaves) to 2 (none does), such as 0.97, not {str(tau)[:40]!r}."
        )
    return value
