"""The documented endpoint for programs: one call, one trace, through the same line as the page's runs."""

import asyncio
from contextlib import aclosing

import gradio as gr

from app.limits import address_of
from app.runs import CALL, Runs
from app.settings import SettingsError, read_settings

BEAT_S = 1.0
"""Between two messages on how a call stands. Gradio notices that a client has gone when it hands one on."""


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
        chat: bool = True,
        prefill: str = "full",
        top_k: int = 0,
        top_p: float = 1.0,
        request: gr.Request = None,
    ) -> dict:
        """Decode one prompt with several methods and return the trace of the run.

        Args:
            prompt: The text to answer.
            methods: Lanes, separated by commas, each NAME[@RULE][:VALUE][+OPTION=VALUE], for example "backbone, river:0.95, masking@fixed:12".
            tau: Exit threshold of lanes without their own; null is the model's default.
            max_tokens: Tokens per lane.
            temperature: 0 is greedy.
            seed: Of the sampler.
            mode: "free", "same-text" (every lane reads the backbone's text) or "same-exits" (and leaves where River left).
            timing: "race" or "sequential".
            chat: Whether the prompt goes into the model's chat template, where it has one.
            prefill: "full", or "sequence" for the sequence-level exit.
            top_k: 0 is off.
            top_p: 1 is off.

        Returns:
            About once a second how the call stands, as {state, tokens, place, waiting}: tokens of all lanes so far, and while it waits its place in line. Last,
            and what `Client.predict` returns, the trace as `river_core.Trace.to_dict` gives it and as the page saves it: {trace_version, header, lanes, done};
            `river_core.Trace.from_dict` reads it. It is always whole: a call that is stopped or that runs out of time ends with an error.
            Calls wait in line for the one engine; those of one client come one after another, in the order in which they were made. Cancelling the job, or
            closing the connection, stops the engine at the next token.
        """
        try:
            settings = read_settings(
                prompt, chat, [], tau, max_tokens, temperature, top_k, top_p, seed, prefill, timing, mode, methods, limits=runs.limits
            )
        except SettingsError as error:
            raise _refused(str(error)) from None
        run = runs.start(request.session_hash or "", settings, kind=CALL, address=address_of(request))
        async with aclosing(runs.wait(run, BEAT_S)) as beats:
            async for beat in beats:
                yield beat
        if run.state == "failed":
            raise _refused(run.ending or "The run failed.")
        if not run.whole:
            raise _refused(run.ending or "The run was stopped before it was finished.")
        written = await asyncio.to_thread(run.trace)
        if written is None:
            raise _refused("The run ended before it wrote anything.")
        if (written.done or {}).get("reason") != "finished":
            raise _refused("The run was stopped before it was finished.")
        yield written.to_dict()

    return trace


def _refused(sentence: str) -> gr.Error:
    """An error for the client; nothing of the program's went wrong, so that nothing is logged."""
    return gr.Error(sentence, print_exception=False)
