"""Every number that bounds what one visitor can ask of the server: in one place, set by flags of `app.py`, smaller on a Space.

Nothing here is about the model: what its context holds is the engine's to say.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields, replace
from typing import Any

MB = 1 << 20


def _limit(default: float, space: float, flag: str, words: str, unit: int = 1) -> Any:
    """A field with its value on a Space, its flag of `app.py`, and what `--help` says of it; `unit`: what the flag counts in."""
    return field(default=default, metadata={"space": space, "flag": flag, "words": words, "unit": unit})


@dataclass(frozen=True)
class Limits:
    """What one visitor, and all of them together, can have. Whatever exceeds one of these is refused with a sentence; a run that reaches
    its seconds ends as Stop ends it."""

    lanes: int = _limit(12, 8, "--most-lanes", "lanes of one run")
    tokens: int = _limit(4096, 512, "--most-tokens", "new tokens of each lane")
    prompt: int = _limit(400_000, 20_000, "--most-prompt", "characters of a prompt")
    seconds: float = _limit(1800, 180, "--seconds-per-run", "seconds that one run or sweep may have the engine")
    sweep: int = _limit(60_000, 6_000, "--most-sweep", "tokens of a sweep: lanes x tokens x repeats")
    line: int = _limit(32, 16, "--most-waiting", "runs that wait for the engine, of all visitors together")
    address: int = _limit(16, 6, "--most-waiting-each", "of these, runs from one address")
    calls: int = _limit(64, 16, "--most-calls-each", "calls of /trace from one address that are not over yet")
    grace: float = _limit(10, 10, "--grace", "seconds that a run goes on after its page has gone, for a reload to find it")
    sent: int = _limit(8 * MB, 8 * MB, "--most-upload", "MB of a trace file that is opened, compressed", MB)
    unpacked: int = _limit(48 * MB, 32 * MB, "--most-unpacked", "MB of such a file, unpacked", MB)
    kept: int = _limit(256 * MB, 128 * MB, "--keep-mb", "MB of finished runs and opened files that are kept", MB)
    seconds_kept: float = _limit(1800, 900, "--keep-seconds", "seconds that they are kept, from their end or their opening")
    parsed: int = _limit(512 * MB, 256 * MB, "--analyse-mb", "MB of memory for traces that are being analysed", MB)
    questions: int = _limit(64, 32, "--most-questions", "charts, tables and files that are waited for at one time")

    @property
    def body(self) -> int:
        """Bytes of a request's body: an upload in base64, and a little beside it."""
        return max(self.sent * 4 // 3 + MB, 4 * MB)

    @property
    def kept_each(self) -> int:
        """Bytes that are kept for one session: an eighth, and for one address half of all."""
        return self.kept // 8

    @property
    def kept_address(self) -> int:
        return self.kept // 2


def defaults() -> Limits:
    """The limits of this machine: smaller where SPACE_ID is set."""
    limits = Limits()
    if not os.environ.get("SPACE_ID"):
        return limits
    return replace(limits, **{one.name: one.metadata["space"] for one in fields(limits)})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each limit, with its value in the help."""
    group = parser.add_argument_group("limits", "What one visitor can ask for. They are smaller on a Hugging Face Space.")
    preset = defaults()
    for one in fields(Limits):
        unit = one.metadata["unit"]
        value = getattr(preset, one.name) // unit if unit > 1 else getattr(preset, one.name)
        number = _number(float if isinstance(one.default, float) or "econds" in one.metadata["words"] else int)
        group.add_argument(
            one.metadata["flag"],
            dest=f"limit_{one.name}",
            type=number,
            default=value,
            metavar="N",
            help=f"{one.metadata['words']} (default: {value:,})".replace("%", "%%"),
        )


def _number(kind: type):
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e12:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
        return value

    return read


def from_flags(args: argparse.Namespace) -> Limits:
    """The limits that the command line asks for."""
    return Limits(**{one.name: getattr(args, f"limit_{one.name}") * one.metadata["unit"] for one in fields(Limits)})


def address_of(request: Any) -> str:
    """Where a request comes from; "" if it does not say. Behind a proxy on this machine uvicorn has put the visitor's own address there; a Space's proxy is
    another machine, so that its header is read here. The header can be made up: the bounds of all visitors together hold all the same."""
    if os.environ.get("SPACE_ID"):
        forwarded = str(request.headers.get("x-forwarded-for", "")).split(",")[0].strip()
        if forwarded:
            return forwarded[:64]
    client = getattr(request, "client", None)
    return str(getattr(client, "host", "") or "")
