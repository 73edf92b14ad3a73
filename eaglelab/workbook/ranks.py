"""07: do the ranks of one server hold the same? Each recorded rank beside the primary of its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eaglelab.capture import to_float32
from eaglelab.checks import recorded
from eaglelab.html import Html, code, element, panel, table

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.workbook.moved import Pair


@dataclass
class Beside:
    """One tensor of one kind of event on two ranks. gap: largest difference, of the largest number."""

    rank: str
    first: str
    what: str
    events: int = 0
    equal: int = 0
    gap: float = 0.0


def compared(capture: Capture) -> list[Beside]:
    """Every tensor that two ranks of a group recorded; [] where one rank a group was recorded."""
    found: dict[tuple[str, str], Beside] = {}
    for first in capture.primary_ranks:
        ours = dict(recorded.keyed(capture, first))
        group = first.partition(".")[0]
        for rank in (r for r in capture.ranks if r != first and r.partition(".")[0] == group):
            for key, theirs in recorded.keyed(capture, rank):
                mine = ours.get(key)
                for name in theirs.data["tensors"] if mine else ():
                    what = f"{theirs.kind}: {name}"
                    row = found.setdefault((rank, what), Beside(rank, first, what))
                    row.events += 1
                    gap = _gap(mine, theirs, name)
                    row.equal += gap == 0
                    row.gap = max(row.gap, gap)
    return list(found.values())


def _gap(mine, theirs, name: str) -> float:  # type: ignore[no-untyped-def]
    if name not in mine.data["tensors"] or mine.shape(name) != theirs.shape(name):
        return float("inf")
    a, b = (to_float32(e.tensor(name), e.dtype(name)) for e in (mine, theirs))
    return float(np.abs(a - b).max(initial=0)) / max(float(np.abs(a).max(initial=0)), 1e-30)


def ranks(pair: Pair) -> Html:
    """The ranks of each capture, tensor by tensor."""
    rows: list[tuple[object, ...]] = []
    for path, book in dict(zip(pair.paths, pair.books, strict=True)).items():
        for b in compared(book.capture) if book and book.capture else ():
            same = "= the same" if b.equal == b.events else f"≠ {b.gap:.2g}"
            wide = b.gap > recorded.ROUNDING
            said = element("b", same) if wide else same
            rows.append((path.rsplit("/", 1)[-1], b.rank, b.first, b.what, b.events, b.equal, said))
    if not rows:
        why = "one rank a group was recorded; this records all: "
        return panel(f"Ranks are not compared: {why}", code("eaglelab capture --all-ranks"))
    head = ("capture", "rank", "beside", "what", "events", "equal", "largest difference")
    return table(head, rows, f"Ranks that must hold the same; up to {recorded.ROUNDING:g} is rounding (≠)")
