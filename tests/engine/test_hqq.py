"""The quantiser: never worse than rounding, exact where it can be, and clear about layouts that no kernel reads."""

import pytest
import torch

from river_core.hqq import quantise


def heavy_tailed(rows=96, columns=256):
    """Weights as language models have them: mostly small, with a few outliers."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(rows, columns, generator=generator) * 0.02
    return w + (torch.rand(w.shape, generator=generator) < 0.01) * torch.randn(w.shape, generator=generator) * 0.2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_no_group_is_worse_than_round_to_nearest_and_the_mean_is_better(bits, group_size):
    w = heavy_tailed()
    errors = {}
    for solver in (False, True):
        dequantised = quantise(w, bits, group_size, solver).dequantise()
        errors[solver] = (dequantised - w).abs().view(-1, group_size).mean(1)
    assert (errors[True] <= errors[False] * (1 + 1e-5) + 1e-9).all()
    if bits == 4:
        assert errors[True].mean() < 0.97 * errors[False].mean()


def test_dequantised_weights_stay_above_20_db_at_groups_of_64():
    w = torch.randn(128, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    error = quantise(w).dequantise() - w
    assert 10 * torch.log10(w.pow(2).mean() / error.pow(2).mean()) > 20


def test_codes_scales_and_zeros_have_the_documented_shapes_and_ranges():
    q = quantise(heavy_tailed(), 4, 64)
    assert q.codes.shape == (96, 256) and q.codes.dtype == torch.uint8 and q.codes.max() <= 15
    assert q.scales.shape == q.zeros.shape == (96, 4)


def test_a_grid_of_16_values_comes_back_exactly():
    scale = 2.0**-6
    codes = torch.arange(16).repeat(4, 4).float()
    w = (codes - 7) * scale
    torch.testing.assert_close(quantise(w, 4, 32).dequantise(), w, atol=1e-7, rtol=0)


@pytest.mark.parametrize("value", [0.0, 0.37, -12.5])
def test_constant_groups_come_back_exactly(value):
    w = torch.full((16, 64), value)
    torch.testing.assert_close(quantise(w, 4, 64).dequantise(), w, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arguments", [{"bits": 3}, {"group_size": 48}, {"group_size": 0}])
def test_layouts_that_no_kernel_reads_are_refused(arguments):
    with pytest.raises(ValueError, match="bits must be|does not divide"):
        quantise(torch.randn(16, 64), **arguments)
