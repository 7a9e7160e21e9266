"""The Analyse tab without a browser: its answers, and the sweep in the line before the engine. On a tiny model, over HTTP as the page asks."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
import time

import gradio as gr
import httpx
import pytest

import river_core
from app import analysis, export
from app.model_host import ModelHost
from app.runs import Runs
from app.settings import Settings
from tests.demand import program

RECORDING = "recording:difficulty"
SETTINGS = Settings("Hello", True, ("backbone", "river"), 0.5, 8, 0.0, 0, 1.0, 0, "full", "race")
LONG = {
    "id": RECORDING,
    "methods": ["river"],
    "taus": " ".join(f"{tau / 100}" for tau in range(5, 100, 5)),
    "tokens": "120",
    "repeats": "5",
}


@pytest.fixture(scope="module")
def runs(tiny):
    runs = Runs(ModelHost(lambda progress: tiny), river_core.compare).open()
    deadline = time.monotonic() + 10
    while not runs.presets():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return runs


@pytest.fixture(scope="module")
def url(runs):
    with gr.Blocks(analytics_enabled=False) as demo:
        analysis.build(runs)
    demo.queue(api_open=False)
    _, url, _ = demo.launch(
        server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, ssr_mode=False, app_kwargs={"routes": analysis.routes()}
    )
    yield url.rstrip("/")
    demo.close()


class Visitor:
    """One session of the page, without a browser."""

    def __init__(self, url: str):
        self.api = f"{url}/gradio_api"
        self.session = secrets.token_hex(6)
        self.http = httpx.Client(timeout=30)
        config = self.http.get(f"{url}/config").json()
        self.panel = next(part["id"] for part in config["components"] if part["props"].get("elem_id") == "analysis")
        self.events = {target[1]: one["id"] for one in config["dependencies"] for target in one["targets"] if target[0] == self.panel}

    def ask(self, name: str, data=None):
        body = {"session_hash": self.session, "component_id": self.panel, "fn_name": name, "data": data}
        response = self.http.post(f"{self.api}/component_server", json=body)
        response.raise_for_status()
        return response.json()

    def sweep(self, **wanted) -> None:
        body = {"data": [], "fn_index": self.events["sweep"], "session_hash": self.session, "event_data": LONG | wanted}
        self.http.post(f"{self.api}/queue/join", json=body).raise_for_status()

    def stop(self) -> None:
        body = {"data": [], "fn_index": self.events["sweep_stop"], "session_hash": self.session}
        self.http.post(f"{self.api}/run/predict", json=body).raise_for_status()

    def messages(self):
        """Messages of the sweep, each as the page gets it."""
        shown = ""
        with self.http.stream("GET", f"{self.api}/queue/data?session_hash={self.session}") as stream:
            for line in stream.iter_lines():
                event = json.loads(line[5:]) if line.startswith("data:") else {"msg": ""}
                if event["msg"] in ("process_generating", "process_completed"):
                    assert event["success"], event
                    value = event["output"]["data"][0]
                    for action, _, text in value if isinstance(value, list) else []:
                        shown = text if action == "replace" else shown + text
                    shown = shown if isinstance(value, list) else value
                    yield json.loads(shown)
                if event["msg"] == "process_completed":
                    return


def of_kind(message: dict, kind: str) -> list[dict]:
    return [event for event in message["events"] if event["type"] == kind]


def finish(runs, run) -> None:
    deadline = time.monotonic() + 20
    while not run.final or runs.busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_recording_has_charts_without_a_run(url):
    answer = Visitor(url).ask("charts", {"id": RECORDING, "columns": 2})
    assert [entry["name"] for entry in answer["charts"]] == ["exit-depths", "latency", "similarity", "memory"]


def test_a_run_has_charts_once_it_is_over_and_only_for_who_knows_its_id(url, runs):
    run = runs.start("someone", SETTINGS)
    finish(runs, run)
    visitor = Visitor(url)
    assert len(visitor.ask("charts", {"id": run.id})["charts"]) == 4
    assert "error" in visitor.ask("charts", {"id": "another"})
    saved = visitor.ask("table_csv", {"id": run.id})
    assert saved == export.download(runs, {"id": run.id, "kind": "csv"}), "Analyse and the stage save one file"
    assert saved["text"].startswith("lane,token,id,text")
    assert saved["text"].count("\n") == 1 + 2 * 8


def test_the_drawing_library_comes_from_this_server(url):
    response = httpx.get(f"{url}/{analysis.PLOTLY_PATH}")
    assert response.status_code == 200
    assert "Plotly" in response.text[:2000]
    assert str(analysis.PLOTLY.parent) not in httpx.get(url).text, "no folder of the server's is told"


def test_a_sweep_gives_points_and_charts(url, runs):
    visitor = Visitor(url)
    visitor.sweep(methods=["river", "int4"], taus="0.9 0.5", tokens="6", repeats="2")
    *_, last = visitor.messages()
    assert last["state"] == "done"
    (points,) = of_kind(last, "points")
    assert [(point["method"], point["tau"]) for point in points["points"]] == [
        ("backbone", None),
        ("river", 0.5),
        ("river", 0.9),
        ("int4", None),
    ]
    assert points["header"]["prompt"] == runs.trace(RECORDING).header["prompt"]
    assert [chart["name"] for chart in of_kind(last, "charts")[0]["charts"]] == ["pareto", "thresholds"]
    assert visitor.ask("saved_result", json.dumps(points))["charts"] == of_kind(last, "charts")[0]["charts"]
    assert visitor.ask("charts", {"id": last["run_id"]}) == {"error": analysis.GONE}


def test_stop_ends_a_sweep_at_once_and_the_next_one_works(url, runs):
    visitor = Visitor(url)
    visitor.sweep()
    messages = visitor.messages()
    next(message for message in messages if of_kind(message, "progress"))
    visitor.stop()
    start = time.monotonic()
    *_, last = messages
    assert last["state"] == "done" and of_kind(last, "points")[0]["reason"] == "stop"
    assert time.monotonic() - start < 2
    visitor.sweep(tokens="4", repeats="1")
    *_, last = visitor.messages()
    assert of_kind(last, "points")[0]["reason"] == "finished"


def test_a_sweep_waits_its_turn_and_no_visitor_gets_anothers(url, runs):
    first, second = Visitor(url), Visitor(url)
    first.sweep()
    running = first.messages()
    next(message for message in running if message["state"] == "running")
    second.sweep(taus="0.7", tokens="3", repeats="1")
    waiting = second.messages()
    queued = next(waiting)
    assert queued["state"] == "queued" and queued["queue"]["place"] == 2 and queued["events"] == []
    first.stop()
    *_, stopped = running
    *_, done = waiting
    assert stopped["run_id"] != done["run_id"]
    assert {point["tau"] for point in of_kind(done, "points")[0]["points"]} == {None, 0.7}


def test_closing_the_connection_frees_the_engine(url, runs):
    visitor = Visitor(url)
    visitor.sweep()
    messages = visitor.messages()
    next(message for message in messages if of_kind(message, "progress"))
    messages.close()
    visitor.http.close()
    deadline = time.monotonic() + 5
    while runs.busy:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"id": None}, "Nothing is open"),
        ({"id": "gone"}, "does not hold"),
        ({"methods": ["verified", "cat"]}, "No method is ticked"),
        ({"tokens": "many"}, "whole numbers"),
        ({"repeats": "6"}, "1 to 5"),
        ({"taus": "near one"}, "must be a number"),
        ({"taus": ""}, "at least one threshold"),
        ({"taus": " ".join(str(i / 100) for i in range(60))}, "at most"),
    ],
)
def test_a_sweep_that_cannot_be_done_gets_a_sentence(url, wanted, says):
    visitor = Visitor(url)
    visitor.sweep(**wanted)
    *_, last = visitor.messages()
    assert last["state"] == "failed"
    assert says in last["message"]


def test_thresholds_to_begin_with_surround_the_models_own(url):
    settings = Visitor(url).ask("sweep_start")
    assert settings["taus"] == "0.25, 0.5, 0.7, 0.85"  # the tiny model's presets are the paper's, 0.5 and 0.7
    assert dict(settings["methods"])["river"] == "River"
    assert analysis.default_taus([0.95, 0.97, 0.98]) == [0.9, 0.95, 0.97, 0.98, 0.99]
    assert analysis.default_taus([]) == [0.9, 0.95, 0.97, 0.98, 0.99]


def test_two_traces_are_compared_by_id_or_with_a_file(url, runs, tmp_path):
    visitor = Visitor(url)
    ids = [choice for choice, _ in visitor.ask("recordings")]
    assert RECORDING in ids and len(ids) >= 2
    by_id = visitor.ask("compare_with", {"a": RECORDING, "b": ids[1]})["diff"]
    assert by_id["names"][0] != by_id["names"][1]
    runs.trace(ids[1]).save(tmp_path / "b.json.gz")
    data = base64.b64encode((tmp_path / "b.json.gz").read_bytes()).decode()
    assert visitor.ask("compare_with", {"a": RECORDING, "file": data})["diff"] == by_id
    assert visitor.ask("compare_with", {"a": RECORDING, "b": "gone"}) == {"error": analysis.GONE}
    assert "did not arrive" in visitor.ask("compare_with", {"a": RECORDING, "file": "%%%"})["error"]
    broken = base64.b64encode(b'{"trace_version": 3}').decode()
    assert "version" in visitor.ask("compare_with", {"a": RECORDING, "file": broken})["error"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no", "no valid JSON"),
        ("[]", "neither of a sweep"),
        ('{"points": []}', "not the result of a sweep"),
        ('{"lanes": {}, "rounds": 1, "run_card": 2}', "not the result"),
    ],
)
def test_a_file_that_is_no_result_gets_a_sentence(text, says):
    with pytest.raises(ValueError, match=says):
        analysis.read_result(text)


def test_the_tabs_script_holds_every_module_once_and_is_sound(tmp_path):
    names = [path.name for path in dict.fromkeys(analysis.modules())]
    assert names[-1] == "analysis.js" and len(names) == len(set(names))
    assert names.index("inspector.js") < names.index("compare.js") < names.index("analysis.js")
    text = analysis.script()
    assert "\nimport " not in text and "\nexport " not in text
    node = program("node", "the tab's script was not checked", "RIVER_REQUIRE_NODE")
    path = tmp_path / "script.js"
    path.write_text(f"(function (element, props, server, trigger, watch) {{{text}}})")
    subprocess.run([node, "--check", path], check=True)
