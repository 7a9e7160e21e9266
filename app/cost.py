"""What watching costs: the same run with and without a browser in front of it, in turn, in one server process: `python -m app.cost`."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradio_client import Client

from app.startup import serving

PROMPT = "Count from 1 to 1000 in words, one number per line."
METHODS = ("backbone", "int4", "river")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PARTS = {"TaskDuration": "all tasks", "ScriptDuration": "script", "LayoutDuration": "layout", "RecalcStyleDuration": "style"}
"""Of Chromium's own accounts of what its page did, in seconds of the main thread."""


class CannotMeasure(Exception):
    """What is missing for the measurement, in one sentence."""


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium.

    Raises:
        CannotMeasure: if playwright or a Chromium is not installed.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise CannotMeasure("A browser is driven by playwright, which is not installed: pip install playwright") from None
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise CannotMeasure("No Chromium was found: apt-get install --no-install-recommends chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        try:
            yield started
        finally:
            started.close()


def speed(lanes: list[tuple[int, int]]) -> float:
    """Tokens per second of engine time over all lanes, from (decoded tokens, their nanoseconds)."""
    return sum(tokens for tokens, _ in lanes) / sum(ns for _, ns in lanes) * 1e9


def unwatched(client: Client, tokens: int) -> float:
    """Engine tokens/s of a run that no page shows: the endpoint for programs, which hands the trace over at the end."""
    trace = client.predict(PROMPT, ",".join(METHODS), None, tokens, api_name="/trace")
    return speed(
        [(len(steps), sum(steps)) for steps in ([t["t_ns"] for t in lane["tokens"] if not t["from_prefill"]] for lane in trace["lanes"])]
    )


class Watcher:
    """A page in the Run tab, in a visible window of 1280 x 900, that can run and say what that cost it."""

    def __init__(self, chromium: Any, url: str):
        self.page = chromium.new_page(viewport={"width": 1280, "height": 900})
        self.page.set_default_timeout(600_000)
        self.page.goto(url)
        self.page.wait_for_selector("#model-pill[data-model-state=ready]")
        self.page.click("#run-tab-button")
        self.page.fill("#prompt textarea", PROMPT)
        self.page.evaluate("document.querySelector('.stage').river.pause()")  # the engine is also measured without a page at work
        self.account = self.page.context.new_cdp_session(self.page)
        self.account.send("Performance.enable")

    def run(self, tokens: int) -> tuple[float, dict[str, float]]:
        """Engine tokens/s of a watched run, and milliseconds of the page's main thread per second of the run by kind of work."""
        box = self.page.locator("#max-tokens input")
        box.fill(str(tokens))
        box.blur()
        self.page.wait_for_timeout(300)  # Gradio tells the server what was typed
        known = self.page.evaluate("document.querySelector('.stage').river.id")
        before, start = self._spent(), time.perf_counter()
        self.page.click("#run")
        self.page.wait_for_function(
            """(known) => {
                const { id, source, whole } = document.querySelector('.stage').river;
                return source === 'live' && id !== known && ['done', 'failed'].includes(whole.state);
            }""",
            arg=known,
            polling=250,
        )
        seconds, after = time.perf_counter() - start, self._spent()
        lanes = self.page.evaluate(
            "[...document.querySelector('.stage').river.whole.lanes.values()].map((lane) => [lane.decoded, lane.decodeNs])"
        )
        return speed(lanes), {name: 1000 * (after[name] - before[name]) / seconds for name in PARTS}

    def _spent(self) -> dict[str, float]:
        return {entry["name"]: entry["value"] for entry in self.account.send("Performance.getMetrics")["metrics"]}


def measure(url: str, chromium: Any, tokens: int, repeats: int) -> dict[str, Any]:
    """Run in turn without and with a browser, `repeats` times each, after one of each that does not count.

    Returns:
        tokens, repeats; `unwatched`, `watched` (engine tokens/s) and `ratio` (watched over unwatched of the same repeat), lists by repeat;
        `page`: for each of PARTS the milliseconds per second, by repeat.
    """
    client = Client(url, analytics_enabled=False, verbose=False)
    watcher = Watcher(chromium, url)
    result: dict[str, Any] = {
        "tokens": tokens,
        "repeats": repeats,
        "unwatched": [],
        "watched": [],
        "ratio": [],
        "page": {name: [] for name in PARTS},
    }
    for repeat in range(-1, repeats):
        if repeat % 2:  # in turn, and each goes first as often as the other
            alone = unwatched(client, tokens)
            seen, page = watcher.run(tokens)
        else:
            seen, page = watcher.run(tokens)
            alone = unwatched(client, tokens)
        if repeat < 0:
            continue
        result["unwatched"].append(alone)
        result["watched"].append(seen)
        result["ratio"].append(seen / alone)
        for name in PARTS:
            result["page"][name].append(page[name])
    return result


def report(result: dict[str, Any]) -> str:
    """The result in words: medians, and the least and greatest in brackets."""

    def spread(values: list[float], digits: int) -> str:
        return f"{statistics.median(values):8.{digits}f}  ({min(values):.{digits}f} - {max(values):.{digits}f})"

    lost = 100 * (1 - statistics.median(result["ratio"]))
    lines = [
        f"{', '.join(METHODS)}; up to {result['tokens']} tokens each, {result['repeats']} repeats in turn; median (least - greatest)",
        "",
        f"  without a browser   {spread(result['unwatched'], 1)}  engine tokens/s",
        f"  with a browser      {spread(result['watched'], 1)}  engine tokens/s",
        f"  with / without      {spread(result['ratio'], 3)}  {abs(lost):.1f} % {'slower' if lost > 0 else 'faster'}",
        "",
        *(f"  page, {words:<13} {spread(result['page'][name], 0)}  ms of its main thread per second" for name, words in PARTS.items()),
    ]
    return "\n".join([*lines, "", "Engine and browser share this machine's cores; on few of them the browser's own work slows the engine."])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m app.cost", description="What a browser that watches a run costs the engine.")
    parser.add_argument("--tokens", type=int, default=96, help="per lane")
    parser.add_argument("--repeats", type=int, default=6, help="runs of each kind")
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.repeats < 1:
        parser.error("at least 2 tokens and 1 repeat")
    try:
        with browser() as chromium, serving() as url:
            print(report(measure(url, chromium, args.tokens, args.repeats)))
    except CannotMeasure as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
