"""Two traces side by side: what was set differently, what came out differently, and where the texts part."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from river_core.trace import LaneTrace, Trace

TOKENS_SHOWN = 600
"""Tokens of each text that are sent to the page."""

LEFT_OUT = ("prompt_ids", "prompt_pieces", "lanes", "notices", "recording", "trace_version")
"""Parts of a header that are no settings, or that the comparison shows by itself."""

OUTCOMES = ("timing.tokens_per_second",)
"""Fields that tell what came out, not what was set."""


def diff(a: Trace, b: Trace) -> dict[str, Any]:
    """What differs between two traces; JSON-ready.

    Returns:
        names: of the two traces. card: [field, value in A, value in B] for every field of the headers that differs. same: number of fields that do not.
        only: labels of the lanes that the other trace lacks, {"a": [...], "b": [...]}. lanes: for each lane id that both have, id, label, tokens, speed (tokens/s),
        ratio (speed-up), depth (mean) as pairs [A, B] with None where there is none, `first` (index of the first differing token, None if there is none as far as
        both go), `layers` of both models, and texts {"a", "b"}: lists of [text, exit depth], cut to the first tokens, and `rest`: how many were cut.
    """
    fields_a, fields_b = settings(a), settings(b)
    names = list(dict.fromkeys([*fields_a, *fields_b]))
    differing = [[name, fields_a.get(name, "–"), fields_b.get(name, "–")] for name in names if fields_a.get(name) != fields_b.get(name)]
    shared = [lane_id for lane_id in a.lanes if lane_id in b.lanes]
    return {
        "names": [name_of(a), name_of(b)],
        "card": differing,
        "same": len(names) - len(differing),
        "only": {
            "a": [label_of(a, lane) for lane in a.lanes if lane not in b.lanes],
            "b": [label_of(b, x) for x in b.lanes if x not in a.lanes],
        },
        "lanes": [_lane(a, b, lane_id) for lane_id in shared],
    }


def name_of(trace: Trace) -> str:
    """The recording's title, or the model and when it ran."""
    recording = trace.header.get("recording")
    title = recording.get("title") if isinstance(recording, dict) else None
    return str(title or f"{trace.header['model']['name']}, {trace.header['created'][:16].replace('T', ' ')}")


def label_of(trace: Trace, lane_id: str) -> str:
    return next(lane["label"] for lane in trace.header["lanes"] if lane["id"] == lane_id)


def settings(trace: Trace) -> dict[str, str]:
    """The run card, flat: "model.name" -> value as text; and of each lane its rule and options."""
    fields = {
        name: value for name, value in _flat({k: v for k, v in trace.header.items() if k not in LEFT_OUT}) if not name.startswith(OUTCOMES)
    }
    fields["prompt tokens"] = str(len(trace.header["prompt_ids"]))
    for lane in trace.header["lanes"]:
        options = lane.get("options")
        set_to = {**lane["rule"], **(options if isinstance(options, dict) else {})}
        fields[f"lane {lane['id']}"] = ", ".join(f"{key} {_text(value)}" for key, value in set_to.items() if value not in (None, [], {}))
    return fields


def _flat(value: Any, name: str = ""):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lane(a: Trace, b: Trace, lane_id: str) -> dict[str, Any]:
    one, two = a.lanes[lane_id], b.lanes[lane_id]
    pairs = enumerate(zip(one.token_ids, two.token_ids, strict=False))
    return {
        "id": lane_id,
        "label": label_of(a, lane_id),
        "tokens": [len(one.tokens), len(two.tokens)],
        "speed": [one.tokens_per_second, two.tokens_per_second],
        "ratio": [a.speed_up(lane_id), b.speed_up(lane_id)] if lane_id != "backbone" else [None, None],
        "depth": [one.mean_depth, two.mean_depth],
        "layers": [a.header["model"]["n_layers"], b.header["model"]["n_layers"]],
        "first": next((i for i, (x, y) in pairs if x != y), None),
        "texts": {"a": _tokens(one), "b": _tokens(two)},
        "rest": [max(0, len(lane.tokens) - TOKENS_SHOWN) for lane in (one, two)],
    }


def _tokens(lane: LaneTrace) -> list[list[Any]]:
    return [[token["text"], token["exit_layer"]] for token in lane.tokens[:TOKENS_SHOWN]]
