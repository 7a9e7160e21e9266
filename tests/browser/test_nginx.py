"""Behind nginx, under a path, with its buffering as shipped: the page works, and what streams comes as it is written."""

from __future__ import annotations

import ast
import json
import secrets
import socket
import subprocess
import threading
import time
from importlib.util import find_spec

import httpx
import pytest

import river_core
from app.model_host import ModelHost
from app.runs import Runs
from app.ui import build, launch_options
from tests import aside
from tests.demand import missing, program
from tests.page.server import Page

# What the README gives: three headers, so that the page knows its address and its visitors apart; nothing about buffering.
NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port};
    location /river/ {{
      proxy_pass http://127.0.0.1:{page}/;
      proxy_set_header Host $http_host;
      proxy_set_header X-Forwarded-Proto $scheme;
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
      client_max_body_size 20m;
    }}
  }}
}}
"""


class Gate:
    """`river_core.compare`, which can be told to wait before its last events."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()

    def compare(self, *positional, **named):
        for event in river_core.compare(*positional, **named):
            if event["type"] == "token":
                assert self.open.wait(60)
            yield event


@pytest.fixture(scope="module")
def behind_nginx(tmp_path_factory, tiny):
    """A page with a tiny model at its public address, and the gate before its tokens."""
    nginx = program("nginx", "apt-get install --no-install-recommends nginx-light")
    folder = tmp_path_factory.mktemp("nginx")
    gate = Gate()
    host = ModelHost(lambda progress: tiny)
    runs = Runs(host, gate.compare).open()
    demo = build(host, runs)
    options = launch_options() | {"mcp_server": find_spec("mcp") is not None}
    demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, root_path="/river", **options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, page=demo.server_port))
    server = subprocess.Popen([nginx, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"])
    url = f"http://127.0.0.1:{port}/river"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"{url}/", trust_env=False, timeout=10).raise_for_status()
                break
            except httpx.HTTPError:
                assert server.poll() is None and time.monotonic() < deadline, (folder / "error.log").read_text()
                time.sleep(0.05)
        yield Page(url + "/", host, runs, demo), gate
    finally:
        gate.open.set()
        server.terminate()
        server.wait(10)
        demo.close()


def test_a_message_arrives_before_the_next_one_is_written(behind_nginx):
    page, gate = behind_nginx
    gate.open.clear()
    api = f"{page.url}gradio_api"
    with httpx.Client(timeout=30, trust_env=False) as http:
        ends = {entry["api_name"]: entry["id"] for entry in http.get(f"{page.url}config").json()["dependencies"]}
        session = secrets.token_hex(6)
        data = ["Hi", False, ["backbone"], "", 4, 0, 0, 1, 0, "full", "race", "free", ""]
        http.post(f"{api}/queue/join", json={"data": data, "fn_index": ends["run"], "session_hash": session}).raise_for_status()
        with http.stream("GET", f"{api}/queue/data?session_hash={session}") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            seen = []
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    seen.append(json.loads(line[5:])["msg"])
                # The engine waits until the first message of the run is here: a proxy that gathers messages would never hand it on.
                if "process_generating" in seen:
                    gate.open.set()
                if "process_completed" in seen:
                    break
    assert seen.count("process_generating") >= 2


def test_a_browser_runs_the_page_under_the_path(behind_nginx, visit):
    page, _ = behind_nginx
    tab = visit(page).to_run()
    tab.fill("prompt", "Hello there")
    tab.fill("max-tokens", "5")
    tab.press("run")
    tab.wait_state("done")
    assert tab.page.locator(".tok").count() >= 5
    tab.page.click("#analyse-tab-button")
    tab.page.wait_for_selector(".an-plot[data-chart] .main-svg")  # Plotly's script comes from under the path as well


def test_an_agent_gets_the_trace_from_the_only_tool(behind_nginx):
    if find_spec("mcp") is None:
        missing("mcp is not installed: pip install -r requirements.txt")
    from mcp import ClientSession
    from mcp.client.streamable_http import streamablehttp_client

    page, _ = behind_nginx

    async def ask():
        async with streamablehttp_client(f"{page.url}gradio_api/mcp/") as (read, write, _), ClientSession(read, write) as session:
            await session.initialize()
            (tool,) = (await session.list_tools()).tools
            return await session.call_tool(tool.name, {"prompt": "Hello", "methods": "backbone, river", "max_tokens": 3})

    answer = aside.run(ask())
    assert not answer.isError, answer.content[0].text
    assert len(answer.content) >= 1
    trace = river_core.Trace.from_dict(
        ast.literal_eval(answer.content[-1].text)
    )  # Gradio gives an agent str() of what the endpoint returns
    assert list(trace.lanes) == ["backbone", "river"] and trace.done["reason"] == "finished"
