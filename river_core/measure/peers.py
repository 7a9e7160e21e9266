"""Other decoders of the same checkpoint, measured beside the engine's lanes.

A peer has `name`, `label`, `how` (a sentence on how it is timed), `trials` (tokens per second of the settings that were tried, or None), and `run(tokens)`, which
decodes the prompt once more and returns {tokens_per_second, prefill_s}.
"""

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import CompileConfig
from transformers.generation.streamers import BaseStreamer

from river_core.errors import InputError
from river_core.loading import cache_dir

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ATTENTION = ("sdpa", "eager")
CACHES = ("dynamic cache", "static cache", "static cache, compiled")
TRIAL = 32  # tokens of a trial
TRIALS = 2  # of which the faster counts


class Clock(BaseStreamer):
    """When `generate` had the prompt, and when each token was there: one run holds its prompt and its steps, and nothing has to be subtracted."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value):
        self.times.append(time.perf_counter())  # the value is on the CPU already, so the device has finished it

    def end(self):
        pass


class TransformersPeer:
    """transformers' own greedy decoding, in the setting that is fastest here.

    Tried first: attention "sdpa" and "eager" in every dtype, with the growing cache that `generate` uses by itself; the fastest of those then with a static cache, and
    with a static cache and `torch.compile`. What does not work on this machine is left out, and `trials` says so.

    Args:
        model: the engine's `Model`, whose checkpoint is read again. prompt_ids: of the prompt. tokens: to be decoded. report: gets a line of progress.
        caches: those of `CACHES` that are tried, the first without fail; None = all.

    Raises:
        InputError: the model has no checkpoint, or nothing worked.
    """

    name = "transformers"
    how = "its own generate(); from its first token to its last, as its streamer hands them out"

    def __init__(self, model, prompt_ids, tokens, report, caches=None):
        if model.path is None:
            raise InputError("transformers needs a checkpoint; a shape with random weights has none. Use --peers none.")
        self.device = model.plan.device
        self.prompt = torch.tensor([prompt_ids], device=self.device)
        self.trials: dict[str, float | str] = {}
        self.model, best = None, -1.0
        for label, dtype in DTYPES.items():
            report(f"transformers in {label}")
            candidate = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype, use_safetensors=True).to(self.device).eval()
            for attention in ATTENTION:
                rate = self._try(f"{label}, {attention}", candidate, attention, {}, min(tokens, TRIAL))
                if rate > best:
                    self.model, self.attention, self.setting, best = candidate, attention, f"{label}, {attention}", rate
        if self.model is None:
            raise InputError("transformers could not decode this model here in any setting; leave it out of --peers.")
        rates = {}
        for cache in caches or CACHES:
            report(f"transformers in {self.setting}, {cache}")
            # At full length: a static cache is made, and compiled for, as long as it will be.
            rates[cache] = self._try(f"{self.setting}, {cache}", self.model, self.attention, _cache_options(cache), tokens)
        fastest = max(rates, key=rates.get)
        self.options, self.label = _cache_options(fastest), f"transformers generate, {self.setting}, {fastest}"
        self.model.set_attn_implementation(self.attention)

    def run(self, tokens: int) -> dict:
        """Decode `tokens` tokens once: tokens per second of all but the first, and seconds until the first."""
        return self._run(self.model, self.options, tokens)

    def _try(self, name, model, attention, options, tokens) -> float:
        """Tokens per second of a setting, -1 if it does not work; noted in `trials` either way."""
        try:
            model.set_attn_implementation(attention)
            self._run(model, options, tokens)
            rate = max(self._run(model, options, tokens)["tokens_per_second"] for _ in range(TRIALS))
        except Exception as error:  # a compiler or a kernel that this machine lacks: libraries raise many kinds
            self.trials[name] = f"did not work: {type(error).__name__} {str(error).splitlines()[0][:160] if str(error) else ''}".rstrip()
            return -1.0
        self.trials[name] = round(rate, 2)
        return rate

    @torch.inference_mode()
    def _run(self, model, options, tokens):
        clock = Clock()
        lengths = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(self.prompt, attention_mask=torch.ones_like(self.prompt), streamer=clock, **lengths, **options)
        start, first, *rest = clock.times
        return {"tokens_per_second": len(rest) / (rest[-1] - first), "prefill_s": first - start}


def _cache_options(cache: str) -> dict:
    """Options of `generate` for one of `CACHES`."""
    if cache == "dynamic cache":
        return {}
    if cache == "static cache":
        return {"cache_implementation": "static", "disable_compile": True}
    config = CompileConfig(mode="default")
    config._compile_all_devices = True  # on a CPU transformers does not compile by itself
    return {"cache_implementation": "static", "compile_config": config}


class LlamaCppPeer:
    """llama.cpp on the GGUF file that the model came from and with as many threads, where llama-cpp-python is installed.

    Timed as its own `llama-bench` does: `llama_decode` of one token after another through the C interface, waited for, without a sampler and without handing the
    scores to Python; behind the same prompt, which is decoded before that as one batch.

    Args: as for `TransformersPeer`.

    Raises:
        InputError: llama-cpp-python is not installed, the model did not come from a GGUF file, or llama.cpp cannot decode it.
    """

    name = "llama.cpp"
    how = "llama_decode token by token through its C interface, as llama-bench does; no token is chosen, which the engine's lanes do within their time"
    trials = None

    def __init__(self, model, prompt_ids, tokens, report):
        try:
            import llama_cpp
        except ImportError:
            raise InputError("llama.cpp is not installed here: pip install llama-cpp-python, or leave it out of --peers.") from None
        path = gguf_file(model)
        report("llama.cpp")
        extra = _works_with_extra_buffers(path)
        if not extra:
            _leave_out_extra_buffers(llama_cpp)
        threads, length = torch.get_num_threads(), len(prompt_ids) + tokens + 8
        self.api = llama_cpp
        self.model = llama_cpp.Llama(
            str(path), n_ctx=length, n_batch=length, n_ubatch=length, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.prompt = prompt_ids
        self.label = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), {path.name.split('.')[-2]}" + ("" if extra else ", no AMX")
        self.run(4)

    def run(self, tokens: int) -> dict:
        """The prompt as one batch, then `tokens` - 1 steps."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.model.ctx), True)
        start = time.perf_counter()
        self._decode(self.prompt)
        first = time.perf_counter()
        for index in range(tokens - 1):
            self._decode([self.prompt[index % len(self.prompt)]])  # which tokens they are makes no difference to the time
        last = time.perf_counter()
        return {"tokens_per_second": (tokens - 1) / (last - first), "prefill_s": first - start}

    def _decode(self, ids):
        tokens = (ctypes.c_int32 * len(ids))(*ids)  # the batch points into it
        if self.api.llama_decode(self.model.ctx, self.api.llama_batch_get_one(tokens, len(ids))):
            raise InputError("llama.cpp could not decode this model; leave it out of --peers.")
        self.api.llama_synchronize(self.model.ctx)


def _works_with_extra_buffers(path: Path) -> bool:
    """Whether llama.cpp as it comes decodes a token here, tried in another process: with weights laid out for AMX it can crash on a virtual machine."""
    code = "import sys, llama_cpp; m = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False); m.eval([1, 2]); m.eval([3])"
    try:
        return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, timeout=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _leave_out_extra_buffers(llama_cpp) -> None:
    default = llama_cpp.llama_cpp.llama_model_default_params

    def without():
        parameters = default()
        parameters.use_extra_bufts = False
        return parameters

    llama_cpp.llama_cpp.llama_model_default_params = without


PEERS = {peer.name: peer for peer in (TransformersPeer, LlamaCppPeer)}


def gguf_file(model) -> Path:
    """The GGUF file that a model was read from; InputError if there is none."""
    if model.source == "default":
        found = sorted(cache_dir().glob("*.gguf"))
        if found:
            return found[0]
    if model.path and Path(model.path).suffix == ".gguf":
        return Path(model.path)
    raise InputError("llama.cpp reads GGUF files only, and this model did not come from one. Leave it out of --peers.")
