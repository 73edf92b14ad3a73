"""Where two (Feed, Wiring) differ, and where two copies of one drafter do: the static diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eaglelab.checkpoint import Checkpoint, TargetModel
from eaglelab.inert import Evidence, equal_numbers
from eaglelab.tensorfile import TensorInfo
from eaglelab.wiring import Feed, Wiring

UNTRAINED = ("t2d",)  # follows from d2t, and no engine reads it


@dataclass(frozen=True)
class Difference:
    """One field that training and serving do not share. `inert`: proven to change no draft token.

    part "tensors": `field` is a tensor's canonical name, whose numbers differ between the trainer's file and
    the one that is served; the values are the two shapes.
    """

    field: str
    trained: Any
    served: Any
    inert: bool
    why: str  # the proof that it is inert, else what it means
    part: Literal["feed", "wiring", "tensors"] = "wiring"


def diff(
    before: tuple[Feed, Wiring],
    after: tuple[Feed, Wiring],
    checkpoint: Checkpoint | None = None,
    target: TargetModel | None = None,
    copy: Checkpoint | None = None,
) -> list[Difference]:
    """Every field in which two (Feed, Wiring) differ, feed first.

    Tensors of `checkpoint` (the trainer's), of `copy` (the served one; by default the same) and of `target`
    prove inertness.
    """
    evidence = Evidence(before[1], after[1], checkpoint, target, copy or checkpoint)
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


def diff_tensors(right: Checkpoint, copy: Checkpoint, wiring: Wiring) -> list[Difference]:
    """Tensors that `copy`, the file that is served, holds with other numbers than `right` does.

    right: the trainer's drafter as a faithful conversion writes it. A tensor that is in one of them only is
    not told here: the loader's account of `copy` says what that does.
    """
    found = []
    for name, mine in right.tensors.items():
        theirs = copy.tensors.get(name)
        if theirs is None or name in UNTRAINED or _same(mine, theirs):
            continue
        unused = name == "embed_tokens.weight" and wiring.embedding == "target"
        why = "the target's embedding is served in its place" if unused else "the served numbers are others"
        found.append(Difference(name, mine.shape, theirs.shape, unused, why, "tensors"))
    return found


def _same(mine: TensorInfo, theirs: TensorInfo) -> bool:
    """Equal numbers; or equal after the cast that a conversion to another dtype is."""
    if mine.shape != theirs.shape:
        return False
    if type(mine) is TensorInfo and mine == theirs:  # the same bytes of the same file
        return True
    if equal_numbers(mine, theirs):
        return True
    floats = ("float16", "bfloat16", "float32")
    if mine.dtype == theirs.dtype or not {mine.dtype, theirs.dtype} <= set(floats):
        return False
    return bool((mine.torch(theirs.dtype) == theirs.torch()).all())
