"""From logits to the next token: greedy, temperature, top-k, top-p, with a seed of the lane's own."""

from dataclasses import asdict, dataclass

import torch

from river_core.errors import InputError, NotFinite

GREEDY_BELOW = (
    1e-6  # temperatures that are greedy: the second token would have to lie within a hundred thousandth of the first to be drawn once
)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    temperature: 0 (default) = greedy, the most probable token, as is everything below a millionth. top_k: keep the k most probable; 0 = all. top_p: keep the most
    probable tokens that together reach this probability; 1 = all. seed: of the lane's generator.

    Raises:
        InputError: a value that is not a number or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name, kind, low, high, what in (
            ("temperature", float, 0.0, 100.0, "a number from 0 (greedy) to 100"),
            ("top_k", int, 0, 10_000_000, "a whole number, 0 for all tokens"),
            ("top_p", float, 0.0, 1.0, "a number above 0, up to 1"),
            ("seed", int, 0, 2**63 - 1, "a whole number from 0 on"),
        ):
            value = getattr(self, name)
            try:
                number = kind(value)
                valid = number == float(value) and low <= number <= high and not (name == "top_p" and number == 0)
            except (TypeError, ValueError, OverflowError):
                valid = False
            if not valid:
                raise InputError(f"{name.replace('_', '-')} must be {what}, not {str(value)[:40]!r}.")
            object.__setattr__(self, name, number)
        if self.temperature < GREEDY_BELOW:  # logits divided by less than float32 holds would be no numbers
            object.__setattr__(self, "temperature", 0.0)

    def describe(self) -> dict:
        """As a trace carries it."""
        return asdict(self)


class Sampler:
    """One lane's sampler; lanes with the same seed draw from the same stream of random numbers."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """Draw a token id from logits [V].

        Raises:
            NotFinite: there is nothing to draw from.
        """
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        return self.draw(probabilities(logits, self.sampling))

    def draw(self, weights: torch.Tensor) -> int:
        """Draw an index from weights [V] that need not add up to 1. On the CPU, so that a seed means the same on every device.

        Raises:
            NotFinite: a weight is not a number.
        """
        if not bool(torch.isfinite(weights).all()):
            raise NotFinite
        return int(torch.multinomial(weights.cpu(), 1, generator=self.generator))

    def uniform(self) -> float:
        """A number from [0, 1)."""
        return float(torch.rand((), generator=self.generator))


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution [V] (float32) that sampling draws from; one-hot when greedy."""
    logits = logits.to(torch.float32)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    logits = (logits - logits.max()) / sampling.temperature  # their differences alone matter, and cannot overflow upwards
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        p = ordered.softmax(-1)
        # A token is dropped when those above it reach top_p already; the first always stays.
        dropped = p.cumsum(-1) - p >= sampling.top_p
        dropped[0] = False
        logits = logits.masked_fill(dropped.scatter(0, order, dropped), float("-inf"))
    return logits.softmax(-1)
