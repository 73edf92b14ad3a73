"""The static diagnosis: one finding a cause, then differences without a name and tensors without a home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eaglelab.checks import Check, changed, launches
from eaglelab.checks.causes import CAUSES, Cause, Implicated, implicated
from eaglelab.checks.differences import describe
from eaglelab.checks.names import CHANGED, Named, fix, named, title
from eaglelab.diff import Difference
from eaglelab.evidence import Evidence
from eaglelab.records import Finding


@dataclass(frozen=True)
class Culprit:
    """A cause with a name, and what undoes it: flags and config fields, or `undone` fields, as trained."""

    slug: str
    title: str
    fix: str
    explains: tuple[Difference, ...] = ()
    flags: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    undone: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()


Price = Callable[..., tuple[float | None, str]]  # (culprit, ...) -> predicted accept length, a sentence

FEED_FIELDS = ("depths", "width", "final_norm", "basis")
FIX = "make the served value the trained one: by the drafter's config, the flags, or an engine that knows it"
REFUSED = Check(
    "engine-refuses-drafter", "this engine serves this drafter", "this engine refuses this drafter", rung=4
)
DROPPED = Check(
    "tensors-dropped",
    "every tensor of the file finds a parameter of this engine",
    "tensors of the file are dropped without a word",
    "rename them as this engine's loader wants (merge an adapter first), or use an engine that knows them",
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
GENERAL = (DROPPED, UNLOADED, FEED, WIRING)
SERVER_IS_RIGHT = "leave the server: correct the trainer's file or config, or give the drafter that it serves"
WORSE = 0.9  # of what the server commits now: less would come of serving what the trainer's file says
PRICED = 6  # causes: each price simulates every text of the capture


def findings(evidence: Evidence, price: Price | None = None) -> list[Finding]:
    """One finding a cause, then what is left over. `price` tells what undoing a cause would bring."""
    found = launches.findings(evidence)
    if evidence.served is None:
        return [*found, *refused(evidence)]
    guilty, groups, culprits = _named_causes(evidence)
    found += [_cause(one, culprits, evidence, price) for one in culprits]
    refusals = [finding for item in guilty for finding in _then_refused(item)]
    slugs = {one.slug for one in culprits}
    for cause in CAUSES:
        if cause.slug not in slugs:
            check = Check(cause.slug, f"not the case: {cause.title}", cause.title, rung=4)
            found.append(check.passed("undoing it changes no difference between training and serving"))
    left = [d for g in groups if g.slug is None for d in g.differences]
    explained = [d for one in culprits for d in one.explains]
    return found + refusals + _left_over(evidence, left, explained)


def culprits(evidence: Evidence) -> list[Culprit]:
    """Every cause with a name of a difference between training and serving."""
    return _named_causes(evidence)[2] if evidence.served else []


def undoing(*some: Culprit) -> tuple[str, dict[str, Any], list[Difference]]:
    """Flags, config fields and differences that undo these causes together: for `counterfactual.undo`."""
    flags = " ".join(one.flags for one in some if one.flags)
    config = {name: value for one in some for name, value in one.config.items()}
    return flags, config, [d for one in some for d in one.undone]


def _named_causes(evidence: Evidence) -> tuple[list[Implicated], list[Named], list[Culprit]]:
    """-> causes of launch and config, the differences left to them by name, and both as culprits."""
    guilty = implicated(evidence)
    remaining = tuple(d for d in evidence.differences if not d.inert)
    if guilty:
        elsewhere = {d.field for item in guilty[1:] for d in item.explains}
        remaining = tuple(d for d in guilty[0].remaining if d.field not in elsewhere)
    groups = named(evidence, remaining)
    found = [_known(cause, item) for item in guilty for cause in item.causes]
    found += [_of_group(g.slug, g, evidence) for g in groups if g.slug]
    return guilty, groups, found


def _of_group(slug: str, group: Named, evidence: Evidence) -> Culprit:
    notes: tuple[str, ...] = ()
    how = fix(slug, group.differences[0])
    if slug == CHANGED.fault and (said := changed.another(evidence, group.differences)):
        notes, how = (said,), "convert the checkpoint that is meant, and serve that"
    return Culprit(slug, title(slug), how, group.differences, undone=group.differences, notes=notes)


def refused(evidence: Evidence) -> list[Finding]:
    """Why this engine stops, by every name that the reasons have; and causes of the launch beside them."""
    why = evidence.why_not("served")
    names = list(dict.fromkeys(evidence.refused))
    found = [
        Check(cause.slug, "", cause.title, cause.fix, rung=4).failed(f"seen beside a refusal: {why}")
        for cause in CAUSES
        if cause.present(evidence.checkpoint, evidence.launch)
    ]
    found += [Check(name, "", title(name), fix(name), rung=4).failed(why) for name in names]
    return [*found, REFUSED.failed(why)]


def _then_refused(item: Implicated) -> list[Finding]:
    """What would stop the engine once these causes are undone."""
    if not item.refusal:
        return []
    line = f"once the launch is corrected this engine refuses the drafter: {item.refusal}"
    return [
        Check(name, "", title(name), fix(name), rung=4).failed(line) for name in dict.fromkeys(item.faults)
    ]


def _known(cause: Cause, item: Implicated) -> Culprit:
    others = [c for c in item.causes if c is not cause]
    notes = [f"together with {other.slug}: {other.title}" for other in others]
    if item.remaining:
        notes.append("still different after this fix: " + ", ".join(d.field for d in item.remaining))
    if item.refusal:
        notes.append(f"after this fix: {item.refusal}")
    return Culprit(
        cause.slug, cause.title, cause.fix, item.explains, cause.flags, dict(cause.config), (), tuple(notes)
    )


def _cause(one: Culprit, culprits: list[Culprit], evidence: Evidence, price: Price | None) -> Finding:
    lines = list(dict.fromkeys(describe(d, evidence) for d in one.explains)) + list(one.notes)
    rung = 3 if any(d.field in FEED_FIELDS for d in one.undone) else 4
    predicted = None
    if price and culprits.index(one) < PRICED:
        predicted, sentence = price(one)
        if why := _server_is_right(evidence, one, predicted if len(culprits) == 1 else None):
            return Check(one.slug, "", one.title, SERVER_IS_RIGHT, rung=rung).failed(*lines, why)
        lines += [sentence] if sentence else []
        if len(culprits) > 1:
            _, sentence = price(*culprits)
            lines += [f"all {len(culprits)} causes undone together: {sentence}"] if sentence else []
    finding = Check(one.slug, "", one.title, one.fix, rung=rung).failed(*lines)
    return finding.model_copy(update={"predicted_accept_length": predicted})


def _server_is_right(evidence: Evidence, one: Culprit, predicted: float | None) -> str:
    """Why the trainer's file or config is at fault, not the server; "" if nothing says so."""
    doubted = {gain.edit.slug for gain in evidence.doubt.gains} if evidence.doubt else set()
    if one.undone and one.slug in doubted:
        return "the drafter itself drafts better as it is served than as its config says"
    rung = evidence.ladder.rungs.get("5") if evidence.ladder else None
    now = rung.accept_length if rung else None
    if one.undone and predicted is not None and now is not None and predicted < WORSE * now:
        return f"the server commits {now:.2f} tokens a verify; as the trainer's file says: {predicted:.2f}"
    return ""


def _left_over(evidence: Evidence, left: list[Difference], explained: list[Difference]) -> list[Finding]:
    """Differences that count and have no name, by kind. A kind without any passes."""
    kinds: dict[Check, list[Difference]] = {check: [] for check in GENERAL}
    for difference in left:
        kinds[_kind(difference.field)].append(difference)
    beyond = {_kind(d.field) for d in explained}
    inert = [f"makes no difference: {describe(d, evidence)}" for d in evidence.differences if d.inert]
    found = []
    for check, some in kinds.items():
        if some:
            how, lines = check, [describe(d, evidence) for d in some]
            if check is FEED and _stored_as_served(evidence):
                how = replace(check, fix=SERVER_IS_RIGHT)
                lines.append("the stored features are of the depths that the server feeds")
            found.append(how.failed(*lines))
            continue
        passed = check.passed(*(dict.fromkeys(inert) if check is WIRING else ()))
        more = f"beyond what a known cause explains: {check.good}"
        found.append(passed.model_copy(update={"title": more}) if check in beyond else passed)
    return found


def _stored_as_served(evidence: Evidence) -> bool:
    """Whether the trainer's own rows are of the depths that are served, whatever its config says."""
    names = evidence.data.depths if evidence.data else None
    if names is None or evidence.served is None:
        return False
    return tuple(c.depth for c in names.chunks[:-1]) == evidence.served[0].depths


def _kind(field: str) -> Check:
    kinds = {"dropped": DROPPED, "unloaded": UNLOADED, **dict.fromkeys(FEED_FIELDS, FEED)}
    return kinds.get(field, WIRING)


def priced_once(price: Price) -> Price:
    """The same, each set of causes simulated once."""
    known: dict[tuple[str, ...], tuple[float | None, str]] = {}

    def again(*some: Culprit) -> tuple[float | None, str]:
        key = tuple(one.slug for one in some)
        if key not in known:
            known[key] = price(*some)
        return known[key]

    return again
