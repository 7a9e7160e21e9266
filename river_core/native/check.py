"""Every operation of a library against the same in float64, before the library is used: a compiler or a processor that gets one of them wrong is found here, by the
name of the operation, whatever the layers around it make of the mistake."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.inference_mode()
def wrong_operation() -> str | None:
    """The name of the first operation of the loaded library that is off; None if all are right. Takes some milliseconds."""
    ops, generator = torch.ops.river_native, torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    return next((name for name, right in _checks(ops, noise, generator) if not right), None)


def _checks(ops, noise, generator):
    """(name, whether it is right), one after another."""
    x = torch.linspace(-87, 88, 701)
    yield "exponential", _near(ops.exponential(x), x.double().exp(), each=True)
    gate, up = torch.linspace(-80, 80, 333), noise(333)
    yield "SiLU", _near(ops.gated(gate, up), torch.nn.functional.silu(gate.double()) * up, each=True)
    row, weight = noise(1, 203), noise(203)
    normed = torch.nn.functional.rms_norm(row.double(), (203,), weight.double(), 1e-5)
    yield "norm", _near(ops.head_input(row, weight, 1e-5, torch.float32), normed)
    other = noise(203)
    cosine = torch.nn.functional.cosine_similarity(row[0].double(), other.double(), 0)
    yield "similarity", abs(ops.similarity(row[0], other) - float(cosine)) < 1e-6
    heads, angle = noise(3, 24), noise(3, 8)
    cos, sin, (first, second, rest) = angle.cos(), angle.sin(), heads.double().split([8, 8, 8], 1)  # the first 16 of 24 turn
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 1)
    yield "rotation", _near(ops.rotated(heads, cos, sin), turned)
    for dtype in DTYPES:
        yield f"rounding to {dtype}", torch.equal(ops.narrowed(1e3 * other, dtype), (1e3 * other).to(dtype))
        matrix = noise(19, 203).to(dtype)
        yield f"embedding in {dtype}", torch.equal(ops.embed(matrix, 7)[0], matrix[7].float())
        yield f"product with {dtype}", _near(ops.dense_rows(row, matrix), row.double() @ matrix.double().T)
        cache, query = noise(2, 2, 100, 40).to(dtype), 2 * noise(6, 40)
        yield f"attention over {dtype}", _near(ops.attend(query, cache), attention(query.double(), cache.double()))
    if ops.has_int4():
        codes = torch.randint(256, (2, 24, 64), dtype=torch.uint8, generator=generator)
        scales, inputs = (0.1 * noise(2, 3, 2, 16)).to(torch.bfloat16), noise(1, 192)
        exact = inputs.double() @ unpacked(codes, scales, 64).T
        yield "4-bit product", _near(ops.int4_rows(inputs, codes, scales, 64), exact, 1e-4)
    from river_core.screening import MOST, Screen

    head, ones = noise(300, 96).to(torch.float16), torch.ones(96)
    state = head[77:78].float() + 0.1 * noise(1, 96)
    screen = Screen(head)
    token, rows, exact = ops.screen(state, ones, 1e-5, *screen.tensors, head, MOST)
    logits = ops.head_input(state, ones, 1e-5, torch.float16).double() @ head.double().T
    yield "screened head", token == int(logits.argmax()) and _near(exact, logits[0, rows])


def _near(found, exact, bound: float = 1e-5, each: bool = False) -> bool:
    """Whether `found` is within `bound` of `exact`, relative to its length, or to each of its values. Sums in floats stay below 1e-6."""
    off = (found.double() - exact.double()).abs()
    return bool((off <= bound * exact.abs()).all()) if each else bool(off.norm() <= bound * exact.norm())


def attention(query, cache):
    """Attention of query [heads, head_dim] over cache [2, key/value heads, S, head_dim] -> [heads, head_dim], in the arguments' dtype."""
    grouped = query.view(len(cache[0]), -1, query.shape[1])  # the query heads of one key/value head are neighbours
    weights = torch.softmax(grouped @ cache[0].transpose(1, 2) / query.shape[1] ** 0.5, -1)
    return (weights @ cache[1]).view(query.shape)


def unpacked(codes, scales, group: int):
    """The weights [N, K], float64, that blocks of 4-bit codes stand for (see `products.h`)."""
    blocks, eights, _ = codes.shape
    halves = codes.view(blocks, eights, 16, 4)
    whole = torch.stack([halves & 15, halves >> 4], 2).permute(0, 3, 1, 2, 4).reshape(16 * blocks, -1, group).double()
    scale, shift = scales.double().permute(2, 0, 3, 1).reshape(2, 16 * blocks, -1, 1)
    return ((whole - 8) * scale + shift).flatten(1)
