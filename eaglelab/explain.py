"""What a printed accept length or rate says: the readings that fit, of every definition in use.

The definitions are in `definitions`; each is a function of the drafts accepted per verify (m). What is
printed is rounded, so a figure stands for an interval of m; a *reading* is a choice of one definition per
figure whose intervals meet between 0 and S.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from eaglelab.definitions import (
    COUNTED,
    DRAFTS,
    EVERY,
    KINDS,
    PER_DRAFT_TOKENS,
    PER_STEPS,
    POSITIONS,
    WITH_BONUS,
    Definition,
    Shape,
)
from eaglelab.errors import BadInput
from eaglelab.logline import Figure, Pasted, parse

__all__ = [
    "DRAFTS", "EVERY", "PER_DRAFT_TOKENS", "PER_STEPS", "WITH_BONUS", "Definition", "Explanation", "Reading",
    "Shape", "conditional", "explain", "shape_of",
]  # fmt: skip

EXACT = 1e-9
V0_RATE = (
    "vLLM V0's rate also counts drafts after a rejected one, so no length follows from it; the efficiency "
    "tells"
)


@dataclass(frozen=True)
class Reading:
    """A definition for each figure such that they agree, and the drafts accepted per verify that follow."""

    definitions: dict[str, Definition]
    low: float
    high: float
    correct: float  # as the figures say on average, kept between what rounding leaves open


@dataclass(frozen=True)
class Explanation:
    pasted: Pasted
    shape: Shape
    readings: tuple[Reading, ...]  # none: the figures contradict each other
    alone: tuple[tuple[str, Definition, float | None], ...]  # each figure by each definition: m
    notes: tuple[str, ...]


def explain(
    text: str, steps: int | None = None, draft_tokens: int | None = None, topk: int = 1
) -> Explanation:
    """Every reading of pasted figures. BadInput without figures, or if the shape of a draft is missing."""
    pasted = parse(text)
    shape, notes = shape_of(pasted, steps, draft_tokens, topk)
    figures = _figures(pasted)
    alone = tuple((n, d, d.correct(f.value, shape)) for n, (f, known) in figures.items() for d in known)
    if "rate" in pasted.figures and topk > 1:
        notes.append("a tree's rate counts all its nodes: it cannot be compared with a chain's")
    if pasted.kind == "vLLM V0's log":
        notes.append(V0_RATE)
    if pasted.responses > 1:
        notes.append(
            f"{pasted.responses} responses, pooled: sums of their counters. A mean of their lengths or rates "
            "would weigh a short answer as much as a long one"
        )
    elif pasted.kind == "SGLang's response":
        notes += _per_request(pasted)
    for name in pasted.figures:
        if name not in figures and pasted.kind != "vLLM V0's log":
            notes.append(f"{name} is taken from the counters, which are exact")
    return Explanation(pasted, shape, tuple(_readings(figures, shape)), alone, tuple(notes))


def shape_of(
    pasted: Pasted, steps: int | None, draft_tokens: int | None, topk: int
) -> tuple[Shape, list[str]]:
    """Steps and draft tokens: as given, else as the text tells, else as a chain has them (N = S + 1)."""
    c, notes = pasted.counts, []
    if draft_tokens is None and c.get("proposed") and c.get("verifies"):
        draft_tokens = round(c["proposed"] / c["verifies"]) + 1
    steps = steps or c.get("steps") or len(pasted.positions) or None
    if steps is None and draft_tokens and topk == 1:
        steps = draft_tokens - 1
    if steps is None:
        raise BadInput("how many drafts a verify has is not in this text: give --steps (and --draft-tokens)")
    if draft_tokens is None and topk == 1:
        draft_tokens = steps + 1
    if draft_tokens is None:
        notes.append("without --draft-tokens the rates that divide by a tree's size cannot be read")
    elif topk == 1 and draft_tokens != steps + 1:
        notes.append(
            f"a chain of {steps} steps has {steps + 1} draft tokens, not {draft_tokens}: today's SGLang "
            "corrects that, old ones did not"
        )
    return Shape(steps, draft_tokens, topk), notes


def _figures(pasted: Pasted) -> dict[str, tuple[Figure, tuple[Definition, ...]]]:
    """Each figure with the definitions that it may have in a text of this kind."""
    c, known = pasted.counts, KINDS[pasted.kind]
    found = {n: (f, known[n]) for n, f in pasted.figures.items() if n in known}
    if c.get("verifies") and "correct" in c and pasted.kind != "vLLM V0's log":
        found.pop("length", None) if pasted.kind == "SGLang's response" else None
        found["counters"] = (Figure(c["correct"] / c["verifies"], EXACT), (COUNTED,))
    if pasted.positions:
        total = Figure(sum(p.value for p in pasted.positions), sum(p.slack for p in pasted.positions))
        found["positions"] = (total, (POSITIONS,))
    return found


def _readings(figures: dict[str, tuple[Figure, tuple[Definition, ...]]], shape: Shape) -> list[Reading]:
    found = []
    for chosen in product(*(known for _, known in figures.values())):
        said: list[float] = []
        low, high = 0.0, float(shape.steps)
        for (figure, _), definition in zip(figures.values(), chosen, strict=True):
            a = definition.correct(figure.value - figure.slack - EXACT, shape)
            b = definition.correct(figure.value + figure.slack + EXACT, shape)
            if a is None or b is None:
                break
            low, high, said = max(low, a), min(high, b), [*said, (a + b) / 2]
        if said and len(said) == len(chosen) and low <= high:
            middle = min(max(round(sum(said) / len(said), 12), low), high)
            found.append(Reading(dict(zip(figures, chosen, strict=True)), low, high, middle))
    return found


def _per_request(pasted: Pasted) -> list[str]:
    """How far SGLang's own per-request length lies above 1 + m, because it counts the prefill's token."""
    c, length = pasted.counts, pasted.figures.get("length")
    if not c.get("verifies") or "correct" not in c:
        return ["without spec_verify_ct the prefill's token cannot be taken out of the length"]
    if length is None:
        return []
    own = 1 + c["correct"] / c["verifies"]
    return [
        f"its length {length.value:.3g} counts the prefill's token too; 1 + correct / verifies is {own:.3g}"
    ]


def conditional(positions: tuple[Figure, ...]) -> list[float | None]:
    """Per position, the share accepted of the drafts whose predecessors were; None where none were."""
    before = [1.0, *(p.value for p in positions)]
    return [p.value / b if b else None for p, b in zip(positions, before, strict=False)]
