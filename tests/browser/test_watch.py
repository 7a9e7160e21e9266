"""Watch: recordings on a page whose model is still loading, and the way on to a run."""

from __future__ import annotations

import pytest

from tests.browser.test_browser import LONG


def playing(tab, yes: bool) -> None:
    tab.page.wait_for_selector(f".stage[data-playing={'true' if yes else 'false'}]")


def still(tab) -> int:
    """The clock of a paused film; fails if it moves."""
    tab.drawn()
    before = tab.clock
    tab.drawn(frames=6)
    assert tab.clock == before
    return before


def first(server) -> str:
    return next(iter(server.runs.recordings))


def test_something_moves_soon_after_opening_while_the_model_still_loads(watcher, waiting_server):
    tab = watcher()
    tab.page.wait_for_function("window.firstMotion !== undefined")
    print(
        f"first motion after {tab.page.evaluate('window.firstMotion') / 1000:.2f} s"
    )  # how soon hangs on the machine; that it waits for no model does not
    assert waiting_server.host.loading
    page = tab.page
    assert page.get_attribute("#watch-tab-button", "aria-selected") == "true"
    tab.wait_open(f"recording:{first(waiting_server)}")
    assert page.get_attribute(".stage", "data-source") == "recording"
    page.wait_for_selector(".watch-model:not(:empty)")  # the server is asked for it, and for the list, beside the recording
    assert "model for runs of your own is still loading" in page.text_content("#watch-tab")
    assert page.locator(".recording").count() == len(waiting_server.runs.recordings)
    assert page.locator(".recording[aria-current=true]").get_attribute("data-slug") == first(waiting_server)
    # All of it fits on the first screen: tabs, recordings, and the race below them.
    for selector in ("#tabs", ".recording[aria-current=true]", ".stage .lane"):
        box = page.locator(selector).first.bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 900


def test_play_pause_step_and_scrub(watcher):
    tab = watcher()
    page = tab.page
    playing(tab, True)
    page.keyboard.press("Space")
    playing(tab, False)
    before = still(tab)
    page.keyboard.press("ArrowRight")
    after = still(tab)
    assert after > before
    page.keyboard.press("ArrowLeft")
    assert still(tab) < after
    page.keyboard.press("ArrowUp")
    up = still(tab)
    page.keyboard.press("ArrowUp")
    assert up < still(tab) < after + 1_000_000_000
    page.keyboard.press("Home")
    assert still(tab) == 0
    page.keyboard.press("End")
    end = still(tab)
    assert end > after
    slider = page.locator(".to-slider")
    slider.fill("5000")
    assert still(tab) == pytest.approx(end / 2, rel=0.01)
    count = page.locator(".text[data-lane=backbone] .tok").count()
    assert count > 0
    slider.fill("10000")
    assert still(tab) == end
    assert page.locator(".text[data-lane=backbone] .tok").count() > count
    page.click(".to-play")  # at the end it starts over
    playing(tab, True)
    assert tab.clock < end
    # While one types, keys are letters.
    page.click("#run-tab-button")
    box = page.locator("#prompt textarea")
    box.fill("")
    slider.fill("0")  # the film is short: from its start it outlasts the typing
    page.evaluate("document.querySelector('.stage').river.play()")
    playing(tab, True)
    box.press_sequentially("1 ?  ")
    playing(tab, True)
    assert box.input_value() == "1 ?  "


def test_a_page_at_rest_asks_for_no_frames(watcher):
    """Sixty a second would be time of the engine's; Gradio's own clock of what is loading asks for them unless it is held (see app/calm.js)."""
    tab = watcher()
    playing(tab, True)
    tab.page.keyboard.press("Space")
    still(tab)
    asked = []
    while asked[-2:].count(True) < 2:  # what moves while the page opens has to come to its end first; then it stays quiet
        before = tab.page.evaluate("framesAsked")
        tab.page.wait_for_timeout(2000)
        asked.append(tab.page.evaluate("framesAsked") - before < 10)
        assert len(asked) < 12 and asked[-2:] != [True, False], asked


def test_of_a_very_long_text_the_page_holds_a_part_that_goes_with_the_playhead(watcher, waiting_server):
    trace = waiting_server.runs.trace("recording:holes").to_dict()
    backbone = trace["lanes"][0]
    whole = backbone["tokens"]
    prompt = whole[0]["position"]
    backbone["tokens"] = whole[:1] + [whole[1 + at % (len(whole) - 1)] | {"i": at + 1, "position": prompt + at + 1} for at in range(4999)]
    trace["lanes"], trace["header"]["lanes"] = [backbone], trace["header"]["lanes"][:1]
    backbone["fidelity"] = None
    tab = watcher()
    page = tab.page
    tab.wait_open(f"recording:{first(waiting_server)}")
    page.evaluate("(trace) => document.querySelector('.stage').river.open(trace, { source: 'file', id: 'long' })", trace)
    tab.drawn(4)
    shown = "[...document.querySelectorAll('.text[data-lane=backbone] .tok')].map((tok) => Number(tok.dataset.i))"
    assert page.evaluate(f"{shown}.at(-1)") == 4999
    assert page.evaluate(f"{shown}.length") <= 3500
    assert page.text_content(".cut").endswith("of 5000, around the playhead.")
    page.evaluate("document.querySelector('.stage').river.setCursor({ lane: 'backbone', i: 100 })")
    tab.drawn(4)
    assert page.evaluate(f"{shown}[0]") == 0
    assert page.locator(".tok.selected").get_attribute("data-i") == "100"
    assert "around the kept token" in page.text_content(".cut")


def test_another_recording_and_the_next_one(watcher, waiting_server):
    slugs = list(waiting_server.runs.recordings)
    tab = watcher()
    tab.wait_open(f"recording:{slugs[0]}")
    tab.page.click(f".recording[data-slug={slugs[2]}]")
    tab.wait_open(f"recording:{slugs[2]}")
    tab.page.click("[data-way=next]")
    tab.wait_open(f"recording:{slugs[3]}")
    assert tab.page.locator(".recording[aria-current=true]").get_attribute("data-slug") == slugs[3]
    assert tab.page.url.rstrip("/") == waiting_server.url
    tab.page.click("[data-way=own]")
    tab.page.wait_for_selector("#run-tab-button[aria-selected=true]")
    # The box is put into the page when the tab is first opened, filled and then given the focus.
    tab.page.wait_for_function("document.activeElement.closest('#prompt') !== null")
    tab.page.wait_for_function("document.querySelector('#prompt textarea').value === document.querySelector('.prompt-text').textContent")
    # ... and so are the lanes, the mode and the threshold: what follows is the same experiment.
    header = tab.page.evaluate("document.querySelector('.stage').river.whole.header")
    ticked = tab.page.locator("#lanes input:checked").count()
    assert ticked == len(header["lanes"])
    assert "Same text and exits" in tab.page.input_value("#mode input")
    assert header["mode"] == "same-exits"
    tau = next(lane["rule"]["tau"] for lane in header["lanes"] if lane["rule"]["name"] == "similarity")
    tab.page.wait_for_function("(tau) => document.querySelector('#tau textarea, #tau input').value === tau", arg=f"{tau:g}")


def test_text_and_grid_point_at_the_same_token_and_a_click_keeps_it(watcher):
    tab = watcher("?recording=holes")
    page = tab.page
    tab.wait_open("recording:holes")
    page.keyboard.press("End")
    tokens = page.locator(".text[data-lane=masking] .tok")
    tokens.nth(6).scroll_into_view_if_needed()
    tokens.nth(6).hover()
    tab.drawn()
    assert "KV masking · token 7 " in page.text_content(".grids-readout")
    tokens.nth(6).click()
    page.mouse.move(3, 3)
    tab.drawn()
    assert "token 7" in page.text_content(".token-place")
    assert page.locator(".tok.selected").count() == 1
    # From the grid: a slot names the token in the text.
    canvas = page.locator(".grids-pinned canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.5)
    tab.drawn()
    hovered = page.locator(".tok.selected").get_attribute("data-i")
    assert hovered != "6"
    page.mouse.click(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.5)
    page.mouse.move(3, 3)
    tab.drawn()
    assert page.locator(".tok.selected").get_attribute("data-i") == hovered
    page.keyboard.press("Escape")
    tab.drawn()
    assert page.locator(".tok.selected").count() == 0


def test_the_key_of_a_lane_goes_to_the_same_token_where_the_lane_comes_to_it_later(watcher):
    tab = watcher("?recording=river")
    page = tab.page
    tab.wait_open("recording:river")
    page.locator(".text[data-lane=river]").focus()
    page.keyboard.press("Home")
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    tab.drawn()
    assert "River, tau 0.95 · token 13 " in page.text_content(".token-place")
    assert page.locator(".text[data-lane=backbone] .tok:visible").count() < 13
    page.keyboard.press("1")
    tab.drawn()
    assert "Backbone · token 13 " in page.text_content(".token-place")
    assert page.locator(".text[data-lane=backbone] .tok.selected").get_attribute("data-i") == "12"


def test_a_link_opens_the_recording_at_its_lane_and_token_and_the_address_follows_a_lock(watcher):
    tab = watcher("?recording=holes&lane=masking&token=12")
    page = tab.page
    tab.wait_open("recording:holes")
    playing(tab, False)
    assert "KV masking · token 12" in page.text_content(".token-place")
    assert page.locator(".text[data-lane=masking] .tok.selected").get_attribute("data-i") == "11"
    assert page.locator(".text[data-lane=masking] .tok").count() == 12, "it stands at the moment at which the token was there"
    page.locator(".to-slider").fill("10000")
    tokens = page.locator(".text[data-lane=backbone] .tok")
    tokens.nth(2).hover()
    assert "lane=masking&token=12" in page.url, "pointing does not change the address"
    tokens.nth(2).click()
    page.wait_for_function("location.search === '?recording=holes&lane=backbone&token=3'")
    page.click(".recording >> nth=0")
    page.wait_for_function("location.search === ''")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("?recording=nothing", "does not have"),
        ("?recording=holes&lane=nobody", "names no lane"),
        ("?recording=holes&lane=masking&token=9999", "names no token"),
    ],
)
def test_a_link_to_what_is_not_there_is_explained(watcher, waiting_server, address, words):
    tab = watcher(address)
    tab.page.wait_for_selector(".page-note:not([hidden])")
    assert words in tab.page.text_content(".page-note")
    tab.wait_open(f"recording:{first(waiting_server)}" if "nothing" in address else "recording:holes")
    tab.page.click(".note-close")
    assert not tab.page.is_visible(".page-note")


def test_a_run_takes_the_stage_from_a_recording_and_stays_reachable(new_tab):
    tab = new_tab()
    page = tab.page
    page.click("#watch-tab-button")
    page.click(".recording >> nth=0")  # from its start: the film may have come to its end before the model was there
    playing(tab, True)
    tab.to_run()
    tab.fill("prompt", LONG)
    tab.fill("max-tokens", "1500")
    tab.press("run")
    tab.wait_tokens(6)
    page.click("#watch-tab-button")
    tab.wait_state("running")
    page.click(".recording >> nth=1")
    page.wait_for_selector(".stage[data-source=recording]")
    assert page.get_attribute(".gradio-container", "data-run-state") == "running", "looking at a recording stops nothing"
    written = page.locator(".prompt-text").text_content()
    page.wait_for_timeout(300)
    assert page.locator(".prompt-text").text_content() == written, "and the run does not take the stage back"
    page.click("[data-way=last-run]")
    page.wait_for_selector(".stage[data-source=live]")
    assert page.text_content(".prompt-text") == LONG
    assert page.get_attribute("#run-tab-button", "aria-selected") == "true"
    tab.press("stop")
    tab.wait_state("done")
    assert "stopped" in page.text_content(".lane[data-lane=backbone] .lane-status")


def moved(now, known) -> list:
    return [pair for pair in zip(now, known, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize("width", [360, 768, 1100, 1280])
def test_nothing_jumps_from_the_start_to_the_end_of_a_recording_and_from_lane_to_lane(watcher, width):
    tab = watcher("?recording=drift", width=width)
    page = tab.page
    tab.wait_open("recording:drift")
    page.keyboard.press("Space")
    # Where the transport stands depends on the scroll; where the others stand does not.
    places = """[...document.querySelectorAll('.stage > *, .heat-head, .heat')]
        .map((part) => [part.className, part.matches('.transport') ? 0 : part.offsetTop, part.offsetHeight])"""
    page.keyboard.press("End")
    tab.drawn()
    known = page.evaluate(places)
    for share in ("1", "400", "5000", "9990"):
        page.locator(".to-slider").fill(share)
        tab.drawn()
        assert moved(page.evaluate(places), known) == [], f"at {share} of 10000"
    for lane in page.evaluate("[...document.querySelector('.stage').river.run.lanes.keys()]"):
        page.evaluate("(lane) => document.querySelector('.stage').river.setCursor({ lane, i: 3 })", lane)
        tab.drawn()
        assert moved(page.evaluate(places), known) == [], f"with a token of {lane}"


def test_the_numbers_of_a_recording_are_called_recorded_everywhere(watcher):
    tab = watcher("?recording=holes")
    tab.wait_open("recording:holes")
    for part in (".race", ".grids", ".memory"):
        assert tab.page.text_content(f"{part} > header .tag") == "recorded"


def test_the_sentences_of_the_race_stay_on_one_line(watcher):
    for slug in ("difficulty", "drift"):
        tab = watcher(f"?recording={slug}")
        tab.wait_open(f"recording:{slug}")
        for line in (".timing", ".evenly"):
            assert tab.page.evaluate("(line) => document.querySelector(line).getClientRects().length", line) == 1
            assert tab.page.locator(line).bounding_box()["height"] < 24


def test_a_drawing_does_not_lay_the_page_out_once_a_lane(watcher):
    tab = watcher("?recording=difficulty")
    tab.wait_open("recording:difficulty")
    tab.page.keyboard.press("Home")
    tab.drawn()
    account = tab.context.new_cdp_session(tab.page)
    account.send("Performance.enable")

    def layouts() -> int:
        return next(entry["value"] for entry in account.send("Performance.getMetrics")["metrics"] if entry["name"] == "LayoutCount")

    before = layouts()
    tab.page.evaluate(
        """async () => {
            const slider = document.querySelector('.to-slider');
            for (let step = 1; step <= 20; step += 1) {
                slider.value = String(300 * step);
                slider.dispatchEvent(new Event('input'));
                await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            }
        }"""
    )
    assert tab.page.locator(".tok").count() > 100
    lanes = tab.page.locator(".stage .lane").count()
    assert lanes == 5
    assert (layouts() - before) / 20 < lanes


def test_what_is_copied_out_of_a_text_is_the_text(watcher):
    tab = watcher("?recording=difficulty")
    tab.wait_open("recording:difficulty")
    tab.page.keyboard.press("End")
    tab.drawn()
    copied = tab.page.evaluate(
        """() => {
            const text = document.querySelector('.text[data-lane=backbone]');
            getSelection().selectAllChildren(text);
            const event = new ClipboardEvent('copy', { clipboardData: new DataTransfer(), bubbles: true, cancelable: true });
            text.dispatchEvent(event);
            return [event.clipboardData.getData('text/plain'), text.textContent, text.children.length];
        }"""
    )
    assert copied[0] == copied[1] and "\n" in copied[0]
    assert copied[2] > 1, "a paragraph is a block"


def test_grids_out_of_sight_are_painted_once_nothing_moves(watcher):
    tab = watcher("?recording=holes")
    tab.wait_open("recording:holes")
    inked = """() => {
        const canvas = document.querySelector('.grids-pinned canvas');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return data.reduce((sum, value, at) => sum + (at % 4 === 3 && value > 0 ? 1 : 0), 0);
    }"""
    assert tab.page.locator(".grids").bounding_box()["y"] > 1000
    tab.page.locator(".to-slider").fill("500")
    tab.drawn()
    early = tab.page.evaluate(inked)
    start = tab.clock
    tab.page.keyboard.press("Space")
    # Counted in the frame in which the film has come so far: at its end the grids are painted.
    later = tab.page.wait_for_function(
        f"(past) => Number(document.querySelector('.stage').dataset.clock) > past && {{ count: ({inked})() }}", arg=start + 150_000_000
    )
    assert later.json_value() == {"count": early}, "nobody sees it"
    tab.page.keyboard.press("End")
    tab.drawn()
    assert tab.page.evaluate(inked) > 2 * early
