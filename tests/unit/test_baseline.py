"""The rule of a regression, by hand-worked numbers."""

import pytest

from eaglelab import baseline, records
from eaglelab.errors import BadInput
from eaglelab.records import Finding, Measurement


def measured(name, value, interval=None, reason=None):
    reason = reason or ("not measured" if value is None else None)
    return Measurement(
        name=name, value=value, unit="tokens", definition="d", interval=interval, reason=reason
    )


@pytest.mark.parametrize(
    ("before", "after", "how", "margin"),
    [
        # half-widths 0.3 and 0.4 add to 0.5; the fall of 0.6 is more, and more than 5 % of 3.6
        ((3.6, (3.3, 3.9)), (3.0, (2.6, 3.4)), "regressed", 0.5),
        ((3.6, (3.3, 3.9)), (3.2, (2.8, 3.6)), "within noise", 0.5),
        # certain but small: 0.1 of 3.6 is under 5 %
        ((3.6, (3.59, 3.61)), (3.5, (3.49, 3.51)), "within noise", 0.0141421),
        ((3.0, (2.9, 3.1)), (3.6, (3.5, 3.7)), "improved", 0.141421),
        ((3.6, None), (1.0, (1.0, 1.0)), "not judged", None),
        ((3.6, (3.3, 3.9)), (3.6, (3.3, 3.9)), "same", None),
        ((3.6, (3.3, 3.9)), (None, None), "lost", None),
        ((None, None), (3.6, (3.3, 3.9)), "new", None),
        ((None, None), (None, None), "same", None),
    ],
)
def test_rule(before, after, how, margin):
    (moved,) = baseline.compare(
        [measured("accept_length.rung4", *before)], [measured("accept_length.rung4", *after)]
    )
    assert moved.how == how
    assert moved.margin == (None if margin is None else pytest.approx(margin, abs=1e-6))


def test_other_measurements_are_shown_not_judged():
    (moved,) = baseline.compare(
        [measured("width.draft", 384, (1, 2))], [measured("width.draft", 128, (1, 2))]
    )
    assert (moved.how, moved.moved) == ("changed", -256)
    assert baseline.finding([moved], "runs/1").verdict == "skipped"


def test_a_regression_fails_with_its_numbers():
    old = [measured("accept_length.rung4", 3.6, (3.5, 3.7)), measured("accept_length.rung5", 3.6, (3.5, 3.7))]
    new = [measured("accept_length.rung4", 3.6, (3.5, 3.7)), measured("accept_length.rung5", 1.0, (1.0, 1.0))]
    found = baseline.finding(baseline.compare(old, new), "runs/1")
    assert (found.fault, found.verdict) == ("regression-against-baseline", "failed")
    assert found.title == "1 of 2 measurements fell beyond noise since the baseline"
    assert found.evidence[1] == "accept_length.rung5: 3.6 before, 1 now (-2.6, interval ±0.1)"
    assert "5 %" in found.evidence[0] and "runs/1" in found.evidence[0]
    assert baseline.finding(baseline.compare(old, old), "runs/1").verdict == "passed"


def test_load_takes_a_folder_or_the_file_and_refuses_unfinished_runs(tmp_path):
    path = tmp_path / "report.jsonl"
    with pytest.raises(BadInput, match=r"report.jsonl is not there"):
        baseline.load(tmp_path)
    finding = Finding(fault="a", verdict="passed", title="t")
    records.write(path, [finding])
    with pytest.raises(BadInput, match="did not finish"):
        baseline.load(tmp_path)
    path.write_text('{"type": "other"}\n')
    with pytest.raises(BadInput, match="report.jsonl, line 1"):
        baseline.load(path)
    written = [finding, records.summarise([finding], "healthy", None)]
    records.write(path, written)
    assert baseline.load(tmp_path) == baseline.load(path) == written


def test_changed_conditions_are_named():
    before = [
        records.Provenance(facts={"launch": {"topk": 1, "tp": 2}, "time": "x", "drafter": {"sha256": "a"}})
    ]
    after = {"launch": {"topk": 4, "tp": 2}, "time": "y", "drafter": {"sha256": "b"}}
    changed = baseline.conditions(before, after)
    assert changed == ["launch.topk: 1 then, 4 now", "drafter.sha256: a then, b now"]
    flags = ("--a 1 --b --path x--y", "--a 2 --b --path x--y")
    before, after = ({"launch": {"flags": line}} for line in flags)
    told = baseline.conditions([records.Provenance(facts=before)], after)
    assert told == ["launch.flags: --a 1 then, --a 2 now"]  # of a command line what differs, not all of it
    found = baseline.finding([], "runs/1", changed)
    assert found.evidence[-2:] == [f"also changed: {line}" for line in changed]


def test_what_is_measured_no_more_is_said():
    moved = baseline.compare([measured("accept_length.rung4", 3.6)], [measured("accept_length.rung4", None)])
    found = baseline.finding(moved, "runs/1")
    assert (
        found.verdict == "skipped" and "accept_length.rung4: 3.6 before, not measured now" in found.evidence
    )
