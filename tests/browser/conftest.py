"""One JupyterLab for all tests here."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from browser.jupyter import Lab, Notebook, jupyter_lab

from eaglelab.serve import data_dir

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
THE_OTHERS = "the others.ipynb"  # all that are looked at without being worked in, in one kernel


@pytest.fixture(scope="session")
def lab(browser, tmp_path_factory):
    """JupyterLab over a copy of the notebooks, in a folder with a space in its name."""
    base = tmp_path_factory.mktemp("lab")
    shutil.copytree(NOTEBOOKS, base / "the notebooks")
    _together(base / "the notebooks", THE_OTHERS)
    with jupyter_lab(base / "the notebooks", base) as running:
        yield running


def _together(folder: Path, name: str) -> None:
    """One notebook of the cells of several: seven kernels would load torch seven times."""
    found = [nbformat.read(path, as_version=4) for path in sorted(folder.glob("0[23467]*.ipynb"))]
    found.append(nbformat.read(folder / "regression_report.ipynb", as_version=4))
    data = data_dir()
    given = {
        "capture": "golden-capture",
        "drafter": "drafter-sglang",
        "target": "target",
        "features": "features",
    }
    own = nbformat.v4.new_code_cell("\n".join(f"{k} = {str(data / v)!r}" for k, v in given.items()))
    own.metadata["tags"] = ["parameters"]
    found[-1].cells.insert(2, own)
    found[0].cells = [cell for notebook in found for cell in notebook.cells]
    for i, cell in enumerate(found[0].cells):
        cell.id = f"cell-{i}"
    nbformat.write(found[0], folder / name)


@pytest.fixture(scope="session")
def opened(lab: Lab, browser):
    """`opened(name)`: a notebook run from top to bottom, once for all tests that look at it."""
    found: dict[str, Notebook] = {}

    def open_notebook(name: str) -> Notebook:
        if name not in found:
            found[name] = Notebook(browser.new_page(viewport={"width": 1400, "height": 1000}), lab, name)
            found[name].run_all()
        return found[name]

    return open_notebook
