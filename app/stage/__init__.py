"""Delivers the stage: plain JavaScript modules and one style sheet, joined without a build step.

The modules import one another by relative path, so node runs and tests them as they are. A page cannot always serve
modules by path (a Space under a root path, a replay opened from disk), so it gets them joined in order of dependency,
with the import and export words taken off.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
MODULES = [
    *("ramp.js", "save.js", "store.js", "decision.js", "inspector.js", "layout.js", "surface.js", "paint.js", "grids.js", "table.js"),
    *("headline.js", "memory.js", "runcard.js", "race.js", "texts.js", "player.js", "transport.js", "frame.js"),
    *("place.js", "keys.js", "stage.js"),
]
"""In order of dependency. Their top-level names share one scope once joined and must differ."""

PAGE_MODULES = ["link.js", "upload.js", "note.js", "watch.js", "channel.js", "glue.js"]
"""What the page adds to them."""

REPLAY_MODULES = ["theme.js", "replay.js"]
"""What a replay adds to them."""

SITE_MODULES = ["theme.js", "link.js", "note.js", "watch.js", "site.js"]
"""What the static site adds to them."""

IMPORT = re.compile(r"^import\s[^;]*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?function|const|class)", re.MULTILINE)


def script(*extra: str) -> str:
    """The stage's modules, and any `extra` ones after them, as one script text that defines `createStage`."""
    texts = [(HERE / name).read_text(encoding="utf-8") for name in (*MODULES, *extra)]
    return "\n".join(EXPORT.sub("", IMPORT.sub("", text)) for text in texts)


def page_script() -> str:
    """What gr.HTML runs on load: the stage, and the glue that feeds it from Gradio."""
    return script(*PAGE_MODULES) + "\nconnect({ element, props, server, trigger, watch });\n//# sourceURL=river-stage.js\n"


def style(*extra: str) -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("stage.css", "grids.css", *extra))
