"""06: which fix pays? Edits of launch or config, each simulated on the texts of this capture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eaglelab import charts, paired
from eaglelab.errors import BadInput
from eaglelab.html import Html, code, table, verdict_box
from eaglelab.simulate import Rounds
from eaglelab.workbook.book import Workbook

if TYPE_CHECKING:
    from eaglelab.counterfactual import Prediction


@dataclass(frozen=True)
class Fix:
    """One edit and what it would give; `gain`: against now, along the same texts (upper: after the edit)."""

    name: str
    origin: str  # "cause found" or "what if"
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
    """The causes that were found, then the edits asked for."""
    from eaglelab.checks.causes import implicated

    key = f"fixes {edits}"
    if key not in book.kept:
        asked = [("what if", flags, config) for flags, config in parse_edits(edits)]
        found = implicated(book.evidence) if book.evidence.served else []
        causes = [("cause found", item.flags, item.config) for item in found]
        book.kept[key] = [_fix(book, *edit) for edit in causes + asked]
    return book.kept[key]


def _fix(book: Workbook, origin: str, flags: str, config: dict[str, Any]) -> Fix:
    from eaglelab.counterfactual import Prediction, counterfactual

    e, name = book.evidence, flags or f"config.json: {json.dumps(config)}"
    if flags and config:
        name = f"{flags}, config.json: {json.dumps(config)}"
    try:
        if book.capture is None or e.target is None:
            raise BadInput(e.why_not("capture" if book.capture is None else "ladder"))
        found = counterfactual(book.capture, e.checkpoint, e.target, flags, config, e.launch)
    except BadInput as error:  # flags that SGLang would refuse, too
        found = Prediction(name, e.launch, reason=str(error))
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
    causes = sum(f.origin == "cause found" for f in found)
    details: list[object] = [f"{causes} causes found, {len(found) - causes} edits asked for."]
    best = max(priced, key=lambda f: f.found.accept_length or 0, default=None)
    if best is None or (best.found.accept_length or 0) <= before.accept_length:
        return verdict_box(
            "passed", None, f"None of these: {line}, and no edit is predicted above it.", details
        )
    line = f"{line}, {best.found.accept_length:.2f} after the best edit:"
    details.insert(0, Html(code(best.name)))
    if best.pays is None:
        details.append("Too few stretches of text for an interval of the gain: capture more prompts.")
        return verdict_box("inconclusive", None, line[:1].upper() + line[1:], details)
    word = "failed" if best.origin == "cause found" else "passed"
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
    words = (
        "simulated on this capture's own texts; accept length is not speed: more steps cost more time a round"
    )
    return table(head, rows, f"{len(rows)} edits; {words}")


def causes(book: Workbook) -> Html:
    """Every cause that is known, and whether it is the case here."""
    from eaglelab.checks.causes import CAUSES
    from eaglelab.tables import findings_table

    slugs = {cause.slug for cause in CAUSES}
    return findings_table(f for f in book.found.findings if f.fault in slugs)


def _between(found: tuple[float, float] | None) -> str | None:
    return f"{found[0]:.2f} to {found[1]:.2f}" if found else None
