"""Fixtures that several suites share."""

import pytest
import torch

import river_core
from river_core.native import NATIVE, find_compiler
from river_core.native.isa import available, wanted_isa
from tests.tiny import tiny_model

SEEN = []  # the default model, once a test has asked for it


def pytest_report_header(config):
    """What the numbers of this run depend on."""
    compiler = find_compiler()
    return [
        f"kernels: RIVER_ISA={wanted_isa()} of {', '.join(available())}; PyTorch {torch.__version__} for {torch.backends.cpu.get_cpu_capability()}",
        f"compiler: {' '.join(compiler) if compiler else 'none, layers run operation by operation'}",
    ]


def pytest_terminal_summary(terminalreporter):
    """And what was used in the end."""
    terminalreporter.write_line(f"native code: {NATIVE.state}, {NATIVE.reason}")
    for model in SEEN:
        facts = model.describe()
        names = ("dtype", "prefill_dtype", "kv_dtype", "river_kernel", "layers", "products", "head", "threads", "pinned")
        terminalreporter.write_line(f"default model: {', '.join(f'{name} {facts[name]}' for name in names)}")


@pytest.fixture(scope="session")
def page_server(default_model):
    """The page with the real default model, launched once for all suites that visit it."""
    from app.limits import Limits
    from tests.page.server import serve  # Gradio is not imported for the engine's tests

    page = serve(lambda progress: default_model, limits=Limits(grace=4.0))
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
    SEEN.append(model)
    return model


@pytest.fixture(scope="session")
def exact_model():
    """The packaged model in float32, operation by operation: its numbers are the same on every processor up to rounding."""
    return river_core.load(dtype="float32", compiled=False)
