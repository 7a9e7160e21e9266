"""Compiles the library, as a program of its own that outlives whoever started it: a short command ends long before its compiler does.

`python build.py LIBRARY COMMAND...`, where COMMAND has the word {out} for the file that it writes. Whatever number of processes ask at once, one of them
compiles: whoever does not get the lock leaves with status BUSY. The library appears whole or not at all; why it could not be made stands in
`failure_of(LIBRARY)`, for later starts to read. It stands alone, because importing the package would import PyTorch.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock, Timeout

BUSY = 3
LONGEST = 1800  # seconds; at idle priority on a busy machine a minute's work may take many
STALE = 2 * LONGEST  # seconds after which nobody can still be writing a partial file


def lock_of(library: Path) -> FileLock:
    """Held by whoever compiles `library`; the system lets it go when that process ends, however it ends."""
    return FileLock(f"{library}.lock")


def failure_of(library: Path) -> Path:
    """Where the sentence stands if `library` could not be made."""
    return library.with_suffix(".failed")


def build(library: Path, command: list[str]) -> int:
    """Compile unless another process does or has done so; returns an exit status."""
    try:
        with lock_of(library).acquire(timeout=0):
            if library.exists():
                return 0
            sweep(library)
            return _compile(library, command)
    except Timeout:
        return BUSY


def sweep(library: Path) -> None:
    """Remove what compilers have left that were killed: those of this library, which nobody else can be at work on, and old ones of others."""
    for left in library.parent.glob(".*.partial"):
        with contextlib.suppress(OSError):
            if left.name.startswith(f".{library.name}.") or time.time() - left.stat().st_mtime > STALE:
                left.unlink()


def _compile(library: Path, command: list[str]) -> int:
    partial = library.with_name(f".{library.name}.{os.getpid()}.partial")
    # Only time that nobody else wants: a decoder's threads wait for one another, and one that is held up holds up all.
    polite = next((tool for tool in (["chrt", "--idle", "0"], ["nice", "-n", "19"]) if shutil.which(tool[0])), [])
    words = [*polite, *(str(partial) if word == "{out}" else word for word in command)]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=LONGEST
        )
        if done.returncode < 0 or (done.returncode and "illed" in done.stderr):
            return 1  # by whoever wanted its memory or an end of it: that says nothing about the next try
        if done.returncode:
            raise OSError(_cause(done.stderr, done.returncode))
        with partial.open("rb+") as file:
            os.fsync(file.fileno())  # a file that lost its end to a power cut would end every process that loads it
        os.replace(partial, library)
        failure_of(library).unlink(missing_ok=True)
        return 0
    except (OSError, subprocess.SubprocessError) as error:
        with contextlib.suppress(OSError):
            failure_of(library).write_text(str(error)[:200])
        return 1
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _cause(stderr: str, status: int) -> str:
    """The line of a compiler's output that says what went wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else f"the compiler ended with status {status}")


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]), sys.argv[2:]))
