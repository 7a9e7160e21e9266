"""Programs and packages that a test needs besides the libraries: skipped without them, unless they are demanded, as in CI."""

from __future__ import annotations

import os
import shutil

import pytest


def missing(reason: str, flag: str = "RIVER_REQUIRE_HOSTING") -> None:
    """Skip with the reason, or fail where the environment variable `flag` is 1."""
    if os.environ.get(flag) == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def program(name: str, install: str, flag: str = "RIVER_REQUIRE_HOSTING") -> str:
    """The path of a program; without it the test is skipped or fails, as `missing` says."""
    path = shutil.which(name)
    if path is None:
        missing(f"{name} is not installed: {install}", flag)
    return path
