"""What a visitor sees, in a real Chromium."""

from __future__ import annotations

import pytest

from river_core.errors import LoadError
from tests.browser.test_share import DROP
from tests.page.server import serve

LONG = "Count from 1 to 1000 in words, one number per line."
HOSTILE = "`${window.pwned=1} {{y}} <b>bold</b> C:\\users <script>window.pwned=2</script> <img src=x onerror=window.pwned=3>"


def no_side_scroll(tab) -> bool:
    return tab.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_run_shows_coloured_text_numbers_and_a_verdict(new_tab):
    tab = new_tab()
    tab.fill("max-tokens", "24")
    tab.press("run")
    tab.wait_state("done")
    page = tab.page
    for lane in ("backbone", "int4", "river"):
        assert page.locator(f".text[data-lane={lane}] .tok").count() >= 1
        assert "done" in page.text_content(f".lane[data-lane={lane}] .lane-status")
        assert float(page.text_content(f".lane[data-lane={lane}] .metric-speed b")) > 0
    fills = page.evaluate("[...document.querySelectorAll('.tok')].map((tok) => getComputedStyle(tok).getPropertyValue('--fill'))")
    assert len(set(fills)) >= 2
    assert page.text_content(".lane[data-lane=backbone] .metric-ratio b") == "1.00×"
    layers = page.locator(".legend-ramp .cell").count() - 1
    assert page.text_content(".lane[data-lane=backbone] .metric-depth b") == f"{layers}.0"
    assert page.text_content(".lane[data-lane=int4] .metric-depth b") == "0.0"
    assert "token" in page.text_content(".column[data-lane=river] .verdict")
    assert "tokens/s" in tab.status()
    assert page.locator("h1").count() == 1
    assert page.locator("[aria-live=polite]").count() >= 1
    assert page.locator(".text[aria-live]").count() == 0


def test_counters_move_while_the_lanes_run_and_stop_frees_the_engine(new_tab, page_server):
    tab = new_tab()
    tab.fill("prompt", LONG)
    tab.fill("max-tokens", "1500")
    tab.press("run")
    tab.wait_tokens(6)
    count = "Number(document.querySelector('.lane[data-lane=backbone] .metric-count b').textContent)"
    before = tab.page.evaluate(count)
    tab.page.wait_for_function(f"{count} > {before}")
    tab.press("stop")
    page_server.wait_idle(within=3)
    tab.wait_state("done")
    assert "stopped" in tab.page.text_content(".lane[data-lane=backbone] .lane-status")
    assert tab.status().startswith("Stopped.")
    tab.fill("max-tokens", "3")
    tab.press("run")
    tab.wait_state("done")
    assert not tab.status().startswith("Stopped")
    assert tab.page.locator(".text[data-lane=backbone] .tok").count() <= 3


def test_a_hostile_prompt_is_shown_as_text_and_nothing_runs(new_tab):
    tab = new_tab()
    tab.fill("prompt", HOSTILE)
    tab.fill("max-tokens", "6")
    tab.press("run")
    tab.wait_state("done")
    assert tab.page.text_content(".prompt-text") == HOSTILE
    assert tab.page.evaluate("window.pwned") is None
    assert tab.page.locator(".stage b:has-text('bold'), .stage script, .stage img").count() == 0
    assert tab.page.input_value("#prompt textarea") == HOSTILE


def test_nul_and_unpaired_surrogates_do_not_break_the_channel(new_tab):
    tab = new_tab()
    tab.page.evaluate(
        """() => {
            const box = document.querySelector('#prompt textarea');
            box.value = 'before \\0 and \\ud83d after';
            box.dispatchEvent(new Event('input', { bubbles: true }));
        }"""
    )
    tab.fill("max-tokens", "4")
    tab.press("run")
    tab.wait_state("done")
    shown = tab.page.text_content(".prompt-text")
    assert shown.startswith("before ")
    assert shown.endswith(" after")


@pytest.mark.parametrize(
    ("control", "value", "words"),
    [
        ("tau", "near one", "not a number"),
        ("max-tokens", "", "Max tokens is empty"),
        ("prompt", "", "prompt is empty"),
        ("more", "river:0.9, rivr", "There is no method 'rivr'"),
    ],
)
def test_input_that_cannot_be_used_gets_a_sentence_and_stays(new_tab, control, value, words):
    tab = new_tab()
    if control == "more":
        tab.unfold()
    tab.fill(control, value)
    tab.press("run")
    assert words in tab.refused()
    assert tab.page.locator(f"#{control} textarea, #{control} input").first.input_value() == value


def test_a_refused_run_or_file_takes_nothing_off_the_page(new_tab):
    tab = new_tab()
    page = tab.page
    shown = "[...document.querySelectorAll('.stage .title, .stage .headline, .stage .text, .prompt-text')].map((part) => part.textContent)"
    open_id = "document.querySelector('.stage').river.id"

    def refuse() -> None:
        before = page.evaluate(shown), page.evaluate(open_id)
        tab.fill("tau", "near one")
        tab.press("run")
        assert "not a number" in tab.refused()
        tab.fill("tau", "")
        tab.fill("more", "rivr")  # only the engine knows that there is no such method
        tab.press("run")
        page.wait_for_function("document.querySelector('#run-line').textContent.includes('rivr')")
        page.evaluate(DROP, ["broken.json", "ew=="])
        page.wait_for_selector(".page-note:not([hidden])")
        assert "was not opened" in page.text_content(".page-note")
        page.click(".note-close")
        tab.fill("more", "")
        assert (page.evaluate(shown), page.evaluate(open_id)) == before

    tab.unfold()
    page.locator("h1").click()  # the button has the focus: keys are its own
    page.keyboard.press("End")
    tab.drawn()
    refuse()  # over a recording
    tab.fill("max-tokens", "6")
    tab.press("run")
    tab.wait_state("done")
    assert page.is_hidden("#run-line"), "the sentence goes with the next run that begins"
    written = page.evaluate(open_id)
    refuse()  # over a run of one's own, which is still the last run afterwards
    page.click("#watch-tab-button")
    page.click(".recording >> nth=1")
    page.wait_for_selector(".stage[data-source=recording]")
    page.click("[data-way=last-run]")
    page.wait_for_selector(".stage[data-source=live]")
    assert page.evaluate(open_id) == written


def test_no_lane_and_too_few_tokens_are_explained(new_tab):
    tab = new_tab()
    for lane in ("Backbone", "Full 4-bit", "River"):
        tab.page.get_by_label(lane, exact=True).uncheck()
    tab.press("run")
    assert "No lane" in tab.refused()
    tab.page.get_by_label("River", exact=True).check()
    tab.fill("max-tokens", "-2")
    tab.press("run")
    tab.wait_state("done")
    assert "-2" in tab.page.text_content(".stage .notices")
    assert tab.page.locator(".stage .lane").count() == 1


def test_two_visitors_wait_for_one_another_and_never_mix(new_tab):
    first, second = new_tab(), new_tab()
    first.fill("prompt", LONG)  # it is still being answered when the second visitor comes, however slow that is
    first.fill("max-tokens", "1500")
    second.fill("prompt", "Name three colours.")
    second.fill("max-tokens", "8")
    first.press("run")
    first.wait_tokens(3)
    open_before = second.page.text_content(".prompt-text")
    second.press("run")
    second.page.wait_for_function("document.querySelector('#run-line').textContent.includes('2nd in line')")
    assert second.page.text_content(".prompt-text") == open_before, "what is open stays until the run begins"
    first.press("stop")
    second.page.wait_for_selector(".stage[data-source=live][data-run-state=done]")
    assert second.page.text_content(".prompt-text") == "Name three colours."
    assert first.page.text_content(".prompt-text") == LONG
    assert second.page.locator(".text[data-lane=river] .tok").count() <= 8


def test_a_double_click_is_one_run_and_esc_stops_it_only_where_it_has_no_other_use(new_tab, page_server):
    tab = new_tab()
    page = tab.page
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "/queue/join" in request.url else None)
    tab.fill("prompt", LONG)
    tab.fill("max-tokens", "1500")
    page.dblclick("#run")
    page.wait_for_selector(".stage[data-source=live][data-run-state=running]")
    tab.wait_tokens(3)
    assert len(asked) == 1
    running = "document.querySelector('.gradio-container').dataset.runState"
    page.click("#prompt textarea")
    page.keyboard.press("Escape")
    page.click("#example input")  # its list is open
    page.keyboard.press("Escape")
    page.click(".stage [data-action=keys]")
    page.keyboard.press("Escape")
    page.wait_for_selector(".help:not([open])", state="attached")
    page.click("#prompt textarea")
    page.keyboard.press("Shift+Enter")  # what Gradio takes for a press of Run
    page.wait_for_timeout(300)
    assert page.evaluate(running) == "running"
    page.locator("h1").click()
    page.keyboard.press("Escape")
    tab.wait_state("done")
    assert "stopped" in page.text_content(".lane[data-lane=backbone] .lane-status")
    assert page.input_value("#prompt textarea") == LONG, "leaving the list of examples without a choice keeps the prompt"
    # One click is enough as soon as the page says that it is over.
    tab.fill("max-tokens", "2")
    for _ in range(3):
        tab.press("run")
        tab.wait_state("done")
    assert len(asked) == 4


def test_closing_the_tab_frees_the_engine_after_its_time_of_grace(new_tab, page_server):
    tab = new_tab()
    tab.fill("prompt", LONG)
    tab.fill("max-tokens", "1500")
    tab.press("run")
    tab.wait_tokens(3)
    tab.page.close()
    page_server.wait_idle(within=page_server.runs.limits.grace + 3)


def test_after_a_reload_the_page_follows_its_run_and_can_stop_it(new_tab, page_server):
    tab = new_tab()
    tab.fill("prompt", LONG)
    tab.fill("max-tokens", "1500")
    tab.press("run")
    tab.wait_tokens(6)
    tab.open()
    tab.page.wait_for_selector("#run-tab-button[aria-selected=true]")
    tab.complaints.clear()  # Gradio reports the stream that the reload cut off
    shown = tab.page.locator(".tok").count()
    tab.wait_tokens(shown + 6)
    assert page_server.runs.busy
    tab.press("stop")
    page_server.wait_idle(within=3)
    tab.wait_state("done")
    assert tab.page.text_content(".prompt-text") == LONG
    assert tab.page.locator(".tok").count() >= 6
    tab.fill("max-tokens", "3")
    tab.press("run")
    tab.wait_state("done")
    assert tab.page.locator(".tok").count() <= 9
    assert tab.page.locator(".text[data-lane=backbone] .tok").count() <= 3


def test_a_hidden_page_catches_up_when_it_is_seen_again(new_tab):
    tab = new_tab()
    hide = """(hidden) => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        Object.defineProperty(document, 'visibilityState', { value: hidden ? 'hidden' : 'visible', configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    tab.fill("prompt", LONG)
    tab.fill("max-tokens", "64")
    tab.press("run")
    tab.wait_tokens(3)
    tab.page.evaluate(hide, True)
    seen = tab.page.locator(".tok").count()
    tab.page.wait_for_function("document.querySelector('.gradio-container').dataset.runState === 'done'")
    tab.page.evaluate(hide, False)
    tab.wait_state("done")
    assert tab.page.locator(".tok").count() > seen, "something came while nobody looked"
    count = tab.page.text_content(".lane[data-lane=backbone] .metric-count b")
    assert tab.page.locator(".text[data-lane=backbone] .tok").count() == int(count)


def test_a_token_can_be_inspected_by_pointer_and_by_keyboard(new_tab):
    tab = new_tab()
    tab.fill("max-tokens", "12")
    tab.press("run")
    tab.wait_state("done")
    page = tab.page
    page.locator(".text[data-lane=river] .tok").nth(1).hover()
    assert "River · token 2" in page.text_content(".token-place")
    page.locator(".text[data-lane=river]").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("2")  # the second lane
    tab.drawn()
    assert "token 2" in page.text_content(".token-place")
    assert "Full 4-bit" in page.text_content(".token-place")
    assert "token 2" in tab.status()
    assert page.locator(".top5 li").count() == 5
    page.keyboard.press("Escape")
    page.mouse.move(5, 5)
    assert page.locator(".tok.selected").count() == 0


def test_presets_fill_in_tau_and_a_typed_tau_leaves_them(new_tab):
    tab = new_tab()
    tab.page.get_by_label("careful", exact=False).check()
    tab.page.wait_for_function("document.querySelector('#tau textarea, #tau input').value === '0.98'")
    box = tab.page.locator("#tau textarea, #tau input").first
    box.select_text()
    box.press_sequentially("0.5")  # Gradio tells of typing, not of a value that was set
    tab.page.wait_for_function("document.querySelectorAll('#preset input:checked').length === 0")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_scrolls_sideways_and_token_text_stands_out(new_tab, width, theme):
    tab = new_tab(width=width, theme=theme)
    assert no_side_scroll(tab)
    tab.fill("max-tokens", "12")
    tab.press("run")
    tab.wait_state("done")
    assert no_side_scroll(tab)
    assert tab.page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    contrasts = tab.page.evaluate(
        """() => {
            const light = (css) => {
                const canvas = document.createElement('canvas').getContext('2d');
                canvas.fillStyle = css;
                const hex = canvas.fillStyle;
                const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
                    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            return [...document.querySelectorAll('.tok')].map((tok) => {
                const style = getComputedStyle(tok);
                const pair = [light(style.getPropertyValue('--fill')), light(style.color)].sort((a, b) => a - b);
                return (pair[1] + 0.05) / (pair[0] + 0.05);
            });
        }"""
    )
    assert min(contrasts) >= 4.5


def test_without_a_model_the_page_opens_and_says_what_to_do(chromium):
    def load(progress):
        raise LoadError("There is no such model; give a folder, a hub id or a .gguf file.")

    server = serve(load)
    page = chromium.new_page()
    page.goto(server.url)
    page.wait_for_selector("#model-pill[data-model-state=failed]")
    assert "give a folder" in page.text_content("#model-pill")
    page.click("#run-tab-button")
    page.fill("#prompt textarea", "Kept")
    page.click("#run")
    page.wait_for_selector("#run-line[data-state=failed]")
    assert "give a folder" in page.text_content("#run-line")
    assert page.input_value("#prompt textarea") == "Kept"
    page.close()
    server.demo.close()
