"""Runs: one engine thread, the line of runs in front of it, and what each run has said so far.

A run belongs to one visitor. Its events are kept as JSON text, written once by the engine thread; the page reads
them in batches and may ask for all of them again by the run's secret id. Whatever the page can show in full, a finished
run, an opened file or a bundled recording, is a trace that `Runs.trace` finds by its id.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import math
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from app.model_host import ModelHost, ModelUnavailable, is_sentence
from app.recordings import PREFIX, Recording, read_recordings
from app.settings import Settings

if TYPE_CHECKING:
    from river_core.trace import Trace

log = logging.getLogger(__name__)

BEAT_S = 0.1 if (os.cpu_count() or 1) > 2 else 0.2
"""Time between two messages to the page: ten a second look like a flow, but every one of them costs the page a drawing, which on two cores is time of the
engine's. The machine's cores count, not those the engine may use: a browser takes any."""

FINAL = ("done", "failed")

UPLOAD_BYTES = 8 << 20
"""Of a trace file that a visitor opens, as it is sent: gzipped."""
UNPACKED_BYTES = 48 << 20
"""Of such a file after unpacking: seven lanes of 2,000 tokens over 80 layers take less."""


Job = Callable[[Any, Callable[[], bool]], Iterator[dict[str, Any]]]
"""(model, stop) -> events, each with a "type"."""


class Run:
    """One visitor's run: its settings (or another job, such as a sweep), its stop flag, and its events as JSON texts."""

    def __init__(self, session: str, settings: Settings | None, state: str = "queued", job: Job | None = None):
        self.id = secrets.token_urlsafe(16)
        self.session = session
        self.settings = settings
        self.job = job
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
    def ending(self) -> str | None:
        """The sentence that says why it ended, if there is more to say than that it is done."""
        return self._message

    @property
    def state(self) -> str:
        """As the page shows it: a run that was told to stop is "stopping" until the engine has let go of it."""
        return "stopping" if self.stop.is_set() and not self.final else self._state

    def trace(self) -> Trace | None:
        """What the run has written, as a trace; None if it has written nothing."""
        from river_core.trace import Trace  # the engine's libraries load while the page is already being served

        with self._lock:
            events = list(self._events)
        return Trace.from_events(json.loads(event) for event in events) if events else None

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
    `keep` are held, and so are opened files; at most `waiting` runs may stand in line. `recordings` are the bundled ones
    by default.
    """

    def __init__(
        self,
        host: ModelHost,
        compare: Callable[..., Iterator[dict[str, Any]]],
        *,
        keep: int = 32,
        waiting: int = 16,
        ttl_s: float = 900.0,
        recordings: dict[str, Recording] | None = None,
    ):
        self.recordings = read_recordings() if recordings is None else recordings
        self._host = host
        self._compare = compare
        self._keep, self._waiting, self._ttl_s = keep, waiting, ttl_s
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._files: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # opened ones: when, and as they were sent
        self._opening = threading.Lock()
        self._line: deque[Run] = deque()
        self._turn = threading.Condition()
        self._current: Run | None = None  # the head of the line, once the engine thread has taken it up

    def open(self) -> Runs:
        """Start the engine thread: it loads the model and then takes runs from the line."""
        threading.Thread(target=self._work, name="engine", daemon=True).start()
        return self

    def start(self, session: str, settings: Settings | None, job: Job | None = None) -> Run:
        """Put a run at the end of the line; an older run of the same visitor is stopped.

        A `job` takes the place of a comparison: whatever else needs the engine. Only its own stream reads it: it is no
        trace, and has no id to be found by.
        """
        run = Run(session, settings, "waiting" if self._host.loading else "queued", job)
        self.stop_session(session)
        with self._turn:
            self._forget()
            if len(self._line) > self._waiting:
                run.move("failed", f"{self._waiting} runs are waiting already. Please try again in a minute.")
                return run
            if job is None:
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

    def trace(self, trace_id: str) -> Trace | None:
        """The trace behind an id: "recording:<slug>", or the secret id of a finished run or of an opened file."""
        from river_core.trace import Trace

        if trace_id.startswith(PREFIX):
            recording = self.recordings.get(trace_id.removeprefix(PREFIX))
            return Trace.from_dict(json.loads(recording.text)) if recording else None
        run = self.find(trace_id)
        if run:
            return run.trace() if run.final else None
        with self._turn:
            _, raw = self._files.get(trace_id, (0.0, None))
        return Trace.from_bytes(raw, UNPACKED_BYTES) if raw else None

    def open_file(self, raw: bytes) -> tuple[str, str]:
        """Take in a trace file that a visitor opened: its new secret id, and the trace as JSON text.

        Raises:
            TraceError: with one sentence, if it is too large, damaged, or no trace of a known version.
        """
        from river_core.trace import Trace, TraceError

        if len(raw) > UPLOAD_BYTES:
            raise TraceError(f"The file is larger than {UPLOAD_BYTES >> 20} MB when compressed, which is the most that can be opened here.")
        with self._opening:  # one at a time: a hostile file may need twenty times its size for a moment
            trace = Trace.from_bytes(raw, UNPACKED_BYTES)
            try:
                text = to_json(trace.to_dict())
            except (ValueError, RecursionError):
                raise TraceError("The trace is damaged: it holds a value that JSON does not have, such as NaN.") from None
        file_id, now = secrets.token_urlsafe(16), time.monotonic()
        with self._turn:
            while self._files and (len(self._files) >= self._keep or next(iter(self._files.values()))[0] < now - self._ttl_s):
                self._files.popitem(last=False)
            self._files[file_id] = now, raw
        return file_id, text

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

    def presets(self) -> dict[str, float]:
        """The thresholds that the loaded model offers, by name; none while it is not there."""
        try:
            return self._host.model().tau_presets
        except ModelUnavailable:
            return {}

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
            events = run.job(model, run.stop.is_set) if run.job else self._compare(model, stop=run.stop.is_set, **asdict(run.settings))
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
    elif event["type"] == "prefill" and "similarity" in event:
        # The rows of all prompt tokens: three digits are what a colour can show.
        event = event | {"similarity": [[short(value, 3) for value in row] for row in event["similarity"]]}
    elif event["type"] == "fidelity":
        # By position and layer; three digits are what the page shows, and a third of the bytes.
        rows = {key: [[round(value, 3) for value in row] for row in event[key]] for key in ("k_cos", "v_cos", "k_err", "v_err")}
        event = event | rows
    return to_json(event)


def short(value: float | None, digits: int = 4) -> float | None:
    return round(value, digits) if value is not None and math.isfinite(value) else None


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
