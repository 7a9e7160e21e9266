"""From a recording to a run of one's own: the same comparison, whatever lanes it has."""

from __future__ import annotations

import json

import pytest

import river_core
from app.own import controls_of
from app.recordings import read_recordings
from app.settings import read_settings
from app.ui import LANES
from river_core.methods import parse_methods

BOXES = [value for _, value in LANES]


def settings_of(header: dict):
    told = controls_of(header, BOXES)
    assert set(told["lanes"]) <= set(BOXES)
    values = told["prompt"], told["chat"], [box for box in BOXES if box in told["lanes"]], told["tau"], told["max_tokens"]
    return read_settings(*values, 0, 0, 1, 0, "full", "race", told["mode"], told["more"])


def lanes_of(header: dict) -> set:
    return {json.dumps([lane["method"], lane["rule"], lane["options"]], sort_keys=True) for lane in header["lanes"]}


@pytest.mark.parametrize("slug", list(read_recordings()))
def test_every_recording_can_be_run_again_as_it_was(slug, tiny):
    header = json.loads(read_recordings()[slug].text)["header"]
    settings = settings_of(header)
    assert (settings.prompt, settings.mode, settings.max_new_tokens) == (header["prompt"], header["mode"], header["max_new_tokens"])
    told = {json.dumps([one.method, one.rule, one.options], sort_keys=True) for one in parse_methods(settings.methods, settings.tau, tiny)}
    leads = header["mode"] == "same-exits"  # lanes that follow say so in the trace; which they are follows from the mode
    assert {text for text in lanes_of(header) if not (leads and '"follow"' in text)} <= told
    assert len(settings.methods) == len(header["lanes"])


def test_lanes_of_every_kind_are_written_out(tiny):
    names = ("backbone", "river:0.9", "river:0.95+floor=2", "masking@fixed:2", "masking@maxprob:0.7", "recompute+cap=3", "int4")
    header = next(iter(river_core.compare(tiny, "a b", names, max_new_tokens=2)))["header"]
    settings = settings_of(header)
    again = next(iter(river_core.compare(tiny, "a b", settings.methods, tau=settings.tau, max_new_tokens=2)))["header"]
    assert lanes_of(again) == lanes_of(header)
