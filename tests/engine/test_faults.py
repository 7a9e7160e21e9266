"""Processes that are killed while they write, disks that are full, and two processes on one cache.

Every fault is real: a child process that the system kills at the wrong moment, or that may not write any further. Children come from a fork server which has
PyTorch imported already.
"""

from __future__ import annotations

import contextlib
import gzip
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
import torch

from river_core import Trace, TraceError, compare, load
from river_core.errors import LoadError
from river_core.loading import cache_dir, load_checkpoint
from river_core.native import NATIVE, Native
from river_core.river import read_codes
from tests.files import endless, write_gguf

resource = pytest.importorskip("resource")

CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["river_core.model", "river_core.trace", "tests.files"])


def child(work, *arguments):
    """A process that runs `work`; not waited for."""
    process = CHILDREN.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def ends(process, within: float = 120) -> int:
    """The exit code of a child; a negative one is the signal that killed it."""
    process.join(within)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def die_before_renaming(name: str) -> None:
    """From now on, SIGKILL at the moment in which a file or folder would take its final name."""

    def hook(event, arguments):
        if event == "os.rename" and name in str(arguments[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def die_beyond(size: int) -> None:
    """From now on, the system kills this process when it makes any file larger than `size` bytes: in the middle of writing it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextlib.contextmanager
def no_file_beyond(size: int):
    """Within this, writing beyond `size` bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("faults") / "small.gguf", endless())


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RIVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load_in(cache: Path, path: Path, how=None, *options) -> None:
    """The child's work: load a model on a cache, after `how` has set the trap."""
    os.environ["RIVER_CACHE"] = str(cache)
    torch.set_num_threads(1)
    if how:
        how(*options)
    load(str(path), dtype="float32", compiled=False, threads=1)


def final_names(folder: Path) -> list[str]:
    """What stands in a folder under a name that others will trust."""
    return sorted(path.name for path in folder.glob("*") if not path.name.startswith(".") and not path.name.endswith(".lock"))


@pytest.mark.parametrize(
    "trap", [(die_before_renaming, "converted"), (die_beyond, 300_000)], ids=["before the rename", "in the middle of a file"]
)
def test_a_process_killed_while_converting_leaves_a_cache_that_works(cache, model_file, trap):
    assert ends(child(load_in, cache, model_file, *trap)) in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert final_names(cache / "converted") == [], "nothing half-done stands under a final name"
    whole = load_checkpoint(str(model_file))
    assert len(final_names(cache / "converted")) == 1
    assert len(whole.weights) > 50


def test_a_process_killed_while_it_keeps_codes_leaves_a_cache_that_works(cache, model_file):
    assert ends(child(load_in, cache, model_file, die_before_renaming, ".safetensors")) == -signal.SIGKILL
    assert final_names(cache / "rivers") == []
    first = load(str(model_file), dtype="float32", compiled=False)
    (kept,) = final_names(cache / "rivers")
    assert read_codes(cache / "rivers" / kept, 4)
    second = load(str(model_file), dtype="float32", compiled=False)
    with torch.inference_mode():
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
        assert all(torch.equal(a.qkv(x), b.qkv(x)) for a, b in zip(first.river.blocks, second.river.blocks, strict=True))


def test_two_processes_that_begin_on_one_empty_cache_both_load(cache, model_file):
    both = [child(load_in, cache, model_file) for _ in range(2)]
    assert [ends(process) for process in both] == [0, 0]
    assert len(final_names(cache / "converted")) == len(final_names(cache / "rivers")) == 1
    assert load(str(model_file), dtype="float32", compiled=False).sha256


def test_a_full_disk_while_converting_gets_a_sentence_and_room_again_is_enough(cache, model_file):
    with no_file_beyond(200_000), pytest.raises(LoadError, match="RIVER_CACHE"):
        load(str(model_file), dtype="float32", compiled=False)
    assert final_names(cache / "converted") == []
    assert load(str(model_file), dtype="float32", compiled=False).sha256


@pytest.mark.parametrize("fault", ["full", "no folder"])
def test_codes_that_cannot_be_kept_are_no_reason_to_fail(cache, model_file, fault):
    load_checkpoint(str(model_file))  # converted while there was room
    if fault == "no folder":
        (cache / "rivers").write_text("a file where a folder should be")
        assert load(str(model_file), dtype="float32", compiled=False).river.blocks
    else:
        with no_file_beyond(60_000):
            assert load(str(model_file), dtype="float32", compiled=False).river.blocks
        assert [path for path in (cache / "rivers").glob("*") if not path.name.endswith(".lock")] == []


# -- traces --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tiny) -> Trace:
    return Trace.from_events(compare(tiny, "Hello", ("backbone", "river:0.5"), max_new_tokens=40))


def save_in(path: Path, data: dict, how, *options) -> None:
    trace = Trace.from_dict(data)
    how(*options)
    trace.save(path)


@pytest.mark.parametrize(
    "trap", [(die_before_renaming, "t.json"), (die_beyond, 5_000)], ids=["before the rename", "in the middle of a file"]
)
def test_a_process_killed_while_saving_keeps_the_trace_that_was_there(trace, tmp_path, trap):
    path = tmp_path / "t.json"
    trace.save(path)
    before = path.read_bytes()
    assert ends(child(save_in, path, trace.to_dict(), *trap)) in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert path.read_bytes() == before
    trace.save(path)
    assert Trace.load(path).to_dict() == trace.to_dict()


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_that_does_not_fit_on_the_disk_gets_a_sentence_and_keeps_the_old_one(trace, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"{}"))
    with no_file_beyond(1_000), pytest.raises(TraceError, match="could not be written"):
        trace.save(path)
    assert [inner.name for inner in tmp_path.iterdir()] == [name]
    assert path.read_bytes() == gzip.compress(b"{}")


# -- compiling -------------------------------------------------------------------------------------------------------------------

COMPILER = """#!/bin/sh
# Stands for a compiler that is slow: what it writes is a library that a real one made.
echo started >> "{log}"
while [ "$1" != "-o" ]; do shift; done
head -c 50000 "{library}" > "$2"
sleep 2
cat "{library}" > "$2"
"""


@pytest.fixture
def slow_compiler(tmp_path, monkeypatch):
    """A compiler that takes two seconds for the real library; gives the file that it notes its calls in."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler")
    NATIVE.start(cache_dir() / "native")
    assert NATIVE.wait(), NATIVE.reason
    script, log = tmp_path / "slow-compiler", tmp_path / "calls"
    script.write_text(COMPILER.format(log=log, library=NATIVE.file))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return log


def compile_in(folder: Path, compiler: str, wait: bool) -> None:
    os.environ["CXX"] = compiler
    fresh = Native()
    fresh.start(folder)
    if wait:
        sys.exit(0 if fresh.wait() else 3)
    time.sleep(60)


def libraries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.so") if not path.name.startswith(".")]


def test_a_process_killed_while_compiling_leaves_no_half_library_and_the_next_one_has_it(tmp_path, slow_compiler):
    folder, whole = tmp_path / "native", None
    process = child(compile_in, folder, os.environ["CXX"], False)
    deadline = time.monotonic() + 60
    while not slow_compiler.exists():
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.01)
    time.sleep(0.5)  # half of the library is there
    process.kill()
    process.join()
    assert libraries(folder) == []
    assert ends(child(compile_in, folder, os.environ["CXX"], True)) == 0
    (whole,) = libraries(folder)
    assert whole.stat().st_size > 50_000


def test_many_processes_compile_once(tmp_path, slow_compiler):
    folder = tmp_path / "native"
    several = [child(compile_in, folder, os.environ["CXX"], True) for _ in range(3)]
    assert [ends(process) for process in several] == [0, 0, 0]
    assert len(libraries(folder)) == 1
    assert slow_compiler.read_text().split() == ["started"]
