"""What can be taken away from the page: the trace, its table, a replay that plays offline (`python -m app.export TRACE OUT.html`), and the Watch tab
as a static site (`python -m app.export --static DIR`)."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import stage
from app.recordings import Recording, read_recordings
from app.runs import Runs, to_json
from app.table import token_csv

if TYPE_CHECKING:
    from river_core.trace import Trace

REPLAY_CSS = Path(__file__).with_name("replay.css")
PAGE = """<!doctype html>
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
{main}
{data}
<script>{script}</script>
</body>
</html>
"""

SITE_README = """---
title: River Explorer, recorded
emoji: 🌊
colorFrom: blue
colorTo: indigo
sdk: static
app_file: index.html
license: apache-2.0
short_description: Recorded runs of a model that decides how deep to think
tags: [early-exit, llm-inference, kv-cache, visualization]
---

# River Explorer, recorded

`index.html` plays {count} recordings of real runs. It is one file that needs no server, no network and no model: open it from a disk, or serve this folder from any address as it is.
It was written by `python -m app.export --static DIR` of River Explorer, which also decodes prompts of your own.
"""


def replay(trace: Trace) -> str:
    """One self-contained .html page that plays the trace with the same stage, from any disk, without a network.

    Its content policy forbids every request and every script but its own. Text of the trace is data in there: it reaches
    the page as JSON without `<`, and the title escaped.
    """
    header = trace.header
    told = header.get("recording")
    title = told.get("title") if isinstance(told, dict) else None
    return _page(
        title=f"{title if isinstance(title, str) else 'Replay'} · River Explorer",
        subtitle=f"A replay of a run of {header['model']['name']} on {header['device']}, {header['created'][:10]}. This file needs no network.",
        style=stage.style(),
        main='<main id="stage"></main>',
        data=f'<script type="application/json" id="trace">{to_json(trace.to_dict())}</script>',
        script=stage.script(*stage.REPLAY_MODULES) + "\nopenReplay();\n",
    )


def site(recordings: Mapping[str, Recording]) -> str:
    """The Watch tab as one self-contained .html page: every recording lies in it, and it asks for nothing.

    Args:
        recordings: by slug, in the order of the list; at least one.
    """
    traces = (
        f'<script type="application/json" class="trace" data-slug="{html.escape(slug)}">{to_json(json.loads(one.text))}</script>'
        for slug, one in recordings.items()
    )
    return _page(
        title="River Explorer",
        subtitle="Watch a language model decide, token by token, how many of its layers it needs.",
        style=stage.style("watch.css"),
        main='<main><div class="page-note" hidden></div><div id="watch" class="watch"></div><div id="stage"></div></main>',
        data="\n".join(traces),
        script=stage.script(*stage.SITE_MODULES) + "\nopenSite();\n",
    )


def _page(*, title: str, subtitle: str, style: str, main: str, data: str, script: str) -> str:
    """A page whose content policy forbids every request and every script but `script`; `title` and `subtitle` are escaped here."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    style = REPLAY_CSS.read_text(encoding="utf-8") + style
    return PAGE.format(
        policy=policy, title=html.escape(title), subtitle=html.escape(subtitle), style=style, main=main, data=data, script=script
    )


def write_site(folder: Path, recordings: Mapping[str, Recording]) -> None:
    """Write the static site into a folder, which is made if need be: index.html, and a README.md whose front matter makes it a static Space.

    Raises:
        OSError: if the folder cannot be written.
        ValueError: with a sentence, if there is no recording.
    """
    from river_core.files import appears_whole

    if not recordings:
        raise ValueError("There are no recordings here, so there is nothing to show.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"index.html": site(recordings), "README.md": SITE_README.format(count=len(recordings))}.items():
        with appears_whole(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")


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
        print("usage: python -m app.export TRACE OUT.html\n       python -m app.export --static DIR", file=sys.stderr)
        return 2
    try:
        if argv[0] == "--static":
            write_site(Path(argv[1]), read_recordings())
            return 0
        page = replay(Trace.load(argv[0]))
        with appears_whole(Path(argv[1])) as partial:
            partial.write_text(page, encoding="utf-8")
    except (RiverError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {argv[1]} could not be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
