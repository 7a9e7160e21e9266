"""The bundled recordings: real traces made by `python -m river_core record`, in teaching order, ready to be sent.

They are read before the first visitor and without the engine, so that a page can play one while PyTorch is still being imported.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "recordings"
PREFIX = "recording:"
"""What the id of a recording begins with, before its slug."""


@dataclass(frozen=True)
class Recording:
    """One recording: what the list shows of it, and the whole trace as JSON text."""

    slug: str
    title: str
    idea: str
    created: str
    model: str
    device: str
    text: str

    def about(self) -> dict[str, str]:
        """Its entry in the list: everything but the trace."""
        return {name: value for name, value in vars(self).items() if name != "text"}


def read_recordings(folder: Path = FOLDER) -> dict[str, Recording]:
    """Recordings by slug, in the order of their file names (01-..., 02-...).

    A file that is damaged or lacks its description is left out, with a warning in the log; so is a missing folder.
    """
    recordings: dict[str, Recording] = {}
    for path in sorted(folder.glob("*.json.gz")):
        try:
            recording = read_recording(gzip.decompress(path.read_bytes()).decode("ascii"))
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("the recording %s is left out: %s: %s", path.name, type(error).__name__, error)
            continue
        if recording.slug in recordings:
            log.warning("the recording %s is left out: %s is taken", path.name, recording.slug)
            continue
        recordings[recording.slug] = recording
    if not recordings:
        log.warning("there are no recordings in %s", folder)
    return recordings


def read_recording(text: str) -> Recording:
    """A recording from its JSON text.

    Raises:
        ValueError, KeyError, TypeError: what is not there, or not of the right kind.
    """
    data: dict[str, Any] = json.loads(text)
    header = data["header"]
    told: Mapping[str, Any] = header["recording"]
    fields = [told["slug"], told["title"], told["idea"], header["created"], header["model"]["name"], header["device"]]
    if not all(isinstance(field, str) for field in fields):
        raise TypeError("a field of its description is not a text")
    if not isinstance(data["lanes"], list) or len(data["lanes"]) != len(header["lanes"]):
        raise ValueError("its lanes are not complete")
    return Recording(*fields, text)
