"""The native library is compiled once for all processes, also for those that end long before, and whatever is killed leaves nothing in the way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import river_core
from river_core import InputError
from river_core.model import load
from river_core.native import NATIVE, Native, find_compiler, isa
from river_core.native.build import failure_of
from tests.tiny import tiny_model

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
# The package's own imports, transformers among them, take longer than all of this.
START = """
import sys, types
from pathlib import Path
package = sys.modules["river_core"] = types.ModuleType("river_core")
package.__path__ = [sys.argv[3]]
from river_core.native import NATIVE
NATIVE.start(Path(sys.argv[1]))
if sys.argv[2] == "wait":
    NATIVE.wait()
print(NATIVE.state, NATIVE.reason)
"""
# Stands in for a compiler where only its runs count: notes its start in a log, waits for a file, and writes what it was given.
SLOW = """#!/bin/sh
echo run >> {log}
while [ ! -e {until} ]; do sleep 0.05; done
for word; do out="$last"; last="$word"; [ "$out" = -o ] && cp {result} "$word"; done
exit 0
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A function (result, until) that makes CXX a compiler which makes that file once the other exists; returns its log, with a line for every run."""
    log = tmp_path / "log"

    def install(result, until="/"):
        script = tmp_path / "compiler"
        script.write_text(SLOW.format(log=log, until=until, result=result))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return log

    return install


@pytest.fixture
def library():
    """The real library, where the session has one."""
    from river_core.loading import cache_dir

    NATIVE.start(cache_dir() / "native")
    assert NATIVE.wait(), NATIVE.reason
    return NATIVE.file


def start(folder, *, wait):
    words = [sys.executable, "-c", START, str(folder), "wait" if wait else "go", str(Path(river_core.__file__).parent)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.05)


def builder_in(folder):
    """The process that compiles into a folder."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "build.py" in words and str(folder) in words:
            return process.info["pid"]
    raise AssertionError("nobody compiles")


def left_in(folder):
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@needs_compiler
def test_many_starts_make_one_compiler_run_and_all_get_the_library(tmp_path, compiler, library):
    log, folder = compiler(library, tmp_path / "go"), tmp_path / "native"
    running = [start(folder, wait=True) for _ in range(3)]
    until(lambda: log.exists())
    time.sleep(1)  # for some of the others to come while it is at work
    (tmp_path / "go").touch()
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and out.startswith("ready"), out + err
    assert log.read_text().split() == ["run"]
    assert [Path(name).suffix for name in left_in(folder)] == [".so"]


@needs_compiler
def test_a_command_that_ends_at_once_leaves_a_library_for_the_next(tmp_path, compiler, library):
    log, folder = compiler(library, tmp_path / "go"), tmp_path / "native"
    out, err = start(folder, wait=False).communicate(timeout=120)
    assert out.startswith("building"), out + err
    assert not list(folder.glob("*.so"))
    (tmp_path / "go").touch()
    until(lambda: list(folder.glob("*.so")))
    out, err = start(folder, wait=False).communicate(timeout=120)
    assert out.startswith("ready"), out + err
    assert log.read_text().split() == ["run"] and len(left_in(folder)) == 1


@needs_compiler
def test_kill_9_in_the_middle_of_compiling_is_made_good_by_the_next_start(tmp_path, compiler, library):
    log, folder = compiler(library, tmp_path / "never"), tmp_path / "native"
    process = start(folder, wait=False)
    process.communicate(timeout=120)
    until(lambda: log.exists())
    builder = builder_in(folder)
    os.killpg(builder, signal.SIGKILL)  # the builder and its compiler are a session of their own
    (half,) = {next(folder.glob("*.lock")).name.removesuffix(".lock")}
    (folder / f".{half}.{builder}.partial").write_bytes(b"\x7fELF half")
    (folder / ".other.so.7.partial").touch()
    os.utime(folder / ".other.so.7.partial", (0, 0))
    (folder / ".young.so.8.partial").touch()  # another library's, perhaps at work
    compiler(library)
    out, err = start(folder, wait=True).communicate(timeout=120)
    assert out.startswith("ready"), out + err
    assert sorted(left_in(folder)) == [".young.so.8.partial", half]


@needs_compiler
def test_a_compiler_that_is_killed_while_somebody_waits_is_started_again(tmp_path, compiler, library):
    log, folder = compiler(library, tmp_path / "never"), tmp_path / "native"
    waiting = start(folder, wait=True)
    until(lambda: log.exists())
    builder = builder_in(folder)
    compiler(library)
    os.killpg(builder, signal.SIGKILL)
    out, err = waiting.communicate(timeout=120)
    assert out.startswith("ready"), out + err


@needs_compiler
def test_a_failure_is_a_sentence_that_later_starts_read(tmp_path, monkeypatch):
    monkeypatch.setattr("river_core.native.FLAGS", ["-no-such-flag"])
    fresh = Native()
    fresh.start(tmp_path)
    assert fresh.state == "building"
    assert fresh.wait() is False and fresh.state == "failed"
    assert "could not be compiled" in fresh.reason and "no-such-flag" in fresh.reason
    (left,) = left_in(tmp_path)
    assert left.endswith(".failed")
    monkeypatch.setattr("river_core.native.subprocess.Popen", None)  # not even tried
    second = Native()
    second.start(tmp_path)
    assert (second.state, second.reason) == ("failed", fresh.reason)
    monkeypatch.undo()
    monkeypatch.setattr("river_core.native.FLAGS", ["-no-such-flag"])
    os.utime(tmp_path / left, (0, 0))  # long ago
    third = Native()
    third.start(tmp_path)
    assert third.state == "building" and third.wait() is False and failure_of((tmp_path / left).with_suffix(".so")).stat().st_mtime > 1e9


@needs_compiler
def test_a_damaged_library_is_compiled_again(tmp_path, compiler, library):
    log, folder = compiler(library), tmp_path / "native"
    assert start(folder, wait=True).communicate(timeout=120)[0].startswith("ready")
    (kept,) = folder.glob("*.so")
    kept.write_bytes(b"\x7fELF and nothing more")
    assert start(folder, wait=True).communicate(timeout=120)[0].startswith("ready")
    assert log.read_text().split() == ["run"] * 2


@needs_compiler
@pytest.mark.parametrize("place", ["file", "/proc/river"])
def test_a_cache_that_cannot_be_written_is_a_reason_and_no_crash(tmp_path, place):
    (tmp_path / "file").touch()
    fresh = Native()
    fresh.start(tmp_path / place / "native" if place == "file" else Path(place))
    assert fresh.state == "failed" and fresh.wait() is False
    assert "cannot be written" in fresh.reason and "RIVER_CACHE" in fresh.reason


def test_without_a_compiler_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    fresh = Native()
    fresh.start(tmp_path)
    assert (fresh.state, fresh.wait()) == ("failed", False) and "no C++ compiler" in fresh.reason
    monkeypatch.setattr("river_core.model.NATIVE", fresh)
    model = tiny_model()
    model.compiled = None
    assert model.compile(wait=True) is False
    assert model.describe()["layers"] == "operation by operation" and fresh.reason in model.describe()["reasons"]


def test_a_wrong_operation_leaves_a_note_and_plain_layers(monkeypatch):
    fresh = Native()
    fresh.state, fresh.wrong = "failed", "Compiled code is not used: its exponential is not what it should be on this processor."
    monkeypatch.setattr("river_core.model.NATIVE", fresh)
    model = tiny_model()
    model.compiled = None
    assert model.compile(wait=True) is False and model.compiled is False and model.notes == [fresh.wrong]
    assert model.decoder.blocks.stack is model.river.blocks.stack is None


@needs_compiler
def test_a_library_with_a_wrong_operation_is_not_used(tmp_path, compiler, library, monkeypatch):
    compiler(library)
    monkeypatch.setattr(torch.classes, "load_library", lambda path: None)  # this process has one already
    monkeypatch.setattr("river_core.native.wrong_operation", lambda: "attention over torch.float16")
    fresh = Native()
    fresh.start(tmp_path / "native")
    assert fresh.wait() is False and fresh.state == "failed" and "its attention over torch.float16 is not" in fresh.wrong == fresh.reason


def test_instructions_are_named_and_checked(monkeypatch):
    for named, meant in (("", "auto"), ("auto", "auto"), (" GENERIC ", "generic")):
        monkeypatch.setenv("RIVER_ISA", named)
        assert isa.wanted_isa() == meant
    monkeypatch.setenv("RIVER_ISA", "sse9")
    with pytest.raises(InputError, match="RIVER_ISA must be auto, avx512, avx2 or generic, not 'sse9'"):
        load()
    monkeypatch.setattr(isa, "is_x86", lambda: True)
    monkeypatch.setattr(isa, "processor_flags", lambda: {"sse2", "avx2", "fma", "f16c", "bmi2"})
    assert isa.available() == ("avx2", "generic")
    monkeypatch.setenv("RIVER_ISA", "avx512")
    with pytest.raises(InputError, match="RIVER_ISA=avx512 asks for instructions that this processor lacks; use auto, avx2, generic."):
        load()
    monkeypatch.setattr(isa, "processor_flags", lambda: None)  # the system does not say
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert isa.available() == ("generic",)
    monkeypatch.setattr(isa, "is_x86", lambda: False)
    assert isa.available() == ("generic",)


def test_each_kind_of_instructions_is_a_library_of_its_own(tmp_path, compiler, monkeypatch):
    compiler("/dev/null")
    keys = set()
    for name in ("auto", *isa.available()):
        monkeypatch.setenv("RIVER_ISA", name)
        fresh = Native()
        fresh.start(tmp_path / "native")
        fresh.wait()
        keys = {path.name for path in (tmp_path / "native").glob("*.lock")}
    assert len(keys) == 1 + len(isa.available())
