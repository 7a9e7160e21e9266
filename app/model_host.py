"""Holds the one model of the process, and says at any moment how far its loading is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

STAGES = {
    "download": "downloading the model",
    "convert": "unpacking the model",
    "weights": "reading weights",
    "kernels": "choosing the fastest kernels",
    "river": "building the 4-bit river",
}
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


RETRY_S = 30.0
"""A model that could not be loaded is tried again by a run that comes this much later: a hub that did not answer may do so by then."""


class ModelUnavailable(Exception):
    """The model could not be loaded; `str(error)` is the sentence shown on the page."""


class ModelHost:
    """One model for the whole process.

    `load` takes a progress callback `(stage, fraction or None, message)` and returns the model. The engine thread calls
    `load_model` while the page is already open.
    """

    def __init__(self, load: Callable[[Callable[[str, float | None, str], None]], Any]):
        self._load = load
        self._model: Any = None
        self._failed_at: float | None = None
        self._status: dict[str, Any] = {"state": "loading", "text": "starting the engine", "fraction": None}

    def status(self) -> dict[str, Any]:
        """`state` (loading, ready or failed), `text` for the visitor, `fraction` 0..1 or None; JSON-ready."""
        return self._status

    @property
    def loading(self) -> bool:
        return self._status["state"] == "loading"

    @property
    def worth_another_try(self) -> bool:
        """Whether loading failed some time ago."""
        return self._failed_at is not None and time.monotonic() - self._failed_at >= RETRY_S

    def model(self) -> Any:
        """The loaded model.

        Raises:
            ModelUnavailable: while it loads, or after it failed.
        """
        if self._model is None:
            raise ModelUnavailable(self._status["text"])
        return self._model

    def load_model(self) -> None:
        """Load, whatever comes of it: a failure becomes the status."""
        if self._failed_at is not None:
            self._failed_at = None
            self._status = {"state": "loading", "text": "trying to load the model again", "fraction": None}
        try:
            self._model = self._load(self._progress)
            self._status = {"state": "ready", "text": describe(self._model), "fraction": 1.0}
        except BaseException as error:  # the engine's thread must outlive it
            self._failed_at = time.monotonic()
            self._status = {"state": "failed", "text": load_failure(error), "fraction": None}
            log.warning("the model could not be loaded: %s", error, exc_info=not is_sentence(error))

    def _progress(self, stage: str, fraction: float | None, message: str) -> None:
        # The last stage only announces what `load_model` is about to publish together with the model itself.
        if stage != "ready":
            self._status = {"state": "loading", "text": STAGES.get(stage, message), "fraction": fraction}


def describe(model: Any) -> str:
    """One line for the status pill, such as "SmolLM2-135M-Instruct ready · cpu · fp16 · 2 threads"."""
    about = model.describe()
    dtype = str(about.get("dtype", "")).removeprefix("torch.")
    parts = [f"{model.name} ready", str(about.get("device", "")), DTYPES.get(dtype, dtype)]
    if about.get("threads") and str(about.get("device", "")).startswith("cpu"):
        parts.append(f"{about['threads']} threads")
    return " · ".join(part for part in parts if part)


def is_sentence(error: BaseException) -> bool:
    """Whether the engine wrote this error for the visitor (a RiverError), so that its text can be shown as it is."""
    return any(kind.__name__ == "RiverError" for kind in type(error).__mro__)


def load_failure(error: BaseException) -> str:
    """The sentence for a model that did not load."""
    if is_sentence(error):
        return str(error)
    if isinstance(error, MemoryError):
        return "There is not enough memory for this model. Close other programs or choose a smaller one with --model."
    return f"The model could not be loaded ({type(error).__name__}). The terminal shows the details; try another --model."
