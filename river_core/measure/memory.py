"""Memory of every method against context length, and what offloading the backbone costs in speed.

Every figure says how it is known. "measured": the system counted the pages that are in memory (see `offload.resident_bytes`); "allocated": on a GPU; "computed": from
the sizes of the model, where the machine cannot hold it or the system does not say; "paper": as published, for the one shape that it was published for.

A row counts weights and KV cache. What a process holds beside them (libraries, the rotary table, states of a prompt) is told apart, under "beside": the peak of a process,
which the paper publishes, has it, and a sum of parts has not.
"""

from dataclasses import dataclass, replace

import psutil
import torch

from river_core.decoder import DecoderConfig
from river_core.errors import InputError
from river_core.generate import compare
from river_core.kernels import Dense, Int4, KernelPlan, int4_misfit
from river_core.loading import available_memory
from river_core.measure.speed import PROMPT, lane_alone, settle, spread, turns
from river_core.model import offload_folder
from river_core.offload import PRODUCTS, ROOM, check_offload, offloaded, resident_bytes
from river_core.strategies import prompt_bytes
from river_core.trace import Trace

CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536)
MARGIN = 0.7  # share of the available memory that a measurement may take
GIB = 1 << 30
# Peak memory at 64K, in the paper's table. Its "GB" are 2^30 bytes: weights and KV cache of this shape are 22.96 of those.
PAPER = {"llama3.1-8b": {65536: {"backbone": 22.96, "river, offloaded": 14.73, "int4": 12.47}}}
PARTS = ("backbone", "river", "head", "kv")
NEEDS_OF = {
    "backbone": "backbone, head, cache",
    "int4": "river, head, cache: what it needs where the prompt goes through the twins too (--prefill sequence); this program holds the backbone beside it all the same, "
    "or with --offload-after 0 room for two of its layers",
    "river": "backbone, river, head, cache",
    "river, offloaded": "the layers that stay, room for two, river, head, cache",
    "masking": "backbone, head, the share of the cache that this method filled on the prompt below; its cache is allocated whole all the same",
}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts.

    layer: one backbone layer. layers: how many there are. river: all twins. head: LM head, its screen, and the embedding where it is not the head.
    kv_token: keys and values of one position in all layers. rope_token: its cosines and sines, of which all lanes share one table.
    config: of the model, for what reading a prompt takes. many: bytes of the backbone that are second copies, in the dtype of products of many rows.
    how: how `layer`, `river` and `head` are known.
    """

    layer: float
    layers: int
    river: int
    head: int
    kv_token: int
    rope_token: int
    config: DecoderConfig
    many: int = 0
    how: str = "computed"

    def backbone(self, after: int | None = None) -> float:
        """All layers; or those that stay if the others are offloaded, and room for the ones that come back."""
        return self.layer * (self.layers if after is None else after + min(ROOM, self.layers - after))


def computed_sizes(c: DecoderConfig, plan: KernelPlan, tied: bool, screened: bool = False, in_blocks: bool = False) -> Sizes:
    """From a model's sizes alone; nothing is allocated. Biases and norms, some thousandths, are left out.

    Args:
        plan: dtypes, kernel and groups of the products. tied: the embedding is the head. screened: the head has its 8-bit copy.
        in_blocks: 4-bit codes are held once, for compiled code (see `Int4.adopt`), not for ATen's kernel and once more for many rows.
    """
    wide, itemsize = c.num_attention_heads * c.head_dim, plan.dtype.itemsize
    shapes = [
        (wide + 2 * c.num_key_value_heads * c.head_dim, c.hidden_size), (c.hidden_size, wide),
        (2 * c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size),
    ]  # fmt: skip
    head = c.vocab_size * c.hidden_size
    return Sizes(
        layer=sum(rows * columns for rows, columns in shapes) * itemsize,
        layers=c.num_hidden_layers,
        river=c.num_hidden_layers * sum(_twin_bytes(*shape, plan, in_blocks) for shape in shapes),
        head=head * itemsize * (1 if tied else 2) + (head + 16 * c.vocab_size if screened else 0),
        kv_token=c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim * plan.kv_dtype.itemsize,
        rope_token=c.head_dim * 4,
        config=c,
    )


def _twin_bytes(rows: int, columns: int, plan: KernelPlan, in_blocks: bool) -> int:
    """Bytes of one river product, as `KernelPlan.river_layer` lays it out."""
    group = plan.group_size or columns
    if plan.river == "int4" and int4_misfit(rows, columns, plan.bits, group, plan.device) is None:
        return rows * columns // (2 if in_blocks else 1) + 4 * rows * (columns // group)  # codes; scales and shifts
    if plan.river == "int8" and group == columns:
        return rows * columns + 6 * rows
    return rows * columns * plan.dtype.itemsize


def measured_sizes(model) -> Sizes:
    """Of a loaded plain model, counted in memory."""
    decoder = model.decoder
    c, tied = model.config, decoder.embedding is decoder.lm_head.weight
    known = computed_sizes(c, model.plan, tied, decoder.screen is not None, model.products.get("river") == "ours")
    known = replace(known, rope_token=decoder.rope.position_bytes)
    backbone, how = resident_bytes(_tensors(decoder.blocks))
    river, _ = resident_bytes(_tensors(model.river.blocks))
    screen = [] if decoder.screen is None else decoder.screen.tensors
    head, _ = resident_bytes([decoder.lm_head.weight, *screen, *([] if tied else [decoder.embedding])])
    products = (getattr(block, name) for block in decoder.blocks for name in PRODUCTS)
    many, _ = resident_bytes([p._many for p in products if isinstance(p, Dense) and p._many is not None])
    return replace(known, layer=backbone / known.layers, river=river, head=head, many=many, how=how)


def beside(sizes: Sizes, contexts, model=None) -> dict:
    """What no row of `table` counts, JSON-ready: bytes.

    Args:
        model: a loaded one, whose process is looked at; None = a shape that is only computed.

    Returns:
        context, the longest; rope: the rotary table for it; prompt: what reading a prompt of that length takes until it has ended; both computed.
        many: second copies of the backbone's weights, within the column "backbone". process: of all that is in memory for this process now, measured by the system, and
        rest: of that, what is not weights: Python, PyTorch, transformers, the tokenizer, what the allocator keeps. Both None without a model; rest None on a GPU.
    """
    longest = max(contexts)
    found = {
        "context": longest, "rope": sizes.rope_token * longest, "prompt": prompt_bytes(sizes.config, longest), "many": sizes.many,
        "process": None, "rest": None,
    }  # fmt: skip
    if model is not None:
        found["process"] = psutil.Process().memory_info().rss
        if model.plan.device.type == "cpu":
            found["rest"] = max(0, found["process"] - round(sizes.backbone() + sizes.river + sizes.head))
    return found


def _tensors(blocks):
    """The weights of some blocks, copies for products of many rows included."""
    for block in blocks:
        for name in PRODUCTS:
            product = getattr(block, name)
            if isinstance(product, Dense):
                held = (product.weight, product._many)
            elif isinstance(product, Int4):
                held = product.tensors
            else:
                held = (product.weight, product.scales, product.shifts)
            yield from (tensor for tensor in held if tensor is not None)


def shape_sizes(config, dtype: torch.dtype, bits: int, group_size: int) -> Sizes:
    """Of a published shape, from its config: a river as compiled code on a CPU holds it, a cache in the dtype of the weights."""
    plan = KernelPlan(torch.device("cpu"), dtype, dtype, dtype, "int4" if bits == 4 else "int8", bits, group_size if bits == 4 else None)
    return computed_sizes(DecoderConfig.from_transformers(config), plan, config.tie_word_embeddings, in_blocks=True)


def table(sizes: Sizes, after: int, contexts, caches=None, share: float | None = None, stays=None, paper=None) -> list[dict]:
    """Memory by method and context length: rows {method, context, backbone, river, head, kv, total, how, prompt, rope, paper}, bytes.

    Args:
        sizes: of the parts. after: layers that stay where the others are offloaded. contexts: lengths in tokens.
        caches: context -> (bytes, how) of a cache that was allocated and filled; others are computed.
        share: of the slots of a decoded position that KV masking filled; None = no row for it.
        stays: (bytes, how) of an offloaded backbone at its fullest; None = computed.
        paper: context -> method -> published figure, in 2^30 bytes.

    `prompt` comes on top while the engine reads a prompt of that length, and goes with it; `rope`, the rotary table that all lanes share, stays. Neither is in `total`, nor in
    the paper's figures.
    """
    rows = []
    part, part_how = stays or (sizes.backbone(after), "computed")
    for context in contexts:
        kv, kv_how = (caches or {}).get(context) or (sizes.kv_token * context, "computed")
        for method in NEEDS_OF:
            if method == "masking" and share is None:
                continue
            away = method == "river, offloaded"
            parts = {
                "backbone": 0 if method == "int4" else part if away else sizes.backbone(),
                "river": sizes.river if method in ("int4", "river", "river, offloaded") else 0,
                "head": sizes.head,
                "kv": kv * share if method == "masking" else kv,
            }
            how = {
                "backbone": part_how if away else sizes.how,
                "river": sizes.how,
                "head": sizes.how,
                "kv": "computed" if method == "masking" else kv_how,
            }
            used = {how[name] for name in PARTS if parts[name]}
            parts = {name: round(size) for name, size in parts.items()}
            rows.append(
                {
                    "method": method, "context": context, **parts, "total": sum(parts.values()),
                    "how": how | {"total": used.pop() if len(used) == 1 else "computed"},
                    "prompt": prompt_bytes(sizes.config, context), "rope": sizes.rope_token * context, "paper": (paper or {}).get(context, {}).get(method),
                }
            )  # fmt: skip
    return rows


def fullest(model) -> tuple[float, str]:
    """(bytes, how) of a backbone with offloaded layers in memory while one of them runs and the next one has arrived."""
    blocks, offload = model.decoder.blocks, model.decoder.blocks.offload
    stay, how = resident_bytes(_tensors(blocks[: blocks.resident]))
    if offload is None:
        return stay, how
    first = offload.after
    with blocks.at(first, following=first + 1 < len(blocks)):
        if first + 1 < len(blocks):
            offload.store.ready(first + 1, PRODUCTS)
        back, how = offload.store.resident_bytes()
    if first + 1 < len(blocks):
        offload.store.release(first + 1, PRODUCTS)
    return stay + (back if how != "computed" else offload.most_bytes), how


def measured_caches(model, contexts, report) -> dict[int, tuple[int, str]]:
    """Context -> (bytes, how) of a lane's cache, allocated and filled one after another; lengths that the machine cannot hold are left out."""
    found = {}
    for context in contexts:
        free, needed = available_memory(), model.kv_slot_bytes * model.config.num_hidden_layers * context
        if model.plan.device.type == "cuda":
            free = torch.cuda.mem_get_info(model.plan.device)[0]
        if free is None or needed > MARGIN * free:
            continue
        report(f"a cache of {context} positions")
        cache = model.decoder.new_cache(context)
        cache.keys_values.fill_(1)  # memory that nobody wrote to is not there yet
        found[context] = resident_bytes([cache.keys_values])
    return found


def masking_share(model, tokens: int, report) -> float:
    """Share of the slots of decoded positions that KV masking fills with the model's own threshold."""
    report("masking")
    lane = Trace.from_events(compare(model, PROMPT, ("masking",), max_new_tokens=tokens)).lanes["masking"]
    filled = sum(last - first for token in lane.steps for first, last, owner, _ in token["kv"] if owner != "none")
    return filled / (len(lane.steps) * model.config.num_hidden_layers) if lane.steps else 1.0


def cost(plain, other, methods, tokens: int, repeats: int, report) -> dict:
    """Decode speed with and without offloading: the same prompt, the two ways in turn.

    Args:
        plain: a loaded model. other: the same with offloaded layers, see `offload.offloaded`.
        methods: names as for `compare`. repeats: rounds after one warm-up round.

    Returns:
        dict by method: label, tokens_per_second of both ways, ratio (offloaded over plain, within a round), each {median, min, max}; mean_depth; fetched: layers and
        bytes brought back per token; prompt_fetched: layers for the prompt; prefill_s of both ways; same_tokens: whether both wrote the same text.
    """
    rounds: dict[str, list[dict]] = {method: [{} for _ in range(repeats + 1)] for method in methods}
    models = {"plain": plain, "offloaded": other}
    started = -1
    for index, (method, way) in turns([(method, way) for method in methods for way in models], repeats):
        if index > started:
            started = index
            report("warm-up" if index == 0 else f"round {index} of {repeats}")
        header, lane = lane_alone(models[way], PROMPT, method, tokens)
        if lane.tokens_per_second is None:
            raise InputError(f"{method} wrote no second token; there is nothing to measure. {lane.end['message'] or ''}".strip())
        rounds[method][index] |= {way: lane, "label": header["lanes"][0]["label"]}
    return {method: _cost_of(found[1:]) for method, found in rounds.items()}


def _cost_of(rounds) -> dict:
    last = rounds[-1]
    return {
        "label": last["label"],
        "plain": spread([r["plain"].tokens_per_second for r in rounds]),
        "offloaded": spread([r["offloaded"].tokens_per_second for r in rounds]),
        "ratio": spread([r["offloaded"].tokens_per_second / r["plain"].tokens_per_second for r in rounds]),
        "prefill_s": {way: spread([r[way].prefill["t_ns"] / 1e9 for r in rounds]) for way in ("plain", "offloaded")},
        "mean_depth": last["plain"].mean_depth,
        "fetched": last["offloaded"].fetched,
        "prompt_fetched": last["offloaded"].tokens[0].get("fetched"),
        "same_tokens": all(r["plain"].token_ids == r["offloaded"].token_ids for r in rounds),
    }  # fmt: skip


def default_depth(layers: int) -> int:
    """Layers that stay unless it is said: a quarter, beyond which River's tokens seldom go."""
    return max(1, layers // 4)


def memory(model, after=None, contexts=CONTEXTS, methods=("backbone", "int4", "river"), tokens=64, repeats=3, report=print) -> dict:
    """Measure a loaded plain model: memory by method and context length, and the cost of offloading.

    Args:
        model: from `load` without offloading. after: layers that stay; None = `default_depth`.
        contexts: lengths in tokens. methods: of the cost, names as for `compare`; none = it is left out. tokens, repeats: of the cost.
        report: called with a line about what is being done.

    Returns:
        dict, JSON-ready: model, device, after, layers, rows (see `table`), needs (what each method holds), masking_share, offload (bytes away, and of them in
        memory when nothing runs), beside, cost (see there).

    Raises:
        InputError: a depth or a length that cannot be used.
    """
    report("waiting for compiled layers")
    settle(model)
    after = _depth(after, model.config.num_hidden_layers, model.plan.device)
    _check(contexts, repeats, tokens)
    # A prompt pass first: copies of the weights for products of many rows belong to the backbone.
    share = masking_share(model, tokens, report)
    sizes = measured_sizes(model)
    apart = beside(sizes, contexts, model)
    other = offloaded(model, after, offload_folder())
    settle(other)
    measured = cost(model, other, methods, tokens, repeats, report) if methods else {}
    facts = model.describe()
    return {
        "model": facts["model"], "device": facts["device"], "device_name": facts["device_name"], "threads": facts["threads"], "dtype": facts["dtype"],
        "kv_dtype": facts["kv_dtype"], "river_kernel": facts["river_kernel"], "layers_run": facts["layers"],
        "after": after, "layers": sizes.layers, "needs": NEEDS_OF, "masking_share": share, "beside": apart,
        "rows": table(sizes, after, contexts, measured_caches(model, contexts, report), share, fullest(other)),
        "offload": other.decoder.blocks.offload.describe() if other.decoder.blocks.offload else None,
        "cost": measured, "tokens": tokens, "repeats": repeats,
    }  # fmt: skip


def memory_of_shape(shape: str, config, dtype: torch.dtype, after=None, contexts=CONTEXTS, bits=4, group_size=64) -> dict:
    """The same of a published shape, computed from its config: nothing is allocated, and nothing is timed."""
    after = _depth(after, config.num_hidden_layers, torch.device("cpu"))
    _check(contexts)
    sizes = shape_sizes(config, dtype, bits, group_size)
    return {
        "model": shape, "device": None, "device_name": None, "dtype": str(dtype).removeprefix("torch."), "after": after, "layers": sizes.layers,
        "needs": NEEDS_OF, "masking_share": None, "beside": beside(sizes, contexts), "rows": table(sizes, after, contexts, paper=PAPER.get(shape)), "offload": None, "cost": {},
    }  # fmt: skip


def _depth(after, layers, device):
    after = default_depth(layers) if after is None else after
    check_offload(after, layers, device)
    return after


def _check(contexts, repeats=1, tokens=2):
    if not contexts or any(not 1 <= context <= 1 << 24 for context in contexts):
        raise InputError("Context lengths are whole numbers from 1 on, such as 1024,65536.")
    if repeats < 1 or tokens < 2:
        raise InputError("The cost needs at least one round and two tokens; --methods none leaves it out.")


def format_memory(result: dict) -> str:
    """The result as text; sizes in GiB (2^30 bytes)."""
    card = [
        result["model"],
        result["device_name"],
        f"weights {result['dtype']}",
        f"{result['after']} of {result['layers']} layers stay where others are offloaded",
    ]
    lines = [" · ".join(part for part in card if part), "GiB (2^30 bytes); in brackets how it is known", ""]
    lines.append(f"{'context':>8}  {'method':<18}{'backbone':>10}{'river':>9}{'head':>9}{'KV cache':>10}{'together':>11}")
    for row in result["rows"]:
        paper = f"   paper: {row['paper']:.2f}" if row["paper"] else ""
        parts = "".join(
            f"{row[part] / GIB:>{width}.3f}" for part, width in (("backbone", 10), ("river", 9), ("head", 9), ("kv", 10), ("total", 11))
        )
        known = row["how"]["total"] if len(set(row["how"].values())) == 1 else f"weights {row['how']['backbone']}, cache {row['how']['kv']}"
        lines.append(f"{row['context']:>8}  {row['method']:<18}{parts}  ({known}){paper}")
    lines += [
        "",
        *(f"{method}: {needs}" for method, needs in result["needs"].items() if any(row["method"] == method for row in result["rows"])),
        "",
        *_beside_lines(result["beside"]),
    ]
    if result["offload"]:
        away = result["offload"]
        lines.append(
            f"offloaded to {away['to']}: {away['layers']} layers, {away['bytes'] / GIB:.3f} GiB, of which {away['resident_bytes'] / GIB:.3f} in memory when nothing "
            f"runs ({away['how']})"
        )
    if any(row["paper"] for row in result["rows"]):
        lines.append(
            "paper: peak memory of a process as published, so with all that is not in the rows beside it; how many layers stayed there is not known. A row that equals it "
            "says that weights and cache explain the figure, not that a process here would need no more"
        )
    return "\n".join([*lines, *_cost_lines(result)])


def _beside_lines(apart):
    yield (
        f"not in the table: at {apart['context']} positions the rotary table, {apart['rope'] / GIB:.3f} (computed), and while a "
        f"prompt of that length is read another {apart['prompt'] / GIB:.3f} (computed)"
    )
    if apart["process"] is not None:
        rest = (
            ""
            if apart["rest"] is None
            else f", of which {apart['rest'] / GIB:.3f} are neither weights nor a cache: Python, PyTorch, transformers, the tokenizer"
        )
        yield f"this process holds {apart['process'] / GIB:.3f} in memory after a short run (measured){rest}"
    if apart["many"]:
        yield f"of the backbone {apart['many'] / GIB:.3f} are a second copy of its weights, in the dtype in which prompts are faster (measured)"


def _cost_lines(result):
    if not result["cost"]:
        return
    yield f"\nspeed, {result['repeats']} rounds of up to {result['tokens']} tokens, the two ways in turn; median (least - greatest)"
    yield f"  {'':<24}{'plain':>9}{'offloaded':>11} tokens/s   {'ratio':<22}{'layers back per token':>22}{'depth':>8}  same tokens"
    for one in result["cost"].values():
        ratio, fetched = one["ratio"], one["fetched"] or {"layers": 0, "bytes": 0}
        words = f"{ratio['median']:.2f}x ({ratio['min']:.2f} - {ratio['max']:.2f})"
        yield (
            f"  {one['label']:<24}{one['plain']['median']:>9.1f}{one['offloaded']['median']:>11.1f}            {words:<22}"
            f"{fetched['layers']:>9.2f}, {fetched['bytes'] / 1e6:>6.1f} MB{one['mean_depth']:>10.1f}  {'yes' if one['same_tokens'] else 'no'}"
        )
