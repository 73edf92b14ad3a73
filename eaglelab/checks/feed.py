"""What the server feeds its drafter: widths at each site, depths by comparing vectors, finite numbers.

A depth that vectors show and that config and launch do not (`served`) is named by what it shows; where both
say the same, the static differences name the cause, and the depths here are its symptom. Several faults of
the catalogue leave the very same vectors: one name is given, the others are said in the evidence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eaglelab.catalogue import find
from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.layer_ids import default_depths
from eaglelab.records import Finding

if TYPE_CHECKING:
    from eaglelab.depths import DepthNames
    from eaglelab.simulate import Rounds
    from eaglelab.wiring import Feed

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


# what vectors show -> the fault, and what else shows alike
SHOWN = {
    "plus": ("ids-plus-one", "ids-copied-in-conversion and id conventions of two engines show alike"),
    "minus": ("ids-off-by-one", "ids-copied-in-conversion and a counted embedding show alike"),
    "embedding": ("embedding-counted", "ids that are one too small show alike"),
    "rotated": ("target-quantized-or-rotated", ""),
    "scaled": ("target-quantized-or-rotated", "any lost or doubled multiplier shows alike"),
    "reweighted": ("target-quantized-or-rotated", "a smoothing of activations shows so"),
    "partial sums": ("tensor-parallel-partial-sums", "a state read inside a layer shows alike"),
    "rows moved": ("token-shift", "rows of a padded or recycled buffer show alike"),
    "stale rows": ("stale-rows", "CUDA graphs, padding and recycled buffers show alike"),
}
NAMED = frozenset(slug for slug, _ in SHOWN.values()) | {
    "ids-hard-coded",
    "id-past-the-last-layer",
    "chunk-order",
}


def depths(evidence: Evidence) -> list[Finding]:
    """Each captured chunk, recognised by its vectors, against the depths that were meant.

    Passed; the fault that the vectors show (two, where altered chunks are of other depths besides); or
    `feed-depths` where they fit no name.
    """
    first = _depths(evidence)
    if (
        first.verdict != "failed"
        or evidence.depths is None
        or not any(c.related for c in evidence.depths.chunks)
    ):
        return [first]
    second = _depths(replace(evidence, depths=_restored(evidence.depths)))
    return [first, second] if second.verdict == "failed" and second.fault != first.fault else [first]


def _restored(names: DepthNames) -> DepthNames:
    """The chunks as if their relation were undone: each is the stream that it relates to."""
    sure = ("rotated", "scaled", "reweighted", "normed", "rows moved", "stale rows")
    chunks = [
        replace(c, place=c.related.place, match="exact", rivals=(), related=None)
        if c.related and c.related.kind in sure
        else c
        for c in names.chunks
    ]
    return replace(names, chunks=tuple(chunks))


def _depths(evidence: Evidence) -> Finding:
    if evidence.depths is None:
        return DEPTHS.skipped(evidence.why_not("depths"), "capture with a re-prefill to name them")
    trained = evidence.trained[0]
    if not any(chunk.rows for chunk in evidence.depths.chunks):
        return DEPTHS.skipped("no row that was fed is finite, so that none could be compared")
    lines = [f"chunk {i}: {chunk}" for i, chunk in enumerate(evidence.depths.chunks)]
    meant = ", ".join(f"depth {d}" for d in trained.depths)
    lines.append(f"trained: {meant}{' after the final norm' if trained.final_norm else ''}")
    if _is(evidence.depths, trained):
        return DEPTHS.passed(*lines)
    predicted = evidence.served[0] if evidence.served else trained
    if predicted != trained and _is(evidence.depths, predicted):
        return DEPTHS.failed(*lines, "config and launch say so too: see the difference that is its cause")
    slug, alike = shown(evidence.depths, predicted, evidence)
    check = replace(DEPTHS, bad=alike or DEPTHS.bad)
    if slug is not None:
        known = find(slug)
        check = Check(slug, DEPTHS.good, known.title, known.fix, known.rung)
        lines.append("config and launch do not say so: only the vectors show it")
        lines += [alike] if alike else []
    rounds = refed(evidence)
    if rounds is None:
        return check.failed(*lines)
    from eaglelab import paired

    between = paired.interval(rounds)
    interval = f" (95 % interval {between[0]:.2f} to {between[1]:.2f})" if between else ""
    found = check.failed(
        *lines,
        f"fed as config and launch say, this server would commit {rounds.accept_length:.2f} tokens "
        f"a verify{interval}: simulated on its own texts, re-prefilled",
    )
    return found.model_copy(update={"predicted_accept_length": rounds.accept_length})


def refed(evidence: Evidence) -> Rounds | None:
    """What the server would commit, fed as config and launch say; None where that cannot be simulated."""
    capture, target = evidence.capture, evidence.target
    if capture is None or target is None or evidence.served is None:
        return None
    import torch

    from eaglelab.drafter import Drafter
    from eaglelab.errors import BadInput
    from eaglelab.simulate import Rounds, Speculation, simulate, texts

    feed, wiring = evidence.served
    try:
        used, _ = texts(capture, feed)
        drafter = Drafter(evidence.checkpoint, wiring, target, "cpu", getattr(torch, wiring.dtype))
        speculation = Speculation.of(evidence.launch)
        rounds = Rounds.join([simulate(drafter, text, speculation) for text in used], speculation.steps)
    except BadInput:
        return None
    return rounds if len(rounds.lengths) else None


def _is(names: DepthNames, feed: Feed) -> bool:
    """Whether every chunk may be the depth that this feed says, in its order."""
    return len(feed.depths) == len(names.chunks) and all(
        chunk.related is None
        and any((place.depth, place.final_norm) == (depth, feed.final_norm) for place in chunk.may_be)
        for depth, chunk in zip(feed.depths, names.chunks, strict=True)
    )


def shown(names: DepthNames, meant: Feed, evidence: Evidence) -> tuple[str | None, str]:
    """-> (the fault that these vectors show, None if they fit no name; what else shows alike, or a title)."""
    related = [c.related for c in names.chunks if c.related]
    for kind in ("partial sums", "rotated", "rows moved", "stale rows", "scaled", "reweighted"):
        found = next((r for r in related if r.kind == kind), None)
        if found is None:
            continue
        ranks = evidence.launch.tp_size
        if kind == "scaled" and ranks > 1 and abs(found.scale * ranks - 1) < 0.05:
            kind = "partial sums"
        return SHOWN[kind]
    if any(r.kind == "mixed depths" for r in related):
        return None, "some of the rows that are fed come from another depth"
    if any(r.kind == "normed" for r in related):
        return None, "the rows that are fed went through a norm that was not trained"
    if any(c.match == "none" for c in names.chunks) or len(names.chunks) != len(meant.depths):
        return None, ""
    fed = [c.place for c in names.chunks]
    if any(p.final_norm for p in fed) and not meant.final_norm:
        return (
            "id-past-the-last-layer",
            "the state after the final norm is fed where the one before was meant",
        )
    got = tuple(p.depth for p in fed)
    if got == meant.depths:
        return None, ""
    if sorted(got) == sorted(meant.depths):
        return "chunk-order", "the depths are the right ones, their order is not"
    if 0 in got and 0 not in meant.depths:
        return SHOWN["embedding"]
    moved = {g - m for g, m in zip(got, meant.depths, strict=True)}
    if moved in ({1}, {-1}):
        return SHOWN["plus" if moved == {1} else "minus"]
    target = evidence.launch.target
    if target and got == default_depths(target.architecture, target.num_layers):
        return "ids-hard-coded", "these are the engine's default depths"
    return None, ""


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
