"""06: which fix pays? What diagnose prices, and edits asked for, simulated on the texts of this capture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eaglelab import charts, paired
from eaglelab.counterfactual import Prediction, undo
from eaglelab.errors import BadInput
from eaglelab.html import Html, code, table, verdict_box
from eaglelab.simulate import Rounds
from eaglelab.workbook.book import Workbook

if TYPE_CHECKING:
    from eaglelab.diff import Difference


CAUSE, WHAT_IF = "cause found", "what if"
FEW = (
    f"No 95 % interval: this capture holds under {paired.FEWEST} stretches of {paired.STRETCH} generated "
    "tokens. Capture more prompts, or longer answers."
)


@dataclass(frozen=True)
class Fix:
    """One edit and what it would give; `gain`: against now, along the same texts (upper: after the edit)."""

    name: str
    origin: str  # CAUSE or WHAT_IF
    found: Prediction
    gain: paired.Drop | None

    @property
    def pays(self) -> bool | None:
        """More accept length beyond noise and 5 %; None: no interval."""
        if self.gain is None or self.gain.interval is None:
            return None
        return self.gain.interval[0] > 0 and self.gain.value > 0.05 * self.gain.lower


def parse_edits(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Edits separated by "|" -> (flags, config) each: SGLang flags, or a JSON object of config.json's fields.

    >>> parse_edits('--speculative-num-steps 3 | {"rope_theta": 5e5}')
    [('--speculative-num-steps 3', {}), ('', {'rope_theta': 500000.0})]
    """
    out: list[tuple[str, dict[str, Any]]] = []
    for part in filter(None, (p.strip() for p in text.split("|"))):
        if part.startswith("--"):
            out.append((part, {}))
            continue
        try:
            config = json.loads(part)
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise BadInput(
                f"edits: {part!r} is neither SGLang flags (--...) nor a JSON object of config fields"
            )
        out.append(("", config))
    return out


def now(book: Workbook) -> Rounds | None:
    """The server's own rounds."""
    return book.evidence.ladder.rungs["5"].rounds if book.evidence.ladder else None


def fixes(book: Workbook, edits: str = "") -> list[Fix]:
    """What diagnose prices, then the edits asked for."""
    key = f"fixes {edits}"
    if key not in book.kept:
        asked = [
            _fix(book, flags or _fields(config), WHAT_IF, _undo(book, flags, config))
            for flags, config in parse_edits(edits)
        ]
        book.kept[key] = [*_causes(book), *asked]
    return book.kept[key]


def _causes(book: Workbook) -> list[Fix]:
    """Each cause that files and flags show, all of them together, then what only the server shows."""
    from eaglelab.checks import feed, static

    e, known = book.evidence, static.culprits(book.evidence)
    sets = [(one,) for one in known[: static.PRICED]] + ([tuple(known)] if len(known) > 1 else [])
    out = []
    for some in sets:
        flags, config, undone = static.undoing(*some)
        changed = [flags, _fields(config), *(f"{d.part}.{d.field} as trained" for d in undone)]
        name = f"all {len(some)} causes" if len(some) > 1 else some[0].slug
        name += f": {', '.join(filter(None, changed))}"
        out.append(_fix(book, name, CAUSE, _undo(book, flags, config, undone)))
    slugs = {one.slug for one in known}
    for f in book.found.failed:
        if f.fault in slugs or f.predicted_accept_length is None or f.rung in (1, 2):
            continue  # rungs 1 and 2: priced on the stored texts, which are not the server's
        rounds = feed.refed(e) if f.rung in (3, 4) else e.ladder and e.ladder.rungs["4"].rounds
        found = Prediction(f.fault, e.launch, rounds=rounds or None, source="as config and launch say")
        out.append(_fix(book, f"{f.fault}: {f.fix or f.title}", CAUSE, found))
    return out


def _undo(
    book: Workbook, flags: str, config: dict[str, Any], undone: Sequence[Difference] = ()
) -> Prediction:
    try:
        return undo(book.evidence, flags, config, undone)
    except BadInput as error:  # no capture; or flags that SGLang would refuse
        return Prediction(flags, book.evidence.launch, reason=str(error))


def _fields(config: dict[str, Any]) -> str:
    return f"config.json: {json.dumps(config)}" if config else ""


def _fix(book: Workbook, name: str, origin: str, found: Prediction) -> Fix:
    before = now(book)
    gain = paired.compare(found.rounds, before, by_start=False) if found.rounds and before else None
    return Fix(name, origin, found, gain)


def answer(book: Workbook, edits: str = "") -> Html:
    """The edit that would bring most, or that none is known to."""
    found, before = fixes(book, edits), now(book)
    priced = [f for f in found if f.found.accept_length is not None]
    if before is None:
        why = (
            book.evidence.ladder.rungs["5"].reason
            if book.evidence.ladder
            else book.evidence.why_not("ladder")
        )
        return verdict_box("inconclusive", None, f"What the server does now was not measured: {why}")
    line = f"accept length now {before.accept_length:.2f}"
    causes = sum(f.origin == CAUSE for f in found)
    details: list[object] = [f"Priced: causes found, {causes}; edits asked for, {len(found) - causes}."]
    best = max(priced, key=lambda f: f.found.accept_length or 0, default=None)
    if best is None or (best.found.accept_length or 0) <= before.accept_length:
        return verdict_box(
            "passed", None, f"None of these: {line}, and no edit is predicted above it.", details
        )
    line = f"{line}, {best.found.accept_length:.2f} after the best edit:"
    details.insert(0, Html(code(best.name)))
    if best.pays is None:
        details.append(FEW)
        return verdict_box("inconclusive", None, line[:1].upper() + line[1:], details)
    word = "failed" if best.origin == CAUSE else "passed"
    low, high = best.gain.interval if best.gain and best.gain.interval else (0.0, 0.0)
    beyond = "beyond noise" if best.pays else "within noise"
    details.append(
        f"Gain {best.gain.value if best.gain else 0:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}: {beyond}."
    )
    return verdict_box(word, None, line[:1].upper() + line[1:], details)


def fixes_figure(book: Workbook, edits: str = "") -> Any:
    before = now(book)
    if before is None:
        return book.missing("ladder")
    rows: list[Any] = [
        ("now: the server", before.accept_length, paired.interval(before), len(before.lengths), "")
    ]
    for f in fixes(book, edits):
        count = len(f.found.rounds.lengths) if f.found.rounds else 0
        rows.append((f.name, f.found.accept_length, f.found.interval, count, f.found.reason or ""))
    return book.figure("fixes", charts.predictions(rows), "accept length now and after each edit")


def fixes_table(book: Workbook, edits: str = "") -> Html:
    """Every edit with its gain, and where the features came from."""
    rows = []
    for f in fixes(book, edits):
        value, gain = f.found.accept_length, f.gain
        between = _between(f.found.interval)
        moved = (
            None
            if gain is None
            else f"{gain.value:+.2f}" + (f" ({_between(gain.interval)})" if gain.interval else "")
        )
        word = {True: "pays", False: "within noise or no gain", None: "no interval"}[f.pays]
        why = f.found.reason or f.found.source
        rows.append((code(f.name), f.origin, value, between, moved, word if value is not None else "–", why))
    head = (
        "edit",
        "origin",
        "accept length",
        "95 % interval",
        "against now",
        "verdict",
        "features, or why not",
    )
    words = "simulated on this capture's own texts; against now: along the same texts"
    few = "" if any(f.found.interval for f in fixes(book, edits)) else f". {FEW}"
    return table(head, rows, f"{len(rows)} edits; {words}{few}")


def causes(book: Workbook) -> Html:
    """Every cause of launch or config, whether or not it is the case here; and all else that was priced."""
    from eaglelab.checks.causes import CAUSES
    from eaglelab.tables import findings_table

    slugs = {cause.slug for cause in CAUSES}
    return findings_table(
        f for f in book.found.findings if f.fault in slugs or f.predicted_accept_length is not None
    )


def _between(found: tuple[float, float] | None) -> str | None:
    return f"{found[0]:.2f} to {found[1]:.2f}" if found else None
