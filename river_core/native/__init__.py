"""Compiled code for one row: products that stream their weights (`products.h`), attention (`attention.h`), runs of decoder layers made of them without a Python
call for every small operation (`layers.h`), and the screening of the LM head (`screen.h`).

The library is compiled once per machine and PyTorch version, in a process of its own and at low priority, while decoding goes on in Python (`build.py`); it is
kept in the cache folder. Without a compiler, or if it fails, everything stays as it was. RIVER_ISA says for which instructions it is compiled (`isa.py`).
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from river_core.kernels import Dense, Int4
from river_core.native.build import BUSY, failure_of, lock_of
from river_core.native.check import wrong_operation
from river_core.native.isa import machine_flags, processor, wanted_isa

SOURCE = Path(__file__).parent / "library.cpp"
# Neither -ffast-math nor any part of it that reorders sums: linked into a library the whole would make the process flush denormal numbers to
# zero, and a compiler that may reorder takes (x + c) - c, by which a number is rounded, for x.
FLAGS = ["-O3", "-std=c++20", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
RETRY = 86400  # seconds after which a compiler that failed is tried again


class Native:
    """The compiled library of this process.

    state: "off", "building", "ready" or "failed". reason: one sentence. isa: "avx512", "avx2" or "generic", what a library that is ready was compiled for.
    file: that library. compiler: its path, where one was found. wrong: a sentence if an operation of the library is not what it should be; it is not used then.
    """

    def __init__(self):
        self.state, self.reason = "off", "Compiled layers are switched off."
        self.isa: str | None = None
        self.file: Path | None = None
        self.compiler: str | None = None
        self.wrong: str | None = None
        self._follower: threading.Thread | None = None

    def start(self, folder: Path) -> None:
        """Load the library from `folder`, or begin to compile it there, unless another process does already; returns at once.

        Raises:
            InputError: RIVER_ISA asks for what there is not.
        """
        if self.state != "off":
            return
        isa = wanted_isa()
        compiler = find_compiler()
        if platform.system() == "Windows" or compiler is None:
            self._fail("There is no C++ compiler here, so layers run operation by operation.")
            return
        self.compiler = compiler[0]
        command = [*compiler, *FLAGS, *machine_flags(isa)]
        sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
        key = hashlib.sha256("\n".join([*sources, *command, torch.__version__, processor()]).encode()).hexdigest()[:24]
        library = folder / f"{key}.so"
        if library.exists() and self._load(library, final=False):
            return
        command += [str(SOURCE), "-o", "{out}", *_paths(), "-ltorch", "-ltorch_cpu", "-lc10"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            library.unlink(missing_ok=True)  # one that cannot be loaded: a damaged disk, or a meddled file
            lock = lock_of(library)
            Path(lock.lock_file).touch()
            known = self._known_failure(library)
            builder = None if known else _builder(library, command)
        except OSError as error:
            self._fail(
                f"Layers are not compiled, because {folder} cannot be written ({error.strerror or error}); they run operation by operation. "
                "RIVER_CACHE moves the cache."
            )
            return
        if known:
            self._fail_to_compile(known)
            return
        self.state, self.reason = "building", "Layers are being compiled; until then they run operation by operation."
        self._follower = threading.Thread(target=self._follow, args=(library, command, builder), name="compiler", daemon=True)
        self._follower.start()

    def wait(self) -> bool:
        """Wait until compiling has ended; whether the library is ready."""
        if self._follower:
            self._follower.join()
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

    def _follow(self, library, command, builder):
        """Wait for the library, whoever compiles it; if that process is killed, compile it again."""
        try:
            for _ in range(3):
                status = builder.wait()
                if status == BUSY:
                    with lock_of(library).acquire(poll_interval=0.2):
                        pass
                if library.exists():
                    self._load(library)
                    return
                if known := self._known_failure(library):
                    self._fail_to_compile(known)
                    return
                builder = _builder(library, command)
            self._fail_to_compile("the compiler was ended again and again")
        except OSError as error:
            self._fail_to_compile(str(error))

    @staticmethod
    def _known_failure(library) -> str | None:
        """Why compiling failed not long ago, if it did."""
        failure = failure_of(library)
        try:
            return failure.read_text() if time.time() - failure.stat().st_mtime < RETRY else None
        except OSError:
            return None

    def _fail(self, reason):
        self.state, self.reason = "failed", reason

    def _fail_to_compile(self, cause):
        self._fail(f"Layers could not be compiled ({cause[:200]}); they run operation by operation.")

    def _load(self, library, final: bool = True) -> bool:
        """Load and check the library; whether it could be loaded. final: if not, that is the end of it."""
        try:
            torch.classes.load_library(str(library))
        except (OSError, RuntimeError) as error:
            if final:
                self._fail(f"The compiled layers could not be loaded ({str(error)[:200]}); layers run operation by operation.")
            return False
        self.isa, self.file = torch.ops.river_native.isa(), library
        name = wrong_operation()
        if name:
            self.wrong = (
                f"Compiled code is not used: its {name} is not what it should be on this processor. Layers run operation by operation."
            )
            self._fail(self.wrong)
        else:
            self.state, self.reason = "ready", f"Layers of one row run in compiled code ({self.isa})."
        return True


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


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: CXX, or the first that is on the PATH."""
    for words in (shlex.split(os.environ.get("CXX", "")), ["g++"], ["clang++"], ["c++"]):
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    return None


def _builder(library: Path, command: list[str]) -> subprocess.Popen:
    """A process that compiles, in a session of its own: neither the end of this one nor Ctrl-C in its terminal reaches it."""
    nothing = subprocess.DEVNULL
    words = [sys.executable, str(SOURCE.parent / "build.py"), str(library), *command]
    return subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing, cwd=library.parent, start_new_session=True)


def _paths() -> list[str]:
    root = Path(torch.__file__).parent
    paths = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", f"-L{root / 'lib'}"]
    if sys.platform == "darwin":
        paths += ["-undefined", "dynamic_lookup"]
    return paths + [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
