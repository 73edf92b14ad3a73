"""The static diagnosis: causes that explain a difference, differences without one, tensors without a home."""

from __future__ import annotations

from collections.abc import Callable

from eaglelab.checks import Check
from eaglelab.checks.causes import CAUSES, Implicated, implicated
from eaglelab.checks.differences import describe
from eaglelab.evidence import Evidence
from eaglelab.records import Finding

Price = Callable[[Implicated], tuple[float | None, str]]  # -> predicted accept length, a sentence

FEED_FIELDS = ("depths", "width", "final_norm", "basis")
FIX = "make the served value the trained one: by the drafter's config, the flags, or an engine that knows it"
REFUSED = Check(
    "engine-refuses-drafter", "this engine serves this drafter", "this engine refuses this drafter", rung=4
)
DROPPED = Check(
    "tensors-dropped",
    "every tensor of the file finds a parameter of this engine",
    "tensors of the file are dropped without a word",
    "rename them as this engine's loader wants, or use an engine that knows them",
    rung=4,
)
UNLOADED = Check(
    "parameters-not-loaded",
    "every parameter gets its values from a tensor",
    "parameters stay at their initial values",
    "export the missing tensors, or rename those that were dropped",
    rung=4,
)
FEED = Check(
    "feed-difference", "training and serving agree on the feed", "the drafter is fed otherwise", FIX, rung=3
)
WIRING = Check(
    "wiring-difference",
    "training and serving agree on the wiring",
    "the drafter is wired otherwise",
    FIX,
    rung=4,
)


def findings(evidence: Evidence, price: Price | None = None) -> list[Finding]:
    """One finding a known cause, then what is left over. `price` tells what undoing a cause would bring."""
    if evidence.served is None:
        return [REFUSED.failed(evidence.why_not("served"))]
    guilty = implicated(evidence)
    found = [_cause(item, evidence, price) for item in guilty]
    named = {cause.slug for item in guilty for cause in item.causes}
    for cause in CAUSES:
        if cause.slug not in named:
            check = Check(cause.slug, f"not the case: {cause.title}", cause.title, rung=4)
            found.append(check.passed("undoing it changes no difference between training and serving"))
    explained = {d.field for item in guilty for d in item.explains}
    return found + _left_over(evidence, explained)


def _cause(item: Implicated, evidence: Evidence, price: Price | None) -> Finding:
    lines = [describe(d, evidence) for d in item.explains]
    if item.remaining:
        lines.append("still different after this fix: " + ", ".join(d.field for d in item.remaining))
    predicted, sentence = price(item) if price else (None, "")
    if sentence:
        lines.append(sentence)
    first, *others = item.causes
    lines += [f"together with {other.slug}: {other.title}" for other in others]
    title = " and ".join(cause.title for cause in item.causes)
    fix = "; and ".join(cause.fix for cause in item.causes)
    finding = Check(first.slug, "", title, fix, rung=4).failed(*lines)
    return finding.model_copy(update={"predicted_accept_length": predicted})


def _left_over(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Differences that count and that no known cause explains, by kind. A kind without any passes."""
    kinds: dict[Check, list[str]] = {DROPPED: [], UNLOADED: [], FEED: [], WIRING: []}
    inert, beyond = [], set()
    for difference in evidence.differences:
        check, words = _kind(difference.field), describe(difference, evidence)
        if difference.inert:
            inert.append(f"makes no difference: {words}")
        elif difference.field in explained:
            beyond.add(check)
        else:
            kinds[check].append(words)
    found = []
    for check, lines in kinds.items():
        if lines:
            found.append(check.failed(*lines))
            continue
        passed = check.passed(*(dict.fromkeys(inert) if check is WIRING else ()))
        more = f"beyond what a known cause explains: {check.good}"
        found.append(passed.model_copy(update={"title": more}) if check in beyond else passed)
    return found


def _kind(field: str) -> Check:
    named = {"dropped": DROPPED, "unloaded": UNLOADED, **dict.fromkeys(FEED_FIELDS, FEED)}
    return named.get(field, WIRING)
