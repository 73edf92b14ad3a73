"""The bench's table and totals, as Markdown, as a page of a notebook, and on the console."""

from __future__ import annotations

import json
from pathlib import Path

from eaglelab.records import Finding, Measurement, Summary, summarise

from .judge import Outcome, Required, required

KINDS = {
    "fault": "Single faults",
    "healthy": "Healthy variants",
    "pair": "Pairs of faults",
    "out-of-sight": "Faults out of the checks' sight",
}
HEADS = ("", "case", "accept length before", "after", "rung", "named first", "rank of the true cause", "s")


def length(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def cells(found: Outcome) -> tuple[str, ...]:
    """One row. An accept length that no server gave is marked ~ (simulated)."""
    mark = "~" if found.source == "simulated" else ""
    before, after = (mark + length(v) if v is not None else "–" for v in (found.before, found.after))
    ranks = " + ".join("–" if r is None else str(r) for r in found.ranks)
    first = found.named[0] if found.named else found.verdict
    if found.error and not found.named:
        first = found.error
    rungs = "–" if found.rung is None else str(found.rung)
    if found.placed is not None and found.placed != found.rung:
        rungs += f" (placed on {found.placed})"
    ok = "✓" if found.passed else "✗"
    return ok, found.name, before, after, rungs, first[:90], ranks, f"{found.seconds:.1f}"


def markdown(outcomes: list[Outcome], rates: list[Required]) -> str:
    """The page: totals, then a table a kind."""
    lines = ["# Fault bench", "", "| | required | reached | |", "|---|---|---|---|"]
    for rate in rates:
        bound = f"≥ {rate.least:g}" if rate.least is not None else f"≤ {rate.most:g}"
        value = "not run" if rate.value is None else f"{rate.value:.3g}"
        lines.append(f"| {rate.definition} | {bound} | {value} | {'✓' if rate.met else '✗'} |")
    lines += ["", "~ marks accept lengths that were simulated along the target's own text; the others are a"]
    lines += ["genuine server's. – : it does not start, or nothing here can price it."]
    for kind, title in KINDS.items():
        some = [o for o in outcomes if o.kind == kind]
        if not some:
            continue
        lines += ["", f"## {title} ({len(some)})", "", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells(o))} |" for o in some]
    return "\n".join(lines) + "\n"


def console(rates: list[Required], outcomes: list[Outcome]) -> str:
    """The totals and what was missed, for a terminal."""
    lines = []
    for rate in rates:
        bound = f">= {rate.least:g}" if rate.least is not None else f"<= {rate.most:g}"
        value = "not run" if rate.value is None else f"{rate.value:.3g}"
        lines.append(f"{'ok    ' if rate.met else 'MISSED'} {value:>8} ({bound}) {rate.definition}")
    for one in outcomes:
        if not one.passed:
            said = ", ".join(one.named) or one.error or one.verdict
            lines.append(f"missed: {one.name} ({' + '.join(one.slugs) or one.kind}): {said}"[:220])
    return "\n".join(lines)


def summary(outcomes: list[Outcome], rates: list[Required]) -> Summary:
    """The last line of the records: what was required, met or not; healthy if all was."""
    missed = [rate for rate in rates if not rate.met]
    findings = [
        Finding(
            fault=rate.name,
            verdict="skipped" if rate.value is None else "passed" if rate.met else "failed",
            title=rate.definition,
        )
        for rate in rates
    ]
    verdict = "broken" if missed else "healthy" if outcomes else "inconclusive"
    return summarise(findings, verdict, missed[0].name if missed else None)


def read(folder: Path) -> tuple[list[Outcome], list[Measurement], dict]:
    """What a run left in its folder: cases, totals, and its provenance."""
    outcomes, measured, facts = [], [], {}
    for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if values["type"] == "case":
            outcomes.append(Outcome(**values))
        elif values["type"] == "measurement":
            measured.append(Measurement(**values))
        elif values["type"] == "provenance":
            facts = values["facts"]
    return outcomes, measured, facts


def page(folder: str | Path) -> object:
    """The same page for a notebook, from the records of a run."""
    from IPython.display import Markdown

    if not (Path(folder) / "records.jsonl").exists():
        return Markdown(
            "No run of the fault bench is here yet: `make faultbench` (or `make faultbench FAST=1`) first."
        )
    outcomes, measured, _ = read(Path(folder))
    whole = any(m.name == "faultbench.faults" for m in measured)
    return Markdown(markdown(outcomes, required(outcomes, whole)))
