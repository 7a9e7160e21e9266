"""For everyone: no serious finding of axe in either theme, no side scroll on a small phone, reduced motion."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import missing


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core as the package carries it."""
    try:
        import axe_playwright_python as package
    except ImportError:
        missing("axe is not installed: pip install axe-playwright-python")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def findings(page, axe: str) -> list[str]:
    """Serious and critical findings: the rule, and where."""
    page.evaluate(axe)
    result = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{found['id']}: {node['target']} {node['failureSummary'][:300]}"
        for found in result["violations"]
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_no_serious_finding_and_no_side_scroll_in_any_tab(watcher, axe, width, theme):
    tab = watcher("?recording=holes&lane=masking&token=9", width=width, theme=theme)
    page = tab.page
    tab.wait_open("recording:holes")
    page.keyboard.press("End")
    found = []
    for name in ("watch", "run", "analyse"):
        page.click(f"#{name}-tab-button")
        if name == "run":
            tab.unfold()
        if name == "analyse":
            page.wait_for_selector(".an-plot[data-chart] .main-svg")
        tab.settled()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} scrolls sideways"
        found += [f"{name} · {line}" for line in findings(page, axe)]
    assert found == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_no_serious_finding_and_no_side_scroll_in_any_view_of_analyse(watcher, axe, width, theme):
    tab = watcher("?recording=holes", width=width, theme=theme)
    page = tab.page
    tab.wait_open("recording:holes")
    page.keyboard.press("End")
    page.click("#analyse-tab-button")
    page.wait_for_selector(".an-plot .main-svg")
    names = page.evaluate("[...document.querySelectorAll('.an-tabs [data-view]')].map((button) => button.dataset.view)")
    assert len(names) == 7
    found = []
    for name in names:
        page.click(f"#an-tab-{name}")
        if page.locator(".an-plot:visible").count():
            page.wait_for_selector(f".an-plot[data-chart={name}] .main-svg")
        if name == "tokens":
            page.locator("#analysis-table [role=gridcell]", has_text="backbone").first.wait_for()
        if name == "compare":
            page.wait_for_selector("#an-other option[value='recording:drift']", state="attached")
            page.select_option("#an-other", "recording:drift")
            page.wait_for_selector(".an-texts")
        if name == "sweep":
            page.click(".an-saved summary")
        tab.settled()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} scrolls sideways"
        found += [f"{name} · {line}" for line in findings(page, axe)]
    assert found == []


def test_the_run_panel_is_low_enough_to_see_the_race_below_it(watcher):
    tab = watcher()
    tab.page.click("#run-tab-button")
    tab.page.wait_for_selector("#run")  # what is in the tab comes when it is first opened
    tab.settled()
    assert tab.page.locator("#run-tab").bounding_box()["height"] <= 420


def test_with_reduced_motion_nothing_plays_by_itself(watcher, waiting_server):
    tab = watcher(reduced_motion="reduce")
    tab.wait_open(f"recording:{next(iter(waiting_server.runs.recordings))}")
    assert tab.page.get_attribute(".stage", "data-playing") == "false"
    assert tab.page.locator(".tok").count() > 10, "the whole recording is there to be read"
    clock = tab.clock
    tab.drawn(frames=12)
    assert tab.clock == clock
