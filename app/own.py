"""From a trace back to the controls: what a visitor has to fill in to run the same comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TESTING = ("maxprob", "margin", "entropy")


def controls_of(header: Mapping[str, Any], boxes: Sequence[str]) -> dict[str, Any]:
    """The values of the controls that make a run like the one a trace header tells of.

    Args:
        header: of a trace.
        boxes: names of the lanes that have a box to tick; every other lane is written out.

    Returns:
        prompt, chat, lanes (of `boxes`), tau (text; empty where no lane needs one), max_tokens, mode, and more (text: the lanes that have no box or
        another threshold).
    """
    taus = [lane["rule"]["tau"] for lane in header["lanes"] if _rule(lane) == "similarity"]
    tau = taus[0] if taus else None
    ticked: list[str] = []
    more: list[str] = []
    for lane in header["lanes"]:
        name = method_name(lane, tau)
        (ticked if name in boxes and name not in ticked else more).append(name)
    return {
        "prompt": header["prompt"],
        "chat": bool(header.get("chat", True)),
        "lanes": ticked,
        "tau": "" if tau is None else f"{tau:g}",
        "max_tokens": header["max_new_tokens"],
        "mode": header.get("mode", "free"),
        "more": ", ".join(more),
    }


def _rule(lane: Mapping[str, Any]) -> str:
    return str((lane.get("rule") or {}).get("name"))


def method_name(lane: Mapping[str, Any], tau: float | None) -> str:
    """NAME[@RULE][:VALUE][+OPTION=VALUE] of a lane; a similarity threshold of `tau` is left out."""
    rule = lane.get("rule") or {}
    text = str(lane["method"])
    name = _rule(lane)
    options = dict(lane.get("options") or {})
    if name == "similarity":
        text += "" if rule["tau"] == tau else f":{rule['tau']:g}"
    elif name in TESTING:
        text += f"@{name}:{rule['threshold']:g}"
    elif name == "fixed" and text != "int4":
        text += f"@fixed:{rule['depth']:g}"
    if name in ("similarity", *TESTING) and rule.get("floor", 1) != 1:
        options["floor"] = rule["floor"]
    if name in ("similarity", *TESTING) and rule.get("layers"):
        options["layers"] = "/".join(map(str, rule["layers"]))
    return text + "".join(f"+{key}={value}" for key, value in options.items())
