"""River Explorer's engine: early exit on a real language model, every number measured.

import river_core
model = river_core.load()
for event in river_core.generate(model, "Why is the sky blue?", method="river"):
    if event["type"] == "token":
        print(event["text"], end="", flush=True)
"""

from river_core.errors import InputError, LoadError, RiverError
from river_core.generate import compare, generate
from river_core.model import Model, load
from river_core.trace import Trace, TraceError

__all__ = ["InputError", "LoadError", "Model", "RiverError", "Trace", "TraceError", "compare", "generate", "load"]
