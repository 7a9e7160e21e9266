"""The command that measures what watching costs, once through on the tiny model."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from app import cost
from tests.page.server import serve


@pytest.fixture(scope="module")
def tiny_server(tiny):
    page = serve(lambda progress: tiny)
    yield page
    page.demo.close()


def test_runs_with_and_without_a_browser_are_measured_in_turn_and_reported(chromium, tiny_server):
    result = cost.measure(tiny_server.url, chromium, tokens=8, repeats=2)
    assert [len(result[name]) for name in ("unwatched", "watched", "ratio")] == [2, 2, 2]
    assert all(value > 0 for name in ("unwatched", "watched", "ratio") for value in result[name])
    assert all(len(values) == 2 and min(values) > 0 for values in result["page"].values())
    words = cost.report(result)
    for expected in ("without a browser", "with a browser", "with / without", "script", "2 repeats"):
        assert expected in words


def test_without_a_browser_there_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(cost.shutil, "which", lambda name: None)
    assert cost.main(["--tokens", "4", "--repeats", "1"]) == 1
    assert ("No Chromium" if find_spec("playwright") else "playwright") in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--tokens", "1"], ["--repeats", "0"]])
def test_too_few_tokens_or_repeats_are_refused(arguments):
    with pytest.raises(SystemExit):
        cost.main(arguments)
