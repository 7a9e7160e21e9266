"""A script that has to be in the page before Gradio's own, which its `head` option is not: see calm.js."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = f"<script>{Path(__file__).with_suffix('.js').read_text(encoding='utf-8')}</script>".encode()
BEFORE = b"<script>window.gradio_config"


class Calm:
    """ASGI middleware that puts the script ahead of Gradio's into the page, and leaves everything else, and a page that it does not know, alone."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        start = None  # of a page, until its length is known

        async def pass_on(message: dict[str, Any]) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and dict(message["headers"]).get(b"content-type", b"").startswith(b"text/html"):
                start = message
                return
            if start is not None:
                if not message.get("more_body"):  # a page comes in one piece; one that does not goes on as it is
                    message["body"] = body = message.get("body", b"").replace(BEFORE, SCRIPT + BEFORE, 1)
                    length = (b"content-length", str(len(body)).encode())
                    start["headers"] = [length if name == b"content-length" else (name, value) for name, value in start["headers"]]
                await send(start)
                start = None
            await send(message)

        await self.app(scope, receive, pass_on)
