"""Files that appear whole or not at all."""

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def appears_whole(path: Path):
    """A temporary name beside `path`: what the block writes there becomes `path` when it ends, and vanishes if it fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
