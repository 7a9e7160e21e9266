"""Questions of the page's script: one worker answers them in turn, so that no visitor's analysis takes the engine's cores or the server's threads from another."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from app.model_host import is_sentence

log = logging.getLogger(__name__)

BUSY = "Too many others are waiting for charts, tables and files. Try again in a minute."
WRONG = "The page asked for something that the server does not understand. Reload the page."


class Desk:
    """One worker thread and the questions before it, at most `most` of them."""

    def __init__(self, most: int):
        self._most = most
        self._waiting = 0  # counted on the event loop alone
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="desk")

    async def answer(self, work: Callable[..., Any], *args: Any) -> Any:
        """What `work` returns, or {error: a sentence}."""
        if self._waiting >= self._most:
            return {"error": BUSY}
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, functools.partial(answered, work, *args))
        finally:
            self._waiting -= 1

    def asked(self, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`work` as a function that the page's script may call."""

        @functools.wraps(work)
        async def ask(wanted: Any = None) -> Any:
            return await self.answer(work, wanted)

        return ask


def answered(work: Callable[..., Any], *args: Any) -> Any:
    """What `work` returns; an error as {error: a sentence}, with the details in the log if it is nobody's fault but ours."""
    try:
        return work(*args)
    except Exception as error:
        if is_sentence(error):
            return {"error": str(error)}
        if isinstance(error, MemoryError):
            return {"error": "There is not enough memory for this. Try a smaller run."}
        if not isinstance(error, (TypeError, AttributeError)) or (args and isinstance(args[0], dict)):
            log.exception("a question of the page failed")
        return {"error": WRONG}
