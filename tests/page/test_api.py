"""The endpoint for programs, and what one client or visitor can do to another: on a tiny model, over HTTP, without the page's script."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

import river_core
from app.limits import Limits
from app.model_host import ModelHost
from app.runs import Runs
from app.ui import build, launch_options
from river_core import Trace
from tests.page.server import Page
from tests.page.test_page import Visitor

SLOW_S = 0.01


def slow(model, *args, **options):
    """The engine, on a machine on which each token takes at least 10 ms: runs last long enough to be looked at."""
    for event in river_core.compare(model, *args, **options):
        if event["type"] == "token":
            time.sleep(SLOW_S)
        yield event


def served(tiny, compare, **limits) -> Page:
    host = ModelHost(lambda progress: tiny)
    runs = Runs(host, compare, limits=Limits(**limits)).open()
    demo = build(host, runs)
    _, url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options(runs.limits))
    return Page(url.rstrip("/"), host, runs, demo)


@pytest.fixture(scope="module")
def page(tiny):
    page = served(tiny, slow, grace=1.0, calls=12, seconds=60)
    yield page
    page.demo.close()


@pytest.fixture(autouse=True)
def idle(page):
    yield
    page.wait_idle(within=10)


def client(page) -> Client:
    return Client(page.url, analytics_enabled=False, verbose=False)


def until(condition, within: float = 20) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_batch_of_one_client_gets_every_trace_whole_and_in_turn(page):
    one = client(page)
    jobs = [one.submit(f"Prompt {at}", "backbone,river", max_tokens=4, api_name="/trace") for at in range(10)]
    traces = [Trace.from_dict(job.result(timeout=60)) for job in jobs]
    assert [trace.header["prompt"] for trace in traces] == [f"Prompt {at}" for at in range(10)]
    assert all(trace.done["reason"] == "finished" for trace in traces)
    assert all(lane.end["reason"] in ("length", "eos") for trace in traces for lane in trace.lanes.values())


def test_too_many_calls_of_one_address_are_refused_in_a_sentence_and_the_others_are_whole(page):
    one = client(page)
    jobs = [one.submit("Hello", "river", max_tokens=8, api_name="/trace") for _ in range(16)]
    answers = []
    for job in jobs:
        try:
            answers.append(Trace.from_dict(job.result(timeout=60)).done["reason"])
        except AppError as error:
            assert "calls from your address are not over yet" in str(error)
    assert len(answers) >= 12 and set(answers) == {"finished"}


def test_two_clients_at_once_each_get_their_own(page):
    a, b = client(page), client(page)
    jobs = [
        (name, who.submit(f"I am {name} {at}", "river", max_tokens=6, api_name="/trace"))
        for at in range(3)
        for name, who in (("a", a), ("b", b))
    ]
    got = [(name, job.result(timeout=60)["header"]["prompt"]) for name, job in jobs]
    assert got == [(name, f"I am {name} {at}") for at in range(3) for name in "ab"]


def test_a_call_tells_about_once_a_second_how_it_stands(page):
    *beats, last = client(page).submit("Hello", "backbone", max_tokens=220, api_name="/trace")
    assert len(beats) >= 2
    assert all(set(beat) == {"state", "tokens", "place", "waiting"} for beat in beats)
    tokens = [beat["tokens"] for beat in beats]
    assert tokens == sorted(tokens) and tokens[-1] > 0
    assert Trace.from_dict(last).done["reason"] == "finished"


def test_every_option_of_the_page_is_taken(page):
    options = dict(max_tokens=5, temperature=0.9, seed=7, chat=False, prefill="sequence", top_k=12, top_p=0.8, timing="sequential")
    data = client(page).predict("Hello", "river:0.5,backbone", api_name="/trace", **options)
    header = data["header"]
    assert header["chat"] is False and header["prefill"] == "sequence" and header["seed"] == 7 and header["timing"]["mode"] == "sequential"
    assert header["sampler"]["top_k"] == 12 and header["sampler"]["top_p"] == 0.8
    visitor = Visitor(page.url)
    shown = visitor.run(
        prompt="Hello", lanes=[], more="river:0.5,backbone", tau="", max_tokens=5, temperature=0.9, seed=7, chat=False, prefill="sequence", top_k=12,
        top_p=0.8, timing="sequential",
    )[-1]  # fmt: skip
    ids = [event["id"] for event in shown["events"] if event["type"] == "token" and event["lane"] == "river"]
    assert ids == [token["id"] for token in data["lanes"][0]["tokens"]], "a run of the page can be repeated"


def raw_call(page, data: list) -> tuple[str, str]:
    """What curl gets: the kind of the last message, and its data."""
    api = f"{page.url}/gradio_api/call/trace"
    body = json.dumps({"data": data})
    event = httpx.post(api, content=body, headers={"Content-Type": "application/json"}, timeout=30).raise_for_status().json()["event_id"]
    kind = text = ""
    with httpx.stream("GET", f"{api}/{event}", timeout=60) as stream:
        for line in stream.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                text = value
    return kind, text


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, None, "prompt is empty"),
        (0, ["a"], "The prompt must be a text"),
        (0, "x" * 400_001, "at most 400,000 are read here"),
        (1, ["river"], "The list of methods must be a text"),
        (1, None, "No lane is switched on"),
        (2, "near", "Tau is"),
        (3, "many", "Max tokens is"),
        (3, None, "Max tokens is empty"),
        (3, 1e300, "Max tokens is"),
        (3, 5000, "at most 4,096 here"),
        (4, "x", "Temperature is"),
        (5, {}, "Seed is an object"),
        (6, "odd", "mode must be one of"),
        (6, 3, "Mode must be a text"),
        (7, "odd", "timing must be"),
        (8, "yes", "Chat must be true or false"),
        (9, "odd", "prefill must be"),
        (10, "Infinity", "Top-k is"),
        (11, [], "Top-p is a list"),
    ],
)
def test_arguments_of_the_wrong_kind_get_a_sentence_and_nothing_is_logged(page, caplog, capfd, at, value, words):
    data = ["Hello", "river", 0.5, 4, 0, 0, "free", "race", True, "full", 0, 1]
    data[at] = value
    kind, text = raw_call(page, data)
    assert kind == "error"
    assert words in text.encode().decode("unicode-escape") or words in text
    assert "Traceback" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_number_that_json_lacks_gets_no_traceback(page, capfd):
    api = f"{page.url}/gradio_api/call/trace"
    body = '{"data": ["Hello", "river", 0.5, Infinity, 0, 0, "free", "race", true, "full", 0, 1]}'
    answer = httpx.post(api, content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert answer.status_code < 500
    assert "Traceback" not in capfd.readouterr().err


def drop(url: str, path: str, after: float) -> None:
    """A client that opens a stream, reads for a while, and is gone: no heartbeat, no goodbye."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: text/event-stream\r\n\r\n".encode())
        end = time.monotonic() + after
        raw.settimeout(0.2)
        while time.monotonic() < end:
            try:
                raw.recv(65536)
            except TimeoutError:
                continue


def long_call(page) -> str:
    data = ["Count", "backbone,river,int4", 0.5, 220, 0, 0, "free", "race", True, "full", 0, 1]
    return httpx.post(f"{page.url}/gradio_api/call/trace", json={"data": data}, timeout=30).json()["event_id"]


def test_a_raw_client_that_drops_its_connection_frees_the_engine(page):
    event = long_call(page)
    until(lambda: page.runs._current is not None and page.runs._current.tokens > 3)
    drop(page.url, f"/gradio_api/call/trace/{event}", 0.3)
    assert page.wait_idle(within=4) < 4


def test_a_raw_client_that_leaves_while_it_waits_leaves_the_line(page):
    busy, waiting = long_call(page), long_call(page)
    until(lambda: len(page.runs._line) == 2)
    drop(page.url, f"/gradio_api/call/trace/{waiting}", 0.2)
    until(lambda: len(page.runs._line) == 1, within=5)
    drop(page.url, f"/gradio_api/call/trace/{busy}", 0.1)


def test_a_call_that_runs_out_of_time_is_an_error_not_half_a_trace(tiny):
    page = served(tiny, slow, seconds=0.5)
    try:
        with pytest.raises(AppError, match="after 0.5 seconds"):
            client(page).predict("Hello", "backbone,river", max_tokens=220, api_name="/trace")
        visitor = Visitor(page.url)
        last = visitor.run(prompt="Hello", lanes=["backbone", "river"], max_tokens=220)[-1]
        assert last["state"] == "done" and "most that one run may take here" in last["message"]
        assert last["events"][-1]["reason"] == "stop"
    finally:
        page.demo.close()


# One visitor and another


def ask_as(page, session: str, name: str, data):
    channel = next(block for block in page.demo.blocks.values() if getattr(block, "elem_id", None) == "stage")
    body = {"component_id": channel._id, "fn_name": name, "data": data, "session_hash": session}
    return httpx.post(f"{page.url}/gradio_api/component_server", json=body, timeout=30).raise_for_status().json()


def test_no_other_session_can_read_or_stop_a_run(page):
    mine, other = Visitor(page.url), Visitor(page.url)
    mine.join(prompt="My secret", lanes=["river"], max_tokens=150)
    messages = mine.messages()
    first = next(message for message in messages if message["events"])
    for guess in ("", first["run_id"][:-1], first["run_id"].swapcase(), mine.session, secrets.token_urlsafe(16)):
        assert ask_as(page, other.session, "snapshot", guess) is None
        assert ask_as(page, mine.session, "snapshot", guess) is None
        assert "error" in ask_as(page, other.session, "download", {"id": guess, "kind": "json"})
    other.stop()
    body = {"data": [secrets.token_urlsafe(16)], "fn_index": other.endpoints["stop_followed"], "session_hash": other.session}
    other.http.post(f"{other.api}/run/predict", json=body).raise_for_status()
    other.http.close()
    *_, last = messages
    ids = [event["i"] for event in last["events"] if event["type"] == "token"]
    assert last["state"] == "done" and last["events"][-1]["reason"] == "finished"
    assert ids == list(range(len(ids)))


def test_a_second_tab_neither_empties_nor_cuts_the_first(page):
    first, second = Visitor(page.url), Visitor(page.url)
    first.join(prompt="First", lanes=["river"], max_tokens=60)
    messages = first.messages()
    started = next(message for message in messages if message["events"])
    second.join(prompt="Second", lanes=["river"], max_tokens=10)
    follower = second.messages()
    seen = ask_as(page, second.session, "snapshot", started["run_id"])  # a duplicated tab follows the run of the tab it was made from
    assert json.loads(seen)["run_id"] == started["run_id"]
    *_, last = messages
    *_, other = follower
    prompts = [event["header"]["prompt"] for message in (last, other) for event in message["events"] if event["type"] == "run"]
    assert prompts == ["First", "Second"]
    assert {message["events"][-1]["reason"] for message in (last, other)} == {"finished"}


def test_after_a_reload_the_run_is_found_goes_on_and_can_be_stopped(page):
    before, after = Visitor(page.url), Visitor(page.url)
    before.join(prompt="Count", lanes=["backbone", "river", "int4", "masking", "recompute"], max_tokens=220)
    messages = before.messages()
    run_id = next(message for message in messages if message["events"])["run_id"]
    messages.close()
    before.http.close()
    start = time.monotonic()
    while time.monotonic() - start < 1.5 * page.runs.limits.grace:
        time.sleep(0.1)
        message = json.loads(ask_as(page, after.session, "snapshot", run_id))
        assert message["state"] == "running", (message["message"], message["events"][-1], len(message["events"]))
    body = {"data": [run_id], "fn_index": after.endpoints["stop_followed"], "session_hash": after.session}
    after.http.post(f"{after.api}/run/predict", json=body).raise_for_status()
    page.wait_idle(within=3)
    assert json.loads(ask_as(page, after.session, "snapshot", run_id))["state"] == "done"


def test_questions_about_tables_do_not_fill_the_queue_of_runs(page):
    config = httpx.get(f"{page.url}/config").json()
    panel = next(part["id"] for part in config["components"] if part["props"].get("elem_id") == "analysis")
    table = next(one for one in config["dependencies"] if [panel, "tokens"] in [list(target) for target in one["targets"]])
    assert table["queue"] is False
    visitor = Visitor(page.url)
    assert visitor.run(prompt="Hello", lanes=["river"], max_tokens=3)[-1]["state"] == "done"
