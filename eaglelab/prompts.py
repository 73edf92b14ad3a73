"""Prompts: JSON lines, each with one of `messages`, `prompt` or `input_ids`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglelab.errors import BadInput

KINDS = ("messages", "prompt", "input_ids")


@dataclass(frozen=True)
class Prompt:
    """Exactly one field is set. `messages` are templated, and `prompt` is tokenized, by the server."""

    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    input_ids: tuple[int, ...] | None = None


def load_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompts file. BadInput names the file and the line of the first one that does not fit."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot read prompts: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_prompt(line, f"{path}, line {number}"))
    if not prompts:
        raise BadInput(f"{path}: no prompts; one JSON object a line with messages, prompt or input_ids")
    return prompts[:limit]


def as_prompts(items: Iterable[Prompt | str | list[int]]) -> list[Prompt]:
    """Texts and token id lists as prompts, for callers that have no file."""
    found = []
    for item in items:
        if isinstance(item, Prompt):
            found.append(item)
        elif isinstance(item, str):
            found.append(Prompt(prompt=item))
        else:
            found.append(Prompt(input_ids=tuple(item)))
    return found


def _prompt(line: str, where: str) -> Prompt:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: not JSON: {error}") from error
    given = [kind for kind in KINDS if isinstance(data, dict) and data.get(kind) is not None]
    if len(given) != 1:
        raise BadInput(f"{where}: needs exactly one of {', '.join(KINDS)}, has {', '.join(given) or 'none'}")
    value = data[given[0]]
    if given[0] == "prompt":
        fits = isinstance(value, str) and value != ""
    elif given[0] == "input_ids":
        fits = _whole(value, lambda i: type(i) is int and i >= 0)
    else:
        fits = _whole(value, lambda m: isinstance(m, dict) and "role" in m and "content" in m)
    if not fits:
        wanted = {"prompt": "a text", "input_ids": "a list of token ids"}
        text = wanted.get(given[0], "a list of objects with role and content")
        raise BadInput(f"{where}: {given[0]}: {text} is needed, and not an empty one")
    one: Any = {given[0]: value if given[0] == "prompt" else tuple(value)}
    return Prompt(**one)


def _whole(value: Any, fits: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(fits, value))
