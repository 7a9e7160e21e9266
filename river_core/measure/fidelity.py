"""Every strategy on the same text and the same exits, over several prompts: agreement, KL, and how far keys and values are from the backbone's."""

import statistics

import numpy as np
import torch

from river_core.errors import RiverError
from river_core.generate import compare
from river_core.measure.speed import lane_alone, settle, turns
from river_core.measure.stats import in_words, interval, interval_of, verdict
from river_core.trace import Trace

METHODS = ("backbone", "river", "int4", "recompute", "propagation", "masking", "monotone")
NEAR_TIE = 0.25  # logits: two units in the last place of bfloat16 at this size
REFERENCE = "int4"  # whose figures the others' are compared with, where it is among the lanes: what leaving late has to be better than
MEASURES = ("top1", "kl", "k_cos", "v_cos")


def fidelity(model, prompts, *, methods=METHODS, tau=None, tokens=64, mode="same-exits", report=print):
    """Compare methods on the backbone's text.

    Args:
        model: from `load`. prompts: list of texts. methods: names as for `compare`. tau: River's threshold. tokens: per prompt.
        mode: "same-exits" or "same-text". report: called with a line about what is being done.

    Returns:
        dict: run card and, by lane, top-1 agreement, KL in nats, mean K and V cosine and relative error over all slots of the answers, share of empty slots, mean exit
        depth, tokens per second of engine time (all decode steps over their time); JSON-ready. "by_layer" has the mean cosines per layer, "intervals" those four
        figures with their intervals over prompts, "against" the paired differences from full 4-bit (see `stats.interval`).

    The speeds are those of lanes in step: layers compiled, a short run before, but every lane has a turn between two steps of another, which finds the processor's
    caches emptied. Of one method alone `bench` is the measure.
    """
    lanes: dict[str, dict] = {}
    header, traces = None, []
    settle(model)
    for _ in compare(model, prompts[0], methods, tau=tau, max_new_tokens=8, mode=mode):
        pass  # not counted
    for number, prompt in enumerate(prompts, 1):
        report(f"prompt {number} of {len(prompts)}")
        trace = Trace.from_events(compare(model, prompt, methods, tau=tau, max_new_tokens=tokens, mode=mode))
        header = header or trace.header
        traces.append(trace)
    for lane in header["lanes"]:
        lanes[lane["id"]] = {"label": lane["label"], **summarise(traces, lane["id"]), **intervals(traces, lane["id"])}
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


def by_prompt(traces, lane_id: str) -> dict[str, list[float]]:
    """Sums over the tokens of each prompt: tokens, top1, kl; and of its slots: slots, k_cos, v_cos."""
    sums: dict[str, list[float]] = {name: [] for name in ("tokens", "slots", *MEASURES)}
    for trace in traces:
        lane = trace.lanes[lane_id]
        facts = [token["fidelity"] for token in lane.steps if "fidelity" in token]
        sums["tokens"].append(len(facts))
        sums["top1"].append(sum(fact["agrees"] for fact in facts))
        sums["kl"].append(sum(fact["kl"] for fact in facts))
        slots = lane.fidelity or {"k_cos": [], "v_cos": []}
        sums["slots"].append(sum(len(row) for row in slots["k_cos"]))
        for name in ("k_cos", "v_cos"):
            sums[name].append(sum(sum(row) for row in slots[name]))
    return sums


def intervals(traces, lane_id: str, reference: str = REFERENCE) -> dict:
    """{"intervals": figure -> `stats.interval`, "against": figure -> the same of the paired difference from the reference lane}.

    "against" is there where the reference lane is, and pairs prompts of which both read the same tokens; both are left out for the backbone, which agrees with itself.
    """
    own = by_prompt(traces, lane_id)
    if not sum(own["tokens"]):
        return {}
    counts = {name: own["slots" if name.endswith("cos") else "tokens"] for name in MEASURES}
    found = {"intervals": {name: interval(own[name], counts[name]) for name in MEASURES}}
    if reference != lane_id and reference in traces[0].lanes:
        other = by_prompt(traces, reference)
        same = {
            name: [
                mine if mine == theirs else 0
                for mine, theirs in zip(counts[name], other["slots" if name.endswith("cos") else "tokens"], strict=True)
            ]
            for name in MEASURES
        }
        found["against"] = {name: interval(own[name], same[name], other=other[name]) for name in MEASURES}
    return found


def against_lines(lanes, reference: str = REFERENCE) -> list[str]:
    """A line for every lane that was compared with the reference one: agreement and KL, each with what may be said of it."""
    lines = []
    for lane in lanes:
        if lane.get("against"):
            top1, kl = lane["against"]["top1"], lane["against"]["kl"]
            lines.append(
                f"{lane['label']}: agreement {in_words(top1, signed=True)}, {verdict(top1)}; KL {in_words(kl, signed=True)}, {verdict(kl)}"
            )
    return lines


def format_fidelity(result: dict) -> str:
    """The result as a Markdown table."""
    card = result["run_card"]
    lines = [
        f"{card['model']['name']}, {card['prompts']} prompts x up to {card['tokens']} tokens, {card['mode']}, River rule {card['river_rule']}; "
        f"{card['dtype']}, KV {card['kv_dtype']}, {card['quantiser']['bits']} bits in groups of {card['quantiser']['group_size']}, river {card['kernels']['river']}; "
        f"{card['device_name']}, {card['threads']} threads",
        f"in brackets: 95 % intervals over n = {card['prompts']} prompts (bootstrap), none where there are few; tokens/s in step, not comparable with `bench`",
        "",
        "| method | mean depth | top-1 agreement | KL (nats) | K cosine | V cosine | empty slots | tokens/s in step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for lane in result["lanes"].values():
        depth, speed = lane["mean_depth"], lane["tokens_per_second"]
        cells = [lane["label"], "-" if depth is None else f"{depth:.1f}"]
        if "intervals" in lane and "holes" in lane:
            found = lane["intervals"]
            cells += [*(in_words(found[name], 4 if name.endswith("cos") else 3) for name in MEASURES), f"{lane['holes']:.1%}"]
        else:
            cells += ["1", "0", "1", "1", "0.0%"] if lane["label"] == result["lanes"]["backbone"]["label"] else ["-"] * 5
        lines.append("| " + " | ".join([*cells, "-" if speed is None else f"{speed:.1f}"]) + " |")
    compared = against_lines(result["lanes"].values())
    if compared:
        lines += ["", f"less {result['lanes'][REFERENCE]['label']}, paired by prompt:", *(f"  {line}" for line in compared)]
    return "\n".join(lines)


@torch.inference_mode()
def check_verified(model, prompts, *, tokens=64, k=None, report=print):
    """River, verified, against the backbone by the near-tie rule: its tokens are fed through one plain pass, and each must be the backbone's choice there or lie
    within `NEAR_TIE` logits of it. Equal text is not asked for: in 16 bits passes with different row counts round differently; `same_answers` says how often it was.

    The two methods run alone and in turn (`speed.turns`), a prompt a round.

    Returns:
        dict: tokens, prompts, share that satisfies the rule, share that is the very choice, worst gap in logits, same_answers: prompts whose answer is the backbone
        lane's own, token for token; acceptance, tokens per cycle, tokens per second of both, speed_up: median over prompts with its interval (`stats.interval_of`),
        None where no prompt had a second token.
    """
    settle(model)
    method = "verified" if k is None else f"verified+k={k}"
    gaps, made, accepted, drafted, cycles, steps, same = [], 0, 0, 0, 0, 0, 0
    speeds: dict[str, dict[int, float | None]] = {"backbone": {}, method: {}}
    texts: dict[int, list[int]] = {}
    for round_, name in turns(speeds, len(prompts)):
        number = max(round_, 1)
        if round_ and not any(number in rates for rates in speeds.values()):
            report(f"prompt {number} of {len(prompts)}")
        header, run = lane_alone(model, prompts[number - 1], name, tokens if round_ else min(tokens, 8))
        if run.end["reason"] == "error":
            raise RiverError(run.end["message"])
        if not round_:
            continue
        speeds[name][number] = run.tokens_per_second
        same += texts.setdefault(number, run.token_ids) == run.token_ids and all(number in rates for rates in speeds.values())
        if name == "backbone":
            continue
        if run.drafts:
            drafted, accepted, cycles = drafted + run.drafts["drafted"], accepted + run.drafts["accepted"], cycles + run.drafts["cycles"]
        made, steps = made + len(run.tokens), steps + run.decode_steps
        gaps += _gaps(model, header["prompt_ids"], run.token_ids)
    ratios = [rate / speeds["backbone"][number] for number, rate in speeds[method].items() if rate and speeds["backbone"][number]]
    rates = {
        name: [rate for rate in found.values() if rate] for name, found in (("backbone", speeds["backbone"]), ("verified", speeds[method]))
    }
    return {
        "tokens": made,
        "prompts": len(prompts),
        "near_tie_agreement": sum(gap <= NEAR_TIE for gap in gaps) / len(gaps),
        "exact_agreement": sum(gap == 0 for gap in gaps) / len(gaps),
        "worst_gap": max(gaps),
        "same_answers": same,
        "acceptance": accepted / drafted if drafted else None,
        "tokens_per_cycle": steps / cycles if cycles else None,
        "tokens_per_second": {name: statistics.median(found) if found else None for name, found in rates.items()},
        "speed_up": interval_of(ratios, np.median) if ratios else None,
    }


def format_verified(facts: dict) -> str:
    """The result of `check_verified` in a few sentences."""
    drafts = "no drafts"
    if facts["acceptance"] is not None:
        drafts = f"acceptance {facts['acceptance']:.3f}, {facts['tokens_per_cycle']:.2f} tokens per cycle"
    speed = (
        f"speed-up {in_words(facts['speed_up'], 2)}, each method alone and in turn"
        if facts["speed_up"]
        else "no speed: no answer had a second token"
    )
    return (
        f"River, verified: {facts['tokens']} tokens of {facts['prompts']} prompts, {facts['near_tie_agreement']:.4f} of them the backbone's choice or within {NEAR_TIE} logits of it "
        f"(the very choice {facts['exact_agreement']:.4f}, worst gap {facts['worst_gap']:.3f}); {facts['same_answers']} of {facts['prompts']} answers are the backbone lane's own, "
        f"token for token; {drafts}; {speed}"
    )


def _gaps(model, prompt_ids, token_ids):
    """Per generated token: how far its logit lies below the backbone's best in one plain pass over the whole text."""
    decoder = model.decoder
    fed = [*prompt_ids, *token_ids[:-1]]
    cache = decoder.new_cache(len(fed))
    logits = decoder.head(decoder.forward(fed, 0, cache)[len(prompt_ids) - 1 :])
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0]
    return (logits.max(-1).values - own).tolist()
