"""Runs: one engine thread, the line of runs in front of it, and what each run has said so far.

A run belongs to one visitor. Its events are kept as JSON text, written once by the engine thread; the page reads
them in batches and may ask for all of them again by the run's secret id.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import math
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import Any

from app.model_host import ModelHost, ModelUnavailable, is_sentence
from app.settings import Settings

log = logging.getLogger(__name__)

BEAT_S = 0.08
"""Time between two messages to the page: 12 a second, far below what a browser can draw."""

FINAL = ("done", "failed")


class Run:
    """One visitor's run: its settings, its stop flag, and its events as JSON texts."""

    def __init__(self, session: str, settings: Settings | None, state: str = "queued"):
        self.id = secrets.token_urlsafe(16)
        self.session = session
        self.settings = settings
        self.stop = threading.Event()
        self.created = time.monotonic()
        # On a ZeroGPU Space the visitor's quota hangs on this context, not on the engine thread's own.
        self.context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._events: list[str] = []
        self._seq = 0
        self._state = state
        self._message: str | None = None

    def push(self, event: dict[str, Any]) -> None:
        text = encode_event(event)
        with self._lock:
            self._events.append(text)

    def move(self, state: str, message: str | None = None) -> None:
        """Enter a state: queued, waiting (while the model loads), running, done or failed; the last two are final."""
        with self._lock:
            if self._state not in FINAL:
                self._state, self._message = state, message

    @property
    def final(self) -> bool:
        return self._state in FINAL

    @property
    def state(self) -> str:
        """As the page shows it: a run that was told to stop is "stopping" until the engine has let go of it."""
        return "stopping" if self.stop.is_set() and not self.final else self._state

    def message(self, start: int, queue: dict[str, int] | None) -> tuple[str, int]:
        """The channel message with the events from index `start` on, and the index to go on from.

        `seq` grows with every message of the run, so that a reader can tell which of two states is the newer one.
        The text is plain ASCII without `<`: unpaired surrogates stay escapes, and no reader can take it for markup.
        """
        with self._lock:
            events, state = self._events[start:], self.state
            message, seq = self._message, self._seq
            self._seq += 1
        head = {"run_id": self.id, "seq": seq, "state": state, "message": message, "queue": queue, "from": start}
        text = f'{to_json(head)[:-1]},"events":[{",".join(events)}]}}'
        return text, start + len(events)


class Runs:
    """The engine's only user: holds the line, the one engine thread, and the runs of the last minutes.

    The model is loaded on the engine thread too. PyTorch's OpenMP keeps worker threads for every thread that computes;
    with two such sets on as many cores as one needs, its workers go to sleep between products and decoding takes twice
    as long.

    `compare` has the signature of `river_core.compare`. Runs are dropped `ttl_s` after their start or when more than
    `keep` are held; at most `waiting` runs may stand in line.
    """

    def __init__(
        self,
        host: ModelHost,
        compare: Callable[..., Iterator[dict[str, Any]]],
        *,
        keep: int = 32,
        waiting: int = 16,
        ttl_s: float = 900.0,
    ):
        self._host = host
        self._compare = compare
        self._keep, self._waiting, self._ttl_s = keep, waiting, ttl_s
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._line: deque[Run] = deque()
        self._turn = threading.Condition()
        self._current: Run | None = None  # the head of the line, once the engine thread has taken it up

    def open(self) -> Runs:
        """Start the engine thread: it loads the model and then takes runs from the line."""
        threading.Thread(target=self._work, name="engine", daemon=True).start()
        return self

    def start(self, session: str, settings: Settings) -> Run:
        """Put a run at the end of the line; an older run of the same visitor is stopped."""
        run = Run(session, settings, "waiting" if self._host.loading else "queued")
        self.stop_session(session)
        with self._turn:
            self._forget()
            if len(self._line) > self._waiting:
                run.move("failed", f"{self._waiting} runs are waiting already. Please try again in a minute.")
                return run
            self._runs[run.id] = run
            self._line.append(run)
            self._turn.notify_all()
        return run

    def refuse(self, session: str, sentence: str) -> Run:
        """A run that ends before it began, because its settings cannot be used."""
        run = Run(session, None)
        run.move("failed", sentence)
        return run

    def find(self, run_id: str) -> Run | None:
        with self._turn:
            return self._runs.get(run_id)

    def stop_session(self, session: str) -> None:
        """Stop every run of one visitor. A run still in line leaves it now; a running one at its next token."""
        with self._turn:
            for run in [run for run in self._line if session and run.session == session]:
                run.stop.set()
                if run is not self._current:
                    self._line.remove(run)
                    run.move("done", "Stopped before it began.")

    def place(self, run: Run) -> dict[str, int] | None:
        """Where a waiting run stands: `place` 2 means that one run goes before it. None once it has the engine."""
        with self._turn:
            line = [other for other in self._line if other is run or not other.stop.is_set()]
        if run not in line or line[0] is run:
            return None
        return {"place": line.index(run) + 1, "waiting": len(line) - 1}

    @property
    def busy(self) -> bool:
        """Whether the engine has a run in hand."""
        with self._turn:
            return bool(self._line)

    async def stream(self, run: Run) -> AsyncIterator[str]:
        """Messages of a run until it is over; the last one holds all its events.

        Closing this generator (the tab went away) stops the run. The `finally` may only set the flag: it runs on the
        server's event loop, where waiting for the engine would freeze every visitor.
        """
        cursor, shown = 0, None
        try:
            while not run.final:
                queue = self.place(run)
                text, seen = run.message(cursor, queue)
                status = (run.state, queue)
                if seen > cursor or status != shown:
                    yield text
                    cursor, shown = seen, status
                await asyncio.sleep(BEAT_S)
            yield run.message(0, None)[0]
        finally:
            run.stop.set()

    def _work(self) -> None:
        """The engine thread. All of the engine's work happens here, one run after another, for ever."""
        self._host.load_model()
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._line)
                run = self._current = self._line[0]
            run.context.run(self._perform, run)
            with self._turn:
                self._line.popleft()
                self._current = None

    def _perform(self, run: Run) -> None:
        try:
            model = self._host.model()
            if run.stop.is_set():
                run.move("done", "Stopped before it began.")
                return
            run.move("running")
            events = self._compare(model, stop=run.stop.is_set, **asdict(run.settings))
            with contextlib.closing(events):
                for event in events:
                    run.push(event)
            run.move("done")
        except ModelUnavailable as error:
            run.move("failed", f"Live runs are off: {error}")
        except Exception as error:
            if not is_sentence(error):
                log.exception("run failed")
            run.move("failed", str(error) if is_sentence(error) else unexpected(error))

    def _forget(self) -> None:
        """Drop finished runs that are too old or too many. Called with the lock held."""
        oldest = time.monotonic() - self._ttl_s
        for run in [run for run in self._runs.values() if run.final]:
            if run.created < oldest or len(self._runs) >= self._keep:
                del self._runs[run.id]


def unexpected(error: Exception) -> str:
    return (
        f"The engine stopped with an error that it did not expect ({type(error).__name__}). "
        "What it wrote so far is kept; the terminal shows the details."
    )


def encode_event(event: dict[str, Any]) -> str:
    """One event as compact JSON; similarities and probabilities are cut to four digits, which a page can show."""
    if event["type"] == "token":
        event = event | {
            "similarity": [short(value) for value in event["similarity"]],
            "top5": [[token, text, short(probability)] for token, text, probability in event["top5"]],
        }
    elif event["type"] == "fidelity":
        # By position and layer; three digits are what the page shows, and a third of the bytes.
        rows = {key: [[round(value, 3) for value in row] for row in event[key]] for key in ("k_cos", "v_cos", "k_err", "v_err")}
        event = event | rows
    return to_json(event)


def short(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
