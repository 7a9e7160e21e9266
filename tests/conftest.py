"""Fixtures that several suites share."""

import pytest

import river_core
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def page_server(default_model):
    """The page with the real default model, launched once for all suites that visit it."""
    from tests.page.server import serve  # Gradio is not imported for the engine's tests

    page = serve(lambda progress: default_model)
    yield page
    page.demo.close()


@pytest.fixture(scope="session")
def tiny():
    """A tiny random Llama with its river, float32."""
    return tiny_model()


@pytest.fixture(scope="session")
def default_model():
    """The packaged model as a user gets it: downloaded if need be, dtypes measured, river quantised, layers compiled where there is a compiler."""
    model = river_core.load()
    model.compile(wait=True)
    return model


@pytest.fixture(scope="session")
def exact_model():
    """The packaged model in float32, operation by operation: its numbers are the same on every processor up to rounding."""
    return river_core.load(dtype="float32", compiled=False)
