"""The page, served inside the test process."""

from __future__ import annotations

import time
from dataclasses import dataclass

import gradio as gr

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

    def wait_idle(self, within: float) -> float:
        """Seconds until the engine had no run in hand any more; fails after `within`."""
        start = time.monotonic()
        while self.runs.busy:
            assert time.monotonic() - start < within, "the engine is still busy"
            time.sleep(0.01)
        return time.monotonic() - start


def serve(load) -> Page:
    """Launch the page on a free port; `load(progress)` returns the model or raises."""
    host = ModelHost(load)
    runs = Runs(host, river_core.compare).open()
    demo = build(host, runs)
    _, url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options())
    return Page(url.rstrip("/"), host, runs, demo)
