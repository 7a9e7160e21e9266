"""Captured layers agree with the plain ones. Nothing is captured here: a replay runs the recorded closure again, on the same static buffers that a CUDA graph
would read, so a closure that held a position, a state or a rotation of its own would be caught."""

import gc
import weakref

import pytest
import torch

from river_core import Trace, compare
from river_core.exit_rules import Similarity, cosine
from river_core.graphs import CudaCapture, EagerCapture, GraphStack, Workspace, Workspaces
from river_core.kv_cache import BACKBONE, RIVER
from river_core.strategies.river import RiverStrategy
from tests.tiny import configs, tiny_model

PROMPT = [72, 101, 108, 108, 111]
LAYERS = 6
METHODS = [
    "backbone", "int4", "river:0.5", "river:0.8", "river:0.95", "masking:0.5", "recompute:0.5", "propagation:0.5", "monotone:0.5", "sequence@fixed",
    "verified+k=2", "skipdecode", "replay:0.5", "river@maxprob:0.01",
]  # fmt: skip


def captured_model(config=None, bucket=16, **options):
    """A tiny model with captured layers, and its capture; buckets are small, so that short texts meet several."""
    model, capture = tiny_model(config, **options), EagerCapture()
    assert model.capture_layers(lambda: capture), model.notes
    for blocks in (model.decoder.blocks, model.river.blocks):
        blocks.stack.bucket = bucket
    return model, capture


def walk(model, cache, positions, runs, feed=lambda position: position % 250):
    """States of one-row steps over the given runs of layers, [(blocks, owner, first, last), ...], fed `feed(position)`."""
    decoder, found = model.decoder, []
    for position in positions:
        rows, hidden = decoder.rows(position, 1, cache), decoder.embed([feed(position)])
        for blocks, owner, first, last in runs:
            states = decoder.run_blocks(blocks, first, last, hidden, rows, cache, owner)
            found += states
            hidden = states[-1]
        cache.length = position + 1
    return found


def river_runs(model, depth):
    """Backbone layers one by one up to `depth`, then the river suffix."""
    singles = [(model.decoder.blocks, BACKBONE, layer, layer + 1) for layer in range(depth)]
    return [*singles, (model.river.blocks, RIVER, depth, LAYERS)]


@pytest.mark.parametrize("name", configs())
@torch.inference_mode()
def test_every_family_gives_the_same_states_and_cache_across_buckets(name):
    plain, (model, capture) = tiny_model(configs()[name]), captured_model(configs()[name])
    found = []
    for one in (plain, model):
        cache = one.decoder.new_cache(45)
        one.decoder.forward(PROMPT, 0, cache)
        found.append((walk(one, cache, range(5, 45), river_runs(one, 3)), cache))
    (wanted, old), (got, new) = found
    torch.testing.assert_close(torch.cat(got), torch.cat(wanted), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(new.keys_values[:, :, :, :45], old.keys_values, atol=1e-5, rtol=1e-5)
    assert (new.owner == old.owner).all() and (new.filled_at == old.filled_at).all()
    assert capture.count - 2 == 3 * 4  # three buckets (16, 32, 64) of three single layers and one suffix; two were captured to be compared


@torch.inference_mode()
def test_a_replay_follows_every_input_that_may_change():
    plain, (model, capture) = tiny_model(), captured_model()
    made = []
    for one in (plain, model):
        cache = one.decoder.new_cache(16)
        one.decoder.forward(PROMPT, 0, cache)
        run = [(one.decoder.blocks, BACKBONE, 0, LAYERS)]
        states = walk(one, cache, [5], run)
        states += walk(one, cache, [5], run, feed=lambda position: 9)  # another token
        cache.keys_values[:, :, :, 2] += 1  # another past
        states += walk(one, cache, [5], run)
        states += walk(one, cache, [3, 7], run)  # another slot and rotation, backwards and with a gap
        made.append(torch.cat(states).view(5, LAYERS, -1))
    torch.testing.assert_close(made[1], made[0], atol=1e-5, rtol=1e-5)
    assert capture.count == 3  # one run, captured once
    assert all((made[1][i] - made[1][j]).abs().max() > 1e-3 for i in range(5) for j in range(i))


@torch.inference_mode()
@pytest.mark.parametrize("forgotten", ["place", "rotation", "slots"])
def test_a_closure_that_keeps_old_inputs_would_be_noticed(forgotten, monkeypatch):
    model, _ = captured_model()
    place = Workspace.place

    def broken(self, hidden_states, first, last, entries, rotation):
        if self.latest is not None and forgotten == "place":
            return
        if self.rotation is not None and forgotten == "rotation":
            rotation = self.rotation
        if self.rotation is not None and forgotten == "slots":
            entries = [5]
        place(self, hidden_states, first, last, entries, rotation)

    monkeypatch.setattr(Workspace, "place", broken)
    plain = tiny_model()
    ends = [
        torch.cat(walk(one, one.decoder.new_cache(16), range(5, 9), [(one.decoder.blocks, BACKBONE, 0, LAYERS)])) for one in (plain, model)
    ]
    assert (ends[0] - ends[1]).abs().max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_every_strategy_decodes_the_same_tokens_and_slots(tiny, method):
    model, capture = captured_model()
    run = [next(iter(Trace.from_events(compare(one, "Hello there", (method,), max_new_tokens=24)).lanes.values())) for one in (tiny, model)]
    assert run[1].end["message"] is None and (capture.count > 2 or method.startswith("replay"))
    for a, b in zip(run[0].tokens, run[1].tokens, strict=True):
        for name in ("id", "exit_layer", "layers_run", "river_layers", "kv", "tested"):
            assert a[name] == b[name]
        assert a["similarity"] == pytest.approx(b["similarity"], abs=2.1e-5)  # rounded to five places


def test_masking_with_a_window_takes_the_plain_path():
    plain, (model, capture) = tiny_model(configs()["mistral-sliding"]), captured_model(configs()["mistral-sliding"])
    run = [Trace.from_events(compare(one, "Hello there", ("masking:0.5",), max_new_tokens=24)).lanes["masking"] for one in (plain, model)]
    assert run[0].token_ids == run[1].token_ids and capture.count == 2


@torch.inference_mode()
def test_slots_may_differ_from_layer_to_layer():
    """A compact cache writes each layer's keys where that layer has room, and attends up to there."""
    from river_core.strategies.masking import CompactCache

    plain, (model, _) = tiny_model(), captured_model()
    made = []
    for one in (plain, model):
        cache = one.decoder.new_cache(40, CompactCache)
        for position in range(30):
            last = 2 if position % 3 else LAYERS
            made.append(walk(one, cache, [position], [(one.decoder.blocks, BACKBONE, 0, last)])[-1])
        made.append(torch.tensor([len(held) for held in cache.positions]))
    for got, wanted in zip(made[31:], made[:31], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_lanes_in_turn_do_not_disturb_each_other():
    plain, (model, _) = tiny_model(), captured_model()
    ends = []
    for one in (plain, model):
        caches = [one.decoder.new_cache(16), one.decoder.new_cache(16)]
        found = []
        for position in range(12):
            for lane, cache in enumerate(caches):
                found += walk(one, cache, [position], river_runs(one, 2 + lane), feed=lambda p, lane=lane: 7 * lane + p)
        ends.append(torch.cat(found))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_states_stay_what_they_were_when_later_steps_run():
    model, _ = captured_model()
    cache = model.decoder.new_cache(16)
    first = walk(model, cache, [0], river_runs(model, 3))
    kept = torch.cat(first).clone()
    walk(model, cache, range(1, 8), river_runs(model, 3))
    assert torch.equal(torch.cat(first), kept)


@torch.inference_mode()
def test_the_similarity_of_a_run_is_the_cosine_of_its_last_layer():
    model, _ = captured_model()
    decoder, cache = model.decoder, model.decoder.new_cache(8)
    rows, hidden = decoder.rows(0, 1, cache), decoder.embed([7])
    for first, last in ((0, 1), (1, 2), (2, 5)):
        states = decoder.run_blocks(decoder.blocks, first, last, hidden, rows, cache, BACKBONE)
        before = states[-2] if len(states) > 1 else hidden
        assert float(states.similarity) == pytest.approx(cosine(before, states[-1]), abs=1e-6)
        hidden = states[-1]
    assert decoder.run_blocks(model.river.blocks, 5, 6, hidden, rows, cache, RIVER).similarity is None


@torch.inference_mode()
def test_exit_tests_use_the_similarity_that_the_run_has_made(monkeypatch):
    model, _ = captured_model()
    monkeypatch.setattr("river_core.exit_rules.cosine", None)  # asking for it would fail
    strategy = RiverStrategy(model, Similarity(0.5))
    cache = strategy.new_cache(16)
    strategy.prefill(PROMPT, cache)
    assert strategy.step(7, 5, 1, cache).scores


def test_workspaces_serve_the_next_lane_and_what_was_captured_with_them():
    model, capture = captured_model()
    for _ in range(3):
        Trace.from_events(compare(model, "Hello there", ("river:0.5", "backbone"), max_new_tokens=12))
        counts = [capture.count, len(model.decoder.workspaces.free)]
    again = Trace.from_events(compare(model, "Hello there", ("river:0.5", "backbone"), max_new_tokens=12))
    assert [capture.count, len(model.decoder.workspaces.free)] == counts and counts[1] == 2
    assert all(lane.end["message"] is None for lane in again.lanes.values())


def test_a_storage_that_is_used_again_starts_empty():
    model, _ = captured_model()
    cache = model.decoder.new_cache(10)
    cache.keys_values.fill_(torch.nan)
    storage = cache.keys_values.data_ptr()
    del cache
    cache = model.decoder.new_cache(12)
    assert cache.keys_values.data_ptr() == storage and cache.keys_values.count_nonzero() == 0 and (cache.owner == 0).all()


def test_spare_workspaces_are_bounded_in_number_and_bytes(monkeypatch):
    model, _ = captured_model()
    pool = model.decoder.workspaces = Workspaces(model.config, torch.float32, "cpu", spare=2)
    caches = [model.decoder.new_cache(10) for _ in range(4)]
    del caches
    assert len(pool.free) == 2
    monkeypatch.setattr("river_core.graphs.SPARE_BYTES", 1)
    cache = model.decoder.new_cache(300)  # of another size: nothing that is spare fits
    del cache
    assert pool.free == []


@torch.inference_mode()
def test_what_was_captured_is_bounded_and_goes_with_its_cache():
    model, _ = captured_model()
    model.decoder.workspaces = None  # caches own their workspaces
    cache = model.decoder.new_cache(64)
    for depth in range(LAYERS):
        walk(model, cache, range(60), river_runs(model, depth))
    workspace = weakref.ref(cache.workspace)
    assert 0 < len(workspace().graphs) <= workspace().limit == 3 * LAYERS
    del cache
    assert workspace() is None


def test_a_model_with_captured_layers_is_freed_without_a_cycle():
    model, _ = captured_model()
    Trace.from_events(compare(model, "Hello", ("river:0.5",), max_new_tokens=4))
    decoder = weakref.ref(model.decoder)
    gc.collect()
    gc.disable()
    try:
        del model
        assert decoder() is None
    finally:
        gc.enable()


def test_plain_layers_is_the_switch_and_is_undone():
    model, capture = captured_model()
    stacks = model.decoder.blocks.stack, model.river.blocks.stack
    assert model.describe()["layers"] == "captured as CUDA graphs" and any(
        "captured as CUDA graphs" in reason for reason in model.describe()["reasons"]
    )
    with model.plain_layers():
        assert model.describe()["layers"] == "operation by operation" and not model.compile()
        Trace.from_events(compare(model, "Hello", ("river:0.5",), max_new_tokens=4))
    assert capture.count == 2 and (model.decoder.blocks.stack, model.river.blocks.stack) == stacks
    assert model.compiled and model.decoder.workspaces is not None


def test_layers_that_disagree_or_cannot_be_captured_leave_the_plain_path(monkeypatch):
    model = tiny_model()

    def fails(work):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    assert model.capture_layers(lambda: fails) is False and model.decoder.blocks.stack is None and model.decoder.workspaces is None
    assert "could not be captured" in model.notes[-1] and model.notes[-1].count("\n") == 0

    right = GraphStack.run
    monkeypatch.setattr(GraphStack, "run", lambda self, hidden, *rest: right(self, hidden * 0.5, *rest))
    assert model.capture_layers(EagerCapture) is False and model.decoder.blocks.stack is None and model.river.blocks.stack is None
    assert "Captured layers were" in model.notes[-1]
    assert model.describe()["layers"] == "operation by operation"


@torch.inference_mode()
def test_16_bit_layers_stay_within_their_rounding():
    plain, (model, _) = tiny_model(dtype=torch.bfloat16), captured_model(dtype=torch.bfloat16)
    ends = [torch.cat(walk(one, one.decoder.new_cache(40), range(40), river_runs(one, 3))) for one in (plain, model)]
    assert (ends[0] - ends[1]).norm() / ends[0].norm() < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "mistral-sliding", "qwen3", "phi4-mini-longrope"])
@torch.inference_mode()
def test_cuda_graphs_agree_with_the_plain_path(name, dtype):
    from river_core.measure.families import tiny_model_on

    model = tiny_model_on("cuda", configs()[name], dtype)
    assert model.capture_layers(lambda: CudaCapture("cuda")), model.notes
    model.decoder.blocks.stack.bucket = model.river.blocks.stack.bucket = 16
    captured = torch.cat(walk(model, model.decoder.new_cache(40), range(40), river_runs(model, 3)))
    with model.plain_layers():
        plain = torch.cat(walk(model, model.decoder.new_cache(40), range(40), river_runs(model, 3)))
    assert (captured - plain).norm() / plain.norm() < (1e-5 if dtype == torch.float32 else 2e-2)
