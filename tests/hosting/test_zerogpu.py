"""A race as ZeroGPU runs it, with the `spaces` package where it changes nothing: one plain generator, and nothing in or out that cannot be pickled."""

from __future__ import annotations

import inspect
import json
import pickle
import time
from dataclasses import asdict
from importlib.util import find_spec

import gradio as gr
import pytest

import river_core
from app import zerogpu
from app.model_host import ModelHost, describe
from app.runs import Runs
from app.settings import Settings
from river_core.errors import InputError, RiverError
from tests.demand import missing

SETTINGS = Settings("Hello there", False, ("backbone", "river"), None, 6, 0.0, 0, 1.0, 0, "full", "race")


@pytest.fixture
def lent(tiny, monkeypatch):
    """The tiny model, placed as app.py places one; what was asked of `load` lies in `lent.asked`."""
    if find_spec("spaces") is None:
        missing("spaces is not installed: pip install spaces")
    asked = {}
    monkeypatch.setattr(zerogpu, "_model", None)
    monkeypatch.setattr(zerogpu, "_compare", None)
    notes = list(tiny.notes)
    model = zerogpu.place(lambda **options: asked.update(options) or tiny, river_core.compare, name=None, device="cuda", dtype="auto")
    model.asked = asked
    yield model
    tiny.notes[:] = notes


def test_the_race_is_a_plain_generator_and_its_length_is_told_beforehand(lent):
    assert inspect.isgeneratorfunction(zerogpu.race)
    short, long = (zerogpu.seconds(asdict(SETTINGS) | {"max_new_tokens": tokens}) for tokens in (16, 2000))
    more = zerogpu.seconds(asdict(SETTINGS) | {"max_new_tokens": 1000, "methods": ("backbone",) * 6})
    assert zerogpu.START_S <= short < long < more <= zerogpu.MOST_S
    assert zerogpu.seconds(asdict(SETTINGS) | {"max_new_tokens": 10**6}) == zerogpu.MOST_S


def test_the_model_is_placed_without_what_a_gpu_that_is_not_there_cannot_do(lent):
    assert lent.asked["river_kernel"] == "dequantised" and lent.asked["compiled"] is False and lent.asked["dtype"] == "bf16"
    assert "for one race at a time" in lent.notes[-1] and "CUDA graphs" in lent.notes[-1]


def test_the_events_are_those_of_the_engine_and_both_sides_can_be_pickled(lent, tiny):
    settings = pickle.loads(pickle.dumps(asdict(SETTINGS)))
    events = list(zerogpu.compare(lent, stop=lambda: False, **settings))
    plain = list(river_core.compare(tiny, **settings))
    assert [event["type"] for event in events].count("token") == [event["type"] for event in plain].count("token") > 0
    for lane in SETTINGS.methods:
        texts = [[event["id"] for event in run if event["type"] == "token" and event["lane"] == lane] for run in (events, plain)]
        assert texts[0] == texts[1]
    assert events[-1]["reason"] == "finished"
    assert [pickle.loads(pickle.dumps(event)) for event in events] == events


def test_stop_closes_the_generator(lent, monkeypatch):
    closed = []

    def watched(model, **settings):
        try:
            yield from river_core.compare(model, **settings)
        finally:
            closed.append(True)

    monkeypatch.setattr(zerogpu, "_compare", watched)
    seen = []
    for event in zerogpu.compare(lent, stop=lambda: sum(one["type"] == "token" for one in seen) >= 2, **asdict(SETTINGS)):
        seen.append(event)
    assert sum(event["type"] == "token" for event in seen) == 2
    assert seen[-1] == {"type": "done", "reason": "stop"} and closed == [True]


def test_a_refusal_of_the_engine_keeps_its_sentence(lent):
    with pytest.raises(InputError, match="There is no method"):
        list(zerogpu.compare(lent, stop=lambda: False, **(asdict(SETTINGS) | {"methods": ("rivr",)})))


def test_a_refusal_of_zerogpu_keeps_its_words(lent, monkeypatch):
    def refused(settings):
        raise gr.Error("You have exceeded your quota (<a href='x'>log in</a>)")
        yield

    monkeypatch.setattr(zerogpu, "race", refused)
    with pytest.raises(RiverError, match=r"exceeded your quota \(log in\)"):
        list(zerogpu.compare(lent, stop=lambda: False, **asdict(SETTINGS)))


def test_the_page_runs_over_it_and_a_sweep_is_refused_in_a_sentence(lent):
    """Through the page's own line: what it needs to know of the model is there, and its tensors are not to be had."""
    assert describe(lent)
    host = ModelHost(lambda progress: lent)
    runs = Runs(host, zerogpu.compare).open()
    run = runs.start("visitor", SETTINGS)
    wait_for(run)
    assert run.state == "done" and json.loads(run.message(0, None)[0])["events"][-1]["reason"] == "finished"

    def sweep(model, stop):
        from river_core.measure.sweep import sweep

        yield from sweep(model, "Hello", ("river",), [0.9], max_new_tokens=2, repeats=1, chat=False, stop=stop)

    refused = runs.start("visitor", None, job=sweep)
    wait_for(refused)
    assert refused.state == "failed" and "ZeroGPU" in refused.ending


def wait_for(run, within: float = 60):
    deadline = time.monotonic() + within
    while not run.final:
        assert time.monotonic() < deadline
        time.sleep(0.01)
