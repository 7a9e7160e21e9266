"""What takes minutes runs where it is asked for."""

import os

import pytest


def pytest_collection_modifyitems(items):
    if os.environ.get("RIVER_SLOW") != "1":
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes and downloads: RIVER_SLOW=1 runs it"))
