"""Fixtures that several suites share."""

import pytest

import river_core
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny():
    """A tiny random Llama with its river, float32."""
    return tiny_model()


@pytest.fixture(scope="session")
def default_model():
    """The packaged model as a user gets it: downloaded if need be, dtypes measured, river quantised."""
    return river_core.load()
