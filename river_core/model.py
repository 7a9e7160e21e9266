"""A loaded model: backbone, river, tokenizer, and what is known of them. Shared by all lanes and never changed by one."""

import dataclasses
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from river_core.decoder import Blocks, Decoder, DecoderConfig, check_supported, rms_norm
from river_core.default_model import NAME
from river_core.errors import InputError, LoadError
from river_core.graphs import CudaCapture, GraphStack, Workspaces
from river_core.kernels import Dense, Int4, KernelPlan, choose_kernels, time_on_one_core
from river_core.kv_cache import BACKBONE, RIVER, KVCache
from river_core.loading import available_memory, bytes_to_load, cache_dir, load_checkpoint, need_memory
from river_core.native import NATIVE
from river_core.native.isa import wanted_isa
from river_core.offload import ROOM, check_offload, make_offload, trim_heap
from river_core.river import River
from river_core.screening import Screen

# Found by looking at similarities of the default model; other models get the paper's values, which nobody calibrated for them.
DEFAULT_MODEL_TAUS = {"fast": 0.95, "balanced": 0.97, "careful": 0.98}
PAPER_TAUS = {"fast": 0.5, "balanced": 0.7}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PRODUCTS = {"ours": "ours", "aten": "ATen's"}  # of compiled layers: as `load` takes them, and as they are called in reports
PROMPT = 64  # positions over which other code is compared with the plain layers before it is used, and
COMPARED = 4  # layers: enough for attention in several chunks, few enough that rounding has not grown yet


@dataclass
class Model:
    """What `load` returns.

    name: short name for people. source: "default", "hub", "folder" or "gguf". revision, sha256: of the weights, where known.
    tokenizer: a transformers tokenizer. eos_token_ids: any of them ends an answer. notes: sentences for the user.
    load_seconds: by stage.
    """

    name: str
    source: str
    decoder: Decoder
    river: River
    tokenizer: object
    eos_token_ids: frozenset[int]
    revision: str | None = None
    sha256: str | None = None
    path: Path | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    load_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    compiled: bool | None = False  # None: compiled or captured layers are wanted and may come yet; False: not wanted, or not possible
    head_reason: str = ""
    products: dict[str, str] = dataclasses.field(default_factory=dict)  # of compiled layers, by stack: "ours" or "ATen's"
    product_reasons: list[str] = dataclasses.field(default_factory=list)
    screens: bool | str = (
        False  # with compiled code, the LM head of greedy lanes is screened: always, never, or ("auto") where that is faster
    )
    products_wanted: str = "auto"  # "ours" or "aten": asked for instead of measured

    def compile(self, wait: bool = False) -> bool:
        """Swap in compiled layers once they are ready (on a CPU, see `river_core.native`) or captured ones (on a GPU, see `river_core.graphs`); asked between runs.
        Returns whether they are in use.

        Args:
            wait: for a compiler that is still at work; measurements do, decoding does not.
        """
        if self.compiled is None and self.plan.device.type == "cuda":
            self.capture_layers(lambda: CudaCapture(self.plan.device))
        elif self.compiled is None:
            ready = NATIVE.wait() if wait else NATIVE.state == "ready"
            if NATIVE.wrong:
                self.compiled = False
                self.notes.append(NATIVE.wrong)
            elif ready:
                self.compiled = self._attach(self._compiled, "Compiled")
            if self.compiled:
                self.decoder.lookup = torch.ops.river_native.embed.default
                if self.screens:
                    self._screen_head()
        return bool(self.compiled)

    def capture_layers(self, make_capture) -> bool:
        """Capture runs of layers of one row, if that works and agrees with the plain path; else a note says what happened. Returns whether they are in use.

        Args:
            make_capture: () -> what `GraphStack` captures with.
        """
        decoder = self.decoder
        try:
            capture = make_capture()

            def captured(blocks):
                stack = GraphStack(decoder, blocks, capture, measures=blocks is decoder.blocks)
                return blocks, stack, _bound(blocks, False, self.plan.kv_dtype), lambda: stack

            self.compiled = self._attach(captured, "Captured")
        except RuntimeError as error:
            self._detach()
            self.compiled = False
            self.notes.append(
                f"Layers could not be captured as CUDA graphs ({str(error).splitlines()[0][:200]}); they run operation by operation."
            )
        if self.compiled:
            decoder.workspaces = Workspaces(self.config, self.plan.kv_dtype, decoder.device)
        return self.compiled

    @contextmanager
    def plain_layers(self):
        """Within this, layers run operation by operation whatever is in use otherwise; for comparisons between runs."""
        stacks, compiled, workspaces = [blocks.stack for blocks in self._stacked], self.compiled, self.decoder.workspaces
        self._detach()
        self.compiled = False
        try:
            yield
        finally:
            for blocks, stack in zip(self._stacked, stacks, strict=True):
                blocks.stack = stack
            self.compiled, self.decoder.workspaces = compiled, workspaces

    @property
    def _stacked(self):
        return self.decoder.blocks, self.river.blocks

    def _detach(self):
        for blocks in self._stacked:
            blocks.stack = None
        self.decoder.workspaces = None

    def _screen_head(self) -> None:
        """Screen the LM head if that is asked for or faster here; in float32, the exact mode, only if it is asked for."""
        head, device = self.decoder.lm_head, self.plan.device
        if not isinstance(head, Dense) or head.bias is not None or device.type != "cpu":
            return
        if self.screens == "auto" and head.dtype == torch.float32:
            return
        screen = Screen(head.weight)
        head.ours = True  # the full head multiplies as the screened one does, so that a token cannot hang on which of them ran
        if self.screens is True:
            self.decoder.screen, self.head_reason = screen, "LM head of greedy lanes: screened in 8 bits, asked for"
            return
        # A state that the model makes: on noise hardly any row could be ruled out.
        with torch.inference_mode():
            hidden = self.decoder.forward([0], 0, self.decoder.new_cache(1))
        norm, eps = self.decoder.final_norm, self.config.rms_norm_eps
        x = rms_norm(hidden, norm, eps, head.dtype)
        full_us, screened_us = time_on_one_core([head] * 9, x), time_on_one_core([lambda state: screen(state, norm, eps)] * 9, hidden)
        self.head_reason = f"LM head of greedy lanes: {screened_us:.0f} us screened in 8 bits, {full_us:.0f} us in full, on one core"
        if screened_us < full_us:
            self.decoder.screen = screen

    def _attach(self, choose, kind: str) -> bool:
        """Give both stacks of blocks other code, if what it makes of a prompt agrees with the plain ones.

        Args:
            choose: (blocks) -> some of them for the comparison, the code for those, the distance that it may have, and a callable that makes the code for all;
                None = it cannot run them.
            kind: for the note that says that they did not agree.
        """
        makers = []
        for blocks, owner in zip(self._stacked, (BACKBONE, RIVER), strict=True):
            chosen = choose(blocks)
            if chosen is None:
                continue
            some, stack, bound, for_all = chosen
            with torch.inference_mode():
                apart = self._apart(some, owner, stack)
            if not apart < bound:
                self.notes.append(f"{kind} layers were {apart:.1e} away from the plain ones, more than {bound:.0e}, and are not used.")
                return False
            makers.append((blocks, for_all))
        for blocks, for_all in makers:
            blocks.stack = for_all()
        return bool(makers)

    def _apart(self, blocks, owner, code) -> float:
        """How far the states that `code` makes of a prompt, position by position, are from those of the plain layers with exact products: the distance of the
        row that is farthest off, relative to its length."""
        decoder, last = self.decoder, min(COMPARED, len(blocks))
        # Some kinds of rope turn a position otherwise once the text is longer than this.
        longest = decoder.rope.parameters.get("original_max_position_embeddings") or PROMPT
        count = min(PROMPT, self.context_length, longest)
        ids = [(7 + 31 * i) % self.config.vocab_size for i in range(count)]
        exact = [
            dataclasses.replace(block, **{name: _Exact(getattr(block, name)) for name in ("qkv", "o", "gate_up", "down")})
            for block in blocks[:last]
        ]
        cache = _RoundedCache(self.config, count, self.plan.kv_dtype, decoder.device)
        plain = decoder.run_blocks(exact, 0, last, decoder.embed(ids), decoder.rows(0, count, cache), cache, owner)[-1]
        cache, states = decoder.new_cache(count), []
        blocks.stack = code
        try:
            for position, token in enumerate(ids):
                rows, hidden = decoder.rows(position, 1, cache), decoder.embed([token])
                states.append(decoder.run_blocks(blocks, 0, last, hidden, rows, cache, owner)[-1])
        finally:
            blocks.stack = None
        return float(((torch.cat(states) - plain).norm(dim=1) / plain.norm(dim=1)).max())

    def _compiled(self, blocks):
        """Compiled code for `_attach`, with the faster kind of products on this machine."""
        some = Blocks(blocks[: max(1, min(_from_memory(blocks), blocks.resident))])
        kinds = PRODUCTS.values() if self.products_wanted == "auto" else (PRODUCTS[self.products_wanted],)
        stacks = {kind: stack for kind in kinds if (stack := NATIVE.stack(self.decoder, some, kind == "ours")) is not None}
        name = "backbone" if blocks is self.decoder.blocks else "river"
        if not stacks:
            if self.products_wanted != "auto":
                self.product_reasons.append(
                    f"{name} products: {kinds[0]} were asked for and cannot multiply these weights; layers run operation by operation"
                )
            return None
        if self.products_wanted == "auto":
            took = {kind: _products_us(stack, len(some)) for kind, stack in stacks.items()}
            kind = min(took, key=took.get)
            reason = f"{name} products: {kind}; a layer takes {_table_us(took)}, on one core"
        else:
            (kind,), reason = stacks, f"{name} products: {kinds[0]}, asked for"

        def for_all():
            self.products[name] = kind
            self.product_reasons.append(reason)
            if kind == "ours":
                self._adopt(blocks)
            return NATIVE.stack(self.decoder, blocks, kind == "ours")

        return some, stacks[kind], _bound(blocks, kind == "ours", self.plan.kv_dtype), for_all

    def _adopt(self, blocks):
        for block in blocks:
            for product in (block.qkv, block.o, block.gate_up, block.down):
                if isinstance(product, Int4):
                    product.adopt()
        head = self.decoder.lm_head
        if blocks is self.decoder.blocks and isinstance(head, Dense):
            head.ours = True

    @property
    def config(self):
        """The `DecoderConfig`."""
        return self.decoder.config

    @property
    def plan(self) -> KernelPlan:
        return self.decoder.plan

    @property
    def context_length(self) -> int:
        """Positions that the model was made for."""
        return self.config.max_position_embeddings

    @property
    def kv_slot_bytes(self) -> int:
        """Bytes of the keys and values of one layer at one position."""
        return 2 * self.config.num_key_value_heads * self.config.head_dim * self.plan.kv_dtype.itemsize

    @property
    def backbone_bytes(self) -> int:
        """Bytes of the backbone's layers in memory: all of them, or those that stay and room for the offloaded ones that are brought back."""
        blocks = self.decoder.blocks
        return sum(block.nbytes for block in blocks[: blocks.resident]) + (blocks.offload.most_bytes if blocks.offload else 0)

    @property
    def calibrated(self) -> bool:
        """Whether the presets of tau were chosen on this very model."""
        return self.source == "default"

    @property
    def tau_presets(self) -> dict[str, float]:
        return dict(DEFAULT_MODEL_TAUS if self.calibrated else PAPER_TAUS)

    @property
    def default_tau(self) -> float:
        return self.tau_presets["balanced"]

    def describe(self) -> dict:
        """Everything that a speed figure depends on, JSON-ready: device, dtypes, kernels and why, sizes, place of the cache."""
        plan, config = self.plan, self.config
        river = self.river.blocks[0]
        kinds = [(name, type(getattr(river, name)).__name__.lower()) for name in ("qkv", "o", "gate_up", "down")]
        return {
            "model": self.name,
            "source": self.source,
            "path": str(self.path) if self.path else None,
            "revision": self.revision,
            "sha256": self.sha256,
            "architecture": config.model_type,
            "n_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "context_length": self.context_length,
            "device": str(plan.device),
            "device_name": device_name(plan.device),
            "threads": torch.get_num_threads(),
            "dtype": str(plan.dtype).removeprefix("torch."),
            "kv_dtype": str(plan.kv_dtype).removeprefix("torch."),
            "prefill_dtype": str(plan.many_dtype).removeprefix("torch."),
            "head": "screened in 8 bits for greedy lanes" if self.decoder.screen else "full",
            "layers": "operation by operation" if not self.compiled else "captured as CUDA graphs" if self.captured else "compiled",
            "products": dict(self.products),
            "river_kernel": plan.river,
            "native": {"state": NATIVE.state, "isa": NATIVE.isa, "compiler": NATIVE.compiler},
            "pinned": self.pinned,
            "river_products": dict(kinds),
            "quantiser": self.quantiser(),
            "reasons": [
                *plan.reasons,
                self._layers_reason(),
                *self.product_reasons,
                *([self.head_reason] if self.head_reason else []),
            ],
            "measured_us": {name: round(us, 1) for name, us in plan.measured_us.items()},
            "backbone_bytes": self.backbone_bytes,
            "offload": self.decoder.blocks.offload.describe() if self.decoder.blocks.offload else None,
            "river_bytes": self.river.nbytes,
            "head_bytes": self.decoder.lm_head.nbytes + (self.decoder.screen.nbytes if self.decoder.screen else 0),
            "rope_bytes": self.decoder.rope.nbytes,
            "load_seconds": {stage: round(seconds, 2) for stage, seconds in self.load_seconds.items()},
            "cache": str(cache_dir()),
            "notes": list(self.notes),
        }

    @property
    def captured(self) -> bool:
        """Whether layers are captured (on a GPU), rather than compiled."""
        return isinstance(self.decoder.blocks.stack, GraphStack)

    @property
    def pinned(self) -> list[str]:
        """What was asked for by an option or by the environment; the rest of what `describe` reports was measured, or follows from the machine."""
        asked = {
            **dict.fromkeys(self.plan.pinned, True),
            "products": self.products_wanted != "auto",
            "head": self.screens != "auto",
            "layers": self.compiled is False and NATIVE.state == "off",
            "isa": self.plan.device.type == "cpu" and wanted_isa() != "auto",
        }
        return [name for name, by_someone in asked.items() if by_someone]

    def _layers_reason(self) -> str:
        if self.compiled is False and NATIVE.state != "failed":
            return "Compiled layers are switched off."
        if self.captured:
            return "Runs of layers of one row are captured as CUDA graphs."
        if self.plan.device.type == "cuda":
            return "Layers will be captured as CUDA graphs when the first run begins; until then they run operation by operation."
        return NATIVE.reason

    def quantiser(self) -> dict:
        """How the river was made."""
        return {"name": "hqq", "bits": self.plan.bits, "group_size": self.plan.group_size or "row", "axis": 1}


def load(
    name: str | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    bits: int = 4,
    group_size: int = 64,
    threads: int | None = None,
    river_kernel: str = "auto",
    compiled: bool = True,
    products: str = "auto",
    screen_head: bool | str = "auto",
    offload_after: int | None = None,
    progress=None,
) -> Model:
    """Load a model, quantise its river, and choose kernels for this machine.

    What is "auto" is chosen by short measurements, so two starts may choose differently, and their numbers differ in their last bits then; `Model.describe` says
    what was chosen and why. A run that is to be repeated exactly names dtype, kv_dtype, river_kernel, products and screen_head, and the number of threads; on another
    processor the environment variable RIVER_ISA too (see `river_core.native.isa`).

    Args:
        name: None = the packaged default model; a hub id, a local folder, or a .gguf file otherwise.
        device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1", "mps".
        dtype: "auto" measures; "float16", "bfloat16" or "float32" (exact mode, where the river multiplies dequantised float32 weights).
        kv_dtype: of the KV cache; "auto" is that of `dtype`, or measured where that is float16 on a CPU.
        bits: of the river, 4 (default) or 8.
        group_size: inputs of one row that share a scale: 32, 64 (default) or 128. The largest that divides the model's sizes is taken where
            it does not, with a note.
        threads: CPU threads; None = the cores that this process may really use.
        river_kernel: "auto" measures; "int4", "int8", "dequantised".
        compiled: on a CPU, compile the layers in the background where there is a compiler, and use them from the first run after that; on an NVIDIA GPU, capture them as
            CUDA graphs.
        products: of compiled layers on a CPU: "ours" (this project's loops), "aten" (PyTorch's kernels), or "auto", which measures.
        screen_head: with compiled code on a CPU, find the greedy token by 8-bit scores and exact rows (see `screening`): True, False, or "auto", where that is
            faster.
        offload_after: keep only the first so many backbone layers in memory, and bring the others back for tokens that need them (see `offload`); None
            and the number of layers: all stay.
        progress: callable (stage, fraction or None, message); stages "download", "convert", "weights", "kernels", "river", "ready".

    Returns:
        Model

    Raises:
        LoadError: no such model, an unsupported architecture, a damaged file, too little disk or memory.
        InputError: an option that is not one of the above.
    """
    report = progress or (lambda stage, fraction, message: None)
    for option, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if value != "auto" and value not in DTYPES:
            raise InputError(f"{option} must be auto, float16, bfloat16 or float32, not {value!r}.")
    if products not in ("auto", *PRODUCTS):
        raise InputError(f"products must be auto, ours or aten, not {products!r}.")
    if screen_head not in (True, False, "auto"):
        raise InputError(f"screen_head must be auto, True or False, not {screen_head!r}.")
    if bits not in (4, 8) or group_size not in (32, 64, 128):
        raise InputError(f"The river takes 4 or 8 bits and groups of 32, 64 or 128, not {bits} bits in groups of {group_size}.")
    if river_kernel not in ("auto", "int4", "int8", "dequantised"):
        raise InputError(f"river_kernel must be auto, int4, int8 or dequantised, not {river_kernel!r}.")
    target = resolve_device(device)
    wanted_isa()
    set_threads(threads)
    seconds: dict[str, float] = {}
    clock = _StageClock(seconds)

    def check(config):
        check_supported(config)
        if target.type == "cpu":
            sizes, layers = DecoderConfig.from_transformers(config), config.num_hidden_layers
            itemsize = 2 if dtype == "auto" else DTYPES[dtype].itemsize
            resident = layers if offload_after is None else min(layers, max(0, offload_after) + ROOM)
            keeps_codes = name is None or str(name).lower().endswith(".gguf")
            threads = torch.get_num_threads()
            need_memory(name or NAME, bytes_to_load(sizes, config.tie_word_embeddings, itemsize, bits, threads, keeps_codes, resident))

    checkpoint = load_checkpoint(name, progress=progress, check=check)
    clock.done("weights")
    config, notes = checkpoint.config, list(checkpoint.notes)
    check_offload(offload_after, config.num_hidden_layers, target)
    # Fused matrices have three input widths: d, the attention heads, and the intermediate size; groups must divide all of them.
    sizes = DecoderConfig.from_transformers(config)
    widths = (sizes.hidden_size, sizes.num_attention_heads * sizes.head_dim, sizes.intermediate_size)
    fitting = [g for g in (group_size, 64, 32, 16, 8) if g <= group_size and all(w % g == 0 for w in widths)]
    if bits == 4 and not fitting:
        raise LoadError(f"No group size divides the layer widths {widths} of this model, so its river cannot be quantised.")
    if fitting and fitting[0] != group_size:
        notes.append(f"Groups of {group_size} do not divide the layer widths of this model; groups of {fitting[0]} are used.")
        group_size = fitting[0]

    report("kernels", None, "measuring kernels on this machine")
    wanted, wanted_kv = (value if value == "auto" else DTYPES[value] for value in (dtype, kv_dtype))
    plan = choose_kernels(target, config.hidden_size, config.intermediate_size, wanted, bits, group_size, river_kernel, wanted_kv)
    # Prompts, recomputation and verification multiply many rows in a dtype of their own. Where memory is plentiful the weights are cast once.
    size = sum(tensor.numel() for tensor in checkpoint.weights.values()) * plan.many_dtype.itemsize
    available = available_memory()
    plan = dataclasses.replace(plan, keep_many=plan.many_dtype != plan.dtype and available is not None and 4 * size < available)
    clock.done("kernels")
    decoder = _build_decoder(checkpoint, plan, report, offload_after)
    if not _finite(decoder) and dtype == "auto" and plan.dtype == torch.float16:
        reason = "decode in bf16: this model's activations overflow fp16"
        kv = torch.bfloat16 if kv_dtype == "auto" else plan.kv_dtype
        plan = dataclasses.replace(plan, dtype=torch.bfloat16, many_dtype=torch.bfloat16, kv_dtype=kv, reasons=(reason, *plan.reasons[1:]))
        decoder = _build_decoder(checkpoint, plan, report, offload_after)
    clock.done("backbone")
    # Codes are kept from one start to the next only where it is certain what they are codes of.
    sha = checkpoint.sha256
    store = cache_dir() / "rivers" / f"{sha[:32]}-{bits}-{plan.group_size or 'row'}.safetensors" if sha else None
    river = River(
        decoder,
        checkpoint.weights,
        lambda f: report("river", f, f"building the {bits}-bit river, {round(100 * f)} %"),
        store,
        lambda: report("river", None, "waiting for another process that builds this river"),
    )
    clock.done("river")
    notes += offload_notes(decoder)
    if decoder.blocks.offload:
        checkpoint.weights = {}
        trim_heap()
    if compiled and target.type == "cpu":
        NATIVE.start(cache_dir() / "native")
    report("ready", 1.0, f"{checkpoint.name} is ready")
    return Model(
        name=checkpoint.name,
        source=checkpoint.source,
        decoder=decoder,
        river=river,
        tokenizer=checkpoint.tokenizer,
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
        revision=checkpoint.revision,
        sha256=checkpoint.sha256,
        path=checkpoint.path,
        notes=notes,
        load_seconds=seconds,
        compiled=None if compiled and target.type in ("cpu", "cuda") else False,
        screens=screen_head,
        products_wanted=products,
    )


def _from_memory(blocks) -> int:
    """How many blocks it takes until their weights cannot all sit in a cache; two at least."""
    return min(len(blocks), max(2, int(96e6 // blocks[0].nbytes) + 1))


class _Exact:
    """A product with the weights of another, multiplied in float32."""

    dtype = torch.float32

    def __init__(self, product):
        self.product = product

    def __call__(self, x):
        return F.linear(x.to(torch.float32), self.product.dense_weight(torch.float32), self.product.bias)


class _RoundedCache(KVCache):
    """Keys and values rounded to `dtype`, as any cache of that dtype holds them, and kept in float32, so that attention over them is exact."""

    def __init__(self, config, capacity, dtype, device):
        super().__init__(config, capacity, torch.float32, device)
        self.dtype = dtype

    def write(self, layer, slots, keys_values, owner):
        super().write(layer, slots, keys_values.to(self.dtype), owner)


def _bound(blocks, ours: bool, kv_dtype: torch.dtype) -> float:
    """How far states may be from those of exact products over a cache of the same dtype, relative to their length, after `COMPARED` layers.

    This project's products read inputs of 16 bits or more and sum in floats: some 1e-4. That little may round a key or value to the other side, a unit of the cache's
    dtype. Other products round inputs and outputs to their own dtype: some units of it. What attention makes of a wrong exponential is a hundred times as much.
    """
    unit = torch.finfo(kv_dtype).eps
    if not ours:
        unit = 4 * max(unit, *(torch.finfo(getattr(blocks[0], name).dtype).eps for name in ("qkv", "o", "gate_up", "down")))
    return max(1e-3, unit)


def _products_us(stack, layers: int) -> float:
    """Microseconds that the products of one layer take on one core."""
    return time_on_one_core([lambda _: stack.products_only(0, layers)] * 5, None) / layers


def _table_us(took: dict[str, float]) -> str:
    return ", ".join(f"{us:.0f} us with {kind}" for kind, us in took.items())


def _build_decoder(checkpoint, plan, report, offload_after):
    def progress(fraction):
        report("weights", fraction, f"placing weights, {round(100 * fraction)} %")

    offload = make_offload(offload_after, checkpoint.config.num_hidden_layers, plan.device, offload_folder())
    return Decoder(checkpoint.config, checkpoint.weights, plan, progress, offload)


def offload_folder() -> Path:
    """Where a CPU's offloaded layers are written."""
    return cache_dir() / "offload"


def offload_notes(decoder: Decoder) -> list[str]:
    """A sentence for the user where offloaded layers have not left memory; asked when nothing runs."""
    facts = decoder.blocks.offload.describe() if decoder.blocks.offload else None
    if not facts or facts["to"] != "file" or facts["resident_bytes"] < facts["bytes"] / 10:
        return []
    return [
        f"{facts['resident_bytes'] / 1e6:.0f} of {facts['bytes'] / 1e6:.0f} MB of offloaded layers are still in memory: the cache folder does not lie on a disk, "
        "or its file system keeps what it reads. RIVER_CACHE moves it."
    ]


@torch.inference_mode()
def _finite(decoder) -> bool:
    """Whether a few tokens go through the backbone without overflow; also warms the kernels up, many rows and one."""
    ids = [(7 + 31 * i) % decoder.config.vocab_size for i in range(16)]
    cache = decoder.new_cache(len(ids) + 1)
    passes = decoder.forward(ids, 0, cache), decoder.forward(ids[:1], len(ids), cache)
    return all(bool(decoder.head(hidden[-1:]).isfinite().all()) for hidden in passes)


class _StageClock:
    def __init__(self, seconds):
        self.seconds = seconds
        self.last = time.perf_counter()

    def done(self, stage):
        now = time.perf_counter()
        self.seconds[stage], self.last = now - self.last, now


def resolve_device(device: str) -> torch.device:
    """A torch device from "auto", "cpu", "cuda", "cuda:1" or "mps"; InputError if this machine or this torch has none such."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"There is no device {device!r}; use auto, cpu, cuda or mps.") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise InputError(f"PyTorch sees no GPU for device {device!r}; use --device cpu.")
    if target.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("PyTorch finds no Apple GPU here; use --device cpu.")
    if target.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"Device {device!r} is not supported; use auto, cpu, cuda or mps.")
    return target


def device_name(device: torch.device) -> str:
    """The processor's or the GPU's own name, for run cards."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        name = "CPU"
        cpuinfo = Path("/proc/cpuinfo")
        if cpuinfo.exists():
            lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
            name = lines[0].split(":", 1)[1].strip() if lines else name
        return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
    return str(device)


def set_threads(threads: int | None) -> int:
    """Set PyTorch's CPU threads to `threads`, or to the cores that this process may use; returns the number."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise InputError(f"threads must be a whole number from 1 on, not {threads!r}.")
    count = threads or available_cores()
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count


def available_cores() -> int:
    """Cores by affinity and by the container's CPU quota, not the host's count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.exists():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return int(os.environ.get("CPU_CORES") or cores) if os.environ.get("SPACE_ID") else cores


def memory_facts(model: Model) -> dict | None:
    """`peak_memory`, and of a model with offloaded layers "offload": as `Offload.describe` has it, at this moment."""
    peak, offload = peak_memory(model.plan.device), model.decoder.blocks.offload
    return {**(peak or {}), "offload": offload.describe()} if offload else peak


def peak_memory(device: torch.device) -> dict | None:
    """The most memory used so far: {"peak_bytes", "of": "device" (allocated on the GPU) or "process" (resident)}; None where the system does not say."""
    if device.type == "cuda":
        return {"peak_bytes": torch.cuda.max_memory_allocated(device), "of": "device"}
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_bytes": peak if sys.platform == "darwin" else peak * 1024, "of": "process"}
