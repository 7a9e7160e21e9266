"""What a visitor typed into the controls, checked and turned into the arguments of `river_core.compare`."""

from __future__ import annotations

from dataclasses import dataclass

MOST_LANES = 12


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
) -> Settings:
    """Check the raw values of the controls. `more` names further lanes, separated by commas, after those of `lanes`.

    Only what the engine cannot know is judged here (an empty box, a word where a number belongs); ranges and
    lengths are the engine's to judge, which also reports what it used instead. `tau` may use a decimal comma;
    empty means the model's own value.

    Raises:
        SettingsError: with one sentence for the visitor.
    """
    if not prompt or not prompt.strip():
        raise SettingsError("The prompt is empty. Type a question or pick an example, then press Run.")
    methods = (*(lanes or ()), *(name.strip() for name in (more or "").split(",") if name.strip()))
    if not methods:
        raise SettingsError("No lane is switched on. Tick at least one, for example Backbone and River.")
    if len(methods) > MOST_LANES:
        raise SettingsError(f"These are {len(methods)} lanes; at most {MOST_LANES} run side by side here. Take some out.")
    if max_tokens is None:
        raise SettingsError("Max tokens is empty. Give a whole number such as 96.")
    return Settings(
        prompt=prompt,
        chat=bool(chat),
        methods=methods,
        tau=read_tau(tau),
        max_new_tokens=int(max_tokens),
        temperature=float(temperature or 0.0),
        top_k=int(top_k or 0),
        top_p=1.0 if top_p is None else float(top_p),
        seed=int(seed or 0),
        prefill=prefill,
        timing=timing,
        mode=mode,
    )


def read_tau(value: str | float | None) -> float | None:
    """The exit threshold as a number, or None for the model's own.

    Raises:
        SettingsError: if the text is no number.
    """
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    try:
        return float(text.replace(",", "."))
    except ValueError:
        raise SettingsError(f"Tau is “{text[:40]}”, which is not a number. Give one between 0 and 1, for example 0.97.") from None
