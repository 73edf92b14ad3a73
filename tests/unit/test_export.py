"""A run in the forms of schedulers, and many runs as a page, from records written by hand."""

import json
from datetime import datetime, timedelta, timezone
from xml.etree import ElementTree

import pytest

from eaglelab import baseline, export, history, records
from eaglelab.errors import AttachError, BadInput
from eaglelab.progress import quiet
from eaglelab.records import Finding, Measurement, Provenance
from eaglelab.turn import lock_file, turn

START = datetime(2026, 3, 1, 2, tzinfo=timezone.utc)


def write_run(
    folder,
    day=0,
    value=3.0,
    fault=None,
    engine="sglang 0.5.23",
    prompts="p" * 8,
    title="it is <wrong> | bad",
    tp=1,
):
    """A run folder with one passed, one skipped and, with `fault`, one failed finding."""
    facts = {
        "time": (START + timedelta(days=day)).isoformat(),
        "parameters": {"server": "http://h:1"},
        "launch": {"engine": engine, "flags": f"--x --tp {tp}"},
        "drafter": {"sha256": "0" * 64},
        "eaglelab": {"version": "0.1.0"},
        "capture": {"prompts_sha256": prompts},
    }
    findings = [
        Finding(fault="feed-width", verdict="passed", title="fits", rung=4),
        Finding(
            fault="exposure-bias",
            verdict="skipped",
            title="none",
            rung=2,
            evidence=["give --features"],
        ),
    ]
    if fault:
        findings.append(
            Finding(
                fault=fault, verdict="failed", title=title, rung=4, evidence=["a: 1,\nb % 2"], fix="--flag X"
            )
        )
    length = Measurement(
        name="accept_length.rung5", value=value, unit="tokens per verify", definition="d",
        reason=None if value is not None else "none", interval=value and (value - 0.1, value + 0.1), count=50,
    )  # fmt: skip
    summary = records.summarise(findings, "broken" if fault else "healthy", fault)
    folder.mkdir(parents=True)
    records.write(folder / "report.jsonl", [Provenance(facts=facts), length, *findings, summary])
    return folder


def test_junit_has_a_case_a_finding_and_totals_that_add_up(tmp_path):
    run = write_run(tmp_path / "run", fault="lm-head-missing")
    suite = ElementTree.fromstring(export.export(run, "junit")[0]).find("testsuite")
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3", "failures": "1", "errors": "0", "skipped": "1",
    }  # fmt: skip
    assert suite.get("timestamp") == "2026-03-01T02:00:00"
    cases = {(c.get("classname"), c.get("name")): [child.tag for child in c] for c in suite.iter("testcase")}
    assert cases == {
        ("eaglelab.rung4", "lm-head-missing"): ["failure"],
        ("eaglelab.rung2", "exposure-bias"): ["skipped"],
        ("eaglelab.rung4", "feed-width"): [],
    }
    failure = suite.find(".//failure")
    assert (failure.get("message"), failure.text) == ("it is <wrong> | bad", "a: 1,\nb % 2\nfix: --flag X")
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert properties == {"verdict": "broken", "fault": "lm-head-missing", "accept_length.rung5": "3"}


def test_markdown_says_verdict_fix_and_length_and_cannot_be_broken_by_a_title(tmp_path):
    text = export.export(write_run(tmp_path / "run", fault="lm-head-missing"), "markdown")[0]
    assert text.splitlines()[0] == "## ✗ broken: `lm-head-missing`"
    assert "**Fix:** --flag X" in text
    assert "| accept_length.rung5 | 3.000 | 2.90 to 3.10 | 50 |" in text
    assert "- **it is &lt;wrong> \\| bad** (`lm-head-missing`)" in text
    assert "1 passed, 1 failed, 1 skipped, 0 errored." in text


def test_annotations_are_one_line_each_and_escaped(tmp_path):
    lines = export.export(write_run(tmp_path / "run", fault="lm-head-missing"), "github")[0].splitlines()
    assert lines == [
        "::error title=lm-head-missing::it is <wrong> | bad; a: 1,%0Ab %25 2; fix: --flag X",
        "::notice title=exposure-bias::none; give --features",
        "verdict: broken (lm-head-missing)",
    ]


def test_a_healthy_run_has_no_error(tmp_path):
    run = write_run(tmp_path / "run")
    assert export.export(run, "github")[1] == "healthy"
    assert "::error" not in export.export(run, "github")[0]
    assert ElementTree.fromstring(export.export(run, "junit")[0]).find(".//failure") is None


def test_the_summary_says_what_became_of_the_baseline(tmp_path):
    run = write_run(tmp_path / "run")
    earlier = Finding(fault=baseline.FAULT, verdict="passed", title="0 of 3 measurements fell")
    found = export.load(run)
    records.write(run / "report.jsonl", [*found[:-1], earlier, found[-1]])
    assert "Baseline: 0 of 3 measurements fell (passed)." in export.markdown(export.load(run))
    assert "Baseline" not in export.markdown(found)


def test_half_a_run_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    file = run / "report.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(BadInput, match="did not finish"):
        export.export(run, "junit")
    with pytest.raises(BadInput, match=r"report\.jsonl is not there"):
        export.export(tmp_path, "junit")
    with pytest.raises(BadInput, match="one of junit, markdown, github"):
        export.export(run, "html")


def test_history_keeps_prompts_apart_and_marks_what_changed(tmp_path):
    for day, (value, engine, prompts) in enumerate(
        [(3.0, "a", "p1"), (1.0, "a", "p2"), (3.1, "a", "p1"), (2.0, "b", "p1"), (None, "b", "p1")]
    ):
        write_run(tmp_path / f"run{day}", day, value, engine=engine, prompts=prompts, tp=1 + day // 4)
    (tmp_path / "late.partial").mkdir()
    (tmp_path / "late.partial" / "report.jsonl").write_text("")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "report.jsonl").write_text("{}\n")
    found = history.read(tmp_path)
    assert [(r.folder.name, r.value) for r in found.runs] == [
        ("run0", 3.0), ("run1", 1.0), ("run2", 3.1), ("run3", 2.0), ("run4", None),
    ]  # fmt: skip
    assert {r.folder.name: found.changes(r) for r in found.runs if found.changes(r)} == {
        "run3": ["engine: a → b"],
        "run4": ["launch: --tp 1 → --tp 2"],  # of the flags those that differ
    }
    assert {k: n for k, n in ((f.name, n) for f, n in found.marks.items())} == {"run3": 1, "run4": 2}
    assert sorted(found.left_out) == ["late.partial", "torn"]
    lines = history.figure(found).axes[0].get_lines()
    labelled = {line.get_label(): list(line.get_ydata()) for line in lines if line.get_label()[0] != "_"}
    assert labelled["http://h:1, prompts p2 (1 run)"] == [1.0]
    assert labelled["http://h:1, prompts p1 (4 runs)"][:3] == [3.0, 3.1, 2.0]
    page = history.page(found, tmp_path)
    assert "<script" not in page and "data:image/png" in page and "1: engine: a → b" in page
    assert json.dumps(history.rows(found))


def test_an_empty_folder_has_no_history(tmp_path):
    with pytest.raises(BadInput, match="no finished run"):
        history.read(tmp_path)
    with pytest.raises(BadInput, match="is not a folder"):
        history.read(tmp_path / "none")


def test_one_report_at_a_time_on_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLELAB_LOCKS", str(tmp_path / "a b"))
    said = []
    with turn("http://h:1", 0, quiet):
        with (
            pytest.raises(AttachError, match="another report works on http://h:1"),
            turn("http://h:1", 0.2, said.append),
        ):
            raise AssertionError("two reports at once")
        with turn("http://h:2", 0, quiet), turn("", 0, quiet), turn("", 0, quiet):
            pass  # another server, and captures, do not wait
    with turn("http://h:1", 0, quiet):
        assert lock_file("http://h:1").parent == tmp_path / "a b"
    assert said == ["another report works on http://h:1: waiting up to 0.2 s"]


def test_a_line_that_is_no_record_names_its_fields_only(tmp_path):
    (tmp_path / "report.jsonl").write_text('{"type": "finding", "fault": "f", "verdict": "passed"}\n')
    with pytest.raises(BadInput, match=r"line 1: not a record: finding\.title: Field required$"):
        export.export(tmp_path, "markdown")
