"""Speed against agreement over thresholds: agreement on the backbone's text, speed of every method at every threshold alone and in turn."""

import re
import statistics

from river_core.errors import InputError
from river_core.exit_rules import check_tau
from river_core.generate import compare
from river_core.measure.fidelity import REFERENCE, against_lines, intervals
from river_core.measure.speed import settle, turns
from river_core.measure.stats import FEWEST, in_words
from river_core.methods import METHODS, TESTING, parse_methods
from river_core.trace import LaneTrace, Trace, rounded

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


def sweep(model, prompt, methods=("river",), taus=TAUS, *, max_new_tokens: int = 64, repeats: int = 3, chat: bool = True, stop=None):
    """Measure methods at thresholds on one prompt, or on several.

    Agreement, KL and depth are of one run in which all lanes read the text that the backbone writes greedily (`compare`, mode "same-text"). Speed is not: in such a run
    every lane finds the processor's caches emptied by the others. It is taken as `bench` does, each lane writing its own text alone and in turn (`speed.turns`), and a
    speed-up within one repeat, so that a machine that slows down slows both sides.

    Args:
        model: from `load`. prompt: the user's text, or a list of texts.
        methods: names as for `compare`; those that test a threshold get a lane for each of `taus`, the others one lane. The backbone is always there.
        taus: thresholds. max_new_tokens: per lane. repeats: runs, of which speeds get median, least and greatest. chat: use the chat template.
        stop: callable () -> bool, asked before every token.

    Yields:
        dict: "progress" events {repeat, repeats, tokens, fraction 0 .. 1}, and at the end "points": {header: of the first run, repeats: how many were finished, prompts,
        reason: "finished" or "stop", points: [...]}. A point has lane, method, label, tau (None if it has no threshold), tokens, tokens_per_second and speed_up
        ({median, min, max} over repeats and prompts), mean_depth, agreement (share of steps whose choice is the backbone's), kl (nats), intervals and against (over
        prompts, see `fidelity.intervals`), message (why a lane failed, else None). Without a finished repeat there are no points.

    Raises:
        InputError: on the first `next`, a method or a threshold that cannot be used, or too many lanes.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    taus = tuple(check_tau(tau) for tau in taus)
    lanes = lanes_of(methods, taus)
    if not prompts:
        raise InputError("A sweep needs a prompt.")
    if len(lanes) > MOST_LANES:
        raise InputError(f"These are {len(lanes)} lanes, and a sweep takes at most {MOST_LANES}. Take fewer methods or fewer thresholds.")
    if len(lanes) == 1:
        raise InputError("A sweep needs a method beside the backbone, such as river, and a threshold for it.")
    if repeats < 1:
        raise InputError(f"A sweep needs at least one repeat, not {repeats}.")
    names = [name for name, _, _ in lanes]
    ids = [method.id for method in parse_methods(names, None, model)]
    header = None
    work, done = len(prompts) * len(lanes) * (1 + repeats), 0  # runs of a lane: one on the backbone's text, `repeats` alone

    def run(prompt, names, repeat, **options):
        """Progress events of one run; returns its trace, or None if it was stopped."""
        nonlocal header, done
        events, made, leader = [], 0, ids[0] if len(names) > 1 else None
        for event in compare(model, prompt, names, max_new_tokens=max_new_tokens, chat=chat, stop=stop, **options):
            events.append(event)
            if event["type"] == "run":
                header = header or event["header"]
            if event["type"] == "token" and leader in (None, event["lane"]):
                made += 1
                fraction = (done + len(names) * made / header["max_new_tokens"]) / work
                yield {"type": "progress", "repeat": repeat, "repeats": repeats, "tokens": made, "fraction": rounded(fraction, 4)}
        done += len(names)
        return None if events[-1]["reason"] == "stop" else Trace.from_events(events)

    settle(model)
    same_text: list[Trace] = []
    speeds: list[list[list[LaneTrace]]] = []  # [repeat][lane][prompt]; a last one may be unfinished
    stopped = False
    for text in prompts:
        trace = yield from run(text, names, 1, mode="same-text")
        stopped = trace is None
        if stopped:
            break
        same_text.append(trace)
    for index, name in () if stopped else turns(names, repeats):
        if index == 0:
            continue  # what round 0 is for has been done: every lane has just run
        if len(speeds) < index:
            speeds.append([[] for _ in names])
        for text in prompts:
            trace = yield from run(text, [name], index)
            stopped = trace is None
            if stopped:
                break
            speeds[-1][names.index(name)].append(next(iter(trace.lanes.values())))
        if stopped:
            speeds.pop()
            break
    points = []
    if speeds:
        points = [point(same_text, speeds, place, lane_id, *lanes[place][1:]) for place, lane_id in enumerate(ids)]
    reason = "stop" if stopped else "finished"
    yield {"type": "points", "header": header, "repeats": len(speeds), "prompts": len(prompts), "reason": reason, "points": points}


def point(same_text, speeds, place: int, lane_id: str, method: str, tau: float | None) -> dict:
    """One lane: depth and agreement of the runs on the backbone's text, speeds of the runs alone.

    Args:
        same_text: a trace a prompt. speeds: [repeat][lane][prompt], lanes as they ran alone, the backbone first. place: of this lane among them.
    """
    lanes = [trace.lanes[lane_id] for trace in same_text]
    steps = [step for lane in lanes for step in lane.steps]
    facts = [step["fidelity"] for step in steps if "fidelity" in step]
    own = [(lane.tokens_per_second, base.tokens_per_second) for r in speeds for lane, base in zip(r[place], r[0], strict=True)]
    own = [(rate, base) for rate, base in own if rate and base]
    failed = next(
        (lane.end["message"] for lane in [*lanes, *(lane for r in speeds for lane in r[place])] if (lane.end or {}).get("message")), None
    )
    alone = lane_id == "backbone"
    return {
        "lane": lane_id,
        "method": method,
        "label": next(entry["label"] for entry in same_text[0].header["lanes"] if entry["id"] == lane_id),
        "tau": tau,
        "tokens": sum(len(lane.tokens) for lane in lanes),
        "tokens_per_second": _spread([rate for rate, _ in own]),
        "speed_up": _spread([rate / base for rate, base in own]),
        "mean_depth": rounded(statistics.fmean(step["exit_layer"] for step in steps) if steps else None, 3),
        "agreement": 1.0 if alone else rounded(statistics.fmean(fact["agrees"] for fact in facts) if facts else None),
        "kl": 0.0 if alone else rounded(statistics.fmean(fact["kl"] for fact in facts) if facts else None),
        "intervals": {}, "against": {},
        **intervals(same_text, lane_id),
        "message": failed,
    }  # fmt: skip


def _spread(values) -> dict | None:
    """Median, least and greatest; None if the lane never made a step."""
    if not values:
        return None
    return {name: rounded(measure(values), 4) for name, measure in (("median", statistics.median), ("min", min), ("max", max))}


def format_sweep(result: dict) -> str:
    """The "points" event as text."""
    header = result["header"]
    layers = header["model"]["n_layers"]
    lines = [
        f"{header['model']['name']} · {header['device_name']} · {header['threads']} threads · {header['dtype']} · river {header['kernels']['river']} · "
        f"{result['prompts']} prompt{'s' * (result['prompts'] > 1)}, up to {header['max_new_tokens']} new tokens; agreement on the backbone's text, speed of each lane alone "
        f"and in turn, {result['repeats']} repeats",
        "",
        f"{'lane':<30}{'tokens/s':>10}{'speed-up (least - greatest)':>30}{'mean depth':>14}{'agreement':>26}{'KL':>24}",
    ]
    for one in result["points"]:
        if one["message"] or one["speed_up"] is None or one["agreement"] is None:
            lines.append(f"{one['label']:<30}  {one['message'] or 'an answer of one token only, so nothing was measured'}")
            continue
        ratio, found = one["speed_up"], one["intervals"]
        agreement, kl = (in_words(found[name]) if found else f"{one[key]:.3f}" for name, key in (("top1", "agreement"), ("kl", "kl")))
        lines.append(
            f"{one['label']:<30}{one['tokens_per_second']['median']:>10.1f}{ratio['median']:>14.2f}x ({ratio['min']:.2f} - {ratio['max']:.2f})"
            f"{one['mean_depth']:>14.1f}{agreement:>26}{kl:>24}"
        )
    compared = against_lines(result["points"])
    if compared:
        reference = next(one["label"] for one in result["points"] if one["lane"] == REFERENCE)
        lines += ["", f"less {reference}, paired by prompt:", *(f"  {line}" for line in compared)]
    lines.append(
        f"\nmean depth in layers of {layers}; agreement = share of steps whose choice is the backbone's, not accuracy; KL in nats; in brackets 95 % intervals over "
        f"n = {result['prompts']} prompt{'s' * (result['prompts'] > 1)}, none where there are fewer than {FEWEST}"
    )
    return "\n".join(lines)
