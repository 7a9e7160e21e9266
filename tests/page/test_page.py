"""The page without a browser: runs through gradio_client and through the raw event stream."""

from __future__ import annotations

import json
import secrets
import time

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from river_core import Trace

DEFAULTS = {
    "prompt": "What is 12 times 7?",
    "chat": True,
    "lanes": ["backbone", "int4", "river"],
    "tau": "",
    "max_tokens": 12,
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "seed": 0,
    "prefill": "full",
    "timing": "race",
    "mode": "free",
    "more": "",
}


class Visitor:
    """A browser without a face: one session that joins the queue and reads the event stream."""

    def __init__(self, url: str):
        self.api = f"{url}/gradio_api"
        self.session = secrets.token_hex(6)
        self.http = httpx.Client(timeout=60)
        dependencies = self.http.get(f"{url}/config").json()["dependencies"]
        self.endpoints = {dependency["api_name"]: dependency["id"] for dependency in dependencies}

    def join(self, **settings) -> None:
        body = {
            "data": list((DEFAULTS | settings).values()),
            "fn_index": self.endpoints["run"],
            "session_hash": self.session,
        }
        # httpx's own `json=` refuses unpaired surrogates, which a browser sends as escapes.
        headers = {"Content-Type": "application/json"}
        self.http.post(f"{self.api}/queue/join", content=json.dumps(body), headers=headers).raise_for_status()

    def messages(self):
        """Channel messages as they come. Closing this generator closes the connection, as a closed tab does."""
        shown = None
        with self.http.stream("GET", f"{self.api}/queue/data?session_hash={self.session}") as stream:
            for line in stream.iter_lines():
                if not line.startswith("data:"):
                    continue
                event = json.loads(line[5:])
                if event["msg"] in ("process_generating", "process_completed"):
                    assert event["success"], event
                    value = event["output"]["data"][0]
                    value = value if isinstance(value, str) else patch(shown, value)
                    if value != shown:
                        shown = value
                        yield json.loads(value)
                if event["msg"] == "process_completed":
                    return

    def run(self, **settings) -> list[dict]:
        self.join(**settings)
        return list(self.messages())

    def stop(self) -> None:
        body = {"data": [], "fn_index": self.endpoints["stop"], "session_hash": self.session}
        self.http.post(f"{self.api}/run/predict", json=body).raise_for_status()


def patch(shown: str, edits: list) -> str:
    """A string value after Gradio's edits, which replace it or append to it."""
    for action, _, text in edits:
        shown = text if action == "replace" else shown + text
    return shown


def events_of(messages: list[dict], kind: str) -> list[dict]:
    return [event for message in messages for event in message["events"] if event["type"] == kind]


def tokens_until(messages, count: int) -> list[dict]:
    """Read messages until `count` tokens have been seen."""
    seen = []
    for message in messages:
        seen += [event for event in message["events"] if event["type"] == "token"]
        if len(seen) >= count:
            return seen
    raise AssertionError("the run ended too early")


@pytest.fixture
def visitor(page_server):
    yield Visitor(page_server.url)
    page_server.wait_idle(within=10)


def test_a_run_through_the_client_ends_with_all_its_events(page_server):
    client = Client(page_server.url, analytics_enabled=False, verbose=False)
    texts = list(client.submit(*DEFAULTS.values(), api_name="/run"))
    last = json.loads(texts[-1])
    assert last["state"] == "done"
    assert last["from"] == 0
    assert last["events"][0]["type"] == "run"
    for lane in DEFAULTS["lanes"]:
        ids = [event["i"] for event in last["events"] if event["type"] == "token" and event["lane"] == lane]
        assert ids == list(range(len(ids)))
        assert 1 <= len(ids) <= DEFAULTS["max_tokens"]
    assert last["events"][-1]["reason"] == "finished"


def test_batches_together_are_the_snapshot_and_stay_small(visitor):
    messages = visitor.run(max_tokens=48)
    *batches, snapshot = messages
    streamed = [json.dumps(event) for message in batches for event in message["events"]]
    assert streamed == [json.dumps(event) for event in snapshot["events"]][: len(streamed)]
    assert len(snapshot["events"]) - len(streamed) < 40  # what came between the last beat and the end
    numbers = [message["seq"] for message in messages]
    assert numbers == sorted(set(numbers))
    tokens = events_of([snapshot], "token")
    assert max(len(json.dumps(token, separators=(",", ":"))) for token in tokens) < 1200
    # A beat is 100 or 200 ms; a slow or busy machine may put a few more tokens into one.
    assert max(len(json.dumps(message)) for message in batches) < 60_000


def test_exit_depths_are_those_of_the_method(visitor):
    messages = visitor.run(max_tokens=24, tau="0,9")
    layers = events_of(messages, "run")[0]["header"]["model"]["n_layers"]
    depths = {lane: [] for lane in DEFAULTS["lanes"]}
    for token in events_of(messages[-1:], "token"):
        if not token["from_prefill"]:
            depths[token["lane"]].append(token["exit_layer"])
    assert set(depths["backbone"]) == {layers}
    assert set(depths["int4"]) == {0}
    assert min(depths["river"]) < layers


def test_stop_frees_the_engine_and_a_new_run_works_at_once(visitor, page_server):
    visitor.join(max_tokens=2000, prompt="Count from 1 to 1000 in words.")
    messages = visitor.messages()
    tokens_until(messages, 6)
    visitor.stop()
    assert page_server.wait_idle(within=2) < 1
    rest = list(messages)
    assert rest[-1]["state"] == "done"
    assert rest[-1]["events"][-1]["reason"] == "stop"
    assert visitor.run(max_tokens=3)[-1]["state"] == "done"


def test_a_closed_connection_frees_the_engine_after_its_time_of_grace(visitor, page_server):
    visitor.join(max_tokens=2000, prompt="Count from 1 to 1000 in words.")
    messages = visitor.messages()
    tokens_until(messages, 6)
    messages.close()
    visitor.http.close()
    page_server.wait_idle(within=page_server.runs.limits.grace + 3)


def test_a_second_visitor_waits_in_line_and_sees_only_his_own_run(page_server):
    first, second = Visitor(page_server.url), Visitor(page_server.url)
    first.join(prompt="Count from 1 to 1000 in words.", max_tokens=2000)
    stream = first.messages()
    seen = [next(stream)]
    while not seen[-1]["events"]:
        seen.append(next(stream))
    second.join(prompt="Name three colours.")
    waiting = second.messages()
    queued = [next(waiting)]
    first.stop()
    results = {"first": seen + list(stream), "second": queued + list(waiting)}
    prompts = {name: events_of(messages, "run")[0]["header"]["prompt"] for name, messages in results.items()}
    assert prompts == {"first": "Count from 1 to 1000 in words.", "second": "Name three colours."}
    assert {len({message["run_id"] for message in messages}) for messages in results.values()} == {1}
    assert results["first"][0]["run_id"] != results["second"][0]["run_id"]
    places = [message["queue"]["place"] for message in results["second"] if message["queue"]]
    assert places[0] == 2
    assert results["second"][-1]["state"] == "done"
    page_server.wait_idle(within=5)


def test_a_waiting_visitor_can_leave_the_line(page_server):
    first, second = Visitor(page_server.url), Visitor(page_server.url)
    first.join(max_tokens=2000, prompt="Count from 1 to 1000 in words.")
    stream = first.messages()
    tokens_until(stream, 3)
    second.join()
    waiting = second.messages()
    assert next(waiting)["queue"]["place"] == 2
    second.stop()
    assert list(waiting)[-1]["state"] == "done"
    assert page_server.runs.busy
    first.stop()
    list(stream)
    page_server.wait_idle(within=5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt": " \n"}, "prompt is empty"),
        ({"lanes": []}, "No lane"),
        ({"tau": "close"}, "“close”"),
        ({"tau": "nan"}, "number"),
        ({"max_tokens": None}, "Max tokens is empty"),
        ({"prompt": "far too long " * 8000}, "Shorten"),
        ({"temperature": -1}, "emperature"),
    ],
)
def test_input_that_cannot_be_used_gets_a_sentence(visitor, settings, words):
    (last,) = visitor.run(**settings)[-1:]
    assert last["state"] == "failed"
    assert words in last["message"]
    assert "Traceback" not in last["message"]


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_too_few_tokens_are_raised_to_one_with_a_notice(visitor, max_tokens):
    messages = visitor.run(max_tokens=max_tokens)
    assert messages[-1]["state"] == "done"
    notices = events_of(messages[-1:], "run")[0]["header"]["notices"]
    assert any(str(max_tokens) in notice for notice in notices)


def test_a_hostile_prompt_passes_the_channel_as_ascii(visitor):
    prompt = "`${x} {{y}} <b>bold</b> C:\\users <script>alert(1)</script> \ud83d \x00 end"
    messages = visitor.run(prompt=prompt, max_tokens=4)
    assert messages[-1]["state"] == "done"
    header = events_of(messages[-1:], "run")[0]["header"]
    assert header["prompt"].startswith("`${x} {{y}} <b>bold</b> C:\\users <script>alert(1)</script> ")


def test_a_snapshot_needs_the_secret_id(visitor, page_server):
    messages = visitor.run(max_tokens=3)
    assert page_server.runs.find(messages[0]["run_id"]).final
    assert page_server.runs.find("") is None
    assert page_server.runs.find("guess") is None


def test_engine_time_is_not_arrival_time(visitor):
    start = time.perf_counter()
    last = visitor.run(max_tokens=16)[-1]
    wall = time.perf_counter() - start
    for end in (event for event in last["events"] if event["type"] == "end"):
        times = [
            event["t_ns"]
            for event in last["events"]
            if event["type"] == "token" and event["lane"] == end["lane"] and not event["from_prefill"]
        ]
        assert sum(times) == end["decode_ns"]
        assert end["decode_ns"] / 1e9 < wall


def test_a_comparison_on_the_same_exits_ends_with_fidelity_and_stays_small(visitor):
    lanes = ["backbone", "river", "recompute", "propagation", "masking", "monotone", "sequence@fixed"]
    messages = visitor.run(lanes=lanes, mode="same-exits", max_tokens=16)
    last = messages[-1]
    assert last["state"] == "done"
    facts = {event["lane"]: event["mean"] for event in events_of([last], "fidelity")}
    assert set(facts) == {lane.partition("@")[0] for lane in lanes} - {"backbone"}
    assert facts["recompute"]["v_cos"] > facts["river"]["v_cos"] > max(facts["propagation"]["v_cos"], facts["masking"]["v_cos"])
    tokens = len(events_of([last], "token"))
    assert len(json.dumps(last)) < 2500 * tokens + 50_000  # a token's own event, and its slots in every layer
    fidelity = events_of([last], "fidelity")[0]
    written = sum(event["lane"] == fidelity["lane"] for event in events_of([last], "token"))  # the model may end its answer before 16
    assert len(fidelity["v_cos"]) == written - 1 > 0 and all(len(row) == 30 for row in fidelity["v_cos"])


def test_lanes_that_cannot_be_fed_a_text_are_refused_in_a_sentence(visitor):
    last = visitor.run(lanes=["backbone", "verified"], mode="same-text")[-1]
    assert last["state"] == "failed"
    assert "makes its own tokens" in last["message"]


def test_more_lanes_run_beside_the_ticked_ones_with_thresholds_of_their_own(visitor):
    last = visitor.run(lanes=["river"], more="river:0.8, masking@fixed:12", max_tokens=4)[-1]
    header = events_of([last], "run")[0]["header"]
    assert [(lane["id"], lane["label"]) for lane in header["lanes"]] == [
        ("river", "River"),
        ("river-2", "River, tau 0.8"),
        ("masking", "KV masking, fixed 12"),
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [("rivr:0.95", "There is no method 'rivr'"), ("river@fixed:99", "fixed exit depth"), ("river," * 13, "at most 12")],
)
def test_more_lanes_that_do_not_exist_get_the_engines_sentence(visitor, more, words):
    last = visitor.run(more=more)[-1]
    assert last["state"] == "failed"
    assert words in last["message"]


def api(page_server) -> Client:
    return Client(page_server.url, analytics_enabled=False, verbose=False)


def test_the_endpoint_for_programs_is_documented_and_returns_the_trace(page_server):
    client = api(page_server)
    endpoints = client.view_api(return_format="dict")["named_endpoints"]
    assert list(endpoints) == ["/trace"]
    assert "Decode one prompt with several methods" in endpoints["/trace"]["description"]
    assert [parameter["parameter_name"] for parameter in endpoints["/trace"]["parameters"]][:3] == ["prompt", "methods", "tau"]
    data = client.predict("Name three rivers.", "backbone, river:0.95", max_tokens=6, api_name="/trace")
    trace = Trace.from_dict(data)
    assert data == json.loads(json.dumps(trace.to_dict()))
    assert trace.header["prompt"] == "Name three rivers."
    assert [lane["label"] for lane in trace.header["lanes"]] == ["Backbone", "River, tau 0.95"]
    assert all(1 <= len(lane.tokens) <= 6 and lane.end for lane in trace.lanes.values())
    assert trace.done["reason"] == "finished"
    assert trace.lanes["backbone"].prefill["similarity"], "the prompt's similarities pass the channel"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("",), "prompt is empty"), (("Hi", "rivr"), "There is no method"), (("Hi", "river", 0.9, 8, 0, 0, "odd"), "mode must be one of")],
)
def test_the_endpoint_for_programs_answers_errors_with_sentences(page_server, arguments, words):
    with pytest.raises(AppError, match=words):
        api(page_server).predict(*arguments, api_name="/trace")


def test_cancelling_a_call_stops_the_engine(page_server):
    job = api(page_server).submit("Count from 1 to 1000 in words.", max_tokens=2000, api_name="/trace")
    deadline = time.monotonic() + 20
    while not page_server.runs.busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    job.cancel()
    page_server.wait_idle(within=3)


def test_a_finished_run_is_a_trace_for_whoever_knows_its_id(visitor, page_server):
    last = visitor.run(max_tokens=4)[-1]
    trace = page_server.runs.trace(last["run_id"])
    assert list(trace.lanes) == DEFAULTS["lanes"]
    assert page_server.runs.trace("guess") is None
    saved = page_server.ask("download", {"id": last["run_id"], "kind": "json"})
    assert Trace.from_bytes(saved["text"].encode()).to_dict() == trace.to_dict()
    assert "error" in page_server.ask("download", {"id": "guess", "kind": "json"})
