"""Causes: the edit that removes the differences names the fault, never one flag or one field."""

from dataclasses import replace
from pathlib import Path

import pytest

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.checks.causes import implicated
from eaglelab.checks.static import findings
from eaglelab.diff import diff
from eaglelab.gather import static_evidence
from eaglelab.launch import Launch

DATA = Path(__file__).parents[2] / "data"
FLAG = ["eagle-flag-on-eagle3-drafter"]
FED = ["depths", "width", "final_norm", "fc"]


def evidence_of(algorithm: str, config: dict | None = None, drafter: str = "drafter-sglang"):
    target = open_target(DATA / "target")
    checkpoint = open_checkpoint(DATA / drafter)
    if config:
        checkpoint = checkpoint.with_config(config)
    return static_evidence(
        checkpoint, Launch(algorithm=algorithm, target=target.facts, dtype="float32"), target
    )


AUX_OFF = {"eagle_config": {"use_aux_hidden_state": False}}


@pytest.mark.parametrize(
    ("algorithm", "config", "slugs", "explains"),
    [
        ("EAGLE3", None, [], []),
        ("EAGLE", None, FLAG, [*FED, "lm_head", "vocab_map"]),
        ("EAGLE3", AUX_OFF, ["aux-hidden-state-off"], FED),
        # undoing the flag alone mends head and map, and leaves the feed: both are named, together
        ("EAGLE", AUX_OFF, [*FLAG, "aux-hidden-state-off"], [*FED, "lm_head", "vocab_map"]),
    ],
)
def test_a_fault_is_the_edit_that_removes_its_differences(algorithm, config, slugs, explains):
    found = implicated(evidence_of(algorithm, config))
    assert [c.slug for item in found for c in item.causes] == slugs
    assert [d.field for item in found for d in item.explains] == explains
    assert not any(item.remaining for item in found)


@pytest.mark.parametrize("drafter", ["drafter-sglang", "drafter-speculators"])
def test_the_same_verdict_from_either_form_of_the_drafter(drafter):
    found = {f.fault: f.verdict for f in findings(evidence_of("EAGLE", drafter=drafter))}
    assert [fault for fault, verdict in found.items() if verdict == "failed"] == [
        "eagle-flag-on-eagle3-drafter"
    ]
    assert {v for f, v in found.items() if v != "failed"} == {"passed"}


def test_the_incident_is_told_in_full():
    finding = findings(evidence_of("EAGLE"))[0]
    told = "\n".join(finding.evidence)
    for words in (
        "fed 128 numbers a token where 384 were trained",
        "depths fed: 8 (after the final norm); trained: 2, 4, 5",
        "fc is bypassed",
        "the target's lm_head, cut to its first 640 rows",
        "d2t is not applied",
    ):
        assert words in told
    assert finding.fix == "--speculative-algorithm EAGLE3"


def test_a_price_goes_with_its_cause():
    finding = findings(evidence_of("EAGLE"), lambda item: (3.5, f"priced {item.flags}"))[0]
    assert finding.predicted_accept_length == 3.5
    assert "priced --speculative-algorithm EAGLE3" in finding.evidence


def test_a_difference_without_a_known_cause_is_still_a_finding():
    evidence = evidence_of("EAGLE3")
    feed, wiring = evidence.trained
    evidence.trained = feed, replace(wiring, eps=1e-3)
    evidence.differences = diff(evidence.trained, evidence.served, evidence.original, evidence.target)
    failed = [f for f in findings(evidence) if f.verdict == "failed"]
    assert [f.fault for f in failed] == ["wiring-difference"]
    assert failed[0].evidence[0].startswith("eps: trained 0.001, served 1e-05")


def test_an_engine_that_refuses_says_why_by_name():
    evidence = evidence_of("EAGLE3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}})
    named, refused = findings(evidence)
    assert "128 x 256, the file has 128 x 384" in named.evidence[0]
    assert [f.fault for f in (named, refused)] == ["fc-width-differs", "engine-refuses-drafter"]
    assert {f.verdict for f in (named, refused)} == {"failed"}


def test_two_causes_are_two_findings():
    failed = [f for f in findings(evidence_of("EAGLE", AUX_OFF)) if f.verdict == "failed"]
    assert [f.fault for f in failed] == ["eagle-flag-on-eagle3-drafter", "aux-hidden-state-off"]
    assert failed[0].fix == "--speculative-algorithm EAGLE3"
    assert "use_aux_hidden_state" in failed[1].fix


def test_a_cause_and_a_difference_that_it_hides_are_two_findings():
    """Under EAGLE the head is the target's in any case; once that is undone the tie shows."""
    evidence = evidence_of("EAGLE")
    feed, wiring = evidence.trained
    evidence.trained = feed, replace(wiring, rope=replace(wiring.rope, theta=1e6))
    evidence.differences = diff(evidence.trained, evidence.served, evidence.original, evidence.target)
    failed = [f for f in findings(evidence) if f.verdict == "failed"]
    assert [f.fault for f in failed] == ["eagle-flag-on-eagle3-drafter", "rope-theta"]
    assert failed[1].evidence[0].startswith("rope.theta: trained 1000000.0, served 10000.0")
    assert '"rope_theta": 1000000.0' in failed[1].fix
