"""How many cases the property tests draw: a few in every test run, always the same ones; 10,000 each with HYPOTHESIS_PROFILE=thorough."""

from __future__ import annotations

import os
import re

from hypothesis import HealthCheck, Phase, settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
CASES = int(os.environ.get("HYPOTHESIS_CASES", 10_000))
"""Of every property, when thorough."""


def cases(few: int):
    """A property's number of cases: `few` in a usual run. Machines differ, so no case has a deadline, and nothing is kept between runs."""
    return settings(
        max_examples=CASES if THOROUGH else few,
        derandomize=not THOROUGH,
        database=None,
        deadline=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def is_sentence(error: BaseException) -> bool:
    """Whether an error reads as one or a few plain sentences: it ends as one, is not long, and shows nothing of the program's inside."""
    text = str(error)
    ends = re.search(r"[.!?)]['\"”]?$", text.rstrip())
    return bool(ends) and 10 < len(text) < 1200 and "Traceback" not in text and " object at 0x" not in text
