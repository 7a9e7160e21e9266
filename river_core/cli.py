"""The command line: generate, compare, record, bench, memory, fidelity, sweep, figures, gpu-check, doctor."""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading

from tqdm import tqdm

from river_core.errors import InputError, RiverError

METHOD_HELP = (
    "NAME[@RULE][:VALUE][+OPTION=VALUE], NAME one of backbone, int4, river, masking, recompute, replay, propagation, monotone, skipdecode, sequence, verified; "
    "RULE one of similarity, maxprob, margin, entropy, fixed, replay, never; for example river:0.95, masking@fixed:12, recompute+cap=8, verified+k=4"
)


def main(argv=None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error that has a sentence, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows another; the answer goes on
    try:
        args = _parser().parse_args(argv)
        status = args.run(args) or 0
        sys.stdout.flush()  # a pipe that is closed is found out here, not when Python ends
        return status
    except RiverError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _silence(sys.stdout)
        return 0


def _silence(stream) -> None:
    """Let what is still in a stream's buffer go nowhere, where it would be written when Python ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):  # no file behind it
        return


@contextlib.contextmanager
def _stoppable(events: list | None = None, trace: str | None = None):
    """Ctrl-C ends a run as Stop does, with all that it has, and then the command; pressed twice it ends the command at once.

    Args:
        events: of the run, so far. trace: the file that keeps them, whatever ends the command; None = none was asked for.

    Yields:
        callable () -> bool: whether it was pressed.

    Raises:
        KeyboardInterrupt: it was, once the run has ended.
    """
    from river_core.trace import Trace

    pressed: list[int] = []

    def press(number, frame):
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    before = signal.signal(signal.SIGINT, press) if ours else None
    try:
        yield lambda: bool(pressed)
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
        if trace and events:
            Trace.from_events(events).save(trace)
    if pressed:
        raise KeyboardInterrupt


def _parser():
    parser = argparse.ArgumentParser(prog="python -m river_core", description="Decode a language model with early exit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    model = argparse.ArgumentParser(add_help=False)
    group = model.add_argument_group("model")
    group.add_argument("--model", help="hub id, local folder or .gguf file (default: the packaged SmolLM2-135M-Instruct)")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    group.add_argument("--dtype", default="auto", help="auto (measured), float16, bfloat16, float32")
    group.add_argument("--bits", type=int, default=4, help="of the river: 4 or 8")
    group.add_argument("--group-size", type=int, default=64, help="weights that share a scale: 32, 64, 128")
    group.add_argument("--river-kernel", default="auto", help="auto (measured), int4, int8, dequantised")
    group.add_argument("--plain-layers", action="store_true", help="do not compile the decoder's layers, nor capture them as CUDA graphs")
    group.add_argument("--kv-dtype", default="auto", help="of the KV cache: auto (as --dtype, or measured), float16, bfloat16, float32")
    group.add_argument("--products", default="auto", help="of compiled layers: auto (measured), ours, aten (PyTorch's kernels)")
    head = group.add_mutually_exclusive_group()
    head.add_argument("--full-head", action="store_true", help="do not screen the LM head of greedy lanes")
    head.add_argument("--screened-head", action="store_true", help="screen it even where that was measured to be slower")
    group.add_argument(
        "--offload-after", type=int, metavar="N", help="keep N backbone layers in memory; bring the others back for tokens that need them"
    )
    group.add_argument("--threads", type=int, help="CPU threads (default: the cores this process may use)")

    decode = argparse.ArgumentParser(add_help=False)
    group = decode.add_argument_group("decoding")
    group.add_argument("--tau", default=None, help="similarity above which a token leaves (default: the model's preset)")
    group.add_argument("--max-new-tokens", default=128, help="tokens per lane")
    group.add_argument("--temperature", default=0.0, help="0 = greedy")
    group.add_argument("--top-k", default=0, help="0 = all")
    group.add_argument("--top-p", default=1.0)
    group.add_argument("--seed", default=0)
    group.add_argument("--prefill", default="full", help="full, or sequence (the paper's sequence-level exit)")
    group.add_argument("--raw", action="store_true", help="no chat template")
    group.add_argument("--json", action="store_true", help="print events as JSON lines (generate) or a summary (compare)")
    group.add_argument("--trace", metavar="FILE", help="write the trace, for example out.json.gz")

    one = commands.add_parser("generate", parents=[model, decode], help="decode one answer")
    one.add_argument("prompt")
    one.add_argument("--method", default="river", help=METHOD_HELP)
    one.set_defaults(run=_generate)

    many = commands.add_parser("compare", parents=[model, decode], help="decode one prompt with several methods")
    many.add_argument("prompt")
    many.add_argument("--methods", default="backbone,int4,river", help="comma-separated: " + METHOD_HELP)
    many.add_argument(
        "--mode", default="free", help="free, same-text (every lane is fed the backbone's tokens), same-exits (and leaves where River left)"
    )
    many.add_argument("--timing", default="race", help="race (lanes in turn) or sequential")
    many.set_defaults(run=_compare)

    keep = commands.add_parser("record", parents=[model], help="run recipes and keep the traces as recordings for the page")
    keep.add_argument("recipes", metavar="FILE", help="JSON list of recipes, such as assets/recordings/recipes.json")
    keep.add_argument("--only", metavar="SLUGS", help="comma-separated: make only these")
    keep.add_argument("--repeats", type=int, default=3, help="runs of a recipe, of which the middle one is kept")
    keep.add_argument("--out", metavar="FOLDER", help="default: the folder of the recipes")
    keep.set_defaults(run=_record)

    speed = commands.add_parser("bench", parents=[model], help="measure decoding speed against transformers")
    speed.add_argument("--tokens", type=int, default=128)
    speed.add_argument("--repeats", type=int, default=5)
    speed.add_argument("--methods", default="backbone,int4,river:0.95,river:0.97")
    speed.add_argument(
        "--peers", default="transformers", help="comma-separated: transformers, llama.cpp (where llama-cpp-python is installed), or none"
    )
    speed.add_argument(
        "--shape", metavar="NAME", help="random weights of a published shape instead of a model, such as llama3.2-1b (implies --peers none)"
    )
    speed.add_argument(
        "--exit", type=int, metavar="LAYER", help="force River's exits: instead of --methods, run backbone, int4 and River leaving there"
    )
    speed.add_argument("--context", metavar="LENGTHS", help="comma-separated prompt lengths to go through, such as 64,512,2048")
    speed.add_argument("--json", action="store_true")
    speed.set_defaults(run=_bench)

    held = commands.add_parser(
        "memory", parents=[model], help="measure memory against context length, and what offloading the backbone costs"
    )
    held.add_argument("--contexts", default="1024,4096,8192,16384,32768,65536", metavar="LENGTHS", help="comma-separated, in tokens")
    held.add_argument(
        "--shape", metavar="NAME", help="a published shape, such as llama3.1-8b: random weights, or computed where it does not fit"
    )
    held.add_argument("--computed", action="store_true", help="with --shape: compute from its sizes in any case, and allocate nothing")
    held.add_argument(
        "--methods", default="backbone,int4,river", help="whose speed is compared with and without offloading, or none: " + METHOD_HELP
    )
    held.add_argument("--tokens", type=int, default=64)
    held.add_argument("--repeats", type=int, default=5)
    held.add_argument("--json", action="store_true")
    held.set_defaults(run=_memory)

    same = commands.add_parser(
        "fidelity", parents=[model], help="agreement and KV error of every strategy on the same text and the same exits"
    )
    same.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with a prompt or question field")
    same.add_argument("--limit", type=int, help="use the first so many prompts")
    same.add_argument("--tokens", type=int, default=64, help="per prompt")
    same.add_argument("--tau", default=None, help="of River")
    same.add_argument("--mode", default="same-exits", help="same-exits or same-text")
    same.add_argument("--methods", default="backbone,river,int4,recompute,propagation,masking,monotone", help=METHOD_HELP)
    same.add_argument("--no-verified", action="store_true", help="leave the check of verified River out")
    same.add_argument("--json", action="store_true")
    same.set_defaults(run=_fidelity)

    over = commands.add_parser("sweep", parents=[model], help="speed against agreement over thresholds, on one prompt or several")
    over.add_argument("prompt", nargs="?")
    over.add_argument(
        "--prompts", metavar="FILE", help="JSONL with a prompt or question field, instead of one prompt: figures then get intervals"
    )
    over.add_argument("--limit", type=int, help="use the first so many prompts")
    over.add_argument("--taus", help="thresholds (default: 0.9,0.95,0.97,0.98,0.99)")
    over.add_argument("--methods", default="river,int4", help="comma-separated: " + METHOD_HELP)
    over.add_argument("--max-new-tokens", type=int, default=64, help="tokens per lane")
    over.add_argument("--repeats", type=int, default=3)
    over.add_argument("--raw", action="store_true", help="no chat template")
    over.add_argument("--json", action="store_true", help="print the result, which the Analyse tab of the page can show")
    over.set_defaults(run=_sweep)

    paper = commands.add_parser("figures", parents=[model], help="the paper's figures from runs made here: CSV files and pictures")
    paper.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with a prompt or question field")
    paper.add_argument("--limit", type=int, help="use the first so many prompts")
    paper.add_argument("--tokens", type=int, default=64, help="per prompt")
    paper.add_argument("--taus", help="two thresholds, relaxed and strict (default: the model's least and greatest preset)")
    paper.add_argument("--out", default="out/figures", metavar="FOLDER")
    paper.set_defaults(run=_figures)

    gpu = commands.add_parser("gpu-check", help="check a CUDA GPU against the CPU and measure it, in under five minutes")
    gpu.add_argument("--model", help="hub id, local folder or .gguf file (default: the packaged SmolLM2-135M-Instruct)")
    gpu.add_argument("--random", action="store_true", help="no model is read; random weights of the default model's shape take its place")
    gpu.add_argument("--seconds", type=float, default=285, help="what does not fit into this time is left out, and said to be")
    gpu.add_argument("--no-bench", action="store_true", help="check only")
    gpu.add_argument("--json", action="store_true", help="print the result; the lines of progress go to standard error")
    gpu.set_defaults(run=_gpu_check)

    doctor = commands.add_parser("doctor", parents=[model], help="print device, dtypes, kernels and why, model, cache place")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_doctor)
    return parser


def _record(args) -> int:
    from pathlib import Path

    from river_core.measure.record import read_recipes, record

    recipes = list(enumerate(read_recipes(args.recipes), 1))
    wanted = _names(args.only or "")
    unknown = set(wanted) - {recipe["slug"] for _, recipe in recipes}
    if unknown:
        raise InputError(f"There is no recipe {', '.join(sorted(unknown))} in {args.recipes}.")
    if args.repeats < 1:
        raise InputError("A recording needs at least one run.")
    out = Path(args.out) if args.out else Path(args.recipes).parent
    out.mkdir(parents=True, exist_ok=True)
    loaded = _load(args)
    for number, recipe in recipes:
        if wanted and recipe["slug"] not in wanted:
            continue
        path = out / f"{number:02d}-{recipe['slug']}.json.gz"
        _say(f"recording {path}")
        trace = record(loaded, recipe, args.repeats, f"python -m river_core record {args.recipes} --only {recipe['slug']}")
        trace.save(path)
        _summary(trace, sys.stdout)
    return 0


def _names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _count(text: str, option: str) -> int:
    """A whole number from an option; InputError if it is none."""
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InputError(f"{option} takes whole numbers, not {text[:40]!r}.")
    return int(text)


def _say(line: str) -> None:
    """Progress goes to standard error; standard output is for results."""
    print(line, file=sys.stderr, flush=True)


def _load(args, shape: str | None = None):
    """The model of the options, or random weights of a shape."""
    from river_core.model import load

    names = ("device", "dtype", "kv_dtype", "bits", "group_size", "threads", "river_kernel", "products", "offload_after")
    head = False if args.full_head else True if args.screened_head else "auto"
    options = {name: getattr(args, name) for name in names} | {"compiled": not args.plain_layers, "screen_head": head}
    with Progress() as progress:
        if shape:
            from river_core.measure.shapes import shaped_model

            return shaped_model(shape, **options, progress=progress)
        return load(args.model, **options, progress=progress)


class Progress:
    """A tqdm bar a stage, on standard error; nothing where that is no terminal."""

    def __init__(self):
        self.bar = None
        self.stage = None

    def __call__(self, stage, fraction, message):
        if stage != self.stage:
            self.close()
            self.stage = stage
            if stage != "ready":
                self.bar = tqdm(total=100, bar_format="{desc} |{bar}| {elapsed}", leave=False, file=sys.stderr, disable=None)
        if self.bar is not None:
            self.bar.set_description_str(message, refresh=False)
            self.bar.n = round(100 * (fraction or 0))
            self.bar.refresh()

    def close(self):
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _options(args) -> dict:
    names = ("tau", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "prefill")
    return {name: getattr(args, name) for name in names} | {"chat": not args.raw}


def _generate(args) -> int:
    from river_core.generate import generate
    from river_core.trace import Trace

    model, events = _load(args), []
    with _stoppable(events, args.trace) as stop:
        for event in generate(model, args.prompt, args.method, **_options(args), stop=stop):
            events.append(event)
            if args.json:
                print(json.dumps(event), flush=True)
            elif event["type"] == "run":
                _notices(event["header"])
            elif event["type"] == "token":
                print(event["text"], end="", flush=True)
            elif event["type"] == "end":
                print(event["rest"])
        if not args.json:
            _summary(Trace.from_events(events), sys.stderr)
    return int(any(event["type"] == "error" for event in events))


def _compare(args) -> int:
    from river_core.generate import compare
    from river_core.trace import Trace

    model, methods, events = _load(args), _names(args.methods), []
    with _stoppable(events, args.trace) as stop:
        with Progress() as progress:
            total, made = None, 0
            for event in compare(model, args.prompt, methods, timing=args.timing, mode=args.mode, **_options(args), stop=stop):
                events.append(event)
                if event["type"] == "run":
                    total = event["header"]["max_new_tokens"] * len(event["header"]["lanes"])
                elif event["type"] == "token":
                    made += 1
                    progress("decode", made / total, f"decoding, {made} tokens")
        trace = Trace.from_events(events)
        if args.json:
            print(json.dumps(_facts(trace), indent=1))
        else:
            _notices(trace.header)
            for lane in trace.header["lanes"]:
                print(f"\n== {lane['label']}\n{trace.lanes[lane['id']].text}")
            print()
            _summary(trace, sys.stdout)
    return int(any(event["type"] == "error" for event in events))


def _notices(header):
    for notice in header["notices"]:
        print(f"note: {notice}", file=sys.stderr)


def _facts(trace) -> dict:
    lanes = []
    for lane in trace.header["lanes"]:
        run = trace.lanes[lane["id"]]
        lanes.append(
            {
                **lane,
                "text": run.text,
                "tokens": len(run.tokens),
                "reason": run.end["reason"],
                "message": run.end["message"],
                "tokens_per_second": run.tokens_per_second,
                "speed_up": trace.speed_up(lane["id"]),
                "mean_depth": run.mean_depth,
                "first_difference": trace.first_difference(lane["id"]),
                "agreement": trace.agreement(lane["id"]),
                "drafts": run.drafts,
                "fetched": run.fetched,
                "kv": run.fidelity and run.fidelity["mean"] | {"holes": run.fidelity["holes"]},
            }
        )
    keys = (
        "model",
        "device",
        "device_name",
        "threads",
        "dtype",
        "prefill_dtype",
        "kv_dtype",
        "kernels",
        "quantiser",
        "timing",
        "sampler",
        "notices",
    )
    return {key: trace.header[key] for key in keys} | {"lanes": lanes}


def _summary(trace, file) -> None:
    header, layers = trace.header, trace.header["model"]["n_layers"]
    print(f"{'lane':<32}{'tokens':>7}{'tokens/s':>10}{'speed-up':>10}{'mean depth':>16}  first differing token", file=file)
    for lane in _facts(trace)["lanes"]:
        speed = "-" if lane["tokens_per_second"] is None else f"{lane['tokens_per_second']:.1f}"
        up = "-" if lane["speed_up"] is None else f"{lane['speed_up']:.2f}x"
        depth = "-" if lane["mean_depth"] is None else f"{lane['mean_depth']:.1f} of {layers}"
        if "backbone" not in trace.lanes or lane["id"] == "backbone":
            differs = ""
        else:
            differs = "none" if lane["first_difference"] is None else f"#{lane['first_difference'] + 1}"  # counted from 1, as on the page
        print(f"{lane['label']:<32}{lane['tokens']:>7}{speed:>10}{up:>10}{depth:>16}  {differs}", file=file)
        if lane["message"]:
            print(f"  {lane['message']}", file=file)
        if lane["drafts"]:
            facts = lane["drafts"]
            print(
                f"  drafts: {facts['accepted']} of {facts['drafted']} accepted, {facts['tokens_per_cycle']:.2f} tokens per cycle", file=file
            )
        if lane["fetched"]:
            facts = lane["fetched"]
            print(f"  offloaded layers brought back per token: {facts['layers']:.2f}, {facts['bytes'] / 1e6:.1f} MB", file=file)
        if lane["agreement"] and lane["kv"]:
            print(
                f"  on the backbone's text: top-1 agreement {lane['agreement']['top1']:.3f}, KL {lane['agreement']['kl']:.3f} nats, K cosine {lane['kv']['k_cos']:.4f}, "
                f"V cosine {lane['kv']['v_cos']:.4f}, empty slots {lane['kv']['holes']}",
                file=file,
            )
    print(
        f"{header['model']['name']} · {header['device_name']} · {header['threads']} threads · {header['dtype']} · river {header['kernels']['river']} · "
        f"{header['timing']['mode']} · one run, engine time",
        file=file,
    )  # fmt: skip


def _bench(args) -> int:
    from river_core.measure.speed import bench, format_bench

    methods = _names(args.methods)
    if args.exit is not None:
        methods = ("backbone", "int4", f"river@fixed:{args.exit}")
    peers = () if args.shape or args.peers == "none" else _names(args.peers)
    contexts = [_count(length, "--context") for length in _names(args.context or "")]
    result = bench(
        _load(args, args.shape), methods=methods, tokens=args.tokens, repeats=args.repeats, peers=peers, contexts=contexts, report=_say
    )
    print(json.dumps(result, indent=1) if args.json else format_bench(result))
    return 0


def _memory(args) -> int:
    from river_core.measure.memory import format_memory, memory, memory_of_shape

    contexts = [_count(length, "--contexts") for length in _names(args.contexts)]
    after, args.offload_after = args.offload_after, None  # the plain model is measured too, and the other one made from it
    config = _computed_shape(args)
    if config is not None:
        from river_core.model import DTYPES

        dtype = DTYPES["bfloat16" if args.dtype == "auto" else args.dtype]
        result = memory_of_shape(args.shape, config, dtype, after, contexts, args.bits, args.group_size)
    else:
        methods = () if args.methods == "none" else _names(args.methods)
        model = _load(args, args.shape)
        result = memory(model, after, contexts, methods, args.tokens, args.repeats, report=_say)
    print(json.dumps(result, indent=1) if args.json else format_memory(result))
    return 0


def _computed_shape(args):
    """The config of a shape that is only to be computed, because that was asked for or because this machine cannot hold it; None otherwise."""
    if not args.shape:
        if args.computed:
            raise InputError("--computed goes with --shape; a model of its own is measured.")
        return None
    from river_core.loading import available_memory
    from river_core.measure.shapes import SHAPES, bytes_needed
    from river_core.model import DTYPES

    if args.shape not in SHAPES:
        raise InputError(f"There is no shape {args.shape[:40]!r}; choose from {', '.join(SHAPES)}.")
    if args.dtype != "auto" and args.dtype not in DTYPES:
        raise InputError(f"dtype must be auto, float16, bfloat16 or float32, not {args.dtype!r}.")
    config, free = SHAPES[args.shape](), available_memory()
    itemsize = 2 if args.dtype == "auto" else DTYPES[args.dtype].itemsize
    if args.computed or free is None or bytes_needed(config, itemsize) > 0.7 * free:
        return config
    return None


def _sweep(args) -> int:
    from river_core.measure.prompts import read_prompts
    from river_core.measure.sweep import TAUS, format_sweep, read_taus, sweep

    if (args.prompt is None) == (args.prompts is None):
        raise InputError("A sweep takes either a prompt or --prompts FILE.")
    prompts = args.prompt if args.prompts is None else read_prompts(args.prompts, args.limit)
    taus = TAUS if args.taus is None else read_taus(args.taus)
    options = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats, "chat": not args.raw}
    model = _load(args)
    with _stoppable() as stop:
        with Progress() as progress:
            for event in sweep(model, prompts, _names(args.methods), taus, **options, stop=stop):
                if event["type"] == "progress":
                    progress("sweep", event["fraction"], f"repeat {event['repeat']} of {event['repeats']}, token {event['tokens']}")
        if event["points"]:  # of the repeats that were finished
            print(json.dumps(event, indent=1) if args.json else format_sweep(event))
    return 0


def _gpu_check(args) -> int:
    from river_core.measure.gpu_check import gpu_check

    options = {"random": args.random, "seconds": args.seconds, "benchmark": not args.no_bench}
    result = gpu_check(args.model, **options, report=_say if args.json else print)
    if args.json:
        print(json.dumps(result, indent=1))
    return int(not result["passed"])


def _doctor(args) -> int:
    facts = _load(args).describe()
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    for key in ("model", "source", "path", "revision", "sha256", "architecture", "n_layers", "hidden_size", "vocab_size", "context_length"):
        print(f"{key:<16} {facts[key] if facts[key] is not None else '-'}")
    for key in ("device", "device_name", "threads", "dtype", "prefill_dtype", "kv_dtype", "river_kernel"):
        print(f"{key:<16} {facts[key]}")
    native = facts["native"]
    print(f"{'native code':<16} {native['state']}, for {native['isa'] or '-'}, compiler {native['compiler'] or '-'}")
    print(f"{'pinned':<16} {', '.join(facts['pinned']) or '-'} (the rest is measured, or follows from the machine)")
    quantiser = facts["quantiser"]
    print(f"{'quantiser':<16} {quantiser['name']}, {quantiser['bits']} bits, groups of {quantiser['group_size']}")
    print(f"{'kernels':<16} " + ", ".join(f"{name}: {kind}" for name, kind in facts["river_products"].items()))
    for reason in facts["reasons"]:
        print(f"{'why':<16} {reason}")
    megabytes = {name: facts[f"{name}_bytes"] / 1e6 for name in ("backbone", "river", "head")}
    print(f"{'memory':<16} " + ", ".join(f"{name} {size:.0f} MB" for name, size in megabytes.items()) + " (computed from shapes)")
    if facts["offload"]:
        away = facts["offload"]
        print(
            f"{'offloaded':<16} {away['layers']} backbone layers, {away['bytes'] / 1e6:.0f} MB, to {away['to']}; "
            f"{away['resident_bytes'] / 1e6:.0f} MB of them in memory ({away['how']})"
        )
    print(f"{'load':<16} " + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in facts["load_seconds"].items()))
    print(f"{'cache':<16} {facts['cache']}")
    for note in facts["notes"]:
        print(f"{'note':<16} {note}")
    return 0


def _fidelity(args) -> int:
    from river_core.measure.fidelity import check_verified, fidelity, format_fidelity, format_verified
    from river_core.measure.prompts import read_prompts

    prompts = read_prompts(args.prompts, args.limit)
    model = _load(args)

    methods = _names(args.methods)
    result = fidelity(model, prompts, methods=methods, tau=args.tau, tokens=args.tokens, mode=args.mode, report=_say)
    del result["traces"]
    if not args.no_verified:
        result["verified"] = check_verified(model, prompts, tokens=args.tokens, report=_say)
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    print(format_fidelity(result))
    if "verified" in result:
        print("\n" + format_verified(result["verified"]))
    return 0


def _figures(args) -> int:
    from river_core.measure.figures import figures
    from river_core.measure.prompts import read_prompts

    prompts = read_prompts(args.prompts, args.limit)
    model = _load(args)
    from river_core.exit_rules import check_tau

    taus = None if args.taus is None else tuple(check_tau(text) for text in args.taus.split(","))
    if taus is not None and len(taus) != 2:
        raise InputError("--taus takes two thresholds, relaxed and strict, such as 0.95,0.98.")
    paths = figures(model, prompts, args.out, taus=taus, tokens=args.tokens, report=_say)
    for path in paths:
        print(path)
    return 0
