"""The page, served inside the test process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import gradio as gr
import httpx

import app  # noqa: F401  (sets what Gradio reads at import)
import river_core
from app.model_host import ModelHost
from app.runs import Runs
from app.ui import build, launch_options


@dataclass(frozen=True)
class Page:
    url: str
    host: ModelHost
    runs: Runs
    demo: gr.Blocks

    def ask(self, name: str, argument: Any = None) -> Any:
        """The answer of a function that the page's script calls by itself."""
        channel = next(block for block in self.demo.blocks.values() if getattr(block, "elem_id", None) == "stage")
        body = {"component_id": channel._id, "fn_name": name, "data": argument, "session_hash": "test"}
        return httpx.post(f"{self.url}/gradio_api/component_server", json=body, timeout=30).raise_for_status().json()

    def wait_idle(self, within: float) -> float:
        """Seconds until the engine had no run in hand any more; fails after `within`."""
        start = time.monotonic()
        while self.runs.busy:
            assert time.monotonic() - start < within, "the engine is still busy"
            time.sleep(0.01)
        return time.monotonic() - start


def never(progress) -> None:
    """A load function whose model does not come: it says how far it is and waits, as a slow download does."""
    progress("download", 0.4, "downloading the model")
    threading.Event().wait()


def serve(load, **options) -> Page:
    """Launch the page on a free port; `load(progress)` returns the model or raises; `options` are those of `Runs`."""
    host = ModelHost(load)
    runs = Runs(host, river_core.compare, **options).open()
    demo = build(host, runs)
    _, url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options(runs.limits))
    return Page(url.rstrip("/"), host, runs, demo)
