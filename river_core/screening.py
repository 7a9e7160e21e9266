"""The greedy token without the whole LM head: 8-bit scores for every row, exact ones for the few rows that can still win.

A head of 49,152 rows costs a small model as much as several layers, and all but a handful of its rows are nowhere near the best. The bound behind the choice
is Cauchy-Schwarz on each row's own rounding error, and rows are multiplied in the full head's own way, so the token is the full head's; where the bound leaves too many rows, the full head runs.
"""

from dataclasses import dataclass

import torch

MOST = 512  # candidates beyond which the full head runs


class Screen:
    """8-bit copies of the LM head's rows and how far each of them is from the original.

    Args:
        weight: [V, d], the head's own weights, 16 or 32 bits; kept for the exact rows.
    """

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.codes = torch.empty(weight.shape, dtype=torch.int8)
        self.scales = torch.empty(len(weight))
        self.errors, self.norms, self.sums = (torch.empty(len(weight)) for _ in range(3))
        for rows in torch.arange(len(weight)).split(4096):  # in parts: a float32 copy of the whole head may not fit
            part = weight[rows].to(torch.float32)
            scales = (part.abs().amax(1) / 127).clamp_min(1e-12)
            codes = (part / scales[:, None]).round()
            self.codes[rows], self.scales[rows] = codes.to(torch.int8), scales
            self.errors[rows] = (part - codes * scales[:, None]).norm(dim=1)
            self.norms[rows] = part.norm(dim=1) + self.errors[rows]
            self.sums[rows] = codes.sum(1)
        self.finite = bool(self.norms.isfinite().all())  # else the bounds say nothing, and the full head must show what is wrong

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is held beside the head itself."""
        return self.codes, self.scales, self.errors, self.norms, self.sums

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __call__(self, hidden_state: torch.Tensor, norm: torch.Tensor, eps: float) -> "Largest | None":
        """The largest logit of one state, or None if too many rows may have it, or if the state or the head holds what is not finite.

        Args:
            hidden_state: [1, d] float32, the last block's output. norm, eps: the final norm's weights [d] float32 and its epsilon.
        """
        if not self.finite:
            return None
        token, rows, exact = torch.ops.river_native.screen.default(hidden_state, norm, eps, *self.tensors, self.weight, MOST)
        return None if token < 0 else Largest(token, rows, exact)


@dataclass(frozen=True)
class Largest:
    """What a greedy step needs of its logits.

    token: the row of the largest, the first of several. rows: ascending, those that might have been it, and `exact` their logits.
    """

    token: int
    rows: torch.Tensor
    exact: torch.Tensor

    def argmax(self) -> int:
        return self.token
