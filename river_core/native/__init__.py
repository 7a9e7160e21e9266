"""Compiled code for one row: products that stream their weights (`products.h`), attention (`attention.h`), runs of decoder layers made of them without a Python
call for every small operation (`layers.h`), and the screening of the LM head (`screen.h`).

The library is compiled once per machine and PyTorch version, in a process of its own and at low priority, while decoding goes on in Python; it is kept in
the cache folder. Without a compiler, or if it fails, everything stays as it was.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import torch

from river_core.files import appears_whole
from river_core.kernels import Dense, Int4

SOURCE = Path(__file__).parent / "library.cpp"
# Not -ffast-math: linked into a library it would make the whole process flush denormal numbers to zero.
FLAGS = ["-O3", "-std=c++20", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"]


class Native:
    """The compiled library of this process.

    state: "off", "building", "ready" or "failed". reason: one sentence.
    """

    def __init__(self):
        self.state, self.reason = "off", "Compiled layers are switched off."
        self._builder: threading.Thread | None = None

    def start(self, folder: Path) -> None:
        """Load the library from `folder`, or begin to compile it there; returns at once."""
        if self.state != "off":
            return
        compiler = next((path for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name and (path := shutil.which(name))), None)
        if platform.system() == "Windows" or compiler is None:
            self.state, self.reason = "failed", "There is no C++ compiler here, so layers run operation by operation."
            return
        command = [compiler, *FLAGS, *_machine_flags(), str(SOURCE), "-o", "{out}", *_paths(), "-ltorch", "-ltorch_cpu", "-lc10"]
        sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
        key = hashlib.sha256("\n".join([*sources, *command, torch.__version__, _processor()]).encode()).hexdigest()[:24]
        library = folder / f"{key}.so"
        if library.exists():
            self._load(library)
            return
        self.state, self.reason = "building", "Layers are being compiled; until then they run operation by operation."
        self._builder = threading.Thread(target=self._build, args=(command, library), name="compiler", daemon=True)
        self._builder.start()

    def wait(self) -> bool:
        """Wait until compiling has ended; whether the library is ready."""
        if self._builder:
            self._builder.join()
        return self.state == "ready"

    def stack(self, decoder, blocks, ours: bool):
        """These blocks for the compiled code; None where it cannot run them.

        Args:
            ours: products by this project's own loops; False: by ATen's kernels.
        """
        c = decoder.config
        if self.state != "ready" or decoder.device.type != "cpu" or c.hidden_act != "silu":
            return None
        nothing = torch.empty(0)
        made = torch.classes.river_native.Stack(
            c.num_attention_heads, c.num_key_value_heads, c.head_dim, decoder.rope.rotary_dim, c.rms_norm_eps
        )
        for block, window in zip(blocks, c.sliding_window, strict=False):  # the first blocks, or all of them
            tensors, groups = [], []
            for product in (block.qkv, block.o, block.gate_up, block.down):
                if isinstance(product, Int4):
                    if not (torch.ops.river_native.has_int4() if ours else product.packed is not None):
                        return None
                    tensors += product.in_blocks() if ours else [product.packed, product.scales_and_zeros]
                    groups.append(product.group_size)
                elif isinstance(product, Dense):
                    tensors += [product.weight, nothing]
                    groups.append(0)
                else:
                    return None
                tensors.append(nothing if product.bias is None else product.bias)
            norms = [block.input_norm, block.post_norm, nothing if block.qk_norm is None else block.qk_norm]
            made.add(tensors, groups, norms, window or 0, ours)
        return NativeStack(made)

    def _build(self, command, library):
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with appears_whole(library) as partial:
                words = [str(partial) if word == "{out}" else word for word in command]
                # Only time that nobody else wants: a decoder's threads wait for one another, and one that is held up holds up all.
                polite = next((tool for tool in (["chrt", "--idle", "0"], ["nice", "-n", "19"]) if shutil.which(tool[0])), [])
                done = subprocess.run([*polite, *words], capture_output=True, text=True, timeout=600)
                if done.returncode:
                    raise OSError(done.stderr.strip().splitlines()[0] if done.stderr.strip() else "the compiler failed")
            self._load(library)
        except (OSError, subprocess.SubprocessError) as error:
            self.state, self.reason = "failed", f"Layers could not be compiled ({str(error)[:200]}); they run operation by operation."

    def _load(self, library):
        try:
            torch.classes.load_library(str(library))
        except (OSError, RuntimeError) as error:
            self.state, self.reason = "failed", f"The compiled layers could not be loaded ({str(error)[:200]})."
        else:
            self.state, self.reason = "ready", "Layers of one row run in compiled code."


class NativeStack:
    """Compiled blocks, as `Blocks.stack` holds them."""

    def __init__(self, code):
        self.code = code

    tests = True  # it can leave by itself after a layer whose similarity exceeds tau

    def run(self, hidden_states, first, last, cache, entries, rows, tau=2.0):
        rotation = rows.rotation
        states, similarities = self.code.run(
            hidden_states, first, last, cache.keys_values, entries, rotation.half_cos, rotation.half_sin, tau
        )
        return states, similarities[-1], similarities

    def products_only(self, first: int, last: int) -> None:
        """The products of layers first .. last - 1 in the order of a step, on any input: the floor of that step."""
        self.code.products_only(first, last)


NATIVE = Native()
"""One library a process, as PyTorch registers it once."""


def _machine_flags() -> list[str]:
    if platform.machine().lower() in ("arm64", "aarch64"):
        return ["-mcpu=native"]
    # The library finds PyTorch's own OpenMP threads by name; a second set of threads would fight with them.
    return ["-march=native", "-fopenmp"] if sys.platform == "linux" else ["-march=native"]


def _paths() -> list[str]:
    root = Path(torch.__file__).parent
    paths = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", f"-L{root / 'lib'}"]
    if sys.platform == "darwin":
        paths += ["-undefined", "dynamic_lookup"]
    return paths + [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]


def _processor() -> str:
    """What `-march=native` depends on."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_flags()}"


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
