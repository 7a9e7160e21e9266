"""Recordings, opened files and downloads, on a page whose model never comes: none of this waits for one."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import logging
import shutil
import time

import pytest

import river_core
from app.limits import Limits
from app.model_host import ModelHost
from app.recordings import FOLDER, read_recordings
from app.runs import Runs
from river_core import Trace, TraceError
from tests.page.server import never, serve


@pytest.fixture(scope="module")
def page():
    served = serve(never)
    yield served
    served.demo.close()


@pytest.fixture(scope="module")
def trace(tiny) -> Trace:
    """A real run of the tiny model, with a prompt that tries to be markup."""
    prompt = "</script><script>alert(1)</script> ${x} {{y}}"
    return Trace.from_events(river_core.compare(tiny, prompt, ("backbone", "river", "masking", "recompute"), max_new_tokens=6))


@pytest.fixture(scope="module")
def packed(trace) -> bytes:
    return gzip.compress(json.dumps(trace.to_dict()).encode(), mtime=0)


@pytest.fixture
def runs():
    return Runs(ModelHost(never), river_core.compare)


def test_every_bundled_recording_is_a_whole_trace_in_teaching_order():
    recordings = read_recordings()
    assert len(recordings) >= 5
    assert [path.name.split("-", 1)[1] for path in sorted(FOLDER.glob("*.json.gz"))] == [f"{slug}.json.gz" for slug in recordings]
    for slug, recording in recordings.items():
        trace = Trace.from_bytes(recording.text.encode())
        assert trace.header["recording"]["slug"] == slug
        assert recording.title and recording.idea and recording.created and recording.model and recording.device
        assert "backbone" in trace.lanes and len(trace.lanes) >= 2
        assert all(lane.tokens and lane.end for lane in trace.lanes.values())


@pytest.mark.parametrize("damage", ["half", "text", "json", "no description", "lanes", "twin"])
def test_a_damaged_recording_is_left_out_and_said_so(tmp_path, caplog, damage):
    good, other = sorted(FOLDER.glob("*.json.gz"))[:2]
    shutil.copy(good, tmp_path / "01-good.json.gz")
    raw = other.read_bytes()
    data = json.loads(gzip.decompress(raw))
    if damage == "half":
        raw = raw[: len(raw) // 2]
    elif damage == "text":
        raw = b"not gzipped"
    elif damage == "json":
        raw = gzip.compress(b"[1, 2")
    elif damage == "no description":
        del data["header"]["recording"]["idea"]
        raw = gzip.compress(json.dumps(data).encode())
    elif damage == "lanes":
        data["lanes"].pop()
        raw = gzip.compress(json.dumps(data).encode())
    else:
        raw = good.read_bytes()
    (tmp_path / "02-bad.json.gz").write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert len(read_recordings(tmp_path)) == 1
    assert "02-bad.json.gz is left out" in caplog.text


def test_without_recordings_the_page_has_an_empty_list(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert read_recordings(tmp_path / "missing") == {}
    assert "no recordings" in caplog.text


def test_the_page_delivers_recordings_while_the_model_loads(page):
    listed = page.ask("recordings")
    assert [entry["slug"] for entry in listed] == list(page.runs.recordings)
    assert set(listed[0]) == {"slug", "title", "idea", "created", "model", "device"}
    assert page.host.loading
    first = json.loads(page.ask("recording", ""))
    assert first == json.loads(page.ask("recording", listed[0]["slug"]))
    assert first["header"]["recording"]["slug"] == listed[0]["slug"]
    assert page.ask("recording", "../../etc/passwd") is None
    assert page.runs.trace(f"recording:{listed[1]['slug']}").header["recording"]["slug"] == listed[1]["slug"]
    assert page.runs.trace("recording:none") is None


def test_an_opened_file_comes_back_as_the_same_trace_under_an_id_of_its_own(page, packed, trace):
    file = {"name": "mine.json.gz", "data": base64.b64encode(packed).decode()}
    first, second = page.ask("open_trace", file), page.ask("open_trace", file)
    assert json.loads(first["trace"]) == trace.to_dict()
    assert first["id"] != second["id"] and len(first["id"]) >= 20
    assert page.runs.trace(first["id"]).to_dict() == trace.to_dict()
    for kind in ("json", "csv", "html"):
        saved = page.ask("download", {"id": first["id"], "kind": kind})
        assert saved["name"].startswith("river-") and saved["name"].endswith(f".{kind}")
        assert saved["text"]
    assert page.ask("download", {"id": first["id"], "kind": "exe"})["error"]
    assert page.ask("download", None)["error"]


def test_the_token_table_has_a_row_for_every_token(page, packed, trace):
    opened = page.ask("open_trace", {"name": "mine.json.gz", "data": base64.b64encode(packed).decode()})
    saved = page.ask("download", {"id": opened["id"], "kind": "csv"})
    rows = list(csv.DictReader(io.StringIO(saved["text"])))
    assert len(rows) == sum(len(lane.tokens) for lane in trace.lanes.values())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("%%%", "did not arrive whole"),
        ("é", "did not arrive whole"),
        (None, "did not arrive whole"),
        (base64.b64encode(b"hello").decode(), "not a trace"),
        (base64.b64encode(b"[]").decode(), "not a trace"),
        (base64.b64encode(gzip.compress(b"{}")[:-9]).decode(), "damaged"),
        (base64.b64encode(b'{"trace_version": 99}').decode(), "version '99'; this program reads version 1"),
        (base64.b64encode(b"[" * 100_000).decode(), "not a trace"),
    ],
)
def test_a_file_that_is_no_trace_gets_one_sentence(page, data, words):
    answer = page.ask("open_trace", {"name": "x.json", "data": data})
    assert words in answer["error"]
    assert "Traceback" not in answer["error"]


def test_a_damaged_trace_names_the_place(page, trace):
    data = trace.to_dict()
    data["lanes"][1]["tokens"][3] = data["lanes"][1]["tokens"][3] | {"kv": "none"}
    answer = page.ask("open_trace", {"name": "x.json", "data": base64.b64encode(json.dumps(data).encode()).decode()})
    assert "token 3 of lane 'river'" in answer["error"]


def test_numbers_that_json_does_not_have_are_refused(runs, trace):
    text = json.dumps(trace.to_dict()).replace('"max_new_tokens": 6', '"max_new_tokens": 6, "odd": NaN', 1)
    with pytest.raises(TraceError):
        runs.open_file(text.encode())


def test_a_bomb_and_a_file_that_is_too_large_are_refused_without_being_unpacked(runs):
    bomb = gzip.compress(b" " * (Limits().unpacked + 1), mtime=0)
    assert len(bomb) < 100_000
    with pytest.raises(TraceError, match="unpacks to more than"):
        runs.open_file(bomb)
    with pytest.raises(TraceError, match="larger than 8 MB"):
        runs.open_file(b"x" * (Limits().sent + 1))


def test_opened_files_are_bounded_by_bytes_and_do_not_last(trace, packed):
    runs = Runs(ModelHost(never), river_core.compare, limits=Limits(kept=3 * len(packed) + 100))
    ids = [runs.open_file(packed)[0] for _ in range(4)]
    assert [runs.trace(file_id) is not None for file_id in ids] == [False, True, True, True]
    runs.trace(ids[1])  # what is used stays
    runs.open_file(packed)
    assert [runs.trace(file_id) is not None for file_id in ids] == [False, True, False, True]
    short = Runs(ModelHost(never), river_core.compare, limits=Limits(seconds_kept=0.05))
    old, _ = short.open_file(packed)
    assert short.trace(old)
    time.sleep(0.06)
    assert short.trace(old) is None and short.shelf.size == 0
