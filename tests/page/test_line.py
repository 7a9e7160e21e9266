"""The line before the engine, while the model loads or after it failed to."""

from __future__ import annotations

import json
import threading
import time

import pytest

import river_core
from app.limits import Limits
from app.model_host import ModelHost
from app.runs import Runs
from app.settings import Settings
from river_core.errors import LoadError

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
