"""The replay: one file, nothing to fetch, and nothing in it that a trace's text could turn into markup."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import river_core
from app.export import file_stem, main, replay
from river_core import Trace

HOSTILE = "</script><script>window.pwned=1</script><!-- ${x} {{y}} <img src=x onerror=window.pwned=2>"


class Outline(HTMLParser):
    """The elements of a page with their attributes, and the text inside scripts."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script" and len(self.scripts) < self.count("script"):
            self.scripts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture(scope="module")
def trace(tiny) -> Trace:
    trace = Trace.from_events(river_core.compare(tiny, HOSTILE, ("backbone", "river"), max_new_tokens=5))
    trace.header["recording"] = {"slug": "x</title>", "title": HOSTILE, "idea": HOSTILE, "headline": "river", "command": ""}
    return trace


def test_a_replay_holds_the_trace_and_two_scripts_of_ours_whatever_its_text(trace):
    outline = Outline(replay(trace))
    assert outline.count("script") == 2
    assert outline.count("img") == 0
    assert json.loads(outline.scripts[0]) == trace.to_dict()


def test_a_replay_may_fetch_nothing_and_run_only_its_own_script(trace):
    page = replay(trace)
    outline = Outline(page)
    policy = next(attributes["content"] for tag, attributes in outline.elements if "http-equiv" in attributes)
    digest = base64.b64encode(hashlib.sha256(outline.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}';" in policy
    assert "unsafe-eval" not in policy and "http" not in policy
    assert not [attributes for _, attributes in outline.elements if {"src", "href"} & set(attributes)]
    assert not [name for _, attributes in outline.elements for name in attributes if name.startswith("on")]


def test_file_names_come_from_the_trace_but_are_only_letters_digits_and_hyphens(trace):
    assert file_stem(trace) == "river-x-title"
    plain = Trace(trace.header | {"recording": None, "created": "2026-12-01T05:17:57+00:00"}, trace.lanes)
    assert file_stem(plain) == "river-2026-12-01T05-17-57"
    assert file_stem(Trace(trace.header | {"recording": {"slug": "../../.."}}, trace.lanes)) == "river-trace"


def test_the_command_writes_the_same_file(trace, tmp_path):
    trace.save(tmp_path / "run.json.gz")
    arguments = [sys.executable, "-m", "app.export", str(tmp_path / "run.json.gz"), str(tmp_path / "run.html")]
    subprocess.run(arguments, check=True, timeout=120)
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == replay(trace)


def test_the_command_says_in_a_sentence_what_it_cannot_do(tmp_path, capsys):
    (tmp_path / "bad.json").write_text('{"trace_version": 7}')
    assert main([str(tmp_path / "bad.json"), str(tmp_path / "out.html")]) == 1
    assert "version '7'" in capsys.readouterr().err
    assert main([str(tmp_path / "missing.json"), str(tmp_path / "out.html")]) == 1
    assert main([]) == 2
    assert list(tmp_path.glob("*.html")) == []
