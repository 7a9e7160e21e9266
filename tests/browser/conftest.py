"""A real Chromium before the page with the real default model."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def missing(reason: str):
    """Skip with the reason, or fail where a browser is demanded (RIVER_REQUIRE_BROWSER=1, as in CI)."""
    if os.environ.get("RIVER_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        missing("no Chromium found: apt-get install --no-install-recommends chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Tab:
    """One visitor: a browser context of its own with one page, and what the page complained about."""

    page: object
    context: object
    url: str
    complaints: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    before: str | None = None  # the id of what was open when Run was last pressed

    def open(self, address: str = "") -> Tab:
        """Go to the page, or to an address of it such as "?recording=holes"."""
        self.page.goto(self.url + address)
        self.page.wait_for_selector("#stage [data-ready=true]", state="attached")
        self.page.wait_for_selector(".recording", state="attached")  # the list has an answer of its own, and takes room when it comes
        return self

    def to_run(self) -> Tab:
        """Open the Run tab of a page whose model is there."""
        self.page.wait_for_selector("#model-pill[data-model-state=ready]")
        self.page.wait_for_selector(".stage:not([data-source=preview])")  # what the page opens by itself is there before anything is done
        self.page.click("#run-tab-button")
        # The threshold is filled in once the page knows the model.
        self.page.wait_for_function("document.querySelector('#tau textarea, #tau input').value !== ''")
        return self

    def fill(self, control: str, value: str) -> None:
        """Fill in a control of the Run tab and leave it; a box that is still being put into the page loses what comes too early, and gets it again."""
        box = self.page.locator(f"#{control} textarea, #{control} input").first
        for _ in range(5):
            box.fill(value)
            box.blur()
            self.drawn()
            if box.input_value() == value:
                return
        raise AssertionError(f"#{control} does not keep {value!r}")

    def press(self, button: str) -> None:
        """Click a button; after Run, wait until the run has begun, stands in line or is refused."""
        if button != "run":
            self.page.click(f"#{button}")
            return
        self.before = self.page.evaluate("document.querySelector('.stage').river.id")
        self.ask("#run")
        # Until its first event a run only says that it is about to start, and what is open stays, though it is "done".
        self.page.wait_for_function(
            """(before) => {
                const { source, id } = document.querySelector('.stage').river;
                const line = document.querySelector('#run-line');
                const answered = !line.hidden && (line.dataset.state === 'failed' || line.textContent.includes('in line'));
                return answered || (source === 'live' && id !== before);
            }""",
            arg=self.before,
        )

    def ask(self, selector: str) -> None:
        """Click what starts a run or a sweep, once: the page asks for it."""
        with self.page.expect_request(lambda request: "/queue/join" in request.url):
            self.page.click(selector)

    def unfold(self) -> None:
        """Open the part of the Run tab that is folded away, and wait until what is in it can be used: Gradio makes it when it is first opened."""
        self.page.click("#sampling button >> nth=0")
        self.page.locator("#more textarea, #more input").first.wait_for(state="visible")
        self.settled()

    def refused(self) -> str:
        """The sentence beside the controls that says why a run was refused."""
        return self.page.wait_for_selector("#run-line[data-state=failed]:not([hidden])").text_content()

    def drawn(self, frames: int = 2) -> None:
        """Until what has happened is on the screen: the stage draws once a frame."""
        self.page.evaluate(
            """async (frames) => {
                for (let k = 0; k < frames; k += 1) await new Promise((done) => requestAnimationFrame(done));
            }""",
            frames,
        )

    def settled(self) -> None:
        """Until nothing fades or slides any more; what moves without end does not count."""
        self.drawn()
        self.page.wait_for_function(
            """() => document.getAnimations().every((one) => one.playState !== 'running' || one.effect.getComputedTiming().endTime === Infinity)"""
        )

    @property
    def clock(self) -> int:
        """Where the playhead stands, in nanoseconds of engine time."""
        return int(self.page.get_attribute(".stage", "data-clock"))

    def wait_open(self, trace_id: str) -> None:
        """Until a recording or a file is what the stage shows."""
        self.page.wait_for_function("(id) => window.opened?.at(-1) === id", arg=trace_id)
        self.drawn()

    def wait_state(self, *states: str) -> None:
        """Until the run that was asked for last is in one of these states, and is drawn so; a recording counts as "done" too."""
        self.page.wait_for_function(
            """([before, states]) => {
                const stage = document.querySelector('.stage');
                const { source, id, whole } = stage.river;
                const known = source === 'live' && id !== before && states.includes(whole.state);
                return known && stage.dataset.source === 'live' && stage.dataset.runState === whole.state;
            }""",
            arg=[self.before, list(states)],
        )
        self.drawn()

    def wait_tokens(self, count: int) -> None:
        """Until the run that was asked for last has written so many tokens, over all lanes, and they are on the screen."""
        self.page.wait_for_function(
            """([before, count]) => {
                const { source, id, whole } = document.querySelector('.stage').river;
                const written = [...whole.lanes.values()].reduce((sum, lane) => sum + lane.count, 0);
                return source === 'live' && id !== before && written >= count;
            }""",
            arg=[self.before, count],
        )
        self.drawn()
        self.page.wait_for_function("(count) => document.querySelectorAll('.tok').length >= count", arg=count)

    def lane_text(self, lane: str) -> str:
        return self.page.text_content(f".text[data-lane={lane}]")

    def status(self) -> str:
        return self.page.text_content(".stage .status")


@pytest.fixture(scope="session")
def waiting_server():
    """The page as it is while the model loads, for as long as one looks: its load function does not return."""
    from tests.page.server import never, serve

    page = serve(never)
    yield page
    page.demo.close()


# What the stage opened, when the first playhead moved, and how many frames were asked for; noted before any script of the page runs.
WITNESS = """
window.opened = [];
window.framesAsked = 0;
const request = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (tick) => ((window.framesAsked += 1), request(tick));
document.addEventListener("river:opened", (event) => window.opened.push(event.detail.id));
let before = null;
new MutationObserver(() => {
  const clock = document.querySelector(".stage")?.dataset.clock;
  if (before !== null && Number(clock) > before) window.firstMotion ??= performance.now();
  if (clock !== undefined) before = Number(clock);
}).observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["data-clock"] });
"""


@pytest.fixture
def visit(chromium):
    """Opens tabs on a server; in the end none of them may have complained or asked another host for anything."""
    tabs = []

    def open_tab(server, address: str = "", width: int = 1280, height: int = 900, theme: str = "light", **options) -> Tab:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme, **options)
        context.set_default_timeout(60_000)  # a run of some dozen tokens on two cores that server, engine and browser share
        context.add_init_script(WITNESS)
        tab = Tab(context.new_page(), context, server.url)
        watch(tab, urlsplit(server.url).netloc)
        tabs.append(tab)
        return tab.open(address)

    yield open_tab
    for tab in tabs:
        tab.context.close()
    assert [complaint for tab in tabs for complaint in tab.complaints] == []
    assert [url for tab in tabs for url in tab.outside] == []


def watch(tab: Tab, host: str) -> None:
    """Write down what the page says on the console, what it throws, and what it asks of others than `host`."""

    def asked(request) -> None:
        parts = urlsplit(request.url)
        if parts.netloc not in (host, "") and parts.scheme not in ("data", "blob"):
            tab.outside.append(request.url)

    tab.page.on("console", lambda line: line.type == "error" and tab.complaints.append(line.text))
    tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.page.on("dialog", lambda dialog: (tab.complaints.append(dialog.message), dialog.dismiss()))
    tab.page.on("request", asked)


@pytest.fixture
def new_tab(visit, page_server):
    """Opens visitors in the Run tab of the page with the real model, whose engine must be free in the end."""
    yield lambda **options: visit(page_server, **options).to_run()
    page_server.wait_idle(within=10)


@pytest.fixture
def watcher(visit, waiting_server):
    """Opens visitors on the page whose model is still loading."""
    return lambda address="", **options: visit(waiting_server, address, **options)
