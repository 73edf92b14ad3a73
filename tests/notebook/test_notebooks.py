"""Every notebook of the repository: stripped, short, and in step with the parameters' model."""

import ast
import re

import nbformat
import pytest
from papermill import inspect_notebook
from reading_notebooks import NOTEBOOKS, NUMBERED, run, shown

from eaglelab.params import ReportParams
from eaglelab.workbook import NOTEBOOKS as QUESTIONS
from eaglelab.workbook import BookParams

EVERY = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", EVERY, ids=lambda p: p.stem)
def test_notebook_is_stripped_and_calls_rather_than_defines(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (
        set(notebook.metadata) == {"kernelspec", "language_info"}
        and notebook.cells[0].cell_type == "markdown"
    )
    for cell in notebook.cells:
        assert len(cell.source.splitlines()) <= 15 and not re.search(r"""["']/\w""", cell.source)
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            tree = ast.parse(cell.source.replace("%matplotlib inline", ""))
            assert not any(isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Lambda)) for n in ast.walk(tree))


def test_parameters_cell_and_model_are_one():
    path = NOTEBOOKS / "regression_report.ipynb"
    cell = inspect_notebook(str(path))
    fields = ReportParams.model_fields
    assert list(cell) == list(fields)
    for name, said in cell.items():
        field = fields[name]
        assert said["inferred_type_name"] == field.annotation.__name__, name
        assert ast.literal_eval(said["default"]) == field.default, name
        assert said["help"] == field.description, name
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert code[0].metadata.tags == ["parameters"]


def test_verdict_comes_first_and_the_summary_last():
    cells = nbformat.read(NOTEBOOKS / "regression_report.ipynb", as_version=4).cells
    calls = [
        line
        for c in cells
        if c.cell_type == "code"
        for line in c.source.splitlines()
        if line.startswith("report.")
    ]
    order = (
        "verdict ladder acceptance sites wiring chunks chunks_table steps findings comparison measurements"
    )
    assert calls == [f"report.{name}()" for name in [*order.split(), "provenance", "finish"]]


@pytest.mark.notebook
@pytest.mark.parametrize("path", NUMBERED, ids=lambda p: p.stem)
def test_numbered_notebook_runs_on_the_shipped_capture(path, tmp_path):
    out = run(path, tmp_path / "out.ipynb")
    pieces = shown(out)
    assert re.search(r"[✓✗?] (healthy|passed)", pieces[0])  # the answer is the first thing shown
    assert "nothing" not in pieces and "Not shown" not in "".join(pieces)
    assert all(not c.outputs[1]["text"] for c in out.cells if c.cell_type == "code" and len(c.outputs) > 1)
    assert path.stem in pieces[-1] and "papermill" in pieces[-1]  # the command that makes it again


@pytest.mark.notebook
def test_the_incident_is_told_by_every_answer(tmp_path):
    """The shipped capture, its server believed to be launched as the incident's was."""
    given = {"launch": "--speculative-algorithm EAGLE"}
    answers = {}
    for path in NUMBERED[:6]:
        answers[path.stem[:2]] = shown(run(path, tmp_path / path.name, **given))
    assert "✗ broken" in answers["01"][0] and "wiring.fc" in answers["01"][0]
    assert "✗ failed" in answers["03"][0] and "≠ counts" in "".join(answers["03"])
    assert "? inconclusive" in answers["04"][0] and "fc bypassed takes 128" in answers["04"][0]
    assert "As trained: other drafts" in answers["05"][0]
    assert "--speculative-algorithm EAGLE3" in "".join(answers["06"])


@pytest.mark.parametrize("path", NUMBERED, ids=lambda p: p.stem)
def test_numbered_notebook_asks_one_question_and_says_its_parameters(path):
    cells = nbformat.read(path, as_version=4).cells
    title = cells[0].source.splitlines()[0]
    assert title == f"# {QUESTIONS[path.stem]}" and title.endswith("?")
    code = [c for c in cells if c.cell_type == "code"]
    assert code[0].metadata.tags == ["parameters"] and ".answer(" in code[1].source
    own = {"before", "after", "request", "round_number", "edits", "demo"}
    for name, said in inspect_notebook(str(path)).items():
        assert said["help"] and said["inferred_type_name"] in ("str", "int", "bool"), name
        assert name in own or name in BookParams.model_fields
        if name not in own:
            assert ast.literal_eval(said["default"]) == BookParams.model_fields[name].default


def test_every_notebook_has_its_question_and_its_line_in_the_readme():
    readme = (NOTEBOOKS / "README.md").read_text()
    bench = {"fault_bench"}  # what the bench found, not what a reader asks of a server
    assert {path.stem for path in EVERY} == set(QUESTIONS) | bench
    assert all(f"{path.stem}.ipynb" in readme for path in EVERY)
