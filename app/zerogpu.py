"""A race on a ZeroGPU Space, where a GPU is lent for one call at a time: the call is a process of its own, forked for it.

So the model is loaded before the page opens, in the main thread, where the `spaces` package stands in for the GPU and keeps what was placed on it for every
call. A whole race is one call and one plain generator. Nothing else crosses: what goes in and what comes out is pickled, a stop flag is not seen on the
other side, and caches, captured graphs and threads would end with the call. Import this module before anything that imports PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

NOTICE = (
    "This Space borrows its GPU for one race at a time. Layers run operation by operation (no CUDA graphs, no compiled code) and the river in 16 bits with "
    "4-bit values, so speeds here say little; exits, texts and the cache are what they are anywhere. Threshold sweeps are off."
)
SWEEP = "This page has a GPU for one race at a time (ZeroGPU), and a sweep needs it for longer. Run it on your own machine with `make run`, or run single lanes."
START_S = 12.0
"""Of the call before its first token: the fork, the weights' way to the GPU, and PyTorch's own start there."""
LAYER_S = 1.2e-3
"""One layer for one token, operation by operation; taken high, since a call that outlasts its time is cut off."""
MOST_S = 120
"""A visitor without an account has two minutes a day."""

REFUSED = "refused"

_model: Any = None
_compare: Callable[..., Iterator[dict[str, Any]]] | None = None


def lend(**options: Any) -> Callable[[Callable], Callable]:
    """`spaces.GPU`, which changes nothing off ZeroGPU; without the package nothing is changed either."""
    try:
        import spaces
    except ImportError:
        return lambda task: task
    return spaces.GPU(**options)


def seconds(settings: dict[str, Any]) -> int:
    """How long a race of these settings, the arguments of `river_core.compare`, may need the GPU: lanes times tokens, within what a visitor has at all.

    Comparisons on the same text run no more steps; their fidelity figures cost about as much again as a lane.
    """
    lanes = len(settings["methods"]) + (settings.get("mode", "free") != "free")
    layers = _model.config.num_hidden_layers if _model is not None else 30
    return round(min(START_S + lanes * max(settings["max_new_tokens"], 1) * layers * LAYER_S, MOST_S))


@lend(duration=seconds)
def race(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one race of the placed model. On ZeroGPU the body runs in a process forked for it, and closing the generator ends that process's work."""
    from river_core.errors import RiverError

    try:
        yield from _compare(_model, **settings)
    except RiverError as error:
        # Of an error only the name of its kind would reach the page's process.
        yield {"type": REFUSED, "sentence": str(error)}


def place(load: Callable[..., Any], compare: Callable[..., Iterator[dict[str, Any]]], **options: Any) -> Lent:
    """Load the model onto the GPU that will be lent. Call it in the main thread, before the page is launched.

    Args:
        load, compare: those of river_core.
        options: further arguments of `load`; a dtype that is named goes before bfloat16.
    """
    global _model, _compare
    dtype = options.pop("dtype", "auto")
    # Nothing can be measured or captured on a GPU that is not there yet, and packed 4-bit weights can only be made on one.
    _model = load(**options, dtype="bf16" if dtype == "auto" else dtype, river_kernel="dequantised", compiled=False)
    _model.notes.append(NOTICE)
    _compare = compare
    return Lent(_model)


class Lent:
    """The placed model as the page may use it outside of a race: what is known of it, but none of its tensors."""

    TENSORS = frozenset({"decoder", "river", "compile"})

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name in self.TENSORS:
            from river_core.errors import InputError

            raise InputError(SWEEP)
        return getattr(self._model, name)


def compare(model: Lent, *, stop: Callable[[], bool], **settings: Any) -> Iterator[dict[str, Any]]:
    """As `river_core.compare`, over the lent GPU. `stop` is asked here, after each event: Stop closes the generator, and with it the call.

    Raises:
        InputError: what `river_core.compare` raises.
        RiverError: the GPU was not lent, or was taken back, in ZeroGPU's own words.
    """
    import gradio as gr

    from river_core.errors import InputError, RiverError

    try:
        with closing(race(settings)) as events:
            for event in events:
                if event["type"] == REFUSED:
                    raise InputError(event["sentence"])
                yield event
                if event["type"] != "done" and stop():
                    yield {"type": "done", "reason": "stop"}
                    return
    except gr.Error as error:  # no quota left, too long, or no GPU free; its words may hold links
        raise RiverError(f"ZeroGPU did not lend its GPU, or took it back: {re.sub('<[^>]+>', '', str(error.message)).strip()}") from None
