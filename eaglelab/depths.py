"""Which depth is this vector from? Chunks of features are compared with re-prefilled residual streams.

Accept length cannot tell: depths off by one cost a few per cent. Vectors can: a chunk is its stream up to
rounding, while neighbouring depths of one text differ by 5 to 50 per cent. A row's error at a stream is
|x - s| / |s|; a chunk's error is the median over rows, so that a few stale rows neither name a depth nor
hide one.

How a chunk is named:
- `place`: the stream with the smallest error; `runner_up`: the next one.
- `confidence`: the share of rows that lie closer to the named stream than to the runner-up. 1.0: every row
  says so by itself; 0.5: a coin toss, as between neighbours that differ by less than the rounding. Streams
  whose share is under 0.9 are `rivals`: the chunk may as well be one of these.
- `match`: "exact" if rounding explains the error (ROUNDING x sqrt(1 + depth)); "near" if it is larger, but
  at most 0.25 and not pointing to the runner-up (|toward| at most 0.25; an unrecorded depth in between has
  about 0.5); else "none".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.errors import BadInput
from eaglelab.relations import LEFT, OFF_ROWS, OFF_SHARE, Place, Related, odd_from, odd_rows, relate
from eaglelab.rows import MAX_ROWS, captured_rows
from eaglelab.stats import as_array
from eaglelab.tensorfile import to_float32

if TYPE_CHECKING:
    from eaglelab.capture import Capture

# The error that rounding explains after one addition; it grows with the root of their number. Measured: two
# ways of computing one stream (a prefill; token by token) differ after 8 layers by 5e-7 in float32 and 8e-3
# in bfloat16.
ROUNDING = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
NEAR = 0.25
CERTAIN = 0.9
TOWARD = 0.25
HALF = 128  # rows from either end that tell how a chunk as a whole relates to a stream

Match = Literal["exact", "near", "none"]
Relation = Literal[
    "as expected", "other order", "shifted", "final norm", "other depths", "other width", "altered", "unclear"
]


@dataclass(frozen=True)
class ChunkName:
    """What one chunk was recognised as. `errors`: the chunk's error at every recorded stream."""

    place: Place
    match: Match
    error: float
    error_p90: float  # far above `error`: some rows are something else (stale, padded, another text)
    cosine: float
    runner_up: Place | None
    runner_up_error: float
    confidence: float
    rivals: tuple[Place, ...]
    toward: float
    scale: float  # median |x| / |s|
    rows: int
    errors: dict[Place, float]
    odd: float = 0.0  # share of rows that are not the named stream's although the median is
    related: Related | None = None  # how it relates to a stream that it is not simply equal to

    @property
    def relation(self) -> str:
        """To the stream of `related`, or of `place`: same, rotated, scaled ... (`relations.Kind`)."""
        return self.related.kind if self.related else "same"

    @property
    def depth(self) -> int:
        return self.place.depth

    @property
    def may_be(self) -> tuple[Place, ...]:
        """Every place this chunk cannot be told from; empty when it matches nothing."""
        return () if self.match == "none" else (self.place, *self.rivals)

    def __str__(self) -> str:
        other = ""
        if self.runner_up:
            form = (
                " before the final norm"
                if self.place.final_norm and self.runner_up.depth == self.depth
                else ""
            )
            other = f"; next {self.runner_up}{form} at {self.runner_up_error:.2g}"
        figures = f"error {self.error:.2g}{other}, {self.confidence:.0%} of {self.rows} rows"
        if self.related:
            return self.related.words
        if self.match == "none":
            return f"matches no recorded stream (closest {self.place}: {figures})"
        unsure = f", or {' or '.join(map(str, self.rivals))}" if self.rivals else ""
        return f"{self.place}{unsure} ({self.match}; {figures})"


@dataclass(frozen=True)
class DepthNames:
    """The names of all chunks, in feed order, and how they relate to the expected ones (if given)."""

    chunks: tuple[ChunkName, ...]
    expected: tuple[Place, ...] | None = None
    relation: Relation | None = None
    shift: int | None = None  # served depth minus expected depth, where it is the same for all chunks

    @property
    def depths(self) -> list[int | None]:
        return [c.depth if c.match != "none" else None for c in self.chunks]

    @property
    def final_norm(self) -> bool:
        return any(c.place.final_norm and c.match != "none" for c in self.chunks)

    def __str__(self) -> str:
        lines = [f"chunk {i}: {c}" for i, c in enumerate(self.chunks)]
        if self.expected is not None:
            by = f" by {self.shift:+d}" if self.relation == "shifted" else ""
            lines.append(f"expected {', '.join(map(str, self.expected))}: {self.relation}{by}")
        return "\n".join(lines)


def name_depths(
    features: Any,
    streams: Mapping[int, Any],
    final: Any = None,
    *,
    layers: int | None = None,
    expected: Sequence[int | Place] | None = None,
    texts: Array | None = None,
    after_verify: Array | None = None,
) -> DepthNames:
    """Name the depth of each chunk of `features`.

    features: [n, k * H], [n, k, H], or a list of k chunks [n, H].
    streams: depth -> [n, H], the residual stream at the same positions. final: [n, H] after the final norm.
    All numpy (uint16: bits of bf16) or torch; a stream may be a function that reads it when its turn comes.
    layers: of the target, by default the largest recorded depth. expected: in feed order. texts [n]: which
    text a row is of, rows in order and without gaps; with it, a chunk that is not plainly one stream is
    explained (`relations`). after_verify [n] bool: rows of generated tokens.
    """
    if not streams:
        raise BadInput("no residual stream to compare with; capture again with a re-prefill")
    places = [Place(depth) for depth in sorted(streams)]
    if final is not None:
        places.append(Place(max(streams) if layers is None else layers, True))

    def load(place: Place) -> Any:
        stream = final if place.final_norm else streams[place.depth]
        return stream() if callable(stream) else stream

    hidden = np.shape(load(places[0]))[-1]
    chunks = split_chunks(features, hidden)
    n = len(chunks[0])
    rows = np.unique(np.linspace(0, n - 1, min(n, MAX_ROWS)).astype(int))

    def read(place: Place, rows: Array = rows) -> Array:
        stream = load(place)
        if np.shape(stream) != (n, hidden):
            raise BadInput(f"{place}: the stream has shape {list(np.shape(stream))}, a chunk {[n, hidden]}")
        return _numbers(stream, rows)

    xs = [_numbers(c, rows) for c in chunks]
    measured: list[list[Array]] = [[] for _ in xs]  # per chunk and stream: [3, rows]
    for place in places:
        stream = read(place)
        for x, into in zip(xs, measured, strict=True):
            into.append(_measure(x, stream))
    names = [_name(x, places, np.stack(m), read) for x, m in zip(xs, measured, strict=True)]
    if texts is not None and any(map(_unexplained, names)):
        whole = np.arange(min(n, MAX_ROWS))
        again = lru_cache(8)(lambda place: read(place, whole))  # neighbours are read together
        flags = (
            np.asarray(texts)[whole],
            np.asarray(after_verify if after_verify is not None else texts * 0)[whole],
        )
        names = [
            _explain(name, _numbers(c, whole), places, again, *flags)
            for name, c in zip(names, chunks, strict=True)
        ]
    return DepthNames(tuple(names), *_relate(names, expected))


def name_capture(
    capture: Capture, *, layers: int | None = None, expected: Sequence[int | Place] | None = None
) -> DepthNames:
    """Name the depths of what a server fed its drafter, against the re-prefills of the same texts."""
    rows = captured_rows(capture)
    names = name_depths(rows.features, rows.streams, rows.final, layers=layers, expected=expected)
    if not any(map(_unexplained, names.chunks)):
        return names
    rows = captured_rows(capture, whole=True)
    flags = {"texts": rows.texts, "after_verify": rows.after_verify}
    again = name_depths(rows.features, rows.streams, rows.final, layers=layers, expected=expected, **flags)
    return summed_ranks(capture, again, layers)


def summed_ranks(capture: Capture, names: DepthNames, layers: int | None) -> DepthNames:
    """Partial sums, where every rank of a group was recorded: no rank holds the whole stream, each holds
    other rows, and in the plainest case the ranks' rows add up to it."""
    if all(c.match == "exact" for c in names.chunks):
        return names
    group = capture.primary_ranks[0].partition(".")[0]
    ranks = [rank for rank in capture.ranks if rank.partition(".")[0] == group]
    if len(ranks) < 2:
        return names
    parts = [captured_rows(capture, whole=True, rank=rank) for rank in ranks]
    if len({len(p.features) for p in parts}) > 1:
        return names
    rows = [to_float32(*as_array(p.features)) for p in parts]
    streams, final = parts[0].streams, parts[0].final
    summed = name_depths(np.sum(rows, axis=0, dtype=np.float32), streams, final, layers=layers)
    alone = [name_depths(other, streams, final, layers=layers).chunks for other in rows[1:]]
    chunks = list(names.chunks)
    for i, mine in enumerate(chunks):
        total, width = summed.chunks[i], rows[0].shape[1] // len(chunks)
        part = slice(i * width, (i + 1) * width)
        apart = max(float(np.median(_measure(o[:, part], rows[0][:, part])[0])) for o in rows[1:])
        if any(name.match == "exact" for name in (mine, *(found[i] for found in alone))) or apart < LEFT:
            continue
        if total.match != "none" and mine.match == "none":
            place, left = total.place, total.error
            words = f"a partial sum: the {len(ranks)} ranks' rows add up to {place} (error {left:.2g})"
        else:
            place, left = mine.place, mine.error
            words = (
                f"a partial sum: none of the {len(ranks)} ranks holds {place} (error {left:.2g} here), and "
                f"each holds other rows ({apart:.0%} apart)"
            )
        chunks[i] = replace(mine, related=Related("partial sums", place, left, words))
    altered = any(c.related for c in chunks) and names.expected is not None
    relation: Relation | None = "altered" if altered else names.relation
    return replace(names, chunks=tuple(chunks), relation=relation, shift=None if altered else names.shift)


def _unexplained(name: ChunkName) -> bool:
    return name.match != "exact" or name.odd > OFF_SHARE


def _explain(
    name: ChunkName,
    x: Array,
    places: Sequence[Place],
    read: Callable[[Place], Array],
    texts: Array,
    after_verify: Array,
) -> ChunkName:
    tolerance = _rounding(x, read(name.place)) * np.sqrt(1 + name.place.depth)
    related = None
    if name.match != "exact":
        some = np.unique(
            np.concatenate([np.arange(min(len(x), HALF)), np.arange(max(0, len(x) - HALF), len(x))])
        )
        related = relate(x[some], places, lambda place: read(place)[some], texts[some], tolerance)
        if related and name.match == "near" and name.error < 3 * related.left:
            related = None  # a near miss needs no other reason than noise
    if related is None:
        # where less than half of the rows are one stream's, the median names none of them
        fits = [float(np.mean(_measure(x, read(p))[0] <= max(4 * tolerance, LEFT))) for p in places]
        place = name.place if name.match == "exact" else places[int(np.argmax(fits))]
        related = odd_rows(x, place, places, read, texts, after_verify.astype(bool), tolerance)
    return replace(name, related=related)


def split_chunks(features: Any, hidden: int) -> list[Array]:
    """[n, k * H], [n, k, H] or a list of [n, H] -> k views [n, H]."""
    if isinstance(features, list | tuple):
        chunks = [as_array(c)[0] for c in features]
    else:
        array = as_array(features)[0]
        if array.ndim == 2 and array.shape[1] % hidden == 0:
            array = array.reshape(len(array), -1, hidden)
        if array.ndim != 3:
            raise BadInput(f"features have shape {list(array.shape)}; their width is no multiple of {hidden}")
        chunks = [array[:, i] for i in range(array.shape[1])]
    if not chunks or any(c.shape != (len(chunks[0]), hidden) for c in chunks):
        raise BadInput(f"chunks have shapes {[list(c.shape) for c in chunks]}; each must be [n, {hidden}]")
    return chunks


def _numbers(array: Any, rows: Array) -> Array:
    """The chosen rows as float32; only these are converted."""
    values, dtype = as_array(array)
    return to_float32(values[rows], dtype)


def _rounding(*arrays: Array) -> float:
    """ROUNDING of the coarsest dtype that these float32 numbers were rounded to, wherever they came from."""
    low = [np.bitwise_or.reduce(np.ascontiguousarray(a).view(np.uint32), axis=None) for a in arrays]
    if any(not bits & 0xFFFF for bits in low):
        return ROUNDING["bfloat16"]
    return ROUNDING["float16" if any(not bits & 0x1FFF for bits in low) else "float32"]


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _measure(x: Array, s: Array) -> Array:
    """[3, rows]: error |x - s| / |s| (infinite where it cannot be told), cosine, |x| / |s|."""
    length_x, length_s = np.linalg.norm(x, axis=1), np.linalg.norm(s, axis=1)
    error = np.linalg.norm(x - s, axis=1) / length_s
    cosine = np.einsum("ij,ij->i", x, s) / (length_x * length_s)
    return np.stack([np.nan_to_num(error, nan=np.inf), np.nan_to_num(cosine), length_x / length_s])


def _name(x: Array, places: list[Place], measured: Array, read: Callable[[Place], Array]) -> ChunkName:
    """`measured`: [streams, 3, rows]."""
    usable = np.isfinite(x).all(1) & np.isfinite(measured[:, 0]).any(0)
    x, measured = x[usable], measured[:, :, usable]
    if not len(x):
        return ChunkName(places[0], "none", np.inf, np.inf, 0.0, None, np.inf, 0.0, (), 0.0, np.nan, 0, {})
    errors = measured[:, 0]
    medians = np.median(errors, axis=1)
    order = np.argsort(medians, kind="stable")
    best, second = order[0], order[1] if len(order) > 1 else None
    place, error = places[best], float(medians[best])
    stream = read(place)[usable]
    closer = (errors[best] < errors).mean(1)  # share of rows that prefer the best to each stream; ties do not
    toward = 0.0 if second is None else _toward(x, stream, read(places[second])[usable])
    match: Match = "none"
    if error <= _rounding(x, stream) * np.sqrt(1 + place.depth):
        match = "exact"
    elif error <= NEAR and abs(toward) <= TOWARD:
        match = "near"
    return ChunkName(
        place=place,
        match=match,
        error=error,
        error_p90=float(np.quantile(errors[best], 0.9)),
        cosine=float(np.median(measured[best, 1])),
        runner_up=None if second is None else places[second],
        runner_up_error=np.inf if second is None else float(medians[second]),
        confidence=1.0 if second is None else float(closer[second]),
        rivals=tuple(places[j] for j in order[1:] if closer[j] < CERTAIN),
        toward=toward,
        scale=float(np.median(measured[best, 2])),
        rows=len(x),
        errors=dict(zip(places, medians.tolist(), strict=True)),
        odd=_odd(errors[best], _rounding(x, stream) * np.sqrt(1 + place.depth)),
    )


def _odd(error: Array, tolerance: float) -> float:
    """Share of rows whose error neither rounding nor a near miss explains; 0 if they are too few to count."""
    count = int((error > odd_from(float(np.median(error)), tolerance)).sum())
    return count / len(error) if count >= OFF_ROWS else 0.0


def _toward(x: Array, a: Array, b: Array) -> float:
    """Where x lies on the way from a (0) to b (1), median over rows. Noise is across that way, not along."""
    way = b - a
    length = np.einsum("ij,ij->i", way, way)
    along = np.einsum("ij,ij->i", x - a, way)
    return float(np.median(np.divide(along, length, out=np.zeros_like(along), where=length > 0)))


def _relate(
    names: list[ChunkName], expected: Sequence[int | Place] | None
) -> tuple[tuple[Place, ...] | None, Relation | None, int | None]:
    if expected is None:
        return None, None, None
    wanted = tuple(e if isinstance(e, Place) else Place(e) for e in expected)
    if len(wanted) != len(names):
        return wanted, "other width", None
    if any(n.related for n in names):
        return wanted, "altered", None
    if all(w in n.may_be for w, n in zip(wanted, names, strict=True)):
        return wanted, "as expected", 0
    if any(n.match == "none" for n in names):
        return wanted, "unclear", None
    if any(n.place.final_norm and not w.final_norm for w, n in zip(wanted, names, strict=True)):
        return wanted, "final norm", None
    if any(all(w in n.may_be for w, n in zip(other, names, strict=True)) for other in permutations(wanted)):
        return wanted, "other order", None
    for shift in sorted({p.depth - wanted[0].depth for p in names[0].may_be}, key=abs):
        moved = [Place(w.depth + shift, w.final_norm) for w in wanted]
        if all(m in n.may_be for m, n in zip(moved, names, strict=True)):
            return wanted, "shifted", shift
    return wanted, "other depths", None
