"""The static site: the Watch tab in one file, from a disk and under a sub-path, without a request."""

from __future__ import annotations

import threading
from functools import partial
from http.server import ThreadingHTTPServer

import pytest

from app.export import main
from app.recordings import read_recordings
from river_core import Trace
from tests.browser.conftest import Tab, watch
from tests.browser.test_frames import Quiet
from tests.browser.test_share import STATE, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "deep" / "site"
    assert main(["--static", str(folder)]) == 0
    return folder


@pytest.fixture
def open_site(chromium, folder):
    """Opens an address; in the end nothing but that one file may have been asked for, and nobody may have complained."""
    opened = []

    def go(url: str, width: int = 1280, theme: str = "light", **options) -> Tab:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **options)
        tab = Tab(context.new_page(), context, url)
        requests = []
        tab.page.on("request", lambda request: requests.append(request.url))
        watch(tab, "")
        opened.append((tab, requests))
        tab.page.goto(url)
        tab.page.wait_for_selector(".stage[data-source=recording]")
        return tab

    yield go
    for tab, requests in opened:
        tab.context.close()
        asked = {request.split("?")[0] for request in requests if not request.startswith(("blob:", "data:"))}
        assert asked <= {tab.url.split("?")[0], tab.url.split("?")[0].replace("index.html", "") + "favicon.ico"}
        assert tab.complaints == []


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_every_recording_plays_from_a_disk(open_site, folder, width, theme):
    tab = open_site((folder / "index.html").as_uri(), width, theme)
    page = tab.page
    recordings = read_recordings()
    assert page.locator(".recording").count() == len(recordings) > 1
    assert page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    for slug, recording in recordings.items():
        page.click(f".recording[data-slug={slug}]")
        page.wait_for_selector(f".recording[data-slug={slug}][aria-current=true]")
        page.wait_for_selector(".stage[data-playing=true]")
        page.locator("h1").click()
        page.keyboard.press("End")
        tab.drawn()
        state = page.evaluate(STATE)
        trace = Trace.from_bytes(recording.text.encode())
        assert len(state["tokens"]) == sum(len(lane.tokens) for lane in trace.lanes.values())
        assert Trace.from_bytes(saved(tab, "json")[1]).to_dict() == trace.to_dict()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.click("[data-way=next]")
    page.wait_for_selector(f".recording[data-slug={next(iter(recordings))}][aria-current=true]")
    assert page.locator("[data-way=own], [data-way=open-trace]").count() == 0, "there is no server for these"


def test_under_a_sub_path_links_open_a_token_and_the_address_follows(open_site, folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder.parent.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}/deep/site/index.html"
        tab = open_site(f"{base}?recording=holes&lane=masking&token=12", permissions=["clipboard-read", "clipboard-write"])
        page = tab.page
        page.locator(".token-place", has_text="KV masking · token 12").wait_for()  # its policy forbids what wait_for_function does
        page.click(".stage [data-action=link]")
        page.wait_for_selector(".page-note:not([hidden])")
        assert page.evaluate("navigator.clipboard.readText()") == f"{base}?recording=holes&lane=masking&token=12"
        page.locator(".text[data-lane=masking] .tok").nth(2).click()
        page.wait_for_url(lambda url: url.endswith("?recording=holes&lane=masking&token=3"))
        tab.complaints = [line for line in tab.complaints if "404" not in line]  # the icon that browsers ask for by themselves
    finally:
        server.shutdown()
        server.server_close()


def test_the_folder_is_a_static_space_and_what_cannot_be_written_is_said(folder, tmp_path, capsys):
    head = (folder / "README.md").read_text(encoding="utf-8").split("---")[1]
    assert "sdk: static" in head and "app_file: index.html" in head
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "index.html"]
    taken = tmp_path / "file"
    taken.write_text("")
    assert main(["--static", str(taken)]) == 1
    assert "could not be written" in capsys.readouterr().err
    assert taken.read_text() == ""
