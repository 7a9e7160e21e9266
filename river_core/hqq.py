"""Half-quadratic quantisation: weights -> integer codes, scales and real-valued zeros, group by group.

Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023), the calibration-free quantiser that the
River paper uses for its exit layers. Written from the description; every group keeps the best zero it met, round-to-nearest
included, so that no group is worse than plain rounding.
"""

from dataclasses import dataclass

import torch

HQQ_VERSION = "1"  # of the solver below: codes that another version made are made again
P_NORM = 0.7  # |w - w'|^p is what the solver minimises; p < 1 forgives outliers
BETA = 10.0
KAPPA = 1.01
ITERATIONS = 20
# Groups are solved in chunks: the solver's temporaries stay small, and each chunk stops when its own error does.
CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Quantised:
    """One quantised weight matrix: `weight[n, k] ~ (codes[n, k] - zeros[n, k // g]) * scales[n, k // g]`.

    codes: uint8 [N, K]. scales, zeros: float32 [N, K / group_size]. bits: 4 or 8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group_size: int

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights that the codes stand for, [N, K] in `dtype`."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, -1, self.group_size).to(torch.float32)
        grouped = (grouped - self.zeros.unsqueeze(-1)) * self.scales.unsqueeze(-1)
        return grouped.view(rows, columns).to(dtype)

    def to(self, device) -> "Quantised":
        """The same codes on another device."""
        parts = (part.to(device) for part in (self.codes, self.scales, self.zeros))
        return Quantised(*parts, bits=self.bits, group_size=self.group_size)

    def pack(self) -> torch.Tensor:
        """The codes without waste: two 4-bit codes a byte, the even column in the high half; 8-bit codes as they are."""
        return (self.codes[:, 0::2] << 4) | self.codes[:, 1::2] if self.bits == 4 else self.codes

    @classmethod
    def unpack(cls, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> "Quantised":
        """Codes from what `pack` made."""
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1) if bits == 4 else packed
        return cls(codes, scales, zeros, bits, codes.shape[1] // scales.shape[1])


def quantise(weight: torch.Tensor, bits: int = 4, group_size: int = 64, solver: bool = True) -> Quantised:
    """Quantise a weight matrix along its input axis.

    Args:
        weight: [N, K], any floating dtype; solved in float32.
        bits: 4 (default) or 8.
        group_size: consecutive inputs of one output row that share a scale and a zero. Must divide K.
        solver: False stops at round-to-nearest, the baseline that the solver must not fall behind.

    Raises:
        ValueError: bits other than 4 or 8, or a group size that does not divide K (groups would cross rows, and no kernel reads such a layout).
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    rows, columns = weight.shape
    if group_size <= 0 or columns % group_size:
        raise ValueError(f"a group size of {group_size} does not divide the {columns} inputs of this layer")
    groups = weight.detach().to(torch.float32).reshape(-1, group_size)
    codes = torch.empty(groups.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(groups.shape[0], 1, device=weight.device)
    zeros = torch.empty_like(scales)
    step = max(1, CHUNK_ELEMENTS // group_size)
    for start in range(0, groups.shape[0], step):
        part = slice(start, start + step)
        codes[part], scales[part], zeros[part] = _solve(groups[part], 2**bits - 1, bits == 4, solver)
    return Quantised(codes.view(rows, columns), scales.view(rows, -1), zeros.view(rows, -1), bits=bits, group_size=group_size)


def _solve(w: torch.Tensor, top: int, round_start: bool, solver: bool):
    """Codes, scales and zeros of groups w [G, g]; `top` is the largest code."""
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    spread = high - low
    # A constant group has no range to divide: scale 1 and a zero that reproduces the constant exactly.
    scale = torch.where(spread > 1e-8, spread / top, torch.ones_like(spread))
    # The kernels hold scales in bfloat16; solving for the rounded scale lets the zero absorb what rounding moved.
    scale = scale.to(torch.bfloat16).to(torch.float32)
    zero = -low / scale
    if round_start:
        zero = zero.round()
    inverse = 1.0 / scale
    w_over_s = w * inverse
    codes, error = _round(w, w_over_s, scale, zero, top)
    if solver:
        zero = _best_zero(w, w_over_s, inverse, scale, zero, codes, error, top)
        codes, _ = _round(w, w_over_s, scale, zero, top)
    return codes.to(torch.uint8), scale, zero


def _best_zero(w, w_over_s, inverse, scale, zero, codes, error, top):
    """Half-quadratic splitting: the zero of least mean error per group met on the way, starting from `zero` itself."""
    magnitude = error.abs()
    best_zero, best_error = zero, magnitude.mean(1, keepdim=True)
    beta, previous = BETA, float(best_error.mean())
    for _ in range(ITERATIONS):
        shrink = magnitude.clamp_min_(1e-12).log2_().mul_(P_NORM - 1.0).exp2_().div_(beta)
        shrunk = error.abs().sub_(shrink).clamp_min_(0.0).copysign_(error)
        zero = codes.sub_(shrunk.neg_().add_(w).mul_(inverse)).mean(1, keepdim=True)
        beta *= KAPPA
        codes, error = _round(w, w_over_s, scale, zero, top)
        magnitude = error.abs()
        mean_error = magnitude.mean(1, keepdim=True)
        better = mean_error < best_error
        best_zero = torch.where(better, zero, best_zero)
        best_error = torch.where(better, mean_error, best_error)
        current = float(mean_error.mean())
        if current >= previous:
            break
        previous = current
    return best_zero


def _round(w, w_over_s, scale, zero, top):
    """Nearest codes for a given zero, and the error w - w' they leave."""
    codes = (w_over_s + zero).round_().clamp_(0, top)
    return codes, (codes - zero).mul_(scale).neg_().add_(w)
