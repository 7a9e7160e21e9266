"""Prompts from a JSONL file."""

import codecs
import json
from pathlib import Path

from river_core.errors import InputError


def read_prompts(path, limit: int | None = None) -> list[str]:
    """Prompts from a file with one JSON object a line, under "prompt" or, where there is none, "question".

    Args:
        path: the file, UTF-8, or UTF-16 with a byte order mark. limit: take the first so many; None = all.

    Raises:
        InputError: no such file, or a line that holds no prompt; the message names the line.
    """
    if limit is not None and limit < 1:
        raise InputError(f"The number of prompts must be at least 1, not {limit}.")
    try:
        text = _decode(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"The prompts file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"Line {line} of {path} is not {error.encoding.upper()} text. Save the file as UTF-8.") from error
    prompts = []
    # A line of JSONL ends with a newline and nothing else: U+2028, U+0085 and their like may stand inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        prompts.append(_prompt(line, number, path))
    if not prompts:
        raise InputError(f"{path} holds no prompts.")
    return prompts


def _decode(raw: bytes) -> str:
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return raw.decode("utf-16")
    return raw.decode("utf-8-sig")


def _prompt(line: str, number: int, path) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", "it is nested too deeply")
        raise InputError(f"Line {number} of {path} is no valid JSON ({why}).") from error
    found = [record[key] for key in ("prompt", "question") if record.get(key) is not None] if isinstance(record, dict) else []
    if not found or not isinstance(found[0], str) or not found[0].strip():
        raise InputError(f"Line {number} of {path} is no JSON object with a prompt or question.")
    return found[0]
