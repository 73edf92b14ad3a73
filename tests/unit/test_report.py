"""The pieces of a report where little could be gathered, and records that any text can go into."""

import json
from pathlib import Path

import pytest
from reading import read

from eaglelab import diagnose, records, report
from eaglelab.params import ReportParams
from eaglelab.records import Finding

DATA = Path(__file__).parents[2] / "data"
CHAIN = "--speculative-num-steps 5 --speculative-eagle-topk 1"
PIECES = (
    *("verdict", "sites", "wiring", "chunks", "chunks_table"),
    *("steps", "findings", "comparison", "measurements", "provenance"),
)


def static(folder, algorithm):
    """A report from files and flags alone: no server, no capture."""
    found = diagnose.run(
        drafter=DATA / "drafter-sglang",
        target=DATA / "target",
        launch=f"--speculative-algorithm {algorithm} {CHAIN}",
    )
    params = ReportParams.model_construct(drafter=str(DATA / "drafter-sglang"))
    return report.Report(params, folder, found)


def test_broken_by_the_flag_alone(tmp_path):
    made = static(tmp_path, "EAGLE")
    text = read(made.verdict()).text
    assert text.startswith("✗ broken: eagle-flag-on-eagle3-drafterAn EAGLE-3 drafter was launched as EAGLE.")
    assert "Fix: --speculative-algorithm EAGLE3" in text
    assert "wiring.fcappliedbypassedcounts" in read(made.wiring()).text


def test_without_a_capture_it_is_inconclusive_and_says_what_to_give(tmp_path):
    made = static(tmp_path, "EAGLE3")
    text = read(made.verdict()).text
    assert text.startswith("? inconclusive")
    assert text.count("no server and no capture were given (--server URL or --capture DIR)") == 1
    assert "accept_length.server, width.prefill_extend, width.draft" in text


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_every_piece_can_be_shown_with_nothing_captured(tmp_path, algorithm):
    made = static(tmp_path, algorithm)
    for name in PIECES:
        shown = getattr(made, name)()
        assert read(shown._repr_html_()).text, name
    for name in ("ladder", "acceptance"):
        assert getattr(made, name)().data.startswith(b"\x89PNG")
    made.finish()
    found = records.read(tmp_path / "report.jsonl")
    assert [r.name for r in found if r.type == "figure"] == ["ladder", "acceptance"]
    assert found[-1].type == "summary" and found[-1].total == sum(r.type == "finding" for r in found)


def test_any_text_can_be_recorded(tmp_path):
    made = static(tmp_path, "EAGLE3")
    made.found.findings.append(
        Finding(fault="x", verdict="passed", title="\ud800\0\u202e", evidence=["\udfff"])
    )
    made.finish()
    lines = [
        json.loads(line) for line in (tmp_path / "report.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    (found,) = [line for line in lines if line.get("fault") == "x" and line["type"] == "finding"]
    assert (found["title"], found["evidence"]) == ("⟨U+D800⟩⟨U+0000⟩⟨U+202E⟩", ["⟨U+DFFF⟩"])


def test_provenance_names_the_drafter_by_its_bytes_and_can_be_repeated(tmp_path):
    facts = static(tmp_path, "EAGLE3").found.facts
    assert facts["drafter"]["depths"] == (2, 4, 5) and len(facts["drafter"]["sha256"]) == 64
    assert facts["launch"]["steps"] == 5 and facts["command"].startswith("eaglelab report --drafter ")


def test_inconclusive_for_want_of_requests_says_so(tmp_path):
    """Every number was measured, but on too few requests; nothing else would tell."""
    found = diagnose.run(
        drafter=DATA / "drafter-sglang", target=DATA / "target", capture=DATA / "golden-capture"
    )
    found.capture.sent.update({f"lost-{i}": {} for i in range(3)})
    found = diagnose.conclude(found.evidence)
    params = ReportParams.model_construct(drafter=str(DATA / "drafter-sglang"))
    text = read(report.Report(params, tmp_path, found).verdict()).text
    assert text.startswith("? inconclusive") and "2 of 5 generations were captured whole" in text
