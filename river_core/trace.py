"""The trace: all that crosses from engine to page, file, chart and test. Version 1.

A run is a stream of events (dicts, JSON-ready); a trace is the same run put in order. See the README, "The trace".
"""

import gzip
import json
import math
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec

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
        """Read a trace from the bytes of a file, at most `max_bytes` of them after unpacking; untrusted input.

        Fields of tokens that this version does not know are left out; elsewhere they are kept, as long as they are small.

        Raises:
            TraceError: one sentence that names the place, in words and as a path such as `$.lanes[1].tokens[3].kv`.
        """
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
        return cls._read(raw.removeprefix(b"\xef\xbb\xbf"))

    @classmethod
    def from_dict(cls, data) -> "Trace":
        """Read a trace from JSON data; checks version, fields and kinds. The data stays the caller's.

        Raises:
            TraceError: as for `from_bytes`.
        """
        _need(isinstance(data, dict), "The file is not a trace: an object is expected at the top")
        try:
            raw = json.dumps(data, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise TraceError(f"The trace is damaged: it holds what JSON cannot carry ({error}).") from error
        return cls._read(raw)

    @classmethod
    def _read(cls, raw: bytes) -> "Trace":
        """A trace from JSON. Whatever has no bound in its kind has one in bytes before it becomes objects."""
        file = _decoded(_FILE, raw, "the file", "$")
        version = _decoded(_ANY, file.trace_version, "the version", "$.trace_version") if len(file.trace_version) < 100 else "a long one"
        _need(version == TRACE_VERSION, f"The trace has version {str(version)[:20]!r}; this program reads version {TRACE_VERSION}")
        header = _object(file.header, _HEADER_LISTS, HEADER_BYTES, "the header", "$.header")
        _check(header, HEADER_FIELDS, "the header")
        _check(header["model"], {"n_layers": int, "name": str}, "header.model")
        layers = header["model"]["n_layers"]
        _need(1 <= layers <= MAX_LAYERS, f"The trace is damaged: its model has {layers} layers")
        _need(
            len(header["lanes"]) <= MOST_LANES, f"The trace has {len(header['lanes'])} lanes, and the most that can be read is {MOST_LANES}"
        )
        for i, lane in enumerate(header["lanes"]):
            _check(lane, {"id": str, "method": str, "label": str, "rule": dict}, f"header.lanes[{i}]")
            _need(len(lane["id"]) <= 200, f"The trace is damaged: the id in header.lanes[{i}] has {len(lane['id'])} characters")
        ids = {lane["id"] for lane in header["lanes"]}
        _need(file.lanes != _NULL, "The trace is damaged: lanes is missing")
        found = _decoded(_LANES, file.lanes, "lanes", "$.lanes", file.lanes)
        _need(len(found) <= MOST_LANES, f"The trace has {len(found)} lanes, and the most that can be read is {MOST_LANES}")
        for i, lane in enumerate(found):
            _need(lane.id in ids, f"The trace is damaged: lanes[{i}] is not in the header")
            _need(
                len(lane.tokens) <= MOST_TOKENS,
                f"Lane {lane.id!r} has {len(lane.tokens):,} tokens, and the most that can be read is {MOST_TOKENS:,}",
            )
        cells = layers * sum(len(lane.tokens) for lane in found)
        _need(cells <= MOST_CELLS, f"The trace has {cells:,} tokens times layers, and the most that can be read is {MOST_CELLS:,}")
        lanes: dict[str, LaneTrace] = {}
        for i, lane in enumerate(found):
            _need(lane.id not in lanes, f"The trace is damaged: lanes[{i}] is not in the header, or there twice")
            lanes[lane.id] = _read_lane(lane, layers, len(header["prompt_ids"]), f"$.lanes[{i}]")
        _need(set(lanes) == ids, "The trace is damaged: a lane of the header has no data")
        done = None
        if file.done != _NULL:
            done = _object(file.done, {}, OTHER_BYTES, "done", "$.done")
            _check(done, {"reason": str}, "done")
        return cls(header, lanes, done)


MAX_LAYERS = 1000
MOST_LANES = 64
MOST_TOKENS = 200_000
"""Per lane."""
MOST_CELLS = 1 << 24
"""Layers times tokens of all lanes."""
HEADER_BYTES = 1 << 19
"""Of a header as JSON, its prompt left out."""
OTHER_BYTES = 1 << 16
"""Of the fields of any other object that have no kind of their own, as JSON."""

OWNERS = ("none", "backbone", "river", "propagated", "draft")
"""Who may have written a cache slot: `kv_cache.OWNER_NAMES`, without its libraries."""

HEADER_FIELDS = {
    "model": dict, "lanes": list, "prompt": str, "prompt_ids": list, "prompt_pieces": list, "device": str, "dtype": str, "sampler": dict,
    "created": str, "max_new_tokens": int,
}  # fmt: skip
FETCHED = ("fetched", "fetched_bytes")
FIDELITY_ROWS = ("k_cos", "v_cos", "k_err", "v_err")

_Whole = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Number = int | float | None
_Runs = list[list[_Whole | Literal[OWNERS]]]  # [first layer, last + 1, owner, step]; what stands where is checked with the layers


class _Split(TypedDict):
    backbone_ns: _Whole
    river_ns: _Whole
    head_ns: _Whole


class _Cycle(TypedDict):
    number: _Whole
    drafted: _Whole
    accepted: _Whole
    place: NotRequired[_Whole]


class _Agreement(TypedDict):
    agrees: bool
    kl: int | float
    choice: NotRequired[_Whole]


class _Token(TypedDict):
    """A token's event. What decides is `score` at `exit_layer`, unrounded, and `why`; older traces have neither."""

    type: NotRequired[str]
    lane: NotRequired[str]
    i: _Whole
    id: _Whole
    text: str
    t_ns: _Count
    from_prefill: bool
    position: _Whole
    exit_layer: _Whole
    layers_run: _Whole
    river_layers: _Whole
    similarity: list[_Number]
    top5: list[list[_Number | str]]
    kv: _Runs
    tested: NotRequired[_Whole]
    why: NotRequired[Annotated[str, msgspec.Meta(max_length=40)]]
    score: NotRequired[_Number]
    split: NotRequired[_Split]
    filled: NotRequired[_Runs]
    cycle: NotRequired[_Cycle]
    fidelity: NotRequired[_Agreement]
    pending: NotRequired[_Whole]
    fetched: NotRequired[_Whole]
    fetched_bytes: NotRequired[_Whole]


_NULL = msgspec.Raw(b"null")


class _Lane(msgspec.Struct):
    id: str
    tokens: list[_Token]
    prefill: msgspec.Raw = _NULL
    fidelity: msgspec.Raw = _NULL
    end: msgspec.Raw = _NULL


class _File(msgspec.Struct):
    trace_version: msgspec.Raw = _NULL
    header: msgspec.Raw = _NULL
    lanes: msgspec.Raw = _NULL
    done: msgspec.Raw = _NULL


_ANY = msgspec.json.Decoder()
_FILE = msgspec.json.Decoder(_File)
_LANES = msgspec.json.Decoder(list[_Lane])
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TABLE = msgspec.json.Decoder(list[list[_Number]])
_TEXT = msgspec.json.Decoder(str)
# Fields that grow with a run, by the object that holds them.
_HEADER_LISTS = {"prompt": _TEXT, "prompt_ids": msgspec.json.Decoder(list[_Whole]), "prompt_pieces": msgspec.json.Decoder(list[str])}
_PREFILL_LISTS = {"similarity": _TABLE, "kv": msgspec.json.Decoder(_Runs)}
_FIDELITY_LISTS = dict.fromkeys(FIDELITY_ROWS, _TABLE)
_END_LISTS = {"rest": _TEXT, "text": _TEXT}


def _decoded(decoder, raw, place: str, path: str, lanes=None):
    """What `decoder` makes of JSON bytes; `lanes` are the bytes of all lanes, if it is they that are read: their ids are in the sentence.

    Raises:
        TraceError: no JSON, or not of the decoder's kind.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise TraceError(_damage(str(error), place, path, lanes)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TraceError(f"The file is not a trace: it is no valid JSON ({error}).") from None


def _damage(message: str, place: str, path: str, lanes=None) -> str:
    """A sentence from what msgspec says, such as "Expected `int`, got `str` - at `$[1].tokens[3].t_ns`"."""
    what, _, where = message.partition(" - at `$")
    where = where.rstrip("`")
    if path == "$" and not where and what.startswith("Expected `object`"):
        return "The file is not a trace: an object is expected at the top."
    inside = re.fullmatch(r"\[(\d+)\](?:\.tokens(?:\[(\d+)\])?)?(.*)", where) if lanes is not None else None
    rest = where
    if inside:
        lane, token, rest = inside.groups()
        place = f"lanes[{lane}]"
        if token is not None:
            place = f"token {token} of lane {_id_of(lanes, int(lane))!r}"
    name = re.match(r"\.(\w+)", rest)
    path = f"{path}{where}"
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        place = f"{name[1]} of {place}" if name else place
        return f"The trace is damaged: field {missing[1]} is missing in {place} ({path})."
    if "out of range" in what:
        what = "no finite number"
    return f"The trace is damaged: {f'{name[1]} of {place}' if name else place} is not of the right kind: {what} ({path})."


def _id_of(lanes, at: int) -> str:
    class Named(msgspec.Struct):
        id: str = "?"

    try:
        return msgspec.json.decode(lanes, type=list[Named])[at].id[:60]
    except (msgspec.DecodeError, IndexError):
        return "?"


def _object(raw, lists: dict, most: int, place: str, path: str) -> dict:
    """An object from JSON bytes: fields named in `lists` by their decoders, the others as they are, but no more than `most` bytes of them.

    Their size is known before they are made: bytes are few, objects twenty times as many.
    """
    _need(bytes(memoryview(raw)[:1]) == b"{", f"The trace is damaged: {place} is missing or not an object")
    known = msgspec.defstruct("Known", [(name, msgspec.Raw, _NULL) for name in lists])
    long = _decoded(msgspec.json.Decoder(known), raw, place, path)
    rest = len(raw) - sum(len(getattr(long, name)) for name in lists)
    _need(
        rest <= most, f"The trace is damaged: {place} holds {rest:,} bytes beside what is known of it, and no trace has more than {most:,}"
    )
    fields = _decoded(_FIELDS, raw, place, path)
    return {name: _decoded(lists.get(name, _ANY), value, f"{name} of {place}", f"{path}.{name}") for name, value in fields.items()}


def _read_lane(lane: _Lane, layers: int, prompt: int, path: str) -> LaneTrace:
    """Everything in a lane that a reader counts on; `prompt` is the number of prompt tokens."""
    name = f"of lane {lane.id!r}"
    for j, token in enumerate(lane.tokens):
        wrong = _wrong(token, j, layers, prompt)
        if wrong:
            place = f"token {j} {name}"
            field, words = wrong
            raise TraceError(f"The trace is damaged: {words.format(place=place)} ({path}.tokens[{j}].{field}).")
    prefill = fidelity = end = None
    if lane.prefill != _NULL:
        place = f"the prefill {name}"
        prefill = _object(lane.prefill, _PREFILL_LISTS, OTHER_BYTES, place, f"{path}.prefill")
        _check(prefill, {"t_ns": int}, place)
        _need(_owners(prefill.get("kv", []), layers), f"The trace is damaged: kv of {place} is not a list of layer ranges")
        _need_table(prefill.get("similarity", []), layers, f"similarity of {place}")
    if lane.fidelity != _NULL:
        place = f"the fidelity {name}"
        fidelity = _object(lane.fidelity, _FIDELITY_LISTS, OTHER_BYTES, place, f"{path}.fidelity")
        _check(fidelity, {"start": int, "mean": dict, **dict.fromkeys(FIDELITY_ROWS, list)}, place)
        for key in FIDELITY_ROWS:
            _need_table(fidelity[key], layers, f"{key} of {place}")
            _need(isinstance(fidelity["mean"].get(key), (int, float)), f"The trace is damaged: {place} lacks a mean")
    if lane.end != _NULL:
        place = f"the end {name}"
        end = _object(lane.end, _END_LISTS, OTHER_BYTES, place, f"{path}.end")
        _check(end, {"reason": str, "rest": str}, place)
    return LaneTrace(lane.id, prefill, lane.tokens, fidelity, end)


def _wrong(token: dict, j: int, layers: int, prompt: int) -> tuple[str, str] | None:
    """The field of a token that does not fit its place, with words for it; None if all do."""
    if token["i"] != j:
        return "i", f"{{place}} carries the number {token['i']}"
    if not 0 <= token["exit_layer"] <= layers:
        return "exit_layer", f"{{place}} left at layer {token['exit_layer']} of {layers}"
    if token["position"] != prompt - 1 + j:
        return "position", f"{{place}} has the position {token['position']}"
    if len(token["similarity"]) != layers:
        return "similarity", "similarity of {place} is not a number for every layer"
    if not _owners(token["kv"], layers):
        return "kv", "kv of {place} is not a list of layer ranges"
    if len(token["top5"]) > 100 or not all(len(c) == 3 and isinstance(c[1], str) and not isinstance(c[2], str) for c in token["top5"]):
        return "top5", "top5 of {place} is not a list of candidates"
    if not all(len(f) == 4 and _owners([[*f[1:], f[0]]], layers) for f in token.get("filled", ())):
        return "filled", "filled of {place} is not a list of slots"
    return None


def _need_table(rows: list, layers: int, place: str) -> None:
    _need(len(rows) * layers <= MOST_CELLS, f"The trace is damaged: {place} has {len(rows):,} rows")
    _need(all(len(row) == layers for row in rows), f"The trace is damaged: {place} is not a number for every layer")


def _owners(runs: list, layers: int) -> bool:
    """Whether these are [first, last + 1, owner, step], in as many layers as there are at most."""
    return len(runs) <= layers and all(
        len(run) == 4
        and isinstance(run[2], str)
        and not (isinstance(run[0], str) or isinstance(run[1], str) or isinstance(run[3], str))
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
        _need(right, f"The trace is damaged: field {name} in {place} is not of kind {kind.__name__}")


def rounded(value: float | None, digits: int = 5) -> float | None:
    """A number for a trace: rounded, and None for what JSON cannot carry."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
