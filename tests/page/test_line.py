"""The line before the engine, while the model loads or after it failed to."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest

import river_core
from app.limits import Limits
from app.model_host import ModelHost
from app.runs import CALL, Runs
from app.settings import Settings
from river_core.errors import LoadError
from tests import aside

SETTINGS = Settings("Hello", True, ("river",), None, 4, 0.0, 0, 1.0, 0, "full", "race")


@pytest.fixture
def loading():
    """Runs before a model that never comes: its loading lasts until `fail` is set, and then fails."""
    fail = threading.Event()

    def load(progress):
        progress("weights", 0.4, "reading weights")
        fail.wait(10)
        raise LoadError("There is no such model; give a folder, a hub id or a .gguf file.")

    host = ModelHost(load)
    runs = Runs(host, river_core.compare, limits=Limits(line=3)).open()
    yield host, runs, fail
    fail.set()


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_progress_of_the_model_is_told_in_words(loading):
    host, _, _ = loading
    until(lambda: host.status()["fraction"] == 0.4)
    assert host.status() == {"state": "loading", "text": "reading weights", "fraction": 0.4}


def test_a_run_before_the_model_waits_and_can_leave_at_once(loading):
    _, runs, _ = loading
    run = runs.start("visitor", SETTINGS)
    assert run.state == "waiting"
    assert runs.place(run) is None
    runs.stop_session("visitor")
    assert run.final
    assert not runs.busy


def test_places_follow_the_line_and_a_new_run_replaces_the_visitors_old_one(loading):
    _, runs, _ = loading
    first, second = runs.start("a", SETTINGS), runs.start("b", SETTINGS)
    assert runs.place(second)["place"] == 2
    again = runs.start("a", SETTINGS)
    assert first.final
    assert runs.place(second) is None
    assert runs.place(again)["place"] == 2


def test_a_full_line_refuses_with_a_sentence(loading):
    _, runs, _ = loading
    for visitor in range(4):
        assert not runs.start(f"visitor {visitor}", SETTINGS).final
    late = runs.start("late", SETTINGS)
    assert late.state == "failed"
    assert "try again" in json.loads(late.message(0, None)[0])["message"]


def test_a_model_that_fails_to_load_fails_the_runs_with_its_sentence(loading):
    host, runs, fail = loading
    run = runs.start("visitor", SETTINGS)
    fail.set()
    until(lambda: run.final)
    assert host.status()["state"] == "failed"
    assert "no such model" in json.loads(run.message(0, None)[0])["message"]
    until(lambda: not runs.busy)


def sentence(run) -> str:
    assert run.state == "failed"
    return run.ending


def job(model, stop):
    while not stop():
        time.sleep(0.005)
        yield {"type": "progress"}


def once(model, stop):
    yield {"type": "progress"}


def ready(model=None, **limits) -> Runs:
    """Runs over a model that is there at once; their jobs do not look at it."""
    return Runs(
        ModelHost(lambda progress: model), lambda model, stop, **options: job(model, stop), limits=Limits(**limits), recordings={}
    ).open()


@pytest.fixture
def host_of_nothing():
    class Nothing:
        name = "nothing"

        def describe(self):
            return {}

    return Nothing()


def test_a_full_line_leaves_the_visitors_own_run_alone(host_of_nothing):
    runs = ready(host_of_nothing, line=1)
    own = runs.start("me", SETTINGS)
    until(lambda: own.state == "running")
    other = runs.start("other", SETTINGS)
    assert other.state == "queued"
    assert "waiting already" in sentence(runs.start("me", SETTINGS))
    assert own.state == "running" and not own.stop.is_set(), "there was no room for a new one, so the old one goes on"
    again = runs.start("other", SETTINGS)  # takes the place of his own
    assert again.state == "queued" and other.final
    runs.stop_session("me")
    runs.stop_session("other")
    until(lambda: not runs.busy)


def test_one_address_cannot_fill_the_line(host_of_nothing):
    runs = ready(host_of_nothing, line=10, address=2)
    first = runs.start("0", SETTINGS, address="10.0.0.1")
    until(lambda: first.state == "running")
    made = [runs.start(f"{at}", SETTINGS, address="10.0.0.1") for at in range(1, 4)]
    assert [run.state for run in made] == ["queued", "queued", "failed"]
    assert "from your address" in made[-1].ending
    assert runs.start("elsewhere", SETTINGS, address="10.0.0.2").state == "queued"
    for session in ("0", "1", "2", "elsewhere"):
        runs.stop_session(session)
    until(lambda: not runs.busy)


def test_a_sweep_and_a_live_run_of_one_visitor_do_not_stop_each_other(host_of_nothing):
    runs = ready(host_of_nothing)
    live = runs.start("me", SETTINGS)
    assert "Your live run is still going" in sentence(runs.start("me", None, job))
    assert not live.stop.is_set()
    runs.stop_session("me")
    sweep = runs.start("me", None, job)
    assert sweep.state in ("queued", "running")
    assert "Your sweep is still going" in sentence(runs.start("me", SETTINGS))
    runs.stop_session("me")
    until(lambda: not runs.busy)


def test_a_stream_that_is_abandoned_in_the_line_leaves_it(host_of_nothing):
    runs = ready(host_of_nothing, line=3)
    first = runs.start("me", SETTINGS)
    until(lambda: first.state == "running")

    async def abandon():
        for at in range(20):
            run = runs.start(f"visitor {at}", SETTINGS)
            stream = runs.stream(run)
            await anext(stream)
            await stream.aclose()
            assert run.final

    aside.run(abandon())
    assert runs.start("late", SETTINGS).state == "queued"
    runs.stop_session("late")
    runs.stop_session("me")
    until(lambda: not runs.busy)


def test_calls_of_one_client_have_one_place_in_line_and_come_in_turn(host_of_nothing):
    order = []

    def compare(model, stop, prompt, **options):
        order.append(prompt)
        yield {"type": "progress"}

    gate = threading.Event()

    def first(model, stop):
        gate.wait(10)
        yield {"type": "progress"}

    runs = Runs(ModelHost(lambda progress: host_of_nothing), compare, limits=Limits(line=3, calls=30), recordings={}).open()
    runs.start("someone", None, first)
    calls = [runs.start("program", replace(SETTINGS, prompt=f"{at}"), kind=CALL, address="a") for at in range(30)]
    assert {run.state for run in calls} == {"queued"}
    assert "30 calls from your address" in sentence(runs.start("program", SETTINGS, kind=CALL, address="a"))
    visitor = runs.start("visitor", replace(SETTINGS, prompt="page"))
    assert runs.place(visitor)["place"] == 3, "behind the run and one call, not behind thirty"
    calls[3].stop.set()
    runs.leave(calls[4])
    gate.set()
    until(lambda: all(run.final for run in calls) and not runs.busy)
    asked = [prompt for prompt in order if prompt != "page"]
    assert asked == [f"{at}" for at in range(30) if at not in (3, 4)]
    assert order.index("page") == 1


def test_a_run_that_reaches_its_seconds_ends_as_stop_ends_it(host_of_nothing):
    runs = ready(host_of_nothing, seconds=0.2)
    run = runs.start("me", SETTINGS)
    until(lambda: run.final)
    assert run.state == "done" and not run.whole
    assert "after 0.2 seconds, the most that one run may take here" in run.ending
    assert runs.find(run.id) is run


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), GeneratorExit()])
def test_the_engine_outlives_whatever_a_run_raises(host_of_nothing, error):
    def broken(model, stop):
        yield {"type": "progress"}
        raise error

    runs = ready(host_of_nothing)
    run = runs.start("me", None, broken)
    until(lambda: run.final)
    assert ("memory" if isinstance(error, MemoryError) else type(error).__name__) in sentence(run)
    after = runs.start("me", None, once)
    until(lambda: after.final)
    assert after.state == "done"


def test_a_model_that_failed_to_load_is_tried_again_by_a_later_run(host_of_nothing, monkeypatch):
    tries = []

    def load(progress):
        tries.append(1)
        if len(tries) == 1:
            raise LoadError("The hub did not answer.")
        return host_of_nothing

    host = ModelHost(load)
    runs = Runs(host, river_core.compare, recordings={}).open()
    until(lambda: host.status()["state"] == "failed")
    soon = runs.start("me", None, once)
    until(lambda: soon.final)
    assert "The hub did not answer." in sentence(soon) and len(tries) == 1
    monkeypatch.setattr("app.model_host.RETRY_S", 0.0)
    later = runs.start("me", None, once)
    until(lambda: later.final)
    assert later.state == "done" and len(tries) == 2
    assert host.status()["state"] == "ready"


def test_a_run_whose_page_has_gone_goes_on_while_a_reloaded_page_follows_it(host_of_nothing):
    runs = ready(host_of_nothing, grace=0.5)
    run = runs.start("before", SETTINGS)
    until(lambda: run.bytes)

    async def read_and_go():
        stream = runs.stream(run)
        await anext(stream)
        await stream.aclose()

    aside.run(read_and_go())
    runs.leave_session("before")
    assert runs.follow("guess") is None
    for _ in range(20):
        time.sleep(0.05)
        assert runs.follow(run.id) is run
    assert run.state == "running", "followed for longer than its time of grace"
    runs.stop_run("guess")
    assert not run.stop.is_set()
    start = time.monotonic()
    until(lambda: run.final)
    assert time.monotonic() - start > 0.3
    until(lambda: not runs.busy)


def test_a_followed_run_is_stopped_by_its_id(host_of_nothing):
    runs = ready(host_of_nothing)
    run = runs.start("before", SETTINGS)
    until(lambda: run.bytes)
    runs.leave_session("before")
    runs.stop_run(run.id)
    until(lambda: run.final and not runs.busy)
