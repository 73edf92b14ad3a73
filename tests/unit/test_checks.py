"""Checks that weigh a capture as a whole: its counters, what it lost, its ranks, its widths."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eaglelab import diagnose
from eaglelab.capture import open_capture
from eaglelab.checks import counters

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
