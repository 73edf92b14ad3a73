"""A run's records in the forms that schedulers read: JUnit XML, Markdown, GitHub's annotations.

The records decide; nothing is measured here. One finding is one test case: failed and errored ones keep their
words, skipped ones say what is missing. Sources of the forms: JUnit as GitHub, GitLab and Jenkins read it
(testsuites > testsuite > testcase > failure | error | skipped); workflow commands and GITHUB_STEP_SUMMARY
as in "Workflow commands for GitHub Actions".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from eaglelab import baseline, records, runs
from eaglelab.errors import BadInput
from eaglelab.html import LOOK, printable
from eaglelab.records import Finding, Measurement, Record, Summary

LENGTHS = "accept_length."
COMMANDS = {"failed": "error", "errored": "error", "skipped": "notice"}  # of GitHub's annotations


def export(run: Path, form: str) -> tuple[str, str]:
    """One run (its folder, or report.jsonl) as "junit", "markdown" or "github" -> (text, verdict).

    BadInput if the run did not finish: half a run must not look like one.
    """
    if form not in FORMS:
        raise BadInput(f"--to {form}: one of {', '.join(FORMS)}")
    found = load(run)
    return FORMS[form](found), _summary(found).verdict


def load(run: Path) -> list[Record]:
    """The records of a finished run. BadInput otherwise."""
    file = run / runs.RECORDS if run.is_dir() else run
    if not file.exists():
        raise BadInput(f"{run}: {runs.RECORDS} is not there; name the folder of a report that finished")
    try:
        found = records.read(file)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if not found or not isinstance(found[-1], Summary):
        raise BadInput(f"{file}: the last line is not a summary; that run did not finish")
    return found


def junit(found: list[Record]) -> str:
    """JUnit XML: a test suite a run, a test case a finding, measured accept lengths as properties."""
    summary = _summary(found)
    counts = {
        "tests": str(summary.total),
        "failures": str(summary.failed),
        "errors": str(summary.errored),
        "skipped": str(summary.skipped),
    }
    root = ElementTree.Element("testsuites", {"name": "eaglelab", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "eaglelab.report", **counts})
    if when := _facts(found).get("time"):
        suite.set("timestamp", str(when).partition("+")[0])
    properties = ElementTree.SubElement(suite, "properties")
    told = [("verdict", summary.verdict), ("fault", summary.fault or "")]
    told += [(m.name, f"{m.value:.6g}") for m in _lengths(found)]
    for name, value in told:
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    kinds = {"failed": "failure", "errored": "error", "skipped": "skipped"}
    for f in _findings(found):
        case = ElementTree.SubElement(suite, "testcase", {"classname": _rung(f), "name": f.fault})
        if kind := kinds.get(f.verdict):
            words = ElementTree.SubElement(case, kind, {"message": printable(f.title)})
            words.text = printable("\n".join([*f.evidence, *([f"fix: {f.fix}"] if f.fix else [])]))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def markdown(found: list[Record]) -> str:
    """A page for a step summary or a chat message: verdict, fix, accept lengths, what failed."""
    summary = _summary(found)
    mark = LOOK[summary.verdict][0]
    lines = [f"## {mark} {summary.verdict}" + (f": `{summary.fault}`" if summary.fault else ""), ""]
    failed = [f for f in _findings(found) if f.verdict in ("failed", "errored")]
    if failed and failed[0].fix:
        lines += [f"**Fix:** {_cell(failed[0].fix)}", ""]
    rows = [(m.name, f"{m.value:.3f}", _interval(m), m.count or "") for m in _lengths(found)]
    if rows:
        lines += ["| accept length | tokens per verify | 95 % interval | rounds |", "|---|---:|---|---:|"]
        lines += [f"| {' | '.join(_cell(v) for v in row)} |" for row in rows] + [""]
    for f in failed:
        lines += [f"- **{_cell(f.title)}** (`{f.fault}`)", *(f"  - {_cell(line)}" for line in f.evidence[:8])]
    if compared := [f for f in _findings(found) if f.fault == baseline.FAULT and f not in failed]:
        lines += [f"Baseline: {_cell(compared[0].title)} ({compared[0].verdict})."]
    counts = f"{summary.passed} passed, {summary.failed} failed, {summary.skipped} skipped"
    return "\n".join([*lines, "", f"{counts}, {summary.errored} errored.", ""])


def github(found: list[Record]) -> str:
    """Workflow commands, one line a finding that did not pass; GitHub shows them on the run's page."""
    out = []
    for f in _findings(found):
        if command := COMMANDS.get(f.verdict):
            title = _escaped(f.fault).replace(":", "%3A").replace(",", "%2C")
            words = "; ".join([f.title, *f.evidence[:3], *([f"fix: {f.fix}"] if f.fix else [])])
            out.append(f"::{command} title={title}::{_escaped(words)}")
    summary = _summary(found)
    out.append(f"verdict: {summary.verdict}" + (f" ({summary.fault})" if summary.fault else ""))
    return "\n".join(out) + "\n"


FORMS: dict[str, Callable[[list[Record]], str]] = {"junit": junit, "markdown": markdown, "github": github}


def _summary(found: list[Record]) -> Summary:
    last = found[-1]
    assert isinstance(last, Summary)
    return last


def _facts(found: list[Record]) -> dict:
    return next((r.facts for r in found if isinstance(r, records.Provenance)), {})


def _findings(found: list[Record]) -> list[Finding]:
    order = ("failed", "errored", "skipped", "passed")
    return sorted((r for r in found if isinstance(r, Finding)), key=lambda f: order.index(f.verdict))


def _lengths(found: list[Record]) -> list[Measurement]:
    return [
        r for r in found if isinstance(r, Measurement) and r.name.startswith(LENGTHS) and r.value is not None
    ]


def _rung(finding: Finding) -> str:
    return f"eaglelab.rung{finding.rung}" if finding.rung else "eaglelab"


def _interval(m: Measurement) -> str:
    return f"{m.interval[0]:.2f} to {m.interval[1]:.2f}" if m.interval else ""


def _cell(value: object) -> str:
    """Text of others inside Markdown: no HTML, no table border, no line break."""
    text = printable(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """As GitHub's toolkit escapes the data of a workflow command."""
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
