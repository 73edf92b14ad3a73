"""How the served file's numbers depart from the trainer's: moved, exchanged, rounded, or all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eaglelab.diff import Difference
from eaglelab.evidence import Evidence
from eaglelab.inert import equal_numbers
from eaglelab.tensorfile import TensorInfo, some_rows, to_float32

MOST = 1 << 24  # bytes of a tensor whose rows and columns are looked up one by one
ROUNDED = 0.02  # of a tensor's length: what int8 or float8 leave of it, and a training step does not
THROUGHOUT = 0.8  # of the tensors


def words(evidence: Evidence, name: str) -> str:
    """What the served tensor is, as far as the trainer's file tells."""
    right = evidence.right or evidence.original
    mine, theirs = right.tensors[name], evidence.checkpoint.tensors[name]
    for other, info in right.tensors.items():
        if other != name and info.shape == theirs.shape and equal_numbers(info, theirs):
            return f"it holds the trainer's {other}"
    if mine.shape != theirs.shape:
        return f"of shape {list(theirs.shape)} for {list(mine.shape)}"
    if moved := _moved(mine, theirs):
        return moved
    a, b = (to_float32(some_rows(info), info.dtype) for info in (mine, theirs))
    far = float(np.linalg.norm(b - a)) / max(float(np.linalg.norm(a)), 1e-30)
    return f"off by {far:.2%}" + (", as rounding to a few bits is" if far < ROUNDED else "")


def _moved(mine: TensorInfo, theirs: TensorInfo) -> str:
    """Whether the same numbers stand elsewhere in a matrix."""
    if len(mine.shape) != 2 or mine.dtype != theirs.dtype or theirs.offsets[1] - theirs.offsets[0] > MOST:
        return ""
    a, b = mine.array(), theirs.array()
    if a.shape == b.T.shape and np.array_equal(a, b.T):
        return "it is the trainer's, transposed"
    for what, x, y in (("rows", a, b), ("columns", a.T, b.T)):
        if sorted(row.tobytes() for row in x) == sorted(row.tobytes() for row in y):
            return f"it is the trainer's, its {what} in another order"
    return ""


def another(evidence: Evidence, differences: Sequence[Difference]) -> str:
    """Said where nearly every tensor differs: no slip of a conversion. Else ""."""
    shared = set((evidence.right or evidence.original).tensors) & set(evidence.checkpoint.tensors)
    count = len(shared - {"d2t", "t2d", "embed_tokens.weight"})
    if len(differences) < THROUGHOUT * count:
        return ""
    return (
        f"{len(differences)} of {count} tensors differ: this is another checkpoint, or another step or epoch"
    )
