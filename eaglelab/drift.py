"""Drift: are the rows that the server feeds the rows that the trainer stored?

Where a stored text was sent to the server too, its rows are compared position by position: then the text
is the same and only the feed can differ. Elsewhere only distributions can be compared, and part of what
differs is the text. Both speak of chunks in feed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eaglelab.accumulate import PATTERNS, Array
from eaglelab.errors import BadInput
from eaglelab.stats import FeatureStats
from eaglelab.tensorfile import to_float32

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.features import StoredFeatures
    from eaglelab.wiring import Feed

MOST_ROWS = 20_000  # of stored features; a training set may be larger than any memory
FAR = 0.05  # relative error at the same position that rounding does not explain, even in bfloat16


@dataclass(frozen=True)
class Drift:
    """One chunk. Same positions: `error` |served - stored| / |stored|, its 90 % quantile, `cosine`; by row.

    Distribution: `shifts` [H], each dimension's mean moved, in standard deviations as stored; `distance`,
    the largest gap between the two distributions of values (Kolmogorov-Smirnov, 0 to 1). `norms`: mean row
    norm stored and served. `rows`: stored and served rows that were read.
    """

    name: str
    way: Literal["same positions", "distribution"]
    rows: tuple[int, int]
    norms: tuple[float, float]
    shifts: Array
    distance: float
    error: float | None = None
    error_p90: float | None = None
    cosine: float | None = None
    source: str = ""

    @property
    def moved(self) -> int:
        """Dimensions whose mean moved by more than one standard deviation."""
        return int((np.abs(self.shifts) > 1).sum())


def drift(capture: Capture, stored: StoredFeatures, feed: Feed, names: list[str]) -> list[Drift]:
    """Every chunk of a trained `feed`, stored against served; `names`: one a chunk, in feed order.

    BadInput where the two cannot be laid side by side: nothing captured, or rows of different widths.
    """
    pairs = shared_rows(capture, stored, feed)
    if pairs:
        then, now = (np.concatenate(side) for side in ([p[0] for p in pairs], [p[1] for p in pairs]))
        return _chunks(_stats(then, names), _stats(now, names), then, now, pairs[0][2])
    served = [t for t in capture.requests.values() if t.rows]
    if not served:
        raise BadInput(f"{capture.path}: no row was captured")
    width = served[0].features.shape[1]
    if width != feed.width:
        raise BadInput(
            f"the server feeds rows {width} wide, the trainer stored rows {feed.width} wide: they cannot be "
            "laid side by side, and that alone is the fault to mend"
        )
    now_stats, then_stats = (FeatureStats(width, len(names), names) for _ in range(2))
    for trace in served:
        now_stats.update(trace.features)
    for sample in stored.samples:
        then_stats.update(sample.features)
        if then_stats.rows >= MOST_ROWS:
            break
    return _chunks(then_stats, now_stats)


def shared_rows(capture: Capture, stored: StoredFeatures, feed: Feed) -> list[tuple[Array, Array, str]]:
    """(stored rows, served rows, where these came from) of each stored text that the capture has."""
    from eaglelab.stored import stored_texts

    found, rows = [], 0
    for text in stored_texts(stored, feed):
        again = text.as_fed(capture, feed)
        if again is not None:
            count = min(len(text.features), len(again.features))
            found.append((text.features[:count].numpy(), again.features[:count].numpy(), again.source))
            rows += count
        if rows >= MOST_ROWS:
            break
    return found


def _stats(rows: Array, names: list[str]) -> FeatureStats:
    return FeatureStats(rows.shape[1], len(names), names).update(rows)


def _chunks(
    then: FeatureStats, now: FeatureStats, a: Array | None = None, b: Array | None = None, source: str = ""
) -> list[Drift]:
    out = []
    for c, name in enumerate(then.names):
        part = slice(c * then.hidden, (c + 1) * then.hidden)
        spread = np.sqrt(then.variance[part])
        moved = now.mean[part] - then.mean[part]
        shifts = np.divide(moved, spread, out=np.where(moved == 0, 0.0, np.inf), where=spread > 0)
        measured: dict[str, Any] = {}
        if a is not None and b is not None:
            measured = _rowwise(a[:, part], b[:, part])
        out.append(
            Drift(
                name=name,
                way="same positions" if measured else "distribution",
                rows=(then.rows, now.rows),
                norms=(then.chunk(c).norms.mean, now.chunk(c).norms.mean),
                shifts=shifts,
                distance=distance(then.value_counts[c], now.value_counts[c]),
                source=source,
                **measured,
            )
        )
    return out


def _rowwise(then: Array, now: Array) -> dict[str, Any]:
    length = np.linalg.norm(then, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.linalg.norm(now - then, axis=1) / length
        cosine = np.einsum("ij,ij->i", then, now) / (length * np.linalg.norm(now, axis=1))
    median, high = np.quantile(error, [0.5, 0.9])
    return {"error": float(median), "error_p90": float(high), "cosine": float(np.median(cosine))}


def distance(a: Array, b: Array) -> float:
    """Largest gap between two distributions, counted by bf16 bit pattern [65,536]; 0 alike, 1 disjoint."""
    values = to_float32(np.arange(PATTERNS, dtype=np.uint32).astype(np.uint16), "bfloat16")
    order = np.argsort(np.where(np.isfinite(values), values, np.inf), kind="stable")
    order = order[np.isfinite(values[order])]
    level = values[order]
    last = np.append(level[1:] != level[:-1], True)  # -0 and 0 are one value
    shares = [np.cumsum(x[order]) / max(x[order].sum(), 1) for x in (a, b)]
    return float(np.abs(shares[0] - shares[1])[last].max())
