"""07: what moved between two captures, or between two reports?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from eaglelab import baseline, charts, plots, records
from eaglelab.errors import BadInput
from eaglelab.html import Html, panel, table, verdict_box
from eaglelab.misses import generations
from eaglelab.workbook.book import BookParams, Workbook, again, book_params, read_book

if TYPE_CHECKING:
    from eaglelab.traces import Trace


@dataclass
class Pair:
    """Two runs as records; the books behind them where they are captures."""

    paths: tuple[str, str]
    records: tuple[list[Any], list[Any]]
    books: tuple[Workbook | None, Workbook | None]
    movements: list[baseline.Movement] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)


def open_pair(namespace: Mapping[str, Any]) -> Pair:
    """`before` and `after` of a notebook's names, each a capture or a report's folder or report.jsonl.

    Neither given: the shipped capture against itself, where nothing may move.
    """
    before, after = (str(namespace.get(name) or "") for name in ("before", "after"))
    if bool(before) != bool(after):
        raise BadInput("give both before and after, or neither: each a capture, or a report's folder")
    given = {name: namespace.get(name, "") for name in ("drafter", "target", "features", "launch")}
    if not before:
        demo = book_params(given)
        before = after = demo.capture
        given |= {"drafter": demo.drafter, "target": demo.target, "features": demo.features}
    sides = [_side(path, given) for path in (before, after)]
    pair = Pair((before, after), (sides[0][0], sides[1][0]), (sides[0][1], sides[1][1]))
    pair.own = {n: str(namespace.get(n) or "") for n in ("before", "after", *given)}
    pair.movements = baseline.compare(*pair.records)
    facts = next((r.facts for r in pair.records[1] if isinstance(r, records.Provenance)), {})
    pair.conditions = baseline.conditions(pair.records[0], facts)
    return pair


def _side(path: str, given: Mapping[str, Any]) -> tuple[list[Any], Workbook | None]:
    """The records of one run, and its book if it is a capture."""
    folder = Path(path).expanduser()
    if (folder / "capture.json").exists():
        params = cast(BookParams, BookParams.checked({**given, "capture": str(folder)}))
        book = read_book(params)
        return book.found.records(), book
    return list(baseline.load(folder)), None


def answer(pair: Pair) -> Html:
    """What fell, what rose, what else differs between the two runs."""
    how = {word: [m for m in pair.movements if m.how == word] for word in ("regressed", "improved")}
    judged = [m for m in pair.movements if m.how in ("regressed", "improved", "within noise", "same")]
    still = sum(m.how == "same" for m in pair.movements)
    details = [f"{still} of {len(pair.movements)} measurements are the same; {baseline.RULE}."]
    if pair.paths[0] == pair.paths[1]:
        details.insert(0, "Both are the same run: nothing may move. Give before and after to compare two.")
    details += [f"{m.name}: {m.before:.3g} before, {m.after:.3g} after." for v in how.values() for m in v]
    details.append(f"{len(pair.conditions)} conditions differ: {'; '.join(pair.conditions[:3]) or 'none'}.")
    if how["regressed"]:
        return verdict_box(
            "failed", None, f"{len(how['regressed'])} measurements fell beyond noise.", details
        )
    if not judged:
        return verdict_box("inconclusive", None, "No measurement can be judged in both runs.", details)
    line = (
        f"{len(how['improved'])} measurements rose beyond noise."
        if how["improved"]
        else "Nothing beyond noise."
    )
    return verdict_box("passed", None, line, details)


def figure(pair: Pair) -> Any:
    """Accept lengths before and after."""
    from IPython.display import Image

    picture = charts.movements(pair.movements)
    return Image(data=plots.png(picture), format="png", alt="accept lengths before and after")


def moved(pair: Pair) -> Html:
    """Every measurement that moved."""
    from eaglelab.tables import comparison_table

    if all(m.how == "same" for m in pair.movements):
        return panel(f"None of {len(pair.movements)} measurements moved.")
    return comparison_table(pair.movements, pair.paths[0])


def remake(pair: Pair) -> Html:
    """The command that makes this page again."""
    return again("07_compare_two_captures", pair.own)


def conditions(pair: Pair) -> Html:
    """What else differs: launch, drafter, prompts, versions."""
    rows = [line.partition(": ")[::2] for line in pair.conditions]
    if not rows:
        return panel("Launch, drafter, prompts and versions are the same in both.")
    return table(("condition", "then and now"), rows, "A movement may come from here")


def chunks(pair: Pair) -> Html:
    """Row norms of each chunk, before and after."""
    before, after = pair.books
    if before is None or after is None:
        return panel("Reports hold no rows: give two captures to compare what was fed.")
    old, new = before.chunk_stats(), after.chunk_stats()
    rows = []
    for i in range(max(len(old), len(new))):
        a, b = (side[i] if i < len(side) else None for side in (old, new))
        norms = [None if c is None else c.norms.mean for c in (a, b)]
        change = None if None in norms or not norms[0] else f"{norms[1] / norms[0] - 1:+.2%}"  # type: ignore[operator]
        rows.append(
            (a and a.name, b and b.name, *norms, change, *(None if c is None else c.rows for c in (a, b)))
        )
    head = ("chunk before", "chunk after", "row norm before", "after", "change", "rows before", "after")
    return table(head, rows, "What the drafter was fed")


def same_prompts(before: list[Trace], after: list[Trace]) -> list[tuple[Trace, Trace, int | None]]:
    """Requests with the same prompt in both, and where their outputs part (None: nowhere that both reach)."""
    old = {tuple(t.prompt_ids): t for t in before}
    found = []
    for trace in after:
        then = old.get(tuple(trace.prompt_ids))
        if then is not None:
            both = zip(then.tokens[then.prompt_len :], trace.tokens[trace.prompt_len :], strict=False)
            found.append((then, trace, next((i for i, (a, b) in enumerate(both) if a != b), None)))
    return found


def prompts(pair: Pair, most: int = 20) -> Html:
    """The same prompts in both, those that lost most first."""
    before, after = pair.books
    if before is None or after is None or before.capture is None or after.capture is None:
        return panel("Reports hold no texts: give two captures to compare prompt by prompt.")
    found = same_prompts(generations(before.capture), generations(after.capture))
    found.sort(key=lambda f: (f[1].accept_length or 0) - (f[0].accept_length or 0))
    rows = []
    for then, now, parts in found[:most]:
        gain = (now.accept_length or 0) - (then.accept_length or 0)
        same = "same text" if parts is None else f"parts at token {parts + 1}"
        label = after.label(now.prompt_ids, 48)
        rows.append((label, then.accept_length, now.accept_length, f"{gain:+.2f}", len(now.rounds), same))
    head = ("prompt ends", "accept length before", "after", "moved by", "rounds after", "output")
    return table(head, rows, f"{len(rows)} of {len(found)} prompts in both, those that lost most first")
