"""Depths named on made-up residual streams, whose answer is known, with rounding, noise and faults."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eaglelab.accumulate import to_bf16
from eaglelab.depths import Place, name_capture, name_depths, split_chunks
from eaglelab.errors import BadInput


def make_streams(n=60, hidden=64, depths=9, gap=0.3, seed=0):
    """depth -> [n, hidden] float32; each lies `gap` of its norm from the one before, in any direction."""
    rng = np.random.default_rng(seed)
    streams = {0: rng.standard_normal((n, hidden))}
    for k in range(1, depths):
        streams[k] = streams[k - 1] + gap * noise_like(streams[k - 1], rng)
    return {k: s.astype(np.float32) for k, s in streams.items()}


def noise_like(x, rng):
    """A random direction per row, as long as that row of x."""
    d = rng.standard_normal(x.shape)
    return d / np.linalg.norm(d, axis=1, keepdims=True) * np.linalg.norm(x, axis=1, keepdims=True)


def rms_norm(x):
    return (x / np.sqrt((x**2).mean(1, keepdims=True))).astype(np.float32)


def serve(streams, depths):
    return np.concatenate([streams[k] for k in depths], axis=1)


def test_healthy_features_are_named_exactly():
    s = make_streams()
    names = name_depths(serve(s, [2, 4, 5]), s, rms_norm(s[8]), expected=[2, 4, 5])
    assert names.depths == [2, 4, 5]
    assert names.relation == "as expected" and names.shift == 0 and not names.final_norm
    first = names.chunks[0]
    assert (first.match, first.error, first.confidence, first.rivals, first.rows) == ("exact", 0, 1, (), 60)
    assert first.cosine == pytest.approx(1) and first.scale == pytest.approx(1)
    # one gap on, 0.3 of row 2's norm; as seen from depth 3 (norm sqrt(1.09) larger) 0.287
    assert first.runner_up == Place(3) and first.runner_up_error == pytest.approx(0.287, abs=0.01)
    assert first.errors[Place(3)] == first.runner_up_error and Place(8, True) in first.errors


@pytest.mark.parametrize(
    ("served", "relation", "shift"),
    [
        ([3, 5, 6], "shifted", 1),
        ([1, 3, 4], "shifted", -1),
        ([4, 2, 5], "other order", None),
        ([5, 4, 2], "other order", None),
        ([2, 4, 6], "other depths", None),
        ([0, 4, 5], "other depths", None),
        ([2, 4], "other width", None),
    ],
)
def test_how_the_names_relate_to_the_expected(served, relation, shift):
    s = make_streams()
    names = name_depths(serve(s, served), s, expected=[2, 4, 5])
    assert names.depths == served
    assert (names.relation, names.shift) == (relation, shift)
    assert relation in str(names)


def test_the_final_norm_is_seen():
    s = make_streams()
    final = rms_norm(s[8])
    names = name_depths(final, s, final, expected=[8])
    assert names.chunks[0].place == Place(8, True) and names.final_norm
    assert names.relation == "final norm"
    assert name_depths(final, s, final, expected=[Place(8, True)]).relation == "as expected"
    assert name_depths(s[8], s, final, expected=[8]).relation == "as expected"
    both = name_depths([final, s[5]], s, final, expected=[Place(8, True), 4])
    assert both.relation == "other depths"
    some = {k: s[k] for k in (0, 2, 4)}  # the last depth itself was not recorded
    assert name_depths(final, some, final, layers=8).chunks[0].place == Place(8, True)


@pytest.mark.parametrize("gap", [0.05, 0.3])
def test_bf16_and_other_kernels(gap):
    """Both sides rounded, and 1 % apart besides, as two kernels in bf16 are."""
    s = make_streams(hidden=256, gap=gap)
    rng = np.random.default_rng(1)
    features = [to_bf16(s[k] + 0.01 * noise_like(s[k], rng)) for k in (2, 4, 5)]
    names = name_depths(features, {k: to_bf16(v) for k, v in s.items()}, expected=[2, 4, 5])
    assert names.relation == "as expected"
    assert [c.match for c in names.chunks] == ["exact"] * 3
    assert all(c.confidence == 1 and 0.009 < c.error < 0.013 for c in names.chunks)
    farther = [to_bf16(s[k] + 0.04 * noise_like(s[k], rng)) for k in (2, 4, 5)]
    assert [c.match for c in name_depths(farther, s).chunks] == ["near"] * 3


def test_bf16_numbers_in_float32_get_bf16s_tolerance_and_float32_does_not():
    s = make_streams()
    apart = s[2] + 0.01 * noise_like(s[2], np.random.default_rng(1))
    rounded = (to_bf16(apart).astype(np.uint32) << 16).view(np.float32)
    assert name_depths(rounded, s).chunks[0].match == "exact"
    assert name_depths(apart.astype(np.float32), s).chunks[0].match == "near"
    assert name_depths(apart.astype(np.float16), s).chunks[0].match == "near"
    assert name_depths(s[2].astype(np.float16), s).chunks[0].match == "exact"


def test_noise_larger_than_the_gap_is_still_told_apart_in_many_dimensions():
    s = make_streams(n=300, hidden=2048, gap=0.02)
    rng = np.random.default_rng(1)
    names = name_depths((s[4] + 0.2 * noise_like(s[4], rng)).astype(np.float32), s, expected=[4])
    assert names.depths == [4]
    assert names.chunks[0].match == "near" and 0.95 < names.chunks[0].confidence < 1
    assert names.chunks[0].rivals == ()
    beyond = name_depths((s[4] + 0.4 * noise_like(s[4], rng)).astype(np.float32), s)
    assert beyond.chunks[0].place == Place(4) and beyond.chunks[0].match == "none"


def test_neighbours_that_rounding_hides_are_rivals_not_a_fault():
    """Gap 0.02 %, bf16: nobody can tell depth 4 from its neighbours, so nobody may call it shifted."""
    s = make_streams(n=400, gap=0.0002)
    seen = set()
    for seed in range(6):
        noisy = s[4] + 0.01 * noise_like(s[4], np.random.default_rng(seed))
        names = name_depths(to_bf16(noisy), s, expected=[4])
        chunk = names.chunks[0]
        seen.add(chunk.place)
        assert names.relation == "as expected"
        assert chunk.confidence < 0.7 and len(chunk.rivals) >= 3 and Place(4) in chunk.may_be
        assert " or depth " in str(names)
    assert len(seen) > 1  # the best of them is indeed chance


def test_rivals_are_read_in_favour_of_the_simplest_relation():
    s = make_streams()
    s[5] = s[4].copy()
    assert name_depths(serve(s, [2, 4]), s, expected=[3, 5]).relation == "shifted"
    assert name_depths(serve(s, [2, 4]), s, expected=[2, 5]).relation == "as expected"
    assert name_depths(serve(s, [4, 2]), s, expected=[2, 5]).relation == "other order"
    assert name_depths(serve(s, [1, 4]), s, expected=[3, 5]).relation == "other depths"
    assert name_depths(s[4], s, expected=[3]).shift == 1  # depth 5 would do as well


def test_equal_streams_give_no_confidence():
    s = make_streams()
    s[3] = s[2].copy()
    chunk = name_depths(s[2], s, expected=[3]).chunks[0]
    assert chunk.may_be == (Place(2), Place(3)) and chunk.confidence == 0


def test_stale_rows_do_not_change_the_name_but_show():
    s = make_streams()
    features = serve(s, [2, 4, 5])
    features[::4, 64:128] = 0
    features[::3, 128:] = 1e5
    names = name_depths(features, s, expected=[2, 4, 5])
    assert names.relation == "as expected"
    assert [c.error for c in names.chunks] == [0, 0, 0]
    assert [c.error_p90 > 0.9 for c in names.chunks] == [False, True, True]


def test_rows_that_are_not_finite_are_left_out():
    s = make_streams()
    features = serve(s, [2, 4, 5])
    features[:9, 3] = np.nan
    features[:, 70] = np.inf
    names = name_depths(features, s, expected=[2, 4, 5])
    assert names.depths == [2, None, 5]
    assert [c.rows for c in names.chunks] == [51, 0, 60]
    assert names.relation == "unclear"
    assert "chunk 1: matches no recorded stream" in str(names)
    s[7][:] = np.nan  # a broken stream spoils nothing but itself
    assert name_depths(serve(s, [2]), s).depths == [2]


def test_an_unrecorded_depth_in_between_is_not_its_neighbour():
    s = make_streams(gap=0.1)
    served = s.pop(3)
    chunk = name_depths(served, s).chunks[0]
    assert chunk.error < 0.11 and chunk.toward == pytest.approx(0.5, abs=0.1)
    assert chunk.match == "none" and chunk.may_be == ()


def test_a_rotated_basis_matches_nothing():
    s = make_streams(hidden=128)
    rotation, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((128, 128)))
    names = name_depths((s[4] @ rotation).astype(np.float32), s, expected=[4])
    assert names.depths == [None] and names.relation == "unclear"
    assert abs(names.chunks[0].cosine) < 0.3 and names.chunks[0].scale == pytest.approx(1, abs=0.2)


def test_streams_may_be_functions_read_one_at_a_time():
    s = make_streams()
    names = name_depths(
        serve(s, [2, 4, 5]), {k: (lambda v=v: v) for k, v in s.items()}, lambda: rms_norm(s[8])
    )
    assert names.depths == [2, 4, 5] and names.relation is None


def test_torch_and_every_layout():
    torch = pytest.importorskip("torch")
    s = make_streams()
    wide = serve(s, [2, 5])
    for features in (wide, wide.reshape(60, 2, 64), [s[2], s[5]], torch.from_numpy(wide).to(torch.bfloat16)):
        assert name_depths(features, {k: torch.from_numpy(v) for k, v in s.items()}).depths == [2, 5]
    assert [c.shape for c in split_chunks(wide, 64)] == [(60, 64)] * 2


def test_many_rows_are_sampled(monkeypatch):
    monkeypatch.setattr("eaglelab.depths.MAX_ROWS", 10)
    s = make_streams()
    assert name_depths(s[3], s).chunks[0].rows == 10


@pytest.mark.parametrize(
    ("features", "streams", "message"),
    [
        (np.zeros((3, 8), np.float32), {}, "re-prefill"),
        (
            np.zeros((3, 10), np.float32),
            {0: np.zeros((3, 4), np.float32)},
            r"shape \[3, 10\].*no multiple of 4",
        ),
        (
            np.zeros((3, 8), np.float32),
            {0: np.zeros((5, 4), np.float32)},
            r"depth 0: the stream has shape \[5, 4\]",
        ),
        (
            [np.zeros((3, 4), np.float32)] * 2 + [np.zeros((2, 4), np.float32)],
            {0: np.zeros((3, 4))},
            "chunks have",
        ),
    ],
)
def test_bad_input_says_what_is_wrong(features, streams, message):
    with pytest.raises(BadInput, match=message):
        name_depths(features, streams)


def fake_capture(first_row=0, tokens_differ=False, reprefilled=("a", "b")):
    traces, texts = {}, {}
    for seed, rid in enumerate(("a", "b")):
        s = make_streams(seed=seed)
        traces[rid] = SimpleNamespace(
            rid=rid,
            rows=58 - first_row,
            prompt_len=30,
            first_row=first_row,
            tokens=list(range(59)),
            features=serve(s, [2, 4, 5])[first_row:58],
        )
        texts[rid] = SimpleNamespace(
            token_ids=[9] * 60 if tokens_differ else list(range(60)),
            depths=sorted(s),
            stream=s.__getitem__,
            final=rms_norm(s[8]),
        )
    texts = {rid: text for rid, text in texts.items() if rid in reprefilled}
    return SimpleNamespace(path=Path("cap"), requests=traces, reprefill=texts)


@pytest.mark.parametrize("first_row", [0, 7])
def test_a_capture_against_its_own_re_prefill(first_row):
    names = name_capture(fake_capture(first_row), expected=[2, 4, 5])
    assert names.relation == "as expected"
    assert [(c.match, c.error, c.rows) for c in names.chunks] == [("exact", 0, 2 * (58 - first_row))] * 3


def test_a_capture_without_a_fitting_re_prefill():
    with pytest.raises(BadInput, match="cap: request a: its re-prefill is of another text"):
        name_capture(fake_capture(tokens_differ=True))
    with pytest.raises(BadInput, match="cap: no captured request was re-prefilled"):
        name_capture(fake_capture(reprefilled=()))


ROTATION, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((64, 64)))


def stale(x):
    x = x.copy()
    x[5::5] = x[4:-1:5]
    return x


def masked(before, after):
    return (before + (after - before) * (np.random.default_rng(0).random(64) < 0.5)).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "alter", "says"),
    [
        ("rotated", lambda s: s[4] @ ROTATION, "in another basis: norms are kept"),
        ("scaled", lambda s: s[4] * 0.7, "times 0."),
        ("scaled", lambda s: s[4] * -0.5, "times -0.5"),
        ("normed", lambda s: rms_norm(s[4]) * np.linspace(0.5, 2, 64), "after an RMS norm (weights 0."),
        ("reweighted", lambda s: s[4] * np.linspace(0.5, 2, 64), "with another weight for each dimension"),
        ("rows moved", lambda s: np.roll(s[4], 1, axis=0), "that of 1 position earlier"),
        ("rows moved", lambda s: np.roll(s[4], -2, axis=0), "that of 2 positions later"),
        ("partial sums", lambda s: masked(s[3], s[4]), "between depth 3 and depth 4"),
        ("stale rows", lambda s: stale(s[4]), "an earlier position of their text (mostly 1 back)"),
        ("stale rows", lambda s: np.where(np.arange(60)[:, None] % 9, s[4], 0), "all zeros, never written"),
        (
            "mixed depths",
            lambda s: np.where(np.arange(60)[:, None] < 40, s[4], s[6]),
            "of the rows are depth 6",
        ),
    ],
)
@pytest.mark.parametrize("rounded", [False, True])
def test_a_chunk_that_is_its_stream_in_another_form(kind, alter, says, rounded):
    s = make_streams(gap=0.4)
    x = alter(s).astype(np.float32)
    if rounded:
        x, given = to_bf16(x), {k: to_bf16(v) for k, v in s.items()}
    else:
        given = s
    names = name_depths([x], given, expected=[4], texts=np.zeros(60, int), after_verify=np.arange(60) > 30)
    chunk = names.chunks[0]
    assert (chunk.relation, chunk.related.place) == (kind, Place(4))
    assert says in str(chunk) and names.relation == "altered"


def test_noise_another_text_and_an_unrecorded_depth_are_no_relation():
    s = make_streams(hidden=256, gap=0.3)
    rng = np.random.default_rng(1)
    flags = {"texts": np.zeros(60, int), "expected": [4]}
    for amount, match in ((0.001, "near"), (0.03, "near"), (0.2, "near"), (2.0, "none")):
        chunk = name_depths((s[4] + amount * noise_like(s[4], rng)).astype(np.float32), s, **flags).chunks[0]
        assert (chunk.match, chunk.related) == (match, None)
    other = make_streams(hidden=256, gap=0.3, seed=5)
    assert name_depths(other[4], s, **flags).chunks[0].related is None
    served = s.pop(4)
    assert name_depths(served, s, **flags).chunks[0].related is None


def test_rows_after_a_verify_that_come_from_another_depth():
    fake = fake_capture()
    for trace in fake.requests.values():
        rid = trace.rid
        trace.features = trace.features.copy()
        trace.features[30:] = serve(make_streams(seed="ab".index(rid)), [3, 5, 6])[30:58]
    names = name_capture(fake, expected=[2, 4, 5])
    assert [c.relation for c in names.chunks] == ["mixed depths"] * 3
    assert "0 of 56 rows after a verify, 60 of 60 rows of the prefill" in str(names) or (
        "56 of 56 rows after a verify, 0 of 60 rows of the prefill" in str(names)
    )


def test_partial_sums_of_two_ranks_add_up():
    fake = fake_capture()
    whole = {rid: t.features for rid, t in fake.requests.items()}
    share = np.random.default_rng(0).standard_normal(192).astype(np.float32) * 0.3 + 0.5

    class Two(SimpleNamespace):
        """Both ranks' rows: `requests` is what the ranks asked for recorded."""

        @property
        def requests(self):
            part = share if self.primary_ranks == ["dp0.tp0"] else 1 - share
            return {
                rid: SimpleNamespace(**{**vars(t), "features": whole[rid] * part})
                for rid, t in fake.requests.items()
            }

    two = Two(path=Path("cap"), reprefill=fake.reprefill, primary_ranks=["dp0.tp0"])
    two.ranks = {"dp0.tp0": {}, "dp0.tp1": {}}
    names = name_capture(two, expected=[2, 4, 5])
    assert [c.relation for c in names.chunks] == ["partial sums"] * 3
    assert "the 2 ranks' rows add up to depth 2" in str(names.chunks[0])


def test_rows_that_were_computed_a_little_otherwise_are_not_stale():
    """A token that other experts were chosen for is off by a third, yet itself; a foreign row is not."""
    s = make_streams(hidden=256)
    rng = np.random.default_rng(3)
    odd = (np.arange(60) % 8 == 0)[:, None]
    flags = {"texts": np.zeros(60, int), "expected": [4]}
    x = s[4] + odd * 0.35 * noise_like(s[4], rng)
    names = name_depths(x.astype(np.float32), s, **flags)
    assert names.relation == "as expected" and names.chunks[0].odd > 0.1 and names.chunks[0].related is None
    x = np.where(odd, noise_like(s[4], rng), s[4])
    assert name_depths(x.astype(np.float32), s, **flags).chunks[0].relation == "stale rows"


def test_half_a_per_cent_is_no_scale():
    s = make_streams()
    names = name_depths(s[4] * np.float32(1.005), s, expected=[4], texts=np.zeros(60, int))
    assert names.relation == "as expected" and names.chunks[0].related is None
