"""Every notebook of the repository: stripped, short, and in step with the parameters' model."""

import ast
from pathlib import Path

import nbformat
import pytest
from papermill import inspect_notebook

from eaglelab.params import ReportParams

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
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
        assert len(cell.source.splitlines()) <= 15 and "/work" not in cell.source
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
