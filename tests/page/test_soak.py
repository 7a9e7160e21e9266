"""The soak in its short form: the same visitors on a real server, fewer of them. `python -m tests.soak` is the long one."""

from __future__ import annotations

import pytest

from tests.files import write_folder
from tests.soak import measure


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    model = write_folder(tmp_path_factory.mktemp("soak") / "tiny")
    return measure(model, visitors=8, runs=40, seed=1, seconds=60, idle=2, compile_s=0, report=lambda text: None)


def test_no_run_is_lost_crossed_or_cut(result):
    assert result["runs"] == 40
    assert (result["lost"], result["crossed"], result["cut"]) == (0, 0, 0), result["problems"]
    assert result["repeated"] >= 5 and len(result["kinds"]) >= 5


def test_stop_and_a_closed_tab_free_the_engine(result):
    """The bound is that of a busy machine; the soak's own goal is half a second."""
    assert result["idle_after_stop_s"]["median"] < 2
    assert result["idle_after_closing_s"]["median"] < 2


def test_the_terminal_shows_no_traceback(result):
    assert not result["traceback"], result["traceback"]
