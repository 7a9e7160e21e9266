"""A bound on the bodies of requests: Gradio reads any JSON whole into memory before a function of the page can look at its size."""

from __future__ import annotations

import json
from typing import Any


class BodyLimit:
    """ASGI middleware that answers a request whose body is longer than `most` bytes with status 413 and a sentence.

    Files that Gradio itself takes in have their own bound, `max_file_size`.
    """

    def __init__(self, app: Any, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH") or scope["path"].endswith("/upload"):
            await self.app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if not told.isdigit() or int(told) > self.most:
            await self._refuse(send)
            return
        length, refused = 0, False

        async def counted() -> dict[str, Any]:
            nonlocal length, refused
            message = await receive()
            length += len(message.get("body", b""))
            if length > self.most and not refused:
                refused = True
                await self._refuse(send)
            # What is too long is not handed on; to the application its client has left.
            return {"type": "http.disconnect"} if refused else message

        async def pass_on(message: dict[str, Any]) -> None:
            if not refused:
                await send(message)

        try:
            await self.app(scope, counted, pass_on)
        except Exception:
            if not refused:
                raise

    async def _refuse(self, send: Any) -> None:
        text = f"The request is larger than {self.most >> 20} MB, which is the most that this page takes."
        body = json.dumps({"detail": text, "error": text}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})
