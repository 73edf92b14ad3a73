"""Is the trainer's data what the trainer believed it was? One finding a question, from `audit`'s facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eaglelab.catalogue import find
from eaglelab.checks import Check
from eaglelab.checks.feed import shown
from eaglelab.checks.names import shifted
from eaglelab.evidence import Evidence
from eaglelab.records import Finding
from eaglelab.words import Words

if TYPE_CHECKING:
    from eaglelab.audit import Audit
    from eaglelab.depths import DepthNames

LISTED = 5
OTHER = 0.15  # error at every depth that neither rounding nor a light quantisation explains


def _check(slug: str, good: str) -> Check:
    known = find(slug)
    return Check(slug, good, known.title, known.fix, known.rung)


WHOLE = _check("dump-truncated", "every stored text has a row for each of its tokens")
FINITE = _check("features-overflow", "the stored features are finite")
TEACHER = _check("teacher-norm", "the teacher's state is stored as its trainer takes it")
DEPTHS = _check("stored-features-shifted", "the stored features are the depths that the config says")
MASK = _check("loss-mask", "the loss mask covers answers")


def findings(evidence: Evidence) -> list[Finding]:
    """Nothing without stored features: that they were not given is said by rungs 1 and 2."""
    data = evidence.data
    if data is None:
        return []
    return [whole(data), finite(data), teacher(data), depths(data, evidence), mask(data, evidence)]


def whole(data: Audit) -> Finding:
    lines = [f"{len(data.samples)} samples read whole, {data.rows:,} rows"]
    if data.zero_rows:
        lines.append(f"{data.zero_rows} rows are all zeros: they were never written")
    if data.truncated or data.zero_rows > 0.01 * data.rows:
        return WHOLE.failed(*data.truncated[:LISTED], *lines)
    return WHOLE.passed(*lines) if data.samples else WHOLE.skipped(*lines)


def finite(data: Audit) -> Finding:
    lines = [f"stored as {data.dtype or 'nothing that could be read'}"]
    if data.saturated:
        lines.append(f"{data.saturated} numbers stand at the largest that {data.dtype} can hold")
    if data.nonfinite or data.saturated:
        return FINITE.failed(*data.nonfinite[:LISTED], *lines)
    return FINITE.passed(*lines) if data.samples else FINITE.skipped(*lines)


def teacher(data: Audit) -> Finding:
    """Rows of a normed state, divided by the norm's weight, have a root mean square of 1."""
    if data.last == "unknown":
        return TEACHER.skipped(data.why.get("last", "the target's final norm is needed: give --target PATH"))
    lines = [
        f"the last stored state is {data.last} (root mean square over the norm weight: {data.last_rms:.3g}, "
        "after the norm 1)"
    ]
    if data.agreement:
        lines.append(f"the target's choice from it is the next token for {data.agreement[0]:.0%} of the rows")
    if data.declared_last == "unknown":
        return TEACHER.passed(*lines, "this format does not say which it should be: tell your trainer")
    lines.append(f"this format's trainer takes it as {data.declared_last}")
    if data.last == data.declared_last or _altered(data):
        return TEACHER.passed(*lines)
    twice = data.last == "after the final norm"
    return TEACHER.failed(*lines, "the norm is applied twice" if twice else "the norm is never applied")


def _altered(data: Audit) -> bool:
    """Whether the last chunk is something else altogether, so that its norm means nothing."""
    return data.depths is not None and data.depths.chunks[-1].related is not None


def depths(data: Audit, evidence: Evidence) -> Finding:
    """Each stored chunk, recognised by its vectors, against what the drafter's config says."""
    if data.depths is None:
        if data.offset:
            return _moved(data, data.offset, [])
        why = data.why.get("depths", "no stored row could be compared")
        return DEPTHS.skipped(why)
    names, feed = data.depths, evidence.trained[0]
    lines = [f"chunk {i}: {c}" for i, c in enumerate(names.chunks[:-1])]
    lines += [f"the teacher's: {names.chunks[-1]}", f"compared with {data.source}"]
    meant = ", ".join(f"depth {d}" for d in feed.depths)
    lines.append(f"the drafter's config says: {meant or 'nothing'}")
    kinds = {c.related.kind: c.related for c in names.chunks if c.related}
    if "rows moved" in kinds or (data.offset and not kinds):
        shift = kinds["rows moved"].shift if "rows moved" in kinds else data.offset
        return _moved(data, shift or 0, lines)
    if {"rotated", "scaled", "reweighted"} & set(kinds):
        return _named("target-quantized-or-rotated", *lines)
    if "stale rows" in kinds or "mixed depths" in kinds:
        return _named("dump-truncated", *lines)
    fed = names.chunks[:-1]
    if len(fed) != len(feed.depths):
        return DEPTHS.skipped(*lines)
    if all(
        any(p.depth == d and not p.final_norm for p in c.may_be)
        for c, d in zip(fed, feed.depths, strict=True)
    ):
        return _far(names, evidence, lines) or DEPTHS.passed(*lines)
    if any(c.match == "none" or c.related for c in fed):
        return _far(names, evidence, lines) or DEPTHS.failed(*lines)
    return _elsewhere(names, evidence, lines)


def _moved(data: Audit, shift: int, lines: list[str]) -> Finding:
    words = f"row i holds the state of token i {'+' if shift > 0 else '-'} {abs(shift)}"
    if data.agreement and data.offset:
        words += f"; the target's choices fit tokens {data.offset:+d} on ({data.agreement[data.offset]:.0%})"
    if abs(shift) <= 2:
        return _named("token-shift", words, *lines)
    return WHOLE.failed(words, *lines)


def _far(names: DepthNames, evidence: Evidence, lines: list[str]) -> Finding | None:
    """The same text through another target: large errors at every depth, while nothing else is odd."""
    worst = min(c.error for c in names.chunks)
    if worst < OTHER:
        if any(c.match != "exact" for c in names.chunks):
            lines.append("more than rounding lies between the two: a quantised target, or a light fine-tune")
        return None
    lines.append(
        f"the same texts give other states than this target's: errors of {worst:.2g} and more at every depth"
    )
    if evidence.launch.flag("--quantization") or _quantized(evidence):
        return _named("target-quantized-or-rotated", *lines)
    return _named("target-not-the-trained-one", *lines)


def _quantized(evidence: Evidence) -> bool:
    return evidence.target is not None and "quantization_config" in evidence.target.config


def _elsewhere(names: DepthNames, evidence: Evidence, lines: list[str]) -> Finding:
    """Plainly other depths than the config's. Which of the two is wrong is what the drafter itself says."""
    meant = evidence.trained[0].depths
    stored = tuple(c.depth for c in names.chunks[:-1])
    if evidence.depths is not None and tuple(evidence.depths.depths) == stored:
        slug, _ = shown(evidence.depths, (evidence.served or evidence.trained)[0], evidence)
        lines.append("the server feeds the very depths that were stored")
        if slug is not None:
            return _named(slug, *lines)
    if sorted(stored) == sorted(meant):
        return _named("chunk-order", *lines)
    better = evidence.data.better_on if evidence.data else None
    if better is not None:
        on, off = better
        lines.append(
            f"the drafter finds {on:.0%} of the tokens on the stored rows, {off:.0%} on the config's depths"
        )
        if on > off + 0.02:
            lines.append("so it was trained on the stored depths, and the ids in its config are wrong")
            slug = shifted({m - s for m, s in zip(meant, stored, strict=True)})
            if 0 in meant and 0 not in stored:
                slug = "embedding-counted"
            return _named(slug, *lines) if slug else DEPTHS.failed(*lines)
    return DEPTHS.failed(*lines)


def _named(slug: str, *lines: str) -> Finding:
    return _check(slug, DEPTHS.good).failed(*lines)


def mask(data: Audit, evidence: Evidence) -> Finding:
    """Which tokens are trained on, read as text and judged."""
    from eaglelab.masks import judge

    if not data.masks:
        return MASK.skipped(data.no_masks or "no loss mask could be read")
    ids = [s.token_ids for s in data.samples]
    words = Words.of(evidence.target.path if evidence.target else None)
    wrong, seen = judge(data.masks, ids, data.greedy, words.special)
    lines = [*wrong, *seen, *words.show(data.masks, ids)]
    return MASK.failed(*lines) if wrong else MASK.passed(*lines)
