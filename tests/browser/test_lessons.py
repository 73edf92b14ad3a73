"""A lesson as a reader sees it in JupyterLab: the words of a check, the folded answer, the pass."""

import nbformat
import pytest
from browser.jupyter import Notebook, is_blank
from reading_lessons import FOLDER, exercises

pytestmark = pytest.mark.notebook
LESSON = "1_speculative_decoding"


@pytest.fixture(scope="module")
def lesson(lab, browser):
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    return Notebook(page, lab, f"lessons/{LESSON}.ipynb")


def put(lesson: Notebook, number: int, source: str) -> None:
    """Write into a cell, as if typed."""
    code = """([n, text]) => window.jupyterapp.shell.currentWidget.content.model.cells.get(n)
        .sharedModel.setSource(text)"""
    lesson.page.evaluate(code, [number, source])


def test_an_untouched_exercise_says_so_in_words(lesson):
    assert not lesson.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    (said,) = lesson.errors()
    assert said == "NotYet: verify is not written yet: replace its `raise NotImplementedError`."
    shown = lesson.locator(".jp-OutputArea-output").filter(has_text="Not yet. verify is not written yet")
    assert "Traceback" not in shown.first.inner_text()


def test_the_answer_unfolds(lesson):
    answer = lesson.locator("details").first
    answer.scroll_into_view_if_needed()
    code = answer.locator("pre")
    assert not code.is_visible()
    answer.locator("summary").click()
    code.wait_for(state="visible")
    assert "def verify(" in code.inner_text()


def test_with_the_answers_every_check_passes_and_the_figures_are_drawn(lesson):
    notebook = nbformat.read(FOLDER / f"{LESSON}.ipynb", as_version=4)
    places = {cell.id: i for i, cell in enumerate(notebook.cells)}
    found = exercises(notebook)
    for exercise, _, code in found:
        put(lesson, places[exercise.id], code)
    lesson.run_all()
    assert lesson.locator("text=✓ passed").count() == len(found)
    pictures = lesson.locator(".jp-OutputArea-output img")
    assert pictures.count() == 2 and not any(is_blank(p.screenshot()) for p in pictures.all())
