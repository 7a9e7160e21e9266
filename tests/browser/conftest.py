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

    def open(self) -> Tab:
        self.page.goto(self.url)
        self.page.wait_for_selector("#stage [data-ready=true]", state="attached")
        self.page.wait_for_selector("#model-pill[data-model-state=ready]")
        # The threshold is filled in once the page knows the model.
        self.page.wait_for_function("document.querySelector('#tau textarea, #tau input').value !== ''")
        return self

    def fill(self, control: str, value: str) -> None:
        box = self.page.locator(f"#{control} textarea, #{control} input").first
        box.fill(value)
        box.blur()

    def press(self, button: str) -> None:
        self.page.click(f"#{button}")

    def wait_state(self, *states: str) -> None:
        self.page.wait_for_selector(", ".join(f".stage[data-run-state={state}]" for state in states))

    def wait_tokens(self, count: int) -> None:
        self.page.wait_for_function(f"document.querySelectorAll('.tok').length >= {count}")

    def lane_text(self, lane: str) -> str:
        return self.page.text_content(f".text[data-lane={lane}]")

    def status(self) -> str:
        return self.page.text_content(".stage .status")


@pytest.fixture
def new_tab(chromium, page_server):
    """Opens visitors; in the end none of them may have complained or asked another host for anything."""
    tabs = []

    def open_tab(width: int = 1280, theme: str = "light", **options) -> Tab:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **options)
        context.set_default_timeout(20_000)
        tab = Tab(context.new_page(), context, page_server.url)
        host = urlsplit(page_server.url).netloc
        tab.page.on("console", lambda line: line.type == "error" and tab.complaints.append(line.text))
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.page.on("dialog", lambda dialog: (tab.complaints.append(dialog.message), dialog.dismiss()))
        tab.page.on(
            "request",
            lambda request: (
                urlsplit(request.url).netloc not in (host, "")
                and urlsplit(request.url).scheme not in ("data", "blob")
                and tab.outside.append(request.url)
            ),
        )
        tabs.append(tab)
        return tab.open()

    yield open_tab
    for tab in tabs:
        tab.context.close()
    page_server.wait_idle(within=10)
    assert [complaint for tab in tabs for complaint in tab.complaints] == []
    assert [url for tab in tabs for url in tab.outside] == []
