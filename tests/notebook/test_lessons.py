"""The lessons: each passes with its folded answers, and each check fails on the untouched exercise."""

import ast
import contextlib
import re
from pathlib import Path

import nbformat
import pytest

from eaglelab.lessons import LESSONS, arithmetic
from eaglelab.lessons.checking import NotYet

FOLDER = Path(__file__).parents[2] / "notebooks" / "lessons"
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


def answered(notebook):
    """The notebook with its answers in the place of its exercises."""
    for exercise, _, code in exercises(notebook):
        exercise.source = code
    return notebook


@pytest.mark.parametrize("path", EVERY, ids=lambda p: p.stem)
def test_lesson_is_stripped_short_and_leads_on(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    assert first.startswith(f"# Lesson {path.stem[0]}: {LESSONS[path.stem]}\n")
    assert "**You will be able to**" in first and "**Time**: about" in first
    linked = [FOLDER / name for name in re.findall(r"\]\(([\w/.]+)\)", last)]
    assert FOLDER / "README.md" in linked and all(p.exists() for p in linked)
    following = list(LESSONS)[list(LESSONS).index(path.stem) + 1 :][:1]
    assert all(FOLDER / f"{stem}.ipynb" in linked for stem in following)
    assert exercises(notebook)
    for cell in notebook.cells:
        assert not re.search(r"""["'(]/\w""", cell.source)  # no absolute paths
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
        if kind(cell) == "exercise":
            assert "raise NotImplementedError" in cell.source or re.search(r"[:=] \.\.\.", cell.source)
        elif cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 15
            defined = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
            assert not any(isinstance(n, defined) for n in ast.walk(ast.parse(cell.source)))


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


@pytest.mark.notebook
@pytest.mark.parametrize("path", EVERY, ids=lambda p: p.stem)
def test_checks_fail_untouched_and_pass_with_the_answers(path, monkeypatch):
    """Lesson 3 on its recording, as where there is no SGLang."""
    monkeypatch.setenv("EAGLELAB_SERVER_PYTHON", "no-such-python")
    notebook = nbformat.read(path, as_version=4)
    shown = play(notebook)
    checks = [shown[c.id] for c in notebook.cells if kind(c) == "check"]
    assert all("✓ passed" in str(c) for c in checks)
    pictures = [v for v in shown.values() if hasattr(v, "data")]
    assert pictures and all(v.data.startswith(b"\x89PNG") and v.alt for v in pictures)


@pytest.mark.server("eagle-chain")
def test_the_incident_on_a_genuine_server(servers, monkeypatch):
    """Lesson 3 with a server: the same answers hold, and the restarted server accepts as predicted."""
    from eaglelab.lessons import incident

    @contextlib.contextmanager
    def shared(algorithm):
        yield servers.get({"EAGLE": "eagle-chain", "EAGLE3": "eagle3-chain"}[algorithm])

    monkeypatch.setattr(incident, "start_server", shared)
    notebook = nbformat.read(FOLDER / "3_the_incident.ipynb", as_version=4)
    shown = play(notebook)
    assert all("✓ passed" in str(shown[c.id]) for c in notebook.cells if kind(c) == "check")
    (predicted, counted) = (
        [float(x) for x in re.findall(r">(\d\.\d\d)<", str(shown[c.id]))]
        for c in notebook.cells
        if c.source in ("case.predict(fix)", "case.restart(fix)")
    )
    assert predicted[0] == counted[0] < 1.1 and counted[1] > 2
    assert abs(predicted[1] - counted[1]) < 0.05 * counted[1]


WRONG = [  # (check, other arguments after the reader's, the reader's functions, words that help)
    (arithmetic.check_verify, [lambda d, c: d], "stops with|should be"),
    (
        arithmetic.check_verify,
        [lambda d, c: [x for x, y in zip(d, c, strict=False) if x == y]],
        "own token is missing",
    ),
    (
        arithmetic.check_verify,
        [lambda d, c: [x for x, y in zip(d, c, strict=False) if x == y] + c[-1:]],
        "first miss",
    ),
    (arithmetic.check_verify, [lambda d, c: c.clear()], "is a `return` missing"),
    (arithmetic.check_figures, [lambda c: sum(c) / len(c), lambda c, s: 0.0], "counts the target's own"),
    (
        arithmetic.check_figures,
        [lambda c: 1 + sum(c) / len(c), lambda c, s: (sum(c) / len(c) + 1) / (s + 1)],
        "an old SGLang's",
    ),
    (
        arithmetic.check_positions,
        [lambda c, s: [sum(x == j for x in c) / len(c) for j in range(1, s + 1)]],
        "also accepted the first two",
    ),
    (
        arithmetic.check_printed,
        [lambda m, s, n: {"length": m + 1, "rate": m / n, "rate-old": m / n, "rate-oldest": m / s}],
        "should be",
    ),
    (arithmetic.check_zero, [{line: line.endswith("0.20") for line, *_ in arithmetic.ZERO}], "1.80"),
    (
        arithmetic.check_sampling,
        [
            lambda p, q, x: min(1, p[x] / q[x]),
            lambda p, q: [max(0, a - b) for a, b in zip(p, q, strict=True)],
        ],
        "made to add up to 1",
    ),
    (arithmetic.check_sampling, [lambda p, q, x: p[x], lambda p, q: p], "min"),
    (arithmetic.check_speedup, [lambda a, s, c: a / (s * c) if c else a], "One verify"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "functions", "words"), WRONG, ids=lambda v: getattr(v, "__name__", ""))
def test_a_wrong_answer_is_told_what_is_wrong(check, functions, words):
    with pytest.raises(NotYet, match=words) as told:
        check(*functions)
    assert str(told.value)[0].isupper() or "(" in str(told.value)
    assert told.value._render_traceback_() == [f"Not yet. {told.value}"]


SLIPS = [  # (lesson, what an answer says, what a reader may write there, words that help)
    ("2", "streams[2], streams[4], streams[5]", "streams[5], streams[4], streams[2]", "yours is depth 5"),
    ("2", "streams[2], streams[4], streams[5]", "streams[2], streams[4]", "shape"),
    ("2", "x.pow(2).mean", "x.pow(2).sum", "rms_norm"),
    ("2", ".sqrt() * weight", ".sqrt()", "weight is missing"),
    ("2", 'rms_norm(features, w["input_norm.weight"]) @', "features @", "input_norm is missing"),
    ("2", "tokens[1 : len(features) + 1]", "tokens[: len(features)]", "No shift"),
    ("2", "scores.masked_fill(later, -torch.inf)", "scores", "must not see later rows"),
    ("2", "/ d**0.5", "", "root of head_dim"),
    ("2", "# [rows, 2H]", "; x = x.roll(128, dims=1)", "embedding comes first"),
    ("2", "hidden = residual + mixed", "hidden = mixed", "Add the residual"),
    ("2", "check.rope(q, positions), check.rope(k, positions)", "q, k", "turned by rope"),
    ("2", "return normed, normed", "return normed, hidden", "norm_output"),
    ("2", 'int(best + w["d2t"][best])', "int(best)", "add d2t"),
    ("2", "feedback[-1:]", "hidden[-1:]", "fed to the next step"),
    ("2", "committed.append(kept + 1)", "committed.append(kept)", "count the bonus"),
    ("2", "n += kept + 1", "n += 1", "starts with c more rows"),
    ("3", "return correct /", "return 1 + correct /", "without the bonus"),
    ("3", 'weights_untrained = "struck out"', 'weights_untrained = "stands"', "Does it\\?"),
    ("3", 'weights_untrained = "struck out"', 'weights_untrained = "maybe"', "or \"stands\""),
    ("3", "if not set(parts) <= set(names)", "if not set(parts) & set(names)", "needs all its parts"),
    ("3", "if name not in taken", "if False", "Nobody takes"),
    ("3", 'head_belongs_to = "target"', 'head_belongs_to = "drafter"', "row of lm_head"),
    ("3", "x.dtype == y.dtype and torch.equal(x, y)", "x.shape == y.shape", "another order"),
    ("3", "x.dtype == y.dtype and torch.equal(x, y)", "torch.allclose(x, y)", "return|stops"),
    ("3", "shape[-1]", "shape[0]", "number of rows"),
    ("3", "if fed == hidden", "if fed == hidden and hidden == fc_in", "feedback"),
    ("3", '"lm_head": "target"', '"lm_head": "own"', "draft tokens come out"),
    ("3", '"vocab_map": "dropped"', '"vocab_map": "d2t"', "draft tokens come out"),
    ("3", '"fc": "bypassed"', '"fc": "applied"', "384"),
    ("3", 'cause = "eagle-flag-on-eagle3-drafter"', 'cause = "aux-hidden-state-off"', "kept its own head"),
    ("3", 'fix = "--speculative-algorithm EAGLE3"', 'fix = "--speculative-num-steps 3"', "still differ in"),
    ("4", "return depth, depth == n", "return depth, False", "last has been normed"),
    ("4", "index % (n + 1)", "index % n", "n \\+ 1 hidden states|should be"),
    ("4", 'plus = 0 if tool in ("speculators", "vllm") else 1', "plus = 0", "one layer more"),
    ("4", "if ids[0] == 1 else 0", "if 1 in ids else 0", "Only the"),
    ("4", "if max(ids) == n else 1", "if ids[0] == n else 1", "largest id is n"),
    ("4", "d - minus", "d + minus", "minus one"),
    ("4", "return [2, n // 2, n - 3]", "return [2, n // 2, n - 2]", "should be"),
    ("4", "key=lambda d: error", "key=lambda d: -error", "Rows of depths"),
    ("4", "(dim=1)).median()", "(dim=1)).max()", "odd rows"),
    ("4", "return rows == drafts", "return rows == 0 and drafts == 0", "angle"),
    ("5", "found[parent] + [token]", "[token]", "should be"),
    ("5", "found.append(found[parent] + [token])", "found.append([token] + found[parent])", "outward"),
    ("5", "rows[node] = list(rows[parent])", "rows[node] = [1] * node + [0] * (n - node)", "its siblings"),
    ("5", "rows[node] = list(rows[parent])", "rows[node][parent] = 1", "all the way"),
    ("5", "tokens[i - 1] == choices[node]", "tokens[i - 1] == choices[len(committed) - 1]", "should be"),
    ("5", "return committed", "return committed[:-1]", "own next token is missing"),
    ("5", "score * chance", "chance", "are multiplied"),
    ("5", "frontier = sorted(expanded, reverse=True)[:topk]", "frontier = expanded", "not among the topk"),
    ("5", "nodes - 1]", "nodes]", "worked example"),
    ("5", "(draft_tokens - 1)", "5", "every draft that was proposed"),
    ("5", "(accept_length - 1) /", "accept_length /", "should be"),
]  # fmt: skip


@pytest.mark.parametrize(("lesson", "right", "slip", "words"), SLIPS)
def test_a_slip_in_an_answer_is_named(lesson, right, slip, words, monkeypatch):
    """The answers' own code with one thing wrong; everything before it is right."""
    monkeypatch.setenv("EAGLELAB_SERVER_PYTHON", "no-such-python")
    (path,) = FOLDER.glob(f"{lesson}_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    names, done = {"__name__": "__main__"}, {e.id: (c, code) for e, c, code in exercises(notebook)}
    for cell in notebook.cells:
        if cell.id not in done:
            if kind(cell) == "code" and "import" in cell.source:
                exec(cell.source, names)
            continue
        check, code = done[cell.id]
        if right in code:
            exec(code.replace(right, slip), names)
            with pytest.raises(NotYet, match=words):
                exec(check.source, names)
            return
        exec(code, names)
    pytest.fail(f"no answer of lesson {lesson} says {right!r}")


def test_the_index_lists_every_lesson():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\[([^]]+)\]\((\w+)\.ipynb\)", text)
    assert {stem: title for title, stem in linked} == LESSONS
    assert {p.stem for p in FOLDER.glob("*.ipynb")} == set(LESSONS)
