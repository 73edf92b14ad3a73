"""Checks that weigh a capture as a whole: its counters, what it lost, its ranks, its widths."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from capture_maker import edit_event, make_capture

from eaglelab import diagnose
from eaglelab.capture import open_capture
from eaglelab.checks import counters, feed, recorded, rungs, weights
from eaglelab.paired import Drop
from eaglelab.tensorfile import some_rows

DATA = Path(__file__).parents[2] / "data"
FILES = {"drafter": DATA / "drafter-sglang", "target": DATA / "target"}


@pytest.fixture(scope="module")
def golden():
    """Evidence of the healthy server that data/ holds a capture of."""
    return diagnose.run(**FILES, capture=DATA / "golden-capture").evidence


def changed(tmp_path, change):
    """The golden capture with its capture.json changed."""
    shutil.copytree(DATA / "golden-capture", tmp_path / "capture")
    path = tmp_path / "capture" / "capture.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))
    return open_capture(tmp_path / "capture")


def test_counters_are_compared_over_the_captured_requests_only(golden):
    """Half of the requests lost to the capture: the server's total speaks of others too."""
    assert counters.reconcile(golden).verdict == "passed"
    first = min(golden.capture.sent)
    rounds = golden.ladder.rungs["5"].rounds
    some = rounds.where([rid == first for rid in rounds.rids])
    rungs = {**golden.ladder.rungs, "5": replace(golden.ladder.rungs["5"], rounds=some)}
    partial = replace(golden, ladder=replace(golden.ladder, rungs=rungs))
    found = counters.reconcile(partial)
    assert abs(some.accept_length - rounds.accept_length) > counters.TOLERANCE * rounds.accept_length
    assert found.verdict == "passed" and "of 1 requests; the server's counters of them: " in found.evidence[0]
    other = replace(some, lengths=np.maximum(some.lengths - 1, 1))
    rungs["5"] = replace(rungs["5"], rounds=other)
    assert counters.reconcile(partial).verdict == "failed"


def one(found, fault):
    return next(f for f in found.findings if f.fault == fault)


def test_a_capture_without_loss(golden):
    found = recorded.whole(golden)
    assert found.verdict == "passed" and found.evidence[0] == "2 of 2 generations were captured whole"
    assert [f.fault for f in recorded.findings(golden)] == ["capture-incomplete"], "one rank: no more to say"


def test_lost_requests_are_said_and_most_of_them_must_be_there(golden, tmp_path):
    first, second = sorted(golden.capture.sent)

    def lose(meta):
        meta["ranks"]["dp0.tp0"]["dropped_rids"] = {second: "the queue was full"}
        meta["missing_ranks"] = 1

    half = diagnose.conclude(replace(golden, capture=changed(tmp_path / "half", lose)))
    found = one(half, "capture-incomplete")
    assert found.verdict == "skipped" and half.verdict == "healthy"
    assert found.evidence[:2] == [
        "1 of 2 generations were captured whole",
        f"{second} is partial: the queue was full",
    ]
    assert "ranks: 1 ranks were not seen; their node keeps its own folder" in found.evidence

    def lose_more(meta):
        lose(meta)
        meta["requests"]["eaglelab-x-0002"] = {"input_ids": [1], "output_ids": [2]}

    most = diagnose.conclude(replace(golden, capture=changed(tmp_path / "most", lose_more)))
    assert (most.verdict, most.failed) == ("inconclusive", [])
    assert [f.fault for f in most.missing] == ["capture-incomplete"]
    evidence = one(most, "capture-incomplete").evidence
    assert "eaglelab-x-0002 is lost: nothing of it was captured" in evidence


def test_a_check_that_breaks_costs_neither_the_others_nor_a_healthy_verdict(golden, monkeypatch):
    def broken(_):
        raise KeyError("injected")

    monkeypatch.setattr(feed, "depths", broken)
    found = diagnose.conclude(golden)
    assert (found.verdict, found.summary().errored) == ("inconclusive", 1)
    (errored,) = found.missing
    assert (errored.fault, errored.evidence) == ("feed-depths", ["KeyError: 'injected'"])
    assert one(found, "feed-width").verdict == "passed"


def two_ranks(folder, change=None, kind="decode_extend", dropped=()):
    """A capture of two ranks that recorded the same, but for what `change` does to one event."""
    make_capture(folder)
    lines = (folder / "events.jsonl").read_text()
    if change:
        edit_event(folder, kind, change)
    other = (folder / "events.jsonl").read_text().replace('"rank": "dp0.tp0"', '"rank": "dp0.tp1"')
    (folder / "events.jsonl").write_text(lines + other)
    meta = json.loads((folder / "capture.json").read_text())
    first = meta["ranks"]["dp0.tp0"]
    meta["ranks"]["dp0.tp1"] = {**first, "primary": False, "dropped_rids": dict.fromkeys(dropped, "full")}
    meta["parameters"] = {rank: [] for rank in meta["ranks"]}
    (folder / "capture.json").write_text(json.dumps(meta))
    return open_capture(folder)


def test_ranks_that_agree(golden, tmp_path):
    capture = two_ranks(tmp_path)
    found = recorded.ranks(capture)
    assert found.verdict == "passed" and found.evidence == ["dp0.tp1 beside dp0.tp0: 6 events compared"]
    assert "ranks-disagree" in [f.fault for f in recorded.findings(replace(golden, capture=capture))]


def other_tokens(data):
    data["token_ids"][0][0] += 1


def other_place(data):
    data["seq_lens"][0] += 1


@pytest.mark.parametrize(
    "kind,change,words",
    [
        ("decode_extend", other_tokens, "token_ids"),
        ("draft", other_tokens, "token_ids"),
        ("draft", lambda d: d.update(tensors={}), "fed has another shape"),
        ("decode_extend", other_place, "events are on one of them only"),
    ],
)
def test_ranks_that_disagree(tmp_path, kind, change, words):
    found = recorded.ranks(two_ranks(tmp_path, change, kind))
    assert found.verdict == "failed" and words in found.evidence[0]


def test_numbers_of_ranks_may_differ_by_rounding_only(tmp_path, monkeypatch):
    capture = two_ranks(tmp_path)
    read = type(capture)._read
    for factor, verdict in ((1 + 1e-4, "passed"), (1.1, "failed"), (np.nan, "failed")):

        def noisy(self, event, name, factor=factor):
            array = read(self, event, name)
            return array * np.float32(factor) if event.rank == "dp0.tp1" else array

        monkeypatch.setattr(type(capture), "_read", noisy)
        assert recorded.ranks(capture).verdict == verdict, factor


def test_one_recorded_rank_of_several_is_not_an_agreement(tmp_path):
    make_capture(tmp_path)
    found = recorded.ranks(open_capture(tmp_path))
    assert found.verdict == "skipped" and "--all-ranks" in found.evidence[0]


def test_a_dropped_request_explains_events_on_one_rank_only(tmp_path):
    capture = two_ranks(tmp_path, other_place, dropped=["r0"])
    assert recorded.ranks(capture).verdict == "passed"


def test_a_site_that_was_not_seen_is_not_right(golden):
    capture = replace_widths(golden.capture, ("prefill_extend", "draft"))
    found = feed.widths(replace(golden, capture=capture))
    assert found.verdict == "skipped"
    assert found.evidence[-1] == "draft-extend after verify: no such event was captured"
    rows = {m.name: m for m in diagnose.measurements(replace(golden, capture=capture))}
    assert rows["width.decode_extend"].reason == "no such event was captured"


def replace_widths(capture, sites):
    other = open_capture(capture.path)
    other.widths = {site: capture.widths[site] for site in sites}
    return other


def test_the_drafters_own_states_must_be_finite_too(golden, monkeypatch):
    from eaglelab import capture as module

    read = module.Capture._read

    def broken(self, event, name):
        array = read(self, event, name)
        return np.full_like(array, np.inf) if name == "fed" else array

    monkeypatch.setattr(module.Capture, "_read", broken)
    found = feed.finite(replace(golden, capture=open_capture(golden.capture.path)))
    assert found.verdict == "failed" and "values of fed are not finite" in found.evidence[1]


def test_near_ties_without_an_interval_are_no_comparison(golden):
    """A bfloat16 server, a few rounds: agreement 0.98, and too few stretches for an interval."""
    replay = golden.ladder.replay
    own = [*replay.rounds[0].own[:-1], replay.rounds[0].own[-1] + 1]
    near = replace(replay.rounds[0], own=own, gap=[0.0] * len(own))
    drops = {"runtime": Drop(3.0, 3.0, (-0.1, 0.1), 9)}
    replays = replace(replay, rounds=[near, *replay.rounds[1:]])
    ladder = replace(golden.ladder, drops=drops, replay=replays)
    assert rungs.findings(replace(golden, ladder=ladder))[-1].verdict == "passed"
    few = replace(ladder, drops={"runtime": Drop(3.0, 3.0, None, 4)})
    found = diagnose.conclude(replace(golden, ladder=few))
    assert one(found, "runtime-mismatch").verdict == "skipped" and found.verdict == "inconclusive"
    exact = replace(few, replay=replay)
    assert diagnose.conclude(replace(golden, ladder=exact)).verdict == "healthy", "equal tokens need none"


def test_a_skipped_drop_gives_its_own_rungs_reasons(golden):
    lines = [f.evidence for f in rungs.findings(golden) if f.verdict == "skipped"]
    assert all("rung 4" not in line for evidence in lines for line in evidence)
    without = {**golden.ladder.rungs, "4": replace(golden.ladder.rungs["4"], rounds=None, reason="why")}
    ladder = replace(golden.ladder, rungs=without, drops={}, replay=None)
    assert rungs.findings(replace(golden, ladder=ladder))[2].evidence == ["rung 4: why"]


def test_parameters_that_could_not_be_compared_are_not_loaded(golden):
    rank, matches = next(iter(golden.live.items()))
    assert weights.loaded(golden).verdict == "passed"
    unknown = replace(matches[0], equal=None, why="under quantisation: not modelled")
    found = weights.loaded(replace(golden, live={rank: [unknown, *matches[1:]]}))
    assert found.verdict == "skipped" and found.evidence[1].endswith("under quantisation: not modelled")
    assert found.evidence[0].startswith(f"{len(matches) - 1} of {len(matches)} live parameters")


def test_large_tensors_are_sampled_not_passed_over(golden, monkeypatch):
    whole = weights.sane(golden)
    assert whole.verdict == "passed" and "sample" not in whole.evidence[0]
    monkeypatch.setattr(weights, "some_rows", lambda info: some_rows(info, 1000))
    assert "a sample of rows" in weights.sane(golden).evidence[0]
    fc = golden.checkpoint.tensors["fc.weight"]
    zeros = weights.hold("fc.weight", fc, np.zeros(fc.shape, fc.array().dtype))
    zeros = replace(zeros, offsets=fc.offsets)
    checkpoint = replace(golden.checkpoint, tensors={**golden.checkpoint.tensors, "fc.weight": zeros})
    found = weights.sane(replace(golden, checkpoint=checkpoint))
    assert found.verdict == "failed" and "fc.weight (fc.weight): all zeros" in found.evidence


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "layers.0.mlp.up_proj.weight",
            lambda x: np.where(np.arange(384)[:, None] > 300, 0, x),
            "of its rows",
        ),
        ("lm_head.weight", lambda x: np.where(np.arange(640)[:, None] > 500, 0, x), ""),  # padded
        ("fc.weight", lambda x: x * 0 + 0x7F80, "not finite"),
    ],
)
def test_a_matrix_written_in_part_is_not_sane(golden, name, change, says):
    old = golden.checkpoint.tensors[name]
    new = weights.hold(name, old, change(old.array()).astype(old.array().dtype))
    tensors = {**golden.checkpoint.tensors, name: new}
    found = weights.sane(replace(golden, checkpoint=replace(golden.checkpoint, tensors=tensors)))
    assert found.verdict == ("failed" if says else "passed") and says in found.evidence[-1]


def test_a_server_with_another_checkpoint_is_told_from_lost_names(golden):
    rank, matches = next(iter(golden.live.items()))
    matrices = [m for m in matches if m.kind == "own" and "norm" not in m.param and ".weight" in m.param]
    for wrong, title in ((matrices, "is not this file"), (matrices[1:], "are not what the file holds")):
        some = [replace(m, equal=False) if m in wrong else m for m in matches]
        found = weights.loaded(replace(golden, live={rank: some}))
        assert found.verdict == "failed" and title in found.title
        assert ("--served-drafter" in found.fix) == (wrong is matrices)
