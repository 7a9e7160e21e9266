"""What can be taken away from the page: the trace, its table, and a replay that plays offline: `python -m app.export TRACE OUT.html`."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import stage
from app.runs import Runs, to_json
from app.table import token_csv

if TYPE_CHECKING:
    from river_core.trace import Trace

REPLAY_CSS = Path(__file__).with_name("replay.css")
REPLAY = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header class="masthead">
<div><h1>River Explorer</h1><p>{subtitle}</p></div>
<button id="theme" type="button">Dark</button>
</header>
<main id="stage"></main>
<script type="application/json" id="trace">{trace}</script>
<script>{script}</script>
</body>
</html>
"""


def replay(trace: Trace) -> str:
    """One self-contained .html page that plays the trace with the same stage, from any disk, without a network.

    Its content policy forbids every request and every script but its own. Text of the trace is data in there: it reaches
    the page as JSON without `<`, and the title escaped.
    """
    header = trace.header
    told = header.get("recording")
    title = told.get("title") if isinstance(told, dict) else None
    model = header["model"]["name"]
    script = stage.script("replay.js") + "\nopenReplay();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return REPLAY.format(
        policy=policy,
        title=html.escape(f"{title if isinstance(title, str) else 'Replay'} · River Explorer"),
        subtitle=html.escape(f"A replay of a run of {model} on {header['device']}, {header['created'][:10]}. This file needs no network."),
        style=REPLAY_CSS.read_text(encoding="utf-8") + stage.style(),
        trace=to_json(trace.to_dict()),
        script=script,
    )


def download(runs: Runs, wanted: Any) -> dict[str, str]:
    """A file for the browser to save: {name, text}, or {error} with one sentence.

    Args:
        runs: where the trace is looked up.
        wanted: {id, kind}; `kind` is "json" (the trace), "csv" (its tokens) or "html" (the replay).
    """
    if not isinstance(wanted, dict) or str(wanted.get("kind")) not in ("json", "csv", "html"):
        return {"error": "There is no such kind of file."}
    trace = runs.trace(str(wanted.get("id")))
    if trace is None:
        return {"error": "The server does not hold this run any more, or it has not ended yet. Run it again, or open its file again."}
    kind = str(wanted["kind"])
    if kind == "json":
        text = to_json(trace.to_dict())
    elif kind == "html":
        text = replay(trace)
    else:
        text = token_csv(trace)
    return {"name": f"{file_stem(trace)}.{kind}", "text": text}


def file_stem(trace: Trace) -> str:
    """A file name that tells what it is, such as "river-holes" or "river-2026-12-01-05-17-57"; letters, digits and hyphens only."""
    told = trace.header.get("recording")
    words = told.get("slug") if isinstance(told, dict) else None
    words = words if isinstance(words, str) else trace.header["created"][:19]
    return "river-" + (re.sub(r"[^A-Za-z0-9]+", "-", words)[:60].strip("-") or "trace")


def main(argv: list[str]) -> int:
    from river_core.errors import RiverError
    from river_core.files import appears_whole
    from river_core.trace import Trace

    if len(argv) != 2:
        print("usage: python -m app.export TRACE OUT.html", file=sys.stderr)
        return 2
    try:
        page = replay(Trace.load(argv[0]))
        with appears_whole(Path(argv[1])) as partial:
            partial.write_text(page, encoding="utf-8")
    except RiverError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {argv[1]} could not be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
