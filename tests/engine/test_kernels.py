"""Every kernel multiplies with the weights it says it holds; what it cannot take it refuses in a sentence."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from river_core.hqq import quantise
from river_core.kernels import Dense, Int4, Int8, choose_kernels, inner_k_tiles, int4_misfit


def signal_to_noise(got, expected):
    """Decibels."""
    noise = (got.double() - expected.double()).pow(2).mean()
    return float(10 * torch.log10(expected.double().pow(2).mean() / noise))


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 33])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_int4_equals_the_product_with_its_dequantised_weights(rows, group_size, bias):
    torch.manual_seed(0)
    w = torch.randn(96, 256) * 0.05
    b = torch.randn(96) if bias else None
    layer = Int4(quantise(w, 4, group_size), b)
    x = torch.randn(rows, 256).to(torch.bfloat16)
    expected = x.float() @ layer.dense_weight().t() + (b if bias else 0)
    assert signal_to_noise(layer(x), expected) > 40
    # The kernel holds scales and shifts in bfloat16; that must stay far below what four bits lose.
    assert signal_to_noise(layer.dense_weight(), quantise(w, 4, group_size).dequantise()) > 40


@pytest.mark.parametrize("rows", [1, 4, 33])
def test_int8_equals_the_product_with_its_dequantised_weights(rows):
    torch.manual_seed(0)
    w = torch.randn(96, 256) * 0.05 + 0.01
    codes = quantise(w, 8, 256)
    layer = Int8(codes, torch.randn(96))
    x = torch.randn(rows, 256).to(torch.bfloat16)
    assert signal_to_noise(layer(x), x.float() @ codes.dequantise().t() + layer.bias) > 40
    assert signal_to_noise(layer.dense_weight(), codes.dequantise()) > 50


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("many", [torch.float16, torch.bfloat16, torch.float32])
def test_dense_follows_the_dtype_for_few_and_many_rows(rows, many):
    torch.manual_seed(0)
    w, b = torch.randn(64, 128), torch.randn(64)
    layer = Dense(w, b, torch.float16, many)
    x = torch.randn(rows, 128)
    assert signal_to_noise(layer(x), x @ w.t() + b) > 40


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "group_size", "says"),
    [
        (97, 128, 4, 64, "multiple of 16 outputs"),
        (96, 100, 4, 64, "whole groups"),
        (96, 128, 8, 64, "4-bit codes"),
        (96, 128, 4, 16, "groups of 32"),
    ],
)
def test_shapes_that_the_int4_kernel_cannot_take_are_refused_in_a_sentence(rows, columns, bits, group_size, says):
    assert says in int4_misfit(rows, columns, bits, group_size, "cpu")
    if columns % group_size == 0:
        with pytest.raises(ValueError, match=says):
            Int4(quantise(torch.randn(rows, columns), bits, group_size))


def test_where_no_kernel_fits_a_plain_dequantised_product_is_used():
    plan = choose_kernels("cpu", 64, 100, torch.bfloat16, group_size=32)  # 100 outputs are no multiple of 16
    w = torch.randn(100, 64)
    layer = plan.river_layer(plan.quantise(w))
    assert isinstance(layer, Dense)
    torch.testing.assert_close(layer.dense_weight(), quantise(w, 4, 32).dequantise(torch.bfloat16).float())
    assert any("dequantised" in reason for reason in plan.reasons)


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def stopwatch(monkeypatch):
    """A function that says what the measurements of `choose_kernels` find: microseconds of one row and of 64 rows by dtype, of attention by dtype, of the packed
    kernel. None: it may not be asked."""

    def read(one=None, many=None, attention=None, packed=None):
        monkeypatch.setattr("river_core.kernels._time_dense", lambda shape, dtype, rows: (one if rows == 1 else many)[dtype])
        monkeypatch.setattr("river_core.kernels._time_attention", lambda dtype: attention[dtype])
        monkeypatch.setattr("river_core.kernels._time_packed", lambda shape, bits, group_size: 0 + packed)

    return read


@pytest.mark.parametrize(
    ("one", "many", "picked", "picked_many"),
    [
        ({HALF: 10, BRAIN: 20, FULL: 30}, {HALF: 9, BRAIN: 3, FULL: 4}, HALF, BRAIN),
        ({HALF: 30, BRAIN: 20, FULL: 25}, {HALF: 9, BRAIN: 3, FULL: 2}, BRAIN, FULL),
        ({HALF: 10, BRAIN: 20, FULL: 9}, {HALF: 1, BRAIN: 3, FULL: 2}, HALF, HALF),  # twice the memory has to be worth it
        ({HALF: 10, BRAIN: 20, FULL: 8}, {HALF: 9, BRAIN: 8, FULL: 7}, FULL, FULL),
    ],
)
def test_auto_picks_the_dtypes_that_it_measured_fastest(stopwatch, one, many, picked, picked_many):
    stopwatch(one, many, attention={HALF: 1, BRAIN: 2}, packed=1)
    plan = choose_kernels("cpu", 128, 256)
    assert (plan.dtype, plan.many_dtype) == (picked, picked_many) and plan.pinned == ()
    assert plan.reasons[0].startswith(f"decode in {dict(zip((HALF, BRAIN, FULL), ('fp16', 'bf16', 'fp32'), strict=True))[picked]}")


def test_auto_picks_the_cache_and_the_river_that_it_measured_fastest(stopwatch):
    one = many = {HALF: 10, BRAIN: 20, FULL: 30}
    for attention, picked in (({HALF: 5, BRAIN: 4}, BRAIN), ({HALF: 4, BRAIN: 5}, HALF), ({HALF: 4, BRAIN: 4}, HALF)):
        stopwatch(one, many, attention, packed=1)
        assert choose_kernels("cpu", 128, 256).kv_dtype == picked
    for packed, picked in ((9, "int4"), (11, "dequantised")):
        stopwatch(one, many, {HALF: 4, BRAIN: 5}, packed)
        plan = choose_kernels("cpu", 128, 256)
        assert plan.river == picked and f"{packed} us" in plan.reasons[-1] and "10 us" in plan.reasons[-1]


def test_what_is_asked_for_is_not_measured(stopwatch):
    stopwatch()  # a measurement would fail
    for dtype, kv in ((HALF, HALF), (HALF, BRAIN), (HALF, FULL), (BRAIN, HALF), (FULL, BRAIN)):
        plan = choose_kernels("cpu", 128, 256, dtype, river="int4", kv_dtype=kv)
        assert (plan.dtype, plan.many_dtype, plan.kv_dtype, plan.river) == (dtype, dtype, kv, "int4")
        assert plan.pinned == ("dtype", "kv_dtype", "river_kernel") and not plan.measured_us
        assert all(reason.endswith("asked for") for reason in plan.reasons)


def test_the_stopwatch_measures_something():
    plan = choose_kernels("cpu", 64, 128)
    rows = [f"{dtype} {count}" for dtype in ("fp16", "bf16", "fp32") for count in ("1 row", "64 rows")]
    assert all(0 < plan.measured_us[name] < 1e6 for name in rows) and len(plan.reasons) >= 3


def test_eight_bits_use_the_int8_kernel_with_one_group_a_row():
    plan = choose_kernels("cpu", 128, 256, torch.bfloat16, bits=8, river="int8")
    assert isinstance(plan.river_layer(plan.quantise(torch.randn(32, 128))), Int8)
    grouped = choose_kernels("cpu", 128, 256, torch.bfloat16, bits=8, river="dequantised")
    assert isinstance(grouped.river_layer(grouped.quantise(torch.randn(32, 128))), Dense)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_int4_on_cuda_equals_the_product_with_its_dequantised_weights(rows):
    torch.manual_seed(0)
    layer = Int4(quantise((torch.randn(96, 256) * 0.05).cuda(), 4, 64))
    x = torch.randn(rows, 256, device="cuda").to(torch.bfloat16)
    assert signal_to_noise(layer(x).cpu(), (x.float() @ layer.dense_weight().t()).cpu()) > 40


@pytest.mark.parametrize(("columns", "tiles"), [(64, 4), (96, 2), (576, 4), (1536, 8), (2048, 8)])
def test_the_gpu_s_int4_operators_take_the_layout_that_is_packed_for_them(columns, tiles):
    """Shapes and signatures only, on tensors without contents; the test below needs a GPU for the numbers."""
    assert inner_k_tiles(columns) == tiles
    codes = quantise(torch.randn(96, columns), 4, 32).pack().contiguous()
    with FakeTensorMode() as fake:
        packed = torch.ops.aten._convert_weight_to_int4pack(fake.from_tensor(codes), tiles)
        assert packed.shape == (96 // 8, columns // (16 * tiles), 32, tiles // 2) and packed.dtype == torch.int32
        x, scales = torch.empty(1, columns, dtype=torch.bfloat16), torch.empty(columns // 32, 96, 2, dtype=torch.bfloat16)
        assert torch.ops.aten._weight_int4pack_mm(x, packed, 32, scales).shape == (1, 96)


def test_packed_bytes_hold_the_even_column_in_their_high_half():
    codes = quantise(torch.randn(8, 64), 4, 32)
    packed = codes.pack()
    assert torch.equal(packed >> 4, codes.codes[:, 0::2]) and torch.equal(packed & 15, codes.codes[:, 1::2])


def test_biases_follow_the_weights_to_their_device():
    weight, bias = torch.empty(32, 64, device="meta"), torch.zeros(32)
    assert Dense(weight, bias).bias.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_of_a_cpu_checkpoint_are_added_on_cuda(dtype):
    torch.manual_seed(0)
    w, b = torch.randn(96, 256) * 0.05, torch.randn(96)
    plan = choose_kernels("cuda", 256, 96, dtype)
    x = torch.randn(1, 256)
    for layer in (plan.dense(w, b), plan.river_layer(plan.quantise(w), b)):
        expected = x @ layer.dense_weight().cpu().t() + b
        assert signal_to_noise(layer(x.cuda().to(layer.dtype)).cpu(), expected) > 40
