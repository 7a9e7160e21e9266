"""A run: checked input, lanes in turn, events out."""

import dataclasses
import datetime
import importlib.metadata
import platform

import torch

from river_core.errors import InputError
from river_core.lane import Lane, SharedPrefill
from river_core.loading import available_memory
from river_core.methods import Method, parse_methods
from river_core.model import memory_facts
from river_core.same_text import Follow, order, same_text
from river_core.same_text import check as check_same_text
from river_core.sampling import Sampling
from river_core.strategies import prompt_bytes
from river_core.text import check_prompt, clean, encode_prompt, pieces
from river_core.trace import TRACE_VERSION

TIMING = {
    "race": "Lanes take turns on one device; the next step goes to the lane with the least engine time, and each clock counts its own steps only.",
    "in step": "Every lane takes the same step, fed the backbone's token, before any takes the next; each clock counts its own steps only.",
    "sequential": "Lanes run one after another, each alone on the device.",
}


CHARACTERS = 16  # a token of context: no text has as many on average
MODES = ("free", "same-text", "same-exits")


def generate(model, prompt: str, method: str = "river", **options):
    """Decode one answer with one method.

    Args:
        model: from `load`.
        prompt: the user's text.
        method: "backbone", "int4", "river", or "river:0.95" for a tau of its own.
        options: as for `compare`.

    Yields:
        dict: the run's events, see `compare`.
    """
    yield from compare(model, prompt, (method,), **options)


def compare(
    model,
    prompt: str,
    methods=("backbone", "int4", "river"),
    *,
    tau: float | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = True,
    prefill: str = "full",
    timing: str = "race",
    mode: str = "free",
    stop=None,
):
    """Decode one prompt with several methods side by side.

    Args:
        model: from `load`; shared, never changed.
        prompt: the user's text.
        methods: names, see `methods.METHODS`; the same method may come twice with different thresholds ("river:0.95", "river:0.98").
        tau: similarity threshold of lanes without their own, -1 .. 1; None = the model's default; 2 never exits.
        max_new_tokens: tokens per lane, from 1; cut to what the context holds, with a notice.
        temperature, top_k, top_p, seed: see `Sampling`; greedy by default.
        chat: wrap the prompt in the model's chat template, where it has one.
        prefill: "full": the prompt runs the whole backbone, once for all lanes. "sequence": each lane reads it in its own way, River with the
            paper's sequence-level exit, full 4-bit through the twins.
        mode: "free": every lane decodes its own text. "same-text": every lane is fed the backbone's tokens. "same-exits": and leaves where River left. The
            two latter add fidelity figures, and run the lanes in step.
        timing: "race" (the lane with the least engine time goes next) or "sequential".
        stop: callable () -> bool, asked before every token and between the pieces of a prompt; True ends the run. Closing the generator does too.

    Yields:
        dict: "run" with the header, then "prefill", "token", "error" and "end" events of the lanes, and "done". Times are nanoseconds
        of engine time. Token event `i` belongs to the step that produced generated token i by feeding the token at `position`: its exit depth,
        its similarities, and the owners of the cache slots of that position. Token 0 comes from the prompt's last position.

    Raises:
        InputError: on the first `next`, a prompt or an option that cannot be used, or more memory than this machine has left.
    """
    model.compile()
    prompt = check_prompt(prompt)
    prompt, notice = clean(prompt)
    notices = [notice] if notice else []
    sampling = Sampling(temperature, top_k, top_p, seed)
    chosen = parse_methods(methods, tau, model)
    if prefill not in ("full", "sequence"):
        raise InputError(f"prefill must be full or sequence, not {str(prefill)[:40]!r}.")
    if timing not in ("race", "sequential"):
        raise InputError(f"timing must be race or sequential, not {str(timing)[:40]!r}.")
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, not {str(mode)[:40]!r}.")
    if mode != "free":
        check_same_text(chosen, mode == "same-exits")
        timing = "in step"
    _check_characters(model, prompt)
    prompt_ids, told = encode_prompt(model.tokenizer, prompt, chat, model.config.vocab_size)
    notices += told
    max_new_tokens = _fit_length(model, prompt_ids, max_new_tokens, notices)
    if chat and not model.tokenizer.chat_template:
        notices.append("This model has no chat template; the prompt was used as it is.")
    together = 1 if timing == "sequential" else len(chosen)
    _check_memory(model, len(prompt_ids), max_new_tokens, together)
    model.decoder.rope.prepare(len(prompt_ids) + max_new_tokens)
    header = _header(model, prompt, prompt_ids, chosen, max_new_tokens, sampling, chat, prefill, timing, notices)
    header["mode"] = mode
    stop = _Latch(stop)
    if mode == "free":
        run = _race(model, chosen, prompt_ids, max_new_tokens, sampling, prefill, timing == "sequential", stop)
    else:
        lanes = _lanes_in_step(model, chosen, prompt_ids, max_new_tokens, sampling, prefill, mode == "same-exits", header, stop)
        run = same_text(lanes, SharedPrefill(), stop)
    yield {"type": "run", "header": header}
    # Inference mode is a property of the thread, and the caller's code runs between two events: it is entered for each step alone.
    while True:
        with torch.inference_mode():
            event = next(run, None)
        if event is None:
            return
        if event["type"] == "done":
            event["memory"] = memory_facts(model)
        yield event


def _race(model, methods, prompt_ids, max_new_tokens, sampling, prefill, sequential, stop):
    """The lanes' events; the next step goes to the unfinished lane with the least engine time (or to the first, one after another)."""
    shared = SharedPrefill()
    waiting: list[Method] = list(methods)
    running: list[Lane] = []
    while waiting or running:
        if stop():
            for method in waiting:  # a lane that never started still gets its end
                running.append(Lane(model, method, prompt_ids, max_new_tokens, sampling, prefill))
            for lane in running:
                yield lane.end("stop")
            yield {"type": "done", "reason": "stop"}
            return
        if waiting and not (sequential and running):
            lane = Lane(model, waiting.pop(0), prompt_ids, max_new_tokens, sampling, prefill, stop=stop)
            running.append(lane)
            events = lane.guarded(lane.prefill, shared)
        else:
            lane = running[0] if sequential else min(running, key=lambda candidate: candidate.clock_ns)
            events = lane.guarded(lane.step)
        if lane.finished:
            running.remove(lane)
            if not lane.failed:
                events.append(lane.end(lane.finished))
        yield from events
    yield {"type": "done", "reason": "finished"}


def _lanes_in_step(model, methods, prompt_ids, max_new_tokens, sampling, prefill, same_exits, header, stop):
    """Lanes for a comparison on the same text; with `same_exits`, strategies that can leave where River left. Their rules go into the header."""
    lanes, leader = [], None
    for method in order(methods):
        rule = None
        if same_exits and leader is not None and method.kind.follows:
            rule = Follow(leader.depths, leader.id)
            method = dataclasses.replace(method, label=method.plain_label)
            entry = next(lane for lane in header["lanes"] if lane["id"] == method.id)
            entry |= {"rule": rule.describe(), "label": method.label}
        lane = Lane(model, method, prompt_ids, max_new_tokens, sampling, prefill, rule, stop)
        if same_exits and leader is None and method.method == "river":
            leader = lane
        lanes.append(lane)
    return lanes


class _Latch:
    """A stop that was heard once stays heard, whatever is asked next."""

    def __init__(self, stop):
        self.stop, self.heard = stop, False

    def __call__(self) -> bool:
        self.heard = self.heard or bool(self.stop and self.stop())
        return self.heard


def _check_characters(model, prompt: str) -> None:
    """InputError for a prompt that is too long whatever its tokens are; a tokenizer would take its time to say so."""
    most = CHARACTERS * model.context_length
    if len(prompt) > most:
        raise InputError(
            f"The prompt is {len(prompt):,} characters long, but {model.name} reads at most {model.context_length:,} tokens, of a few characters each. Shorten it."
        )


def _check_memory(model, prompt: int, new: int, lanes: int) -> None:
    """InputError if the caches of lanes that are there together, and what reading the prompt takes beside them, are more than this machine has left."""
    free = free_memory(model)
    slot = model.kv_slot_bytes * model.config.num_hidden_layers
    caches = slot * (lanes * (prompt + new) + (prompt if lanes > 1 else 0))
    needed = caches + prompt_bytes(model.config, prompt) + model.decoder.rope.position_bytes * (prompt + new)
    if free is not None and needed > free:
        raise InputError(
            f"This run needs about {_size(needed)}, and {_size(free)} are free: {lanes} cache{'s' * (lanes > 1)} of {prompt + new:,} positions take {_size(caches)}, and "
            f"reading a prompt of {prompt:,} tokens the rest. Use fewer tokens, fewer lanes or a shorter prompt."
        )


def free_memory(model) -> int | None:
    """Bytes that caches and prompts may still take where the model is; None where nobody says."""
    device = model.plan.device
    if device.type != "cuda":
        return available_memory()
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    spare = model.decoder.workspaces.free if model.decoder.workspaces else []
    return free + sum(workspace.nbytes for workspace in spare)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def _fit_length(model, prompt_ids, max_new_tokens, notices) -> int:
    """The number of tokens to generate, after checking it against the context; what was changed goes into `notices`."""
    context = model.context_length
    if len(prompt_ids) >= context:
        raise InputError(
            f"The prompt is {len(prompt_ids):,} tokens long, but {model.name} reads at most {context:,} and needs room to answer. Shorten it."
        )
    try:
        wanted = int(max_new_tokens)
        whole = wanted == float(max_new_tokens)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise InputError(f"The number of tokens must be a whole number, not {str(max_new_tokens)[:40]!r}.")
    room = context - len(prompt_ids)
    used = min(max(wanted, 1), room)
    if wanted < 1:
        notices.append(f"The number of tokens must be at least 1; {wanted} was asked for, 1 was used.")
    elif wanted > room:
        notices.append(f"After a prompt of {len(prompt_ids):,} tokens the context of {context:,} has room for {room:,}; {used:,} was used.")
    return used


def _header(model, prompt, prompt_ids, methods, max_new_tokens, sampling, chat, prefill, timing, notices) -> dict:
    facts = model.describe()
    return {
        "trace_version": TRACE_VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": {
            "name": facts["model"], "source": facts["source"], "revision": facts["revision"], "sha256": facts["sha256"],
            "architecture": facts["architecture"], "n_layers": facts["n_layers"], "hidden_size": facts["hidden_size"],
            "num_key_value_heads": model.config.num_key_value_heads, "head_dim": model.config.head_dim,
            "context_length": facts["context_length"], "calibrated": model.calibrated,
        },
        "device": facts["device"], "device_name": facts["device_name"], "threads": facts["threads"],
        "dtype": facts["dtype"], "prefill_dtype": facts["prefill_dtype"], "kv_dtype": facts["kv_dtype"],
        "kernels": {"layers": facts["layers"], "head": facts["head"], "river": facts["river_kernel"], "products": facts["river_products"], "loops": facts["products"], "native": facts["native"], "pinned": facts["pinned"], "reasons": facts["reasons"]},
        "quantiser": facts["quantiser"],
        "bytes": {"backbone": facts["backbone_bytes"], "river": facts["river_bytes"], "head": facts["head_bytes"], "kv_slot": model.kv_slot_bytes, "rope": facts["rope_bytes"],
                  **({"offloaded": facts["offload"]["bytes"]} if facts["offload"] else {})},
        **({"offload": facts["offload"]} if facts["offload"] else {}),
        "prompt": prompt, "chat": chat, "prompt_ids": list(prompt_ids), "prompt_pieces": pieces(model.tokenizer, prompt_ids),
        "max_new_tokens": max_new_tokens, "sampler": sampling.describe(), "seed": sampling.seed, "prefill": prefill,
        "timing": {"mode": timing, "protocol": TIMING[timing], "repeats": 1,
                   "instrumented": "similarities beyond the exit test, candidates and owners are gathered after each step's clock has stopped"},
        "lanes": [method.describe() for method in methods],
        "notices": list(notices) + list(model.notes),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": importlib.metadata.version("transformers")},
    }  # fmt: skip
