"""What one-pass statistics are made of: moments of many series at once, and counts of bf16 values.

Every sum is float64 and every count int64: float32 counters stop counting at 2**24, and E[x^2] - E[x]^2 in
float32 loses the variance of a series whose mean is large.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, sqrt
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

PATTERNS = 1 << 16  # bf16 has 65,536 bit patterns, so counting them gives exact quantiles
_NUMBERS = (np.arange(PATTERNS, dtype=np.uint32) << 16).view(np.float32)
_ASCENDING = np.argsort(_NUMBERS, kind="stable")[
    : PATTERNS - 2 * 127
]  # the 254 NaNs sort last and are cut off


class Moments:
    """Count, mean, sum of squared deviations, lowest and highest of each of `size` series."""

    FIELDS = ("count", "mean", "m2", "low", "high")

    def __init__(self, size: int) -> None:
        self.count = np.zeros(size, np.int64)
        self.mean = np.zeros(size)
        self.m2 = np.zeros(size)
        self.low = np.full(size, np.inf)
        self.high = np.full(size, -np.inf)

    def add(self, part: slice, count: Any, mean: Array, m2: Array, low: Array, high: Array) -> None:
        """Chan's merge of another group of values into the series of `part`."""
        total = self.count[part] + count
        weight = count / np.maximum(total, 1)  # 0 where neither side has seen a value
        delta = mean - self.mean[part]
        self.m2[part] += m2 + delta * delta * self.count[part] * weight
        self.mean[part] += delta * weight
        self.count[part] = total
        self.low[part] = np.minimum(self.low[part], low)
        self.high[part] = np.maximum(self.high[part], high)

    def add_values(self, part: slice, x: Array, scratch: Array) -> None:
        """Add the finite values of x [n, size of part], float64. `scratch`, of x's shape, is overwritten."""
        low, high = x.min(0), x.max(0)
        if np.isfinite(low).all() and np.isfinite(high).all():
            count: Any = len(x)
            mean = x.sum(0) / count
            d = np.subtract(x, mean, out=scratch)
        else:
            finite = np.isfinite(x)
            count = finite.sum(0)
            mean = np.where(finite, x, 0).sum(0) / np.maximum(count, 1)
            d = np.where(finite, x - mean, 0)
            low, high = np.where(finite, x, np.inf).min(0), np.where(finite, x, -np.inf).max(0)
        self.add(part, count, mean, np.einsum("ij,ij->j", d, d), low, high)

    def merge(self, other: Moments) -> None:
        self.add(slice(None), other.count, other.mean, other.m2, other.low, other.high)

    @property
    def variance(self) -> Array:
        """Population variance (divided by count); NaN where nothing was counted."""
        return np.divide(self.m2, self.count, out=np.full(len(self.m2), np.nan), where=self.count > 0)

    def pooled(self, part: slice) -> tuple[int, float, float, float, float]:
        """(count, mean, sd, low, high) of all series in `part` taken as one."""
        n = self.count[part]
        total = int(n.sum())
        if not total:
            return 0, np.nan, np.nan, np.nan, np.nan
        mean = float((n * self.mean[part]).sum() / total)
        m2 = float(self.m2[part].sum() + (n * (self.mean[part] - mean) ** 2).sum())
        return total, mean, sqrt(m2 / total), float(self.low[part].min()), float(self.high[part].max())


def to_bf16(x: Array) -> Array:
    """float -> bf16 bits (uint16), rounded to nearest, ties to even. NaN stays NaN, overflow is infinity."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((u + (0x7FFF + ((u >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)


def count_patterns(bits: Array) -> Array:
    """How often each bf16 bit pattern occurs: int64 [65536]. `bits`: any shape; intp is fastest."""
    return np.bincount(bits.reshape(-1), minlength=PATTERNS)


def without_nan(counts: Array) -> int:
    return int(counts[_ASCENDING].sum())


def quantile(counts: Array, q: float) -> float:
    """The smallest bf16 number that at least a share q of those counted do not exceed.

    Infinities are counted at their ends, NaN nowhere; -0.0 reads as 0.0. NaN when there is nothing to count.
    """
    upto = np.cumsum(counts[_ASCENDING])
    if not upto[-1]:
        return np.nan
    rank = max(ceil(Fraction(str(q)) * int(upto[-1])), 1)  # q as written in decimals: 0.07 of 100 is 7, not 8
    return float(_NUMBERS[_ASCENDING[np.searchsorted(upto, rank)]]) + 0.0


def median_magnitude(counts: Array) -> float:
    folded = np.zeros_like(counts)
    folded[: PATTERNS // 2] = counts[: PATTERNS // 2] + counts[PATTERNS // 2 :]  # the sign is the top bit
    return quantile(folded, 0.5)
