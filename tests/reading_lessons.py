"""The lessons as a reader would work through them: exercises, checks, folded answers."""

import ast
import re
from pathlib import Path

import pytest

from eaglelab.lessons import LESSONS
from eaglelab.lessons.checking import NotYet

FOLDER = Path(__file__).parents[1] / "notebooks" / "lessons"
EVERY = [FOLDER / f"{stem}.ipynb" for stem in LESSONS]
ANSWER = re.compile(r"<details><summary>Answer</summary>.*?```python\n(.*?)```.*</details>", re.S)


def kind(cell):
    tags = cell.metadata.get("tags", [])
    return tags[0] if tags else cell.cell_type


def answer(cell):
    """The code in a folded answer."""
    return ANSWER.fullmatch(cell.source).group(1)


def exercises(notebook):
    """(exercise, its check, its answer's code): each exercise is followed by these, in this order."""
    found, cells = [], notebook.cells
    for i, cell in enumerate(cells):
        if kind(cell) == "exercise":
            assert [kind(c) for c in cells[i + 1 : i + 3]] == ["check", "answer"]
            found.append((cell, cells[i + 1], answer(cells[i + 2])))
    return found


def stated_time(notebook):
    """Minutes, as the lesson's head says."""
    return int(re.search(r"\*\*Time\*\*: about (\d+) minutes", notebook.cells[0].source)[1])


def estimated_time(notebook):
    """Minutes: reading at 200 words a minute, what each exercise is marked with, one a table or figure."""
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    words = len(re.sub(r"<details>.*?</details>", "", text, flags=re.S).split())
    marked = [int(m) for m in re.findall(r"^### Exercise .*\((\d+) min\)$", text, re.M)]
    assert len(marked) == len(exercises(notebook))
    shown = [c for c in notebook.cells if kind(c) == "code" and "import" not in c.source]
    return words / 200 + sum(marked) + len(shown)


def answered(notebook):
    """The notebook with its answers in the place of its exercises."""
    for exercise, _, code in exercises(notebook):
        exercise.source = code
    return notebook


def play(notebook):
    """Run a lesson in one namespace: each check on the untouched exercise, then on the answer.

    The untouched exercise is run in a copy, as a reader would who has done everything before it.
    """
    names = {"__name__": "__main__"}
    pairs = {check.id: (exercise, code) for exercise, check, code in exercises(notebook)}
    shown = {}
    for cell in notebook.cells:
        if cell.cell_type != "code" or kind(cell) == "exercise":
            continue
        if cell.id in pairs:
            exercise, code = pairs[cell.id]
            untouched = dict(names)
            exec(exercise.source, untouched)
            with pytest.raises(NotYet, match="is not written yet|is still `...`"):
                exec(cell.source, untouched)
            exec(code, names)
        shown[cell.id] = last_value(cell.source, names)
    return shown


def last_value(source, names):
    """Run a cell; the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
