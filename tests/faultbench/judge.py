"""What counts as found: one outcome a case, and the rates that the bench requires."""

from __future__ import annotations

from statistics import median
from typing import Any, Literal

from pydantic import BaseModel

from eaglelab.records import Measurement

from .cases import Case, Kind

PLACES = 4  # both causes of a pair must be among so many


class Outcome(BaseModel):
    """One case, run: a line of the bench's records.

    named: the slugs of failed findings, first first, each once. ranks: of each true cause among them (from
    1), None where it is not. placed: rung of the first failed finding. before, after, predicted: accept
    lengths (tokens per verify), with `source`, what gave the first two. passed: as the kind of case asks.
    """

    type: Literal["case"] = "case"
    name: str
    kind: Kind
    slugs: list[str]
    rung: int | None
    untouched: bool
    server: str
    sweep: str
    note: str
    verdict: str = ""
    named: list[str] = []
    ranks: list[int | None] = []
    placed: int | None = None
    before: float | None = None
    after: float | None = None
    source: str = ""
    predicted: float | None = None
    relaunch: bool = False
    seconds: float = 0.0
    passed: bool = False
    error: str = ""

    @property
    def fault(self) -> str:
        """What counts once: cases of one sweep are one fault."""
        return self.sweep or self.name


def outcome(case: Case) -> Outcome:
    """An outcome that has not passed yet."""
    return Outcome(
        name=case.name,
        kind=case.kind,
        slugs=list(case.slugs),
        rung=case.rung,
        untouched=case.untouched,
        server=case.server,
        sweep=case.sweep,
        note=case.note,
        relaunch=case.relaunch,
    )


def weigh(found: Outcome, diagnosis: Any, with_capture: bool) -> None:
    """Fill in what a diagnosis said, and whether that passes."""
    failed = diagnosis.failed
    found.verdict = diagnosis.verdict
    found.named = list(dict.fromkeys(f.fault for f in failed))
    found.ranks = [rank(slug, found.named) for slug in found.slugs]
    found.placed = failed[0].rung if failed else None
    true = [f for f in failed if any(f.fault in slug.split("|") for slug in found.slugs)]
    found.predicted = next(
        (f.predicted_accept_length for f in true if f.predicted_accept_length is not None), None
    )
    errored = [f"{f.fault}: {f.evidence}" for f in diagnosis.findings if f.verdict == "errored"]
    found.error = "; ".join(errored)
    if found.kind == "fault":
        found.passed = found.ranks == [1]
    elif found.kind == "pair":
        found.passed = all(r is not None and r <= PLACES for r in found.ranks)
    elif found.kind == "healthy":
        wanted = ("healthy",) if with_capture else ("healthy", "inconclusive")
        found.passed = found.verdict in wanted and not failed and not errored
    else:
        found.passed = found.verdict == "broken" and found.placed == found.rung


def rank(slug: str, named: list[str]) -> int | None:
    """The place of a cause, by any of its names; None where it was not named."""
    return next((i for i, name in enumerate(named, 1) if name in slug.split("|")), None)


def by_fault(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """Single faults, the cases of one sweep together."""
    found: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.kind == "fault":
            found.setdefault(one.fault, []).append(one)
    return found


class Required(BaseModel):
    """One number that the bench must reach. value None: nothing of that kind was run."""

    name: str
    value: float | None
    least: float | None = None
    most: float | None = None
    unit: str
    definition: str

    @property
    def met(self) -> bool:
        if self.value is None:
            return True
        low = self.least is None or self.value >= self.least
        return low and (self.most is None or self.value <= self.most)

    def measurement(self) -> Measurement:
        wanted = f"required: {'at least' if self.least is not None else 'at most'} "
        wanted += f"{self.least if self.least is not None else self.most:g}"
        return Measurement(
            name=self.name,
            value=self.value,
            unit=self.unit,
            definition=f"{self.definition}; {wanted}",
            reason=None if self.value is not None else "no such case was run",
        )


def required(outcomes: list[Outcome], whole: bool) -> list[Required]:
    """The rates that must be reached; and, if the whole bench ran, how many cases it must have."""
    faults = by_fault(outcomes)
    singles = list(faults.values())
    pairs = [o for o in outcomes if o.kind == "pair"]
    healthy = [o for o in outcomes if o.kind == "healthy"]
    hidden = [o for o in outcomes if o.kind == "out-of-sight"]
    errors = [
        abs(o.predicted - o.before)
        for o in outcomes
        if o.relaunch and o.predicted is not None and o.before is not None
    ]
    unpriced = sum(o.relaunch and o.predicted is None for o in outcomes)

    def share(some: list[Any], good: Any) -> float | None:
        return sum(map(good, some)) / len(some) if some else None

    def within(place: int) -> Any:
        return lambda cases: all(r is not None and r <= place for o in cases for r in o.ranks)

    rates: list[tuple[str, float | None, float | None, float | None, str, str]] = [
        ("first", share(singles, within(1)), 0.95, None, "share", "single faults whose true cause is first"),
        (
            "first_three",
            share(singles, within(3)),
            1,
            None,
            "share",
            "single faults, cause in the first three",
        ),
        ("pairs", share(pairs, lambda o: o.passed), 0.8, None, "share", "pairs of faults with both named"),
        (
            "false_alarms",
            sum(not o.passed for o in healthy) if healthy else None,
            None,
            0,
            "cases",
            "healthy variants with a failed finding, an error, or a complete capture not called healthy",
        ),
        ("out_of_sight", share(hidden, lambda o: o.passed), 1, None, "share", "unknown faults on their rung"),
        (
            "prediction_median",
            median(errors) if errors else None,
            None,
            0.1,
            "tokens per verify",
            "median error of the predicted accept length, over faults that were relaunched rightly",
        ),
        ("prediction_worst", max(errors, default=None), None, 0.3, "tokens per verify", "its largest error"),
        (
            "unpriced",
            unpriced if any(o.relaunch for o in outcomes) else None,
            None,
            0,
            "cases",
            "faults that were relaunched rightly and have no prediction",
        ),
    ]
    if whole:
        slugs = {o.slugs[0].split("|")[0] for o in outcomes if o.kind == "fault"}
        hands_off = {o.fault for o in outcomes if o.kind == "fault" and o.untouched}
        genuine = {o.fault for o in outcomes if o.kind == "fault" and o.server}
        counts = (
            ("faults", len(slugs), 40, "distinct slugs among single faults"),
            ("untouched", len(hands_off), 12, "faults with checkpoint, config and launch untouched"),
            ("genuine", len(genuine), 15, "faults on genuine SGLang"),
            ("healthy", len(healthy), 25, "healthy variants"),
            ("pairs_run", len(pairs), 12, "pairs of faults"),
            ("out_of_sight_run", len(hidden), 5, "faults kept out of the checks' sight"),
        )
        rates += [(name, value, least, None, "cases", words) for name, value, least, words in counts]
    return [
        Required(name=f"faultbench.{name}", value=value, least=least, most=most, unit=unit, definition=words)
        for name, value, least, most, unit, words in rates
    ]
