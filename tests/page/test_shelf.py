"""What is kept, for how long, and how much of it: runs and files by their secret ids."""

from __future__ import annotations

import json
import threading
import time

import pytest

import river_core
from app.limits import Limits
from app.model_host import ModelHost
from app.runs import Run, Runs
from app.settings import Settings
from app.shelf import Shelf
from river_core import Trace
from tests.page.server import never

SETTINGS = Settings("Hello", True, ("backbone", "river"), 0.5, 6, 0.0, 0, 1.0, 0, "full", "race")


def started(tiny, **limits) -> Runs:
    host = ModelHost(lambda progress: tiny)
    return Runs(host, river_core.compare, limits=Limits(**limits)).open()


def finish(run: Run) -> Run:
    deadline = time.monotonic() + 30
    while not run.final:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return run


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_run_is_kept_from_its_end_not_from_its_beginning(tiny):
    gate = threading.Event()

    def compare(model, *args, **options):
        gate.wait(20)
        yield from river_core.compare(model, *args, **options)

    runs = Runs(ModelHost(lambda progress: tiny), compare, limits=Limits(seconds_kept=1.5)).open()
    run = runs.start("visitor", SETTINGS)
    time.sleep(1.6)  # longer than anything is kept
    gate.set()
    finish(run)
    until(lambda: runs.trace(run.id))
    runs.start("another", SETTINGS)
    assert runs.find(run.id) is run


def test_an_idle_server_drops_what_it_has_kept_long_enough(tiny):
    runs = started(tiny, seconds_kept=0.4)
    finish(runs.start("visitor", SETTINGS))
    until(lambda: runs.shelf.size > 0)
    until(lambda: runs.shelf.size == 0)


def test_a_trace_is_parsed_once_whoever_asks(tiny):
    runs = started(tiny)
    run = finish(runs.start("visitor", SETTINGS))
    until(lambda: runs.trace(run.id))
    assert runs.trace(run.id) is runs.trace(run.id)
    recording = f"recording:{next(iter(runs.recordings))}"
    assert runs.trace(recording) is runs.trace(recording)
    raw = json.dumps(runs.trace(run.id).to_dict()).encode()
    file_id, _ = runs.open_file(raw)
    assert runs.trace(file_id) is runs.trace(file_id)


def test_the_least_recently_used_goes_first_and_all_is_bounded_by_bytes():
    shelf = Shelf(Limits(kept=1000))
    for name in "abc":
        shelf.put(name, name, 300)
    assert shelf.get("a") == "a"
    shelf.put("d", "d", 300)
    assert [shelf.get(name) for name in "abcd"] == ["a", None, "c", "d"]
    assert shelf.size <= 1000


def test_one_visitor_cannot_put_out_what_others_have():
    limits = Limits(kept=80_000)
    shelf = Shelf(limits)
    shelf.put("mine", "mine", 5000, "me", "1.1.1.1")
    for at in range(1000):
        shelf.put(f"{at}", at, 1000, "greedy", "2.2.2.2")
    assert shelf.get("mine") == "mine"
    assert shelf.size <= limits.kept_each + 5000
    for at in range(1000):  # and by many sessions of one address
        shelf.put(f"{at}", at, 1000, f"greedy {at}", "2.2.2.2")
    assert shelf.get("mine") == "mine"
    assert shelf.size <= limits.kept_address + 5000
    assert shelf.get("999") == 999, "the newest is there"


def test_a_class_of_40_finds_all_its_runs(tiny):
    runs = started(tiny)
    made = [finish(runs.start(f"visitor {at}", SETTINGS, address="10.0.0.1")) for at in range(40)]
    until(lambda: not runs.busy)
    assert all(runs.trace(run.id) for run in made)


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_traces_at_hand_are_bounded_by_bytes(size):
    shelf = Shelf(Limits(parsed=1000))
    trace = Trace({}, {})
    assert shelf.parsed("x", size, lambda: trace) is trace
    again = shelf.parsed("x", size, lambda: Trace({}, {}))
    assert (again is trace) == (size == 10)


def test_files_wait_for_each_other_and_say_so_when_it_takes_too_long(monkeypatch):
    monkeypatch.setattr("app.runs.OPENING_S", 0.05)
    runs = Runs(ModelHost(never), river_core.compare)
    with runs._opening, pytest.raises(river_core.TraceError, match="still being opened"):
        runs.open_file(b"{}")
    with pytest.raises(river_core.TraceError, match="version"):
        runs.open_file(b"{}")
