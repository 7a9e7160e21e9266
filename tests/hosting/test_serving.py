"""The page at other addresses, behind proxies, and for agents: the program itself, started as a user starts it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from app.serving import bare, choose_port, in_url, read_root_path, spare_the_proxy, to_open
from tests import aside
from tests.demand import missing

ROOT = Path(__file__).resolve().parent.parent.parent


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(*arguments: str, **environment: str):
    """`app.py` without a model, once it has said where it is: (its port, its words)."""
    port = free_port()
    command = [sys.executable, "app.py", "--no-browser", "--model", "no-such-model.gguf", "--port", str(port), *arguments]
    proxies = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    clean = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    server = subprocess.Popen(command, cwd=ROOT, env=clean | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = ""
        for line in server.stdout:
            said += line
            if "River Explorer is at" in line:
                break
        else:
            raise AssertionError(said)
        yield port, said
    finally:
        server.terminate()
        server.wait(20)


def fetch(url: str) -> httpx.Response:
    return httpx.get(url, timeout=20, trust_env=False).raise_for_status()


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("/river", "/river"),
        ("river/", "/river"),
        (" /a/b/ ", "/a/b"),
        ("/", ""),
        ("https://example.com/river/", "https://example.com/river"),
        (None, None),
    ],
)
def test_a_root_path_is_taken_as_people_type_it(typed, path):
    assert read_root_path(typed) == path


@pytest.mark.parametrize("typed", ["a b", "/river?x=1", "ftp://example.com/river"])
def test_what_is_no_path_gets_a_sentence(typed):
    with pytest.raises(SystemExit, match="--root-path /river"):
        read_root_path(typed)


def test_addresses_in_and_out_of_urls():
    assert bare("[::1]") == bare("::1") == "::1" and in_url("::1") == "[::1]" and in_url("127.0.0.1") == "127.0.0.1"
    assert to_open("::", 7860) == to_open("0.0.0.0", 7860) == "http://localhost:7860/"
    assert to_open("::1", 7860) == "http://[::1]:7860/"


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("no-such-host.invalid", None, "no name that is known here"),
        ("192.0.2.7", None, "has no address 192.0.2.7"),  # reserved for documents
        ("127.0.0.1", 70_000, "not a port"),
    ],
)
def test_an_address_that_cannot_be_served_gets_its_own_sentence(host, port, says):
    with pytest.raises(SystemExit, match=says):
        choose_port(host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_port_in_use_is_named(host):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.bind((host, 0))
        taken.listen()
        with pytest.raises(SystemExit, match="in use or not allowed"):
            choose_port(host, taken.getsockname()[1])


@needs_ipv6
def test_ipv6_is_served_and_no_proxy_of_the_environment_is_asked_for_the_page_itself():
    if find_spec("socksio") is None:
        missing("socksio is not installed: pip install -r requirements.txt")
    # Nothing listens on port 9; one variable has no scheme, one needs a library of its own.
    proxies = {
        "HTTP_PROXY": "http://127.0.0.1:9",
        "HTTPS_PROXY": "127.0.0.1:9",
        "ALL_PROXY": "socks5://127.0.0.1:9",
        "NO_PROXY": "example.com",
    }
    with started("--host", "[::1]", **proxies) as (port, said):
        assert f"http://[::1]:{port}/" in said
        assert "River Explorer" in fetch(f"http://[::1]:{port}/").text


def test_the_proxy_stays_for_everything_else(monkeypatch):
    monkeypatch.setenv("no_proxy", "example.com")
    monkeypatch.setenv("NO_PROXY", "example.org")
    spare_the_proxy("10.0.0.5")
    assert os.environ["no_proxy"] == "example.com,localhost,127.0.0.1,::1,10.0.0.5"
    assert os.environ["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1,10.0.0.5"
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("no_proxy", "*")
    spare_the_proxy("127.0.0.1")
    assert os.environ["no_proxy"] == "*"


def test_a_proxy_that_is_none_gets_a_sentence(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "gopher://example.com")
    with pytest.raises(SystemExit, match="ALL_PROXY.*gopher"):
        spare_the_proxy("127.0.0.1")


def test_under_a_root_path_the_page_asks_for_everything_there_and_tells_agents_of_one_tool():
    """The program with a path in front of it and the server for agents, one start for both."""
    if find_spec("mcp") is None:
        missing("mcp is not installed: pip install -r requirements.txt")
    # ASCII: Gradio's greeting has a picture in it.
    with started("--root-path", "river", "--mcp", PYTHONIOENCODING="ascii", PYTHONUTF8="0") as (port, _):
        config = fetch(f"http://127.0.0.1:{port}/config").json()
        assert config["root"].endswith("/river")
        public = fetch(f"http://127.0.0.1:{port}/gradio_api/info").json()
        assert list(public["named_endpoints"]) == ["/trace"] and public["unnamed_endpoints"] == {}
        names, answer = aside.run(ask_as_agent(f"http://127.0.0.1:{port}/gradio_api/mcp/"))
    assert [name.endswith("trace") for name in names] == [True]
    assert answer.isError and "Live runs are off" in answer.content[0].text


async def ask_as_agent(url: str):
    """The names of the tools, and the answer of the only one, as an agent's client gets them."""
    from mcp import ClientSession
    from mcp.client.streamable_http import streamablehttp_client

    async with streamablehttp_client(url) as (read, write, _), ClientSession(read, write) as session:
        await session.initialize()
        tools = (await session.list_tools()).tools
        (tool,) = tools
        assert "Decode one prompt with several methods" in tool.description
        assert set(tool.inputSchema["properties"]) >= {"prompt", "methods", "tau", "max_tokens", "mode", "timing"}
        return [tool.name for tool in tools], await session.call_tool(tool.name, {"prompt": "Hi", "methods": "backbone", "max_tokens": 2})
