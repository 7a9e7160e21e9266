"""The page around the stage: three tabs, the controls of a run, and their wiring to the runs."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from app import analysis, export, stage
from app.api import trace_endpoint
from app.body import BodyLimit
from app.calm import Calm
from app.desk import Desk
from app.examples import EXAMPLES
from app.limits import Limits, address_of, defaults
from app.model_host import ModelHost
from app.own import controls_of
from app.runs import Runs
from app.serving import Unbuffered, on_zerogpu
from app.settings import SettingsError, read_settings

TITLE = "River Explorer"
MASTHEAD = f"""
<header class="masthead">
  <h1>{TITLE}</h1>
  <p>Watch a language model decide, token by token, how many of its layers it needs.</p>
  <div id="model-pill" class="pill" data-model-state="loading">
    <span class="pill-dot" aria-hidden="true"></span><span class="pill-text">starting the engine</span>
    <span class="pill-bar" aria-hidden="true"></span>
  </div>
</header>
"""
LANES = [
    ("Backbone", "backbone"),
    ("Full 4-bit", "int4"),
    ("River", "river"),
    ("River, verified", "verified"),
    ("Recompute", "recompute"),
    ("State propagation", "propagation"),
    ("KV masking", "masking"),
    ("Monotone exit", "monotone"),
    ("Sequence-level exit", "sequence@fixed"),  # by tau one dissimilar prompt token keeps the whole answer at full depth
]
FIRST_LANES = ["backbone", "int4", "river"]
MODES = [
    ("Each lane writes its own text", "free"),
    ("Same text: every lane reads the backbone’s", "same-text"),
    ("Same text and exits: only the KV strategy differs", "same-exits"),
]
MORE_LANES_HELP = (
    "Any method, also one twice with two thresholds, separated by commas: NAME[@RULE][:VALUE][+OPTION=VALUE]. "
    "Names: backbone, int4, river, verified, recompute, replay, propagation, masking, monotone, skipdecode, sequence. "
    "Rules: similarity, maxprob, margin, entropy, fixed, never."
)
PRESETS = ["fast", "balanced", "careful"]
MOST_CALLS = 256
"""Events that Gradio holds at a time, of all visitors; its own 40 would be taken by one client with 40 calls."""
FOLLOWED = """() => { try { return sessionStorage.getItem("river-explorer-run") ?? ""; } catch { return ""; } }"""
"""The id of the tab's run, as glue.js keeps it."""
PAGE_CSS = Path(__file__).with_name("page.css")


def build(host: ModelHost, runs: Runs) -> gr.Blocks:
    """The page as Gradio blocks. Every visitor's run goes through `runs`; nothing of a run is kept in here."""
    desk = Desk(runs.limits.questions)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True, delete_cache=(3600, 86400)) as demo:
        gr.HTML(MASTHEAD, apply_default_css=False, elem_id="masthead")
        if on_zerogpu():
            from app.zerogpu import NOTICE

            gr.HTML(f'<p role="note">{NOTICE}</p>', apply_default_css=False, elem_id="zerogpu")
        with gr.Tabs(elem_id="tabs", selected="watch"):
            with gr.Tab("Watch", id="watch", elem_id="watch-tab"):
                gr.HTML('<div id="watch"></div>', apply_default_css=False, elem_id="watch-panel")
            with gr.Tab("Run", id="run", elem_id="run-tab"):
                controls = run_controls()
            with gr.Tab("Analyse", id="analyse", elem_id="analyse-tab"):
                analysis.build(runs, desk)

        # Functions that the page's script calls by itself; Gradio always hands them one argument.
        async def model_status(_: Any = None) -> dict[str, Any]:
            return host.status()

        def snapshot(run_id: str) -> str | None:
            run = runs.follow(str(run_id))
            return run.message(0, runs.place(run))[0] if run else None

        async def recordings(_: Any = None) -> list[dict[str, str]]:
            return [recording.about() for recording in runs.recordings.values()]

        async def recording(slug: str) -> str | None:
            """The trace as JSON text; an empty slug stands for the first one."""
            found = runs.recordings.get(str(slug)) if slug else next(iter(runs.recordings.values()), None)
            return found.text if found else None

        def open_trace(file: Any, request: gr.Request) -> dict[str, str]:
            """{id, trace}, the trace as JSON text; or {error} with one sentence. `file` is {name, data}, the data in base64."""
            try:
                raw = base64.b64decode(file["data"], validate=True)
            except (ValueError, TypeError, KeyError):
                return {"error": "The file did not arrive whole. Open it again."}
            file_id, text = runs.open_file(raw, address=address_of(request))
            return {"id": file_id, "trace": text}

        async def open_in_turn(file: Any, request: gr.Request) -> dict[str, str]:
            return await desk.answer(open_trace, file, request)

        open_in_turn.__name__ = "open_trace"

        def download(wanted: Any) -> dict[str, str]:
            return export.download(runs, wanted)

        channel = gr.HTML(
            "",
            html_template='<div class="page-note" hidden></div><div class="stage-root"></div>',
            js_on_load=stage.page_script(),
            server_functions=[model_status, snapshot, recordings, recording, open_in_turn, desk.asked(download)],
            limits={"sent": runs.limits.sent, "unpacked": runs.limits.unpacked},
            apply_default_css=False,
            elem_id="stage",
        )
        wire(demo, controls, channel, host, runs)
        gr.api(trace_endpoint(runs), api_name="trace", concurrency_limit=None)
    # Runs wait in our own line, which knows places; Gradio's queue only passes them on.
    return demo.queue(api_open=False, max_size=MOST_CALLS)


@dataclass(frozen=True)
class Controls:
    """What the Run tab is made of; `inputs` are the arguments of a run, in the order of `read_settings`."""

    inputs: list[gr.components.Component]
    prompt: gr.Textbox
    chat: gr.Checkbox
    lanes: gr.CheckboxGroup
    mode: gr.Dropdown
    max_tokens: gr.Number
    tau: gr.Textbox
    preset: gr.Radio
    more: gr.Textbox
    run: gr.Button
    stop: gr.Button


def run_controls() -> Controls:
    with gr.Row(elem_id="controls", equal_height=False):
        with gr.Column(scale=5, min_width=280):
            prompt = gr.Textbox(EXAMPLES[0][1], label="Prompt", lines=5, max_lines=5, elem_id="prompt")
            example = gr.Dropdown(
                [(label, text) for label, text in EXAMPLES], value=None, label="Load an example prompt", filterable=False, elem_id="example"
            )
            chat = gr.Checkbox(True, label="Chat template (ask the model as an assistant)", elem_id="chat")
        with gr.Column(scale=4, min_width=280):
            lanes = gr.CheckboxGroup(LANES, value=FIRST_LANES, label="Lanes", elem_id="lanes")
        with gr.Column(scale=4, min_width=280):
            mode = gr.Dropdown(MODES, value="free", label="What is compared", filterable=False, elem_id="mode")
            preset = gr.Radio(PRESETS, value="balanced", label="Exit threshold tau", interactive=False, elem_id="preset")
            with gr.Row():
                tau = gr.Textbox("", label="Tau", placeholder="the model’s own", max_lines=1, min_width=90, elem_id="tau")
                max_tokens = gr.Number(96, label="Max tokens", precision=0, min_width=90, elem_id="max-tokens")
            with gr.Row(elem_id="actions"):
                run_button = gr.Button("Run", variant="primary", elem_id="run", min_width=110, scale=2)
                stop_button = gr.Button("Stop", variant="secondary", elem_id="stop", min_width=80)
    gr.HTML('<p id="run-line" role="status" hidden></p>', apply_default_css=False, elem_id="run-line-block")
    with gr.Accordion("More lanes, sampling, prefill and timing", open=False, elem_id="sampling"):
        more = gr.Textbox(
            "", label="More lanes", placeholder="river:0.95, masking@fixed:12", info=MORE_LANES_HELP, max_lines=1, elem_id="more"
        )
        with gr.Row():
            temperature = gr.Number(0, label="Temperature (0 = greedy)", step=0.1, min_width=130)
            top_k = gr.Number(0, label="Top-k (0 = off)", precision=0, min_width=110)
            top_p = gr.Number(1, label="Top-p (1 = off)", step=0.05, min_width=110)
            seed = gr.Number(0, label="Seed", precision=0, min_width=90)
            prefill = gr.Dropdown(
                [("all layers", "full"), ("sequence-level exit", "sequence")],
                value="full",
                label="Prefill",
                filterable=False,
                min_width=150,
            )
            timing = gr.Dropdown(
                [("race", "race"), ("one after another", "sequential")], value="race", label="Timing", filterable=False, min_width=150
            )
    # A list that is left without a choice tells of an empty one: what has been typed stays.
    keep = "(text, prompt) => text || prompt"
    example.input(None, [example, prompt], prompt, js=keep, queue=False, show_progress="hidden", api_visibility="private")
    inputs = [prompt, chat, lanes, tau, max_tokens, temperature, top_k, top_p, seed, prefill, timing, mode, more]
    return Controls(inputs, prompt, chat, lanes, mode, max_tokens, tau, preset, more, run_button, stop_button)


def wire(demo: gr.Blocks, controls: Controls, channel: gr.HTML, host: ModelHost, runs: Runs) -> None:
    """The events of the page: a run and its stop, and the model's own thresholds once it is known."""

    async def run(
        prompt, chat, lanes, tau, max_tokens, temperature, top_k, top_p, seed, prefill, timing, mode, more, request: gr.Request
    ) -> AsyncIterator[str]:
        session = request.session_hash or ""
        # The boxes come in the order in which they were ticked.
        lanes = [value for _, value in LANES if isinstance(lanes, list) and value in lanes]
        try:
            settings = read_settings(
                prompt, chat, lanes, tau, max_tokens, temperature, top_k, top_p, seed, prefill, timing, mode, more, limits=runs.limits
            )
            current = runs.start(session, settings, address=address_of(request))
        except SettingsError as error:
            current = runs.refuse(session, str(error))
        async with aclosing(runs.stream(current)) as messages:
            async for message in messages:
                yield message

    def stop(request: gr.Request) -> None:
        runs.stop_session(request.session_hash or "")

    def stop_followed(run_id: str) -> None:
        runs.stop_run(str(run_id))

    def gone(request: gr.Request) -> None:
        runs.leave_session(request.session_hash or "")

    def fit_to_model(typed_tau: str):
        model = host.model()
        label = "Exit threshold tau" if model.calibrated else "Exit threshold tau (not calibrated for this model)"
        choices = [(f"{name} {value:g}", f"{value:g}") for name, value in model.tau_presets.items()]
        value = typed_tau.strip() or f"{model.default_tau:g}"
        return gr.Radio(choices, value=value, label=label, interactive=True), value

    gr.on(
        [controls.run.click, controls.prompt.submit, controls.more.submit],
        run,
        controls.inputs,
        channel,
        api_name="run",
        # For the page and its tests; programs have /trace.
        api_visibility="undocumented",
        show_progress="hidden",
        # A run is over some moments before Gradio hears that its stream is, and "once" would drop what is pressed in between. The page's script
        # knows which press is meant (channel.js); one that comes twice all the same replaces its first half.
        trigger_mode="multiple",
        concurrency_limit=None,
    )

    def own(event: gr.EventData):
        """The controls as a trace has them: the prompt, the lanes and what is compared."""
        trace = runs.trace(str(event._data.get("id")))
        if trace is None:
            return [gr.skip() for _ in own_outputs]
        told = controls_of(trace.header, [value for _, value in LANES])
        return [told[name] for name in ("prompt", "chat", "lanes", "mode", "max_tokens", "more")] + [told["tau"] or gr.skip()]

    own_outputs = [controls.prompt, controls.chat, controls.lanes, controls.mode, controls.max_tokens, controls.more, controls.tau]
    private = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    channel.own(own, None, own_outputs, **private)
    controls.stop.click(stop, None, None, **private)
    # After a reload the run belongs to the session before: it is stopped by its secret id, which the tab has kept.
    followed = gr.Textbox(visible=False, elem_id="followed-run")
    controls.stop.click(stop_followed, followed, None, js=FOLLOWED, **private)
    channel.model_ready(fit_to_model, controls.tau, [controls.preset, controls.tau], **private)
    controls.preset.input(None, controls.preset, controls.tau, js="(value) => value", **private)
    controls.tau.input(None, controls.tau, controls.preset, js="(value) => value.trim()", **private)
    demo.unload(gone)


def theme() -> gr.themes.Base:
    """System fonts only (nothing to fetch, nothing to flash), and the colours of stage.css."""
    base = gr.themes.Base(
        primary_hue=gr.themes.colors.blue,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
    )
    light_dark = {
        "body_background_fill": ("#fbfcfd", "#0b1016"),
        "body_text_color": ("#17212b", "#e4ebf2"),
        "body_text_color_subdued": ("#5a6774", "#97a5b3"),
        "background_fill_primary": ("#ffffff", "#131a22"),
        "background_fill_secondary": ("#f4f7fa", "#0d131a"),
        "border_color_primary": ("#dde3e9", "#26313d"),
        "border_color_accent": ("#2171b5", "#6baed6"),
        "block_background_fill": ("#ffffff", "#131a22"),
        "block_border_color": ("#dde3e9", "#26313d"),
        "block_label_text_color": ("#5a6774", "#97a5b3"),
        "block_title_text_color": ("#5a6774", "#97a5b3"),
        "input_background_fill": ("#f4f7fa", "#0d131a"),
        "input_border_color": ("#dde3e9", "#26313d"),
        "input_border_color_focus": ("#2171b5", "#6baed6"),
        "checkbox_label_background_fill": ("#f4f7fa", "#0d131a"),
        "checkbox_label_background_fill_selected": ("#e3edf7", "#12283f"),
        "checkbox_label_border_color": ("#dde3e9", "#26313d"),
        "checkbox_background_color": ("#ffffff", "#0d131a"),
        "checkbox_background_color_selected": ("#2171b5", "#2171b5"),
        "checkbox_border_color": ("#8794a1", "#5a6774"),
        "checkbox_border_color_selected": ("#2171b5", "#6baed6"),
        "button_primary_background_fill": ("#2171b5", "#2171b5"),
        "button_primary_background_fill_hover": ("#08519c", "#3182c4"),
        "button_primary_text_color": ("#ffffff", "#ffffff"),
        "button_secondary_background_fill": ("#ffffff", "#131a22"),
        "button_secondary_background_fill_hover": ("#f4f7fa", "#1c2530"),
        "button_secondary_border_color": ("#b9c3cd", "#3b4856"),
        "button_secondary_text_color": ("#17212b", "#e4ebf2"),
    }
    values = {name: light for name, (light, _) in light_dark.items()}
    values |= {f"{name}_dark": dark for name, (_, dark) in light_dark.items()}
    return base.set(
        **values,
        button_border_width="1px",
        input_border_width="1px",
        checkbox_label_border_width="1px",
        block_label_text_size="13px",
        block_title_text_size="13px",
        layout_gap="14px",
    )


def launch_options(limits: Limits | None = None) -> dict[str, Any]:
    """Arguments of `demo.launch` that belong to the page rather than to the machine it runs on."""
    limits = limits or defaults()
    style = PAGE_CSS.read_text(encoding="utf-8") + stage.style("watch.css") + analysis.style()
    return {
        "theme": theme(),
        "head": f"<style>{style}</style>",
        "footer_links": ["api", "settings"],
        "max_file_size": "1mb",
        "run_history": False,
        "show_error": False,
        "ssr_mode": False,
        "state_session_capacity": 200,
        "app_kwargs": {
            "routes": analysis.routes(),
            "middleware": [Middleware(BodyLimit, most=limits.body), Middleware(Calm), Middleware(Unbuffered)],
        },
        # Everything that waits in our own line, and every call behind another of its client, counts as a thread here, though it is none.
        "max_threads": 40 + limits.line + MOST_CALLS,
    }
