"""What a visitor typed into the controls, checked and turned into the arguments of `river_core.compare`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from app.limits import Limits, defaults


class SettingsError(ValueError):
    """A control holds something that cannot be used; `str(error)` is the sentence shown on the page."""


@dataclass(frozen=True)
class Settings:
    """The arguments of one run; the field names are those of `river_core.compare`."""

    prompt: str
    chat: bool
    methods: tuple[str, ...]
    tau: float | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    prefill: str
    timing: str
    mode: str = "free"


def read_settings(
    prompt: str | None,
    chat: bool,
    lanes: list[str] | None,
    tau: str | float | None,
    max_tokens: float | None,
    temperature: float | None,
    top_k: float | None,
    top_p: float | None,
    seed: float | None,
    prefill: str,
    timing: str,
    mode: str = "free",
    more: str | None = "",
    limits: Limits | None = None,
) -> Settings:
    """Check the raw values of the controls. `more` names further lanes, separated by commas, after those of `lanes`.

    Only what the engine cannot know is judged here (an empty box, a word where a number belongs, what is too much for this server: `limits`); ranges are
    the engine's to judge, which also reports what it used instead. `tau` may use a decimal comma; empty means the model's own value. The
    prompt's length is looked at before anything reads it.

    Raises:
        SettingsError: with one sentence for the visitor.
    """
    limits = limits or defaults()
    prompt, more = _text("The prompt", prompt), _text("The list of methods", more)
    if not prompt.strip():
        raise SettingsError("The prompt is empty. Type a question or pick an example, then press Run.")
    if len(prompt) > limits.prompt:
        raise SettingsError(f"The prompt has {len(prompt):,} characters, and at most {limits.prompt:,} are read here. Shorten it.")
    methods = (*(lanes or ()), *(name.strip() for name in more.split(",", 2 * limits.lanes) if name.strip()))
    if not methods:
        raise SettingsError("No lane is switched on. Tick at least one, for example Backbone and River.")
    if len(methods) > limits.lanes:
        raise SettingsError(f"These are {len(methods)} lanes; at most {limits.lanes} run side by side here. Take some out.")
    if max_tokens is None or max_tokens == "":
        raise SettingsError("Max tokens is empty. Give a whole number such as 96.")
    tokens = _whole("Max tokens", max_tokens, 96)
    if tokens > limits.tokens:
        raise SettingsError(f"Max tokens is {tokens:,}, and each lane can make at most {limits.tokens:,} here. Give a smaller number.")
    return Settings(
        prompt=prompt,
        chat=_flag("Chat", chat),
        methods=methods,
        tau=read_tau(tau),
        max_new_tokens=tokens,
        temperature=_number("Temperature", temperature, 0.0),
        top_k=_whole("Top-k", top_k, 0),
        top_p=_number("Top-p", top_p, 1.0),
        seed=_whole("Seed", seed, 0),
        prefill=_text("Prefill", prefill),
        timing=_text("Timing", timing),
        mode=_text("Mode", mode),
    )


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SettingsError(f"{name} must be a text, not {_shown(value)}.")
    return value


def _flag(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise SettingsError(f"{name} must be true or false, not {_shown(value)}.")


def _number(name: str, value: Any, empty: float) -> float:
    """A control that holds a number; `empty` is what an empty one stands for."""
    if value is None or value == "":
        return empty
    try:
        number = float(value) if not isinstance(value, bool) and isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SettingsError(f"{name} is {_shown(value)}, which is not a number. Give one such as {empty:g}.")
    return number


def _whole(name: str, value: Any, empty: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # exactly, whatever its size
    number = _number(name, value, empty)
    if number != int(number):
        raise SettingsError(f"{name} is {_shown(value)}, which is not a whole number. Give one such as {empty}.")
    return int(number)


def _shown(value: Any) -> str:
    """A value in a sentence: its kind, where it is long or holds others."""
    if isinstance(value, (list, tuple, dict)):
        return {"dict": "an object"}.get(type(value).__name__, "a list")
    text = str(value)
    return f"“{text[:40]}”"


def read_tau(value: str | float | None) -> float | None:
    """The exit threshold as a number, or None for the model's own.

    Raises:
        SettingsError: if the text is no number.
    """
    if isinstance(value, (bool, list, tuple, dict)):
        raise SettingsError(f"Tau is {_shown(value)}, which is not a number. Give one between 0 and 1, for example 0.97.")
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    try:
        return float(text.replace(",", "."))
    except ValueError:
        raise SettingsError(f"Tau is “{text[:40]}”, which is not a number. Give one between 0 and 1, for example 0.97.") from None
