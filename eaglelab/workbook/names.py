"""03: is my checkpoint what the engine thinks it is?"""

from __future__ import annotations

from eaglelab import tables
from eaglelab.html import Html, verdict_box
from eaglelab.workbook.book import Workbook


def answer(book: Workbook) -> Html:
    """Does the engine hold what the file holds, and do with it what training did?"""
    e, loading = book.evidence, book.evidence.loading
    if loading is None:
        return verdict_box("broken", None, f"No: this engine would not serve it: {e.why_not('served')}")
    counts = [f"{d.part}.{d.field}" for d in e.differences if not d.inert]
    live = [m for found in (e.live or {}).values() for m in found]
    wrong = [m.param for m in live if m.equal is False]
    lost = [*loading.dropped, *loading.initial, *e.original.unknown]
    equal = sum(m.equal is True for m in live)
    details = [
        f"Names: {len(loading.dropped)} dropped, {len(loading.initial)} left at initial values, "
        f"{len(e.original.unknown)} unknown.",
        f"Feed and wiring: {len(counts)} differences count{': ' + ', '.join(counts) if counts else ''}.",
        f"Weights: {equal} of {len(live)} live parameters equal the file, {len(wrong)} differ."
        if live
        else f"Weights: not checked, {e.why_not('live parameters')}",
        book.diagnosis,
    ]
    if counts or lost or wrong:
        return verdict_box("failed", None, "No: the engine makes something else of it.", details)
    if not live:
        return verdict_box("inconclusive", None, "By its names and flags, yes; live weights unseen.", details)
    return verdict_box(
        "passed", None, "Yes: names, wiring and live weights are as they were trained.", details
    )


def names(book: Workbook) -> Html:
    """Names that do not meet, then every parameter with its source and its live check."""
    return Html(tables.lost_names_table(book.evidence) + tables.names_table(book.evidence))


def sides(book: Workbook) -> Html:
    """Every field of feed and wiring, trained beside served."""
    return tables.sides_table(book.evidence)


def layer_ids(book: Workbook) -> Html:
    """The same depths as each dialect writes them."""
    from eaglelab.describe import describe

    e = book.evidence
    return tables.facts_table(describe(e.original, e.target, e.launch)["layer_ids"])
