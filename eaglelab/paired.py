"""Intervals for accept lengths: a paired bootstrap over stretches of text.

Rounds that lie close together are not independent (they draft from the same words), and two ways of
drafting along one text do not start their rounds at the same places. So the unit that is drawn again
is a stretch of 32 tokens of one text: it holds the rounds that start in it, under both ways, and the
figure is a ratio of sums, tokens committed over rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eaglelab.simulate import Rounds

STRETCH = 32  # tokens
FEWEST = 8  # stretches, for an interval that means anything
DRAWS = 2000
WAY = f"95 % interval: paired bootstrap, {DRAWS} draws over stretches of {STRETCH} tokens"


@dataclass(frozen=True)
class Drop:
    """What is lost from one rung to the next: a positive value is a loss of accept length."""

    upper: float
    lower: float
    interval: tuple[float, float] | None  # None: fewer than 8 stretches
    stretches: int

    @property
    def value(self) -> float:
        return self.upper - self.lower

    @property
    def share(self) -> float:
        """The loss as a share of the rung above."""
        return self.value / self.upper

    @property
    def failed(self) -> bool | None:
        """The interval excludes 0 and the loss exceeds 5 %; None: no interval."""
        return None if self.interval is None else self.interval[0] > 0 and self.share > 0.05 + 1e-9


def interval(rounds: Rounds) -> tuple[float, float] | None:
    """95 % interval of an accept length; None with fewer than 8 stretches."""
    sums, counts = _stretches(rounds, _keys(rounds))
    return _percentiles(*(_draw(len(sums)) @ x for x in (sums, counts))) if len(sums) >= FEWEST else None


def compare(upper: Rounds, lower: Rounds, by_start: bool) -> Drop:
    """The drop from `upper` to `lower`, both cut to what they share.

    by_start: rounds that start at the same places, compared place by place; else two walks along the
    same texts. Both lengths are nan if no round is shared.
    """
    upper, lower = _shared(upper, lower, by_start)
    keys = sorted({*_keys(upper), *_keys(lower)})
    a, b = _stretches(upper, keys), _stretches(lower, keys)
    found = None
    if len(keys) >= FEWEST:
        draws = _draw(len(keys))
        with np.errstate(invalid="ignore", divide="ignore"):
            differences = draws @ a[0] / (draws @ a[1]) - draws @ b[0] / (draws @ b[1])
        found = _percentiles(differences)
    return Drop(upper.accept_length, lower.accept_length, found, len(keys))


def _shared(a: Rounds, b: Rounds, by_start: bool) -> tuple[Rounds, Rounds]:
    def places(rounds: Rounds) -> list:
        return list(zip(rounds.rids, rounds.starts.tolist(), strict=True)) if by_start else rounds.rids

    both = set(places(a)) & set(places(b))
    return a.where([p in both for p in places(a)]), b.where([p in both for p in places(b)])


def _keys(rounds: Rounds) -> list[tuple[str, int]]:
    return sorted(set(zip(rounds.rids, (rounds.starts // STRETCH).tolist(), strict=True)))


def _stretches(rounds: Rounds, keys: list[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    """-> (tokens committed, rounds) of each stretch."""
    place = {key: i for i, key in enumerate(keys)}
    at = [place[key] for key in zip(rounds.rids, (rounds.starts // STRETCH).tolist(), strict=True)]
    sums = np.bincount(at, weights=rounds.lengths, minlength=len(keys)) if at else np.zeros(len(keys))
    return sums, np.bincount(at, minlength=len(keys)) if at else np.zeros(len(keys))


def _draw(count: int) -> np.ndarray:
    """[draws, count]: how often each stretch is drawn; the same draws for every rung of a run."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=DRAWS)


def _percentiles(top: np.ndarray, bottom: np.ndarray | None = None) -> tuple[float, float]:
    values = top if bottom is None else top / bottom
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)
