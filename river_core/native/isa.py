"""For which of a processor's instructions the native code is compiled: the environment variable RIVER_ISA, or all that this one has.

Slower instructions than a machine has serve to see what another machine would compute, or how fast it would be.
"""

import os
import platform
import sys
from pathlib import Path

import torch

from river_core.errors import InputError

# Compiler flags of x86-64; what has to be among the processor's flags for them.
X86 = {
    "avx512": (["-march=x86-64-v4"], {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx2": (["-march=x86-64-v3"], {"avx2", "fma", "f16c", "bmi2"}),
    "generic": (["-march=x86-64"], set()),
}
NAMES = ("auto", *X86)


def wanted_isa() -> str:
    """The value of RIVER_ISA: "auto" (the default), "avx512", "avx2" or "generic".

    Raises:
        InputError: another value, or instructions that this processor lacks.
    """
    isa = os.environ.get("RIVER_ISA", "").strip().lower() or "auto"
    if isa not in NAMES:
        raise InputError(f"RIVER_ISA must be auto, avx512, avx2 or generic, not {isa[:40]!r}.")
    if isa not in ("auto", *available()):
        raise InputError(f"RIVER_ISA={isa} asks for instructions that this processor lacks; use {', '.join(('auto', *available()))}.")
    return isa


def available() -> tuple[str, ...]:
    """What RIVER_ISA may be on this processor, besides "auto", the fastest first."""
    if not is_x86():
        return ("generic",)
    flags = processor_flags()
    if flags is None:  # no such file, as on macOS: PyTorch has looked
        known = {"AVX512": 0, "AVX2": 1}.get(torch.backends.cpu.get_cpu_capability(), 2)
        return tuple(X86)[known:]
    return tuple(isa for isa, (_, needed) in X86.items() if needed <= flags)


def machine_flags(isa: str) -> list[str]:
    """Compiler flags for one of `NAMES`."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        flags = ["-mcpu=native"] if isa == "auto" else ["-march=armv8-a"]
    elif isa == "auto" or not is_x86():
        flags = ["-march=native"] if isa == "auto" else []
    else:
        flags = list(X86[isa][0])
        if isa == "avx512" and "avx512_vnni" in (processor_flags() or ()):
            flags.append("-mavx512vnni")
    # The library finds PyTorch's own OpenMP threads by name; a second set of threads would fight with them.
    return [*flags, "-fopenmp"] if sys.platform == "linux" else flags


def processor() -> str:
    """What `-march=native` depends on."""
    flags = processor_flags()
    return f"{platform.machine()} {' '.join(sorted(flags)) if flags is not None else torch.backends.cpu.get_cpu_capability() + platform.processor()}"


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def processor_flags() -> set[str] | None:
    """The flags that the system names for this processor; None where it names none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    return None if line is None else set(line.partition(":")[2].split())
