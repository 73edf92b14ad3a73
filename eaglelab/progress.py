"""Progress: (what, done, of) -> a bar on stderr, or a line to the process that started the notebook.

The kernel of a headless run has no terminal: its steps go to the file that EAGLELAB_PROGRESS names, one JSON
list a line, and `runner` passes them on to the bar of the command that the user sees.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Protocol


class Progress(Protocol):
    """Called with a step in words, and with how much of it is done where that is counted."""

    def __call__(self, what: str, done: int = 0, of: int = 0, /) -> None: ...


def quiet(what: str, done: int = 0, of: int = 0, /) -> None:
    """Tells nobody."""


def teller() -> Progress:
    """What a notebook passes on: a line in EAGLELAB_PROGRESS if it is set, else a bar on stderr."""
    path = os.environ.get("EAGLELAB_PROGRESS")
    if not path:
        return bar()

    def tell(what: str, done: int = 0, of: int = 0) -> None:
        with open(path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps([what, done, of]) + "\n")

    return tell


def bar() -> Progress:
    """A bar on stderr where that is a terminal, else one line when a step begins.

    Steps without a count are lines."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}
    terminal = sys.stderr.isatty()

    def show(what: str, done: int = 0, of: int = 0) -> None:
        if what not in bars:
            if not terminal or not of:
                print(f"{what} ({of})" if of else what, file=sys.stderr, flush=True)
            bars[what] = tqdm(total=of, desc=what, file=sys.stderr, leave=False) if terminal and of else None
        shown = bars[what]
        if shown is not None:
            shown.update(done - shown.n)
            if done >= of:
                shown.close()
        if of and done >= of:
            del bars[what]

    return show
