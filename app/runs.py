"""Runs: one engine thread, the line of runs in front of it, and what each run has said so far.

A run belongs to one visitor. Its events are kept as JSON text, written once by the engine thread; the page reads
them in batches and may ask for all of them again by the run's secret id. Whatever the page can show in full, a finished
run, an opened file or a bundled recording, is a trace that `Runs.trace` finds by its id. What bounds a visitor is in `limits`.
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
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from app.limits import Limits, defaults
from app.model_host import ModelHost, ModelUnavailable, is_sentence
from app.recordings import PREFIX, Recording, read_recordings
from app.settings import Settings
from app.shelf import Shelf

if TYPE_CHECKING:
    from river_core.trace import Trace

log = logging.getLogger(__name__)

BEAT_S = 0.1 if (os.cpu_count() or 1) > 2 else 0.2
"""Time between two messages to the page: ten a second look like a flow, but every one of them costs the page a drawing, which on two cores is time of the
engine's. The machine's cores count, not those the engine may use: a browser takes any."""

FINAL = ("done", "failed")

OPENING_S = 20.0
"""A visitor's patience with the files of others, which are read one at a time."""
SWEEP_UP_S = 20.0
"""Time between two looks for what has been kept long enough."""

PAGE, SWEEP, CALL = "page", "sweep", "call"
"""What a run is for. A new one of the page takes the place of the visitor's older one; calls of one client go one after another."""

Job = Callable[[Any, Callable[[], bool]], Iterator[dict[str, Any]]]
"""(model, stop) -> events, each with a "type"."""


class Run:
    """One visitor's run: its settings (or another job, such as a sweep), its stop flag, and its events as JSON texts."""

    def __init__(
        self,
        session: str,
        settings: Settings | None,
        state: str = "queued",
        job: Job | None = None,
        kind: str = PAGE,
        address: str = "",
    ):
        self.id = secrets.token_urlsafe(16)
        self.session = session
        self.address = address
        self.kind = kind
        self.settings = settings
        self.job = job
        self.stop = threading.Event()
        self.deadline = math.inf  # of the engine's clock; set when it takes the run up
        self.ran_out = False
        self.asked = time.monotonic()  # when somebody last asked for all of it
        self.tokens = 0
        self.bytes = 0
        # On a ZeroGPU Space the visitor's quota hangs on this context, not on the engine thread's own.
        self.context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._events: list[str] = []
        self._seq = 0
        self._state = state
        self._message: str | None = None

    def stopped(self) -> bool:
        """Whether the engine is to let go of it: it was told to stop, or its seconds are over."""
        if time.monotonic() > self.deadline and not self.stop.is_set():
            self.ran_out = True
        return self.ran_out or self.stop.is_set()

    def push(self, event: dict[str, Any]) -> None:
        text = encode_event(event)
        with self._lock:
            self._events.append(text)
            self.tokens += event["type"] == "token"
            self.bytes += len(text)

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

    @property
    def whole(self) -> bool:
        """Whether it came to its own end: it was neither stopped nor out of time, and did not fail."""
        return self._state == "done" and not self.stop.is_set() and not self.ran_out

    def trace(self) -> Trace | None:
        """What the run has written, as a trace of its own; None if it has written nothing."""
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

    `compare` has the signature of `river_core.compare`. `limits` are those of this machine by default, and `recordings` the bundled ones.
    """

    def __init__(
        self,
        host: ModelHost,
        compare: Callable[..., Iterator[dict[str, Any]]],
        *,
        limits: Limits | None = None,
        recordings: dict[str, Recording] | None = None,
    ):
        self.recordings = read_recordings() if recordings is None else recordings
        self.limits = defaults() if limits is None else limits
        self.shelf = Shelf(self.limits)
        self._host = host
        self._compare = compare
        self._runs: dict[str, Run] = {}  # those that are not over; the others are on the shelf
        self._opening = threading.Lock()
        self._line: deque[Run] = deque()
        self._behind: deque[Run] = deque()  # calls that come after an earlier one of the same client
        self._alone: list[Run] = []  # runs whose page has gone
        self._turn = threading.Condition()
        self._current: Run | None = None  # the head of the line, once the engine thread has taken it up

    def open(self) -> Runs:
        """Start the engine thread: it loads the model and then takes runs from the line."""
        threading.Thread(target=self._work, name="engine", daemon=True).start()
        threading.Thread(target=self._sweep_up, name="shelf", daemon=True).start()
        return self

    def start(self, session: str, settings: Settings | None, job: Job | None = None, *, kind: str = "", address: str = "") -> Run:
        """Put a run at the end of the line, or refuse it with a sentence; it is told by its state.

        An older run of the same visitor is stopped once it is sure that there is room for the new one. A sweep does not take the place of a live run, nor
        the other way round. Calls of one client (kind `CALL`) wait for each other, and have one place in line.

        A `job` takes the place of a comparison: whatever else needs the engine. Only its own stream reads it: it is no
        trace, and has no id to be found by.
        """
        kind = kind or (SWEEP if job else PAGE)
        run = Run(session, settings, "waiting" if self._host.loading else "queued", job, kind, address)
        with self._turn:
            words = self._refusal(run)
            if words:
                run.move("failed", words)
                return run
            own = self._own(run)
            if kind != CALL:
                self._stop(own)
            if job is None:
                self._runs[run.id] = run
            (self._behind if kind == CALL and own else self._line).append(run)
            self._turn.notify_all()
        return run

    def _own(self, run: Run) -> list[Run]:
        """Runs of the same visitor and kind that are not over. Called with the lock held."""
        return [one for one in (*self._line, *self._behind) if run.session and one.session == run.session and one.kind == run.kind]

    def _refusal(self, run: Run) -> str:
        """Why a run cannot be taken on; "" if it can. Called with the lock held."""
        limits, own = self.limits, self._own(run)
        others = {PAGE: (SWEEP, "Your sweep is still going."), SWEEP: (PAGE, "Your live run is still going.")}
        if run.kind in others and run.session:
            kind, words = others[run.kind]
            if any(one.session == run.session and one.kind == kind and not one.stop.is_set() for one in self._line):
                return f"{words} Stop it, or wait until it has ended: both need the one engine."
        if run.kind == CALL:
            calls = [one for one in (*self._line, *self._behind) if one.kind == CALL and one.address == run.address]
            if len(calls) >= limits.calls:
                return f"{len(calls)} calls from your address are not over yet, and more are not taken. Wait for one of them."
            if own:
                return ""  # behind its own earlier call, out of everybody's way
        waiting = [one for one in self._line if one is not self._current and (run.kind == CALL or one not in own)]
        room = limits.line + (self._current is None)
        if len(waiting) >= room:
            return f"{len(waiting)} runs are waiting already. Please try again in a minute."
        if run.address and sum(one.address == run.address for one in waiting) >= limits.address + (self._current is None):
            return f"{limits.address} runs from your address are waiting already. Please try again in a minute."
        return ""

    def refuse(self, session: str, sentence: str) -> Run:
        """A run that ends before it began, because its settings cannot be used."""
        run = Run(session, None)
        run.move("failed", sentence)
        return run

    def find(self, run_id: str) -> Run | None:
        """The run with this secret id, whether or not it is over; None if there is none (any more)."""
        with self._turn:
            run = self._runs.get(run_id)
        found = run or self.shelf.get(run_id)
        return found if isinstance(found, Run) else None

    def follow(self, run_id: str) -> Run | None:
        """As `find`, for a page that shows the run without having its stream: while it asks, the run goes on."""
        run = self.find(run_id)
        if run:
            run.asked = time.monotonic()
        return run

    def trace(self, trace_id: str) -> Trace | None:
        """The trace behind an id: "recording:<slug>", or the secret id of a finished run or of an opened file. It is shared: nobody may change it."""
        from river_core.trace import Trace

        if trace_id.startswith(PREFIX):
            recording = self.recordings.get(trace_id.removeprefix(PREFIX))
            if recording is None:
                return None
            return self.shelf.parsed(trace_id, len(recording.text), lambda: Trace.from_bytes(recording.text.encode()))
        thing = self.shelf.get(trace_id)
        if isinstance(thing, Run):
            return self.shelf.parsed(trace_id, thing.bytes, thing.trace)
        if thing is None:
            return None
        raw, size = thing
        return self.shelf.parsed(trace_id, size, lambda: Trace.from_bytes(raw, self.limits.unpacked))

    def open_file(self, raw: bytes, session: str = "", address: str = "") -> tuple[str, str]:
        """Take in a trace file that a visitor opened: its new secret id, and the trace as JSON text.

        Raises:
            TraceError: with one sentence, if it is too large, damaged, or no trace of a known version; or if others have it all to themselves.
        """
        from river_core.trace import Trace, TraceError

        if len(raw) > self.limits.sent:
            raise TraceError(
                f"The file is larger than {self.limits.sent >> 20} MB when compressed, which is the most that can be opened here."
            )
        if not self._opening.acquire(timeout=OPENING_S):
            raise TraceError("The files of others are still being opened. Try again in a minute.")
        try:  # one at a time: a hostile file may need ten times its size for a moment
            trace = Trace.from_bytes(raw, self.limits.unpacked)
            text = to_json(trace.to_dict())
        finally:
            self._opening.release()
        file_id = secrets.token_urlsafe(16)
        self.shelf.put(file_id, (raw, len(text)), len(raw), session, address)
        self.shelf.hold(file_id, len(text), trace)
        return file_id, text

    def stop_session(self, session: str) -> None:
        """Stop every run of one visitor. A run still in line leaves it now; a running one at its next token."""
        with self._turn:
            self._stop([run for run in (*self._line, *self._behind) if session and run.session == session])

    def stop_run(self, run_id: str) -> None:
        """Stop one run by its secret id."""
        with self._turn:
            run = self._runs.get(run_id)
            if run:
                self._stop([run])

    def leave_session(self, session: str) -> None:
        """The page of a session has gone. What it had in line is stopped, unless a reloaded page follows it before its time of grace is over."""
        with self._turn:
            runs = [run for run in (*self._line, *self._behind) if session and run.session == session and run.kind != PAGE]
            self._stop(runs)

    def _stop(self, runs: list[Run]) -> None:
        """Called with the lock held, which nobody keeps for long."""
        for run in runs:
            run.stop.set()
            if run is self._current:
                continue
            for line in (self._line, self._behind):
                if run in line:
                    line.remove(run)
            run.move("done", "Stopped before it began.")
            self._shelve(run)
            self._next_call(run)

    def _next_call(self, run: Run) -> None:
        """The next call of the same client has its turn, behind all who wait. Called with the lock held."""
        if run.kind != CALL or any(one.kind == CALL and one.session == run.session for one in self._line):
            return
        after = next((one for one in self._behind if one.session == run.session), None)
        if after:
            self._behind.remove(after)
            self._line.append(after)
            self._turn.notify_all()

    def _shelve(self, run: Run) -> None:
        """A run that is over is kept from now on. Called with the lock held."""
        if self._runs.pop(run.id, None) and run.kind == PAGE:
            self.shelf.put(run.id, run, run.bytes + 2048, run.session, run.address)

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

        When this generator is closed (the tab went away), a run of the page has its time of grace, in which a reloaded page may follow it; any other run is
        stopped. The `finally` runs on the server's event loop, where waiting for the engine would freeze every visitor.
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
            self.leave(run)

    async def wait(self, run: Run, beat_s: float) -> AsyncIterator[dict[str, Any]]:
        """How a call stands, about every `beat_s` seconds until it is over: {state, tokens, place, waiting}. Closing this generator stops the run."""
        try:
            due = 0.0
            while not run.final:
                if time.monotonic() >= due:
                    due = time.monotonic() + beat_s
                    yield {"state": run.state, "tokens": run.tokens, **(self.place(run) or {"place": None, "waiting": None})}
                await asyncio.sleep(BEAT_S)
        finally:
            self.leave(run)

    def leave(self, run: Run) -> None:
        """Nobody reads a run's messages any more."""
        if run.final:
            return
        if run.kind == PAGE and run.bytes and self.limits.grace > 0:  # one that has not begun cannot be found by a reloaded page
            run.asked = time.monotonic()
            with self._turn:
                self._alone.append(run)
            return
        with self._turn:
            self._stop([run])

    def _sweep_up(self) -> None:
        """Stops runs that nobody follows, and drops what has been kept long enough, also where no visitor comes any more."""
        due = 0.0
        while True:
            time.sleep(min(0.25, self.limits.grace / 4))
            now = time.monotonic()
            with self._turn:
                self._alone = [run for run in self._alone if not run.final and not run.stop.is_set()]
                self._stop([run for run in self._alone if now - run.asked > self.limits.grace])
            if now >= due:
                due = now + min(SWEEP_UP_S, self.limits.seconds_kept / 4)
                self.shelf.drop_old()

    def _work(self) -> None:
        """The engine thread. All of the engine's work happens here, one run after another, for ever."""
        self._host.load_model()
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._line)
                run = self._current = self._line[0]
            if self._host.worth_another_try:
                run.move("waiting")
                self._host.load_model()
            run.context.run(self._perform, run)
            with self._turn:
                self._line.popleft()
                self._current = None
                self._shelve(run)
                self._next_call(run)

    def _perform(self, run: Run) -> None:
        """Whatever a run does, even an exit of the interpreter, ends that run alone: without this thread no other would ever begin."""
        try:
            model = self._host.model()
            if run.stop.is_set():
                run.move("done", "Stopped before it began.")
                return
            run.deadline = time.monotonic() + self.limits.seconds
            run.move("running")
            events = run.job(model, run.stopped) if run.job else self._compare(model, stop=run.stopped, **asdict(run.settings))
            with contextlib.closing(events):
                for event in events:
                    run.push(event)
            run.move("done", self._ran_out() if run.ran_out else None)
        except ModelUnavailable as error:
            run.move("failed", f"Live runs are off: {error}")
        except BaseException as error:
            if not is_sentence(error):
                log.exception("run failed")
            run.move("failed", str(error) if is_sentence(error) else unexpected(error))

    def _ran_out(self) -> str:
        return f"The run was ended after {self.limits.seconds:g} seconds, the most that one run may take here. What it wrote is kept."


def unexpected(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "There was not enough memory for this run. Use fewer tokens, fewer lanes or a smaller model. What it wrote so far is kept."
    return (
        f"The engine stopped with an error that it did not expect ({type(error).__name__}). "
        "What it wrote so far is kept; the terminal shows the details."
    )


def encode_event(event: dict[str, Any]) -> str:
    """One event as compact JSON. Probabilities of candidates and tables of the prompt are cut to what a page can show; what decided an exit is not: nobody
    may find a token that left at a similarity that is not above its threshold."""
    if event["type"] == "token":
        event = event | {
            "similarity": similarities(event),
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


def similarities(event: dict[str, Any]) -> list[float | None]:
    """A token's similarities as the engine gave them; the one that was tested at the exit as exact as `score` is."""
    values = [value if value is not None and math.isfinite(value) else None for value in event["similarity"]]
    at, score = event["exit_layer"] - 1, event.get("score")
    if score is not None and 0 <= at < len(values) and values[at] is not None and abs(score - values[at]) < SAME_SIMILARITY:
        values[at] = score
    return values


SAME_SIMILARITY = 1e-5
"""Similarities come with five digits: one that is as near as this to the score of the exit test is the one that was tested."""


def short(value: float | None, digits: int = 4) -> float | None:
    return round(value, digits) if value is not None and math.isfinite(value) else None


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
