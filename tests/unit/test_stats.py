"""Statistics of features against numpy's own answers in float64, and against literal values."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglelab import accumulate
from eaglelab.accumulate import quantile, to_bf16
from eaglelab.errors import BadInput
from eaglelab.stats import FeatureStats, merged, summary

FIELDS = ("count", "mean", "variance", "low", "high")


def numbers(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def gaussian(rows, width, seed=0, mean=0.0, sd=1.0):
    return (np.random.default_rng(seed).standard_normal((rows, width)) * sd + mean).astype(np.float32)


def test_per_dimension_figures_are_numpys_in_float64():
    x = gaussian(700, 24, mean=3.0, sd=2.0)
    bits = to_bf16(x)
    stats = FeatureStats(24, 3).update(bits)
    exact = numbers(bits).astype(np.float64)
    assert stats.rows == 700
    assert (stats.count == 700).all()
    np.testing.assert_allclose(stats.mean, exact.mean(0), rtol=1e-13)
    np.testing.assert_allclose(stats.variance, exact.var(0), rtol=1e-12)
    np.testing.assert_array_equal(stats.low, exact.min(0))
    np.testing.assert_array_equal(stats.high, exact.max(0))


def test_a_large_mean_does_not_eat_the_variance():
    """Mean 300, sd 0.43: E[x^2] - E[x]^2 in float32 gives 0.17 where 0.18 is right."""
    x = gaussian(4000, 8, mean=300.0, sd=0.43)
    stats = FeatureStats(8)
    for block in np.array_split(x, 13):
        stats.update(block)
    np.testing.assert_allclose(stats.variance, x.astype(np.float64).var(0), rtol=1e-10)


def test_counters_pass_two_to_the_24():
    stats = FeatureStats(1)
    stats.dimensions.count[:] = 2**24
    stats.value_counts[0, 0] = 2**24
    stats.rows = 2**24
    stats.update(np.zeros((1, 1), np.uint16))
    assert stats.count[0] == stats.value_counts[0, 0] == 2**24 + 1


@pytest.mark.parametrize("q", [0.0, 0.001, 0.07, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1.0])
def test_quantiles_are_exact(q):
    """Against numpy's inverted CDF on the sorted numbers, negatives and both zeros included."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 16, (100, 7)).astype(np.uint16)  # every exponent and sign
    bits[:, 0], bits[:, 1] = 0x8000, 0x0000  # -0.0 and 0.0
    bits[np.isnan(numbers(bits))] = 0x3F80
    bits[3, 4], bits[4, 4] = 0xFF80, 0x7F80  # -inf, inf
    ordered = np.sort(numbers(bits).ravel())
    rank = max(-(-round(q * 1000) * 700 // 1000), 1)  # ceil(q * 700), in integers
    got = FeatureStats(7).update(bits).quantile(0, q)
    assert got == ordered[rank - 1]
    assert str(got) != "-0.0"


def test_a_quantile_by_hand():
    counts = np.zeros(1 << 16, np.int64)
    for value, n in ((-2.0, 1), (-1.0, 2), (0.0, 3), (1.5, 3), (np.nan, 90), (np.inf, 1)):
        counts[to_bf16(np.array([value], np.float32))[0]] = n
    assert [quantile(counts, q) for q in (0.1, 0.11, 0.3, 0.31, 0.6, 0.61, 0.9, 1.0)] == [
        -2.0, -1.0, -1.0, 0.0, 0.0, 1.5, 1.5, np.inf
    ]  # fmt: skip
    assert np.isnan(quantile(np.zeros(1 << 16, np.int64), 0.5))
    assert accumulate.median_magnitude(counts) == 1.0  # the 5th of 0 0 0 1 1 1.5 1.5 1.5 2 inf


def test_the_order_of_all_bf16_values():
    """One of each: the k-th quantile walks through every number in ascending order."""
    every = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    stats = FeatureStats(1).update(every)
    values = numbers(every.ravel())
    ordered = np.sort(values[~np.isnan(values)])
    n = len(ordered)
    assert n == 65536 - 254
    for k in (1, 2, 3, n // 2 - 1, n // 2, n // 2 + 1, n // 2 + 2, n - 1, n):
        assert quantile(stats.value_counts[0], k / n) in (ordered[k - 1], ordered[min(k, n - 1)])
    assert stats.quantile(0, 1e-9) == -np.inf
    chunk = stats.chunk(0)
    assert (chunk.nan, chunk.inf, chunk.values.count) == (254, 2, 65536 - 256)


def test_bf16_rounding_is_torchs():
    torch = pytest.importorskip("torch")
    u = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    u[:6] = 0x7F7FFFFF, 0xFF800000, 0x7F800000, 0x3F808000, 0x3F818000, 0x00000001
    x = u.view(np.float32)
    theirs = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(x)
    np.testing.assert_array_equal(to_bf16(x)[~nan], theirs[~nan])
    assert np.isnan(numbers(to_bf16(x)[nan])).all()


def test_what_is_not_finite_is_counted_and_left_out():
    x = np.array([[1, 2, 3, 4], [np.nan, 4, np.inf, 4], [3, 6, -np.inf, 4]], np.float32)
    stats = FeatureStats(4, 2).update(x)
    assert stats.count.tolist() == [2, 3, 1, 3]
    assert stats.mean.tolist() == [2, 4, 3, 4]
    np.testing.assert_allclose(stats.variance, [1, 8 / 3, 0, 0])
    assert stats.low.tolist() == [1, 2, 3, 4]
    assert stats.high.tolist() == [3, 6, 3, 4]
    first, second = stats.chunk(0), stats.chunk(1)
    assert (first.nan, first.inf, first.nonfinite_rows) == (1, 0, 1)
    assert first.nonfinite_share == pytest.approx(1 / 6)
    assert (second.nan, second.inf, second.nonfinite_rows) == (0, 2, 2)
    assert first.norms.count == 2
    assert first.norms.mean == pytest.approx((5**0.5 + 45**0.5) / 2)
    assert (second.norms.low, second.norms.high, second.norms.quantiles[0.5]) == (5, 5, 5)


def test_a_dimension_that_is_never_finite():
    stats = FeatureStats(2).update(np.array([[np.nan, 1], [np.nan, 1]], np.float32))
    assert stats.count.tolist() == [0, 2]
    assert np.isnan(stats.variance[0]) and stats.variance[1] == 0
    assert stats.chunk(0).constant_dimensions == 1
    assert stats.chunk(0).outliers == ()


def test_values_that_overflow_float32_when_squared():
    x = np.array([[3e38, 1.0], [-3e38, 1.0]], np.float32)
    stats = FeatureStats(2).update(x)
    assert stats.variance[0] == pytest.approx(float(np.float32(3e38)) ** 2)
    assert stats.chunk(0).nonfinite_rows == 0
    assert stats.chunk(0).norms.mean == pytest.approx(3e38)


floats = st.floats(-1e4, 1e4, width=32) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=st.integers(0, 12), chunks=st.sampled_from([1, 2]), bf16=st.booleans())
def test_merging_any_split_in_any_order_equals_one_pass(data, rows, chunks, bf16):
    values = data.draw(st.lists(floats, min_size=rows * 4, max_size=rows * 4))
    x = np.array(values, np.float32).reshape(rows, 4)
    x = to_bf16(x) if bf16 else x
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    parts = [FeatureStats(4, chunks).update(p) for p in np.split(x, cuts)]
    order = data.draw(st.permutations(range(len(parts))))
    once = FeatureStats(4, chunks).update(x)
    nested = FeatureStats(4, chunks)
    for part in parts:  # each part fed to one object
        nested.merge(part)
    assert_same(once, merged([parts[i] for i in order]))
    assert_same(once, nested)


def assert_same(a, b):
    assert a.rows == b.rows
    for name in ("value_counts", "norm_counts"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for x, y in ((a.dimensions, b.dimensions), (a.norms, b.norms)):
        for name in ("count", "low", "high"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
        peak = np.maximum(np.abs(x.low), np.abs(x.high))
        scale = np.where((x.count > 0) & (peak > 0), peak, 1)
        np.testing.assert_allclose(x.mean / scale, y.mean / scale, rtol=0, atol=1e-12)
        np.testing.assert_allclose(x.m2 / scale**2, y.m2 / scale**2, rtol=1e-9, atol=1e-12)


def test_merging_large_shards_equals_one_pass():
    x = to_bf16(gaussian(3000, 300, mean=7.0))
    once = FeatureStats(300, 3).update(x)
    parts = [FeatureStats(300, 3).update(p) for p in np.array_split(x, 7)]
    assert_same(once, merged(parts[::-1]))
    np.testing.assert_allclose(once.variance, merged(parts).variance, rtol=1e-12)


def test_threads_and_tiles_change_nothing(monkeypatch):
    x = to_bf16(gaussian(500, 3 * 1100, mean=-2.0))  # H > 1024: more than one tile across
    plain = FeatureStats(3300, 3).update(x)
    assert_same(plain, FeatureStats(3300, 3).update(x, threads=3))
    monkeypatch.setattr("eaglelab.stats._TILE", 5000)
    assert_same(plain, FeatureStats(3300, 3).update(x))


def test_torch_tensors_and_stacked_chunks():
    torch = pytest.importorskip("torch")
    bits = to_bf16(gaussian(20, 12))
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    plain = FeatureStats(12, 3).update(bits)
    assert_same(plain, FeatureStats(12, 3).update(tensor))
    assert_same(plain, FeatureStats(12, 3).update(bits.reshape(20, 3, 4)))
    assert FeatureStats(12).update(tensor.float()).dtypes == {"float32"}
    assert FeatureStats(12).update(tensor.half()).dtypes == {"float16"}


def test_outlier_dimensions_by_both_rules():
    x = gaussian(20_000, 40)
    x[:, 17] *= 8  # rms 8 times the others'
    x[:, 30] *= 4  # inside the rule
    x[7, 9] = -720.0  # a massive value on one token: 1,070 times the median magnitude, rms only 5.2
    x[7, 10] = 500.0  # 740 times: inside the rule
    stats = FeatureStats(80, 2).update(np.hstack([x, gaussian(20_000, 40, 1)]))
    first = stats.outliers(0)
    assert [o.dimension for o in first] == [17, 9]
    assert first[0].rms_ratio == pytest.approx(8, rel=0.05)
    assert first[1].peak == 720 and first[1].peak_ratio > 1000 and first[1].rms_ratio < 6
    assert stats.outliers(1) == []


def test_summary_lines():
    x = np.array([[1, 2, 3, 4], [3, 2, np.nan, 4]], np.float32)
    assert (
        summary(x)
        == "[2, 4] float32 | 1 .. 4 | mean 2.714 sd 1.03 | row norm 5.477 sd 0 | NaN x1 | 2 constant dims"
    )
    two = FeatureStats(4, 2, ["depth 2", "depth 4"]).update(to_bf16(np.array([[3, 4, 0.5, 1]], np.float32)))
    assert two.summary().splitlines() == [
        "depth 2 [1, 2] bfloat16 | 3 .. 4 | mean 3.5 sd 0.5 | row norm 5 sd 0",
        "depth 4 [1, 2] bfloat16 | 0.5 .. 1 | mean 0.75 sd 0.25 | row norm 1.118 sd 0",
    ]
    assert "no rows" in FeatureStats(4).summary()


def test_save_and_load(tmp_path):
    stats = FeatureStats(6, 2, ["a", "b"]).update(to_bf16(gaussian(9, 6)))
    stats.save(tmp_path / "s.safetensors")
    again = FeatureStats.load(tmp_path / "s.safetensors")
    for x, y in zip(stats._state().values(), again._state().values(), strict=True):
        np.testing.assert_array_equal(x, y)
    assert (again.names, again.rows, again.dtypes) == (("a", "b"), 9, {"bfloat16"})
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]
    assert_same(again.update(to_bf16(gaussian(9, 6))), merged([stats, stats]))


def test_a_state_that_is_not_one(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(BadInput, match="absent.safetensors"):
        FeatureStats.load(tmp_path / "absent.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(BadInput, match="cut.safetensors"):
        FeatureStats.load(tmp_path / "cut.safetensors")
    save_file({"x": np.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(BadInput, match="format is None"):
        FeatureStats.load(tmp_path / "other.safetensors")
    facts = {"format": "eaglelab.stats/1", "width": 4, "chunks": 1, "names": ["a"], "rows": 0, "dtypes": []}
    header = {"stats": json.dumps(facts)}
    save_file({"value_counts": np.zeros((1, 65536), np.int64)}, tmp_path / "part.safetensors", header)
    with pytest.raises(BadInput, match="field 'norm_counts'"):
        FeatureStats.load(tmp_path / "part.safetensors")
    save_file({"x": np.zeros(3)}, tmp_path / "bare.safetensors", {"stats": '{"format": "eaglelab.stats/1"}'})
    with pytest.raises(BadInput, match="width"):
        FeatureStats.load(tmp_path / "bare.safetensors")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureStats(10, 3), "width 10 cannot be split into 3"),
        (lambda: FeatureStats(10, 2, ["a"]), "1 names were given for 2 chunks"),
        (lambda: FeatureStats(4).update(np.zeros((2, 5), np.float32)), r"shape \[2, 5\].*width 4"),
        (lambda: FeatureStats(4).update(np.zeros(4, np.float32)), r"shape \[4\]"),
        (lambda: FeatureStats(4).update(np.zeros((2, 4))), "rows are float64"),
        (lambda: FeatureStats(4).merge(FeatureStats(4, 2)), "width 4 in 2 chunks"),
        (lambda: merged([]), "no statistics to merge"),
    ],
)
def test_bad_input_says_what_is_wrong(make, message):
    with pytest.raises(BadInput, match=message):
        make()


def test_a_wide_block_needs_little_memory():
    bits = np.random.default_rng(0).integers(0x3F00, 0x4100, (500, 21504), np.uint16)
    tracemalloc.start()
    FeatureStats(21504, 3).update(bits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
