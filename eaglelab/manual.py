"""What `eaglelab faults` and `eaglelab explain` print: a JSON-able object, and the same for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eaglelab import catalogue
from eaglelab.catalogue import Fault
from eaglelab.explain import EVERY, Definition, Explanation, Reading, conditional, explain
from eaglelab.text import Both, rows

WAYS = {  # how a kind of `detected_by` reads
    "cause": "a known cause, undone and derived anew: {}",
    "check": "the check {}",
    "diff": "`trained` against `served`: field {}",
    "replay": "replay under that edit of the setting: {}",
    "rung": "the ladder, rung {}",
    "command": "`eaglelab {}`",
}


def faults(slug: str) -> Both:
    """All faults as a table, or one explained."""
    return one(catalogue.find(slug)) if slug else table()


def table() -> Both:
    """Slug, rung, detected or not, what happens; by section."""
    parts, listed = [], []
    for name, section in catalogue.sections().items():
        shown = [(f.slug, f.rung, f.detected, f.title) for f in section]
        parts.append(f"{catalogue.SECTIONS[name]}:\n" + rows(shown))
        listed += [_fault(f) | {"section": name} for f in section]
    count = {word: sum(f["detected"] == word for f in listed) for word in ("yes", "partly", "no")}
    last = f"{len(listed)} faults: " + ", ".join(f"{n} detected: {word}" for word, n in count.items())
    head = "columns: slug, rung, detected, what happens; `eaglelab faults SLUG` explains one"
    return {"faults": listed, "detected": count}, "\n\n".join([head, *parts, last])


def one(fault: Fault) -> Both:
    """One fault: cause, fix, what finds it, and where all that is known from."""
    how = [WAYS[kind].format(name) for kind, _, name in (d.partition(":") for d in fault.detected_by)]
    lines = [
        ("what happens", fault.title),
        ("cause", fault.cause),
        ("rung", fault.rung if fault.rung is not None else "none: outside the ladder"),
        ("signals", ", ".join(fault.signals)),
        ("fix", fault.fix),
        *([("reported", fault.symptom)] if fault.symptom else []),
        ("found by", "; ".join(how) or "nothing yet"),
        *([("not found" if not how else "but", fault.undetected)] if fault.undetected else []),
        *(("read in thread", reference) for reference in fault.references),
        *([("read in source", fault.source)] if fault.source else []),
        *([("inferred", fault.inferred)] if fault.inferred else []),
    ]
    return _fault(fault), f"{fault.slug}\n" + rows(lines)


def _fault(fault: Fault) -> dict[str, Any]:
    return asdict(fault) | {"detected": fault.detected, "references": fault.references}


def explained(text: str, steps: int | None, draft_tokens: int | None, topk: int) -> Both:
    """Pasted figures in plain words: each reading that fits, the same acceptance by every definition."""
    found = explain(text, steps, draft_tokens, topk)
    shape, pasted = found.shape, found.pasted
    size = "?" if shape.draft_tokens is None else shape.draft_tokens
    kind = "chain" if shape.topk == 1 else f"tree of topk {shape.topk}"
    figures = {n: f.value for n, f in pasted.figures.items()}
    said = {
        "kind": pasted.kind,
        "shape": asdict(shape),
        "figures": figures,
        "positions": [p.value for p in pasted.positions],
        "conditional": conditional(pasted.positions),
        "counts": pasted.counts,
        "readings": [_reading(r, found) for r in found.readings],
        "alone": [
            {"figure": n, "definition": d.name, "drafts_accepted_per_verify": m} for n, d, m in found.alone
        ],
        "notes": list(found.notes),
    }
    counted = ", ".join(f"{n} {v:g}" for n, v in (figures | pasted.counts).items())
    parts = [f"{pasted.kind}: {counted}; a {kind} of {shape.steps} steps, {size} draft tokens"]
    if not found.readings:
        unread = any(m is None for *_, m in found.alone)
        why = (
            "what is left unread may: give --draft-tokens"
            if unread
            else "these figures contradict each other"
        )
        parts.append(f"no reading fits; {why}")
    elif len(_groups(found)) > 1:
        parts.append(f"{len(_groups(found))} readings fit; the engine's version, or a length, decides")
    parts += [_words(same, found) for same in _groups(found)]
    left_out = [(n, _alone(m, shape.steps), d.words) for n, d, m in found.alone if not _used(n, d, found)]
    if left_out:
        parts.append("what does not fit, each taken alone:\n" + rows(left_out))
    if found.readings:
        columns = [[d.value(same[0].correct, shape) for same in _groups(found)] for d in EVERY]
        parts.append("the same by every definition:\n" + rows(
            (d.name, *values, d.words) for d, values in zip(EVERY, columns, strict=True)
        ))  # fmt: skip
    if pasted.positions:
        shares = [(f"draft {i + 1}", p.value, c) for i, (p, c) in enumerate(_positions(found))]
        parts.append("accepted by position, and of those whose predecessors were accepted:\n" + rows(shares))
    return said, "\n\n".join([*parts, *found.notes])


def _positions(found: Explanation) -> list[tuple[Any, float | None]]:
    return list(zip(found.pasted.positions, conditional(found.pasted.positions), strict=True))


def _used(name: str, definition: Definition, found: Explanation) -> bool:
    return any(reading.definitions[name] is definition for reading in found.readings)


def _alone(m: float | None, steps: int) -> str:
    if m is None:
        return "needs the number of draft tokens"
    if not 0 <= m <= steps:
        return f"impossible: {m:.2f} drafts of {steps}"
    return f"would be {m:.2f} drafts accepted, length {1 + m:.2f}"


def _reading(reading: Reading, found: Explanation) -> dict[str, Any]:
    m = reading.correct
    return {
        "definitions": {name: d.name for name, d in reading.definitions.items()},
        "drafts_accepted_per_verify": m,
        "between": [reading.low, reading.high],
        "meaning": meaning(reading, found.shape.steps),
        "by_definition": {d.name: d.value(m, found.shape) for d in EVERY},
    }


def _groups(found: Explanation) -> list[list[Reading]]:
    """Readings that say the same, together: in a chain several definitions coincide."""
    groups: dict[tuple[float, float], list[Reading]] = {}
    for reading in found.readings:
        groups.setdefault((round(reading.low, 6), round(reading.high, 6)), []).append(reading)
    return list(groups.values())


def _words(same: list[Reading], found: Explanation) -> str:
    said = {(n, f"{d.words} [{d.source}]"): None for r in same for n, d in r.definitions.items()}
    return f"{meaning(same[0], found.shape.steps)}, if\n{rows(said)}"


def meaning(reading: Reading, steps: int) -> str:
    """One sentence: of S drafts, how many survive a verify."""
    m = reading.correct
    if reading.low <= 0:
        word = "nothing is accepted" if reading.high < 0.1 else "perhaps nothing is accepted"
        return f"{word}: each verify yields the target's own token only (accept length {1 + m:.2f})"
    word = "hardly anything is accepted: " if m < 0.1 else ""
    return f"{word}{m:.2f} of {steps} drafts are accepted per verify (accept length {1 + m:.2f})"
