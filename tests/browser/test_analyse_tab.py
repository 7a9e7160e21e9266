"""The Analyse tab in a real browser: charts of a recording without a model, and what is brushed is marked in the stage."""

from __future__ import annotations

import json

import pytest

from river_core import Trace
from tests.page.server import serve

FIRST = "recording:difficulty"


class Analyse:
    """The Analyse tab of a visitor."""

    def __init__(self, tab):
        self.tab, self.page = tab, tab.page
        self.page.wait_for_selector(".stage[data-source=recording]")
        self.page.click("#analyse-tab-button")
        self.page.wait_for_selector("#analysis [data-trace], #analysis[data-trace]")

    def view(self, name: str) -> Analyse:
        self.page.click(f"#an-tab-{name}")
        return self

    def chart(self, name: str) -> Analyse:
        self.view(name)
        self.page.wait_for_selector(f".an-plot[data-chart={name}] .main-svg")
        return self

    def drag(self, subplot: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag in a subplot, between two places given as shares of its width and height."""
        area = self.page.locator(f".an-plot .nsewdrag[data-subplot={subplot}]")
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        (x0, y0), (x1, y1) = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (start, end)]
        self.page.mouse.move(x0, y0)
        self.page.mouse.down()
        self.page.mouse.move(x1, y1, steps=4)
        self.page.mouse.up()

    @property
    def line(self) -> str:
        return self.page.text_content(".an-brush .an-line")

    def wait_line(self, start: str) -> None:
        self.page.wait_for_function("(start) => document.querySelector('.an-brush .an-line').textContent.startsWith(start)", arg=start)

    def stage(self, words: str):
        """A fact of the stage that the page's scripts see."""
        return self.page.evaluate(f"(() => {{ const stage = document.querySelector('.stage').river; return {words}; }})()")


@pytest.fixture
def analyse(watcher):
    return lambda **options: Analyse(watcher(**options))


def shallow(trace: Trace, lane: str, share: float) -> list[int]:
    """Tokens of a lane that left in the given first share of the layers."""
    layers = trace.header["model"]["n_layers"]
    return [token["i"] for token in trace.lanes[lane].steps if token["exit_layer"] <= share * layers]


def test_a_recording_has_its_charts_without_a_model_and_the_library_comes_from_here(analyse):
    tab = analyse()
    for name in ("exit-depths", "latency", "similarity", "memory"):
        tab.chart(name)
        assert tab.page.locator(".an-plot .trace").count() > 0
        assert tab.page.text_content(".an-part:not([hidden]) .an-tag") in ("recorded", "computed from shapes")
    scripts = tab.page.evaluate(
        "performance.getEntriesByType('resource').map((entry) => entry.name).filter((name) => name.endsWith('plotly.min.js'))"
    )
    assert len(scripts) == 1 and scripts[0].startswith(tab.tab.url)


def test_the_library_is_not_fetched_before_the_tab_is_opened(watcher):
    tab = watcher()
    tab.page.wait_for_selector(".stage[data-source=recording]")
    assert tab.page.evaluate("performance.getEntriesByType('resource').some((entry) => entry.name.includes('plotly'))") is False


def test_brushing_the_histogram_marks_those_tokens_in_the_stage_and_clearing_unmarks(analyse, waiting_server):
    tab = analyse().chart("exit-depths")
    trace = waiting_server.runs.trace(FIRST)
    lanes = [lane.id for lane in trace.lanes.values()]
    place = lanes.index("river") + 1
    # A bar of depth d stands around d; the axis goes from -0.7 to L + 0.7, so that this ends between two bars.
    layers = trace.header["model"]["n_layers"]
    end = (layers // 3 + 0.5 + 0.7) / (layers + 1.4)
    tab.drag(f"x{place}y{place}", (0.01, 0.4), (end, 0.6))
    expected = shallow(trace, "river", 1 / 3)
    assert expected
    tab.wait_line(f"{len(expected)} tokens marked, in River")
    marked = f"{len(expected)} tokens marked"
    assert marked in tab.page.text_content(".stage .marks")
    tab.page.click(".an-brush >> text=Clear the marks")
    tab.page.wait_for_selector(".stage .marks", state="hidden")
    assert tab.line == ""


def test_marks_that_the_stage_takes_away_are_gone_here_too(analyse, waiting_server):
    tab = analyse().chart("exit-depths")
    trace = waiting_server.runs.trace(FIRST)
    layers = trace.header["model"]["n_layers"]
    tab.page.get_by_label("from layer").fill(str(layers))
    tab.page.click(".an-brush button[type=submit]")
    count = sum(token["exit_layer"] == layers for lane in trace.lanes.values() for token in lane.steps)
    tab.wait_line(f"{count} tokens marked, in Backbone")
    tab.page.click(".stage .marks button")
    tab.page.wait_for_function("document.querySelector('.an-brush .an-line').textContent === ''")


def test_a_click_on_a_point_moves_the_stages_cursor(analyse):
    tab = analyse().chart("latency")
    points = tab.page.locator(".an-plot .scatterlayer .trace").nth(0).locator(".points path")
    box = points.nth(20).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.page.mouse.move(x, y)
    tab.page.wait_for_selector(".an-plot .hoverlayer .hovertext")
    tab.page.mouse.click(x, y)
    tab.page.wait_for_function("document.querySelector('.stage').river.cursor !== null")
    assert tab.stage("stage.cursor") == {"lane": "backbone", "i": 21}


def test_charts_follow_what_is_open_but_only_while_they_are_seen(analyse, waiting_server):
    tab = analyse().chart("exit-depths")
    page = tab.page
    asked = []
    page.on("request", lambda request: "component_server" in request.url and asked.append(json.loads(request.post_data)["fn_name"]))
    page.click("#watch-tab-button")
    page.locator("#watch button", has_text=waiting_server.runs.recordings["holes"].title).first.click()
    tab.tab.wait_open("recording:holes")
    assert "charts" not in asked
    page.click("#analyse-tab-button")
    page.wait_for_selector("#analysis [data-trace='recording:holes'], #analysis[data-trace='recording:holes']")
    assert "charts" in asked
    assert waiting_server.runs.recordings["holes"].title in page.text_content(".an-what")


def test_the_table_of_tokens_is_filled_by_lane_and_saved_as_csv(analyse, waiting_server):
    tab = analyse().view("tokens")
    page = tab.page
    trace = waiting_server.runs.trace(FIRST)
    cells = page.locator("#analysis-table [role=gridcell]")
    cells.filter(has_text="backbone").first.wait_for()
    page.select_option("#an-table-lane", "river")
    cells.filter(has_text="river").first.wait_for()
    page.wait_for_function(
        "![...document.querySelectorAll('#analysis-table [role=gridcell]')].some((cell) => cell.textContent.includes('backbone'))"
    )
    assert cells.filter(has_text="river").count() > 0
    with page.expect_download() as saved:
        page.click("text=Download all tokens (CSV)")
    lines = saved.value.path().read_text().splitlines()
    assert len(lines) == 1 + sum(len(lane.tokens) for lane in trace.lanes.values())


def test_the_table_shows_the_lane_that_was_chosen_last(analyse):
    tab = analyse().view("tokens")
    page = tab.page
    cells = page.locator("#analysis-table [role=gridcell]")
    cells.filter(has_text="backbone").first.wait_for()
    page.evaluate("""async () => {
        const choice = document.querySelector('#an-table-lane');
        for (const lane of ['backbone', 'river']) {
            choice.value = lane;
            choice.dispatchEvent(new Event('change'));
            await new Promise((done) => setTimeout(done, 10)); // the table is still filling
        }
    }""")
    page.wait_for_function("""() => {
        const texts = [...document.querySelectorAll('#analysis-table [role=gridcell]')].map((cell) => cell.textContent);
        return texts.some((text) => text.includes('river')) && !texts.some((text) => text.includes('backbone'));
    }""")
    page.wait_for_timeout(1000)  # nothing comes after it
    assert cells.filter(has_text="backbone").count() == 0


def test_two_recordings_side_by_side_show_what_differs_and_where_the_texts_part(analyse, waiting_server, tmp_path):
    tab = analyse().view("compare")
    page = tab.page
    a, b = waiting_server.runs.trace(FIRST), waiting_server.runs.trace("recording:holes")
    page.wait_for_selector("#an-other option[value='recording:holes']", state="attached")
    page.select_option("#an-other", "recording:holes")
    page.wait_for_selector(".an-texts")
    shown = page.evaluate("[...document.querySelectorAll('.an-tokens')].map((column) => column.querySelectorAll('.an-token').length)")
    assert shown == [len(a.lanes["river"].tokens), len(b.lanes["river"].tokens)]
    assert page.text_content(".an-parting").startswith("The texts")
    settings = page.locator(".analysis table", has_text="What was set differently")
    assert settings.locator("th[scope=row]", has_text="prompt").count() >= 1
    a.save(tmp_path / "a.json.gz")
    page.set_input_files("[aria-label='Trace file for B']", tmp_path / "a.json.gz")
    page.wait_for_selector("text=The texts are the same, token by token.")
    assert page.locator("text=The run cards are the same").count() == 1


def test_the_views_are_walked_with_the_arrow_keys(analyse):
    tab = analyse().chart("exit-depths")
    tab.page.focus("#an-tab-exit-depths")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("document.activeElement.id") == "an-tab-latency"
    assert tab.page.get_attribute("#an-tab-latency", "aria-selected") == "true"
    tab.page.keyboard.press("End")
    assert tab.page.evaluate("document.activeElement.id") == "an-tab-compare"
    assert tab.stage("stage.cursor") is None


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_view_is_wider_than_the_page(analyse, width, theme):
    tab = analyse(width=width, theme=theme)
    for name in ("exit-depths", "latency", "similarity", "memory"):
        tab.chart(name)
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    for name in ("tokens", "sweep", "compare"):
        tab.view(name)
        if name == "tokens":
            tab.page.locator("#analysis-table [role=gridcell]", has_text="backbone").first.wait_for()
        tab.tab.settled()
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    ink = tab.page.evaluate("getComputedStyle(document.querySelector('.an-what')).color")
    assert ink == ("rgb(90, 103, 116)" if theme == "light" else "rgb(151, 165, 179)")


@pytest.fixture(scope="module")
def tiny_server(tiny):
    page = serve(lambda progress: tiny)
    yield page
    page.demo.close()


def test_a_run_of_ones_own_has_its_charts_when_it_has_ended(visit, tiny_server):
    tab = visit(tiny_server).to_run()
    tab.fill("max-tokens", "8")
    tab.press("run")
    tab.wait_state("done")
    tab.page.click("#analyse-tab-button")
    tab.page.wait_for_selector(".an-plot[data-chart=exit-depths] .main-svg")
    assert "your run on tiny" in tab.page.text_content(".an-what")
    bars = "[...document.querySelector('.an-plot').data].map((trace) => trace.customdata.flat().length)"
    trace = tiny_server.runs.trace(tab.page.evaluate("document.querySelector('.stage').river.id"))
    assert tab.page.evaluate(bars) == [lane.decode_steps for lane in trace.lanes.values()]


def test_what_was_opened_before_the_tab_was_seen_can_be_compared_too(visit, tiny_server):
    tab = visit(tiny_server).to_run()
    page = tab.page
    ids = []
    for prompt in ("First of two", "Second of two"):
        tab.fill("prompt", prompt)
        tab.fill("max-tokens", "4")
        tab.press("run")
        page.wait_for_function("(prompt) => document.querySelector('.prompt-text').textContent === prompt", arg=prompt)
        tab.wait_state("done")
        ids.append(page.evaluate("document.querySelector('.stage').river.id"))
    page.click("#analyse-tab-button")
    page.click("#an-tab-compare")
    option = page.locator(f"#an-other option[value='{ids[0]}']")
    option.wait_for(state="attached")
    assert option.text_content() == "Run: First of two"
    page.select_option("#an-other", ids[0])
    page.wait_for_selector(".an-texts")
    page.set_input_files("[aria-label='Trace file for B']", {"name": "broken.json", "mimeType": "application/json", "buffer": b"{"})
    page.wait_for_function(
        "[...document.querySelectorAll('#an-view .an-line')].some((line) => !['', 'Comparing.'].includes(line.textContent))"
    )
    assert page.is_visible(".an-texts"), "a file that is refused takes away nothing"


def test_before_the_first_charts_no_view_is_shown_rather_than_all(watcher):
    tab = watcher()
    tab.page.wait_for_selector(".stage[data-source=recording]")
    held, released = [], []

    def for_charts(request) -> bool:
        return "component_server" in request.url and '"charts"' in (request.post_data or "")

    def hold(route) -> None:
        if released or not for_charts(route.request):
            route.continue_()  # a change of width asks again, and nobody would let that go
        else:
            held.append(route)

    tab.page.route("**/component_server**", hold)
    with tab.page.expect_request(for_charts):
        tab.page.click("#analyse-tab-button")
    tab.page.wait_for_selector(".an-tabs")
    tab.drawn(frames=12)
    assert held and tab.page.locator(".an-part:visible").count() == 0
    released.append(True)
    for route in held:
        route.continue_()
    tab.page.wait_for_selector(".an-plot .main-svg")
    assert tab.page.locator(".an-part:visible").count() == 1


def test_measured_charts_of_a_recording_are_called_recorded(analyse):
    tab = analyse().chart("latency")
    assert tab.page.text_content(".an-view .an-tag") == "recorded"
    tab.chart("memory")
    assert tab.page.text_content(".an-view .an-tag") == "computed from shapes"


def test_a_sweep_runs_on_the_engine_stops_and_draws_its_points(visit, tiny_server):
    tab = visit(tiny_server)
    tab.page.wait_for_selector("#model-pill[data-model-state=ready]")
    analyse = Analyse(tab).view("sweep")
    page = tab.page
    done = "#analysis [data-sweep=done], #analysis[data-sweep=done]"
    page.wait_for_selector(".an-methods input")  # what the server suggests has come, and takes the place of nothing that is typed
    page.fill("#an-taus", ", ".join(f"{tau / 20}" for tau in range(1, 20)))  # as many lanes, so that it is not over before Stop
    page.fill("#an-tokens", "120")
    page.fill("#an-repeats", "5")
    tab.ask("#an-sweep")
    page.wait_for_function("document.querySelector('.an-form .an-line').textContent.startsWith('Repeat')")
    page.click("#an-sweep-stop")
    page.wait_for_selector(done, state="attached")
    assert tiny_server.wait_idle(within=2) < 2
    assert "Stopped" in page.text_content(".an-form .an-line")
    page.fill("#an-taus", "0.5")
    page.fill("#an-tokens", "8")
    page.fill("#an-repeats", "2")
    tab.ask("#an-sweep")
    # The sweep that was stopped may have left charts too.
    page.wait_for_function("document.querySelector('.an-form .an-line').textContent === 'Done: 3 lanes, 2 repeats.'")
    page.wait_for_selector(".an-results .an-plot[data-chart=pareto] .main-svg")
    with page.expect_download() as saved:
        page.click("text=Save the result (JSON)")
    assert [point["method"] for point in json.loads(saved.value.path().read_text())["points"]] == ["backbone", "river", "int4"]
    assert analyse.stage("stage.source") == "recording"  # what is open stays open
