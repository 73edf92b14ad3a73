"""The lessons: each passes with its folded answers, and each check fails on the untouched exercise."""

import ast
import json
import re

import nbformat
import papermill
import pytest
from reading_lessons import EVERY, FOLDER, answered, estimated_time, exercises, kind, play, stated_time

from eaglelab.lessons import LESSONS, arithmetic, branches, checking, conventions, incident, material
from eaglelab.lessons.checking import NotYet


@pytest.mark.parametrize("path", EVERY, ids=lambda p: p.stem)
def test_lesson_is_stripped_short_and_leads_on(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    assert first.startswith(f"# Lesson {path.stem[0]}: {LESSONS[path.stem]}\n")
    assert "**You will be able to**" in first
    assert abs(stated_time(notebook) - estimated_time(notebook)) <= 2.5
    linked = [FOLDER / name for name in re.findall(r"\]\(([\w/.]+)\)", last)]
    assert FOLDER / "README.md" in linked and all(p.exists() for p in linked)
    following = list(LESSONS)[list(LESSONS).index(path.stem) + 1 :][:1]
    assert all(FOLDER / f"{stem}.ipynb" in linked for stem in following)
    assert exercises(notebook)
    for cell in notebook.cells:
        assert not re.search(r"""["'(]/\w""", cell.source)  # no absolute paths
        drawn = "".join(re.findall(r"```text\n(.*?)```", cell.source, re.S))
        assert max(map(len, drawn.splitlines()), default=0) <= 72  # a longer line wraps in JupyterLab
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
        if kind(cell) == "exercise":
            assert "raise NotImplementedError" in cell.source or re.search(r"[:=] \.\.\.", cell.source)
        elif cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 15
            defined = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
            assert not any(isinstance(n, defined) for n in ast.walk(ast.parse(cell.source)))


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


@pytest.mark.notebook
@pytest.mark.parametrize("path", EVERY, ids=lambda p: p.stem)
def test_every_cell_of_an_untouched_lesson_says_what_it_needs(path, monkeypatch):
    monkeypatch.setenv("EAGLELAB_SERVER_PYTHON", "no-such-python")
    names, later = {"__name__": "__main__"}, []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            try:
                exec(cell.source, names)
            except NotYet as said:
                later += [str(said)] * (kind(cell) == "code")
    assert all(re.match(r"This cell needs exercise \d\. ", said) for said in later)
    assert len(later) == {"1": 2, "3": 1, "5": 1, "6": 1}.get(path.stem[0], 0)


@pytest.mark.notebook
def test_in_a_kernel_the_answers_run_and_an_untouched_exercise_shows_words_alone(tmp_path):
    """What a reader sees: papermill runs a lesson with its answers, and stops at an untouched exercise."""
    path, out = FOLDER / "6_build_your_own_check.ipynb", tmp_path / "out.ipynb"
    whole = tmp_path / path.name
    nbformat.write(answered(nbformat.read(path, as_version=4)), whole)
    done = papermill.execute_notebook(whole, out, cwd=FOLDER, progress_bar=False)
    assert all(c.execution_count for c in done.cells if c.cell_type == "code")
    with pytest.raises(papermill.PapermillExecutionError, match="share is not written yet"):
        papermill.execute_notebook(path, out, cwd=FOLDER, progress_bar=False)
    (error,) = [
        o for c in nbformat.read(out, 4).cells for o in c.get("outputs", []) if o.output_type == "error"
    ]
    assert error.traceback == ["Not yet. share is not written yet: replace its `raise NotImplementedError`."]


def test_what_the_text_says_of_the_figures_holds():
    """Sentences that were written with the shipped data in view, loaded as the lessons load them."""
    (_, right, _), *wrong = conventions.priced()
    assert any(length > right for _, length, _ in wrong) and all(length > 2 for _, length, _ in wrong)
    found = {(topk, nodes): length for topk, nodes, length, _ in branches.lengths()}
    assert max(found[2, 8], found[4, 8]) < found[1, 6] < found[4, 64]
    servers = material.figures()["measure"]["servers"]
    assert servers["EAGLE3 topk 4"]["accept_length"] < servers["EAGLE3"]["accept_length"]
    assert servers["EAGLE"]["accept_length"] < 1.05
    case = incident.start(server=False)
    assert incident.drafts_per_verify(case.counters) < 0.05 and incident.promised() > 3


def test_the_recording_is_of_the_shipped_models():
    """`record_again` says how to make it anew when this fails."""
    case = incident.start(server=False)
    assert case.live().count(">equal<") == 13 and "differs" not in case.live()
    assert '"/' not in json.dumps(case.capture.meta)  # no path of the machine that made it


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
    ("1", "m / (draft_tokens - 1)", "m / steps", "mind which of the two divides"),
    ("1", "(m + 1) / draft_tokens", "(m + 1) / (steps + 1)", "mind which of the two divides"),
    ("1", "return [v / sum(more) for v in more]", "return more[1:]", "each of the 6 tokens"),
    ("2", ".triu(1)", ".triu(0)", "nan or infinite"),
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
    ("3", "torch.equal(x, y)", "x.shape == y.shape and torch.allclose(x, y)", "Nearly equal"),
    ("3", 'head_belongs_to = "target"', 'head_belongs_to = "me"', 'is "drafter" or "target"'),
    ("3", "return dropped, unfilled", "return dropped", "returns two things"),
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
    ("4", "if ids[0] == 1 else 0", "if ids[0] <= 1 else 0", "The first id is 0"),
    ("4", "if max(ids) == n else 1", "if ids[-1] == n else 1", "wherever it stands"),
    ("4", "if max(ids) == n else 1", "if max(ids) >= n - 1 else 1", "n - 1"),
    ("4", "n // 2", "round(n / 2)", "should be"),
    ("4", ".median()", ".mean()", "odd rows"),
    ("4", ".median()", ".min()", "odd rows"),
    ("4", "return rows == drafts", "return abs(rows) == abs(drafts)", "should be"),
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
    ("6", "len(set(r)) == 1", "r[0] == r[1]", "the same token"),
    ("6", "for r in several) / len(several)", "for r in rounds) / len(rounds)", "left out"),
    ("6", 'REPEAT.skipped(evidence.why_not("capture"))', 'REPEAT.passed("0 rounds")', "never passed"),
    ("6", 'evidence.why_not("capture")', '"no capture"', "say why"),
    ("6", "    if not rounds:", "    if len(rounds) < -1:", "ZeroDivisionError"),
    ("6", "share(rounds) > 0.5", "share(rounds) > 0.2", "3 rounds of 10"),
    ("6", "rung=5", "rung=3", "Its rung is 5"),
    ("6", "in trace.rounds if", "in trace.rounds[:1] if", "rounds of 10"),
    ("6", "healthy.verdict", "healthy.outcome", "no attribute 'outcome'"),
    ("6", 'healthy.verdict == "passed"', 'healthy.verdict != "failed"', "skips a healthy"),
    ("6", '("check:drafts-repeat", "rung:5")', '"check:drafts-repeat"', "name what finds it"),
    ("6", 'in {share(rounds):.0%} of {len(rounds)} rounds, all drafts', "all drafts", "how many rounds"),
    ("6", 'and nothing.verdict == "skipped"', "", "no capture"),
    ("6", 'healthy.verdict == "passed" and told', "told", "on every capture"),
    ("6", "and bool(stuck.fix)", "", "what to do"),
    ("6", 'told = stuck.verdict == "failed" and bool(stuck.fix)', "told = True", "never fails"),
    ("6", '("check:drafts-repeat", "rung:5")', '("rung:5",)', "name what finds it"),
    ("6", '("capture", "replay")', '("capture", "gut feeling")', "signals are of"),
]  # fmt: skip


def with_other_words(lesson, right, other, monkeypatch):
    """(a check's cell, what it finds there): the answers' own code with one thing said in another way."""
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
            exec(code.replace(right, other), names)
            return check.source, names
        exec(code, names)
    pytest.fail(f"no answer of lesson {lesson} says {right!r}")


@pytest.mark.parametrize(("lesson", "right", "slip", "words"), SLIPS)
def test_a_slip_in_an_answer_is_named(lesson, right, slip, words, monkeypatch):
    check, names = with_other_words(lesson, right, slip, monkeypatch)
    with pytest.raises(NotYet, match=words):
        exec(check, names)


FORMS = [  # (lesson, what an answer says, another form of the same)
    ("1", "return choices[: kept + 1]", "return tuple(choices[: kept + 1])"),
    ("1", "return choices[: kept + 1]", "yield from choices[: kept + 1]"),
    ("1", "return choices[: kept + 1]", "return __import__('torch').tensor(choices[: kept + 1])"),
    ("1", "sum(c + 1 for c in correct) /", "__import__('fractions').Fraction(len(correct) + sum(correct)) /"),
    ("1", '"rate": m /', '"rate-older": 0.0, "rate": m /'),
    ("1", 'accept rate: 0.20": True', 'accept rate: 0.20": 1'),
    ("1", "[v / sum(more) for v in more]", "__import__('numpy').divide(more, sum(more), dtype='f4')"),
    ("2", "streams[5]], dim=-1)", "streams[5]], dim=-1).numpy()"),
    ("2", "return normed, normed", "return [normed, normed]"),
    ("2", "return drafts", "return torch.tensor(drafts)"),
    ("3", "return correct /", "return __import__('fractions').Fraction(correct) /"),
    ("3", "return dropped, unfilled", "return [set(dropped), tuple(unfilled)]"),
    ("3", "return found", "return {place: sorted(seen) for place, seen in found.items()}"),
    ("3", 'weights_untrained = "struck out"', 'weights_untrained = "Struck out."'),
    ("4", "return depth, depth == n", "return [depth, int(depth == n)]"),
    ("4", "return [i + plus for i in ids]", "return (i + plus for i in ids)"),
    ("4", "return rows == drafts", "return __import__('numpy').equal(rows, drafts)"),
    ("5", "return (accept_length - 1) /", "return __import__('fractions').Fraction(accept_length - 1) /"),
    ("5", "return found[1:]", "return tuple(map(tuple, found[1:]))"),
    ("5", "return rows", "return __import__('torch').tensor(rows).bool()"),
    ("5", "return committed", "return __import__('numpy').array(committed)"),
    ("5", "return [path for _, path in best]", "return {path for _, path in best}"),
]  # fmt: skip


@pytest.mark.parametrize(("lesson", "right", "other"), FORMS)
def test_a_right_answer_passes_in_any_form(lesson, right, other, monkeypatch):
    exec(*with_other_words(lesson, right, other, monkeypatch))


def test_a_loop_that_never_ends_is_told(monkeypatch):
    monkeypatch.setattr(checking, "PATIENCE", 0.5)
    check, names = with_other_words("1", "kept += 1", "pass", monkeypatch)
    with pytest.raises(NotYet, match="verify has not come back after"):
        exec(check, names)


@pytest.mark.parametrize("path", [*EVERY, FOLDER / "README.md"], ids=lambda p: p.stem)
def test_links_lead_somewhere(path):
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        source = "\n".join(c.source for c in nbformat.reads(source, 4).cells if c.cell_type == "markdown")
    relative = [link for link in re.findall(r"\]\(([^)#]+)\)", source) if not link.startswith("https://")]
    assert relative and all((FOLDER / link).exists() for link in relative)


def test_the_index_lists_every_lesson():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\[([^]]+)\]\((\w+)\.ipynb\)", text)
    times = [int(found) for found in re.findall(r"\| (\d+) min \|", text)]
    assert times == [stated_time(nbformat.read(path, as_version=4)) for path in EVERY]
    assert {stem: title for title, stem in linked} == LESSONS
    assert {p.stem for p in FOLDER.glob("*.ipynb")} == set(LESSONS)
