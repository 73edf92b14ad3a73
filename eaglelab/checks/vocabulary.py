"""The draft vocabulary: is its map in the file, is it a map, does it reach the tokens that are written?"""

from __future__ import annotations

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.catalogue import find
from eaglelab.checkpoint import Checkpoint
from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.records import Finding
from eaglelab.traces import is_stored

# A token without a draft id ends every draft that comes to it. Published maps reach 95 % of the tokens and
# more; what fails reaches less than FEW of them, or is behind MOST of the captured rejections.
FEW = 0.8
MOST = 1 / 3
FEWEST = 64  # tokens, and a quarter as many rejections


def _check(slug: str, good: str) -> Check:
    known = find(slug)
    return Check(slug, good, known.title, known.fix, known.rung)


EXPORTED = _check("d2t-not-exported", "the map of the draft vocabulary is in the file")
COVERS = _check("draft-vocab-coverage", "the draft vocabulary reaches the tokens that are written")
SANE = Check(
    "weights-not-sane",
    "d2t is a map into the vocabulary",
    "d2t is no map into the target's vocabulary",
    "export d2t again: target id minus draft id, one target id for each draft id",
)


def findings(evidence: Evidence) -> list[Finding]:
    """Nothing for a full vocabulary, whose draft ids are the target's."""
    given = evidence.original
    if given.draft_vocab_size >= given.vocab_size:
        return []
    found = exported(evidence)
    if found.verdict == "failed":
        return [found]
    reached, odd = targets(given)
    if odd:
        return [found, SANE.failed(*odd)]
    return [found] if reached is None else [found, covers(evidence, reached)]


def exported(evidence: Evidence) -> Finding:
    given = evidence.original
    sizes = f"{given.draft_vocab_size:,} draft ids for a vocabulary of {given.vocab_size:,}"
    hot = evidence.launch.flag("--speculative-token-map")
    if given.d2t is None and not hot:
        return EXPORTED.failed(f"{sizes}, and {given.path} has no d2t: draft id i stands for token i")
    if given.d2t is None:
        return EXPORTED.passed(f"{sizes}; the launch names a map of its own ({hot})")
    if not given.d2t.any() and not _first_ones(given):
        return EXPORTED.failed(f"{sizes}, and d2t is all zeros: it was never filled, t2d marks other tokens")
    return EXPORTED.passed(f"{sizes}; d2t maps them")


def _first_ones(given: Checkpoint) -> bool:
    """Whether t2d, if there is one, says that the first tokens are the draft vocabulary."""
    if "t2d" not in given.tensors:
        return True
    return np.array_equal(np.flatnonzero(given.tensors["t2d"].array()), np.arange(given.draft_vocab_size))


def targets(given: Checkpoint) -> tuple[Array | None, list[str]]:
    """-> (target ids that can be drafted; what is wrong with the map)."""
    if given.d2t is None:
        return None, []
    ids = given.d2t + np.arange(len(given.d2t))
    odd = []
    if twice := len(ids) - len(np.unique(ids)):
        odd.append(f"{twice} of {len(ids)} draft ids map to a token that another one maps to")
    if "t2d" in given.tensors:
        marked = np.flatnonzero(given.tensors["t2d"].array())
        if apart := len(np.setxor1d(marked, ids)):
            odd.append(f"d2t and t2d differ in {apart} tokens")
    return ids, odd


def covers(evidence: Evidence, ids: Array) -> Finding:
    """The share of written tokens that can be drafted: the ceiling of acceptance."""
    reached = np.zeros(evidence.original.vocab_size, dtype=bool)
    reached[ids] = True
    lines, capped = [], []
    if (stored := _stored(evidence)) is not None and len(stored):
        share = float(reached[stored].mean())
        lines.append(f"{share:.1%} of {len(stored):,} tokens that were trained on can be drafted")
        capped.append(share < FEW)
    written, rejected = _captured(evidence)
    if len(written):
        share = float(reached[written].mean())
        lines.append(f"{share:.1%} of {len(written):,} tokens that the server wrote can be drafted")
        capped.append(len(written) >= FEWEST and share < FEW)
        if len(rejected):
            behind = float(1 - reached[rejected].mean())
            lines.append(f"{behind:.0%} of {len(rejected)} rejected drafts stood where no draft id was right")
            capped.append(len(rejected) >= FEWEST // 4 and behind > MOST and share < 0.97)
    if not lines:
        return COVERS.skipped("no token was stored or captured: give --features, --server or --capture")
    return COVERS.failed(*lines) if any(capped) else COVERS.passed(*lines)


def _stored(evidence: Evidence) -> Array | None:
    data = evidence.data
    if data is None or not data.samples:
        return None
    parts = []
    for i, sample in enumerate(data.samples):
        mask = data.masks.get(i)
        parts.append(sample.token_ids[mask] if mask is not None and mask.any() else sample.token_ids)
    return np.concatenate(parts)


def _captured(evidence: Evidence) -> tuple[Array, Array]:
    """-> (tokens that the server wrote, the right tokens where a draft was rejected)."""
    written: list[int] = []
    rejected: list[int] = []
    for rid, trace in (evidence.capture.requests if evidence.capture else {}).items():
        if is_stored(rid):
            continue
        written += trace.tokens[trace.prompt_len :]
        for r in trace.rounds:
            if r.draft_tokens and r.parents is None and r.accept_len <= len(r.draft_tokens):
                rejected.append(r.committed[-1])
    return np.asarray(written, dtype=np.int64), np.asarray(rejected, dtype=np.int64)
