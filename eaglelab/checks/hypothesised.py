"""Faults that no file shows, named by the edit under which the server's or the training's drafts come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eaglelab.checks import Check
from eaglelab.checks.names import fix, title
from eaglelab.evidence import Evidence
from eaglelab.records import Finding

if TYPE_CHECKING:  # they need torch, which files and flags alone do not
    from eaglelab.hypotheses import Search, Tried
    from eaglelab.training import Gain

DOUBTED = "the drafter drafts better if"  # how the first line of a doubt about the trained setting begins
MOST = 2  # names of edits that tie and are told


def runtime(evidence: Evidence) -> list[Finding]:
    """One finding for each edit of the served setting that explains what the server drafts."""
    found = evidence.runtime
    if found is not None and found.nearest is not None:
        near = found.nearest
        finding = _named(
            near.edit.slug, f"{near.edit.words} (in part, or in another form)", near, found, evidence
        )
        return [finding] if finding else []
    if found is None or not found.explaining:
        return []
    first = found.explaining[0]
    if first.parts:
        return [f for part in first.parts if (f := _named(part.slug, part.words, first, found, evidence))]
    told: dict[str, Finding] = {}
    for tried in found.explaining:
        finding = _named(tried.edit.slug, tried.edit.words, tried, found, evidence)
        if finding and finding.fault not in told and len(told) < MOST:
            told[finding.fault] = finding
    others = [t.edit.words for t in found.explaining[1:]]
    if others:
        line = f"as many tokens come out under: {'; '.join(others[:4])}"
        told = {name: f.model_copy(update={"evidence": [*f.evidence, line]}) for name, f in told.items()}
    return list(told.values())


def _named(slug: str | None, words: str, tried: Tried, found: Search, evidence: Evidence) -> Finding | None:
    if slug is None:
        return None
    others = [part.words for part in tried.parts if part.words != words]
    lines = [
        f"the server drafts as if {' and '.join([words, *others])}",
        f"agreement with the server's draft tokens: {found.before:.1%} as its launch and files say, "
        f"{tried.agreement:.1%} so; {found.tokens:,} tokens, {found.tried} edits tried",
        *found.where,
    ]
    finding = Check(slug, "", title(slug), fix(slug), rung=5).failed(*lines)
    rung = evidence.ladder.rungs["4"] if evidence.ladder else None
    return finding.model_copy(update={"predicted_accept_length": rung.accept_length if rung else None})


def training(evidence: Evidence) -> list[Finding]:
    """One finding for each edit of the trained setting that drafts better than the config does."""
    found = evidence.doubt
    out: list[Finding] = []
    for gain in found.gains if found else ():
        if gain.edit.slug is None:
            continue
        low, high = gain.drop.interval or (float("nan"), float("nan"))
        after = "" if not out else f", after {' and '.join(f.fault for f in out)}"
        lines = [
            f"{DOUBTED} {gain.edit.words}: accept length {gain.drop.lower:.3f} as its "
            f"config says, {gain.drop.upper:.3f} so{after}; gained {gain.drop.value:.3f}, 95 % interval "
            f"{low:.3f} to {high:.3f}, over all starts",
            *_likelier(gain),
            f"measured on {found.source if found else ''}; {found.tried if found else 0} edits tried",
            "so the config does not say what was trained",
        ]
        rung = 1 if gain.taught else 2
        finding = Check(gain.edit.slug, "", title(gain.edit.slug), fix(gain.edit.slug), rung=rung).failed(
            *lines
        )
        out.append(finding.model_copy(update={"predicted_accept_length": gain.drop.upper}))
    return out


def _likelier(gain: Gain) -> list[str]:
    if gain.likelier is None:
        return []
    mean, error = gain.likelier
    return [f"each token of the texts is likelier so, by {mean:.4f} nats (standard error {error:.4f})"]


def unexplained(evidence: Evidence) -> list[str]:
    """For a disagreement that no edit explains: how many were tried, how near the best came, and where."""
    found = evidence.runtime
    if found is None or found.explaining or found.nearest:
        return []
    lines = [f"none of {found.tried} edits of the served setting explains it"]
    if found.best and found.best.agreement > found.before:
        lines[0] += (
            f"; the best is: {found.best.edit.words} ({found.before:.1%} -> {found.best.agreement:.1%} of "
            f"{found.tokens:,} draft tokens)"
        )
    if found.left_out:
        lines.append(f"{found.left_out} edits were not tried: it took too long")
    return lines + found.where
