"""What else can a chunk be, that is not simply its stream? Basis, scale, norm, rows of another position.

`depths` names a chunk by its error at each re-prefilled stream. A chunk that is its stream in another form
has a large error everywhere; here the ways of being so that are known from real faults are undone one by
one, and the one that leaves (nearly) nothing over is the relation. Each leaves a number: how well it fits.

    rows moved     row i is the stream's row i + 1 (or - 1, 2 ...) of the same text
    scaled         one factor for all rows (1 / ranks, a softmax scale, a lost multiplier)
    normed         an RMS norm was applied: row / rms(row), times one weight a dimension
    reweighted     one weight a dimension, no norm
    rotated        an orthogonal change of basis: every row keeps its norm, all angles between rows stay
                   (equal Gram matrices), and the cosine to the stream is lost
    partial sums   between the streams before and after one layer: a part of what the layer adds is missing
                   (|x - before|^2 + |x - after|^2 is at most little more than |after - before|^2)
    stale rows     most rows are the stream's; the others are zero, or another row of it
    mixed depths   most rows are the stream's; the others are another depth's

Rows whose text or neighbours are not known cannot be moved or stale; `texts` says which rows lie together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from eaglelab.accumulate import Array

Kind = Literal[
    "same",
    "rows moved",
    "scaled",
    "normed",
    "reweighted",
    "rotated",
    "stale rows",
    "mixed depths",
    "partial sums",
]
LEFT = 0.01  # error that may be left once a relation is undone, where rounding explains less
SHIFTS = (-1, 1, -2, 2)
GRAM_ROWS = 256
FEWEST = 12  # rows: fewer cannot show a basis, a norm's weight or a share
LOST = 0.7  # a cosine below this is no rounding and no neighbouring depth
SPHERE = 1.3  # 1 for two parts at a right angle, 0.5 halfway
OFF = 0.25  # a row off by this is not its stream's, whatever the dtype
UNLIKE = 0.9  # error of a row that has nothing to do with its stream
OFF_SHARE, OFF_ROWS = 0.01, 3  # fewer rows than this may be anything


class Place(NamedTuple):
    """A spot on the residual stream: after `depth` decoder layers, before or after the final norm."""

    depth: int
    final_norm: bool = False

    def __str__(self) -> str:
        return f"depth {self.depth}" + (" after the final norm" if self.final_norm else "")


@dataclass(frozen=True)
class Related:
    """A relation that holds. `left`: error once it is undone. `share`: of rows that it concerns.

    `shift`: of rows moved. `scale`: of scaled. `words`: the sentence for a person.
    """

    kind: Kind
    place: Place
    left: float
    words: str
    share: float = 1.0
    shift: int = 0
    scale: float = 1.0


def relate(
    x: Array, places: Sequence[Place], read: Callable[[Place], Array], texts: Array, tolerance: float
) -> Related | None:
    """The relation of a whole chunk x [n, H] to one of the streams, if there is one.

    read(place) -> [n, H] float32 at the same rows; texts [n]: which text a row is of, rows of a text in order
    and without gaps. tolerance: the error that rounding explains.
    """
    limit = max(4 * tolerance, LEFT)
    found: dict[str, Related] = {}
    gram = _gram(x)
    grams: list[tuple[float, float, float, Place]] = []
    between: list[Related] = []
    for place in places:
        s = read(place)
        usable = np.isfinite(s).all(1) & np.isfinite(x).all(1)
        if usable.sum() < 2:
            continue
        for related in (
            _moved(x, s, texts, place),
            _scaled(x[usable], s[usable], place),
            *_weighted(x[usable], s[usable], place),
        ):
            if related and related.left < found.get(related.kind, related).left + 1e-12:
                found[related.kind] = related
        grams.append((*_basis(x, s, gram), place))
        before = Place(place.depth - 1)
        if not place.final_norm and before in places:
            between += _between(x, read(before), s, place)
    for kind in ("rows moved", "scaled", "reweighted", "normed"):
        if kind in found and found[kind].left <= limit:
            return found[kind]
    turned = _rotated(grams, len(x))
    return turned or min(between, key=lambda r: r.left, default=None)


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _moved(x: Array, s: Array, texts: Array, place: Place) -> Related | None:
    best = None
    for shift in SHIFTS:
        rows = np.arange(max(0, -shift), len(x) - max(0, shift))
        rows = rows[texts[rows] == texts[rows + shift]] if len(rows) else rows
        if len(rows) < FEWEST:
            continue
        left = float(np.median(_error(x[rows], s[rows + shift])))
        if best is None or left < best.left:
            by = f"{abs(shift)} position{'s' if abs(shift) > 1 else ''} {'later' if shift > 0 else 'earlier'}"
            words = f"{place}, but each row is that of {by} (error {left:.2g} once moved back)"
            best = Related("rows moved", place, left, words, shift=shift)
    return best


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _scaled(x: Array, s: Array, place: Place) -> Related | None:
    along, length = np.einsum("ij,ij->i", x, s), np.einsum("ij,ij->i", s, s)
    factors = along[length > 0] / length[length > 0]
    scale = float(np.median(factors)) if len(factors) else 0.0
    if not np.isfinite(scale) or abs(scale) < 1e-6 or abs(scale - 1) < 0.02:
        return None
    left = float(np.median(_error(x, scale * s)))
    words = f"{place} times {scale:.4g} (error {left:.2g} once divided)"
    return Related("scaled", place, left, words, scale=scale)


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _weighted(x: Array, s: Array, place: Place) -> list[Related]:
    """One weight a dimension, fitted on even rows, judged on odd ones; of rows as they are, or normed."""
    if len(x) < 2 * FEWEST:
        return []
    out = []
    rms = np.sqrt((s * s).mean(1, keepdims=True))
    for kind, rows in (("reweighted", s), ("normed", np.divide(s, rms, where=rms > 0, out=np.zeros_like(s)))):
        fit, power = (x[::2] * rows[::2]).sum(0), (rows[::2] ** 2).sum(0)
        weight = np.divide(fit, power, out=np.zeros_like(fit), where=power > 0)
        left = float(np.median(_error(x[1::2], rows[1::2] * weight)))
        if not np.isfinite(left) or (kind == "reweighted" and np.ptp(weight) < 0.04 * np.abs(weight).max()):
            continue
        how = "after an RMS norm" if kind == "normed" else "with another weight for each dimension"
        words = (
            f"{place} {how} (weights {weight.min():.3g} to {weight.max():.3g}; error {left:.2g} once undone)"
        )
        out.append(Related("normed" if kind == "normed" else "reweighted", place, left, words))
    return out


@np.errstate(invalid="ignore", over="ignore")
def _gram(x: Array) -> Array:
    """Cosines between rows, off the diagonal [m, m]."""
    rows = x[:GRAM_ROWS].astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    gram = unit @ unit.T
    np.fill_diagonal(gram, 0)
    return gram


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _between(x: Array, before: Array, after: Array, place: Place) -> list[Related]:
    """Whether rows lie on the sphere whose poles are the streams before and after one layer, or inside it."""
    way = np.linalg.norm(after - before, axis=1)
    to, back = (np.linalg.norm(x - end, axis=1) / way for end in (after, before))
    off = float(np.median(to**2 + back**2))
    missing = float(np.median(to))
    ends = (missing, float(np.median(back)))
    if not off <= SPHERE or min(ends) < 0.15 or max(ends) > 0.95:
        return []  # at one of the ends; or far to the side of both
    words = (
        f"between depth {place.depth - 1} and {place}: {missing:.0%} of what that layer adds is missing, "
        "as in a partial sum of one rank, or a state read inside the layer"
    )
    return [Related("partial sums", place, off, words)]


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _basis(x: Array, s: Array, gram: Array) -> tuple[float, float, float]:
    """-> (how far the angles between rows differ, how far the rows' norms do; both relative; the cosine)."""
    size = float(np.linalg.norm(gram)) or 1.0
    angles = float(np.linalg.norm(gram - _gram(s))) / size
    ratio = np.linalg.norm(x, axis=1) / np.linalg.norm(s, axis=1)
    cosine = np.einsum("ij,ij->i", x, s) / (np.linalg.norm(x, axis=1) * np.linalg.norm(s, axis=1))
    return angles, float(np.median(np.abs(ratio - 1))), float(np.median(np.abs(cosine)))


def _rotated(grams: list[tuple[float, float, float, Place]], rows: int) -> Related | None:
    if len(grams) < 2 or rows < FEWEST:
        return None
    grams = sorted(grams)
    (angles, norms, cosine, place), second = grams[0], grams[1][0]
    if not (angles <= 0.1 and angles < 0.5 * second and norms <= 0.05 and cosine < LOST):
        return None
    words = (
        f"{place} in another basis: norms are kept (median change {norms:.1%}) and so are the angles "
        f"between rows (off by {angles:.2g}, at the next depth {second:.2g}); median cosine {cosine:.2f}"
    )
    return Related("rotated", place, angles, words)


def odd_rows(
    x: Array,
    place: Place,
    places: Sequence[Place],
    read: Callable[[Place], Array],
    texts: Array,
    after_verify: Array,
    tolerance: float,
) -> Related | None:
    """Rows of a chunk that are not the stream's while the others are; None if there are too few of them.

    after_verify [n] bool: rows of generated tokens, handed over by a verify rather than by the prefill.
    """
    s = read(place)
    error = np.nan_to_num(_error(x, s), nan=np.inf)
    fine = error <= max(4 * tolerance, LEFT)
    off = np.flatnonzero(error > odd_from(float(np.median(error)), tolerance))
    if len(off) < max(OFF_ROWS, OFF_SHARE * len(x)) or fine.sum() < FEWEST:
        return None
    share = len(off) / len(x)
    where = (
        f"{int(after_verify[off].sum())} of {int(after_verify.sum())} rows after a verify, "
        f"{int((~after_verify[off]).sum())} of {int((~after_verify).sum())} rows of the prefill"
    )
    limit = max(4 * tolerance, LEFT)
    for other in places:
        if other != place and np.mean(_error(x[off], read(other)[off]) <= limit) > 0.9:
            words = f"{place}, but {share:.0%} of the rows are {other} ({where})"
            return Related("mixed depths", place, 0.0, words, share)
    zero = int((np.abs(x[off]).max(1) == 0).sum())
    source = _sources(x[off], s, limit)
    known = source >= 0
    if 2 * (known.sum() + zero) < len(off) and np.median(error[off]) < UNLIKE:
        return (
            None  # not another row but the same one, elsewhere computed: experts that were routed otherwise
        )
    back = off[known] - source[known]
    near = known.copy()
    near[known] = (texts[off[known]] == texts[source[known]]) & (back > 0)
    repeated = len(off) - len(np.unique(x[off], axis=0))
    parts = [
        (zero, "are all zeros, never written"),
        (int(near.sum()), f"hold the row of an earlier position of their text ({_usual(back[near[known]])})"),
        (int(known.sum() - near.sum()), "hold a row of another place or text"),
        (repeated if not known.any() and not zero else 0, "repeat one another"),
    ]
    told = "; ".join(f"{n} {what}" for n, what in parts if n) or "they are no recorded row"
    words = f"{place}, but {share:.0%} of the rows are not ({where}): {told}"
    return Related("stale rows", place, float(np.median(error[off])), words, share)


def odd_from(median: float, tolerance: float) -> float:
    """The error above which a row is not its chunk's stream: far beyond rounding and beyond its fellows."""
    usual = min(10 * median, OFF) if median <= OFF else 0.0  # a large median: most rows are odd
    return max(usual, OFF * min(1.0, 40 * tolerance), 4 * tolerance, LEFT)


def _sources(x: Array, s: Array, limit: float, batch: int = 64) -> Array:
    """For each row of x the row of s that it is, -1 for none."""
    found = np.full(len(x), -1)
    squares = np.einsum("ij,ij->i", s, s)
    for top in range(0, len(x), batch):
        part = x[top : top + batch]
        apart = squares[None] - 2 * part @ s.T
        nearest = np.argmin(np.nan_to_num(apart, nan=np.inf), axis=1)
        ok = np.nan_to_num(_error(part, s[nearest]), nan=np.inf) <= limit
        found[top : top + batch][ok] = nearest[ok]
    return found


def _usual(back: Array) -> str:
    if not len(back):
        return ""
    values, counts = np.unique(back, return_counts=True)
    return f"mostly {int(values[counts.argmax()])} back"


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _error(x: Array, s: Array) -> Array:
    return np.linalg.norm(x - s, axis=1) / np.linalg.norm(s, axis=1)
