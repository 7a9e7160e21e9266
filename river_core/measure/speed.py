"""Decoding speed, interleaved in one process: the engine's lanes, other decoders of the same checkpoint, and what a step is measured against."""

import statistics

from river_core.errors import InputError
from river_core.generate import compare
from river_core.measure.floor import Floor, bytes_of_step, of_step
from river_core.measure.peers import PEERS
from river_core.text import encode
from river_core.trace import Trace

PROMPT = (
    "A farmer has 12 baskets with 15 apples in each. He sells 7 baskets at the market and gives 23 apples to his neighbours. "
    "How many apples does he have left? Explain every step."
)


def turns(names, rounds: int):
    """(round, name) in the order of a fair measurement.

    Round 0 warms up and does not count; `rounds` follow. Everybody has a turn in each, alone on the device, and the order moves on by one place a round, so that
    nobody always follows the same one. Every figure of speed in this package that is not marked as taken in step is made in this order.
    """
    names = list(names)
    for index in range(rounds + 1):
        at = index % len(names)
        for name in (*names[at:], *names[:at]):
            yield index, name


def settle(model) -> None:
    """Wait for what would change the engine's speed in the middle of a measurement: compiled layers."""
    model.compile(wait=True)


def lane_alone(model, prompt: str, method: str, tokens: int, **options) -> tuple[dict, object]:
    """Run one method alone on a prompt; returns the trace's header and the lane. For figures of speed, in the order of `turns`."""
    trace = Trace.from_events(compare(model, prompt, (method,), max_new_tokens=tokens, **options))
    return trace.header, next(iter(trace.lanes.values()))


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
        dict, JSON-ready: run card; per lane tokens per second, prefill seconds, step time over its own products and over its bytes (see `Floor`) and the shares of its
        parts; ratios, each taken within one round, so that a machine that slows down slows both sides; the rounds themselves; `contexts`: by prompt length, lanes and ratios.

    Raises:
        InputError: an unknown peer, or one that cannot run here.
    """
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise InputError(f"There is no peer {unknown[0][:40]!r}; choose from {', '.join(PEERS)}, or none.")
    if repeats < 1 or tokens < 2:
        raise InputError("A benchmark needs at least one round and two tokens.")
    report("waiting for compiled layers")
    settle(model)
    found = [_one_length(model, methods, tokens, repeats, peers, length, report) for length in contexts or [None]]
    result = found[0]
    if contexts:
        result["contexts"] = [
            {"prompt_tokens": one["run_card"]["prompt_tokens"], "lanes": one["lanes"], "ratios": one["ratios"]} for one in found
        ]
    return result


def _one_length(model, methods, tokens, repeats, peers, length, report):
    prompt = PROMPT if length is None else _prompt_of(model, length)
    prompt_ids = encode(model.tokenizer, prompt, length is None)
    running = {name: PEERS[name](model, prompt_ids, tokens, report) for name in peers}
    order = [*running, *methods]
    labels = {name: peer.label for name, peer in running.items()}
    header, floor, context = None, Floor(model), len(prompt_ids) + tokens // 2
    rounds: list[dict[str, dict]] = [{} for _ in range(repeats + 1)]
    for index, name in turns(order, repeats):
        seen = rounds[index]
        if not seen:
            report(("warm-up" if index == 0 else f"round {index} of {repeats}") + (f", prompt of {length} tokens" if length else ""))
        if name in running:
            seen[name] = running[name].run(tokens)
        else:
            found, lane = lane_alone(model, prompt, name, tokens, chat=length is None)
            if lane.tokens_per_second is None:
                raise InputError(
                    f"{name} wrote no second token; there is nothing to measure. {(lane.end or {}).get('message') or ''}".strip()
                )
            header = header or found
            labels[name] = found["lanes"][0]["label"]
            seen[name] = _facts(lane)
        if len(seen) == len(order):
            seen["floor"] = floor.measure(context)
    rounds, sizes = rounds[1:], floor.bytes() | {"context": context}
    lanes = {}
    for lane in order:
        lanes[lane] = {
            "label": labels[lane],
            "tokens_per_second": spread([r[lane]["tokens_per_second"] for r in rounds]),
            "mean_depth": None,
        }
        lanes[lane] |= (
            _lane_result(rounds, lane, sizes) if lane in methods else {"prefill_s": spread([r[lane]["prefill_s"] for r in rounds])}
        )
    ratios = {
        f"{lane} / {over}": spread([r[lane]["tokens_per_second"] / r[over]["tokens_per_second"] for r in rounds])
        for over in [*running, *(method for method in methods if method == "backbone")]
        for lane in order
        if lane != over
    }
    keys = ("model", "device", "device_name", "threads", "dtype", "prefill_dtype", "quantiser", "kernels", "bytes", "versions")
    return {
        "run_card": {
            **{key: header[key] for key in keys},
            "prompt_tokens": len(header["prompt_ids"]), "new_tokens": {lane: rounds[0][lane]["tokens"] for lane in methods}, "repeats": repeats,
            "timing": "one process, all in turn, order rotated by round; engine time of decode steps, the choice of the token included",
            "products": "a step's own products in its order and nothing else, the head, and one read of the KV cache; measured in every round",
            "bytes": "weights and cache that a step reads, over the rate of a streaming read with all threads, measured in every round",
            "exit_test": "within every compiled or captured layer, of every lane, tested or not; it is in the rest" if model.compiled else "measured alone",
            "peers": {name: peer.how for name, peer in running.items()}, "peer_trials": {name: peer.trials for name, peer in running.items() if peer.trials},
        },
        "lanes": lanes,
        "floor": {part: None if value is None else spread([r["floor"][part] for r in rounds]) for part, value in rounds[0]["floor"].items()},
        "bytes": sizes,
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


def _lane_result(rounds, lane, sizes) -> dict:
    """One lane over all rounds: prefill, step time over its products and over its bytes, and how a step's time divides."""
    over_products, over_bytes, shares, step = [], [], [], []
    for r in rounds:
        facts, parts = r[lane], r["floor"]
        depth, river = facts["mean_depth"], facts["river_layers"]
        step.append(facts["step_ms"])
        over_products.append(facts["step_ms"] / of_step(parts, depth, river))
        over_bytes.append(facts["step_ms"] * parts["read_gb_per_s"] * 1e6 / bytes_of_step(sizes, depth, river, sizes["context"]))
        share = {
            "products": parts["backbone"] * depth + parts["river"] * river, "head": facts.get("head_ms", parts["head"]),
            "attention": parts["attention"] * (depth + river), "exit_test": (parts["exit_test"] or 0) * facts["tested"],
        }  # fmt: skip
        share = {part: ms / facts["step_ms"] for part, ms in share.items()}
        shares.append(share | {"rest": 1 - sum(share.values())})
    middle = {part: round(statistics.median(share[part] for share in shares), 3) for part in shares[0]}
    return {
        "mean_depth": statistics.mean(r[lane]["mean_depth"] for r in rounds),
        "prefill_s": spread([r[lane]["prefill_s"] for r in rounds]),
        "step_ms": spread(step),
        "step_over_products": spread(over_products),
        "step_over_bytes": spread(over_bytes),
        "step_bytes": round(statistics.mean(bytes_of_step(sizes, r[lane]["mean_depth"], r[lane]["river_layers"], sizes["context"]) for r in rounds)),
        "shares": middle if rounds[0]["floor"]["exit_test"] is not None else middle | {"exit_test": None},
    }  # fmt: skip


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
    rate, sizes = result["floor"]["read_gb_per_s"], result["bytes"]
    lines += [
        "",
        f"products: {card['products']}. This engine's own kernels: faster ones would make them less, and a busy moment can make them more than a step",
        f"bytes: {card['bytes']}: {rate['median']:.1f} GB/s ({rate['min']:.1f} - {rate['max']:.1f}); a backbone layer {sizes['backbone'] / 1e6:.2f} MB, a river layer "
        f"{sizes['river'] / 1e6:.2f}, the head {sizes['head'] / 1e6:.1f}. Below 1 where a part of them stays in the processor's caches from step to step",
        f"exit test: {card['exit_test']}",
        *(f"{name}: {how}" for name, how in card["peers"].items()),
    ]
    for name, trials in card["peer_trials"].items():
        lines.append(
            f"{name}, tried in tokens/s: "
            + "; ".join(f"{setting} {rate if isinstance(rate, str) else f'{rate:.1f}'}" for setting, rate in trials.items())
        )
    return "\n".join(lines)


def _table(part):
    for lane in part["lanes"].values():
        s = lane["tokens_per_second"]
        line = f"  {lane['label']:<32} {s['median']:>7.1f} tokens/s  ({s['min']:.1f} - {s['max']:.1f})"
        if "step_ms" in lane:
            line += (
                f"   depth {lane['mean_depth']:>4.1f}   prefill {lane['prefill_s']['median']:.3f} s   "
                f"step / products {lane['step_over_products']['median']:.2f}   step / bytes {lane['step_over_bytes']['median']:.2f}"
            )
        else:
            line += f"                prefill {lane['prefill_s']['median']:.3f} s"
        yield line
    yield ""
    yield "  share of a step, each part measured alone: products, head, attention, exit test, the rest"
    for lane in part["lanes"].values():
        if "shares" in lane:
            cells = (lane["shares"][name] for name in ("products", "head", "attention", "exit_test", "rest"))
            yield f"  {lane['label']:<32} " + "  ".join(f"{'in rest':>7}" if cell is None else f"{100 * cell:>6.1f}%" for cell in cells)
    yield ""
    for name, s in part["ratios"].items():
        yield f"  {name:<32} {s['median']:>6.2f}x  ({s['min']:.2f} - {s['max']:.2f})"
