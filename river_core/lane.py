"""One lane: a method decoding its own text over the shared model, step by step, on its own cache and its own clock."""

import itertools
import logging
import time

import torch
import torch.nn.functional as F

from river_core.errors import NotFinite, RiverError
from river_core.kv_cache import OWNER_NAMES, KVCache
from river_core.methods import Method
from river_core.same_text import agreement, kv_fidelity
from river_core.sampling import Sampler, Sampling
from river_core.strategies import Step
from river_core.text import TextStream, token_text
from river_core.trace import rounded

log = logging.getLogger(__name__)

TOP = 5


class Stopped(Exception):
    """A run was stopped while a lane was reading its prompt."""


class Lane:
    """A method at work on one prompt.

    Args:
        model: the shared `Model`.
        method: what to run.
        prompt_ids: token ids of the prompt.
        max_new_tokens: tokens after which the lane ends, if no end token came.
        sampling: how tokens are drawn.
        rule: replaces the method's own exit rule.
        prefill: "full" or "sequence", see `Strategy.prefill`.
        stop: callable () -> bool, asked between the pieces of the prompt; True: not to be read on.

    `clock_ns` is engine time spent so far: prefill and steps, with the device synchronised, nothing else.
    """

    def __init__(self, model, method: Method, prompt_ids, max_new_tokens: int, sampling: Sampling, prefill: str, rule=None, stop=None):
        self.model = model
        self.method = method
        self.id = method.id
        self.strategy = method.build(model, rule)
        self.strategy.greedy = sampling.temperature == 0
        self.strategy.pause = _pause_on(stop)
        self.prompt_ids = prompt_ids
        self.max_new_tokens = max_new_tokens
        self.prefill_mode = prefill
        self.sampler = Sampler(sampling)
        self.stream = TextStream(model.tokenizer)
        self.cache: KVCache | None = None
        self.token_ids: list[int] = []
        self.clock_ns = 0
        self.decode_ns = 0
        self.offload = model.decoder.blocks.offload
        self.fetched = self.fetched_bytes = (
            0  # by the lane's tokens; those of a shared prompt pass count for every lane that starts from it, as its time does
        )
        self.finished: str | None = None
        self.last_logits: torch.Tensor | None = None
        self.depths: dict[int, int] = {}  # exit depth by token index, for lanes that follow this one
        self.split: dict[str, int] | None = None  # nanoseconds by part of the work that was timed last

    def prefill(self, shared: "SharedPrefill", leader: "Lane | None" = None) -> list[dict]:
        """Feed the prompt, or take over the pass that another lane made; returns the prefill event and the first token's.

        With a leader the first token is the leader's, and the event says how this lane's scores compare.
        """
        self.cache = self.strategy.new_cache(len(self.prompt_ids) + self.max_new_tokens)
        sharing = self.prefill_mode == "full" and not self.strategy.reads_prompt_itself
        reused = sharing and shared.cache is not None
        if reused:
            self.cache.copy_prefix(shared.cache)
            step, elapsed, self.split = shared.step, shared.elapsed_ns, shared.split
        else:
            (step,), elapsed = self._timed(lambda: [self.strategy.prefill(self.prompt_ids, self.cache, self.prefill_mode)])
            if sharing:
                shared.cache, shared.step, shared.elapsed_ns, shared.split = self.cache.snapshot(), step, elapsed, self.split
        _check_finite(step)
        step.token = self.sampler(step.logits)
        if leader is not None:
            self._compare(step, leader)
        self.last_logits = step.logits
        self.clock_ns += elapsed
        event = {
            "type": "prefill", "lane": self.id, "t_ns": elapsed, "exit_layer": step.exit_layer, "shared": reused,
            "kv": self.cache.runs(len(self.prompt_ids) - 1),
        }  # fmt: skip
        if not reused and len(step.hidden_states[0]) == len(self.prompt_ids):
            event["similarity"] = self._similarities(step, slice(None))
            step.hidden_states = [state[-1:].clone() for state in step.hidden_states]  # the other rows are of no more use
        return [event, self._accept(step, elapsed, from_prefill=True)]

    def step(self) -> list[dict]:
        """Decode the next token, or the next few where the strategy makes several at once; returns their events."""
        index = len(self.token_ids)
        position = len(self.prompt_ids) + index - 1
        room = self.max_new_tokens - index
        steps, elapsed = self._timed(lambda: self.strategy.advance(self.token_ids[-1], position, index, self.cache, self.sampler, room))
        self.clock_ns += elapsed
        for step in steps:
            _check_finite(step)
        if self.split and len(steps) > 1:
            self.split = {part: ns // len(steps) for part, ns in self.split.items()}
        events = []
        for i, step in enumerate(steps):
            if self.finished:
                break  # an end token inside a draft: what was drafted behind it never existed
            # Tokens of one cycle share its time evenly; the remainder goes to the first, so that the sum stays exact.
            share = elapsed // len(steps) + (elapsed % len(steps) if i == 0 else 0)
            events.append(self._accept(step, share, from_prefill=False))
        # Time of tokens that were cut off behind an end token was spent all the same.
        events[-1]["t_ns"] += elapsed - sum(event["t_ns"] for event in events)
        self.decode_ns += elapsed
        self.last_logits = steps[-1].logits
        return events

    def follow(self, leader: "Lane") -> list[dict]:
        """Take the step that the leader has just taken, fed the same token; the event says how this lane's scores compare."""
        index = len(self.token_ids)
        position = len(self.prompt_ids) + index - 1
        (step,), elapsed = self._timed(lambda: [self.strategy.step(self.token_ids[-1], position, index, self.cache)])
        self.clock_ns += elapsed
        self.decode_ns += elapsed
        _check_finite(step)
        self._compare(step, leader)
        return [self._accept(step, elapsed, from_prefill=False)]

    def _compare(self, step: Step, leader: "Lane") -> None:
        step.facts = {**step.facts, "fidelity": agreement(step.logits, leader.last_logits)}
        step.token = leader.token_ids[len(self.token_ids)]

    def fidelity(self, leader: "Lane") -> dict:
        """How far this lane's keys and values are from the leader's, after completing what is pending."""
        self.strategy.flush(self.cache)
        start = len(self.prompt_ids)
        stop = min(self.cache.length, leader.cache.length)
        return {"type": "fidelity", "lane": self.id, **kv_fidelity(self.cache, leader.cache, start, stop)}

    @property
    def failed(self) -> bool:
        return self.finished == "error"

    def guarded(self, work, *args) -> list[dict]:
        """Run a piece of this lane's work; if it fails, close the lane and return the events that say so. The other lanes go on. No events if it was stopped."""
        try:
            return work(*args)
        except Stopped:
            return []
        except Exception as error:  # whatever it is, it is this lane's alone
            return self.fail(self._explain(error))

    def fail(self, message: str) -> list[dict]:
        """Close the lane with a sentence; its events."""
        return [{"type": "error", "lane": self.id, "message": message}, self.end("error", message)]

    def _explain(self, error: Exception) -> str:
        """One sentence for a lane that failed; what nobody foresaw goes into the log with its traceback."""
        if isinstance(error, RiverError):
            return str(error)
        text = str(error).strip()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in text or "out of memory" in text:
            return f"Lane {self.method.label} ran out of memory. Use fewer tokens, fewer lanes or a smaller model."
        log.error("lane %s failed", self.method.label, exc_info=error)
        words = [] if isinstance(error, RuntimeError) and text else [type(error).__name__]
        return f"Lane {self.method.label} failed: {': '.join(words + text.splitlines()[:1])[:300]}"

    def end(self, reason: str, message: str | None = None) -> dict:
        """Close the lane; the event carries the whole text."""
        self.finished = reason
        try:
            rest = self.stream.rest()
        except Exception as error:  # a decoder of text that has thrown before: what is written stays
            log.error("lane %s: the last characters cannot be decoded", self.method.label, exc_info=error)
            rest = ""
        return {
            "type": "end", "lane": self.id, "reason": reason, "tokens": len(self.token_ids), "decode_ns": self.decode_ns,
            "rest": rest, "text": self.stream.written + rest, "message": message, "kv_bytes": self.cache.nbytes if self.cache else 0,
            **({"fetched": self.fetched, "fetched_bytes": self.fetched_bytes} if self.offload else {}),
        }  # fmt: skip

    def _timed(self, work):
        """Do some decoding, token draws included, and measure it as engine time; `work` returns its steps."""
        self.strategy.begin()
        self._synchronise()
        before = self.offload.since() if self.offload else None
        start = time.perf_counter_ns()
        steps = work()
        self._synchronise()
        elapsed = time.perf_counter_ns() - start
        self.split = self._split(start)
        logits = self.strategy.all_logits()
        if logits is not None:
            steps[-1].logits = logits
        if self.offload:
            self._note_fetched(steps, *self.offload.since(before))
        return steps, elapsed

    @staticmethod
    def _note_fetched(steps, layers: int, nbytes: int) -> None:
        """Offloaded layers that a step brought back; of tokens that were made together, the first one carries them."""
        for step in steps:
            step.facts = {**step.facts, "fetched": layers, "fetched_bytes": nbytes}
            layers = nbytes = 0

    def _split(self, start: int) -> dict[str, int] | None:
        """Nanoseconds by part since `start`, from the strategy's marks; None on a GPU, whose work is only begun when a mark is set."""
        if self.model.plan.device.type != "cpu":
            return None
        parts = dict.fromkeys(("backbone", "river", "head"), 0)
        for part, at in self.strategy.marks:
            parts[part] += at - start
            start = at
        return parts

    def _synchronise(self):
        device = self.model.plan.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()

    def _accept(self, step: Step, elapsed: int, from_prefill: bool) -> dict:
        """Everything after the clock has stopped: text, similarities, candidates, owners - the token's event."""
        token = step.token
        position = len(self.prompt_ids) + len(self.token_ids) - 1
        index = len(self.token_ids)
        self.token_ids.append(token)
        self.depths[index] = step.exit_layer
        self.fetched += step.facts.get("fetched", 0)
        self.fetched_bytes += step.facts.get("fetched_bytes", 0)
        top = torch.softmax(step.logits, -1).topk(min(TOP, step.logits.shape[-1]))
        candidates = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        if token in self.model.eos_token_ids:
            self.finished = "eos"
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finished = "length"
        return {
            "type": "token", "lane": self.id, "i": index, "id": token,
            # An end token closes the answer and is no part of it.
            "text": "" if self.finished == "eos" else self.stream.push(token),
            "t_ns": elapsed, "from_prefill": from_prefill, "position": position,
            **({"split": {f"{part}_ns": ns for part, ns in self.split.items()}} if self.split else {}),
            "exit_layer": step.exit_layer, "why": step.why, "score": step.score, "layers_run": step.layers_run, "river_layers": step.river_layers,
            "similarity": self._similarities(step, slice(-1, None))[0], "tested": len(step.scores),
            "top5": [[i, token_text(self.model.tokenizer, i), rounded(p)] for i, p in candidates],
            "kv": self.cache.runs(position),
            **({"filled": [[p, a, b, OWNER_NAMES[owner]] for p, a, b, owner in step.filled]} if step.filled else {}),
            **step.facts,
        }  # fmt: skip

    def _similarities(self, step: Step, rows: slice) -> list[list[float | None]]:
        """By row and layer: cos(input, output) of every block that ran, None for the others. Made after the clock stopped."""
        pairs = itertools.pairwise(step.hidden_states)
        columns = [F.cosine_similarity(before[rows], after[rows], dim=-1).tolist() for before, after in pairs]
        found: list[list[float | None]] = [[None] * self.model.config.num_hidden_layers for _ in step.hidden_states[0][rows]]
        for layer, column in zip(step.layers or range(len(columns)), columns, strict=True):
            for row, value in zip(found, column, strict=True):
                row[layer] = rounded(value)
        if self.strategy.rule.name == "similarity" and len(step.hidden_states[0]) == len(found) == 1:
            # What the test compared, not another sum of the same: a reader may hold it against tau.
            for layer, score in step.scores.items():
                found[0][layer - 1] = rounded(score)
        return found


def _pause_on(stop):
    """What a strategy calls between the pieces of a prompt. No method of the lane: a strategy that held its lane would keep a cache alive after its run."""

    def pause():
        if stop and stop():
            raise Stopped

    return pause


def _check_finite(step: Step) -> None:
    """NotFinite unless all scores of a step are finite numbers."""
    if not bool(torch.isfinite(step.logits).all()):
        raise NotFinite


class SharedPrefill:
    """One full-depth pass over the prompt that several lanes start from."""

    def __init__(self):
        self.cache = None
        self.step = None
        self.elapsed_ns = 0
        self.split = None
