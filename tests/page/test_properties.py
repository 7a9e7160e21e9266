"""Traces of any content: whole ones come back equal and are shown, damaged ones are refused in a sentence, and neither costs more than its size."""

from __future__ import annotations

import base64
import copy
import csv
import gzip
import io
import json
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.analysis.diff import diff
from app.charts import figures, token_table
from app.export import replay
from river_core import Trace, TraceError, compare
from river_core.kv_cache import OWNER_NAMES
from river_core.methods import METHODS
from tests.page.server import never, serve
from tests.properties import cases, is_sentence

PATIENCE_S = 20
"""For one small file, on any machine: what takes longer does not grow with the file's size but with something in it."""


@pytest.fixture(scope="module")
def headers(tiny) -> list[dict]:
    """Headers as the engine writes them."""
    runs = [("backbone", "river:0.5", "verified"), ("backbone", "river:0.5", "masking")]
    modes = ("free", "same-exits")
    return [
        Trace.from_events(compare(tiny, "Hi", lanes, max_new_tokens=2, mode=mode)).header for lanes, mode in zip(runs, modes, strict=True)
    ]


COSINES = st.one_of(st.none(), st.floats(-1, 1).map(lambda value: round(value, 5)))
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(["</script>", "=1+1", "\u2028", "\ufffd", "${x}", "a\tb", "-1;2"]),
)
NS = st.integers(0, 10**11)


@st.composite
def data(draw, header: dict) -> dict:
    """JSON data of a trace as an engine could have written it."""
    layers, prompt = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    header = copy.deepcopy(header)
    header["model"]["n_layers"] = layers
    header["prompt_ids"], header["prompt_pieces"] = list(range(prompt)), [draw(TEXTS) for _ in range(prompt)]
    header["prompt"] = "".join(header["prompt_pieces"])
    names = draw(st.lists(st.sampled_from(list(METHODS)), min_size=1, max_size=4))
    ids = [name if name not in names[:at] else f"{name}-{names[:at].count(name) + 1}" for at, name in enumerate(names)]
    rules = st.sampled_from(
        [{"name": "never"}, {"name": "similarity", "tau": 0.5, "floor": 1, "layers": None}, {"name": "fixed", "depth": 1}]
    )
    header["lanes"] = [
        {"id": lane, "method": name, "label": draw(TEXTS), "rule": draw(rules), "options": {}, "note": "", "untrained_head": False}
        for lane, name in zip(ids, names, strict=True)
    ]
    for name in draw(
        st.lists(st.sampled_from(["bytes", "kernels", "threads", "notices", "versions", "timing", "mode", "chat"]), max_size=3)
    ):
        header.pop(name, None)  # older traces lack some of these
    lanes = [draw(lane(lane_id, layers, prompt)) for lane_id in ids]
    done = draw(st.sampled_from([None, {"reason": "stop"}, {"reason": "finished", "memory": {"peak_bytes": 10**8, "of": "process"}}]))
    return {"trace_version": 1, "header": header, "lanes": lanes, "done": done}


@st.composite
def lane(draw, lane_id: str, layers: int, prompt: int) -> dict:
    count, compared, cycles = draw(st.integers(0, 6)), draw(st.booleans()), draw(st.booleans())
    tokens = [draw(token(lane_id, i, layers, prompt, compared, cycles)) for i in range(count)]
    prefill = {
        "type": "prefill",
        "lane": lane_id,
        "t_ns": draw(NS),
        "exit_layer": layers,
        "shared": True,
        "kv": [[0, layers, "backbone", prompt - 1]],
    }
    if draw(st.booleans()):
        prefill["similarity"] = [[draw(COSINES) for _ in range(layers)] for _ in range(prompt)]
    rows = [[round(draw(st.floats(-1, 1)), 4) for _ in range(layers)] for _ in range(max(0, count - 1))]
    names = ("k_cos", "v_cos", "k_err", "v_err")
    fidelity = {
        "type": "fidelity",
        "lane": lane_id,
        "start": prompt,
        **dict.fromkeys(names, rows),
        "holes": 0,
        "mean": dict.fromkeys(names, 0.5),
    }
    end = {
        "type": "end",
        "lane": lane_id,
        "reason": "length",
        "tokens": count,
        "decode_ns": 1,
        "rest": draw(TEXTS),
        "text": "",
        "message": None,
        "kv_bytes": 9,
    }
    return {
        "id": lane_id,
        "prefill": prefill if count else draw(st.sampled_from([None, prefill])),
        "tokens": tokens,
        "fidelity": fidelity if compared else None,
        "end": draw(st.sampled_from([None, end])),
    }


@st.composite
def token(draw, lane_id: str, i: int, layers: int, prompt: int, compared: bool, cycles: bool) -> dict:
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    edges = [0, *cuts, layers]
    position = prompt - 1 + i
    made = {
        "type": "token", "lane": lane_id, "i": i, "id": draw(st.integers(0, 10**5)), "text": draw(TEXTS), "t_ns": draw(NS), "from_prefill": i == 0,
        "position": position, "exit_layer": draw(st.integers(0, layers)), "layers_run": draw(st.integers(0, layers)), "river_layers": draw(st.integers(0, layers)),
        "similarity": [draw(COSINES) for _ in range(layers)], "tested": 0,
        "top5": [[k, draw(TEXTS), draw(st.one_of(st.none(), st.floats(0, 1)))] for k in range(draw(st.integers(0, 5)))],
        "kv": [[a, b, draw(st.sampled_from(OWNER_NAMES)), draw(st.integers(-1, position))] for a, b in zip(edges, edges[1:], strict=False)],
    }  # fmt: skip
    if draw(st.booleans()):
        made["split"] = {"backbone_ns": draw(NS), "river_ns": 0, "head_ns": 1}
    if draw(st.booleans()):
        made |= {"why": draw(st.sampled_from(["test", "end", "forced", "held"])), "score": draw(st.one_of(st.none(), st.floats(-1, 1)))}
    if i and draw(st.booleans()):
        made["filled"] = [[draw(st.integers(0, position)), 0, layers, "backbone"]]
    if compared:
        made["fidelity"] = {"choice": 1, "agrees": draw(st.booleans()), "kl": draw(st.floats(0, 50))}
    if cycles and i:
        made["cycle"] = {"number": i, "drafted": 2, "accepted": 1, "place": 0}
    return made


@pytest.fixture(scope="module")
def page():
    served = serve(never)
    yield served
    served.demo.close()


@pytest.fixture(scope="module")
def analysis(page):
    """Asks the functions of the Analyse tab over HTTP."""
    http = httpx.Client(timeout=2 * PATIENCE_S)
    panel = next(block for block in page.demo.blocks.values() if getattr(block, "elem_id", None) == "analysis")

    def ask(name, argument):
        body = {"component_id": panel._id, "fn_name": name, "data": argument, "session_hash": "test"}
        return http.post(f"{page.url}/gradio_api/component_server", json=body).raise_for_status().json()

    yield ask
    http.close()


def packed(made: dict, gzipped: bool) -> bytes:
    raw = json.dumps(made).encode()
    return gzip.compress(raw, mtime=0) if gzipped else raw


@cases(10)
@given(st.data(), st.booleans())
def test_a_whole_trace_comes_back_equal_and_everything_on_the_page_shows_it(page, analysis, headers, draw, gzipped):
    made = draw.draw(data(draw.draw(st.sampled_from(headers))))
    raw = packed(made, gzipped)
    assert Trace.from_bytes(raw).to_dict() == made
    start = time.monotonic()
    opened = page.ask("open_trace", {"name": "x.json", "data": base64.b64encode(raw).decode()})
    assert json.loads(opened["trace"]) == made
    charts = analysis("charts", {"id": opened["id"], "columns": 2})["charts"]
    saved = {kind: page.ask("download", {"id": opened["id"], "kind": kind})["text"] for kind in ("json", "csv", "html")}
    both = analysis("compare_with", {"a": opened["id"], "file": base64.b64encode(raw).decode()})["diff"]
    assert time.monotonic() - start < PATIENCE_S
    assert json.loads(saved["json"]) == made
    assert made["header"]["model"]["name"] in saved["html"]
    tokens = [token for lane in made["lanes"] for token in lane["tokens"]]
    rows = list(csv.DictReader(io.StringIO(saved["csv"])))
    assert [int(row["id"]) for row in rows] == [token["id"] for token in tokens]
    assert [json.loads(row["text"]) for row in rows] == [token["text"] for token in tokens]
    assert both["card"] == [] and all(lane["first"] is None for lane in both["lanes"])
    assert all(json.loads(chart["figure"])["data"] for chart in charts)


def places(value, path=()):
    """The path of every value in JSON data."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


ODD = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 10**30, -(10**30), 1.5, 1e308, "", "x", [], {}, [[]], "\ud800", "=cmd|' /C calc'!A0", "none", 2**63, -0.0]
    ),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(), max_size=6),
    st.lists(st.integers(), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
)


@st.composite
def damage(draw, made: dict) -> dict:
    """The data with some of its values changed, removed or doubled."""
    made = copy.deepcopy(made)
    for _ in range(draw(st.integers(1, 3))):
        everywhere = list(places(made))[1:]
        near = [path for path in everywhere if len(path) <= 4]  # most values are deep in the tokens
        path = draw(st.sampled_from(draw(st.sampled_from([everywhere, near]))))
        holder = made
        for key in path[:-1]:
            holder = holder[key]
        kind = draw(st.sampled_from(["change", "change", "remove", "double", "add"]))
        if kind == "change":
            holder[path[-1]] = draw(ODD)
        elif kind == "remove":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.insert(path[-1], draw(ODD) if kind == "add" else copy.deepcopy(holder[path[-1]]))
        else:
            holder[draw(st.text(max_size=5))] = draw(ODD)
    return made


@cases(60)
@given(st.data())
def test_a_damaged_trace_is_refused_in_a_sentence_or_can_be_shown(headers, draw):
    made = draw.draw(damage(draw.draw(data(draw.draw(st.sampled_from(headers))))))
    raw = json.dumps(made).encode()
    start = time.monotonic()
    try:
        trace = Trace.from_bytes(raw)
    except TraceError as error:
        assert is_sentence(error), str(error)
        return
    table = token_table(trace).to_csv(index=False)
    shown = [figure["figure"] for figure in figures(trace)]
    page = replay(trace)
    both = json.dumps(diff(trace, trace))
    assert time.monotonic() - start < PATIENCE_S
    # Nothing that is made of a file is out of proportion to it; the page's own scripts, styles and layouts come on top.
    empty = len(replay(Trace.from_dict(plainest(made))))
    assert max(len(table), sum(map(len, shown)), len(both)) < 100 * len(raw) + 100_000
    assert len(page) - empty < 10 * len(raw) + 10_000


def plainest(made: dict) -> dict:
    """A trace with nothing in it."""
    header = {"model": {"n_layers": 1, "name": "x"}, "lanes": [], "prompt": "x", "prompt_ids": [0], "prompt_pieces": ["x"], "device": "cpu"}
    header |= {"dtype": "float32", "sampler": {}, "created": "2026-01-01T00:00:00+00:00", "max_new_tokens": 1}
    return {"trace_version": 1, "header": header, "lanes": [], "done": None}


@cases(60)
@given(st.data(), st.booleans())
def test_a_file_with_other_bytes_in_it_is_refused_in_a_sentence_or_read(headers, draw, gzipped):
    made = draw.draw(data(headers[0]))
    raw = bytearray(packed(made, gzipped))
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(raw) - 1))
        kind = draw.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
        if kind == "flip":
            raw[at] ^= 1 << draw.draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[at + 1 :]
        elif kind == "insert":
            raw[at:at] = draw.draw(st.binary(min_size=1, max_size=4))
        elif len(raw) > 1:
            del raw[at]
    try:
        Trace.from_bytes(bytes(raw))
    except TraceError as error:
        assert is_sentence(error), str(error)


@cases(40)
@given(st.binary(max_size=200))
def test_any_bytes_are_no_trace(raw):
    for sent in (raw, b"\x1f\x8b" + raw, gzip.compress(raw)):
        with pytest.raises(TraceError) as error:
            Trace.from_bytes(sent)
        assert is_sentence(error.value), str(error.value)
