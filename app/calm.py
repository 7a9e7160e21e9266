"""What has to be in the page before Gradio's own script, which its `head` option is not: an icon, and the script of calm.js."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = f"<script>{Path(__file__).with_suffix('.js').read_text(encoding='utf-8')}</script>".encode()
# Without it a browser asks for /favicon.ico, which a page under a path of its own does not have.
ICON = (
    '<link rel="icon" href="data:image/svg+xml,%3Csvg xmlns=%22http://www.w3.org/2000/svg%22 viewBox=%220 0 100 100%22%3E'
    '%3Ctext y=%22.9em%22 font-size=%2290%22%3E🌊%3C/text%3E%3C/svg%3E">'
).encode()
BEFORE = b"<script>window.gradio_config"


class Calm:
    """ASGI middleware that puts both ahead of Gradio's into the page, and leaves everything else, and a page that it does not know, alone."""

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
                    message["body"] = body = message.get("body", b"").replace(BEFORE, ICON + SCRIPT + BEFORE, 1)
                    length = (b"content-length", str(len(body)).encode())
                    start["headers"] = [length if name == b"content-length" else (name, value) for name, value in start["headers"]]
                await send(start)
                start = None
            await send(message)

        await self.app(scope, receive, pass_on)
