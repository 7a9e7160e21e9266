"""The table of all tokens of a trace, and the CSV file of it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from river_core.trace import Trace

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .:@+_/-]*")
DECISION = ("why", "score")
AGREEMENT = ("agrees", "kl")


def _quoted(text: str) -> str:
    """A text from a trace as a JSON string, which a spreadsheet does not take for a formula: it begins with a quote. Semicolons are escaped, since
    a spreadsheet of a country with decimal commas splits at them, and what follows one would begin a cell."""
    return json.dumps(text, ensure_ascii=True).replace(";", "\\u003b")


def _owners(trace: Trace) -> list[str]:
    """Who wrote slots in this trace; the names are a closed set."""
    return list(dict.fromkeys(run[2] for lane in trace.lanes.values() for token in lane.tokens for run in token["kv"]))


def _has(trace: Trace, field: str) -> bool:
    return any(field in token for lane in trace.lanes.values() for token in lane.tokens)


def table_columns(trace: Trace) -> list[str]:
    """The columns of `token_rows`, in order."""
    columns = [
        "lane",
        "token",
        "id",
        "text",
        "position",
        "exit_layer",
        "layers_run",
        "river_layers",
        "t_ms",
        "from_prompt",
        "similarity",
        "top1",
    ]
    columns += [field for field in DECISION if _has(trace, field)]
    columns += [f"slots_{owner}" for owner in _owners(trace)]
    return columns + list(AGREEMENT if _has(trace, "fidelity") else ())


def token_rows(trace: Trace) -> Iterator[dict[str, Any]]:
    """One row a token, lane by lane.

    Columns: lane, token (counted from 1, as everywhere on the page), id, text (a JSON string: white space shows, and no spreadsheet takes it
    for a formula), position, exit_layer, layers_run,
    river_layers, t_ms (engine time), similarity (at the exit; empty where the exit layer has none), top1 (probability of the likeliest token); where the trace has
    them why (what decided the exit) and score (what was tested there, unrounded); slots_<owner>
    (cache slots of the token's position by who wrote them, at that step), and on the same text agrees and kl.
    """
    columns = set(table_columns(trace))
    decision = [field for field in DECISION if field in columns]
    owners = {owner: f"slots_{owner}" for owner in _owners(trace)}
    compared = "kl" in columns
    for lane in trace.lanes.values():
        name = lane.id if PLAIN_NAME.fullmatch(lane.id) else _quoted(lane.id)
        for token in lane.tokens:
            depth = token["exit_layer"]
            row = {
                "lane": name,
                "token": token["i"] + 1,
                "id": token["id"],
                "text": _quoted(token["text"]),
                "position": token["position"],
                "exit_layer": depth,
                "layers_run": token["layers_run"],
                "river_layers": token["river_layers"],
                "t_ms": round(token["t_ns"] / 1e6, 4),
                "from_prompt": token["from_prefill"],
                "similarity": token["similarity"][depth - 1] if depth else None,
                "top1": token["top5"][0][2] if token["top5"] else None,
                **{field: token.get(field) for field in decision},
                **dict.fromkeys(owners.values(), 0),
            }
            for first, last, owner, _ in token["kv"]:
                row[owners[owner]] += last - first
            if isinstance(row.get("why"), str) and not PLAIN_NAME.fullmatch(row["why"]):
                row["why"] = _quoted(row["why"])
            if compared:
                fact = token.get("fidelity") or {}
                row |= {field: fact.get(field) for field in AGREEMENT}
            yield row


def token_csv(trace: Trace) -> str:
    """The table as a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, table_columns(trace), lineterminator="\n")
    writer.writeheader()
    writer.writerows(token_rows(trace))
    return text.getvalue()
