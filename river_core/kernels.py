"""Linear layers, one class a storage format, and the short measurement that picks among them.

Every class takes `x` [M, K] in any floating dtype and returns [M, N]; the dtype of the result is the kernel's own, because
the residual stream is float32 and adds whatever comes. Few rows (decoding) go to the matrix-vector kernel, many rows
(prefill) to a dense product in the dtype that is fast for many rows.
"""

import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from river_core.hqq import Quantised, quantise

# Beyond this many rows the packed kernels unpack the weights again and again; one dequantised product is cheaper.
FEW_ROWS_CPU = 4
FEW_ROWS_CUDA = 64
# Half-precision products grow with every row, those of the many-rows dtype hardly at all; they cross between two and three rows.
FEW_ROWS_DENSE = 2


class Dense:
    """A product with 16- or 32-bit weights.

    Args:
        weight: [N, K]; stored in `dtype`.
        bias: [N] or None; kept in float32 and added in float32.
        dtype: dtype of the one-row product.
        many_dtype: dtype of products of more than `FEW_ROWS_DENSE` rows; weights are cast for the call,
        keep_many: or once, and kept beside the others.
    """

    def __init__(self, weight, bias=None, dtype=torch.float32, many_dtype=None, keep_many=False):
        self.weight = weight.to(dtype).contiguous()
        self.bias = None if bias is None else bias.to(self.weight.device, torch.float32)
        self.dtype = dtype
        self.many_dtype = many_dtype or dtype
        self.keep_many = keep_many
        self.ours = False  # one row is multiplied by compiled code of this project
        self._many: torch.Tensor | None = None
        self._tails: dict[int, Dense] = {}

    @property
    def shape(self):
        return tuple(self.weight.shape)

    @property
    def nbytes(self):
        held = (self.weight, self.bias, self._many)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def dense_weight(self, dtype=torch.float32):
        """The weights as a plain matrix [N, K] in `dtype`."""
        return self.weight.to(dtype)

    def tail(self, first: int) -> "Dense":
        """The same layer without its first `first` outputs; shares the weights."""
        if first not in self._tails:
            bias = None if self.bias is None else self.bias[first:]
            self._tails[first] = Dense(self.weight[first:], bias, self.dtype, self.many_dtype)
        return self._tails[first]

    def __call__(self, x):
        if x.shape[0] == 1 and self.ours:
            y = torch.ops.river_native.dense_rows(x, self.weight)
        elif x.shape[0] <= FEW_ROWS_DENSE or self.many_dtype == self.dtype:
            y = F.linear(x.to(self.dtype), self.weight)
        else:
            many = self._many if self._many is not None else self.weight.to(self.many_dtype)
            if self.keep_many:
                self._many = many
            y = F.linear(x.to(self.many_dtype), many)
        return y if self.bias is None else y.to(torch.float32) + self.bias


class Int4:
    """A product with 4-bit weights through ATen's packed kernels, activations in bfloat16; or, after `adopt`, through compiled code of this project.

    The packed layout depends on the processor, so it is made here at load and never stored.

    Args:
        quantised: 4-bit codes [N, K], scales and zeros [N, K / g].
        bias: [N] or None.

    Raises:
        ValueError: a shape that the kernel does not take (see `int4_fits`).
    """

    dtype = torch.bfloat16

    def __init__(self, quantised: Quantised, bias=None):
        rows, columns = quantised.codes.shape
        device = quantised.codes.device
        reason = int4_misfit(rows, columns, quantised.bits, quantised.group_size, device)
        if reason:
            raise ValueError(reason)
        self.shape = (rows, columns)
        self.group_size = quantised.group_size
        self.bias = None if bias is None else bias.to(device, torch.float32)
        # The kernels compute w = (code - 8) * s + zt, hence zt = (8 - z) * s: formed in float32, then rounded once.
        scales = quantised.scales
        shifts = (8.0 - quantised.zeros) * scales
        self.scales_and_zeros = torch.stack([scales.t(), shifts.t()], dim=-1).to(torch.bfloat16).contiguous()  # [K/g, N, 2]
        self.on_cuda = device.type == "cuda"
        if self.on_cuda:
            # Bytes [N, K / 2] with the even column in the high half, as `pack` makes them; since torch 2.5.
            self.packed = torch.ops.aten._convert_weight_to_int4pack(quantised.pack().contiguous(), inner_k_tiles(columns))
        else:
            self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantised.codes.to(torch.int32), 1)
        self.few_rows = FEW_ROWS_CUDA if self.on_cuda else FEW_ROWS_CPU
        # Prefill through the river needs the weights again; half a byte each, against two for a dense copy.
        self.codes = quantised.pack()
        self.blocks: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Codes and scales, as often as they are held."""
        return self.blocks or (self.packed, self.codes, self.scales_and_zeros)

    @property
    def nbytes(self):
        return sum(tensor.nbytes for tensor in self.tensors)

    def in_blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales as compiled code reads them (native/products.h): uint8 [N / 16, K / 8, 64], bfloat16 [N / 16, K / g, 2, 16]."""
        if self.blocks is not None:
            return self.blocks
        rows, columns = self.shape
        codes = self._codes().view(rows // 16, 16, columns // 8, 2, 4).permute(0, 2, 3, 1, 4)
        scales = self.scales_and_zeros.view(-1, rows // 16, 16, 2).permute(1, 0, 3, 2)
        return (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(rows // 16, columns // 8, 64), scales.contiguous()

    def adopt(self) -> None:
        """Multiply in compiled code from now on, and hold the codes in its layout only: half the memory."""
        self.blocks = self.in_blocks()
        self.packed = self.codes = self.scales_and_zeros = None
        self.dtype = torch.float32

    def _codes(self):
        """[N, K] uint8."""
        rows, columns = self.shape
        if self.blocks is None:
            return torch.stack([self.codes >> 4, self.codes & 15], dim=-1).view(rows, columns)
        codes = self.blocks[0].view(rows // 16, columns // 8, 16, 4)
        return torch.stack([codes & 15, codes >> 4], dim=2).permute(0, 3, 1, 2, 4).reshape(rows, columns)

    def dense_weight(self, dtype=torch.float32):
        """The weights that the kernel multiplies with, [N, K] in `dtype`: codes with the scales and shifts as it holds them."""
        rows, columns = self.shape
        codes = self._codes().view(rows, -1, self.group_size)
        if self.blocks is None:
            scales, shifts = self.scales_and_zeros.permute(2, 1, 0).to(torch.float32).unsqueeze(-1)
        else:
            scales, shifts = self.blocks[1].permute(2, 0, 3, 1).reshape(2, rows, -1, 1).to(torch.float32)
        return ((codes.to(torch.float32) - 8.0) * scales + shifts).view(rows, columns).to(dtype)

    def __call__(self, x):
        if x.shape[0] > self.few_rows:
            y = F.linear(x.to(torch.bfloat16), self.dense_weight(torch.bfloat16))
        elif self.blocks is not None:
            y = torch.ops.river_native.int4_rows(x, *self.blocks, self.group_size)
        elif self.on_cuda:
            y = torch.ops.aten._weight_int4pack_mm(x.to(torch.bfloat16), self.packed, self.group_size, self.scales_and_zeros)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.packed, self.group_size, self.scales_and_zeros)
        return y if self.bias is None else y.to(torch.float32) + self.bias


class Int8:
    """A product with 8-bit weights, one scale and zero a row, through ATen's int8 kernel (CPU); activations in bfloat16.

    The kernel knows scales only. With w = (code - z) s = (code - 128) s + (128 - z) s, the second term is a constant of the
    row times sum(x), so the zero costs one extra addition and stays exact.

    Args:
        quantised: 8-bit codes [N, K] with group_size == K.
        bias: [N] or None.
    """

    dtype = torch.bfloat16

    def __init__(self, quantised: Quantised, bias=None):
        rows, columns = quantised.codes.shape
        if quantised.bits != 8 or quantised.group_size != columns:
            raise ValueError("the int8 kernel takes 8-bit codes with one scale a row")
        self.shape = (rows, columns)
        self.bias = None if bias is None else bias.to(torch.float32)
        self.weight = (quantised.codes.to(torch.int16) - 128).to(torch.int8).contiguous()
        self.scales = quantised.scales.view(-1).to(torch.bfloat16)
        self.shifts = ((128.0 - quantised.zeros) * quantised.scales).view(-1)  # [N] float32

    @property
    def nbytes(self):
        return self.weight.nbytes + self.scales.nbytes + self.shifts.nbytes

    def dense_weight(self, dtype=torch.float32):
        """The weights that the kernel multiplies with, [N, K] in `dtype`."""
        dense = self.weight.to(torch.float32) * self.scales.to(torch.float32).unsqueeze(1) + self.shifts.unsqueeze(1)
        return dense.to(dtype)

    def __call__(self, x):
        x = x.to(torch.bfloat16)
        if x.shape[0] > FEW_ROWS_CPU:
            y = F.linear(x, self.dense_weight(torch.bfloat16)).to(torch.float32)
        else:
            y = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scales).to(torch.float32)
            y = torch.addcmul(y, x.to(torch.float32).sum(1, keepdim=True), self.shifts)
        return y if self.bias is None else y + self.bias


def inner_k_tiles(columns: int) -> int:
    """How many 16-wide tiles the GPU's int4 layout packs side by side: the most, 8, 4 or 2, that divide a layer's inputs."""
    return next(tiles for tiles in (8, 4, 2) if columns % (16 * tiles) == 0)


def int4_misfit(rows, columns, bits, group_size, device) -> str | None:
    """Why ATen's int4 kernel cannot take a layer, in one sentence; None if it can."""
    if bits != 4:
        return f"the int4 kernel takes 4-bit codes, not {bits}"
    if group_size not in (32, 64, 128, 256):
        return f"the int4 kernel takes groups of 32, 64, 128 or 256, not {group_size}"
    if columns % group_size:
        return f"the int4 kernel needs whole groups: {columns} inputs are not a multiple of {group_size}"
    if torch.device(device).type == "cuda":
        if torch.cuda.get_device_capability(device)[0] < 8:
            return "the int4 kernel needs a GPU of compute capability 8.0 or newer"
        if rows % 8 or columns % 32:
            return f"the int4 kernel needs outputs in eights and inputs in thirty-twos, not {rows} x {columns}"
        return None
    if torch.device(device).type != "cpu":
        return f"there is no int4 kernel for device {device}"
    if rows % 16:
        return f"the int4 kernel needs a multiple of 16 outputs, not {rows}"
    return None


@dataclass(frozen=True)
class KernelPlan:
    """What `choose_kernels` decided.

    dtype: of the backbone's one-row products. many_dtype: of products of many rows (prefill). kv_dtype: of the KV cache.
    river: "int4", "int8" or "dequantised". bits, group_size: of the quantiser; group_size None = one group a row.
    reasons: one sentence a decision, for `doctor` and the page. measured_us: microseconds of one product, by candidate.
    keep_many: the backbone's weights are kept in `many_dtype` too, once a product of many rows has needed them.
    pinned: which of "dtype", "kv_dtype" and "river_kernel" were asked for.
    """

    device: torch.device
    dtype: torch.dtype
    many_dtype: torch.dtype
    kv_dtype: torch.dtype
    river: str
    bits: int
    group_size: int | None
    reasons: tuple[str, ...] = ()
    measured_us: dict[str, float] = field(default_factory=dict)
    keep_many: bool = False
    pinned: tuple[str, ...] = ()

    def dense(self, weight, bias=None) -> Dense:
        """A backbone layer."""
        return Dense(weight.to(self.device), bias, self.dtype, self.many_dtype, self.keep_many)

    def quantise(self, weight) -> Quantised:
        """The codes of a river layer, from its weights [N, K]."""
        return quantise(weight.to(self.device), self.bits, self.group_size or weight.shape[1])

    def river_layer(self, codes: Quantised, bias=None):
        """A river layer laid out for the chosen kernel, or dequantised where it does not fit."""
        rows, columns = codes.codes.shape
        if self.river == "int4" and int4_misfit(rows, columns, self.bits, codes.group_size, self.device) is None:
            return Int4(codes, bias)
        if self.river == "int8" and codes.group_size == columns:
            return Int8(codes, bias)
        return Dense(codes.dequantise(self.dtype), bias, self.dtype, self.many_dtype)


def choose_kernels(device, hidden_size, intermediate_size, dtype="auto", bits=4, group_size=64, river="auto", kv_dtype="auto"):
    """Pick dtypes and kernels by measuring products of the model's own shape on this machine (under a second).

    Args:
        device: torch device.
        hidden_size, intermediate_size: the model's; the product measured is [intermediate_size, hidden_size].
        dtype: "auto", or a torch dtype that is taken as given. float32 selects the exact mode, where the river multiplies
            dequantised float32 weights.
        bits, group_size: of the river's quantiser. 8 bits take one group a row, whatever the group size, where the int8 kernel runs.
        river: "auto", "int4", "int8" or "dequantised".
        kv_dtype: "auto", or a torch dtype that is taken as given.

    Returns:
        KernelPlan
    """
    device = torch.device(device)
    asked = {"dtype": dtype, "kv_dtype": kv_dtype, "river_kernel": river}
    pinned = tuple(name for name, value in asked.items() if value != "auto")
    reasons, measured = [], {}
    if dtype == "auto" and device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        many = dtype
        reasons.append(f"{_short(dtype)} on the GPU: the int4 kernel and most checkpoints use it")
    elif dtype == "auto" and device.type == "mps":
        dtype = many = torch.float16
        reasons.append("fp16 on mps")
    elif dtype == "auto":
        shape = (intermediate_size, hidden_size)
        for rows in (1, 64):
            for _ in range(3):  # in turn, so that a moment of load does not fall on one candidate
                for candidate in (torch.float16, torch.bfloat16, torch.float32):
                    name = f"{_short(candidate)} {rows} row{'s' * (rows > 1)}"
                    measured[name] = min(measured.get(name, math.inf), _time_dense(shape, candidate, rows))
        by_name = {_short(d): d for d in (torch.float16, torch.bfloat16, torch.float32)}
        # fp32 doubles the memory, so it has to be clearly faster, as it is where a processor has no 16-bit instructions.
        cost = {name: measured[f"{name} 1 row"] * (1.2 if name == "fp32" else 1.0) for name in by_name}
        best = min(by_name, key=cost.get)
        best_many = min(by_name, key=lambda name: measured[f"{name} 64 rows"])
        dtype, many = by_name[best], by_name[best_many]
        reasons.append(f"decode in {best}: fastest one-row product here (on one core: {_table(measured, by_name, '1 row')})")
        reasons.append(f"prefill in {best_many}: fastest product of 64 rows (on one core: {_table(measured, by_name, '64 rows')})")
    else:
        many = dtype
        reasons.append(f"{_short(dtype)}: asked for")
    if kv_dtype != "auto":
        reasons.append(f"KV cache in {_short(kv_dtype)}: asked for")
    elif device.type != "cpu" or dtype != torch.float16:
        kv_dtype = dtype
    else:
        for candidate in (torch.float16, torch.bfloat16):
            measured[f"attention {_short(candidate)}"] = _time_attention(candidate)
        half, brain = measured["attention fp16"], measured["attention bf16"]
        kv_dtype = torch.bfloat16 if brain < half else torch.float16
        reasons.append(
            f"KV cache in {_short(kv_dtype)}: attention over 256 keys takes {half:.0f} us in fp16, {brain:.0f} us in bf16, on one core"
        )
    exact = dtype == torch.float32
    if river == "auto":
        river, why = _choose_river(device, (intermediate_size, hidden_size), dtype, bits, group_size, exact, measured)
        reasons.append(why)
    else:
        reasons.append(f"river {river}: asked for")
    if bits == 8 and river == "int8":
        group_size = None
    return KernelPlan(device, dtype, many, kv_dtype, river, bits, group_size, tuple(reasons), measured, pinned=pinned)


def _choose_river(device, shape, dtype, bits, group_size, exact, measured):
    if exact and "fp32 1 row" not in measured:
        return "dequantised", "river dequantised: float32 was asked for, and the packed kernels compute in bfloat16"
    if bits == 8:
        if device.type != "cpu":
            return "dequantised", "river dequantised: the int8 kernel runs on the CPU only"
        kernel = "int8"
    else:
        misfit = int4_misfit(*shape, bits, group_size, device)
        if misfit:
            return "dequantised", f"river dequantised: {misfit}"
        kernel = "int4"
    if device.type != "cpu":
        return kernel, f"river {kernel}: the GPU kernel fits"
    dense_us = measured.get(f"{_short(dtype)} 1 row") or _time_dense(shape, dtype, rows=1)
    packed_us = measured[f"{kernel} 1 row"] = _time_packed(shape, bits, group_size)
    if packed_us < dense_us:
        return kernel, f"river {kernel}: {packed_us:.0f} us against {dense_us:.0f} us dense, one row of {shape[0]} x {shape[1]} on one core"
    return "dequantised", (f"river dequantised: the {kernel} kernel takes {packed_us:.0f} us here, the dense product {dense_us:.0f} us")


def _time_dense(shape, dtype, rows):
    copies = 2 if rows > 1 else _copies(shape, dtype.itemsize)
    layers = [Dense(torch.full(shape, 0.01, dtype=dtype), dtype=dtype) for _ in range(copies)]
    return time_on_one_core(layers, torch.ones(rows, shape[1], dtype=dtype))


def _time_packed(shape, bits, group_size):
    quantised = quantise(torch.randn(shape), bits, group_size if bits == 4 else shape[1], solver=False)
    layers = [Int4(quantised) if bits == 4 else Int8(quantised) for _ in range(_copies(shape, bits / 8))]
    return time_on_one_core(layers, torch.ones(1, shape[1], dtype=torch.bfloat16))


def _time_attention(dtype):
    keys = [torch.ones(1, 3, 256, 64, dtype=dtype) for _ in range(24)]
    return time_on_one_core([lambda q, k=k: F.scaled_dot_product_attention(q, k, k) for k in keys], torch.ones(1, 3, 3, 64, dtype=dtype))


def _copies(shape, bytes_per_weight):
    # Enough copies that weights come from memory and not from a cache, as they do in a model; bounded for large layers.
    return int(max(2, min(96, 96e6 // (shape[0] * shape[1] * bytes_per_weight) + 1)))


def time_on_one_core(layers, x):
    """Microseconds of one call on one core: the least of many, each timed by itself.

    One core, because the ranking is what counts, and a product split over cores waits a whole time slice, a hundred times its work, whenever something else
    wants one of them: a measurement at a busy moment would then pick a kernel by chance.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = float("inf")
        with torch.inference_mode():
            layers[0](x)
            for layer in layers:
                start = time.perf_counter()
                layer(x)
                best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return best * 1e6


def _short(dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _table(measured, names, suffix):
    return ", ".join(f"{name} {measured[f'{name} {suffix}']:.0f} us" for name in names)
