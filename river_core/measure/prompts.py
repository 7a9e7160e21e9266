"""Prompts from a JSONL file."""

import json
from pathlib import Path

from river_core.errors import InputError


def read_prompts(path, limit: int | None = None) -> list[str]:
    """Prompts from a file with one JSON object a line, under "prompt" or "question".

    Args:
        path: the file. limit: take the first so many; None = all.

    Raises:
        InputError: no such file, or a line that holds no prompt; the message names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompts file {path} cannot be read: {error}.") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        try:
            record = json.loads(line)
            prompt = record.get("prompt", record.get("question"))
        except (ValueError, AttributeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f"Line {number} of {path} is no JSON object with a prompt or question.")
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{path} holds no prompts.")
    return prompts
