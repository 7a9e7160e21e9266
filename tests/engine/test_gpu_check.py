"""What `gpu-check` checks, tried on two CPU models: it passes where they hold the same weights and fails where the second one is damaged."""

import json
import subprocess
import sys

import pytest
import torch

from river_core.errors import InputError, LoadError
from river_core.graphs import EagerCapture, Workspace
from river_core.measure import gpu_check as module
from river_core.measure.gpu_check import Check, Deadline, OutOfTime, family_pairs, gpu_check, measure, run_checks
from tests.tiny import tiny_model

TEXTS = ("Hello there",)
NAMES = {"prefill logits", "top-1 choices", "full river", "cache owners", "captured layers", "int4 products"}


def captured(dtype=torch.bfloat16):
    model = tiny_model(dtype=dtype)
    assert model.capture_layers(EagerCapture), model.notes
    return model


def checks(reference, model, **options):
    """Checks by the name of what they look at."""
    found = run_checks(reference, model, TEXTS, label="tiny", tokens=10, **options)
    return {check.name.removeprefix("tiny, "): check for check in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_of_the_same_weights_pass_every_check(tiny, dtype):
    found = checks(tiny, captured(dtype))
    assert all(check.passed for check in found.values()), "\n".join(map(str, found.values()))
    assert set(found) == NAMES - ({"int4 products"} if dtype == torch.float32 else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [-1, 0, 1.5])
def test_a_damaged_layer_fails(tiny, dtype, factor):
    model = captured(dtype)
    model.decoder.blocks[3].down.weight.mul_(factor)
    found = checks(tiny, model)
    assert not found["prefill logits"].passed and found["captured layers"].passed  # which are as damaged as the plain ones


def test_a_damaged_head_fails(tiny):
    model = captured()
    model.decoder.lm_head.weight.copy_(model.decoder.lm_head.weight.roll(1, 0))
    found = checks(tiny, model)
    assert not found["prefill logits"].passed and not found["top-1 choices"].passed


def test_a_damaged_4_bit_product_fails(tiny):
    model = captured()
    model.river.blocks[0].gate_up.packed.add_(1)  # one code too high: what the kernel reads is not what the codes say
    found = checks(tiny, model)
    assert not found["int4 products"].passed and found["prefill logits"].passed


def test_captured_layers_that_keep_an_old_slot_fail(tiny, monkeypatch):
    model, place = captured(), Workspace.place
    monkeypatch.setattr(Workspace, "place", lambda self, h, first, last, entries, rotation: place(self, h, first, last, [1], rotation))
    found = checks(tiny, model)
    assert not found["captured layers"].passed and found["prefill logits"].passed


def test_slots_that_nobody_noted_fail(tiny, monkeypatch):
    model = captured()
    cache = type(model.decoder.new_cache(1))
    note = cache.note
    monkeypatch.setattr(cache, "note", lambda self, first, *rest: note(self, first + (self.workspace is not None), *rest))
    found = checks(tiny, model)
    assert not found["cache owners"].passed and "different tables" in found["cache owners"].detail


def test_numbers_that_are_none_fail_and_a_kernel_that_raises_is_one_failed_check(tiny, monkeypatch):
    model = captured()
    model.decoder.lm_head.weight[5].fill_(torch.nan)
    found = checks(tiny, model)
    assert not found["prefill logits"].passed and not found["top-1 choices"].passed and not found["full river"].passed

    def raises(x):
        raise RuntimeError("no kernel image is available\nfor this device")

    model = captured()
    monkeypatch.setattr(model.decoder, "head", lambda *args: raises(None))
    found = checks(tiny, model)
    assert found["prefill logits"] == Check("tiny, prefill logits", False, "no kernel image is available") and found["int4 products"].passed


def test_plain_layers_are_no_pass_for_captured_ones(tiny):
    model = tiny_model(dtype=torch.bfloat16)
    model.notes.append("Captured layers were 9 away from the plain ones and are not used.")
    found = checks(tiny, model)["captured layers"]
    assert found.passed is None and "9 away" in found.detail and str(found).startswith("not run")


def test_pairs_of_a_family_hold_the_same_weights(monkeypatch):
    every = module.configs()
    monkeypatch.setattr(module, "configs", lambda: {name: every[name] for name in ("llama-tied-biased", "qwen3")})
    pairs = list(family_pairs("cpu", (torch.float32, torch.bfloat16), lambda model: model.capture_layers(EagerCapture)))
    assert len(pairs) == 4
    for _, reference, model in pairs[::2]:
        assert torch.equal(reference.decoder.blocks[2].qkv.weight, model.decoder.blocks[2].qkv.weight)
        assert model.captured and model.decoder.blocks.stack.bucket == 16 and not reference.captured


def test_a_deadline_stops_the_checks_and_the_benchmark_between_two_pieces_of_work(tiny):
    late = Deadline(-1)
    with pytest.raises(OutOfTime):
        list(run_checks(tiny, captured(), TEXTS, label="tiny", deadline=late))
    with pytest.raises(OutOfTime):
        measure(tiny, ("backbone",), deadline=late, tokens=4, repeats=1)
    Deadline(60)("there is time")


def test_measuring_with_and_without_captured_layers_says_which():
    model = captured()
    fast, plain = (measure(model, ("backbone", "river:0.5"), plain=plain, tokens=4, repeats=1) for plain in (False, True))
    assert (
        fast["run_card"]["kernels"]["layers"] == "captured as CUDA graphs"
        and plain["run_card"]["kernels"]["layers"] == "operation by operation"
    )
    assert model.captured


@pytest.fixture
def pretended(monkeypatch, tiny):
    """The command on a machine whose GPU is the CPU: two tiny models for the model, one family, a tiny shape."""
    every = module.configs()
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda device: "Pretended GPU")
    monkeypatch.setattr(module, "configs", lambda: {"qwen2": every["qwen2"]})
    monkeypatch.setattr(module, "PROMPTS", TEXTS)
    monkeypatch.setattr(module, "default_pair", lambda *args: (tiny, captured()))
    pairs = family_pairs
    monkeypatch.setattr(
        module, "family_pairs", lambda device: pairs("cpu", (torch.float32,), lambda model: model.capture_layers(EagerCapture))
    )
    monkeypatch.setattr(module, "shaped_model", lambda *args, **options: captured())
    monkeypatch.setattr(module, "measure", lambda model, methods, *rest: measure(model, methods, (), *rest[1:], tokens=3, repeats=1))


def test_the_whole_command_checks_measures_and_says_so(pretended):
    said = []
    result = gpu_check(report=said.append)
    assert result["passed"] and len(result["checks"]) == 6 + 5
    assert all(isinstance(part, dict) for part in result["bench"].values()) and len(result["bench"]) == 4
    assert "11 of 11 checks passed" in said[-1] and "Pretended GPU" in said[0]
    assert any("tokens/s" in line for line in said) and all(
        "pass" in line[:8] for line in said if line.count(", ") and line.startswith("pass")
    )
    json.dumps(result)


def test_without_time_or_model_the_command_does_not_pass(pretended, monkeypatch):
    said = []
    result = gpu_check(seconds=-1, report=said.append)
    assert not result["passed"] and result["checks"][-1]["passed"] is None
    assert all("are over" in part for part in result["bench"].values())

    def absent(*args):
        raise LoadError("The model cannot be downloaded here.")

    monkeypatch.setattr(module, "default_pair", absent)
    result = gpu_check(benchmark=False, report=said.append)
    assert (
        not result["passed"]
        and "cannot be downloaded" in result["checks"][0]["detail"]
        and len(result["checks"]) == 1 + 5
        and result["bench"] == {}
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_sentence():
    with pytest.raises(InputError, match="There is no CUDA GPU"):
        gpu_check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_command_needs_none_of_the_page_s_libraries():
    code = (
        "import sys\nfor name in ('gradio', 'plotly', 'pandas', 'kaleido'): sys.modules[name] = None\n"
        "import river_core.measure.gpu_check\nfrom river_core.cli import main\nsys.exit(main(['gpu-check']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: There is no CUDA GPU")
