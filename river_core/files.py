"""Files that appear whole or not at all, and work that one process does while the others wait."""

import contextlib
import os
import time
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

STALE_SECONDS = 2 * 3600  # a temporary file that nobody wrote to for so long belongs to a process that was killed


@contextlib.contextmanager
def appears_whole(path: Path):
    """A temporary name beside `path`: what the block writes there becomes `path` when it ends, and vanishes if it fails.

    The name is no other writer's, in this container or another. What killed processes left beside `path` goes.
    """
    sweep(path.parent.glob(f".{path.name}.*.partial"))
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.partial")
    try:
        yield partial
        to_disk(partial)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Wait until the file's content is on the disk: a name that outlives a power cut must not outlive its content."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(paths) -> None:
    """Remove those temporary files that nobody has written to for `STALE_SECONDS`; a younger one may be another process at work."""
    for path in paths:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


@contextlib.contextmanager
def one_at_a_time(path: Path, waiting=None):
    """While the block runs, no other process is in a block of the same `path`; where no lock can be made, as in a read-only folder, nothing is held.

    Args:
        path: a file for the lock, made with its folder where there is none.
        waiting: called about once a second while another process has it.
    """
    lock = _acquire(path, waiting or (lambda: None))
    try:
        yield
    finally:
        if lock:
            lock.release()


def _acquire(path, waiting):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, patience = FileLock(path), 0
        while True:
            try:
                lock.acquire(timeout=patience)
                return lock
            except Timeout:
                waiting()
                patience = 1
    except (OSError, NotImplementedError):  # NotImplementedError: a file system without locks
        return None
