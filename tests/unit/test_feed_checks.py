"""Faults of the feed, named from vectors alone: the shipped capture with other rows fed, files untouched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eaglelab import diagnose
from eaglelab.capture import open_capture
from eaglelab.catalogue import find
from eaglelab.checks import feed
from eaglelab.depths import name_capture

DATA = Path(__file__).parents[2] / "data"
H = 128
ROTATION, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((H, H)))


@pytest.fixture(scope="module")
def golden():
    capture, target = DATA / "golden-capture", DATA / "target"
    return diagnose.run(drafter=DATA / "drafter-sglang", target=target, capture=capture).evidence


def stream(text, depth, rows):
    """The re-prefilled stream, its last row repeated where the capture has one row more."""
    s = text.final if depth == "final" else text.stream(depth)
    return np.concatenate([s, s[-1:]])[:rows]


def fed(*depths):
    def change(x, text, prompt):
        return np.concatenate([stream(text, d, len(x)) for d in depths], axis=1)

    return change


def each(change):
    def changed(x, text, prompt):
        return np.concatenate([change(x[:, i : i + H]) for i in range(0, x.shape[1], H)], axis=1)

    return changed


def after_verify(change):
    def changed(x, text, prompt):
        x = x.copy()
        x[prompt:] = change(x, text, prompt)[prompt:]
        return x

    return changed


def stale(x, text, prompt):
    x = x.copy()
    x[prompt + 4 :: 4] = x[prompt + 3 : -1 : 4]
    return x


def halfway(x, text, prompt):
    before = np.concatenate([stream(text, d - 1, len(x)) for d in (2, 4, 5)], axis=1)
    return before + (x - before) * (np.random.default_rng(1).random(x.shape[1]) < 0.5)


def judged(golden, change, **more):
    capture = open_capture(DATA / "golden-capture")
    for rid, trace in capture.requests.items():
        rows = change(trace.features, capture.reprefill[rid], trace.prompt_len)
        trace.features = rows.astype(np.float32)
    names = name_capture(capture, layers=8, expected=(2, 4, 5))
    found = feed.depths(replace(golden, capture=capture, depths=names, **more))
    return found[0] if len(found) == 1 else found


@pytest.mark.parametrize(
    ("slug", "change"),
    [
        ("ids-plus-one", fed(3, 5, 6)),
        ("ids-off-by-one", fed(1, 3, 4)),
        ("chunk-order", fed(4, 2, 5)),
        ("embedding-counted", fed(0, 4, 5)),
        ("id-past-the-last-layer", fed(2, 4, "final")),
        ("target-quantized-or-rotated", each(lambda c: c @ ROTATION)),
        ("target-quantized-or-rotated", lambda x, *_: x * np.repeat([4, 1, 1], H)),
        ("tensor-parallel-partial-sums", halfway),
        ("token-shift", lambda x, *_: np.roll(x, 1, axis=0)),
        ("stale-rows", stale),
        ("stale-rows", after_verify(lambda x, *_: x * 0)),
    ],
)
def test_what_only_the_vectors_show_has_its_name(golden, slug, change):
    found = judged(golden, change)
    assert (found.verdict, found.fault, found.title) == ("failed", slug, find(slug).title)
    assert "check:feed-depths" in find(slug).detected_by and slug in feed.NAMED
    assert "config and launch do not say so: only the vectors show it" in found.evidence
    healthy = golden.ladder.rungs["5"].accept_length
    assert found.predicted_accept_length == pytest.approx(healthy, abs=1e-9), "fed rightly it is this server"


@pytest.mark.parametrize(
    ("title", "change"),
    [
        ("some of the rows that are fed come from another depth", after_verify(fed(3, 5, 6))),
        (
            "the rows that are fed went through a norm that was not trained",
            each(lambda c: c / np.sqrt((c**2).mean(1, keepdims=True))),
        ),
        (feed.DEPTHS.bad, fed(2, 4, 7)),
        (feed.DEPTHS.bad, lambda x, *_: np.random.default_rng(0).standard_normal(x.shape)),
    ],
)
def test_what_has_no_name_keeps_the_general_one(golden, title, change):
    found = judged(golden, change)
    assert (found.verdict, found.fault, found.title) == ("failed", "feed-depths", title)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ("target-quantized-or-rotated", lambda x: x @ ROTATION),
        ("target-quantized-or-rotated", lambda x: x * 3),
        ("token-shift", lambda x: np.roll(x, 1, axis=0)),
    ],
)
def test_two_faults_of_the_feed_at_once(golden, first, change):
    both = judged(golden, lambda *row: each(change)(fed(3, 5, 6)(*row), *row[1:]))
    assert [f.fault for f in both] == [first, "ids-plus-one"]


def test_ranks_that_each_hand_over_a_share(golden):
    found = judged(golden, lambda x, *_: x / 2, launch=replace(golden.launch, tp_size=2))
    assert found.fault == "tensor-parallel-partial-sums"
    assert judged(golden, lambda x, *_: x / 2).fault == "target-quantized-or-rotated"


def test_the_engines_default_in_place_of_the_configs_ids(golden):
    trained = replace(golden.trained[0], depths=(1, 4, 5))
    here = {"trained": (trained, golden.trained[1]), "served": (trained, golden.served[1])}
    assert judged(golden, fed(2, 4, 5), **here).fault == "ids-hard-coded"
    assert judged(golden, fed(2, 4, 6), **here).fault == "feed-depths"


def test_depths_in_their_order_show_no_fault(golden):
    served = golden.served[0]
    assert feed.shown(golden.depths, served, golden) == (None, "")
    assert feed.shown(golden.depths, replace(served, depths=served.depths[::-1]), golden)[0] == "chunk-order"


def test_nothing_finite_is_another_checks_business(golden):
    assert judged(golden, lambda x, *_: x * np.inf).verdict == "skipped"


def test_rounding_noise_and_what_config_and_launch_say_anyway(golden):
    rng = np.random.default_rng(0)
    near = lambda x, *_: x + 0.01 * np.abs(x).mean() * rng.standard_normal(x.shape)  # noqa: E731
    assert judged(golden, near).verdict == "passed"
    assert judged(golden, lambda x, *_: x).verdict == "passed"
    served = (replace(golden.served[0], depths=(3, 5, 6)), golden.served[1])
    found = judged(golden, fed(3, 5, 6), served=served)
    assert found.fault == "feed-depths"
    assert found.evidence[-1] == "config and launch say so too: see the difference that is its cause"
