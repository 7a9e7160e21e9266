"""Does a GPU compute what the CPU computes, and how fast? One command for a machine that nobody has seen yet.

The checks compare a reference (float32, on the CPU, operation by operation) with the model under test (on the GPU, in its own dtypes, with captured layers). They
know nothing of CUDA: two CPU models go through them just as well, which is how they are tested.
"""

import time
from dataclasses import asdict, dataclass

import torch

from river_core.errors import InputError, LoadError
from river_core.exit_rules import Replay, Similarity
from river_core.kernels import Int4
from river_core.kv_cache import BACKBONE, RIVER
from river_core.measure.families import configs, random_model, tiny_model_on
from river_core.measure.shapes import SHAPES, shaped_model
from river_core.measure.speed import PROMPT, bench, format_bench
from river_core.model import load
from river_core.strategies.river import RiverStrategy
from river_core.text import encode

PROMPTS = ("Why is the sky blue?", PROMPT, "def fibonacci(n):\n    ")
SECONDS = 285  # for everything after the installation
METHODS = ("backbone", "int4", "river:0.95", "river:0.97")
SHAPE, SHAPE_EXIT = "llama3.2-1b", 3


@dataclass(frozen=True)
class Bounds:
    """How far the model under test may be from the reference.

    cosine, error, typical_error: least cosine, greatest and median relative error ||a - b|| / ||b|| of the backbone's logits, row by row. river_cosine: least cosine of the full river's,
    whose 4-bit kernels hold scales in bfloat16.
    near_tie: the other model's choice of token may differ where the reference's gap between the two is at most this share of the spread (standard deviation) of its logits.
    kv_cosine: least mean cosine of keys and of values.
    states: greatest relative error of the captured layers' states against the plain ones, both on the device; exit_tie: a captured step may leave elsewhere where the
    plain score is this close to tau.
    """

    cosine: float
    error: float
    typical_error: float
    river_cosine: float
    near_tie: float
    kv_cosine: float
    states: float
    exit_tie: float


EXACT = Bounds(
    cosine=0.99999, error=2e-3, typical_error=5e-4, river_cosine=0.99999, near_tie=2e-3, kv_cosine=0.99999, states=1e-4, exit_tie=1e-4
)
# bfloat16 on a CPU is at 0.9974, 0.08, 0.014, 0.9997, 0, 0.99996 on the default model.
HALF = Bounds(cosine=0.99, error=0.15, typical_error=0.03, river_cosine=0.98, near_tie=0.15, kv_cosine=0.995, states=0.03, exit_tie=5e-3)


@dataclass(frozen=True)
class Check:
    """One finding. passed: None = it was not run, which is no pass either. detail: figures and bounds, one sentence."""

    name: str
    passed: bool | None
    detail: str

    def __str__(self):
        word = {True: "pass", False: "FAIL", None: "not run"}[self.passed]
        return f"{word:<8}{self.name}: {self.detail}"


class OutOfTime(Exception):
    """The time for the whole command is up."""


class Deadline:
    """Seconds that are left of `seconds`; called between pieces of work, it raises `OutOfTime` when there are none."""

    def __init__(self, seconds: float):
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def __call__(self, line: str = "") -> None:
        if self.spent > self.seconds:
            raise OutOfTime


@torch.inference_mode()
def run_checks(reference, model, texts=PROMPTS, *, label: str, tokens: int = 32, bounds: Bounds | None = None, deadline=lambda: None):
    """Compare two models of the same weights.

    Args:
        reference: a `Model` in float32. model: the one under test, compiled or captured as it is to be used.
        texts: prompts. label: what the checks are called by. tokens: decoded after each prompt, the reference's own greedy choice, fed to both.
        bounds: None = `EXACT` for float32, `HALF` otherwise.
        deadline: called before every check; raises when there is no time left.

    Yields:
        Check
    """
    bounds = bounds or (EXACT if model.plan.dtype == torch.float32 else HALF)
    deadline()
    runs = [_Run(reference, text, tokens) for text in texts]
    checks = {
        "prefill logits": _prefill,
        "top-1 choices": _choices,
        "full river": _full_river,
        "cache owners": _owners,
        "captured layers": _captured,
    }
    if isinstance(model.river.blocks[0].qkv, Int4):
        checks["int4 products"] = _int4
    for name, check in checks.items():
        deadline()
        try:
            passed, detail = check(reference, model, runs, bounds)
        except RuntimeError as error:  # what PyTorch raises for a kernel that fails
            passed, detail = False, str(error).splitlines()[0][:300]
        yield Check(f"{label}, {name}", passed, detail)


class _Run:
    """The reference's greedy continuation of one prompt, [tokens] ids after `prompt` ids, and its logits by step, [tokens, V]."""

    def __init__(self, reference, text, tokens):
        self.prompt = encode(reference.tokenizer, text, chat=True)
        self.logits, self.fed = _decode(reference, self.prompt, tokens)


def _decode(model, prompt, tokens, fed=None, river=False):
    """Logits [tokens, V] (float32, CPU) of so many one-row steps after a prompt, and the ids that were fed: `fed`, or each step's best.

    With `river`, the steps run the full river and not the backbone.
    """
    decoder, found = model.decoder, []
    cache = decoder.new_cache(len(prompt) + tokens)
    hidden = decoder.forward(prompt, 0, cache)
    fed = fed or [int(decoder.head(hidden[-1:])[0].argmax())]
    for i in range(tokens):
        position = len(prompt) + i
        rows, hidden = decoder.rows(position, 1, cache), decoder.embed([fed[i]])
        blocks, owner = (model.river.blocks, RIVER) if river else (decoder.blocks, BACKBONE)
        hidden = decoder.run_blocks(blocks, 0, len(blocks), hidden, rows, cache, owner)[-1]
        cache.length = position + 1
        found.append(decoder.head(hidden)[0].float().cpu())
        if len(fed) == i + 1:
            fed = [*fed, int(found[-1].argmax())]
    return torch.stack(found), fed


def _errors(got, wanted) -> torch.Tensor:
    """Relative error of every row [T, n]."""
    got, wanted = got.double().cpu(), wanted.double().cpu()
    return (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def _apart(got, wanted) -> tuple[float, float]:
    """Least cosine and greatest relative error over rows [T, n]; nan, which passes no bound, where anything is not finite."""
    cosine = torch.cosine_similarity(got.double().cpu(), wanted.double().cpu(), dim=-1).min()
    return float(cosine), float(_errors(got, wanted).max())


def _prefill(reference, model, runs, bounds):
    worst, errors = [], []
    for run in runs:
        pair = []
        for one in (model, reference):
            cache = one.decoder.new_cache(len(run.prompt))
            pair.append(one.decoder.head(one.decoder.forward(run.prompt, 0, cache)))
        worst.append(_apart(*pair))
        errors.append(_errors(*pair))
    cosine, error, typical = min(c for c, _ in worst), max(e for _, e in worst), float(torch.cat(errors).median())
    passed = typical <= bounds.typical_error and all(c >= bounds.cosine and e <= bounds.error for c, e in worst)
    return passed, (
        f"least cosine {cosine:.6f} (at least {bounds.cosine}), relative error up to {error:.1e} (at most {bounds.error:g}), median {typical:.1e} "
        f"(at most {bounds.typical_error:g})"
    )


def _choices(reference, model, runs, bounds):
    """Teacher-forced: both are fed the reference's tokens, so one different choice does not make all that follow different."""
    differing, worst, count, fine = 0, 0.0, 0, True
    for run in runs:
        logits, _ = _decode(model, run.prompt, len(run.logits), run.fed)
        choices = logits.argmax(-1)
        gaps = (run.logits.max(-1).values - run.logits.gather(1, choices[:, None])[:, 0]) / run.logits.std(-1)
        differing += int((gaps > 0).sum())
        count += len(choices)
        worst = max(worst, float(gaps.max()))
        fine &= bool(logits.isfinite().all())
    detail = f"{count - differing} of {count} the same; the widest gap among the others is {worst:.4f} of the logits' spread (a near tie is at most {bounds.near_tie})"
    return fine and worst <= bounds.near_tie, detail


def _full_river(reference, model, runs, bounds):
    worst = 1.0
    for run in runs[:2]:
        got, wanted = (_decode(one, run.prompt, len(run.logits), run.fed, river=True)[0] for one in (model, reference))
        cosine, _ = _apart(got, wanted)
        worst = min(worst, cosine) if cosine == cosine else cosine
    return worst >= bounds.river_cosine, f"cosine of its logits {worst:.6f} (at least {bounds.river_cosine})"


def _int4(reference, model, runs, bounds):
    """Packed products against products with the weights that the codes stand for, at the sizes of one row, of a check and of a prompt; and the codes themselves."""
    ratios, weights = [], []
    blocks, theirs = model.river.blocks, reference.river.blocks
    generator = torch.Generator().manual_seed(0)
    for layer in sorted({0, len(blocks) // 2, len(blocks) - 1}):
        for name in ("qkv", "o", "gate_up", "down"):
            product = getattr(blocks[layer], name)
            dense = product.dense_weight()
            weights.append(_apart(dense.flatten()[None], getattr(theirs[layer], name).dense_weight().flatten()[None])[1])
            for rows in (1, 8, 100):
                x = torch.randn(rows, product.shape[1], generator=generator).to(dense.device, torch.bfloat16)
                wanted = x.float() @ dense.t() + (0 if product.bias is None else product.bias)
                ratios.append(1 / max(_apart(product(x).float().flatten()[None], wanted.flatten()[None])[1], 1e-9))
    least, apart = min(ratios), max(weights)
    passed = all(ratio > 100 for ratio in ratios) and all(weight < 0.02 for weight in weights)
    return passed, f"signal over error {least:.0f} (more than 100); dequantised weights {apart:.1e} from the reference's (less than 2e-02)"


def _river(model, rule, run):
    """Steps of River with an exit rule over a run's tokens, and the cache they leave."""
    strategy = RiverStrategy(model, rule)
    cache = strategy.new_cache(len(run.prompt) + len(run.logits))
    strategy.prefill(run.prompt, cache)
    return [strategy.step(run.fed[i], len(run.prompt) + i, i + 1, cache) for i in range(len(run.logits))], cache


def _tau(steps) -> float:
    """A threshold at which a model that these steps were taken from leaves at various depths: in the widest gap among the middle of their scores, so that few
    decisions hang on rounding."""
    scores = sorted(score for step in steps for score in step.scores.values())
    middle = scores[int(0.5 * len(scores)) : int(0.9 * len(scores)) + 1]
    low, high = max(zip(middle, middle[1:], strict=False), key=lambda pair: pair[1] - pair[0])
    return (low + high) / 2


def _owners(reference, model, runs, bounds):
    """River's exits of the reference, replayed on both: the same slots must be written by the same hands, and hold about the same."""
    tables, least = True, 1.0
    for run in runs:
        tau = _tau(_river(reference, Similarity(2.0), run)[0])
        steps, cache = _river(reference, Similarity(tau), run)
        _, other = _river(model, Replay([len(reference.decoder.blocks), *(step.exit_layer for step in steps)]), run)
        tables &= bool((cache.owner == other.owner).all() and (cache.filled_at == other.filled_at).all())
        used = slice(0, len(run.prompt) + len(run.logits))
        held, wanted = (c.keys_values[:, :, :, used].cpu().float().flatten(0, 3) for c in (other, cache))
        mean = float(torch.cosine_similarity(held, wanted, dim=-1).mean())
        least = min(least, mean) if mean == mean else mean
    said = "the same tables" if tables else "different tables"
    return tables and least >= bounds.kv_cosine, f"{said}; mean cosine of keys and values {least:.6f} (at least {bounds.kv_cosine})"


def _captured(reference, model, runs, bounds):
    """Captured against plain layers on the device: states with the same exits, similarities, owner tables, and the exits themselves up to near ties."""
    if not model.captured:
        return None, " ".join(["layers are not captured.", *model.notes[-1:]])
    apart, scores_apart, tables, wrong, moved = [], [], True, 0, 0
    for run in runs:
        with model.plain_layers():
            tau = _tau(_river(model, Similarity(2.0), run)[0])
            plain, cache = _river(model, Similarity(tau), run)
        for a, b in zip(_river(model, Similarity(tau), run)[0], plain, strict=True):
            scores_apart += [abs(a.scores[depth] - b.scores[depth]) for depth in a.scores.keys() & b.scores.keys()]
            if a.exit_layer != b.exit_layer:
                moved += 1
                wrong += not abs(b.scores[min(a.exit_layer, b.exit_layer)] - tau) <= bounds.exit_tie
                break  # from here on they attend to keys and values from different hands
        depths = [step.exit_layer for step in plain]
        forced, other = _river(model, Replay([0, *depths]), run)
        tables &= bool((cache.owner == other.owner).all() and (cache.filled_at == other.filled_at).all())
        for a, b in zip(forced, plain, strict=True):
            apart.append(_apart(torch.cat(a.hidden_states), torch.cat(b.hidden_states))[1])
    worst, score = max(apart), max(scores_apart)
    passed = tables and not wrong and all(a <= bounds.states for a in apart) and all(s <= bounds.exit_tie for s in scores_apart)
    return passed, (
        f"states {worst:.1e} apart (at most {bounds.states:.0e}), similarities {score:.1e} (at most {bounds.exit_tie:.0e}), owner tables "
        f"{'the same' if tables else 'different'}, {moved} exits moved, {wrong} of them more than a near tie"
    )


def family_pairs(device, dtypes=(torch.float32, "auto"), prepare=lambda model: model.compile()):
    """Tiny models of every family, on the CPU in float32 and on `device`.

    Args:
        dtypes: of the models on the device; "auto" = what it would use for a checkpoint.
        prepare: called with every model on the device before it is checked.

    Yields:
        label, reference, model
    """
    for name, config in configs().items():
        reference = tiny_model_on("cpu", config)
        for dtype in dtypes:
            model = tiny_model_on(device, config, dtype)
            model.compiled = None
            prepare(model)
            if model.captured:
                for blocks in (model.decoder.blocks, model.river.blocks):
                    blocks.stack.bucket = 16  # these models read short texts, and the change from one bucket to the next is to be met
            yield f"tiny {name} in {'16 bits' if dtype == 'auto' else 'float32'}", reference, model


def default_pair(name, device, random: bool, say):
    """The model that is asked for in float32 on the CPU and as `load` makes it on the device; with `random`, random weights of the default model's shape."""
    if random:
        config = SHAPES["smollm2-135m"]()
        config.max_position_embeddings = 2048
        weights = random_model(config).state_dict()
        pair = [
            tiny_model_on(where, config, dtype, group_size=64, weights=weights)
            for where, dtype in (("cpu", torch.float32), (device, "auto"))
        ]
        pair[1].compiled, pair[1].eos_token_ids = None, frozenset()
    else:
        say("loading the model on the CPU and on the GPU")
        pair = [
            load(name, device="cpu", dtype="float32", compiled=False, screen_head=False),
            load(name, device=str(device)),
        ]
    pair[1].compile()
    return pair


def gpu_check(name=None, *, random=False, seconds: float = SECONDS, benchmark=True, report=print) -> dict:
    """Check the first CUDA GPU against the CPU, then measure it.

    Args:
        name: as for `load`. random: no checkpoint is read; random weights of the default model's shape take its place.
        seconds: for everything; what does not fit is left out, and said to be.
        benchmark: measure after checking.
        report: called with a line of text.

    Returns:
        dict, JSON-ready: device, versions, checks, bench (by part: a result of `bench`, or a sentence), seconds, and passed: every check was run and passed.

    Raises:
        InputError: no CUDA GPU.
    """
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        raise InputError(f"There is no CUDA GPU that PyTorch {torch.__version__} ({built}) can use here, so nothing was checked.")
    device, deadline, checks = torch.device("cuda", 0), Deadline(seconds), []
    report(f"{torch.cuda.get_device_name(device)} · PyTorch {torch.__version__} · CUDA {torch.version.cuda}")

    def add(check):
        checks.append(check)
        report(str(check))

    model = _check_everything(name, device, random, deadline, add, report)
    result = {
        "device": torch.cuda.get_device_name(device), "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "checks": [asdict(check) for check in checks], "bench": {},
    }  # fmt: skip
    if benchmark:
        result["bench"] = _measure_everything(model, device, random, deadline, report)
    result["seconds"] = round(deadline.spent, 1)
    result["passed"] = all(check.passed for check in checks)
    count = sum(check.passed is True for check in checks)
    report(f"{count} of {len(checks)} checks passed in {result['seconds']:.0f} s")
    return result


def _check_everything(name, device, random, deadline, add, report):
    """All checks, the model's first; returns the model on the device, or None if it could not be had."""
    model = None
    try:
        try:
            reference, model = default_pair(name, device, random, report)
        except LoadError as error:
            add(Check("model", None, f"{error} (--random needs no checkpoint)"))
        else:
            for check in run_checks(reference, model, label=model.name, deadline=deadline):
                add(check)
        for label, reference, tiny in family_pairs(device):
            for check in run_checks(reference, tiny, ("Hello there", "What is a river?"), label=label, tokens=20, deadline=deadline):
                add(check)
    except OutOfTime:
        add(Check("the remaining checks", None, f"{deadline.seconds:.0f} s are over"))
    return model


def _measure_everything(model, device, random, deadline, report) -> dict:
    """Benchmarks in order of interest, until the time is up."""
    found, shaped = {}, []

    def shape():
        if not shaped:
            shaped.append(shaped_model(SHAPE, device=str(device)))
        return shaped[0]

    peers = () if random else ("transformers",)
    forced = ("backbone", "int4", f"river@fixed:{SHAPE_EXIT}")
    parts = {
        "model, captured layers": (lambda: model, METHODS, peers, False),
        f"{SHAPE}, captured layers": (shape, forced, (), False),
        "model, plain layers": (lambda: model, METHODS, (), True),
        f"{SHAPE}, plain layers": (shape, forced, (), True),
    }
    for part, (get, methods, others, plain) in parts.items():
        try:
            deadline()
            one = get()
            if one is None:
                found[part] = "not measured: there is no model"
            else:
                found[part] = measure(one, methods, others, plain, deadline)
        except OutOfTime:
            found[part] = f"not measured: {deadline.seconds:.0f} s are over"
        except (InputError, LoadError, RuntimeError) as error:
            found[part] = f"not measured: {str(error).splitlines()[0][:300]}"
        report(f"\n{part}\n{found[part] if isinstance(found[part], str) else format_bench(found[part])}")
    return found


def measure(model, methods, peers=(), plain=False, deadline=lambda line: None, tokens: int = 64, repeats: int = 3) -> dict:
    """`bench` with captured or with plain layers; `deadline` is called with every line of progress and may raise."""
    options = {"methods": methods, "tokens": tokens, "repeats": repeats, "peers": peers, "report": deadline}
    if not plain:
        return bench(model, **options)
    with model.plain_layers():
        return bench(model, **options)
