"""The bounds on a visitor: set in one place, told by --help, and each of them answers with a sentence."""

from __future__ import annotations

import json
from dataclasses import fields

import httpx
import pytest

import app as package
from app.limits import Limits, defaults
from app.settings import SettingsError, read_settings
from tests.page.server import never, serve

VALUES = {
    "prompt": "Hello",
    "chat": True,
    "lanes": ["river"],
    "tau": "",
    "max_tokens": 8,
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "seed": 0,
    "prefill": "full",
    "timing": "race",
    "mode": "free",
    "more": "",
}


@pytest.fixture
def command():
    """The command line of app.py, which is a script beside a package of the same name."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("app_script", Path(package.__file__).parent.parent / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_tells_every_limit_with_its_value_and_every_flag_sets_it(command, capsys, monkeypatch):
    from app.limits import from_flags

    monkeypatch.delenv("SPACE_ID", raising=False)
    with pytest.raises(SystemExit):
        command.parse(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert from_flags(command.parse([])) == Limits()
    for one in fields(Limits):
        unit = one.metadata["unit"]
        assert one.metadata["flag"] in told
        assert f"{one.default / unit:,.0f}" in told
        set_to = from_flags(command.parse([one.metadata["flag"], "7"]))
        assert getattr(set_to, one.name) == 7 * unit
    monkeypatch.setenv("SPACE_ID", "someone/river")
    small = from_flags(command.parse([]))
    assert small == defaults() and small.tokens < Limits().tokens and small.seconds < Limits().seconds


@pytest.mark.parametrize("text", ["0", "-3", "many", "nan", "1e30"])
def test_a_limit_that_is_none_is_refused(command, capsys, text):
    with pytest.raises(SystemExit) as end:
        command.parse(["--most-tokens", text])
    assert end.value.code == 2
    assert "not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "x" * 101}, "101 characters, and at most 100"),
        ({"max_tokens": 51}, "at most 50 here"),
        ({"more": "river," * 9}, "at most 3 run side by side"),
        ({"max_tokens": "many"}, "Max tokens is “many”"),
        ({"max_tokens": float("inf")}, "Max tokens is “inf”"),
        ({"max_tokens": 2.5}, "not a whole number"),
        ({"max_tokens": True}, "Max tokens is “True”"),
        ({"max_tokens": [1]}, "Max tokens is a list"),
        ({"temperature": "x"}, "Temperature is “x”"),
        ({"temperature": {}}, "Temperature is an object"),
        ({"top_k": "1e999"}, "Top-k is"),
        ({"top_p": None, "seed": "x"}, "Seed is"),
        ({"tau": ["a"]}, "Tau is a list"),
        ({"tau": True}, "Tau is “True”"),
        ({"prompt": ["a"]}, "The prompt must be a text"),
        ({"prompt": None}, "prompt is empty"),
        ({"more": ["river"]}, "list of methods must be a text"),
        ({"chat": "yes"}, "Chat must be true or false"),
        ({"mode": 3}, "Mode must be a text"),
        ({"timing": []}, "Timing must be a text"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_sentence(change, words):
    limits = Limits(prompt=100, tokens=50, lanes=3)
    read_settings(**VALUES, limits=limits)
    with pytest.raises(SettingsError) as error:
        read_settings(**VALUES | change, limits=limits)
    assert words in str(error.value)


@pytest.fixture(scope="module")
def page():
    served = serve(never)
    yield served
    served.demo.close()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["component_server", "queue/join", "call/trace"])
def test_a_body_that_is_too_long_is_not_read(page, path, chunked):
    most = page.runs.limits.body
    piece = b"x" * (1 << 20)

    def pieces():
        yield b'{"data": ["'
        for _ in range(most // len(piece) + 1):
            yield piece
        yield b'"]}'

    content = pieces() if chunked else b"".join(pieces())
    answer = httpx.post(f"{page.url}/gradio_api/{path}", content=content, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == 413
    assert "larger than" in answer.json()["detail"]


def test_a_body_that_fits_is_read(page):
    text = "x" * (4 << 20)
    answer = page.ask("open_trace", {"name": "x", "data": text})
    assert "not a trace" in answer["error"] or "did not arrive" in answer["error"]


@pytest.mark.parametrize("wanted", [None, 3, "x", [], {}, {"id": {}}, {"id": "x", "kind": []}, {"id": "x", "kind": "csv", "columns": "x"}])
def test_questions_of_the_wrong_kind_are_answered_in_a_sentence(page, wanted, caplog):
    for name in ("download", "open_trace"):
        assert page.ask(name, wanted)["error"]
    assert page.ask("snapshot", wanted) is None
    page.ask("recording", wanted)
    panel = next(block for block in page.demo.blocks.values() if getattr(block, "elem_id", None) == "analysis")
    for name in ("charts", "table_csv", "compare_with", "saved_result"):
        body = {"component_id": panel._id, "fn_name": name, "data": wanted, "session_hash": "test"}
        answer = httpx.post(f"{page.url}/gradio_api/component_server", json=body, timeout=30)
        assert answer.status_code == 200, name
        assert answer.json()["error"], name
    assert not [record for record in caplog.records if record.exc_info], json.dumps(wanted)
