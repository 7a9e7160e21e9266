"""Offloaded layers: the same answers bit for bit, out of memory while nobody needs them, and counted when they come back."""

import shutil

import pytest
import torch
from transformers import LlamaConfig

from river_core import Trace, compare
from river_core.errors import InputError, LoadError
from river_core.kv_cache import BACKBONE
from river_core.lane import Lane, SharedPrefill
from river_core.loading import cache_dir
from river_core.methods import parse_methods
from river_core.model import offload_notes
from river_core.native import NATIVE
from river_core.offload import PRODUCTS, ROOM, HostLayers, MappedLayers, Offload, check_offload, offloaded, resident_bytes
from river_core.sampling import Sampling
from tests.tiny import SIZE, configs, tiny_model

LAYERS = SIZE["num_hidden_layers"]
METHODS = [
    "backbone", "int4", "river:0.5", "river:2", "river@fixed:4", "masking@fixed:4", "recompute@fixed:3+cap=2", "replay@fixed:3+cap=2", "propagation@fixed:3",
    "monotone:0.5", "sequence@fixed:4", "sequence+depth=3+head=balcony", "verified+k=2", "skipdecode", "river@maxprob:0.9",
]  # fmt: skip
needs_linux = pytest.mark.skipif(not hasattr(__import__("os"), "posix_fadvise"), reason="only Linux says which pages are in memory")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")


def run(model, methods, **options):
    return Trace.from_events(compare(model, "Hello there", methods, max_new_tokens=12, **options))


def finish(model, method, prefill="full"):
    """A lane that has decoded 12 tokens, its events, and the scores of every one of them."""
    lane = Lane(model, parse_methods([method], None, model)[0], list(range(40, 60)), 12, Sampling(), prefill)
    with torch.inference_mode():
        events = lane.prefill(SharedPrefill())[1:]
        scores = [lane.last_logits]
        while not lane.finished:
            events += lane.step()
            scores.append(lane.last_logits)
    return lane, events, torch.stack(scores)


def compiled(model):
    """The model with compiled layers, whose screening of the head is left out."""
    NATIVE.start(cache_dir() / "native")
    model.compiled = None
    assert model.compile(wait=True), model.notes
    return model


def assert_same(plain_model, other_model, method, prefill="full"):
    (plain, events, scores), (other, other_events, other_scores) = (finish(model, method, prefill) for model in (plain_model, other_model))
    assert other.token_ids == plain.token_ids
    assert torch.equal(other_scores, scores)
    assert torch.equal(other.cache.keys_values, plain.cache.keys_values)
    assert (other.cache.owner == plain.cache.owner).all() and (other.cache.filled_at == plain.cache.filled_at).all()
    for a, b in zip(events, other_events, strict=True):
        for name in ("exit_layer", "layers_run", "river_layers", "similarity", "tested", "kv", "top5"):
            assert a[name] == b[name]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny model, and the same with its layers offloaded after the second."""
    model = tiny_model()
    return model, offloaded(model, 2, tmp_path_factory.mktemp("offload"))


@pytest.mark.parametrize("method", METHODS)
def test_every_strategy_gives_the_same_bits(pair, method):
    assert_same(*pair, method)


@pytest.mark.parametrize("method", ["river:0.5", "river@fixed:4", "int4", "sequence@fixed:4"])
def test_every_way_to_read_the_prompt_gives_the_same_bits(pair, method):
    assert_same(*pair, method, "sequence")


@pytest.mark.parametrize("after", [0, LAYERS - 1])
def test_every_depth_gives_the_same_bits(tiny, after, tmp_path):
    assert_same(tiny, offloaded(tiny, after, tmp_path), "river@fixed:4")
    assert_same(tiny, offloaded(tiny, after, tmp_path), "backbone")


@pytest.mark.parametrize("name", configs())
def test_every_family_gives_the_same_bits(name, tmp_path):
    model = tiny_model(configs()[name])
    assert_same(model, offloaded(model, 1, tmp_path), "backbone")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_layers_give_the_same_bits(dtype, tmp_path):
    model = tiny_model(dtype=dtype)
    assert_same(model, offloaded(model, 2, tmp_path), "verified+k=4")


@needs_compiler
@pytest.mark.parametrize("method", METHODS)
def test_compiled_layers_run_from_the_same_addresses_and_give_the_same_bits(method, tmp_path):
    plain = compiled(tiny_model())
    other = offloaded(plain, 2, tmp_path)
    assert other.compile(wait=True) and other.decoder.blocks.stack is not None is not plain.decoder.blocks.stack
    assert_same(plain, other, method)


def test_layers_with_a_copy_for_many_rows_keep_none_when_offloaded(tmp_path):
    """Products of many rows in another dtype cast the offloaded weights for the call; the copy that the plain model keeps gives the same bits."""
    model = tiny_model(dtype=torch.float16)
    for block in model.decoder.blocks:
        for name in PRODUCTS:
            getattr(block, name).many_dtype, getattr(block, name).keep_many = torch.bfloat16, True
    other = offloaded(model, 2, tmp_path)
    assert_same(model, other, "backbone")
    assert model.decoder.blocks[3].qkv._many is not None and other.decoder.blocks[3].qkv._many is None
    assert other.decoder.blocks[0].qkv._many is not None


@pytest.mark.parametrize("mode", ["same-text", "same-exits"])
def test_lanes_on_the_same_text_are_the_same(pair, mode):
    methods = ["backbone", "river:0.5", "recompute", "propagation", "masking", "monotone"]
    plain, other = (run(model, methods, mode=mode) for model in pair)
    for name, lane in plain.lanes.items():
        assert other.lanes[name].token_ids == lane.token_ids
        assert other.agreement(name) == plain.agreement(name)
        assert (other.lanes[name].fidelity or {}).get("mean") == (lane.fidelity or {}).get("mean")


# -- what is counted ---------------------------------------------------------------------------------------------------


@pytest.fixture
def after_2(tiny, tmp_path):
    return offloaded(tiny, 2, tmp_path)


def test_a_token_that_leaves_early_brings_nothing_back_and_a_backbone_token_all(after_2):
    trace = run(after_2, ["backbone", "river@fixed:2", "river@fixed:1", "river@fixed:4", "int4"])
    each = after_2.decoder.blocks.offload.nbytes // (LAYERS - 2)
    for lane, layers in (("backbone", LAYERS - 2), ("river", 0), ("river-2", 0), ("river-3", 2), ("int4", 0)):
        tokens = trace.lanes[lane].tokens
        assert tokens[0]["fetched"] == LAYERS - 2  # the prompt's pass, at full depth
        assert [(token["fetched"], token["fetched_bytes"]) for token in tokens[1:]] == [(layers, layers * each)] * (len(tokens) - 1)
        assert trace.lanes[lane].fetched == {"layers": layers, "bytes": layers * each}
        assert trace.lanes[lane].end["fetched"] == sum(token["fetched"] for token in tokens)


def test_a_propagated_slot_brings_back_its_projection_only(after_2):
    tokens = run(after_2, ["propagation@fixed:1"]).lanes["propagation"].steps
    size = after_2.decoder.blocks.offload.sizes[2]["qkv"]
    assert {(token["fetched"], token["fetched_bytes"]) for token in tokens} == {(LAYERS - 2, (LAYERS - 2) * size)}


def test_tokens_of_one_cycle_share_one_pass(after_2):
    trace = run(after_2, ["verified+k=3"])
    for token in trace.lanes["verified"].steps:
        assert token["fetched"] == (LAYERS - 2 if token["cycle"]["place"] == 0 else 0)


@pytest.mark.parametrize("method", METHODS)
def test_the_observer_brings_nothing_back_behind_the_clock(after_2, method):
    """Similarities, candidates and owners are gathered after the clock has stopped; none of that may run an offloaded layer."""
    offload = after_2.decoder.blocks.offload
    before = offload.since()
    trace = run(after_2, [method])
    tokens = next(iter(trace.lanes.values())).tokens
    assert offload.since(before) == (sum(token["fetched"] for token in tokens), sum(token["fetched_bytes"] for token in tokens))


def test_the_trace_tells_what_is_in_memory_and_what_is_not(after_2, tiny, tmp_path):
    trace = run(after_2, ["backbone"])
    trace.save(tmp_path / "t.json.gz")
    again = Trace.load(tmp_path / "t.json.gz")
    whole = run(tiny, ["backbone"])
    each = whole.header["bytes"]["backbone"] // LAYERS
    assert again.header["bytes"]["backbone"] == (2 + ROOM) * each and again.header["bytes"]["offloaded"] == (LAYERS - 2) * each
    assert again.header["offload"]["after"] == 2 and again.header["offload"]["to"] == "file"
    assert again.done["memory"]["offload"]["bytes"] == (LAYERS - 2) * each and again.done["memory"]["peak_bytes"] > 0
    assert again.done["memory"]["offload"]["how"] in ("measured", "computed")
    assert "offload" not in whole.header and "fetched" not in whole.lanes["backbone"].tokens[0] and whole.lanes["backbone"].fetched is None


def test_a_failed_step_gives_its_layers_back(after_2, monkeypatch):
    blocks = after_2.decoder.blocks

    def fail(*args):
        raise RuntimeError("a product failed")

    monkeypatch.setattr(after_2.decoder, "run_block", fail)
    with pytest.raises(RuntimeError):
        after_2.decoder.forward([1], 0, after_2.decoder.new_cache(1))
    with pytest.raises(RuntimeError), blocks.at(5) as block:
        assert block.qkv.weight.sum() != 0
        raise RuntimeError
    assert blocks.offload.describe()["resident_bytes"] <= blocks.offload.nbytes // 2


# -- memory ------------------------------------------------------------------------------------------------------------

MEDIUM = LlamaConfig(
    **SIZE | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
)


@needs_linux
def test_released_layers_leave_memory_and_come_back(tmp_path):
    """6 layers of 16.8 MB each in float32: 4 of them leave, at most two are there while a token runs, none after it."""
    model = tiny_model(MEDIUM)
    other = offloaded(model, 2, tmp_path)
    blocks, offload = other.decoder.blocks, other.decoder.blocks.offload
    each = offload.nbytes // 4
    assert offload.nbytes > 60e6 and not offload_notes(other.decoder)
    weights = [getattr(block, name).weight for block in blocks[2:] for name in PRODUCTS]
    assert offload.store.resident_bytes() == (0, "measured") and resident_bytes(weights) == (0, "measured")
    assert resident_bytes([model.decoder.blocks[3].down.weight])[0] == model.decoder.blocks[3].down.weight.nbytes
    with blocks.at(3, following=True):
        seen = offload.store.resident_bytes()[0]
        assert each <= seen <= ROOM * each + (1 << 20)
    offload.store.ready(4, PRODUCTS)  # pages that the disk is still filling cannot be given back
    offload.store.release(4, PRODUCTS)
    assert offload.store.resident_bytes() == (0, "measured")
    most = 0
    inside = other.decoder._run_in_place

    def watched(*args):
        nonlocal most
        most = max(most, offload.store.resident_bytes()[0])
        return inside(*args)

    other.decoder._run_in_place = watched
    with torch.inference_mode():
        other.decoder.forward(list(range(20)), 0, other.decoder.new_cache(20))
    assert each <= most <= ROOM * each + (1 << 20)
    assert offload.store.resident_bytes() == (0, "measured")
    assert not list(tmp_path.iterdir())  # the file has no name, so nothing is left behind by a process that is killed


@needs_linux
def test_loading_with_offloading_never_holds_the_layers_at_once(tmp_path, monkeypatch):
    """Each layer is written before the next one is made."""
    from river_core.decoder import Decoder
    from river_core.kernels import choose_kernels
    from tests.tiny import random_model

    config = configs()["llama"]
    weights = random_model(config).state_dict()
    plan = choose_kernels("cpu", config.hidden_size, config.intermediate_size, torch.float32)
    store, order = MappedLayers(tmp_path, LAYERS - 1), []
    take = store.take
    monkeypatch.setattr(store, "take", lambda layer, block: order.append(f"away {layer}") or take(layer, block))
    make = Decoder.make_block
    monkeypatch.setattr(Decoder, "make_block", lambda self, layer, product: order.append(f"made {layer}") or make(self, layer, product))
    decoder = Decoder(config, weights, plan, offload=Offload(4, store))
    assert order == ["made 0", "made 1", "made 2", "made 3", "made 4", "away 4", "made 5", "away 5"]
    assert decoder.blocks.resident == 4 and store.resident_bytes()[0] == 0


def test_a_shape_loads_with_offloading_and_decodes_the_same(tmp_path, monkeypatch):
    from river_core.measure.shapes import SHAPES, _llama, bytes_needed, shaped_model

    monkeypatch.setenv("RIVER_CACHE", str(tmp_path))
    monkeypatch.setitem(SHAPES, "small", lambda: _llama(64, 128, 6, 4, 2, 16, 300, True))
    plain, other = (shaped_model("small", dtype="bfloat16", compiled=False, offload_after=after) for after in (None, 2))
    assert other.decoder.blocks.resident == 2 and other.describe()["offload"]["layers"] == 4
    # The backbone: the codes of a river of random numbers depend on which thread drew first.
    assert run(other, ["backbone"]).lanes["backbone"].token_ids == run(plain, ["backbone"]).lanes["backbone"].token_ids
    assert bytes_needed(SHAPES["small"](), 2, 2) < bytes_needed(SHAPES["small"](), 2)


def test_a_file_that_stays_in_memory_is_noted(after_2, monkeypatch):
    """As in a cache folder on a memory file system."""
    monkeypatch.setattr(MappedLayers, "resident_bytes", lambda self: (10**9, "measured"))
    assert "still in memory" in offload_notes(after_2.decoder)[0]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [-1, LAYERS + 1, 2.5, "two", True])
def test_a_depth_that_is_none_gets_a_sentence(after):
    with pytest.raises(InputError, match="after layer 0 to 6"):
        check_offload(after, LAYERS, torch.device("cpu"))


def test_no_offloading_and_offloading_nothing_are_the_plain_model(tiny, tmp_path):
    assert check_offload(None, LAYERS, torch.device("mps")) is None and check_offload(LAYERS, LAYERS, torch.device("cpu")) is None
    with pytest.raises(InputError, match="not on mps"):
        check_offload(2, LAYERS, torch.device("mps"))
    other = offloaded(tiny, LAYERS, tmp_path)
    assert other.decoder.blocks.offload is None and other.describe()["offload"] is None
    assert other.decoder.blocks.resident == LAYERS == len(tiny.decoder.blocks) and not list(tmp_path.iterdir())


def test_a_disk_without_room_gets_a_sentence(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("river_core.default_model.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(LoadError, match="free disk space"):
        offloaded(tiny, 2, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr("river_core.offload.os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(LoadError, match="disk is full"):
        offloaded(tiny, 2, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="cannot be offloaded to"):
        offloaded(tiny, 2, tmp_path / "file")


# -- the GPU's way, with copies that can be watched ---------------------------------------------------------------------


class WatchedCopies:
    """Copies as a GPU makes them: begun at once, there when they are waited for; what is read before that is not a number."""

    def __init__(self):
        self.log = []
        self.ran = 0

    def home(self, tensor):
        return tensor.clone()

    def start(self, pairs, free):
        for target, _ in pairs:
            target.fill_(torch.nan)
        self.log.append(("start", free))
        return pairs

    def wait(self, arrival):
        self.log.append(("wait", None))
        for target, source in arrival:
            target.copy_(source)

    def done(self):
        self.ran += 1
        return self.ran


def on_host(model, after):
    """The model with layers in "host memory" behind watched copies."""
    import copy
    import dataclasses

    from river_core.decoder import Blocks

    offload = Offload(after, HostLayers(torch.device("cpu"), WatchedCopies()))
    decoder = copy.copy(model.decoder)
    decoder.blocks = Blocks(block if layer < after else offload.take(layer, block) for layer, block in enumerate(model.decoder.blocks))
    decoder.blocks.offload = offload
    return dataclasses.replace(model, decoder=decoder)


@pytest.mark.parametrize(("method", "after"), [*((method, 2) for method in METHODS), ("backbone", 0), ("river@fixed:4", LAYERS - 1)])
def test_layers_in_host_memory_take_turns_in_two_places_and_give_the_same_bits(tiny, method, after):
    other = on_host(tiny, after)
    assert_same(tiny, other, method)
    store = other.decoder.blocks.offload.store
    assert other.decoder.blocks.offload.describe()["resident_bytes"] == ROOM * other.decoder.blocks.offload.nbytes // (LAYERS - after)
    assert store.coming == [None, None]


@torch.inference_mode()
def test_the_next_layer_travels_while_one_runs_and_waits_until_its_place_is_free(tiny):
    other = on_host(tiny, 2)
    copies = other.decoder.blocks.offload.store.copies
    free = copies.ran  # the two places are free after events 1 and 2
    copies.log.clear()
    other.decoder.forward([1], 0, other.decoder.new_cache(1))
    # Layers 2 to 5: 2 and 3 set out at once; 4 needs the place of 2, 5 that of 3.
    assert copies.log == [
        ("start", 1), ("wait", None), ("start", 2), ("wait", None), ("start", free + 1), ("wait", None), ("start", free + 2), ("wait", None),
    ]  # fmt: skip


def test_layers_in_host_memory_are_never_multiplied_where_they_lie(tiny):
    """What stands in the list of blocks is the host's copy; only what `at` hands out is on the device."""
    other = on_host(tiny, 2)
    blocks = other.decoder.blocks
    with blocks.at(4) as block, torch.inference_mode():
        assert block is not blocks[4] and torch.equal(block.down.weight, tiny.decoder.blocks[4].down.weight)
    cache = other.decoder.new_cache(1)
    with torch.inference_mode():
        other.decoder.run_blocks(blocks, 0, 2, other.decoder.embed([1]), other.decoder.rows(0, 1, cache), cache, BACKBONE)
    assert other.decoder.blocks.offload.since()[0] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_gives_the_same_bits(method, tmp_path):
    """On the device itself: pinned memory, a stream of its own, events."""
    from river_core.measure.shapes import shaped_model

    model = shaped_model("smollm2-135m", device="cuda")
    assert_same(model, offloaded(model, 10, tmp_path), method)
