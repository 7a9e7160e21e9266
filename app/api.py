"""The documented endpoint for programs: one call, one trace, through the same line as the page's runs."""

from contextlib import aclosing

import gradio as gr

from app.runs import Runs
from app.settings import SettingsError, read_settings


def trace_endpoint(runs: Runs):
    """The function behind the endpoint `/trace`. Its annotations and its docstring are what "Use via API" shows."""

    # An async generator, so that the client's `cancel` reaches the engine; Gradio reads from the annotation what it yields.
    async def trace(
        prompt: str,
        methods: str = "backbone,int4,river",
        tau: float | None = None,
        max_tokens: int = 96,
        temperature: float = 0.0,
        seed: int = 0,
        mode: str = "free",
        timing: str = "race",
        request: gr.Request = None,
    ) -> dict:
        """Decode one prompt with several methods and return the trace of the run.

        Args:
            prompt: The text to answer; the model's chat template is used where it has one.
            methods: Lanes, separated by commas, each NAME[@RULE][:VALUE][+OPTION=VALUE], for example "backbone, river:0.95, masking@fixed:12".
            tau: Exit threshold of lanes without their own; null is the model's default.
            max_tokens: Tokens per lane.
            temperature: 0 is greedy.
            seed: Of the sampler.
            mode: "free", "same-text" (every lane reads the backbone's text) or "same-exits" (and leaves where River left).
            timing: "race" or "sequential".

        Returns:
            The trace as `river_core.Trace.to_dict` gives it and as the page saves it: {trace_version, header, lanes, done}.
            `river_core.Trace.from_dict` reads it. Runs wait in line for the one engine; a new call of the same client stops its earlier one.
            Cancelling the job stops the engine at the next token.
        """
        try:
            settings = read_settings(prompt, True, [], tau, max_tokens, temperature, 0, 1, seed, "full", timing, mode, methods)
        except SettingsError as error:
            raise gr.Error(str(error)) from None
        run = runs.start(request.session_hash or "", settings)
        async with aclosing(runs.stream(run)) as messages:
            async for _ in messages:
                pass
        written = run.trace()
        if written is None or run.state == "failed":
            raise gr.Error(run.ending or "The run ended before it wrote anything.")
        yield written.to_dict()

    return trace
