"""Decoding speed, interleaved in one process: the engine's lanes, other decoders of the same checkpoint, and the floor of a step."""

import statistics

from river_core.errors import InputError
from river_core.generate import compare
from river_core.measure.floor import Floor, of_step
from river_core.measure.peers import PEERS
from river_core.text import encode
from river_core.trace import Trace

PROMPT = (
    "A farmer has 12 baskets with 15 apples in each. He sells 7 baskets at the market and gives 23 apples to his neighbours. "
    "How many apples does he have left? Explain every step."
)


def bench(
    model,
    *,
    methods=("backbone", "int4", "river:0.95", "river:0.97"),
    tokens=128,
    repeats=5,
    peers=("transformers",),
    contexts=(),
    report=print,
):
    """Decode the same prompt `repeats` times with every method, methods in turn, and compare speeds.

    Args:
        model: from `load` or `shaped_model`.
        methods: names as for `compare`. tokens: generated per lane. repeats: rounds after one warm-up round.
        peers: names of `PEERS` to run as well.
        contexts: prompt lengths to go through, in tokens; none = the prompt as it is. With several, the first part of the result is the first one's.
        report: called with a line about what is being done.

    Returns:
        dict, JSON-ready: run card; per lane tokens per second, prefill seconds, step time over its floor and the shares of its parts; ratios, each taken within one
        round, so that a machine that slows down slows both sides; the rounds themselves; `contexts`: by prompt length, lanes and ratios.

    Raises:
        InputError: an unknown peer, or one that cannot run here.
    """
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise InputError(f"There is no peer {unknown[0][:40]!r}; choose from {', '.join(PEERS)}, or none.")
    if repeats < 1 or tokens < 2:
        raise InputError("A benchmark needs at least one round and two tokens.")
    report("waiting for compiled layers")
    model.compile(wait=True)
    found = [_one_length(model, methods, tokens, repeats, peers, length, report) for length in contexts or [None]]
    result = found[0]
    if contexts:
        result["contexts"] = [
            {"prompt_tokens": one["run_card"]["prompt_tokens"], "lanes": one["lanes"], "ratios": one["ratios"]} for one in found
        ]
    return result


def _one_length(model, methods, tokens, repeats, peers, length, report):
    prompt = PROMPT if length is None else _prompt_of(model, length)
    header, labels = None, {}
    rounds: list[dict[str, dict]] = []
    running = None
    for index in range(repeats + 1):
        report(("warm-up" if index == 0 else f"round {index} of {repeats}") + (f", prompt of {length} tokens" if length else ""))
        seen: dict[str, dict] = {}
        # Each method runs alone and in turn: the order within a round rotates, so that no lane always follows the same one.
        turn = index % len(methods)
        for method in (*methods[turn:], *methods[:turn]):
            trace = Trace.from_events(compare(model, prompt, (method,), max_new_tokens=tokens, chat=length is None))
            lane = next(iter(trace.lanes.values()))
            if lane.tokens_per_second is None:
                raise InputError(
                    f"{method} wrote no second token; there is nothing to measure. {(lane.end or {}).get('message') or ''}".strip()
                )
            header = header or trace.header
            labels[method] = trace.header["lanes"][0]["label"]
            seen[method] = _facts(lane)
        if running is None:
            running = [PEERS[name](model, header["prompt_ids"], tokens, report) for name in peers]
            labels |= {peer.name: peer.label for peer in running}
        for peer in running:
            seen[peer.name] = {"tokens_per_second": peer.decode(tokens)}
        seen["floor"] = Floor(model).measure(len(header["prompt_ids"]) + tokens // 2)
        if index:
            rounds.append(seen)
    order = [peer.name for peer in running] + list(methods)
    lanes = {}
    for lane in order:
        lanes[lane] = {
            "label": labels[lane],
            "tokens_per_second": spread([r[lane]["tokens_per_second"] for r in rounds]),
            "mean_depth": None,
        }
        if lane in methods:
            lanes[lane] |= _lane_result(rounds, lane)
    ratios = {
        f"{lane} / {over}": spread([r[lane]["tokens_per_second"] / r[over]["tokens_per_second"] for r in rounds])
        for over in [peer.name for peer in running] + [method for method in methods if method == "backbone"]
        for lane in order
        if lane != over
    }
    keys = ("model", "device", "device_name", "threads", "dtype", "prefill_dtype", "quantiser", "kernels", "bytes", "versions")
    return {
        "run_card": {
            **{key: header[key] for key in keys},
            "prompt_tokens": len(header["prompt_ids"]), "new_tokens": {lane: rounds[0][lane]["tokens"] for lane in methods}, "repeats": repeats,
            "timing": "one process, methods in turn, order rotated by round; engine time of decode steps",
            "floor": "products of a step in its order and nothing else, the head, and one read of the KV cache; measured in every round",
            "transformers_dtypes": next((peer.speeds for peer in running if peer.speeds), None),
        },
        "lanes": lanes,
        "floor": {part: spread([r["floor"][part] for r in rounds]) for part in rounds[0]["floor"]},
        "ratios": ratios,
        "rounds": [{lane: r[lane]["tokens_per_second"] for lane in order} for r in rounds],
    }  # fmt: skip


def _prompt_of(model, length: int) -> str:
    """A text of about `length` tokens, by repeating the prompt."""
    if not 2 <= length < model.context_length:
        raise InputError(f"A prompt of {length} tokens does not fit: {model.name} reads 2 to {model.context_length - 1:,}.")
    text = " ".join([PROMPT] * (1 + length // len(encode(model.tokenizer, PROMPT, False)) + 1))
    ids = encode(model.tokenizer, text, False)
    # Cutting by characters keeps the text a text; tokens at the cut may differ by one or two.
    return text[: len(text) * length // len(ids)]


def _facts(lane) -> dict:
    steps = lane.steps
    count = len(steps)
    facts = {
        "tokens_per_second": lane.tokens_per_second, "tokens": len(lane.tokens), "mean_depth": lane.mean_depth, "prefill_s": lane.prefill["t_ns"] / 1e9,
        "step_ms": lane.decode_ns / count / 1e6, "river_layers": sum(step["river_layers"] for step in steps) / count,
        "tested": sum(step["tested"] for step in steps) / count,
    }  # fmt: skip
    if all("split" in step for step in steps):
        facts["head_ms"] = sum(step["split"]["head_ns"] for step in steps) / count / 1e6
    return facts


def _lane_result(rounds, lane) -> dict:
    """One lane over all rounds: prefill, step time over its floor, and how a step's time divides."""
    over, shares, step = [], [], []
    for r in rounds:
        facts, parts = r[lane], r["floor"]
        layers = facts["mean_depth"] + facts["river_layers"]
        floor = of_step(parts, facts["mean_depth"], facts["river_layers"])
        step.append(facts["step_ms"])
        over.append(facts["step_ms"] / floor)
        products = parts["backbone"] * facts["mean_depth"] + parts["river"] * facts["river_layers"]
        head = facts.get("head_ms", parts["head"])
        share = {
            "products": products, "head": head, "attention": parts["attention"] * layers, "exit_test": parts["exit_test"] * facts["tested"],
        }  # fmt: skip
        share = {part: ms / facts["step_ms"] for part, ms in share.items()}
        shares.append(share | {"rest": 1 - sum(share.values())})
    return {
        "mean_depth": statistics.mean(r[lane]["mean_depth"] for r in rounds),
        "prefill_s": spread([r[lane]["prefill_s"] for r in rounds]),
        "step_ms": spread(step),
        "step_over_floor": spread(over),
        "shares": {part: round(statistics.median(share[part] for share in shares), 3) for part in shares[0]},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some measurements."""
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def format_bench(result: dict) -> str:
    """The result as text."""
    card = result["run_card"]
    lines = [
        f"{card['model']['name']} · {card['device_name']} · {card['threads']} threads · decode {card['dtype']}, prefill {card['prefill_dtype']}, "
        f"river {card['kernels']['river']}, {card['quantiser']['bits']} bits in groups of {card['quantiser']['group_size']} · layers {card['kernels']['layers']}, "
        f"head {card['kernels']['head']}",
        f"up to {max(card['new_tokens'].values())} new tokens, greedy, batch 1, {card['repeats']} rounds; median (least - greatest)",
    ]  # fmt: skip
    for part in result.get("contexts") or [{"prompt_tokens": card["prompt_tokens"], "lanes": result["lanes"], "ratios": result["ratios"]}]:
        lines += ["", f"prompt of {part['prompt_tokens']} tokens", *_table(part)]
    return "\n".join(lines)


def _table(part):
    for lane in part["lanes"].values():
        s = lane["tokens_per_second"]
        line = f"  {lane['label']:<32} {s['median']:>7.1f} tokens/s  ({s['min']:.1f} - {s['max']:.1f})"
        if "step_ms" in lane:
            line += f"   depth {lane['mean_depth']:>4.1f}   prefill {lane['prefill_s']['median']:.3f} s   step / floor {lane['step_over_floor']['median']:.2f}"
        yield line
    yield ""
    yield "  share of a step, each part measured alone: products, head, attention, exit test, the rest"
    for lane in part["lanes"].values():
        if "shares" in lane:
            yield f"  {lane['label']:<32} " + "  ".join(
                f"{100 * lane['shares'][p]:>5.1f}%" for p in ("products", "head", "attention", "exit_test", "rest")
            )
    yield ""
    for name, s in part["ratios"].items():
        yield f"  {name:<32} {s['median']:>6.2f}x  ({s['min']:.2f} - {s['max']:.2f})"
