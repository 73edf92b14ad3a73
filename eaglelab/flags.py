"""Reading a command line of SGLang: flags that eaglelab understands, converted; the others as written."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import Any

from eaglelab.errors import BadInput

# field -> the flag that `command` prints, and its spellings, each with the shortest abbreviation of it that
# argparse takes (no other flag of 0.5.23 begins so)
FLAGS: dict[str, tuple[str, dict[str, str]]] = {
    "algorithm": ("--speculative-algorithm", {"--speculative-algorithm": "--speculative-al"}),
    "steps": ("--speculative-num-steps", {"--speculative-num-steps": "--speculative-num-s"}),
    "topk": ("--speculative-eagle-topk", {"--speculative-eagle-topk": "--speculative-ea"}),
    "draft_tokens": (
        "--speculative-num-draft-tokens",
        {"--speculative-num-draft-tokens": "--speculative-num-d"},
    ),
    "draft_path": (
        "--speculative-draft-model-path",
        {
            "--speculative-draft-model-path": "--speculative-draft-model-p",
            "--speculative-draft-model": "--speculative-draft-model",
        },
    ),
    "draft_window": (
        "--speculative-draft-window-size",
        {"--speculative-draft-window-size": "--speculative-draft-w"},
    ),
    "target_path": ("--model-path", {"--model-path": "--model-pa", "--model": "--model"}),
    "tp_size": ("--tp-size", {"--tp-size": "--tp", "--tensor-parallel-size": "--tensor"}),
    "dtype": ("--dtype", {"--dtype": "--dt"}),
}
# A flag this like one of the above, and not it, is a slip of the pen; SGLang's own are less alike.
SLIP = 0.92
NUMBERS = {"steps", "topk", "draft_tokens", "draft_window", "tp_size"}
SPELLINGS = [full for _, spellings in FLAGS.values() for full in spellings]
SECRET = re.compile(r"api-?key|password|secret|credential|(auth|access|hf)-token", re.I)


def _field_of(flag: str) -> str | None:
    for name, (_, spellings) in FLAGS.items():
        for full, shortest in spellings.items():
            if flag.startswith(shortest) and full.startswith(flag):
                return name
    return None


def read_flags(command_line: str | Sequence[str]) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Flags of a command line: those that are fields of Launch, converted, and the others as written."""
    if isinstance(command_line, str):
        try:
            words = shlex.split(_before_the_shell(command_line))
        except ValueError as error:
            raise BadInput(
                f"the launch command cannot be read as a shell line ({error}): {command_line!r}"
            ) from error
    else:
        words = list(command_line)
    start = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    before = " ".join(words[:start])
    if "vllm" in before or "trtllm" in before:
        raise BadInput(f"{before!r}: only launches of SGLang are understood; give its flags")
    if words and start == len(words):
        raise BadInput(f"the launch {before!r} has no flag in it; flags begin with --")
    known: dict[str, Any] = {}
    others: list[tuple[str, str]] = []
    position = start
    while position < len(words):
        word = words[position]
        if not word.startswith("--"):
            raise BadInput(f"the launch command has {word!r} where a flag was expected")
        flag, has_value, value = word.partition("=")
        position += 1
        if not has_value:
            end = position
            while end < len(words) and not re.match("--|-[A-Za-z]", words[end]):
                end += 1
            value, position = shlex.join(words[position:end]), end
        if name := _field_of(flag):
            known[name] = _convert(flag, name, value if has_value else "".join(shlex.split(value)[:1]))
        elif close := difflib.get_close_matches(flag.replace("_", "-"), SPELLINGS, n=1, cutoff=SLIP):
            raise BadInput(f"the launch command has {flag}, which SGLang stops on (did you mean {close[0]}?)")
        elif not SECRET.search(flag):
            others.append((flag, shlex.quote(value) if has_value and value else value))
    return known, tuple(others)


def _before_the_shell(text: str) -> str:
    """A command line up to the first unquoted redirection, pipe or &; escaped line ends become spaces."""
    kept, quote, escaped = "", "", False
    for character in text:
        if escaped:
            kept = kept[:-1] + " " if character == "\n" and not quote else kept + character
            escaped = False
            continue
        if not quote and character in "<>|&;":
            return re.sub(r"(^|\s)\d$", "", kept)
        if character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
        escaped = character == "\\" and quote != "'"
        kept += character
    return kept


def _convert(flag: str, name: str, value: str) -> Any:
    if not value:
        raise BadInput(f"flag {flag} has no value")
    if name in NUMBERS:
        try:
            return int(value)
        except ValueError:
            raise BadInput(f"flag {flag}: {value!r} is not a whole number") from None
    return value
