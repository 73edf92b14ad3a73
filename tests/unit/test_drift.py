"""Stored rows against served ones, on rows whose drift is known."""

from types import SimpleNamespace

import numpy as np
import pytest

from eaglelab.accumulate import PATTERNS, to_bf16
from eaglelab.drift import distance, drift
from eaglelab.errors import BadInput
from eaglelab.stats import FeatureStats
from eaglelab.wiring import Feed

FEED = Feed(depths=(1, 3), width=8)
NAMES = ["depth 1", "depth 3"]


def stored(rows, tokens):
    sample = SimpleNamespace(features=rows, dtype="float32", token_ids=np.asarray(tokens), last=rows[:, :4])
    return SimpleNamespace(samples=[sample], last_is="before the final norm")


def capture(rows, tokens, rid):
    trace = SimpleNamespace(
        rid=rid, state="complete", why="", tokens=list(tokens), features=rows, feature_dtype="float32",
        prompt_len=2, output_ids=None, rows=len(rows),
    )  # fmt: skip
    return SimpleNamespace(path="capture", requests={rid: trace}, reprefill={})


@pytest.fixture
def rows():
    return np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)


def test_same_texts_are_compared_at_the_same_positions(rows):
    served = rows.copy()
    served[:, 4:] *= 1.5  # the second chunk only: |1.5 x - x| / |x| = 0.5, cosine 1
    first, second = drift(capture(served, range(50), "a-stored-0"), stored(rows, range(50)), FEED, NAMES)
    assert (first.way, first.error, first.moved) == ("same positions", 0.0, 0)
    assert second.error == pytest.approx(0.5, abs=1e-6) and second.cosine == pytest.approx(1)
    assert second.norms[1] / second.norms[0] == pytest.approx(1.5, abs=1e-6)
    assert second.rows == (50, 50) and second.source == "rows as captured"


def test_other_texts_are_compared_by_distribution(rows):
    served = rows + np.float32(1)
    served[:, 2] = rows[:, 2] + 100
    found = drift(capture(served, range(50), "a-0001"), stored(rows, range(50)), FEED, NAMES)
    assert [d.way for d in found] == ["distribution"] * 2 and found[0].error is None
    sd = rows.std(axis=0, dtype=np.float64)
    np.testing.assert_allclose(found[0].shifts, np.array([1, 1, 100, 1]) / sd[:4], rtol=1e-4)
    assert found[0].moved == int((np.array([1, 1, 100, 1]) / sd[:4] > 1).sum()) >= 1


def test_a_text_of_the_same_number_but_other_tokens_is_another_text(rows):
    found = drift(capture(rows, range(1, 51), "a-stored-0"), stored(rows, range(50)), FEED, NAMES)
    assert found[0].way == "distribution" and found[0].distance == 0


def test_rows_of_another_width_are_refused_in_words(rows):
    with pytest.raises(BadInput, match="rows 4 wide, the trainer stored rows 8 wide"):
        drift(capture(rows[:, :4], range(50), "a-0001"), stored(rows, range(50)), FEED, NAMES)


def test_nothing_captured_is_said(rows):
    empty = SimpleNamespace(path="capture", requests={}, reprefill={})
    with pytest.raises(BadInput, match="no row was captured"):
        drift(empty, stored(rows, range(50)), FEED, NAMES)


def counts(values):
    return np.bincount(to_bf16(np.asarray(values, np.float32)).astype(np.int64).ravel(), minlength=PATTERNS)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 0.0),
        ([-2, -1], [1, 2], 1.0),
        ([0.0, 0.0], [-0.0, -0.0], 0.0),  # two bit patterns, one value
        ([-3, -1, 1, 3], [-3, -1, 1, 2], 0.25),
        ([1, 1, 1, 5], [1, 5, 5, 5], 0.5),
        ([1, np.nan, np.inf], [1], 0.0),  # what is not finite is counted elsewhere
    ],
)
def test_distance_is_the_largest_gap(a, b, expected):
    assert distance(counts(a), counts(b)) == pytest.approx(expected)


def test_distance_agrees_with_scipys_definition_by_brute_force(rows):
    a, b = to_bf16(rows), to_bf16(rows * 2 + 1)
    stats = [FeatureStats(8).update(x) for x in (a, b)]
    x, y = (np.sort(s.ravel().astype(np.uint32) << 16).astype(np.uint32).view(np.float32) for s in (a, b))
    at = np.concatenate([x, y])
    brute = max(abs((x <= v).mean() - (y <= v).mean()) for v in at)
    assert distance(stats[0].value_counts[0], stats[1].value_counts[0]) == pytest.approx(brute)
