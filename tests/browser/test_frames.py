"""The page inside another site's page: storage that is refused, and a frame as tall as its content, which does not scroll."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

REFUSED = """
for (const name of ["sessionStorage", "localStorage"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("Access is denied for this document.", "SecurityError"); } });
}
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def outer(tmp_path):
    """A page of another site (localhost is one, 127.0.0.1 another) that holds the explorer in a frame of 4,000 px; `write(url)` gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def write(url: str, height: int = 4000) -> str:
        frame = f'<iframe src="{url}" style="width:100%;height:{height}px;border:0"></iframe>'
        (tmp_path / "index.html").write_text(
            f'<!doctype html><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><body style="margin:0">{frame}'
        )
        return f"http://localhost:{server.server_port}/"

    yield write
    server.shutdown()
    server.server_close()


@pytest.fixture
def framed(chromium, outer):
    """Opens the explorer in a frame of another site: the outer page, and the frame."""
    contexts, complaints = [], []

    def open_frame(url: str, init: str = "", width: int = 390, height: int = 844, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(60_000)
        if init:
            context.add_init_script(init)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(outer(url))
        frame = page.frame(url=lambda address: address.startswith(url.split("?")[0]))
        frame.wait_for_selector(".recording", state="attached")
        frame.wait_for_selector(".stage[data-source=recording]")
        return page, frame

    yield open_frame
    for context in contexts:
        context.close()
    assert complaints == []


def in_sight(page, frame, selector: str) -> bool:
    """Whether an element of the frame lies wholly on the screen that the outer page shows."""
    box = frame.locator(selector).bounding_box()  # against the outer page's own window
    return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"]


def test_storage_that_is_refused_costs_the_page_nothing(visit, waiting_server):
    context_page = visit(waiting_server)  # the page as it is, for what it shows
    wanted = context_page.page.locator(".recording").count()
    browser = context_page.context.browser
    context = browser.new_context()
    context.add_init_script(REFUSED)
    page = context.new_page()
    page.goto(waiting_server.url)
    page.wait_for_selector(".stage[data-source=recording]")
    assert page.locator(".recording").count() == wanted
    page.keyboard.press("?")
    page.uncheck(".help-switch input")
    page.click(".help-close")
    page.keyboard.press("Space")  # the keys are off, as long as the page is there
    page.wait_for_timeout(100)
    context.close()


def test_a_run_is_shown_where_storage_is_refused_in_a_frame_of_another_site(framed, page_server):
    page, frame = framed(page_server.url, REFUSED, width=1280)
    frame.wait_for_selector("#model-pill[data-model-state=ready]")
    frame.click("#run-tab-button")
    frame.wait_for_function("document.querySelector('#tau textarea, #tau input').value !== ''")
    frame.locator("#max-tokens input").fill("4")
    frame.locator("#max-tokens input").blur()
    frame.click("#run")
    frame.wait_for_selector(".stage[data-source=live][data-run-state=done]")
    assert frame.locator(".text[data-lane=backbone] .tok").count() >= 1
    page_server.wait_idle(within=10)


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_frame_as_tall_as_its_content_nothing_that_floats_is_off_the_screen(framed, waiting_server, width):
    page, frame = framed(f"{waiting_server.url}?recording=holes", width=width)
    frame.evaluate("document.querySelector('.stage').river.pause()")
    # A tapped token's card lies beside it.
    token = frame.locator(".text[data-lane=masking] .tok").nth(3)
    frame.evaluate(
        "document.querySelector('.to-slider').value = '10000'; document.querySelector('.to-slider').dispatchEvent(new Event('input'))"
    )
    token.wait_for()
    token.scroll_into_view_if_needed()
    page.mouse.wheel(0, 200)
    page.wait_for_timeout(100)
    token.click()
    frame.wait_for_selector(".stage.has-token .inspector .token-place")
    if width == 390:
        assert in_sight(page, frame, ".inspector .token-place"), frame.locator(".inspector").bounding_box()
        frame.click(".inspector .close")
    # What answers a button lies beside it.
    button = frame.locator(".stage [data-action=link]")
    button.scroll_into_view_if_needed()
    button.click()
    frame.wait_for_selector(".page-note:not([hidden])")
    assert in_sight(page, frame, ".page-note"), frame.locator(".page-note").bounding_box()
    frame.click(".note-close")
    keys = frame.locator(".stage [data-action=keys]")
    keys.scroll_into_view_if_needed()
    keys.click()
    frame.wait_for_selector(".help[open]")
    assert frame.locator(".help").bounding_box()["y"] >= 0
    assert frame.locator(".help h2").bounding_box()["y"] < page.viewport_size["height"]


def test_a_page_of_its_own_keeps_its_floating_parts_where_they_were(watcher):
    tab = watcher("?recording=nothing", width=390)
    tab.page.wait_for_selector(".page-note:not([hidden])")
    assert tab.page.evaluate("document.querySelector('.page-note').style.insetBlock") == ""
    box = tab.page.locator(".page-note").bounding_box()
    assert box["y"] + box["height"] == pytest.approx(900 - 14, abs=1)
