"""Seconds from `python app.py` to the first live token, as a visitor who presses Run at once would have them: `python -m app.startup`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from gradio_client import Client

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def serving() -> Iterator[str]:
    """The page in a process of its own, on a free port; gives its address once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "app.py", "--no-browser", "--port", str(port)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                httpx.get(url, timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.05)
        yield url
    finally:
        server.terminate()
        server.wait(10)


def measure() -> dict[str, float]:
    """Start the page and run the default prompt; returns seconds to the page and to the first token of any lane."""
    start = time.perf_counter()
    with serving() as url:
        page = time.perf_counter() - start
        client = Client(url, analytics_enabled=False, verbose=False)
        arguments = ["Why is the sky blue?", True, ["backbone", "int4", "river"], "", 16, 0, 0, 1, 0, "full", "race", "free", ""]
        job = client.submit(*arguments, api_name="/run")
        for text in job:
            if any(event["type"] == "token" for event in json.loads(text)["events"]):
                return {"page": page, "first token": time.perf_counter() - start}
        raise RuntimeError("the run ended without a token")


if __name__ == "__main__":
    for name, seconds in measure().items():
        print(f"{name:<12} {seconds:5.1f} s")
