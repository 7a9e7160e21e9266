"""Every strategy on the same text and the same exits, over several prompts: agreement, KL, and how far keys and values are from the backbone's."""

import statistics

import torch

from river_core.generate import compare
from river_core.trace import Trace

METHODS = ("backbone", "river", "int4", "recompute", "propagation", "masking", "monotone")
NEAR_TIE = 0.25  # logits: two units in the last place of bfloat16 at this size


def fidelity(model, prompts, *, methods=METHODS, tau=None, tokens=64, mode="same-exits", report=print):
    """Compare methods on the backbone's text.

    Args:
        model: from `load`. prompts: list of texts. methods: names as for `compare`. tau: River's threshold. tokens: per prompt.
        mode: "same-exits" or "same-text". report: called with a line about what is being done.

    Returns:
        dict: run card and, by lane, top-1 agreement, KL in nats, mean K and V cosine and relative error over all slots of the answers, share of empty slots, mean exit
        depth, tokens per second of engine time (all decode steps over their time); JSON-ready. "by_layer" has the mean cosines per layer.
    """
    lanes: dict[str, dict] = {}
    header, traces = None, []
    for number, prompt in enumerate(prompts, 1):
        report(f"prompt {number} of {len(prompts)}")
        trace = Trace.from_events(compare(model, prompt, methods, tau=tau, max_new_tokens=tokens, mode=mode))
        header = header or trace.header
        traces.append(trace)
    for lane in header["lanes"]:
        lanes[lane["id"]] = {"label": lane["label"], **summarise(traces, lane["id"])}
    card = {
        key: header[key]
        for key in ("model", "device_name", "threads", "dtype", "kv_dtype", "prefill_dtype", "quantiser", "kernels", "versions")
    }
    rule = next((lane["rule"] for lane in header["lanes"] if lane["id"] == "river"), None)
    return {
        "run_card": card | {"prompts": len(prompts), "tokens": tokens, "mode": mode, "river_rule": rule},
        "lanes": lanes,
        "traces": traces,
    }


def summarise(traces, lane_id: str) -> dict:
    """One lane over several traces on the same text."""
    runs = [trace.lanes[lane_id] for trace in traces]
    steps = [token for run in runs for token in run.steps]
    result = {
        "tokens_per_second": len(steps) / (sum(run.decode_ns for run in runs) / 1e9) if steps else None,
        "mean_depth": statistics.fmean(token["exit_layer"] for token in steps) if steps else None,
    }
    facts = [token["fidelity"] for token in steps if "fidelity" in token]
    kept = [run.fidelity for run in runs if run.fidelity and run.fidelity["v_cos"]]
    if facts and kept:
        result["top1"] = statistics.fmean(fact["agrees"] for fact in facts)
        result["kl"] = statistics.fmean(fact["kl"] for fact in facts)
        result["holes"] = sum(fact["holes"] for fact in kept) / sum(len(row) for fact in kept for row in fact["v_cos"])
        result["by_layer"] = {}
        for name in ("k_cos", "v_cos", "k_err", "v_err"):
            rows = torch.tensor([row for fact in kept for row in fact[name]])  # [positions, L]
            result[name] = float(rows.mean())
            result["by_layer"][name] = [round(value, 5) for value in rows.mean(0).tolist()]
    return result


def format_fidelity(result: dict) -> str:
    """The result as a Markdown table."""
    card = result["run_card"]
    lines = [
        f"{card['model']['name']}, {card['prompts']} prompts x up to {card['tokens']} tokens, {card['mode']}, River rule {card['river_rule']}; "
        f"{card['dtype']}, KV {card['kv_dtype']}, {card['quantiser']['bits']} bits in groups of {card['quantiser']['group_size']}, river {card['kernels']['river']}; "
        f"{card['device_name']}, {card['threads']} threads",
        "",
        "| method | mean depth | top-1 agreement | KL (nats) | K cosine | V cosine | empty slots | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, lane in result["lanes"].items():
        cells = [lane["label"], "-" if lane["mean_depth"] is None else f"{lane['mean_depth']:.1f}"]
        if "top1" in lane:
            cells += [f"{lane['top1']:.3f}", f"{lane['kl']:.3f}", f"{lane['k_cos']:.4f}", f"{lane['v_cos']:.4f}", f"{lane['holes']:.1%}"]
        else:
            cells += ["1", "0", "1", "1", "0.0%"] if name == "backbone" else ["-"] * 5  # of answers of one token there are no figures
        speed = "-" if lane["tokens_per_second"] is None else f"{lane['tokens_per_second']:.1f}"
        lines.append("| " + " | ".join([*cells, speed]) + " |")
    return "\n".join(lines)


@torch.inference_mode()
def check_verified(model, prompts, *, tokens=64, k=None, report=print):
    """River, verified, against the backbone by the near-tie rule: its tokens are fed through one plain pass, and each must be the backbone's choice there or lie
    within `NEAR_TIE` logits of it. Equal text is not asked for: passes with different row counts round differently.

    Returns:
        dict: tokens, share that satisfies the rule, share that is the very choice, worst gap in logits, acceptance, tokens per cycle, speed-up over the backbone
        lane of the same runs; None for what no answer was long enough to show.
    """
    gaps, made, accepted, drafted, cycles = [], 0, 0, 0, 0
    time = {"backbone": 0, "verified": 0}
    steps = {"backbone": 0, "verified": 0}
    for number, prompt in enumerate(prompts, 1):
        report(f"prompt {number} of {len(prompts)}")
        method = "verified" if k is None else f"verified+k={k}"
        trace = Trace.from_events(compare(model, prompt, ("backbone", method), max_new_tokens=tokens))
        for name, run in trace.lanes.items():
            time[name] += run.decode_ns
            steps[name] += run.decode_steps
        run = trace.lanes["verified"]
        if run.drafts:
            drafted, accepted, cycles = drafted + run.drafts["drafted"], accepted + run.drafts["accepted"], cycles + run.drafts["cycles"]
        made += len(run.tokens)
        gaps += _gaps(model, trace.header["prompt_ids"], run.token_ids)
    speed = {name: steps[name] / (time[name] / 1e9) if time[name] else None for name in time}
    return {
        "tokens": made,
        "near_tie_agreement": sum(gap <= NEAR_TIE for gap in gaps) / len(gaps) if gaps else None,
        "exact_agreement": sum(gap == 0 for gap in gaps) / len(gaps) if gaps else None,
        "worst_gap": max(gaps, default=None),
        "acceptance": accepted / drafted if drafted else None,
        "tokens_per_cycle": steps["verified"] / cycles if cycles else None,
        "tokens_per_second": speed,
        "speed_up": speed["verified"] / speed["backbone"] if all(speed.values()) else None,
    }


def _gaps(model, prompt_ids, token_ids):
    """Per generated token: how far its logit lies below the backbone's best in one plain pass over the whole text."""
    decoder = model.decoder
    fed = [*prompt_ids, *token_ids[:-1]]
    cache = decoder.new_cache(len(fed))
    logits = decoder.head(decoder.forward(fed, 0, cache)[len(prompt_ids) - 1 :])
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0]
    return (logits.max(-1).values - own).tolist()
