"""Decoding speed, interleaved in one process: transformers' `generate` against the engine's lanes."""

import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from river_core.generate import compare
from river_core.trace import Trace

PROMPT = (
    "A farmer has 12 baskets with 15 apples in each. He sells 7 baskets at the market and gives 23 apples to his neighbours. "
    "How many apples does he have left? Explain every step."
)
PEER_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Peer:
    """transformers' own greedy decoding of the same checkpoint, in the dtype that is fastest here.

    Decode speed leaves out the prompt: the time of 1 token is subtracted from the time of n.
    """

    def __init__(self, path, device, prompt_ids, tokens, report):
        self.prompt = torch.tensor([prompt_ids], device=device)
        self.device = device
        self.speeds, self.model, self.dtype = {}, None, ""
        for label, dtype in PEER_DTYPES.items():
            report(f"transformers in {label}")
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True).to(device).eval()
            self._seconds(model, 2)
            self.speeds[label] = self.decode(model, min(tokens, 32))
            if self.speeds[label] == max(self.speeds.values()):
                self.model, self.dtype = model, label

    @torch.inference_mode()
    def decode(self, model, tokens: int) -> float:
        """Tokens per second of `tokens` - 1 decode steps."""
        first = self._seconds(model, 1)
        return (tokens - 1) / max(self._seconds(model, tokens) - first, 1e-9)

    def _seconds(self, model, tokens):
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(self.prompt, attention_mask=torch.ones_like(self.prompt), **options)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def bench(model, *, methods=("backbone", "int4", "river:0.95", "river:0.97"), tokens=128, repeats=5, peer=True, report=print):
    """Decode the same prompt `repeats` times with every method, methods in turn, and compare speeds.

    Args:
        model: from `load`.
        methods: names as for `compare`. tokens: generated per lane. repeats: rounds after one warm-up round.
        peer: also run transformers `generate` (best of fp16, bf16, fp32).
        report: called with a line about what is being done.

    Returns:
        dict: run card, tokens per second by lane and round, ratios by round; JSON-ready. A ratio is taken within one round, so that a machine
        that slows down slows both sides.
    """
    header = None
    rounds: list[dict[str, float]] = []
    depths: dict[str, float] = {}
    lengths: dict[str, int] = {}
    peer_run = None
    labels: dict[str, str] = {}
    for index in range(repeats + 1):
        report("warm-up" if index == 0 else f"round {index} of {repeats}")
        speeds: dict[str, float] = {}
        # Each method runs alone and in turn: the order within a round rotates, so that no lane always follows the same one.
        turn = index % len(methods)
        for method in (*methods[turn:], *methods[:turn]):
            trace = Trace.from_events(compare(model, PROMPT, (method,), max_new_tokens=tokens))
            lane = next(iter(trace.lanes.values()))
            header = header or trace.header
            labels[method] = trace.header["lanes"][0]["label"]
            speeds[method] = lane.tokens_per_second
            depths[method], lengths[method] = lane.mean_depth, len(lane.tokens)
        if peer:
            peer_run = peer_run or Peer(model.path, model.plan.device, header["prompt_ids"], tokens, report)
            speeds["transformers"] = peer_run.decode(peer_run.model, tokens)
        if index:
            rounds.append(speeds)
    if peer_run:
        labels["transformers"] = f"transformers generate, {peer_run.dtype}"
    order = (["transformers"] if peer_run else []) + list(methods)
    ratios = {}
    for over in ("transformers", "backbone"):
        if over in order:
            for lane in order:
                if lane != over:
                    ratios[f"{lane} / {over}"] = spread([r[lane] / r[over] for r in rounds])
    return {
        "run_card": {
            **{key: header[key] for key in ("model", "device", "device_name", "threads", "dtype", "prefill_dtype", "quantiser", "kernels", "versions")},
            "prompt_tokens": len(header["prompt_ids"]), "new_tokens": lengths, "repeats": repeats,
            "timing": "one process, methods in turn, order rotated by round; engine time of decode steps",
            "transformers_dtypes": peer_run.speeds if peer_run else None,
        },
        "lanes": {
            lane: {"label": labels[lane], "tokens_per_second": spread([r[lane] for r in rounds]), "mean_depth": depths.get(lane)}
            for lane in order
        },
        "ratios": ratios,
        "rounds": rounds,
    }  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def format_bench(result: dict) -> str:
    """The result as text."""
    card = result["run_card"]
    lines = [
        f"{card['model']['name']} · {card['device_name']} · {card['threads']} threads · decode {card['dtype']}, prefill {card['prefill_dtype']}, "
        f"river {card['kernels']['river']}, {card['quantiser']['bits']} bits in groups of {card['quantiser']['group_size']}",
        f"prompt {card['prompt_tokens']} tokens, up to {max(card['new_tokens'].values())} new, greedy, batch 1, {card['repeats']} rounds; median (least - greatest)",
        "",
    ]  # fmt: skip
    for lane in result["lanes"].values():
        s = lane["tokens_per_second"]
        depth = "" if lane["mean_depth"] is None else f"   mean exit depth {lane['mean_depth']:.1f}"
        lines.append(f"  {lane['label']:<32} {s['median']:>7.1f} tokens/s  ({s['min']:.1f} - {s['max']:.1f}){depth}")
    lines.append("")
    for name, s in result["ratios"].items():
        lines.append(f"  {name:<32} {s['median']:>6.2f}x  ({s['min']:.2f} - {s['max']:.2f})")
    return "\n".join(lines)
