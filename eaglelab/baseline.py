"""Compare a run with an earlier one: what moved, by how much, and whether that is more than noise.

The rule, printed with every comparison: of measurements that are better when higher (accept lengths,
acceptance, agreement of the replay), one has regressed if it fell by more than 5 % of the earlier value and
the 95 % interval of the difference lies below 0. The two runs are independent, so half-widths add in
quadrature. Without an interval on either side the fall alone cannot be told from noise: it is shown, not
judged. Everything else is shown when it changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eaglelab import records
from eaglelab.errors import BadInput
from eaglelab.records import Finding, Measurement

FAULT = "regression-against-baseline"
HIGHER_IS_BETTER = ("accept_length.", "acceptance.", "replay.agreement")
LOSS = 0.05  # the ladder's rule for a drop that matters
EXACT = 1e-9
RULE = (
    "a regression is a fall of more than 5 % whose 95 % interval lies below 0 "
    "(half-widths of the two runs added in quadrature)"
)

How = Literal["regressed", "improved", "within noise", "not judged", "changed", "lost", "new", "same"]


@dataclass(frozen=True)
class Movement:
    """One measurement in two runs; `margin` is the half-width of the 95 % interval of the difference."""

    name: str
    before: float | None
    after: float | None
    margin: float | None
    how: How

    @property
    def moved(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


def load(path: Path) -> list[records.Record]:
    """The records of an earlier run: its folder or its report.jsonl. BadInput if the run is not complete."""
    file = path / "report.jsonl" if path.is_dir() else path
    if not file.exists():
        raise BadInput(f"--baseline {path}: {file.name} is not there; name the folder of an earlier report")
    try:
        found = records.read(file)
    except ValueError as error:
        raise BadInput(f"--baseline: {error}") from error
    if not found or not isinstance(found[-1], records.Summary):
        raise BadInput(f"--baseline {file}: the last line is not a summary; that run did not finish")
    return found


def compare(before: Iterable[records.Record], after: Iterable[records.Record]) -> list[Movement]:
    """Every measurement of both runs, in the order of the later one; those that vanished come last."""
    old = {r.name: r for r in before if isinstance(r, Measurement)}
    new = {r.name: r for r in after if isinstance(r, Measurement)}
    return [
        _movement(name, old.get(name), new.get(name)) for name in [*new, *(n for n in old if n not in new)]
    ]


def _movement(name: str, old: Measurement | None, new: Measurement | None) -> Movement:
    before, after = (m.value if m else None for m in (old, new))
    margin = None
    how: How
    if before is None or after is None:
        how = "same" if before is after else "new" if before is None else "lost"
    elif not name.startswith(HIGHER_IS_BETTER):
        how = "same" if math.isclose(before, after, abs_tol=EXACT) else "changed"
    elif math.isclose(before, after, abs_tol=EXACT):
        how = "same"
    elif not (old and new and old.interval and new.interval):
        how = "not judged"
    else:
        margin = math.hypot(*((high - low) / 2 for low, high in (old.interval, new.interval)))
        beyond = abs(after - before) > max(margin, LOSS * abs(before))
        how = "within noise" if not beyond else "regressed" if after < before else "improved"
    return Movement(name, before, after, margin, how)


CONDITIONS = ("launch", "drafter.sha256", "capture.prompts_sha256", "eaglelab.version", "packages")


def conditions(before: Iterable[records.Record], after: Mapping[str, Any]) -> list[str]:
    """What else differs between the two runs, by their provenance: a movement may come from there."""
    old = next((r.facts for r in before if isinstance(r, records.Provenance)), {})
    then, now = (dict(_leaves(facts)) for facts in (old, after))
    names = [n for n in {**then, **now} if n.startswith(CONDITIONS) and then.get(n) != now.get(n)]
    return ["{}: {} then, {} now".format(name, *unlike(then.get(name), now.get(name))) for name in names]


def unlike(then: Any, now: Any) -> tuple[Any, Any]:
    """Of two command lines the flags in which they differ; else both as they are."""
    if not all(isinstance(side, str) and side.startswith("--") for side in (then, now)):
        return then, now
    before, after = ([flag.strip() for flag in re.split(r"(?:^|\s)(?=--)", side)] for side in (then, now))
    only = ([f for f in a if f not in b] for a, b in ((before, after), (after, before)))
    first, second = (" ".join(flags) or "no such flag" for flags in only)
    return first, second


def _leaves(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def finding(movements: Sequence[Movement], source: str, changed: Sequence[str] = ()) -> Finding:
    """The comparison as one finding: failed on a regression, skipped if nothing could be judged.

    changed: what else differs, see `conditions`.
    """
    fallen = [m for m in movements if m.how == "regressed"]
    judged = [m for m in movements if m.how in ("regressed", "improved", "within noise")]
    judged += [
        m
        for m in movements
        if m.how == "same" and m.name.startswith(HIGHER_IS_BETTER) and m.after is not None
    ]
    evidence = [f"compared with {source}; {RULE}"]
    evidence += [
        f"{m.name}: {m.before:.4g} before, {m.after:.4g} now ({m.moved:+.3g}, interval ±{m.margin:.2g})"
        for m in fallen
    ]
    evidence += [f"{m.name}: {m.before:.4g} before, not measured now" for m in movements if m.how == "lost"]
    if not judged:
        evidence.append("no measurement has an interval in both runs")
    evidence += [f"also changed: {line}" for line in changed]
    return Finding(
        fault=FAULT,
        verdict="failed" if fallen else "passed" if judged else "skipped",
        title=f"{len(fallen)} of {len(judged)} measurements fell beyond noise since the baseline",
        evidence=evidence,
        fix="Compare launch, versions and checkpoint in the two reports' provenance." if fallen else None,
    )
