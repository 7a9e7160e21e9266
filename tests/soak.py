"""A soak of the page: real servers, many visitors, and faults: `python -m tests.soak`.

Visitors speak Gradio's own protocol to `python app.py` in a process of its own, on 127.0.0.1 alone. They run, stop, close their tab, reload, press Run twice and
call the endpoint for programs. Then servers are killed with SIGKILL in the middle of converting, saving and compiling, the disk fills up, and two servers
share one cache. Everything is bounded in count and in time, and what was started here ends here.

Runs are told apart by their prompts, which carry a number, and by their tokens: a sample of them is run again, alone, and must give the same ones.

    crossed   a visitor was sent something of another's run
    lost      a run was taken on and never came to an end
    cut       a run ended without being whole, though nobody had stopped it
    refused   the line was full; not a fault, and tried again
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from river_core.errors import RiverError
from river_core.trace import Trace
from tests import aside
from tests.files import endless, write_folder, write_gguf

ROOT = Path(__file__).resolve().parent.parent
FINAL = ("done", "failed")
FULL = "waiting already"
"""Words of the sentence with which a full line refuses a run."""
GOALS = {"lost": 0, "crossed": 0, "cut": 0, "growth": 0.05, "stop_s": 0.5}
KINDS = {"plain": 62, "stop": 10, "leave": 4, "drop": 7, "reload": 7, "twice": 5, "call": 5}
"""What a visitor does, and how often in a hundred runs."""
MANY = 3000
"""Tokens of a run that is meant to be stopped."""


# -- servers -----------------------------------------------------------------------------------------------------------


class Server:
    """`python app.py` as a child process.

    Args:
        model: folder or GGUF file; None = the default model. cache: its cache folder; None = the user's own.
        limits: further options of the command line. largest_file: bytes beyond which no file of its can grow.
    """

    def __init__(self, model: Path | None, cache: Path | None, limits: tuple[str, ...] = (), largest_file: int | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.cache = f"http://127.0.0.1:{self.port}", cache
        command = [sys.executable, "app.py", "--no-browser", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", *limits]
        command += ["--model", str(model)] if model else []
        environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"RIVER_CACHE": str(cache)} if cache else {})
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        prepare = None
        if largest_file:

            def prepare():
                import resource

                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self.log, stderr=self.log, preexec_fn=prepare)
        self.about = psutil.Process(self.process.pid)
        self._components: dict[str, int] = {}
        self.endpoints: dict[str, int] = {}
        self.trace_arguments: dict[str, Any] = {}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc) -> None:
        self.end()

    def wait_page(self, within: float = 120) -> Server:
        """Wait until the page answers."""
        deadline = time.monotonic() + within
        while True:
            try:
                config = httpx.get(f"{self.url}/config", timeout=5).raise_for_status().json()
                break
            except httpx.HTTPError:
                assert self.process.poll() is None, f"the server ended by itself: {self.output()}"
                assert time.monotonic() < deadline, "the page did not come"
                time.sleep(0.05)
        self.endpoints = {entry["api_name"]: entry["id"] for entry in config["dependencies"]}
        described = httpx.get(f"{self.url}/gradio_api/info", timeout=30).raise_for_status().json()["named_endpoints"]["/trace"]
        self.trace_arguments = {entry["parameter_name"]: entry.get("parameter_default") for entry in described["parameters"]}
        self._components = {entry["props"].get("elem_id"): entry["id"] for entry in config["components"]}
        return self

    def wait_ready(self, within: float = 180) -> Server:
        """Wait until the model is loaded."""
        status = self.wait_settled(within)
        assert status["state"] == "ready", status["text"]
        return self

    def wait_settled(self, within: float = 180) -> dict[str, Any]:
        """The model's status once it no longer loads."""
        deadline = time.monotonic() + within
        self.wait_page(within)
        while (status := self.ask("model_status"))["state"] == "loading":
            assert self.process.poll() is None, f"the server ended by itself: {self.output()}"
            assert time.monotonic() < deadline, f"the model did not come: {status['text']}"
            time.sleep(0.05)
        return status

    def body(self, name: str, argument: Any = None) -> dict[str, Any]:
        """What asks for a function that the page's script calls by itself."""
        return {"component_id": self._components["stage"], "fn_name": name, "data": argument, "session_hash": "soak"}

    def ask(self, name: str, argument: Any = None) -> Any:
        return httpx.post(f"{self.url}/gradio_api/component_server", json=self.body(name, argument), timeout=30).raise_for_status().json()

    @property
    def memory(self) -> int:
        """Resident bytes of the process."""
        return self.about.memory_info().rss

    def output(self) -> str:
        """The last lines that it wrote to the terminal."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-2000:]

    def kill(self) -> None:
        """SIGKILL, as the system does when memory runs out."""
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        """End the server and what it started."""
        children = []
        with contextlib.suppress(psutil.Error):
            children = self.about.children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self.log.close()


def options_of_the_page() -> str:
    return subprocess.run([sys.executable, "app.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120).stdout


# -- visitors ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of the runs. `samples`: whole runs to be repeated, (settings, token ids by lane). `rss`: (runs so far, bytes)."""

    counts: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    stop_s: list[float] = field(default_factory=list)
    drop_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    samples: list[tuple[dict[str, Any], dict[str, list[int]]]] = field(default_factory=list)
    rss: list[tuple[int, int]] = field(default_factory=list)
    slow: list[tuple[float, str, int]] = field(default_factory=list)
    ended: int = 0

    def fault(self, kind: str, sentence: str) -> None:
        self.counts[kind] += 1
        if len(self.problems) < 50:
            self.problems.append(f"{kind}: {sentence}")


class Gone(Exception):
    """The stream ended before the run did."""


class Visitor:
    """A browser without a face: a session with its heartbeat, one run at a time."""

    def __init__(self, server: Server, number: int, tally: Tally):
        self.server, self.number, self.tally = server, number, tally
        self.api = f"{server.url}/gradio_api"
        self.http = httpx.AsyncClient(timeout=httpx.Timeout(60, pool=None), limits=httpx.Limits(max_connections=None))
        self.session, self.beat = "", None

    async def arrive(self) -> None:
        """Open the page: a new session, whose heartbeat lasts until `leave`."""
        self.session = secrets.token_hex(6)
        self.beat = asyncio.create_task(self._heartbeat(self.session))

    async def leave(self) -> None:
        """Close the tab: connections end, nothing is said."""
        if self.beat:
            self.beat.cancel()
            await asyncio.gather(self.beat, return_exceptions=True)
            self.beat = None

    async def close(self) -> None:
        await self.leave()
        await self.http.aclose()

    async def _heartbeat(self, session: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with self.http.stream("GET", f"{self.api}/heartbeat/{session}") as stream:
                async for _ in stream.aiter_raw():
                    pass

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        start = time.monotonic()
        answer = await self.http.post(f"{self.api}/{path}", json=body)
        self.tally.request_s.append(time.monotonic() - start)
        return answer.raise_for_status().json()

    async def join(self, settings: dict[str, Any]) -> None:
        body = {"data": list(settings.values()), "fn_index": self.server.endpoints["run"], "session_hash": self.session}
        await self.post("queue/join", body)

    async def stop(self) -> None:
        await self.post("run/predict", {"data": [], "fn_index": self.server.endpoints["stop"], "session_hash": self.session})

    async def ask(self, name: str, argument: Any = None) -> Any:
        return await self.post("component_server", self.server.body(name, argument))

    async def messages(self, runs: int = 1) -> AsyncIterator[dict[str, Any]]:
        """Channel messages as they come, until `runs` events have ended. Closing this generator closes the connection."""
        shown: dict[str, str] = {}
        async with self.http.stream("GET", f"{self.api}/queue/data", params={"session_hash": self.session}) as stream:
            async for line in stream.aiter_lines():
                if not line.startswith("data:"):
                    continue
                event = json.loads(line[5:])
                if event["msg"] in ("process_generating", "process_completed"):
                    key = event["event_id"]
                    if not event["success"]:
                        raise Gone(f"the server's answer: {event['output']}")
                    value = event["output"]["data"][0] if event["output"]["data"] else None
                    if isinstance(value, list):
                        value = patch(shown[key], value)
                    if value is not None and value != shown.get(key):
                        shown[key] = value
                        yield json.loads(value)
                    if event["msg"] == "process_completed":
                        runs -= 1
                        if not runs:
                            return
        raise Gone("the stream ended")


def patch(shown: str, edits: list) -> str:
    """A string value after Gradio's edits, which replace it or append to it."""
    for action, _, text in edits:
        shown = text if action == "replace" else shown + text
    return shown


def settings_of(prompt: str, lanes: list[str], tokens: int) -> dict[str, Any]:
    """The values of the page's controls, in their order."""
    values = {"prompt": prompt, "chat": False, "lanes": lanes, "tau": "0.9", "max_tokens": tokens, "temperature": 0, "top_k": 0}
    return values | {"top_p": 1, "seed": 0, "prefill": "full", "timing": "race", "mode": "free", "more": ""}


def strangers(settings: dict[str, Any], messages: list[dict[str, Any]]) -> str | None:
    """A sentence, if these messages are not of the visitor's own run alone."""
    if len({message["run_id"] for message in messages}) > 1:
        return "messages of two runs"
    for message in messages:
        for event in message["events"]:
            if event["type"] == "run" and event["header"]["prompt"] != settings["prompt"]:
                return f"asked {settings['prompt']!r}, was sent {event['header']['prompt']!r}"
    return None


def incomplete(settings: dict[str, Any], messages: list[dict[str, Any]]) -> str | None:
    """A sentence, if a run that nobody stopped is not whole."""
    last = messages[-1]
    if last["state"] != "done":
        return f"{last['state']}: {last['message']}"
    streamed = [event for message in messages[:-1] for event in message["events"]]
    if streamed != last["events"][: len(streamed)]:
        return "what was streamed is not what the run holds"
    try:
        trace = Trace.from_dict(Trace.from_events(last["events"]).to_dict())
    except (RiverError, KeyError, AttributeError) as error:
        return f"no valid trace: {type(error).__name__} {error}"
    return short_lanes(settings, trace)


def short_lanes(settings: dict[str, Any], trace: Trace) -> str | None:
    if not trace.done or trace.done["reason"] != "finished":
        return f"it ended by {trace.done and trace.done['reason']}"
    if sorted(trace.lanes) != sorted(settings["lanes"]):
        return f"lanes {sorted(trace.lanes)}"
    for lane in trace.lanes.values():
        if len(lane.tokens) != settings["max_tokens"]:
            return f"{len(lane.tokens)} of {settings['max_tokens']} tokens in {lane.id}"
    return None


def ids_of(messages: list[dict[str, Any]]) -> dict[str, list[int]]:
    trace = Trace.from_events(messages[-1]["events"])
    return {lane.id: lane.token_ids for lane in trace.lanes.values()}


def refused(messages: list[dict[str, Any]]) -> bool:
    return messages[-1]["state"] == "failed" and FULL in (messages[-1]["message"] or "")


class Act:
    """One run of one visitor, of one kind; each returns whether it was taken on (False: refused)."""

    def __init__(self, visitor: Visitor, settings: dict[str, Any], dice: random.Random):
        self.visitor, self.settings, self.dice, self.tally = visitor, settings, dice, visitor.tally
        self.long = settings | {"max_tokens": MANY}

    async def plain(self) -> bool:
        start, seen = time.monotonic(), []
        await self.visitor.join(self.settings)
        async for message in self.visitor.messages():
            seen.append(message)
        return self._judge(self.settings, seen, start)

    def _judge(self, settings, seen, start) -> bool:
        if not seen or seen[-1]["state"] not in FINAL:
            self.tally.fault("lost", f"{settings['prompt']}: it has no end")
            return True
        if refused(seen):
            return False
        if sentence := strangers(settings, seen):
            self.tally.fault("crossed", sentence)
        elif sentence := incomplete(settings, seen):
            self.tally.fault("cut", f"{settings['prompt']}: {sentence}")
        else:
            self.tally.answer_s.append(time.monotonic() - start)
            if len(self.tally.samples) < 200:
                self.tally.samples.append((settings, ids_of(seen)))
        return True

    async def stop(self) -> bool:
        """Stop after a few tokens."""
        wanted, seen, stopped = self.dice.randint(1, 12), [], None
        await self.visitor.join(self.long)
        async for message in self.visitor.messages():
            seen.append(message)
            tokens = sum(event["type"] == "token" for one in seen for event in one["events"])
            if stopped is None and tokens >= wanted and message["state"] not in FINAL:
                stopped = time.monotonic()
                await self.visitor.stop()
        return self._judge_stopped(seen, stopped)

    def _judge_stopped(self, seen, stopped) -> bool:
        if not seen or seen[-1]["state"] not in FINAL:
            self.tally.fault("lost", f"{self.long['prompt']}: it has no end after Stop")
            return True
        if refused(seen):
            return False
        if stopped is not None:
            self.tally.stop_s.append(time.monotonic() - stopped)
        if sentence := strangers(self.long, seen):
            self.tally.fault("crossed", sentence)
        elif seen[-1]["state"] != "done":
            self.tally.fault("cut", f"{self.long['prompt']}: {seen[-1]['message']}")
        return True

    async def leave(self) -> bool:
        """Stop while still in line, or as soon as it runs."""
        seen, stopped = [], None
        await self.visitor.join(self.long)
        async for message in self.visitor.messages():
            seen.append(message)
            if stopped is None and message["state"] not in FINAL:
                stopped = time.monotonic()
                await self.visitor.stop()
        return self._judge_stopped(seen, stopped)

    async def drop(self) -> bool:
        """Close the tab in the middle, and come back as somebody new."""
        wanted, seen = self.dice.randint(0, 12), []
        await self.visitor.join(self.long)
        async with contextlib.aclosing(self.visitor.messages()) as messages:
            async for message in messages:
                seen.append(message)
                if sum(event["type"] == "token" for one in seen for event in one["events"]) >= wanted:
                    break
        await self.visitor.leave()
        await self.visitor.arrive()
        if refused(seen):
            return False
        if sentence := strangers(self.long, seen):
            self.tally.fault("crossed", sentence)
        return True

    async def reload(self) -> bool:
        """Reload in the middle, and ask for the run by its id until it has ended."""
        seen = []
        await self.visitor.join(self.settings)
        async with contextlib.aclosing(self.visitor.messages()) as messages:
            async for message in messages:
                seen.append(message)
                if message["state"] == "running" or message["state"] in FINAL:
                    break
        if refused(seen):
            return False
        await self.visitor.leave()
        await self.visitor.arrive()
        for _ in range(150):
            text = await self.visitor.ask("snapshot", seen[0]["run_id"])
            if text is None:
                self.tally.fault("lost", f"{self.settings['prompt']}: the server does not know it after a reload")
                return True
            found = json.loads(text)
            if sentence := strangers(self.settings, [*seen, found]):
                self.tally.fault("crossed", sentence)
                return True
            if found["state"] in FINAL:
                if found["state"] == "failed":
                    self.tally.fault("cut", f"{self.settings['prompt']}: after a reload {found['message']}")
                return True
            await asyncio.sleep(0.2)
        self.tally.fault("lost", f"{self.settings['prompt']}: it has no end after a reload")
        return True

    async def twice(self) -> bool:
        """Press Run again while the first run is there: the second takes its place, and both come to their end."""
        second = self.settings | {"prompt": f"{self.settings['prompt']} Again."}
        start, seen, pressed = time.monotonic(), {}, False
        await self.visitor.join(self.long)
        async with contextlib.aclosing(self.visitor.messages(runs=2)) as messages:
            async for message in messages:
                seen.setdefault(message["run_id"], []).append(message)
                if not pressed:
                    if refused([message]):
                        return False
                    pressed = True
                    await self.visitor.join(second)
        first, *rest = seen.values()
        if sentence := strangers(self.long, first):
            self.tally.fault("crossed", sentence)
        if not rest or first[-1]["state"] not in FINAL:
            self.tally.fault("lost", f"{second['prompt']}: one of two runs has no end")
            return True
        return self._judge(second, rest[0], start)

    async def call(self) -> bool:
        """The endpoint for programs."""
        start = time.monotonic()
        wanted = {"prompt": self.settings["prompt"], "methods": ",".join(self.settings["lanes"]), "tau": 0.9}
        arguments = self.visitor.server.trace_arguments | wanted | {"max_tokens": self.settings["max_tokens"]}
        event_id = (await self.visitor.post("call/trace", {"data": list(arguments.values())}))["event_id"]
        last, event = None, None
        async with self.visitor.http.stream("GET", f"{self.visitor.api}/call/trace/{event_id}") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("event:"):
                    event = line[6:].strip()
                elif line.startswith("data:") and event in ("complete", "error"):
                    last = event, json.loads(line[5:])
        if last is None:
            self.tally.fault("lost", f"{self.settings['prompt']}: the call has no end")
            return True
        event, data = last
        if event == "error":
            if FULL in json.dumps(data):
                return False
            self.tally.fault("cut", f"{self.settings['prompt']}: the call says {data}")
            return True
        value = json.loads(data[0]) if isinstance(data[0], str) else data[0]
        trace = Trace.from_dict(value)
        if trace.header["prompt"] != self.settings["prompt"]:
            self.tally.fault("crossed", f"asked {self.settings['prompt']!r}, was sent {trace.header['prompt']!r}")
        elif sentence := short_lanes(self.settings, trace):
            self.tally.fault("cut", f"{self.settings['prompt']}: call: {sentence}")
        else:
            self.tally.answer_s.append(time.monotonic() - start)
        return True


LANES = (["river"], ["backbone", "river"], ["backbone", "int4", "river"])


async def soak(server: Server, visitors: int, runs: int, seed: int, seconds: float, report: Callable[[str], None]) -> Tally:
    """Let visitors make `runs` runs in all; at most `seconds`, after which no new run begins."""
    tally, deadline, begun = Tally(), time.monotonic() + seconds, 0

    async def visit(number: int) -> None:
        nonlocal begun
        dice = random.Random(f"{seed}-{number}")
        visitor = Visitor(server, number, tally)
        await visitor.arrive()
        try:
            while begun < runs and time.monotonic() < deadline:
                begun += 1
                order = begun
                kind = dice.choices(list(KINDS), KINDS.values())[0]
                settings = settings_of(f"Run {order} of visitor {number}: {dice.randrange(10**6)}", dice.choice(LANES), dice.randint(2, 20))
                start = time.monotonic()
                await one(visitor, kind, settings, dice)
                tally.slow.append((round(time.monotonic() - start, 1), kind, order))
                tally.kinds[kind] += 1
                tally.ended += 1
                tally.rss.append((tally.ended, server.memory))
                if tally.ended % max(1, runs // 20) == 0:
                    report(f"{tally.ended} of {runs} runs, {server.memory >> 20} MB, {dict(tally.counts)}")
                await asyncio.sleep(dice.random() * 0.1)
        finally:
            await visitor.close()

    async def one(visitor: Visitor, kind: str, settings: dict[str, Any], dice: random.Random) -> None:
        for attempt in range(400):
            try:
                async with asyncio.timeout(120):
                    if await getattr(Act(visitor, settings, dice), kind)():
                        return
            except (httpx.HTTPError, Gone) as error:
                full = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 503
                if not full:
                    return tally.fault("lost", f"{settings['prompt']} ({kind}): {type(error).__name__} {error}")
            except TimeoutError:
                return tally.fault("lost", f"{settings['prompt']} ({kind}): no end after 120 s")
            tally.counts["refused"] += 1
            await asyncio.sleep(min(2.0, 0.2 * 1.3**attempt) * (0.5 + dice.random()))
        tally.fault("lost", f"{settings['prompt']} ({kind}): refused 400 times")

    await asyncio.gather(*(visit(number) for number in range(visitors)))
    if begun < runs:
        report(f"time is up after {tally.ended} of {runs} runs")
    return tally


async def repeat(server: Server, tally: Tally, most: int) -> None:
    """Run a sample of the runs again, alone: a token of another's run among theirs would show."""
    visitor = Visitor(server, -1, Tally())
    await visitor.arrive()
    try:
        for settings, expected in tally.samples[:: max(1, len(tally.samples) // most)][:most]:
            await visitor.join(settings)
            async with asyncio.timeout(60):
                seen = [message async for message in visitor.messages()]
            tally.counts["repeated"] += 1
            if seen[-1]["state"] != "done" or ids_of(seen) != expected:
                tally.fault("crossed", f"{settings['prompt']}: run again alone, it gives other tokens")
    finally:
        await visitor.close()


async def idle_times(server: Server, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds until the engine is free, after Stop and after a closed tab: until the run next in line has it."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * repeats):
        by_stop = number % 2 == 0
        first, second = Visitor(server, 1, Tally()), Visitor(server, 2, Tally())
        await first.arrive()
        await second.arrive()
        try:
            async with asyncio.timeout(60):
                await first.join(settings_of(f"Idle {number}", ["backbone", "river"], MANY))
                running = first.messages()
                async for message in running:
                    if sum(event["type"] == "token" for event in message["events"]):
                        break
                await second.join(settings_of(f"Next {number}", ["river"], 2))
                waiting = second.messages()
                await anext(waiting)
                start = time.monotonic()
                if by_stop:
                    await first.stop()
                else:
                    await running.aclose()
                    await first.leave()
                async for message in waiting:
                    if message["state"] != "queued":
                        found[by_stop].append(time.monotonic() - start)
                        break
                await waiting.aclose()
                await running.aclose()
        finally:
            await first.close()
            await second.close()
    return found[True], found[False]


def growth(rss: list[tuple[int, int]], runs: int) -> float | None:
    """Growth of memory from the first fifth of the runs to their end (of 1,000: from the 200th), as a share; medians of a few samples around both."""
    if len(rss) < 30:
        return None
    width = max(3, runs // 40)
    at = lambda run: statistics.median(size for _, size in sorted(rss, key=lambda pair: abs(pair[0] - run))[:width])  # noqa: E731
    return at(runs) / at(runs // 5) - 1


# -- faults ------------------------------------------------------------------------------------------------------------


def partials(folder: Path) -> list[Path]:
    """Files that are being written in a folder of the cache: what stands under a name that is not final."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            parts = path.relative_to(folder).parts
            unfinished = any(part.startswith(".") or ".partial" in part for part in parts) and not path.name.endswith(".lock")
            if unfinished and path.is_file():
                found.append(path)
    return found


def written(paths: list[Path]) -> bool:
    """Whether one of these files holds something."""
    with contextlib.suppress(OSError):
        return any(path.stat().st_size for path in paths)
    return False


def catch(ready: Callable[[], Any], server: Server, seconds: float) -> bool:
    """Wait, closely, for a moment; False if it did not come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.process.poll() is None:
        if ready():
            return True
        time.sleep(0.001)
    return False


def compiles(server: Server) -> bool:
    """Whether the server, or what it left behind, is compiling."""
    with contextlib.suppress(psutil.Error):
        return any("cc1plus" in child.name() or "clang" in child.name() for child in server.about.children(recursive=True))
    return False


def answer(server: Server, tokens: int = 8) -> dict[str, Any]:
    """One run from beginning to end: its token ids by lane, and whether layers were compiled."""

    async def run():
        visitor = Visitor(server, 0, Tally())
        await visitor.arrive()
        try:
            settings = settings_of("After the fault.", ["backbone", "river"], tokens)
            await visitor.join(settings)
            async with asyncio.timeout(120):
                seen = [message async for message in visitor.messages()]
        finally:
            await visitor.close()
        assert seen[-1]["state"] == "done", seen[-1]["message"]
        header = next(event["header"] for event in seen[-1]["events"] if event["type"] == "run")
        return {"ids": ids_of(seen), "layers": header["kernels"]["layers"]}

    return aside.run(run())


def kill_in(stage: str, model: Path, cache: Path, expected: dict[str, list[int]] | None, rounds: int = 1) -> list[dict[str, Any]]:
    """Kill a server while it writes into a folder of the cache ("converted", "rivers" or "native"), then start another one, which must work."""
    results = []
    for _ in range(rounds):
        shutil.rmtree(cache / stage, ignore_errors=True)
        with Server(model, cache) as server:
            # A compiler writes its file in the last moment only.
            caught = catch(lambda: compiles(server) if stage == "native" else written(partials(cache / stage)), server, 180)
            server.kill()
        left = len(partials(cache / stage))
        with Server(model, cache) as server:
            server.wait_ready()
            found = answer(server)
        results.append({"fault": f"kill -9 in {stage}", "caught": caught, "left behind": left, "works": expected in (None, found["ids"])})
    return results


def kill_anywhere(model: Path, cache: Path, expected: dict[str, list[int]], rounds: int, seed: int) -> list[dict[str, Any]]:
    """Kill servers at moments drawn by chance, from the first import to the first run, on one cache that is never cleaned up by hand."""
    dice = random.Random(seed)
    for _ in range(rounds):
        with Server(model, cache) as server:
            time.sleep(dice.uniform(0.5, 12))
            server.kill()
    with Server(model, cache) as server:
        server.wait_ready()
        found = answer(server)
    return [{"fault": f"kill -9 at {rounds} moments", "caught": True, "left behind": None, "works": found["ids"] == expected}]


def compiled_after_a_kill(model: Path, cache: Path, seconds: float) -> list[dict[str, Any]]:
    """After a kill in the middle of compiling, a later start comes to compiled layers, and nothing half-done stays.

    Compiling has the lowest priority: on a machine with other work it may still go on when the time is up, which is no fault.
    """
    deadline, busy = time.monotonic() + seconds, False
    found = {"layers": ""}
    while time.monotonic() < deadline and found["layers"] != "compiled":
        with Server(model, cache) as server:
            server.wait_ready()
            while time.monotonic() < deadline and (found := answer(server))["layers"] != "compiled":
                time.sleep(3)
            busy = compiles(server)
    left = len(partials(cache / "native"))
    works = busy or (found["layers"] == "compiled" and left == 0)
    return [{"fault": "compiled layers after such a kill", "caught": not busy, "left behind": left, "works": works}]


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[Path | None]:
    """A file system of its own in memory; None where this user may not mount one."""
    with tempfile.TemporaryDirectory(prefix="river-disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        try:
            mounted = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            mounted = False
        try:
            yield Path(folder) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """Take all the room that a file system has; the file that holds it."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)
    return filler


def full_disk(model: Path, sentence: str = "disk") -> list[dict[str, Any]]:
    """The disk fills up while the model is converted, and is full from the start; the page says so, and works once there is room."""
    results = []
    size = model.stat().st_size
    with small_disk(4 * size // 2**20 + 8) as disk:
        if disk is None:
            with tempfile.TemporaryDirectory() as folder, Server(model, Path(folder), largest_file=size // 3) as server:
                status = server.wait_settled()
            said = status["state"] == "failed" and sentence in status["text"].lower()
            return [{"fault": "files may not grow (no disk to fill here)", "caught": True, "left behind": None, "works": said}]
        cache = disk / "cache"
        with Server(model, cache) as server:
            caught = catch(lambda: any(path.is_dir() for path in (cache / "converted").glob(".*")), server, 180)
            filler = fill(disk)
            status = server.wait_settled()
            works = status["state"] == "failed" and sentence in status["text"].lower() and bool(server.ask("recordings"))
        said = "" if works else status["text"]
        results.append(
            {
                "fault": "disk fills up while converting",
                "error": said,
                "caught": caught,
                "left behind": len(partials(cache)),
                "works": works,
            }
        )
        with Server(model, cache) as server:
            status = server.wait_settled()
            works = status["state"] == "failed" and sentence in status["text"].lower()
        said = "" if works else status["text"]
        results.append(
            {"fault": "disk full at the start", "error": said, "caught": True, "left behind": len(partials(cache)), "works": works}
        )
        filler.unlink()
        with Server(model, cache) as server:
            server.wait_ready()
            answer(server)
        results.append({"fault": "room again", "caught": True, "left behind": len(partials(cache / "converted")), "works": True})
        shutil.rmtree(cache / "rivers", ignore_errors=True)
        fill(disk)
        with Server(model, cache) as server:
            status = server.wait_settled()
            works = status["state"] == "ready"
            if works:
                answer(server)
        results.append(
            {"fault": "disk full when codes are kept", "caught": True, "left behind": len(partials(cache / "rivers")), "works": works}
        )
    return results


def two_servers(model: Path, cache: Path, expected: dict[str, list[int]] | None) -> list[dict[str, Any]]:
    """Two servers begin at once on one empty cache: both answer the same."""
    with Server(model, cache) as one, Server(model, cache) as other:
        answers = []
        for server in (one, other):
            server.wait_ready()
            answers.append(answer(server)["ids"])
        folders = [path for path in (cache / "converted").iterdir() if path.is_dir() and not path.name.startswith(".")]
        left = len(partials(cache / "converted")) + len(partials(cache / "rivers"))
    works = answers[0] == answers[1] and expected in (None, answers[0]) and len(folders) == 1
    return [{"fault": "two servers on one cache", "caught": True, "left behind": left, "works": works}]


def end_leftovers(place: Path) -> None:
    """End what still works for servers that were killed: compilers, which outlive them, on caches in the soak's own folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(place) in word for word in process.cmdline()) and process.pid != os.getpid():
                for child in (*process.children(recursive=True), process):
                    child.kill()


def faults(place: Path, seed: int, rounds: int, compile_s: float, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """All faults, each on caches of its own."""
    try:
        return _faults(place, seed, rounds, compile_s, report)
    finally:
        end_leftovers(place)


def _faults(place, seed, rounds, compile_s, report):
    model = write_gguf(place / "fault.gguf", endless(hidden_size=256, intermediate_size=768, num_hidden_layers=12))
    with Server(model, place / "calm") as server:
        server.wait_ready()
        expected = answer(server)["ids"]
    results: list[dict[str, Any]] = []

    def add(name: str, made: Callable[[], list[dict[str, Any]]]) -> None:
        report(name)
        try:
            results.extend(made())
        except (AssertionError, httpx.HTTPError, TimeoutError, Gone) as error:
            results.append({"fault": name, "caught": None, "left behind": None, "works": False, "error": str(error)[:300]})

    for stage in ("converted", "rivers", "native"):
        add(f"kill -9 in {stage}", lambda stage=stage: kill_in(stage, model, place / f"kill-{stage}", expected, rounds))
    add("kill -9 at moments drawn by chance", lambda: kill_anywhere(model, place / "kill-any", expected, 2 * rounds, seed))
    add("full disk", lambda: full_disk(model))
    add("two servers on one cache", lambda: two_servers(model, place / "two", expected))
    if compile_s:
        add("compiled layers after a kill", lambda: compiled_after_a_kill(model, place / "kill-native", compile_s))
    return results


# -- all of it ---------------------------------------------------------------------------------------------------------


def measure(model: Path | None, visitors: int, runs: int, seed: int, seconds: float, idle: int, compile_s: float, report) -> dict[str, Any]:
    """The soak on one server, as figures; JSON-ready. `compile_s`: wait so long for compiled layers, whose memory is no growth."""
    with Server(model, None, limits()) as server:
        server.wait_ready()
        deadline = time.monotonic() + compile_s
        while answer(server)["layers"] != "compiled" and time.monotonic() < deadline:
            time.sleep(2)
        start = time.monotonic()
        tally = aside.run(soak(server, visitors, runs, seed, seconds, report))
        took = time.monotonic() - start
        aside.run(repeat(server, tally, min(20, runs // 4)))
        stops, drops = aside.run(idle_times(server, idle))
        assert server.process.poll() is None, "the server ended"
        output = server.output()
    return {
        "visitors": visitors,
        "runs": tally.ended,
        "seconds": round(took, 1),
        **{kind: tally.counts[kind] for kind in ("lost", "crossed", "cut", "refused", "repeated")},
        "kinds": dict(tally.kinds),
        "memory_mb": [round(size / 2**20) for _, size in tally.rss[:: max(1, len(tally.rss) // 10)]],
        "growth": growth(tally.rss, runs),
        "idle_after_stop_s": spread(stops),
        "idle_after_closing_s": spread(drops),
        "stop_in_the_crowd_s": spread(tally.stop_s),
        "run_s": spread(tally.answer_s),
        "slowest_runs": sorted(tally.slow, reverse=True)[:5],
        "request_s": spread(tally.request_s),
        "problems": tally.problems,
        "traceback": "Traceback" in output and output,
    }


WANTED_LIMITS = {"--most-waiting": "16", "--most-waiting-each": "16", "--most-calls-each": "64", "--grace": "1", "--keep-mb": "8"}
"""All visitors come from one address, a full line is part of the soak, a run whose page has gone must not hold up the others for long, and what is kept of finished
runs has reached its bound before memory is first looked at."""


def limits() -> tuple[str, ...]:
    """`WANTED_LIMITS` as options, as far as the page has them."""
    known = options_of_the_page()
    return tuple(word for flag, value in WANTED_LIMITS.items() if flag in known for word in (flag, value))


def spread(values: list[float]) -> dict[str, float] | None:
    return {"median": round(statistics.median(values), 3), "slowest": round(max(values), 3), "n": len(values)} if values else None


def table(result: dict[str, Any]) -> str:
    """The result for people, with the goals."""
    lines = []

    def line(name: str, value: Any, goal: str = "") -> None:
        lines.append(f"{name:<44} {value!s:<44} {goal}".rstrip())

    if "soak" in result:
        s = result["soak"]
        line("visitors, runs, seconds", f"{s['visitors']}, {s['runs']}, {s['seconds']}")
        for name in ("lost", "crossed", "cut"):
            line(name, s[name], "goal 0")
        line("refused by a full line, tried again", s["refused"])
        line("run again alone, with the same tokens", s["repeated"])
        line("memory grew, from a fifth of the runs to all", "-" if s["growth"] is None else f"{s['growth']:+.1%}", "goal < 5 %")
        line("memory in MB, over the runs", s["memory_mb"])
        for name, label, goal in (
            ("idle_after_stop_s", "idle after Stop (s)", "goal < 0.5"),
            ("idle_after_closing_s", "idle after a closed tab (s)", ""),
            ("stop_in_the_crowd_s", "Stop to the last message, in the crowd (s)", ""),
            ("run_s", "a run, with its time in line (s)", ""),
            ("request_s", "answer to a request (s)", ""),
        ):
            if s[name]:
                line(label, f"median {s[name]['median']}, slowest {s[name]['slowest']}, n = {s[name]['n']}", goal)
        lines += [f"  {problem}" for problem in s["problems"]]
        if s["traceback"]:
            lines.append(s["traceback"])
    for fault in result.get("faults", []):
        caught = "" if fault["caught"] else " (the moment was not caught)"
        left = "" if fault["left behind"] is None else f", {fault['left behind']} unfinished files"
        line(fault["fault"], ("works" if fault["works"] else f"FAILS {fault.get('error', '')}") + caught + left)
    return "\n".join(lines)


def failed(result: dict[str, Any]) -> list[str]:
    """Goals that were missed."""
    missed = []
    if "soak" in result:
        s = result["soak"]
        missed += [name for name in ("lost", "crossed", "cut") if s[name]]
        missed += ["growth"] if s["growth"] is not None and s["growth"] >= GOALS["growth"] else []
        missed += ["idle after Stop"] if s["idle_after_stop_s"] and s["idle_after_stop_s"]["slowest"] >= GOALS["stop_s"] else []
        missed += ["traceback"] if s["traceback"] else []
    return missed + [fault["fault"] for fault in result.get("faults", []) if not fault["works"]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=900, help="after which no new run begins")
    parser.add_argument("--idle", type=int, default=10, help="how often the time to idle is measured")
    parser.add_argument("--rounds", type=int, default=2, help="of every fault")
    parser.add_argument("--compile-seconds", type=float, default=240, help="to wait for compiled layers; 0 = not at all")
    parser.add_argument("--model", type=Path, help="of the soak (default: a tiny random one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["soak", "faults"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    report = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    watchdog = threading.Timer(args.seconds + 1800, lambda: os.kill(os.getpid(), signal.SIGTERM))
    watchdog.daemon = True
    watchdog.start()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="river-soak-") as folder:
        place = Path(folder)
        if args.only != "faults":
            model = args.model or write_folder(place / "tiny")
            result["soak"] = measure(model, args.visitors, args.runs, args.seed, args.seconds, args.idle, args.compile_seconds, report)
        if args.only != "soak":
            result["faults"] = faults(place, args.seed, args.rounds, args.compile_seconds, report)
    print(json.dumps(result, indent=1) if args.json else table(result))
    missed = failed(result)
    if missed:
        report(f"missed: {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
