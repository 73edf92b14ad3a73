"""Where two (Feed, Wiring) differ: of training and serving, the static diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eaglelab.checkpoint import Checkpoint, TargetModel
from eaglelab.inert import Evidence
from eaglelab.wiring import Feed, Wiring


@dataclass(frozen=True)
class Difference:
    """One field that training and serving do not share. `inert`: proven to change no draft token."""

    field: str
    trained: Any
    served: Any
    inert: bool
    why: str  # the proof that it is inert, else what it means
    part: Literal["feed", "wiring"] = "wiring"


def diff(
    before: tuple[Feed, Wiring],
    after: tuple[Feed, Wiring],
    checkpoint: Checkpoint | None = None,
    target: TargetModel | None = None,
) -> list[Difference]:
    """Every field in which two (Feed, Wiring) differ, feed first.

    Tensors of `checkpoint` and `target` prove inertness.
    """
    evidence = Evidence(before[1], after[1], checkpoint, target)
    parts: tuple[tuple[Literal["feed", "wiring"], Any, Any], ...] = (
        ("feed", before[0], after[0]),
        ("wiring", before[1], after[1]),
    )
    found = []
    for part, old, new in parts:
        for name in old.__dataclass_fields__:
            a, b = getattr(old, name), getattr(new, name)
            if a != b:
                found.append(Difference(name, a, b, *evidence.weigh(name, a, b), part))
    return found
