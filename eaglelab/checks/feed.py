"""What the server feeds its drafter: widths at each site, depths by comparing vectors, finite numbers."""

from __future__ import annotations

from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.records import Finding

SITES = {
    "prefill_extend": "draft-extend after prefill",
    "draft": "draft steps",
    "decode_extend": "draft-extend after verify",
}
WIDTH = Check(
    "feed-width",
    "the drafter is fed rows of the trained width",
    "the drafter is fed rows of another width",
    "launch and config decide the width: see the cause that explains it",
    rung=4,
)
DEPTHS = Check(
    "feed-depths",
    "the drafter is fed the depths that it was trained on",
    "the drafter is fed other depths than it was trained on",
    "see the cause, if one is named; else make the layer ids mean the trained depths in this engine "
    "(`eaglelab inspect` prints them both ways)",
    rung=3,
)
FINITE = Check(
    "features-not-finite",
    "what the drafter is fed is finite",
    "the drafter is fed numbers that are not finite",
    "look at the target's dtype and attention backend: an overflow, or rows that were never written",
    rung=3,
)
LISTED = 20


def widths(evidence: Evidence) -> Finding:
    """Draft-extends must be fed the trained width, draft steps the drafter's own."""
    seen = evidence.capture.widths if evidence.capture else {}
    if not seen:
        return WIDTH.skipped(evidence.why_not("capture"))
    trained, own = evidence.trained[0].width, evidence.checkpoint.hidden_size
    wanted = {"prefill_extend": trained, "draft": own, "decode_extend": trained}
    lines = [f"{words}: {seen[s]:,} wide; trained: {wanted[s]:,}" for s, words in SITES.items() if s in seen]
    if not all(width == wanted[site] for site, width in seen.items()):
        return WIDTH.failed(*lines)
    unseen = [f"{words}: no such event was captured" for site, words in SITES.items() if site not in seen]
    return WIDTH.skipped(*lines, *unseen) if unseen else WIDTH.passed(*lines)


def depths(evidence: Evidence) -> Finding:
    """Each captured chunk, recognised by its vectors, against the depths that the trainer meant."""
    if evidence.depths is None:
        return DEPTHS.skipped(evidence.why_not("depths"), "capture with a re-prefill to name them")
    trained, chunks = evidence.trained[0], evidence.depths.chunks
    lines = [f"chunk {i}: {chunk}" for i, chunk in enumerate(chunks)]
    lines.append(f"trained: {', '.join(f'depth {d}' for d in trained.depths)}")
    fits = len(trained.depths) == len(chunks) and all(
        any((place.depth, place.final_norm) == (depth, trained.final_norm) for place in chunk.may_be)
        for depth, chunk in zip(trained.depths, chunks, strict=True)
    )
    return DEPTHS.passed(*lines) if fits else DEPTHS.failed(*lines)


def finite(evidence: Evidence) -> Finding:
    """No NaN and no infinity in what the drafter is fed, nor in anything else that was captured."""
    if evidence.stats is None:
        return FINITE.skipped(evidence.why_not("stats"))
    problems = evidence.capture.problems if evidence.capture else []
    bad = [f"{p.where}: {p.text}" for p in problems if p.severity == "finding"]
    lines = evidence.stats.summary().splitlines()
    return (
        FINITE.failed(f"{len(bad)} tensors are not finite", *bad[:LISTED], *lines)
        if bad
        else FINITE.passed(*lines)
    )
