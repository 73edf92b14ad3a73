"""One browser and one JupyterLab for all tests here. No browser: skipped, but an error where CI=true."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from browser.jupyter import Lab, Notebook, chromium, jupyter_lab

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    program = chromium()
    if program is None:
        words = "no Chromium: `apt-get install chromium`, or `playwright install chromium`"
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a browser: {words}", pytrace=False)
        pytest.skip(words)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, headless=True)
        yield running
        running.close()


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
