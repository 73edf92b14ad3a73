"""02: what is my drafter fed?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eaglelab import charts, tables
from eaglelab.checks.feed import NAMED
from eaglelab.drift import FAR, Drift
from eaglelab.errors import BadInput
from eaglelab.html import Html, panel, verdict_box
from eaglelab.workbook.book import Workbook

if TYPE_CHECKING:
    from eaglelab.depths import ChunkName


def answer(book: Workbook) -> Html:
    """Width and depths, what failed, outliers, and drift, a line each."""
    if book.capture is None or not book.capture.widths:
        return verdict_box("inconclusive", None, f"Nothing was captured: {book.evidence.why_not('capture')}")
    faults = {"feed-width", "feed-depths", "features-not-finite", *NAMED}
    failed = [f.title for f in book.found.failed if f.fault in faults]
    named = book.evidence.depths.chunks if book.evidence.depths else ()
    what = ", ".join(map(_spot, named))
    widths = book.capture.widths
    width = widths.get("prefill_extend", widths.get("decode_extend"))
    meant = book.evidence.trained[0]
    line = f"Rows of {width} numbers: {what or 'depths not recognised'}."
    trained = f"Trained on rows of {meant.width}: depths {', '.join(map(str, meant.depths)) or 'unknown'}."
    details = [trained, *(f"Failed: {title}." for title in failed)]
    chunks = book.chunk_stats()
    details.append(f"{sum(len(c.outliers) for c in chunks)} outlier dimensions in {len(chunks)} chunks.")
    details += [drift_line(drifts(book)), book.diagnosis]
    return verdict_box("failed" if failed else "passed", None, line, details)


def _spot(chunk: ChunkName) -> str:
    """What a chunk was recognised as, in a few words."""
    if chunk.related:
        return f"{chunk.related.place} ({chunk.related.kind})"
    return "no recorded depth" if chunk.match == "none" else str(chunk.place)


def drift_line(found: list[Drift] | str) -> str:
    """Drift in a sentence."""
    if isinstance(found, str):
        return f"Stored against served: not compared, {found}."
    if found[0].way == "same positions":
        worst = max(d.error or 0.0 for d in found)
        word = "more than rounding explains" if worst > FAR else "the same rows up to rounding"
        which = f"same texts and positions, {found[0].source}"
        return f"Stored against served, {which}: median error {worst:.2g}, {word}."
    moved, whole = sum(d.moved for d in found), sum(len(d.shifts) for d in found)
    return (
        f"Stored against served, other texts: the mean of {moved} of {whole} dimensions moved by more than "
        "one standard deviation."
    )


def drifts(book: Workbook) -> list[Drift] | str:
    """Drift per chunk, or why there is none; computed once a book."""
    if "drifts" not in book.kept:
        book.kept["drifts"] = _drifts(book)
    return book.kept["drifts"]


def _drifts(book: Workbook) -> list[Drift] | str:
    from eaglelab.drift import drift
    from eaglelab.features import StoredFeatures

    if not book.params.features:
        return "no stored features were given (features)"
    if book.capture is None:
        return book.evidence.why_not("capture")
    given, feed = book.params, book.evidence.trained[0]
    stored = StoredFeatures.open(given.features, strict=False, allow_pickle=given.allow_pickle)
    if not stored.samples:
        return "no stored text has a row for each of its tokens"
    names = [f"depth {d}" for d in feed.depths] or [f"chunk {i}" for i in range(stored.chunks)]
    try:
        return drift(book.capture, stored, feed, names)
    except BadInput as error:
        return str(error)


def drift_table(book: Workbook) -> Html:
    found = drifts(book)
    return panel(f"Not compared: {found}") if isinstance(found, str) else tables.drift_table(found)


def drift_figure(book: Workbook) -> Any:
    found = drifts(book)
    if isinstance(found, str):
        return panel(f"Not compared: {found}")
    return book.figure("drift", charts.drift(found), "how far the mean of each dimension moved")


def dimensions(book: Workbook) -> Any:
    """Every dimension of what is fed, a panel a chunk."""
    stats = book.evidence.stats
    if stats is None:
        return book.missing("stats")
    figure = charts.dimensions(stats, [c.name for c in book.chunk_stats()])
    return book.figure("dimensions", figure, "root mean square of every dimension")


def outliers(book: Workbook) -> Html:
    return tables.outliers_table(book.chunk_stats()) if book.evidence.stats else book.missing("stats")


def fingerprint(book: Workbook) -> Any:
    """Each chunk against every depth of the target."""
    if book.evidence.depths is None:
        return book.missing("depths")
    return book.figure("depths", charts.depth_errors(book.evidence.depths.chunks), "error at every depth")
