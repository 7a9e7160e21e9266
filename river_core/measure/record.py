"""Recordings: real runs, kept as traces with a title and an idea, which the page plays back without a model."""

import json
import re
import statistics
from pathlib import Path

from river_core.errors import InputError
from river_core.generate import compare
from river_core.measure.speed import settle
from river_core.trace import Trace

FIELDS = ("slug", "title", "idea", "headline")
OPTIONS = {"tau", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "chat", "prefill", "timing", "mode"}
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # it becomes the name of a file
HEADLINES = ("difficulty", "holes", "recompute", "drift", "river", "limits")


def read_recipes(path) -> list[dict]:
    """The recipes of a file: a JSON list of {slug, title, idea, headline, prompt, methods, options}, in teaching order.

    `options` are those of `compare`. `headline` says which sentence the page completes from the trace, one of `HEADLINES`.

    Raises:
        InputError: the file cannot be read, or a recipe lacks a field or holds something of another kind in it.
    """
    try:
        recipes = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"The recipes {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"The recipes {path} are no valid JSON ({error}).") from error
    if not isinstance(recipes, list):
        raise InputError(f"The recipes {path} are not a list.")
    slugs = set()
    for number, recipe in enumerate(recipes, 1):
        if not isinstance(recipe, dict):
            raise InputError(f"Recipe {number} is no object.")
        missing = [name for name in (*FIELDS, "prompt", "methods") if name not in recipe]
        if missing:
            raise InputError(f"Recipe {number} lacks {', '.join(missing)}.")
        if recipe["headline"] not in HEADLINES:
            raise InputError(f"Recipe {number} has the headline {str(recipe['headline'])[:40]!r}; choose from {', '.join(HEADLINES)}.")
        for name in (*FIELDS, "prompt"):
            if not isinstance(recipe[name], str) or not recipe[name].strip():
                raise InputError(f"Recipe {number}: {name} must be a text.")
        if not SLUG.fullmatch(recipe["slug"]) or recipe["slug"] in slugs:
            raise InputError(
                f"Recipe {number}: the slug is a name of its own of small letters, digits and hyphens, not {recipe['slug'][:40]!r}."
            )
        slugs.add(recipe["slug"])
        methods, options = recipe["methods"], recipe.get("options", {})
        if not isinstance(methods, list) or not all(isinstance(method, str) for method in methods):
            raise InputError(f"Recipe {number}: methods must be a list of names.")
        unknown = sorted(options.keys() - OPTIONS) if isinstance(options, dict) else None
        if unknown or unknown is None:
            raise InputError(
                f"Recipe {number}: options are those of a run ({', '.join(sorted(OPTIONS))}), not {str(unknown or options)[:40]}."
            )
    return recipes


def record(model, recipe: dict, repeats: int = 3, command: str = "") -> Trace:
    """Run a recipe and keep the run whose speed-ups are the middle ones.

    Args:
        model: from `load`.
        recipe: see `read_recipes`.
        repeats: runs; one of them is kept whole, nothing is averaged. An uncounted short run goes before them.
        command: how it was made, for the header.

    Returns:
        Trace: its header has `recording`; its `timing` has `repeats` and the tokens/s of every lane in every run.
    """
    options = recipe.get("options", {})
    settle(model)
    for _ in compare(model, recipe["prompt"], recipe["methods"], **options | {"max_new_tokens": 8}):
        pass
    runs = [Trace.from_events(compare(model, recipe["prompt"], recipe["methods"], **options)) for _ in range(repeats)]
    lanes = list(runs[0].lanes)
    speeds = {lane: [run.lanes[lane].tokens_per_second for run in runs] for lane in lanes}
    middle = {lane: statistics.median(values) for lane, values in speeds.items() if all(values)}

    def distance(run):
        """How far a run's speeds are from the middle ones, over all lanes."""
        return sum(abs(run.lanes[lane].tokens_per_second / speed - 1) for lane, speed in middle.items())

    kept = min(runs, key=distance)
    kept.header["recording"] = {name: recipe[name] for name in FIELDS} | {"command": command}
    kept.header["timing"] |= {
        "repeats": repeats,
        "kept": "the run whose tokens per second were closest to the median of every lane",
        "tokens_per_second": {lane: [None if value is None else round(value, 2) for value in values] for lane, values in speeds.items()},
    }
    return kept
