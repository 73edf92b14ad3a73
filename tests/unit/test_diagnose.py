"""One verdict out of all findings; what is missing is said, and nothing missing is called healthy."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eaglelab import diagnose
from eaglelab.checks import weights
from eaglelab.errors import BadInput
from eaglelab.gather import record
from eaglelab.records import Finding, Measurement, Summary, read, write

DATA = Path(__file__).parents[2] / "data"
FILES = {"drafter": DATA / "drafter-sglang", "target": DATA / "target"}
CHAIN = "--speculative-num-steps 5 --speculative-eagle-topk 1 --dtype float32"


def test_files_and_flags_alone_are_inconclusive_at_best():
    found = diagnose.run(**FILES, launch=f"{CHAIN} --speculative-algorithm EAGLE3")
    assert (found.verdict, found.fault) == ("inconclusive", None)
    rung4 = next(m for m in found.measurements if m.name == "accept_length.rung4")
    assert rung4.value is None and "--server" in rung4.reason


def test_files_and_flags_alone_name_the_incident():
    found = diagnose.run(**FILES, launch=f"{CHAIN} --speculative-algorithm EAGLE")
    assert (found.verdict, found.fault) == ("broken", "eagle-flag-on-eagle3-drafter")


def test_nothing_says_how_it_is_served():
    with pytest.raises(BadInput, match="--launch"):
        diagnose.run(**FILES)


def test_a_drafter_for_another_target(tmp_path):
    config = json.loads((DATA / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 2048}))
    with pytest.raises(BadInput, match="vocab_size.*another target"):
        diagnose.run(drafter=FILES["drafter"], target=tmp_path / "config.json", launch=CHAIN)


@pytest.fixture(scope="module")
def golden():
    return diagnose.run(**FILES, capture=DATA / "golden-capture", features=DATA / "features")


def test_the_golden_capture_is_healthy_and_exact(golden):
    assert (golden.verdict, golden.fault, golden.failed) == ("healthy", None, [])
    values = {m.name: m.value for m in golden.measurements}
    assert values["replay.agreement"] == 1.0
    assert values["accept_length.rung4"] == values["accept_length.rung5"] > 2
    assert [values[f"width.{s}"] for s in ("prefill_extend", "draft", "decode_extend")] == [384, 128, 384]
    assert values["accept_length.rung1"] > 3
    assert values["accept_length.rung2"] > 3


def test_records_round_trip_and_end_in_a_summary_that_adds_up(golden, tmp_path):
    write(tmp_path / "report.jsonl", golden.records())
    lines = read(tmp_path / "report.jsonl")
    assert lines == golden.records()
    assert isinstance(lines[-1], Summary)
    assert lines[-1].total == sum(isinstance(line, Finding) for line in lines)
    named = {line.name for line in lines if isinstance(line, Measurement)}
    assert {f"accept_length.rung{r}" for r in ("1", "2", "3", "3.stored", "4", "5")} <= named
    assert {"accept_length.server", "replay.agreement", "width.draft"} <= named


def test_as_another_launch_the_golden_capture_is_broken():
    """Its rows have another width than such a server's, and rung 4 cannot be walked on them."""
    found = diagnose.run(**FILES, capture=DATA / "golden-capture", launch="--speculative-algorithm EAGLE")
    assert found.verdict == "broken"
    assert found.fault == "eagle-flag-on-eagle3-drafter"


def test_a_parameter_that_is_not_the_files_is_a_failure(golden):
    evidence = golden.evidence
    rank, matches = next(iter(evidence.live.items()))
    assert weights.loaded(evidence).verdict == "passed"
    changed = [replace(matches[0], equal=False, why="differs"), *matches[1:]]
    evidence = replace(evidence, live={rank: changed})
    finding = weights.loaded(evidence)
    assert finding.verdict == "failed" and f"{matches[0].param} on {rank}: differs" in finding.evidence
    assert diagnose.conclude(evidence).fault == "weights-not-loaded"


def test_a_trainers_whole_data_set_is_not_sent_to_the_server(monkeypatch, tmp_path):
    """Enough of its texts for rung 3, which walks them in order."""
    sent = {}
    monkeypatch.setattr("eaglelab.collect.capture_server", lambda *a, **more: sent.update(more))
    stored = SimpleNamespace(samples=[SimpleNamespace(token_ids=np.full(5000, i)) for i in range(1000)])
    record("http://127.0.0.1:1", tmp_path, None, stored, max_new_tokens=1, max_requests=1, all_ranks=False,
           with_target=False)  # fmt: skip
    assert [(text[0], len(text)) for text in sent["texts"]] == [(0, 5000), (1, 5000)]


def test_nothing_checked_is_not_healthy():
    with pytest.raises(ValueError, match="nothing was checked"):
        Summary(verdict="healthy", fault=None, passed=0, failed=0, skipped=0, errored=0, total=0)
    with pytest.raises(ValueError, match="add up"):
        Summary(verdict="healthy", fault=None, passed=1, failed=0, skipped=0, errored=0, total=2)


def test_a_record_that_does_not_fit_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "report.jsonl"
    path.write_text('{"type": "measurement", "name": "x", "value": null, "unit": "", "definition": ""}\n')
    with pytest.raises(ValueError, match=r"(?s)report.jsonl, line 1.*no reason"):
        read(path)


def test_a_fault_that_one_mechanism_found_did_not_pass_another():
    found = [
        Finding(fault=f, verdict=v, title="t") for f, v in (("a", "passed"), ("b", "passed"), ("a", "failed"))
    ]
    assert [(f.fault, f.verdict) for f in diagnose._merged(found)] == [("b", "passed"), ("a", "failed")]
