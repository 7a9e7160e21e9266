import pytest

from tests.page.server import Page, serve


@pytest.fixture(scope="session")
def page_server(default_model) -> Page:
    """The page with the real default model, launched once."""
    page = serve(lambda progress: default_model)
    yield page
    page.demo.close()
