"""Intervals: when does a drop count?"""

from __future__ import annotations

import numpy as np
import pytest

from eaglelab.paired import FEWEST, STRETCH, compare, interval
from eaglelab.simulate import Rounds


def rounds(lengths, starts=None, rid="a", steps=5):
    starts = range(0, 4 * len(lengths), 4) if starts is None else starts
    return Rounds([rid] * len(lengths), np.asarray(starts), np.asarray(lengths), steps)


def noise(mean, count, seed, spread=1.0):
    """Lengths from 1 to 6 around a mean."""
    draws = np.random.default_rng(seed).normal(mean, spread, count)
    return np.clip(draws.round(), 1, 6).astype(int)


def test_a_large_loss_fails():
    drop = compare(rounds(noise(4, 400, 0)), rounds(noise(2, 400, 1)), by_start=True)
    assert drop.failed and drop.share > 0.4
    assert drop.interval[0] < drop.value < drop.interval[1]


def test_a_sure_loss_of_less_than_five_percent_passes():
    upper = np.full(1000, 3)
    lower = np.where(np.arange(1000) % 10 == 0, 2, 3)  # 2.9: 3.3 % lost, without doubt
    drop = compare(rounds(upper), rounds(lower), by_start=True)
    assert drop.interval[0] > 0 and drop.share == pytest.approx(1 / 30)
    assert drop.failed is False


def test_a_loss_of_exactly_five_percent_passes_and_more_fails():
    upper = np.full(1000, 4)
    some = np.arange(1000) % 5 == 0
    assert compare(rounds(upper), rounds(np.where(some, 3, 4)), by_start=True).failed is False  # 3.8
    some |= np.arange(1000) % 100 == 1
    assert compare(rounds(upper), rounds(np.where(some, 3, 4)), by_start=True).failed is True  # 3.79


def test_a_loss_within_noise_passes():
    """Ten stretches of 8 rounds: in five of them 2 tokens are lost, in five 1 is won. On average an eighth is
    lost, but ten stretches cannot tell."""
    lower = np.repeat([2, 5] * 5, 8)
    drop = compare(rounds(np.full(80, 4)), rounds(lower), by_start=True)
    assert (drop.value, drop.stretches) == (0.5, 10)
    assert drop.interval[0] < 0 < drop.interval[1] and drop.failed is False


def test_a_gain_never_fails():
    assert compare(rounds(noise(2, 400, 1)), rounds(noise(4, 400, 0)), by_start=True).failed is False


def test_too_few_stretches_give_no_interval():
    lengths = np.full(STRETCH // 4 * (FEWEST - 1), 3)
    assert interval(rounds(lengths)) is None
    assert compare(rounds(lengths), rounds(lengths - 1), by_start=True).failed is None
    lengths = np.full(STRETCH // 4 * FEWEST, 3)
    assert interval(rounds(lengths)) == (3.0, 3.0)


def test_equal_rungs_lose_nothing():
    drop = compare(rounds(noise(3, 300, 3)), rounds(noise(3, 300, 3)), by_start=False)
    assert (drop.value, drop.interval, drop.failed) == (0.0, (0.0, 0.0), False)


def test_pairing_by_start_keeps_shared_starts_only():
    upper, lower = rounds([4, 4, 1], starts=[0, 4, 8]), rounds([2, 2, 6], starts=[0, 4, 12])
    drop = compare(upper, lower, by_start=True)
    assert (drop.upper, drop.lower) == (4.0, 2.0)


def test_pairing_by_text_keeps_shared_requests_only():
    upper = Rounds(["a", "a", "b"], np.array([0, 4, 0]), np.array([4, 4, 1]), 5)
    lower = Rounds(["a", "a", "a", "c"], np.array([0, 2, 4, 0]), np.array([2, 2, 2, 6]), 5)
    drop = compare(upper, lower, by_start=False)
    assert (drop.upper, drop.lower) == (4.0, 2.0)


def test_pairing_narrows_the_interval():
    """The same easy and hard stretches under both: the paired interval does not carry their scatter."""
    generator = np.random.default_rng(7)
    upper = np.repeat(generator.choice([2, 6], size=60), 8)
    lower = np.maximum(upper - (np.arange(len(upper)) % 2), 1)
    drop = compare(rounds(upper), rounds(lower), by_start=True)
    assert drop.interval == pytest.approx((0.5, 0.5))
    single = interval(rounds(upper))
    assert single[1] - single[0] > 0.8


def test_stretches_not_rounds_are_the_unit():
    """Copying every round four times within its stretch must not narrow the interval."""
    lengths = noise(3.5, 240, 8)
    copied = np.repeat(lengths, 4)
    a = interval(rounds(lengths))
    b = interval(rounds(copied, starts=np.repeat(np.arange(0, 960, 4), 4)))
    assert a == pytest.approx(b)


def test_acceptance_per_draft_position():
    assert rounds([1, 2, 6, 6], steps=5).acceptance == [0.75, 0.5, 0.5, 0.5, 0.5]
    assert rounds([1, 2, 6, 6]).accept_length == 3.75
