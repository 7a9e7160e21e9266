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

    def open(self, address: str = "") -> Tab:
        """Go to the page, or to an address of it such as "?recording=holes"."""
        self.page.goto(self.url + address)
        self.page.wait_for_selector("#stage [data-ready=true]", state="attached")
        return self

    def to_run(self) -> Tab:
        """Open the Run tab of a page whose model is there."""
        self.page.wait_for_selector("#model-pill[data-model-state=ready]")
        self.page.click("#run-tab-button")
        # The threshold is filled in once the page knows the model.
        self.page.wait_for_function("document.querySelector('#tau textarea, #tau input').value !== ''")
        return self

    def fill(self, control: str, value: str) -> None:
        box = self.page.locator(f"#{control} textarea, #{control} input").first
        box.fill(value)
        box.blur()

    def press(self, button: str) -> None:
        self.page.click(f"#{button}")
        if button == "run":  # what is open gives way to the run, unless it has to wait or is refused
            self.page.wait_for_selector(".stage[data-source=live], #run-line:not([hidden])")

    def refused(self) -> str:
        """The sentence beside the controls that says why a run was refused."""
        return self.page.wait_for_selector("#run-line[data-state=failed]:not([hidden])").text_content()

    def drawn(self) -> None:
        """Until what has happened is on the screen: the stage draws once a frame."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    @property
    def clock(self) -> int:
        """Where the playhead stands, in nanoseconds of engine time."""
        return int(self.page.get_attribute(".stage", "data-clock"))

    def wait_open(self, trace_id: str) -> None:
        """Until a recording or a file is what the stage shows."""
        self.page.wait_for_function("(id) => window.opened?.at(-1) === id", arg=trace_id)

    def wait_state(self, *states: str) -> None:
        self.page.wait_for_selector(", ".join(f".stage[data-run-state={state}]" for state in states))

    def wait_tokens(self, count: int) -> None:
        self.page.wait_for_function(f"document.querySelectorAll('.tok').length >= {count}")

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


# What the stage opened, and when the first playhead moved; noted before any script of the page runs.
WITNESS = """
window.opened = [];
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
        context.set_default_timeout(20_000)
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
