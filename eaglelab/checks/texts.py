"""Are the texts that are served like those that were trained on: framed alike, and not longer?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.catalogue import find
from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.records import Finding
from eaglelab.traces import is_stored
from eaglelab.words import Words

FRAMED, BARE = 0.9, 0.1  # shares of texts with a template's marks
FEWEST = 3  # texts a side
ROUNDS = 12  # on each side of a length
LOST = 0.75  # of the accept length before it
DRAWS, ODDS = 500, 0.005


def _check(slug: str, good: str) -> Check:
    known = find(slug)
    return Check(slug, good, known.title, known.fix, known.rung)


TEMPLATE = _check("template-differs", "prompts are served in the frame that was trained")
LENGTH = _check("draft-context-too-short", "acceptance does not end where the drafter's training did")


def template(evidence: Evidence) -> list[Finding]:
    """Special tokens (but the first of a text) in what was stored and in the prompts that were sent."""
    data, capture = evidence.data, evidence.capture
    if data is None or capture is None:
        return []
    words = Words.of(evidence.target.path if evidence.target else None)
    sent = [np.asarray(t.prompt_ids) for rid, t in capture.requests.items() if not is_stored(rid)]
    stored = [_prompt(s.token_ids, data.masks.get(i)) for i, s in enumerate(data.samples)]
    if not words.special:
        return [TEMPLATE.skipped("the target's folder has no tokenizer.json: give --target PATH")]
    if min(len(sent), len(stored)) < FEWEST:
        return [TEMPLATE.skipped(f"{len(stored)} stored and {len(sent)} sent prompts are too few to compare")]
    then, now = (_framed(texts, words.special) for texts in (stored, sent))
    lines = [
        f"{then[0]:.0%} of the stored prompts and {now[0]:.0%} of those sent hold a template's marks",
        f"stored: {words.text(stored[0])}",
        f"sent: {words.text(sent[0])}",
    ]
    if then[0] >= FRAMED and now[0] <= BARE:
        lines.append(
            "plain text was sent, so nothing is said of chats: send messages (--prompts) to measure them"
        )
        return [TEMPLATE.skipped(*lines)]
    one_side = now[0] >= FRAMED and then[0] <= BARE
    other = min(then[0], now[0]) >= FRAMED and not then[1] & now[1]
    if other:
        lines.insert(1, "and not one of these tokens is the same")
    return [TEMPLATE.failed(*lines) if one_side or other else TEMPLATE.passed(*lines)]


def _prompt(ids: Array, mask: Array | None) -> Array:
    return ids if mask is None or not mask.any() else ids[: int(np.flatnonzero(mask)[0])]


def _framed(texts: Sequence[Array], special: frozenset[int]) -> tuple[float, set[int]]:
    """-> (share of texts with a special token past their first; these tokens)."""
    found = [set(ids[1:].tolist()) & special for ids in texts]
    return sum(map(bool, found)) / len(found), set().union(*found)


def length(evidence: Evidence) -> list[Finding]:
    """Accept lengths before and after the drafter's own maximum, and after the longest stored text."""
    ladder = evidence.ladder
    rounds = ladder.rungs["5"].rounds if ladder else None
    if rounds is None or not len(rounds.lengths):
        return []
    limits = {"the drafter's max_position_embeddings": evidence.trained[1].max_positions}
    data = evidence.data
    if data is not None and len(data.samples) >= FEWEST:
        limits["the longest stored text"] = max(s.length for s in data.samples)
    lines = []
    for name, limit in limits.items():
        if not limit:
            continue
        past = rounds.starts >= limit
        before, after = rounds.lengths[~past], rounds.lengths[past]
        if min(len(before), len(after)) < ROUNDS:
            lines.append(f"{name} is {limit:,}: {len(after)} of {len(rounds.lengths)} verifies lie beyond it")
            continue
        lines.append(
            f"accept length {before.mean():.2f} up to {name} ({limit:,}), {after.mean():.2f} beyond it"
        )
        if after.mean() - 1 < LOST * (before.mean() - 1) and _chance(before, after) < ODDS:
            return [LENGTH.failed(*lines)]
    return [LENGTH.passed(*lines)]


def _chance(before: Array, after: Array) -> float:
    """How often a random split of these verifies is as uneven as this one."""
    both, rng = np.concatenate([before, after]).astype(float), np.random.default_rng(0)
    gap = before.mean() - after.mean()
    draws = [rng.permutation(both) for _ in range(DRAWS)]
    return float(np.mean([d[: len(before)].mean() - d[len(before) :].mean() >= gap for d in draws]))


def findings(evidence: Evidence) -> list[Finding]:
    return [*template(evidence), *length(evidence)]
