"""Other decoders of the same checkpoint, measured beside the engine's lanes."""

import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from river_core.errors import InputError
from river_core.loading import cache_dir

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class TransformersPeer:
    """transformers' own greedy decoding, in the dtype that is fastest here.

    Decode speed leaves out the prompt: the time of 1 token is subtracted from the time of n.

    Args:
        model: the engine's `Model`, whose checkpoint is read again. prompt_ids: of the prompt. tokens: to be decoded. report: gets a line of progress.
    """

    name = "transformers"

    def __init__(self, model, prompt_ids, tokens, report):
        if model.path is None:
            raise InputError("transformers needs a checkpoint; a shape with random weights has none. Use --peers none.")
        self.device = model.plan.device
        self.prompt = torch.tensor([prompt_ids], device=self.device)
        self.speeds, self.model = {}, None
        for label, dtype in DTYPES.items():
            report(f"transformers in {label}")
            candidate = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype, use_safetensors=True).to(self.device).eval()
            self._seconds(candidate, 2)
            self.speeds[label] = self._rate(candidate, min(tokens, 32))
            if self.speeds[label] == max(self.speeds.values()):
                self.model, self.label = candidate, f"transformers generate, {label}"

    def decode(self, tokens: int) -> float:
        """Tokens per second of `tokens` - 1 decode steps."""
        return self._rate(self.model, tokens)

    @torch.inference_mode()
    def _rate(self, model, tokens):
        first = self._seconds(model, 1)
        return (tokens - 1) / max(self._seconds(model, tokens) - first, 1e-9)

    def _seconds(self, model, tokens):
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(self.prompt, attention_mask=torch.ones_like(self.prompt), **options)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


class LlamaCppPeer:
    """llama.cpp through llama-cpp-python, where that is installed, on the GGUF file that the model came from and with as many threads.

    Args: as for `TransformersPeer`.

    Raises:
        InputError: llama-cpp-python is not installed, or the model did not come from a GGUF file.
    """

    name = "llama.cpp"

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
        self.prompt = prompt_ids
        threads = torch.get_num_threads()
        self.model = llama_cpp.Llama(
            str(path), n_ctx=len(prompt_ids) + tokens + 8, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.label = f"llama.cpp {llama_cpp.__version__}, {path.name.split('.')[-2]}" + ("" if extra else ", no AMX")
        self.speeds = None
        self.decode(4)

    def decode(self, tokens: int) -> float:
        """Tokens per second of `tokens` - 1 greedy decode steps."""
        self.model.reset()
        self.model.eval(self.prompt)
        token = self.model.sample(temp=0.0)
        start = time.perf_counter()
        for _ in range(tokens - 1):
            self.model.eval([token])
            token = self.model.sample(temp=0.0)
        return (tokens - 1) / (time.perf_counter() - start)


def _works_with_extra_buffers(path: Path) -> bool:
    """Whether llama.cpp as it comes decodes a token here, tried in another process: with weights laid out for AMX it can crash on a virtual machine."""
    code = "import sys, llama_cpp; m = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False); m.eval([1, 2]); m.eval([3])"
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, timeout=300).returncode == 0


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
