"""The greedy token without the whole LM head: 8-bit scores for every row, exact ones for the few rows that can still win.

A head of 49,152 rows costs a small model as much as several layers, and all but a handful of its rows are nowhere near the best. The bound behind the choice
is Cauchy-Schwarz on each row's own rounding error, so the token is the full head's (up to rows that tie to the last bit, where a product of fewer rows sums in another order); where it leaves too many rows, the
full head runs.
"""

import torch

MOST = 512  # candidates beyond which the full head runs
SLACK = 2.0**-7  # share of a score that rounding inside the full product may move it by; twice bfloat16's


class Screen:
    """8-bit copies of the LM head's rows and how far each of them is from the original.

    Args:
        weight: [V, d], the head's own weights, 16 or 32 bits; kept for the exact rows.
    """

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.codes = torch.empty(weight.shape, dtype=torch.int8)
        self.scales = torch.empty(len(weight))
        self.errors = torch.empty(len(weight))
        for rows in torch.arange(len(weight)).split(4096):  # in parts: a float32 copy of the whole head may not fit
            part = weight[rows].to(torch.float32)
            scales = (part.abs().amax(1) / 127).clamp_min(1e-12)
            codes = (part / scales[:, None]).round()
            self.codes[rows], self.scales[rows] = codes.to(torch.int8), scales
            self.errors[rows] = (part - codes * scales[:, None]).norm(dim=1)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.errors.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """Logits [V] with the exact values of every row that may be the largest and minus infinity elsewhere; None if those are too many.

        Args:
            x: [1, d], the head's input after the final norm, in the head's dtype.
        """
        rows, exact = torch.ops.river_native.screen(x, self.codes, self.scales, self.errors, self.weight, SLACK, MOST)
        if not len(rows):
            return None
        return torch.full((len(self.weight),), -torch.inf).index_copy_(0, rows, exact)
