"""Compiled layers agree with the plain ones, are swapped in only when they do, and compute the same for whatever instructions they are compiled."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from river_core import Trace, compare
from river_core.hqq import quantise
from river_core.kernels import Dense, Int4, Int8
from river_core.kv_cache import BACKBONE, RIVER
from river_core.loading import cache_dir
from river_core.native import NATIVE, find_compiler
from river_core.native.check import attention, unpacked, wrong_operation
from river_core.native.isa import available, wanted_isa
from river_core.screening import Screen
from tests.tiny import SIZE, configs, tiny_model

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def library():
    NATIVE.start(cache_dir() / "native")
    assert NATIVE.wait(), NATIVE.reason


@pytest.fixture(scope="module")
def ops():
    return torch.ops.river_native


def river_stack(model, ours=True):
    """The compiled river; skips where the library has no 4-bit products for what the river holds."""
    stack = NATIVE.stack(model.decoder, model.river.blocks, ours)
    if stack is None:
        assert ours and not torch.ops.river_native.has_int4() and isinstance(model.river.blocks[0].qkv, Int4)
        pytest.skip("4-bit products are not written for these instructions")
    return stack


def test_the_library_is_compiled_for_the_instructions_that_were_asked_for(ops):
    wanted = wanted_isa()
    assert NATIVE.isa == ops.isa() == (available()[0] if wanted == "auto" else wanted)
    assert ops.has_int4() == (NATIVE.isa != "generic")
    model = tiny_model()
    model.compiled = None
    assert model.compile(), model.notes
    facts = model.describe()
    assert facts["native"]["isa"] == NATIVE.isa and f"({NATIVE.isa})" in " ".join(facts["reasons"])
    assert ("isa" in facts["pinned"]) == (wanted != "auto")


@pytest.mark.skipif(wanted_isa() != "auto", reason="RIVER_ISA asks for one kind of instructions")
@pytest.mark.parametrize("isa", available()[1:])
def test_all_of_this_file_for_other_instructions(isa):
    """In a process of its own, since PyTorch takes one library a process."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "RIVER_ISA": isa}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 80, done.stdout[-500:]


# -- single operations against float64 -------------------------------------------------------------------------------


def near(found, exact, bound=2e-6):
    """Within `bound` of the length of the right answer."""
    off = float((found.double() - exact.double()).norm() / exact.double().norm())
    assert off < bound, off


@torch.inference_mode()
def test_the_exponential_over_all_that_a_float_can_hold(ops):
    x = torch.cat([torch.linspace(-87, 88, 20001), torch.linspace(-1e-3, 1e-3, 999), torch.tensor([0.0, -0.0, 1e-38, -1e-38])])
    assert float((ops.exponential(x).double() / x.double().exp() - 1).abs().max()) < 3e-7
    below = ops.exponential(torch.tensor([-87.5, -104, -1e3, -3e38, -torch.inf]))
    assert bool((below >= 0).all()) and float(below.max()) < 2e-38
    assert bool((ops.exponential(torch.tensor([88.5, 1e3, torch.inf])) > 1e38).all())
    assert ops.exponential(torch.zeros(5)).tolist() == [1.0] * 5


@torch.inference_mode()
def test_silu_times_up_for_any_length_and_size(ops):
    for n in (1, 3, 4, 7, 8, 15, 16, 17, 1536):
        gate, up = torch.linspace(-30, 30, n) + 0.1, torch.randn(n)
        exact = F.silu(gate.double()) * up.double()
        assert bool(((ops.gated(gate, up).double() - exact).abs() <= 1e-6 * exact.abs()).all())
    far = ops.gated(torch.tensor([-1e4, 1e4, -1e20, -90.0] * 8), torch.tensor([1.0, 1.0, 1e5, 1.0] * 8))
    assert bool((far.view(8, 4)[:, [0, 2, 3]].abs() < 1e-3).all()) and bool((far.view(8, 4)[:, 1] == 1e4).all())


@torch.inference_mode()
def test_norms_and_similarities_for_any_length_and_size(ops):
    for n in (1, 3, 5, 8, 17, 31, 32, 33, 576, 2048):
        for size in (1e-3, 1.0, 1e4):
            x, weight, other = size * torch.randn(n), torch.randn(n), torch.randn(n)
            near(ops.head_input(x[None], weight, 1e-5, torch.float32)[0], F.rms_norm(x.double(), (n,), weight.double(), 1e-5))
            assert ops.similarity(x, other) == pytest.approx(float(F.cosine_similarity(x.double(), other.double(), 0)), abs=1e-6)
        assert ops.similarity(x, x) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 16), (64, 64), (80, 32), (10, 6)])
@torch.inference_mode()
def test_rotation_turns_pairs_and_leaves_the_rest(ops, head_dim, rotary_dim):
    heads, angle = torch.randn(5, head_dim), torch.randn(5, rotary_dim // 2)
    turned = torch.view_as_complex(torch.stack(heads[:, :rotary_dim].double().view(5, 2, -1).unbind(1), -1).contiguous())
    turned = torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle).to(torch.complex128))
    exact = torch.cat([turned[..., 0], turned[..., 1], heads[:, rotary_dim:].double()], 1)
    near(ops.rotated(heads, angle.cos(), angle.sin()), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_rounding_and_widening_are_pytorchs_own(ops, dtype):
    x = torch.cat([torch.randn(1000) * 10.0 ** torch.randint(-9, 5, (1000,)), torch.tensor([0.0, 65504, 65520, 1e30, -1e30, torch.inf])])
    ties = [(x[:-6].view(torch.int32) & ~(2 * half - 1) | half).view(torch.float32) for half in (0x1000, 0x8000)]
    x = torch.cat([x, x.to(dtype).float(), *ties])
    assert torch.equal(ops.narrowed(x, dtype), x.to(dtype))
    rows = torch.randn(9, 83).to(dtype)
    assert torch.equal(ops.embed(rows, 5), rows[5:6].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 20), (8, 1, 40), (6, 2, 7), (5, 1, 16)])
@torch.inference_mode()
def test_attention_for_any_heads_and_contexts(ops, dtype, heads, kv_heads, head_dim):
    for context in (1, 3, 31, 32, 33, 100, 513):
        for size in (0.1, 1, 12):  # nearly even weights, and all on one key
            query, cache = size * torch.randn(heads, head_dim), torch.randn(2, kv_heads, context, head_dim).to(dtype)
            near(ops.attend(query, cache), attention(query.double(), cache.double()), 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_the_screened_head_finds_the_exact_token_and_logits(ops, dtype):
    torch.manual_seed(0)
    for rows, columns in ((50, 33), (3000, 96), (1025, 200)):
        weight, norm = (0.3 * torch.randn(rows, columns)).to(dtype), torch.rand(columns) + 0.5
        screen = Screen(weight)
        for i in range(20):
            state = 4 * weight[i : i + 1].float() + torch.randn(1, columns)
            read = ops.head_input(state, norm, 1e-5, dtype)
            near(read, F.rms_norm(state.double(), (columns,), norm.double(), 1e-5), 2 * torch.finfo(dtype).eps)
            exact, found = read.double() @ weight.double().T, screen(state, norm, 1e-5)
            assert found is None or float(exact.max() - exact[0, found.token]) < 1e-5
            if found is not None:
                near(found.exact, exact[0, found.rows], 1e-5)


# -- what is no finite number stays none -----------------------------------------------------------------------------


ODD = [torch.nan, -torch.nan, torch.inf, -torch.inf]


def odd_nans():
    """NaNs of every bit pattern that rounding or shifting could turn into a number."""
    bits = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FC00001, 0x7FBFFFFF]
    return torch.tensor(bits + [b - (1 << 31) for b in bits], dtype=torch.int32).view(torch.float32)


@torch.inference_mode()
def test_no_operation_makes_a_number_of_what_is_none(ops):
    for odd in odd_nans():
        assert bool(ops.exponential(odd.expand(17).contiguous()).isnan().all())
        assert bool(ops.gated(odd.expand(17).contiguous(), torch.ones(17)).isnan().all())
        assert bool(ops.gated(torch.ones(17), odd.expand(17).contiguous()).isnan().all())
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert bool(ops.narrowed(odd.expand(17).contiguous(), dtype).isnan().all())
    weight = torch.randn(48, 192)
    codes = Int4(quantise(weight, 4, 64)).in_blocks()
    for odd, where in itertools.product(ODD, (0, 3, 63, 64, 191)):
        x = torch.randn(1, 192)
        x[0, where] = odd
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert not bool(ops.dense_rows(x, weight.to(dtype)).isfinite().any())
            assert bool(ops.head_input(x, torch.ones(192), 1e-5, dtype).isnan().all())
        if ops.has_int4():
            assert bool(ops.int4_rows(x, *codes, 64).isnan().all())
        assert ops.similarity(x[0], torch.ones(192)) != ops.similarity(x[0], torch.ones(192))
        for dtype in (torch.float16, torch.bfloat16):
            assert Screen(weight.to(dtype))(x, torch.ones(192), 1e-5) is None
    # The square of a number may be none though the number is one.
    assert bool(ops.head_input(torch.full((1, 64), 1e30), torch.ones(64), 1e-5, torch.float32).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_attention_passes_on_what_is_no_number(ops, dtype):
    for odd, key, place in itertools.product(ODD, (0, 40, 99), (0, 1)):
        query, cache = torch.randn(6, 20), torch.randn(2, 2, 100, 20).to(dtype)
        cache[place, 1, key, 19] = odd
        found = ops.attend(query, cache)
        assert bool(found[:3].isfinite().all())
        # A key spoils every value of the heads that read it, a value its own place.
        assert not bool((found[3:] if place == 0 else found[3:, 19]).isfinite().any())
        query[0, 5] = odd
        assert bool(ops.attend(query, cache)[0].isnan().all())


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@torch.inference_mode()
def test_a_layer_that_reads_an_overflow_ends_in_the_alarm(odd):
    """One entry of the cache inside a river layer is enough: the lane says so instead of going on with other numbers."""
    model = tiny_model(dtype=torch.bfloat16)
    decoder = model.decoder
    for blocks, owner, stack in (
        (decoder.blocks, BACKBONE, NATIVE.stack(decoder, decoder.blocks, True)),
        (model.river.blocks, RIVER, NATIVE.stack(decoder, model.river.blocks, torch.ops.river_native.has_int4())),
    ):
        blocks.stack = stack
        cache = decoder.new_cache(9)
        for position in range(8):
            rows = decoder.rows(position, 1, cache)
            state = decoder.run_blocks(blocks, 0, len(blocks), decoder.embed([7]), rows, cache, owner)[-1]
        assert bool(decoder.head(state).isfinite().all())
        cache.keys_values[2, 0, 1, 4, 3] = odd
        state = decoder.run_blocks(blocks, 0, len(blocks), decoder.embed([7]), decoder.rows(8, 1, cache), cache, owner)[-1]
        assert not bool(decoder.head(state).isfinite().any())


@torch.inference_mode()
def test_weights_that_are_no_numbers_keep_the_head_from_being_screened():
    weight = torch.randn(64, 32)
    weight[9, 3] = torch.nan
    assert Screen(weight)(torch.randn(1, 32), torch.ones(32), 1e-5) is None


# -- layers --------------------------------------------------------------------------------------------------------


def decode(model, blocks, owner, steps=30):
    """States of every block over some steps, and the cache."""
    decoder = model.decoder
    cache = decoder.new_cache(steps + 1)
    decoder.forward([7], 0, cache)
    found = []
    for position in range(1, steps + 1):
        rows = decoder.rows(position, 1, cache)
        found += decoder.run_blocks(blocks, 0, len(blocks), decoder.embed([position % 250]), rows, cache, owner)
        cache.length = position + 1
    return torch.cat(found), cache


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("name", configs())
@torch.inference_mode()
def test_every_family_gives_the_same_states_and_cache(name, ours):
    model = tiny_model(configs()[name])
    for blocks, owner in ((model.decoder.blocks, BACKBONE), (model.river.blocks, RIVER)):
        plain, plain_cache = decode(model, blocks, owner)
        blocks.stack = NATIVE.stack(model.decoder, blocks, ours)  # float32: the river's products are dense too
        assert blocks.stack is not None
        compiled, cache = decode(model, blocks, owner)
        torch.testing.assert_close(compiled, plain, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(cache.keys_values, plain_cache.keys_values, atol=2e-4, rtol=1e-4)
        assert (cache.owner == plain_cache.owner).all() and (cache.filled_at == plain_cache.filled_at).all()


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_16_bit_layers_stay_within_their_rounding(dtype, ours):
    model = tiny_model(dtype=dtype)
    for blocks, owner in ((model.decoder.blocks, BACKBONE), (model.river.blocks, RIVER)):
        plain, _ = decode(model, blocks, owner)
        blocks.stack = NATIVE.stack(model.decoder, blocks, ours) if owner == BACKBONE else river_stack(model, ours)
        compiled, _ = decode(model, blocks, owner)
        apart = (compiled - plain).norm() / plain.norm()
        # The plain path rounds every row to 16 bits before a product, ours does not: they differ by that rounding.
        assert 0 < apart < (5e-3 if (dtype, owner) == (torch.float16, BACKBONE) else 2e-2)


@torch.inference_mode()
def test_any_number_of_threads_makes_the_same_states():
    """Threads meet between the parts of a layer; one that went on too early would read what another has not written yet."""
    model = tiny_model()
    threads = torch.get_num_threads()
    try:
        for blocks, owner in ((model.decoder.blocks, BACKBONE), (model.river.blocks, RIVER)):
            blocks.stack = NATIVE.stack(model.decoder, blocks, True)
            torch.set_num_threads(1)
            alone, _ = decode(model, blocks, owner, steps=100)
            for several in (2, 3, 5):  # 3 and 5 share heads and rows unevenly, and are more than most machines that run this have
                torch.set_num_threads(several)
                together, _ = decode(model, blocks, owner, steps=100)
                assert torch.equal(together, alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "method", ["backbone", "int4", "river:0.5", "masking:0.5", "recompute:0.5", "replay:0.5", "propagation:0.5", "monotone:0.5", "sequence@fixed", "verified+k=2", "skipdecode", "river@maxprob:0.01"]
)  # fmt: skip
def test_every_strategy_decodes_the_same_tokens_and_slots(tiny, method):
    def run(model):
        return next(iter(Trace.from_events(compare(model, "Hello there", (method,), max_new_tokens=24)).lanes.values()))

    compiled_model = tiny_model()
    compiled_model.compiled = None
    plain, compiled = run(tiny), run(compiled_model)
    assert compiled_model.compiled and compiled_model.describe()["layers"] == "compiled" and not tiny.compiled
    for a, b in zip(plain.tokens, compiled.tokens, strict=True):
        for name in ("id", "exit_layer", "layers_run", "river_layers", "kv", "tested"):
            assert a[name] == b[name]
        assert a["similarity"] == pytest.approx(b["similarity"], abs=1e-3)


@pytest.mark.parametrize("rows, columns, group", [(16, 32, 32), (48, 192, 64), (576, 1536, 64), (32, 256, 128), (64, 512, 256)])
@torch.inference_mode()
def test_4_bit_products_in_blocks_are_finer_than_in_bfloat16(rows, columns, group):
    torch.manual_seed(0)
    layer, bias = quantise(torch.randn(rows, columns), 4, group), torch.randn(rows)
    if not torch.ops.river_native.has_int4():
        with pytest.raises(RuntimeError, match="not written for this processor"):
            torch.ops.river_native.int4_rows(torch.ones(1, columns), *Int4(layer).in_blocks(), group)
        return
    aten, ours = Int4(layer, bias), Int4(layer, bias)
    weight = aten.dense_weight()
    ours.adopt()
    assert torch.equal(ours.dense_weight(), weight) and ours.nbytes < aten.nbytes
    torch.testing.assert_close(unpacked(*ours.blocks, group).float(), weight)
    x = torch.randn(3, columns)
    x[1, 5] = 80  # an outlier costs its own group precision, and no other
    x[2] = 0
    exact = x.double() @ weight.double().T + bias
    apart = [float((product(x) - exact).norm()) for product in (aten, ours)]
    assert apart[1] < 0.1 * apart[0]
    many = torch.randn(40, columns)
    torch.testing.assert_close(ours(many), aten(many))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_dense_products_sum_in_float32_for_any_width(dtype):
    for rows, columns in ((1, 1), (5, 7), (33, 100), (300, 576)):
        weight, x = torch.randn(rows, columns).to(dtype), torch.randn(2, columns)
        exact = x.double() @ weight.double().T
        torch.testing.assert_close(torch.ops.river_native.dense_rows(x, weight).double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("context", [1, 2, 63, 64, 65, 129, 700, 2000])
@torch.inference_mode()
def test_attention_over_short_and_long_contexts(context):
    """One layer of a model that can read that far, against the plain path; chunks and their borders are the point."""
    model = tiny_model(LlamaConfig(**{**SIZE, "num_hidden_layers": 1, "max_position_embeddings": 4096}))
    decoder, found = model.decoder, []
    keys_values = torch.randn(decoder.new_cache(context).keys_values.shape)
    for stack in (None, NATIVE.stack(decoder, decoder.blocks, True)):
        decoder.blocks.stack = stack
        cache = decoder.new_cache(context)
        cache.keys_values.copy_(keys_values)
        rows = decoder.rows(context - 1, 1, cache)
        found.append(decoder.run_blocks(decoder.blocks, 0, 1, decoder.embed([3]), rows, cache, BACKBONE)[0])
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-5)


@pytest.fixture
def both_kinds(ops):
    if not ops.has_int4():
        pytest.skip("4-bit products are not written for these instructions")


def test_the_faster_products_are_chosen_by_measuring(both_kinds, monkeypatch):
    for slow, kind in ((("ours"), "ATen's"), (("ATen's"), "ours")):
        model = tiny_model(dtype=torch.bfloat16)
        model.compiled = None
        kinds = iter(("ours", "ATen's") * 2)
        monkeypatch.setattr("river_core.model._products_us", lambda stack, layers, kinds=kinds, slow=slow: 1 + (next(kinds) == slow))
        assert model.compile()
        assert all(f"products: {kind}" in reason for reason in model.product_reasons) and len(model.product_reasons) == 2
        assert (model.river.blocks[0].qkv.packed is None) == (kind == "ours") == model.decoder.lm_head.ours


@pytest.mark.parametrize("kind", ["ours", "aten"])
def test_products_that_were_asked_for_are_not_measured(both_kinds, monkeypatch, kind):
    monkeypatch.setattr("river_core.model._products_us", None)
    model = tiny_model(dtype=torch.bfloat16)
    model.compiled, model.products_wanted = None, kind
    assert model.compile(), model.notes
    name = {"ours": "ours", "aten": "ATen's"}[kind]
    assert model.products == {"backbone": name, "river": name} and all("asked for" in reason for reason in model.product_reasons)
    assert "products" in model.describe()["pinned"]


def test_products_that_cannot_be_had_are_said_to_be(ops):
    if ops.has_int4():
        pytest.skip("every kind can be had")
    model = tiny_model(dtype=torch.bfloat16)
    model.compiled, model.products_wanted = None, "ours"
    assert model.compile() and model.river.blocks.stack is None and model.decoder.blocks.stack is not None
    assert "river products: ours were asked for and cannot" in " ".join(model.describe()["reasons"])


def test_a_second_model_over_products_that_were_adopted_compiles_too(both_kinds):
    model = tiny_model(dtype=torch.bfloat16)
    model.compiled, model.products_wanted = None, "ours"
    assert model.compile() and model.products == {"backbone": "ours", "river": "ours"}
    second = dataclasses.replace(model, compiled=None, products={}, product_reasons=[])
    assert second.compile() and second.products["river"] == "ours"


def test_layers_that_disagree_are_not_used(monkeypatch):
    model = tiny_model()
    model.compiled = None
    right = NATIVE.stack

    def wrong(decoder, blocks, ours):
        broken = tiny_model(seed=1)
        return right(broken.decoder, broken.decoder.blocks, ours)

    monkeypatch.setattr(NATIVE, "stack", wrong)
    assert model.compile() is False and model.decoder.blocks.stack is None
    assert "not used" in model.notes[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_mistake_at_one_late_position_is_enough(monkeypatch, dtype):
    """On one row of a whole prompt, in the river only: nothing is swapped in, and what held codes still holds them."""
    model = tiny_model(dtype=dtype)
    model.compiled, stack_of = None, NATIVE.stack

    def late(decoder, blocks, ours):
        stack = stack_of(decoder, blocks, ours)
        if stack is not None and blocks[0] is model.river.blocks[0]:
            right = stack.run
            stack.run = lambda hidden, first, last, cache, entries, *rest: right(
                hidden * (1.5 if entries == [60] else 1), first, last, cache, entries, *rest
            )
        return stack

    monkeypatch.setattr(NATIVE, "stack", late)
    model.products_wanted = "ours" if torch.ops.river_native.has_int4() else "aten"
    assert model.compile() is False and "not used" in model.notes[-1]
    assert model.decoder.blocks.stack is model.river.blocks.stack is None and not model.products and not model.decoder.lm_head.ours
    assert getattr(model.river.blocks[0].qkv, "blocks", None) is None


@pytest.mark.parametrize(
    "name",
    ["exponential", "gated", "rotated", "narrowed", "attend", "dense_rows", "head_input", "embed", "similarity", "int4_rows", "screen"],
)
def test_an_operation_that_is_off_is_found_by_its_name(ops, monkeypatch, name):
    """Each of them made wrong by a thousandth; the screen by one row."""
    assert wrong_operation() is None
    if name == "int4_rows" and not ops.has_int4():
        pytest.skip("4-bit products are not written for these instructions")
    right = getattr(ops, name)

    def off(*args):
        found = right(*args)
        if isinstance(found, tuple):
            return (found[0] + 1, *found[1:])
        return found * 1.001 if isinstance(found, float) else (found.float() * 1.001).to(found.dtype)

    class Ops:
        def __getattr__(self, other):
            return off if other == name else getattr(ops, other)

    monkeypatch.setattr(torch.ops, "river_native", Ops())
    assert wrong_operation() is not None


@torch.inference_mode()
def test_weights_that_the_compiled_code_does_not_know_run_plainly():
    model = tiny_model(dtype=torch.bfloat16)
    decoder = model.decoder
    plan = dataclasses.replace(decoder.plan, river="int8", bits=8, group_size=None)
    eight = [
        decoder.make_block(i, lambda name, b=b: plan.river_layer(plan.quantise(getattr(b, name).weight)))
        for i, b in enumerate(decoder.blocks)
    ]
    assert isinstance(eight[0].qkv, Int8) and NATIVE.stack(decoder, eight, True) is NATIVE.stack(decoder, eight, False) is None
    model.river.blocks[:] = eight
    model.compiled = None
    assert model.compile(), model.notes
    assert decoder.blocks.stack is not None and model.river.blocks.stack is None and set(model.products) == {"backbone"}
    other = tiny_model()
    other.decoder.config = dataclasses.replace(other.decoder.config, hidden_act="gelu")
    assert NATIVE.stack(other.decoder, other.decoder.blocks, True) is None
    assert all(isinstance(getattr(tiny_model(bits=8).river.blocks[0], name), Dense) for name in ("qkv", "down"))
