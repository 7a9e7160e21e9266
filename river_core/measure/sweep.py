"""Speed against agreement over thresholds: every method at every threshold is a lane of one run on the backbone's text."""

import re
import statistics

from river_core.errors import InputError
from river_core.exit_rules import check_tau
from river_core.generate import compare
from river_core.methods import METHODS, TESTING, parse_methods
from river_core.trace import Trace, rounded

TAUS = (0.9, 0.95, 0.97, 0.98, 0.99)
MOST_LANES = 40


def read_taus(text: str) -> tuple[float, ...]:
    """Thresholds from a text such as "0.9, 0.95 0.97": in order, each once.

    Raises:
        InputError: there is none, or one of them is no number, out of range, or has a decimal comma.
    """
    if slip := re.search(r"(?<![\d.])\d+,\d+(?![\d.])", str(text)):  # 0,95 would be the two thresholds 0 and 95
        raise InputError(
            f"{slip[0][:20]!r} has a comma between two whole numbers: thresholds are written with a decimal point, such as 0.9, 0.95."
        )
    taus = sorted({check_tau(part) for part in str(text).replace(",", " ").replace(";", " ").split()})
    if not taus:
        raise InputError("A sweep needs at least one threshold, such as 0.95.")
    return tuple(taus)


def at_threshold(method: str, tau: float) -> str | None:
    """A method's name with the threshold put in; None if its rule has none, or the name carries one already."""
    head, plus, options = method.partition("+")
    name, at, rule = head.partition("@")
    tests = (rule if at else METHODS[name].rules[0] if name in METHODS else "") in TESTING
    tests = tests and not (name == "sequence" and "depth=" in options)  # whose depth is given, and nothing is tested
    return f"{head}:{tau:g}{plus}{options}" if tests and ":" not in head else None


def lanes_of(methods, taus) -> list[tuple[str, str, float | None]]:
    """(name for `compare`, method as given, threshold or None) of every lane: the backbone first, which all others are measured against."""
    lanes: list[tuple[str, str, float | None]] = [("backbone", "backbone", None)]
    for method in dict.fromkeys(methods):
        if at_threshold(method, 0.0):
            lanes += [(at_threshold(method, tau), method, tau) for tau in taus]
        elif method != "backbone":
            lanes.append((method, method, None))
    return lanes


def sweep(model, prompt: str, methods=("river",), taus=TAUS, *, max_new_tokens: int = 64, repeats: int = 3, chat: bool = True, stop=None):
    """Measure methods at thresholds on one prompt.

    The lanes run in step and all read the text that the backbone writes greedily (`compare`, mode "same-text"), so that speed and agreement are of the same
    tokens. A speed-up is taken within one repeat, so that a machine that slows down slows both sides.

    Args:
        model: from `load`. prompt: the user's text.
        methods: names as for `compare`; those that test a threshold get a lane for each of `taus`, the others one lane. The backbone is always there.
        taus: thresholds. max_new_tokens: per lane. repeats: runs, of which speeds get median, least and greatest. chat: use the chat template.
        stop: callable () -> bool, asked before every token.

    Yields:
        dict: "progress" events {repeat, repeats, tokens, fraction 0 .. 1}, and at the end "points": {header: of the first run, repeats: how many were finished,
        reason: "finished" or "stop", points: [...]}. A point has lane, method, label, tau (None if it has no threshold), tokens, tokens_per_second and speed_up
        ({median, min, max}), mean_depth (layers), agreement (share of steps whose choice is the backbone's), kl (nats) and message (why a lane failed, or None).
        A repeat that was stopped counts for nothing.

    Raises:
        InputError: on the first `next`, a prompt, a method or a threshold that cannot be used.
    """
    taus = tuple(check_tau(tau) for tau in taus)
    lanes = lanes_of(methods, taus)
    if len(lanes) > MOST_LANES:
        raise InputError(f"These are {len(lanes)} lanes, and a sweep takes at most {MOST_LANES}. Take fewer methods or fewer thresholds.")
    if len(lanes) == 1:
        raise InputError("A sweep needs a method beside the backbone, such as river, and a threshold for it.")
    if repeats < 1:
        raise InputError(f"A sweep needs at least one repeat, not {repeats}.")
    names = [name for name, _, _ in lanes]
    ids = [method.id for method in parse_methods(names, None, model)]
    header, traces, reason = None, [], "finished"
    for repeat in range(1, repeats + 1):
        events, made = [], 0
        for event in compare(model, prompt, names, max_new_tokens=max_new_tokens, mode="same-text", chat=chat, stop=stop):
            events.append(event)
            if event["type"] == "run":
                header = header or event["header"]
            elif event["type"] == "token" and event["lane"] == "backbone":
                made += 1
                fraction = (repeat - 1 + made / header["max_new_tokens"]) / repeats
                yield {"type": "progress", "repeat": repeat, "repeats": repeats, "tokens": made, "fraction": rounded(fraction, 4)}
        if events[-1]["reason"] == "stop":
            reason = "stop"
            break
        traces.append(Trace.from_events(events))
    points = [point(traces, lane_id, method, tau) for lane_id, (_, method, tau) in zip(ids, lanes, strict=True)] if traces else []
    yield {"type": "points", "header": header, "repeats": len(traces), "reason": reason, "points": points}


def point(traces, lane_id: str, method: str, tau: float | None) -> dict:
    """One lane over the repeats. The text is the same in each, so depth and agreement are those of the first."""
    first = traces[0]
    lane = first.lanes[lane_id]
    agreement = {"top1": 1.0, "kl": 0.0} if lane_id == "backbone" else first.agreement(lane_id) or {"top1": None, "kl": None}
    return {
        "lane": lane_id,
        "method": method,
        "label": next(entry["label"] for entry in first.header["lanes"] if entry["id"] == lane_id),
        "tau": tau,
        "tokens": len(lane.tokens),
        "tokens_per_second": _spread([trace.lanes[lane_id].tokens_per_second for trace in traces]),
        "speed_up": _spread([trace.speed_up(lane_id) for trace in traces]),
        "mean_depth": rounded(lane.mean_depth, 3),
        "agreement": rounded(agreement["top1"]),
        "kl": rounded(agreement["kl"]),
        "message": (lane.end or {}).get("message"),
    }


def _spread(values) -> dict | None:
    """Median, least and greatest; None if the lane made no step in some repeat."""
    if None in values:
        return None
    return {name: rounded(measure(values), 4) for name, measure in (("median", statistics.median), ("min", min), ("max", max))}


def format_sweep(result: dict) -> str:
    """The "points" event as text."""
    header = result["header"]
    layers = header["model"]["n_layers"]
    lines = [
        f"{header['model']['name']} · {header['device_name']} · {header['threads']} threads · {header['dtype']} · river {header['kernels']['river']} · "
        f"prompt {len(header['prompt_ids'])} tokens, up to {header['max_new_tokens']} new, {result['repeats']} repeats; on the backbone's text",
        "",
        f"{'lane':<30}{'tokens/s':>10}{'speed-up (least - greatest)':>30}{'mean depth':>14}{'agreement':>11}{'KL':>9}",
    ]
    for one in result["points"]:
        if one["message"] or one["speed_up"] is None:
            lines.append(f"{one['label']:<30}  {one['message'] or 'the backbone wrote one token only, so nothing was measured'}")
            continue
        ratio = one["speed_up"]
        lines.append(
            f"{one['label']:<30}{one['tokens_per_second']['median']:>10.1f}{ratio['median']:>14.2f}x ({ratio['min']:.2f} - {ratio['max']:.2f})"
            f"{one['mean_depth']:>14.1f}{one['agreement']:>11.3f}{one['kl']:>9.3f}"
        )
    lines.append(f"\nmean depth in layers of {layers}; agreement = share of steps whose choice is the backbone's, not accuracy; KL in nats")
    return "\n".join(lines)
