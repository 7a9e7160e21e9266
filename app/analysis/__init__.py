"""The Analyse tab: charts of what is open in the stage, its tokens as a table, a sweep over thresholds, and two traces side by side.

All that is drawn is drawn by the tab's own script in one gr.HTML; Python answers its questions with figures and facts as data.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route

from app import export, stage
from app.desk import Desk
from app.limits import Limits, address_of
from app.runs import Runs

HERE = Path(__file__).parent
PLOTLY = Path(find_spec("plotly").origin).parent / "package_data" / "plotly.min.js"
"""The library as it lies in the Python package: it is loaded when the tab is first opened, and from this server alone."""
PLOTLY_PATH = "gradio_api/river/plotly.min.js"
"""Where the page finds it, relative to its root: a path that tells nothing of the server's folders, and that no proxy's prefix can equal, since
Starlette takes the prefix off a path that already came without it (`/river/plotly.min.js` behind `/river` became `/plotly.min.js`)."""

SWEEP_METHODS = {
    "river": "River",
    "masking": "KV masking",
    "recompute": "Recompute",
    "propagation": "State propagation",
    "monotone": "Monotone exit",
    "int4": "Full 4-bit",
}
SWEEP_REPEATS = (1, 5)
RESULT_BYTES = 2 << 20
GONE = "The server does not hold this run any more. Open it again."
NOTHING = "Nothing is open yet. Open a recording in Watch, or make a run."
TABLE_COLUMNS = [
    "lane",
    "token",
    "text",
    "position",
    "from_prompt",
    "exit_layer",
    "layers_run",
    "t_ms",
    "similarity",
    "top1",
    "agrees",
    "kl",
]


def build(runs: Runs, desk: Desk | None = None) -> None:
    """The content of the tab; called where it belongs, inside its gr.Tab. `desk` answers its questions."""
    desk = desk or Desk(runs.limits.questions)

    # Functions that the tab's script calls by itself; Gradio always hands them one argument.
    def charts(wanted: dict[str, Any]) -> dict[str, Any]:
        """{charts: list of {name, title, tag, note, figure}} of a trace, or {error}. `wanted` is {id, columns}."""
        from app.charts import figures

        trace = _trace(runs, wanted)
        columns = wanted.get("columns")
        return {"charts": figures(trace, columns if columns in (1, 2, 3) else 3)} if trace else {"error": GONE}

    def table_csv(wanted: dict[str, Any]) -> dict[str, str]:
        """{name, text} of the table of all tokens, or {error}: the file that the stage saves too."""
        return export.download(runs, {"id": wanted.get("id"), "kind": "csv"})

    async def sweep_start(_: Any = None) -> dict[str, Any]:
        """What the controls of a sweep begin with: {methods: [[name, label], ...], taus: text}."""
        presets = sorted(runs.presets().values())
        return {"methods": [list(item) for item in SWEEP_METHODS.items()], "taus": ", ".join(f"{tau:g}" for tau in default_taus(presets))}

    def compare_with(wanted: dict[str, Any]) -> dict[str, Any]:
        """{diff} of two traces, or {error}. `wanted` is {a, b} with ids, or {a, file} with a file in base64."""
        from app.analysis.diff import diff

        try:
            other = runs.open_file(base64.b64decode(wanted["file"], validate=True))[0] if "file" in wanted else wanted.get("b")
        except (binascii.Error, TypeError, ValueError):
            return {"error": "The file did not arrive whole. Open it again."}
        a, b = runs.trace(str(wanted.get("a"))), runs.trace(str(other))
        return {"diff": diff(a, b), "id": other} if a and b else {"error": GONE}

    async def recordings(_: Any = None) -> list[list[str]]:
        """[id, title] of every recording."""
        return [[f"recording:{slug}", recording.title] for slug, recording in runs.recordings.items()]

    def saved_result(text: str) -> dict[str, Any]:
        """{charts} of a saved sweep or benchmark, or {error}."""
        try:
            return {"charts": read_result(text)}
        except ValueError as error:
            return {"error": str(error)}

    panel = gr.HTML(
        "",
        html_template='<div class="analysis"></div>',
        js_on_load=script(),
        server_functions=[*map(desk.asked, [charts, table_csv, compare_with, saved_result]), sweep_start, recordings],
        plotly=PLOTLY_PATH,
        limits={"sent": runs.limits.sent, "unpacked": runs.limits.unpacked, "result": RESULT_BYTES},
        apply_default_css=False,
        elem_id="analysis",
    )
    table = gr.Dataframe(
        headers=TABLE_COLUMNS[:10],
        label="Tokens",
        interactive=False,
        show_search="search",
        max_height=430,
        max_chars=60,
        buttons=["copy", "fullscreen"],
        elem_id="analysis-table",
    )

    def rows_of(wanted: dict[str, Any]):
        """The rows of one lane, or of all; or {error}."""
        from app.charts import token_table

        trace = _trace(runs, wanted)
        if trace is None:
            return {"error": GONE}
        rows = token_table(trace)
        lane = wanted.get("lane")
        rows = rows[rows["lane"] == lane] if lane else rows
        return rows[[name for name in TABLE_COLUMNS if name in rows]]

    async def tokens(event: gr.EventData):
        rows = await desk.answer(rows_of, event._data)
        if isinstance(rows, dict):
            raise gr.Error(rows["error"], print_exception=False)
        return rows

    async def sweep(event: gr.EventData, request: gr.Request) -> AsyncIterator[str]:
        session = request.session_hash or ""
        job = await desk.answer(_sweep_or_sentence, runs, event._data)
        run = runs.refuse(session, job["error"]) if isinstance(job, dict) else runs.start(session, None, job, address=address_of(request))
        async with aclosing(runs.stream(run)) as messages:
            async for message in messages:
                yield message

    def stop(request: gr.Request) -> None:
        runs.stop_session(request.session_hash or "")

    private = {"show_progress": "hidden", "api_visibility": "private"}
    # Past Gradio's queue, which has one length for everything and refuses runs when it is full. The desk answers in the order of the questions: a lane that is
    # chosen while the table is still filling comes after the one before it, and is not dropped.
    panel.tokens(tokens, None, table, trigger_mode="multiple", queue=False, **private)
    panel.sweep(sweep, None, panel, trigger_mode="multiple", concurrency_limit=None, **private)
    panel.sweep_stop(stop, None, None, queue=False, **private)


def _trace(runs: Runs, wanted: dict[str, Any]):
    return runs.trace(str(wanted.get("id")))


def _sweep_or_sentence(runs: Runs, wanted: Any) -> Any:
    """A sweep's job, or {error}: what the desk hands back."""
    try:
        return sweep_job(runs, wanted)
    except ValueError as error:
        return {"error": str(error)}


def default_taus(presets: list[float]) -> list[float]:
    """Thresholds around a model's presets: those, one below and one above; the paper's range where nothing is known."""
    if not presets:
        return [0.9, 0.95, 0.97, 0.98, 0.99]
    low, high = presets[0], presets[-1]
    return sorted({round(max(1 - 2 * (1 - low), low / 2), 3), *presets, round(1 - (1 - high) / 2, 3)})


def sweep_job(runs: Runs, wanted: dict[str, Any]):
    """The work of a sweep on the prompt of an open trace, for `Runs.start`.

    Args:
        wanted: {id, methods, taus (text), tokens, repeats} as the page sends it.

    Raises:
        ValueError: with one sentence, if a control holds something that cannot be used.
    """
    trace = _trace(runs, wanted) if isinstance(wanted, dict) else None
    if not isinstance(wanted, dict):
        raise ValueError(NOTHING)
    if trace is None:
        raise ValueError(GONE if wanted.get("id") else NOTHING)
    asked = wanted.get("methods")
    methods = [name for name in SWEEP_METHODS if isinstance(asked, list) and name in asked]
    if not methods:
        raise ValueError("No method is ticked. Tick River, for example.")
    try:
        tokens, repeats = int(wanted.get("tokens")), int(wanted.get("repeats"))
    except (TypeError, ValueError, OverflowError):
        raise ValueError("Tokens and repeats must be whole numbers, such as 48 and 3.") from None
    limits: Limits = runs.limits
    if not 1 <= tokens <= limits.tokens:
        raise ValueError(f"Tokens can be 1 to {limits.tokens:,} here, not {tokens:,}.")
    if not SWEEP_REPEATS[0] <= repeats <= SWEEP_REPEATS[1]:
        raise ValueError(f"Repeats can be {SWEEP_REPEATS[0]} to {SWEEP_REPEATS[1]} here; `python -m river_core sweep` takes more.")
    thresholds = len(str(wanted.get("taus") or "").replace(",", " ").replace(";", " ").split())
    work = (1 + len(methods) * max(thresholds, 1)) * tokens * repeats
    if work > limits.sweep:
        raise ValueError(
            f"This sweep would make up to {work:,} tokens (lanes x tokens x repeats), and at most {limits.sweep:,} are made here. Take fewer of one of them."
        )
    if len(trace.header["prompt"]) > limits.prompt:
        raise ValueError(f"The prompt has {len(trace.header['prompt']):,} characters, and at most {limits.prompt:,} are read here.")
    prompt, chat, text = trace.header["prompt"], bool(trace.header.get("chat", True)), str(wanted.get("taus") or "")

    def job(model: Any, stop) -> Iterator[dict[str, Any]]:
        from app.charts import sweep_figures
        from river_core.measure.sweep import read_taus, sweep

        event = None
        for event in sweep(model, prompt, methods, read_taus(text), max_new_tokens=tokens, repeats=repeats, chat=chat, stop=stop):
            yield event
        yield {"type": "charts", "charts": sweep_figures(event)}

    return job


def read_result(text: str) -> list[dict[str, Any]]:
    """Charts of a file that `python -m river_core sweep --json` or `bench --json` wrote, told apart by what is in it.

    Raises:
        ValueError: with one sentence, if it is neither.
    """
    from app.charts import bench_figures, sweep_figures

    try:
        result = json.loads(str(text)[: RESULT_BYTES + 1])
    except (ValueError, RecursionError):
        raise ValueError("The file is no valid JSON. A result is what `sweep --json` or `bench --json` prints.") from None
    if isinstance(result, dict) and "points" in result:
        made = sweep_figures(result)
        if not made:
            raise ValueError("This sweep was stopped before its first repeat was finished, so it holds no points.")
        return made
    if isinstance(result, dict) and "lanes" in result and "rounds" in result:
        return bench_figures(result)
    raise ValueError("The file is the result neither of a sweep nor of a benchmark. A trace is opened by dropping it on the page.")


def modules(entry: Path = HERE / "analysis.js") -> list[Path]:
    """A script and everything it imports, each once and behind what it needs."""
    found: dict[Path, None] = {}
    for line in stage.IMPORT.findall(entry.read_text(encoding="utf-8")):
        needed = (entry.parent / line.rsplit('"', 2)[1]).resolve()
        found |= dict.fromkeys(modules(needed))
    return [*found, entry.resolve()]


@cache
def script() -> str:
    """What gr.HTML runs on load: the tab's modules and those of the stage that they use, joined as the stage's are."""
    paths = dict.fromkeys(modules())
    texts = [stage.EXPORT.sub("", stage.IMPORT.sub("", path.read_text(encoding="utf-8"))) for path in paths]
    return "\n".join(texts) + "\nconnectAnalysis({ element, props, server, trigger, watch });\n//# sourceURL=river-analysis.js\n"


def style() -> str:
    return (HERE / "analysis.css").read_text(encoding="utf-8")


def routes() -> list[Route]:
    """What the page fetches from this server beside Gradio's own."""

    async def plotly(_: Request) -> FileResponse:
        return FileResponse(PLOTLY, media_type="text/javascript", headers={"Cache-Control": "public, max-age=86400"})

    return [Route(f"/{PLOTLY_PATH}", plotly)]
