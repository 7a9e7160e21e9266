"""The trace: all that crosses from engine to page, file, chart and test. Version 1.

A run is a stream of events (dicts, JSON-ready); a trace is the same run put in order. See the README, "The trace".
"""

import gzip
import json
import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from river_core.errors import RiverError
from river_core.files import appears_whole

TRACE_VERSION = 1
MAX_BYTES = 256 << 20  # of JSON after decompression: a bomb is refused, a run of many lanes and thousands of tokens is not


class TraceError(RiverError):
    """A trace file that cannot be read; the message names the place."""


@dataclass
class LaneTrace:
    """One lane of a run: prefill event, token events by index, fidelity event (same-text modes), end event, all as the engine sent them.

    A lane that failed has the reason in its end event.
    """

    id: str
    prefill: dict | None = None
    tokens: list[dict] = field(default_factory=list)
    fidelity: dict | None = None
    end: dict | None = None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(token["text"] for token in self.tokens) + (self.end or {}).get("rest", "")

    @property
    def token_ids(self) -> list[int]:
        return [token["id"] for token in self.tokens]

    @property
    def decode_ns(self) -> int:
        """Engine time of all decode steps; the first token came from the prompt and is not among them."""
        return sum(token["t_ns"] for token in self.steps)

    @property
    def steps(self) -> list[dict]:
        """The tokens that a decode step made: all but the first, which came from the prompt."""
        return [token for token in self.tokens if not token["from_prefill"]]

    @property
    def decode_steps(self) -> int:
        return len(self.steps)

    @property
    def tokens_per_second(self) -> float | None:
        """Decode steps per second of engine time; None before the second token."""
        return self.decode_steps / (self.decode_ns / 1e9) if self.decode_ns else None

    @property
    def drafts(self) -> dict | None:
        """Of a lane that drafts and checks: drafts made and accepted, cycles, tokens per cycle; None for others."""
        cycles = {token["cycle"]["number"]: token["cycle"] for token in self.tokens if "cycle" in token}
        if not cycles:
            return None
        drafted, accepted = (sum(cycle[key] for cycle in cycles.values()) for key in ("drafted", "accepted"))
        return {"drafted": drafted, "accepted": accepted, "cycles": len(cycles), "tokens_per_cycle": self.decode_steps / len(cycles)}

    @property
    def fetched(self) -> dict | None:
        """Of a lane over a backbone with offloaded layers: layers and bytes brought back per decode step; None for others."""
        if not self.steps or "fetched" not in self.steps[0]:
            return None
        layers, size = (sum(token[key] for token in self.steps) / self.decode_steps for key in FETCHED)
        return {"layers": layers, "bytes": size}

    @property
    def mean_depth(self) -> float | None:
        """Mean exit depth of the decode steps."""
        depths = [token["exit_layer"] for token in self.steps]
        return sum(depths) / len(depths) if depths else None


@dataclass
class Trace:
    """A run: header, lanes, and how it ended (reason, memory; None if it was cut off)."""

    header: dict
    lanes: dict[str, LaneTrace]
    done: dict | None = None

    @classmethod
    def from_events(cls, events) -> "Trace":
        """Collect a run's events, in any order but with the header first."""
        trace = None
        for event in events:
            if event["type"] == "run":
                trace = cls(event["header"], {lane["id"]: LaneTrace(lane["id"]) for lane in event["header"]["lanes"]})
            else:
                trace.add(event)
        if trace is None:
            raise TraceError("These events hold no run: the header is missing.")
        return trace

    def add(self, event: dict) -> None:
        """Put one event in its place."""
        kind = event["type"]
        if kind == "done":
            self.done = {key: value for key, value in event.items() if key != "type"}
        if kind in ("done", "error"):
            return
        lane = self.lanes[event["lane"]]
        if kind == "token":
            lane.tokens.append(event)
        else:
            setattr(lane, kind, event)

    def first_difference(self, lane_id: str, reference: str = "backbone") -> int | None:
        """Index of the first token in which a lane differs from the reference lane; None if it does not, as far as both go."""
        if reference not in self.lanes:
            return None
        a, b = self.lanes[lane_id].token_ids, self.lanes[reference].token_ids
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return i
        return None

    def speed_up(self, lane_id: str, reference: str = "backbone") -> float | None:
        """Tokens per second of a lane over those of the reference lane."""
        if reference not in self.lanes:
            return None
        a, b = self.lanes[lane_id].tokens_per_second, self.lanes[reference].tokens_per_second
        return a / b if a and b else None

    def agreement(self, lane_id: str) -> dict | None:
        """Of a run on the same text: share of decode steps whose choice is the backbone's, and mean KL divergence; None in other runs."""
        steps = [token["fidelity"] for token in self.lanes[lane_id].steps if "fidelity" in token]
        if not steps:
            return None
        return {"top1": sum(s["agrees"] for s in steps) / len(steps), "kl": sum(s["kl"] for s in steps) / len(steps)}

    def to_dict(self) -> dict:
        """The trace as JSON data."""
        lanes = [
            {"id": lane.id, "prefill": lane.prefill, "tokens": lane.tokens, "fidelity": lane.fidelity, "end": lane.end}
            for lane in self.lanes.values()
        ]
        return {"trace_version": TRACE_VERSION, "header": self.header, "lanes": lanes, "done": self.done}

    def save(self, path) -> None:
        """Write the trace as JSON; gzipped if the name ends in .gz. The file appears whole or not at all."""
        path = Path(path)
        data = json.dumps(self.to_dict(), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
        try:
            with appears_whole(path) as partial:
                partial.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)
        except OSError as error:
            raise TraceError(f"The trace could not be written to {path}: {error.strerror}.") from error

    @classmethod
    def load(cls, path) -> "Trace":
        """Read a trace file, gzipped or plain.

        Raises:
            TraceError: one sentence that names the place: not there, not a trace, another version, a field missing or of the wrong kind.
        """
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise TraceError(f"The trace {path} cannot be read: {error.strerror}.") from error
        return cls.from_bytes(raw)

    @classmethod
    def from_bytes(cls, raw: bytes, max_bytes: int = MAX_BYTES) -> "Trace":
        """Read a trace from the bytes of a file, at most `max_bytes` of them after unpacking; untrusted input."""
        if raw[:2] == b"\x1f\x8b":
            try:
                unpacker = zlib.decompressobj(31)
                raw = unpacker.decompress(raw, max_bytes)
            except zlib.error as error:
                raise TraceError(f"The file is damaged: its compressed data cannot be read ({error}).") from error
            if unpacker.unconsumed_tail:
                raise TraceError(f"The file unpacks to more than {max_bytes >> 20} MB, which no trace does.")
            if not unpacker.eof:
                raise TraceError("The file is damaged: it ends too early.")
        _need(len(raw) <= max_bytes, f"The file is larger than {max_bytes >> 20} MB, which no trace is")
        try:
            data = json.loads(raw, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"The file is not a trace: it is no valid JSON ({error}).") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data) -> "Trace":
        """Read a trace from JSON data; checks version, fields and kinds."""
        _need(isinstance(data, dict), "The file is not a trace: an object is expected at the top")
        version = data.get("trace_version")
        _need(version == TRACE_VERSION, f"The trace has version {str(version)[:20]!r}; this program reads version {TRACE_VERSION}")
        header = data.get("header")
        _check(header, HEADER_FIELDS, "the header")
        _check(header["model"], {"n_layers": int, "name": str}, "header.model")
        _need(
            all(isinstance(piece, str) for piece in header["prompt_pieces"]),
            "The trace is damaged: prompt_pieces in the header is not a list of texts",
        )
        layers = header["model"]["n_layers"]
        _need(1 <= layers <= MAX_LAYERS, f"The trace is damaged: its model has {layers} layers")
        ids = []
        for i, lane in enumerate(header["lanes"]):
            _check(lane, {"id": str, "method": str, "label": str, "rule": dict}, f"header.lanes[{i}]")
            ids.append(lane["id"])
        _need(isinstance(data.get("lanes"), list), "The trace is damaged: lanes is missing")
        lanes = {}
        for i, lane in enumerate(data["lanes"]):
            _check(lane, {"id": str, "tokens": list}, f"lanes[{i}]")
            _need(lane["id"] in ids and lane["id"] not in lanes, f"The trace is damaged: lanes[{i}] is not in the header")
            _check_lane(lane, layers, len(header["prompt_ids"]))
            lanes[lane["id"]] = LaneTrace(lane["id"], lane.get("prefill"), lane["tokens"], lane.get("fidelity"), lane.get("end"))
        _need(set(lanes) == set(ids), "The trace is damaged: a lane of the header has no data")
        done = data.get("done")
        if done is not None:
            _check(done, {"reason": str}, "done")
        return cls(header, lanes, done)


MAX_LAYERS = 1000
HEADER_FIELDS = {
    "model": dict, "lanes": list, "prompt": str, "prompt_ids": list, "prompt_pieces": list, "device": str, "dtype": str, "sampler": dict,
    "created": str, "max_new_tokens": int,
}  # fmt: skip
TOKEN_FIELDS = {
    "i": int, "id": int, "text": str, "t_ns": int, "from_prefill": bool, "position": int, "exit_layer": int, "layers_run": int,
    "river_layers": int, "similarity": list, "top5": list, "kv": list,
}  # fmt: skip


def _check_lane(lane: dict, layers: int, prompt: int) -> None:
    """Everything in a lane that a reader counts on; `prompt` is the number of prompt tokens."""
    name = f"of lane {lane['id']!r}"
    for j, token in enumerate(lane["tokens"]):
        place = f"token {j} {name}"
        _check(token, TOKEN_FIELDS, place)
        _need(token["i"] == j, f"The trace is damaged: {place} carries the number {token['i']}")
        _need(0 <= token["exit_layer"] <= layers, f"The trace is damaged: {place} left at layer {token['exit_layer']} of {layers}")
        _need(token["t_ns"] >= 0, f"The trace is damaged: {place} has a negative time")
        _need(token["position"] == prompt - 1 + j, f"The trace is damaged: {place} has the position {token['position']}")
        _need(_cosines(token["similarity"], layers), f"The trace is damaged: similarity of {place} is not a number for every layer")
        _need(_owners(token["kv"], layers), f"The trace is damaged: kv of {place} is not a list of layer ranges")
        _need(
            all(isinstance(c, list) and len(c) == 3 and isinstance(c[1], str) and _number(c[2]) for c in token["top5"]),
            f"The trace is damaged: top5 of {place} is not a list of candidates",
        )
        filled = token.get("filled", [])
        _need(
            isinstance(filled, list) and all(isinstance(f, list) and len(f) == 4 and _owners([[*f[1:], f[0]]], layers) for f in filled),
            f"The trace is damaged: filled of {place} is not a list of slots",
        )
        _need(
            all(isinstance(token.get(key, 0), int) for key in FETCHED),
            f"The trace is damaged: fetched of {place} is not a number of layers",
        )
        for key, parts in (("split", SPLIT_FIELDS), ("fidelity", {"agrees": bool, "kl": (int, float)}), ("cycle", CYCLE_FIELDS)):
            if key in token:
                _check(token[key], parts, f"{key} of {place}")
    if lane.get("prefill") is not None:
        place = f"the prefill {name}"
        _check(lane["prefill"], {"t_ns": int}, place)
        _need(_owners(lane["prefill"].get("kv", []), layers), f"The trace is damaged: kv of {place} is not a list of layer ranges")
        rows = lane["prefill"].get("similarity", [])
        _need(
            isinstance(rows, list) and all(_cosines(row, layers) for row in rows),
            f"The trace is damaged: similarity of {place} is not a table",
        )
    if lane.get("fidelity") is not None:
        place = f"the fidelity {name}"
        _check(lane["fidelity"], {"start": int, "mean": dict, **dict.fromkeys(FIDELITY_ROWS, list)}, place)
        for row in (row for key in FIDELITY_ROWS for row in lane["fidelity"][key]):
            _need(_cosines(row, layers), f"The trace is damaged: {place} is not a number for every layer")
        _need(
            all(isinstance(lane["fidelity"]["mean"].get(key), (int, float)) for key in FIDELITY_ROWS),
            f"The trace is damaged: {place} lacks a mean",
        )
    if lane.get("end") is not None:
        _check(lane["end"], {"reason": str, "rest": str}, f"the end {name}")


SPLIT_FIELDS = {"backbone_ns": int, "river_ns": int, "head_ns": int}
FETCHED = ("fetched", "fetched_bytes")
CYCLE_FIELDS = {"number": int, "drafted": int, "accepted": int}
FIDELITY_ROWS = ("k_cos", "v_cos", "k_err", "v_err")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _number(value) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _cosines(row, layers: int) -> bool:
    return isinstance(row, list) and len(row) == layers and all(_number(value) for value in row)


def _owners(runs, layers: int) -> bool:
    return isinstance(runs, list) and all(
        isinstance(run, list)
        and len(run) == 4
        and isinstance(run[2], str)
        and all(isinstance(n, int) for n in (run[0], run[1], run[3]))
        and 0 <= run[0] < run[1] <= layers
        for run in runs
    )


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise TraceError(f"{message}.")


def _check(value, fields: dict, place: str) -> None:
    _need(isinstance(value, dict), f"The trace is damaged: {place} is missing or not an object")
    for name, kind in fields.items():
        _need(name in value, f"The trace is damaged: field {name} is missing in {place}")
        got = value[name]
        right = isinstance(got, kind) and (kind is bool or not isinstance(got, bool))
        kinds = kind if isinstance(kind, tuple) else (kind,)
        _need(right, f"The trace is damaged: field {name} in {place} is not of kind {' or '.join(k.__name__ for k in kinds)}")


def rounded(value: float | None, digits: int = 5) -> float | None:
    """A number for a trace: rounded, and None for what JSON cannot carry."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
