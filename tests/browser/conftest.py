"""One JupyterLab for all tests here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from browser.jupyter import Lab, Notebook, jupyter_lab

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(scope="session")
def lab(browser, tmp_path_factory):
    """JupyterLab over a copy of the notebooks, in a folder with a space in its name."""
    base = tmp_path_factory.mktemp("lab")
    shutil.copytree(NOTEBOOKS, base / "the notebooks")
    with jupyter_lab(base / "the notebooks", base) as running:
        yield running


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
