"""What needs a kernel: the stepper of notebook 05 and the attach panel of notebook 01.

They only show: what they show is computed and tested elsewhere (`eaglelab.stepper`, `eaglelab.attach`).
Without a kernel each leaves a note; the pieces above it in its notebook stand alone.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from eaglelab.errors import BadInput
from eaglelab.html import code, panel

if TYPE_CHECKING:
    from eaglelab.workbook import Workbook

__all__ = ["attach", "stepper"]


def attach(server: str = "", out: str = "") -> Any:
    """The attach panel for a server's address; captures go to new folders in `out` (default: runs/)."""
    if missing := _missing():
        return missing
    from eaglelab.widgets.attaching import Panel

    return Panel(server, out)


def stepper(book: Workbook, request: str = "", number: int = 0) -> Any:
    """The stepper, or the reason why there is none."""
    if missing := _missing():
        return missing
    from eaglelab.widgets.stepping import Steps

    try:
        return Steps(book, request, number)
    except BadInput as error:
        return panel(f"Not shown: {error}")


def _missing() -> Any:
    absent = [name for name in ("ipywidgets", "anywidget") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    what, how = " and ".join(absent), "pip install " + " ".join(absent)
    return panel(f"Not shown: {what} not installed. ", code(how))
