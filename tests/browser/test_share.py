"""Taking a run away and bringing it back: files, links and the offline replay."""

from __future__ import annotations

import gzip
import json

import pytest

from app.export import replay
from river_core import Trace
from tests.browser.conftest import Tab, watch

# All that is seen of a finished trace: lanes, their numbers, texts with colours, the cursor, the grids.
STATE = """() => ({
    lanes: [...document.querySelectorAll('.stage .lane')].map((row) => [row.dataset.lane, row.querySelector('h3').textContent,
        ...[...row.querySelectorAll('.metrics dd')].map((cell) => cell.textContent)]),
    tokens: [...document.querySelectorAll('.stage .tok')].map((tok) => [tok.className, tok.textContent]),
    verdicts: [...document.querySelectorAll('.stage .verdict')].map((words) => words.textContent),
    prompt: document.querySelector('.prompt-text').textContent,
    cursor: document.querySelector('.token-place')?.textContent,
    clock: document.querySelector('.stage').dataset.clock,
})"""
DROP = """([name, data]) => {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const files = new DataTransfer();
    files.items.add(new File([bytes], name));
    const at = (kind) => document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: files, bubbles: true, cancelable: true }));
    at('dragover');
    const hinted = !document.querySelector('.drop-hint').hidden;
    at('drop');
    return hinted;
}"""


def action(tab, name: str):
    """A button of the stage's own row of actions."""
    return tab.page.locator(f".stage [data-action={name}]")


def saved(tab, name: str) -> tuple[str, bytes]:
    """What a download button gives: the file's name and its bytes."""
    with tab.page.expect_download() as waiting:
        action(tab, name).click()
    download = waiting.value
    return download.suggested_filename, open(download.path(), "rb").read()


def opened(tab) -> str:
    """The id of what is open."""
    return tab.page.evaluate("window.opened.at(-1)")


def choose(tab, name: str, data: bytes) -> None:
    tab.page.set_input_files(".watch input[type=file]", {"name": name, "mimeType": "application/json", "buffer": data})


def lock(tab, lane: str, i: int) -> None:
    tab.page.keyboard.press("End")
    tab.page.locator(f".text[data-lane={lane}] .tok").nth(i).click()
    tab.page.mouse.move(3, 3)
    tab.drawn()


def test_a_trace_that_is_saved_and_opened_again_is_the_same_to_the_eye(watcher, tmp_path):
    tab = watcher("?recording=holes")
    tab.wait_open("recording:holes")
    lock(tab, "masking", 8)
    before = tab.page.evaluate(STATE)
    name, data = saved(tab, "json")
    assert name == "river-holes.json"
    Trace.from_bytes(data)
    other = watcher()
    choose(other, "mine.json", data)
    other.page.wait_for_selector(".stage[data-source=file]")
    lock(other, "masking", 8)
    assert other.page.evaluate(STATE) == before
    assert opened(other) != "recording:holes"
    # A file has no link; it is said so, with another way. And its downloads are those of the recording.
    action(other, "link").click()
    assert "Only recordings have links" in other.page.text_content(".page-note")
    with other.page.expect_download() as waiting:
        other.page.click(".note-way")
    assert waiting.value.suggested_filename.endswith(".html")
    assert saved(other, "json")[1] == data
    csv = saved(other, "csv")[1].decode()
    assert csv.count("\n") > before["tokens"].__len__() / 2
    assert "lane" in csv.splitlines()[0]


def test_a_link_is_copied_for_recordings(watcher):
    tab = watcher("?recording=holes", permissions=["clipboard-read", "clipboard-write"])
    tab.wait_open("recording:holes")
    lock(tab, "masking", 4)
    action(tab, "link").click()
    tab.page.wait_for_selector(".page-note:not([hidden])")
    link = tab.page.evaluate("navigator.clipboard.readText()")
    assert link.endswith("?recording=holes&lane=masking&token=5")


def test_files_that_cannot_be_opened_get_a_sentence_and_nothing_is_lost(watcher):
    tab = watcher("?recording=holes&lane=masking&token=5")
    tab.wait_open("recording:holes")
    before = tab.page.evaluate(STATE)
    whole = gzip.compress(b'{"trace_version": 1}')
    for name, data, words in [
        ("version.json", b'{"trace_version": 3}', "version '3'"),
        ("cut.json.gz", whole[:-6], "damaged"),
        ("empty.json", b"", "not a trace"),
        ("field.json", whole, "the header is missing"),
    ]:
        choose(tab, name, data)
        tab.page.wait_for_function(
            "(name) => document.querySelector('.page-note').textContent.startsWith(`${name} was not opened.`)", arg=name
        )
        assert words in tab.page.text_content(".page-note")
        tab.page.click(".note-close")
    tab.page.evaluate(
        """() => {
            const files = new DataTransfer();
            const large = new File([], 'large.json');
            Object.defineProperty(large, 'size', { value: 50e6 * 2 });
            files.items.add(large);
            const drop = new DragEvent('drop', { bubbles: true, cancelable: true, dataTransfer: files });
            Object.defineProperty(drop, 'dataTransfer', { value: { types: ['Files'], files: [large] } });
            document.body.dispatchEvent(drop);
        }"""
    )
    tab.page.wait_for_selector(".page-note:not([hidden])")
    assert "larger than 48 MB" in tab.page.text_content(".page-note")
    assert tab.page.evaluate(STATE) == before


def test_a_file_can_be_dropped_anywhere_and_hostile_text_in_it_stays_text(watcher, waiting_server, tiny):
    import base64

    import river_core

    hostile = "<img src=x onerror=window.pwned=1></script><script>window.pwned=2</script> ${window.pwned=3} {{y}} <b>bold</b>"
    trace = Trace.from_events(river_core.compare(tiny, hostile, ("backbone", "river"), max_new_tokens=5))
    trace.header["recording"] = dict.fromkeys(("slug", "title", "idea", "headline", "command"), hostile)
    trace.header["notices"] = [hostile]
    for lane in trace.header["lanes"]:
        lane["label"] = lane["note"] = hostile
    for token in (token for lane in trace.lanes.values() for token in lane.tokens):
        token["text"] = hostile
        token["top5"] = [[id_, hostile, share] for id_, _, share in token["top5"]]
    data = base64.b64encode(gzip.compress(json.dumps(trace.to_dict()).encode())).decode()
    tab = watcher()
    assert tab.page.evaluate(DROP, ["<img src=x onerror=window.pwned=4>.json.gz", data]), "the page says what a drop would do"
    tab.page.wait_for_selector(".stage[data-source=file]")
    lock(tab, "backbone", 1)
    tab.page.wait_for_timeout(200)
    assert tab.page.locator(".text[data-lane=backbone] .tok").nth(1).text_content() == hostile
    assert tab.page.evaluate("window.pwned") is None
    assert tab.page.locator("#stage img, #stage b:text-is('bold'), #stage script, .page-note img").count() == 0
    # The file is known to its own tab alone: nothing that the server tells another one names it or holds its text.
    other = watcher()
    told = []
    other.page.on("response", lambda response: told.append(response) if "component_server" in response.url else None)
    other.open()
    other.page.click("#analyse-tab-button")
    other.page.wait_for_selector("#an-tab-compare")
    other.page.click("#an-tab-compare")
    other.page.wait_for_selector("#an-other option[value^=recording]", state="attached")
    answers = [response.text() for response in told]
    assert len(answers) >= 4
    assert not [answer for answer in answers if opened(tab) in answer or "window.pwned" in answer]
    assert other.page.locator("#an-other option[value='" + opened(tab) + "']").count() == 0


def test_a_file_that_is_dropped_on_the_second_box_of_a_comparison_is_left_to_it(watcher):
    tab = watcher("?recording=holes")
    tab.wait_open("recording:holes")
    tab.page.click("#analyse-tab-button")
    tab.page.wait_for_selector("#an-tab-compare")
    tab.page.click("#an-tab-compare")
    taken = tab.page.evaluate(
        """() => {
            const files = new DataTransfer();
            files.items.add(new File(['x'], 'b.json'));
            const drop = new DragEvent('drop', { dataTransfer: files, bubbles: true, cancelable: true });
            document.querySelector('[aria-label="Trace file for B"]').dispatchEvent(drop);
            return drop.defaultPrevented;
        }"""
    )
    assert not taken
    tab.page.wait_for_timeout(300)
    assert opened(tab) == "recording:holes"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_replay_plays_from_a_file_without_asking_for_anything(chromium, waiting_server, tmp_path, theme):
    file = tmp_path / "replay.html"
    trace = waiting_server.runs.trace("recording:holes")
    file.write_text(replay(trace), encoding="utf-8")
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme=theme)
    tab = Tab(context.new_page(), context, file.as_uri())
    requests = []
    tab.page.on("request", lambda request: requests.append(request.url))
    watch(tab, "")
    page = tab.page
    page.goto(file.as_uri())
    page.wait_for_selector(".stage[data-playing=true]")
    page.wait_for_function("Number(document.querySelector('.stage').dataset.clock) > 0")
    assert page.get_attribute(".stage", "data-source") == "replay"
    assert page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    page.keyboard.press("Space")
    page.wait_for_selector(".stage[data-playing=false]")
    page.keyboard.press("End")
    lock(tab, "masking", 8)
    state = page.evaluate(STATE)
    assert sum(len(lane.tokens) for lane in trace.lanes.values()) == len(state["tokens"])
    assert page.title() == f"{trace.header['recording']['title']} · River Explorer"
    page.click("#theme")
    assert page.evaluate("document.body.classList.contains('dark')") == (theme != "dark")
    assert Trace.from_bytes(saved(tab, "json")[1]).to_dict() == trace.to_dict()
    context.close()
    assert [url for url in requests if not url.startswith(("file:", "blob:"))] == []
    assert sum(url.startswith("file:") for url in requests) == 1
    assert tab.complaints == []
