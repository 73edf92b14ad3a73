"""The fault bench itself: its cases are well formed, it can fail, and its subset without a server passes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from faultbench.cases import Bench, all_cases
from faultbench.judge import Outcome, required
from faultbench.run import main, run, run_case
from faultbench.table import markdown, read

from eaglelab.catalogue import faults

ROOT = Path(__file__).parents[2]


def case(name):
    return next(c for c in all_cases() if c.name == name)


@pytest.fixture
def bench(tmp_path):
    found = Bench(tmp_path / "bench")
    yield found
    found.close()


def outcome(kind="fault", ranks=(1,), name="a", slug="rope-theta", **more):
    about = {"rung": 4, "untouched": False, "server": "", "sweep": "", "note": "", **more}
    passed = kind != "healthy" and all(r == 1 for r in ranks)
    return Outcome(
        name=name, kind=kind, slugs=[slug] * len(ranks), ranks=list(ranks), **{"passed": passed, **about}
    )


def test_every_case_names_faults_of_the_catalogue():
    known, kinds = faults(), {"fault": 1, "pair": 2, "healthy": 0, "out-of-sight": 0}
    for one in all_cases():
        assert len(one.slugs) == kinds[one.kind] or one.kind == "out-of-sight", one.name
        for slug in one.slugs:
            assert all(name in known for name in slug.split("|") if slug), (one.name, slug)
            assert "|" not in slug or one.note or one.kind == "pair", f"{one.name}: why two names?"


def test_there_are_as_many_cases_as_are_required():
    found = all_cases()
    of = {kind: [c for c in found if c.kind == kind] for kind in ("fault", "pair", "healthy")}
    slugs = {c.slugs[0].split("|")[0] for c in of["fault"] if not c.server}
    assert len(slugs) >= 28 and len(of["pair"]) >= 12 and len(of["healthy"]) >= 20


def test_folders_that_diagnose_sees_say_nothing_of_the_case(bench):
    """Blind: no part of a path that it is given names the fault."""
    for name in ("rope-theta", "teacher-norm", "draft-vocab-coverage"):
        one = case(name)
        words = {word for word in name.split("-") if len(word) > 4}
        for given in one.inject(bench).inputs.values():
            if isinstance(given, Path) and not given.is_relative_to(ROOT):
                assert not any(word in str(given) for word in words), given


def test_a_wrong_expectation_is_missed_and_exit_code_is_1(bench, monkeypatch, tmp_path):
    """A case that expects another fault, and a "healthy" one that is broken, fail the bench."""
    real = case("norm-output")
    wrong = [
        replace(real, name="other-name", slugs=("rope-theta",)),
        replace(real, name="not-healthy", kind="healthy", slugs=()),
    ]
    for one in wrong:
        found = run_case(one, bench)
        assert not found.passed and found.named == ["norm-output"], one.name
        monkeypatch.setattr("faultbench.run.all_cases", lambda one=one: [one])
        assert main(["--out", str(tmp_path / one.name)]) == 1
    monkeypatch.setattr("faultbench.run.all_cases", lambda: [real])
    assert main(["--only", "norm-output", "--out", str(tmp_path / "right")]) == 0


def test_what_breaks_is_missed(bench):
    """An injection that breaks, and a diagnosis that breaks, are no success; neither stops the bench."""

    def breaks(bench):
        raise ValueError("no")

    broken = replace(case("norm-output"), inject=breaks)
    lines = []
    found = run([broken, broken], bench, lines.append)
    assert [o.passed for o in found] == [False, False] and "not injected" in found[0].error
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("outcomes", "missed"),
    [
        ([outcome(ranks=(1,)) for _ in range(3)], []),
        ([outcome(ranks=(2,), name=str(i)) for i in range(20)], ["first"]),
        ([outcome(name=str(i)) for i in range(19)] + [outcome(ranks=(3,), name="x")], []),
        ([outcome(name=str(i)) for i in range(40)] + [outcome(ranks=(4,), name="x")], ["first_three"]),
        ([outcome(ranks=(None,))], ["first", "first_three"]),
        # a sweep counts once, and only if all of it is found
        ([outcome(name=str(i), sweep="s") for i in range(9)] + [outcome(ranks=(2,), name="s")], ["first"]),
        ([outcome("pair", (1, 2), passed=True)] * 4 + [outcome("pair", (1, None))], []),
        ([outcome("pair", (1, 2), passed=True)] * 3 + [outcome("pair", (1, None))], ["pairs"]),
        ([outcome("healthy", (), passed=True)], []),
        ([outcome("healthy", (), passed=False)], ["false_alarms"]),
        ([outcome("out-of-sight", (), passed=False)], ["out_of_sight"]),
        ([outcome(relaunch=True, before=4.0, predicted=4.05)], []),
        ([outcome(relaunch=True, before=4.0, predicted=4.2)], ["prediction_median"]),
        ([outcome(relaunch=True, before=4.0, predicted=p) for p in (4, 4, 4.4)], ["prediction_worst"]),
        ([outcome(relaunch=True, before=4.0)], ["unpriced"]),
    ],
)
def test_rates(outcomes, missed):
    found = [r.name.removeprefix("faultbench.") for r in required(outcomes, whole=False) if not r.met]
    assert found == missed


def test_a_whole_run_asks_for_the_numbers_of_cases():
    found = {r.name for r in required([outcome()], whole=True) if not r.met}
    wanted = {"faults", "untouched", "genuine", "healthy", "pairs_run", "out_of_sight_run"}
    assert found == {f"faultbench.{name}" for name in wanted}


def test_records_and_table(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("faultbench.run.all_cases", lambda: [case_here, healthy])
    case_here, healthy = case("norm-output"), case("golden-capture")
    assert main(["--out", str(tmp_path)]) == 1  # a whole run wants more cases
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [lines[0]["type"], lines[-1]["type"]] == ["provenance", "summary"]
    assert lines[-1]["verdict"] == "broken" and lines[-1]["fault"] == "faultbench.faults"
    outcomes, measured, facts = read(tmp_path)
    assert facts["cases"] == 2
    assert [o.name for o in outcomes] == ["norm-output", "golden-capture"]
    assert outcomes[1].verdict == "healthy" and all(o.passed for o in outcomes)
    assert {m.name for m in measured} >= {"faultbench.first", "faultbench.false_alarms"}
    page = (tmp_path / "table.md").read_text()
    assert (
        page == markdown(outcomes, required(outcomes, True)) and "| ✓ | norm-output | ~4.49 | ~2.23 |" in page
    )


def test_parts_add_up(tmp_path, monkeypatch):
    """Runs of parts are one whole run together; a case that was run again counts as it came out last."""
    cases = [case("norm-output"), case("rope-theta")]
    monkeypatch.setattr("faultbench.run.all_cases", lambda: cases)
    wrong = [replace(cases[0], slugs=("rope-theta",)), cases[1]]
    for name, some in (("a", wrong), ("b", cases[:1])):
        monkeypatch.setattr("faultbench.run.all_cases", lambda some=some: some)
        main(["--no-server", "--out", str(tmp_path / name)])
    monkeypatch.setattr("faultbench.run.all_cases", lambda: cases)
    parts = [str(tmp_path / name) for name in "ab"]
    assert main(["--total", *parts, "--out", str(tmp_path / "sum")]) == 1  # fewer cases than a whole run's
    outcomes, measured, facts = read(tmp_path / "sum")
    assert [(o.name, o.passed) for o in outcomes] == [("norm-output", True), ("rope-theta", True)]
    assert facts["cases"] == 2 and len(facts["parts"]) == 2
    assert {m.name: m.value for m in measured}["faultbench.first"] == 1


def test_what_was_injected_is_kept(tmp_path, monkeypatch):
    """`--keep` injects once: a later run diagnoses the same folders and comes to the same table."""
    monkeypatch.setattr("faultbench.run.all_cases", lambda: [case("norm-output")])
    command = ["--no-server", "--keep", str(tmp_path / "kept"), "--out"]
    assert main([*command, str(tmp_path / "a")]) == 0

    def breaks(bench):
        raise AssertionError("injected twice")

    monkeypatch.setattr("faultbench.run.all_cases", lambda: [replace(case("norm-output"), inject=breaks)])
    assert main([*command, str(tmp_path / "b")]) == 0
    first, second = (read(tmp_path / name)[0][0] for name in "ab")
    assert first.model_copy(update={"seconds": 0}) == second.model_copy(update={"seconds": 0})


def test_help_and_an_unknown_case():
    """The command alone: --help needs no torch, an unknown case is exit code 2."""
    bench = [sys.executable, "tests/faultbench"]
    helped = subprocess.run([*bench, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert helped.returncode == 0 and "--only" in helped.stdout
    unknown = subprocess.run([*bench, "--only", "no-such"], cwd=ROOT, capture_output=True, text=True)
    assert unknown.returncode == 2 and "no case is named no-such" in unknown.stdout


@pytest.mark.timeout(900)
def test_the_fast_cases_without_a_server(tmp_path):
    """The part of FAST=1 that needs no server, as `make faultbench` runs it."""
    out = tmp_path / "out put"
    command = [sys.executable, "tests/faultbench", "--fast", "--no-server", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_kimi_files_are_diagnosed_without_torch(tmp_path):
    """`make inspectbench` in small: true shapes in sparse files; two seconds leave no time to load torch."""
    script = (
        "import sys, json; from pathlib import Path; sys.path.insert(0, 'tests/bench')\n"
        "import kimi_files as k\n"
        f"root = Path({str(tmp_path)!r}); (root / 'target.json').write_text(json.dumps(k.TARGET))\n"
        "path = k.sparse(root / 'model', k.LLAMA | {'draft_vocab_size': 32000}, k.shapes(32000))\n"
        "from eaglelab import diagnose\n"
        "found = diagnose.run(drafter=path, target=root / 'target.json', launch=k.FLAGS)\n"
        "print([f.fault for f in found.failed], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("'weights-not-sane'] False\n"), done.stdout + done.stderr
    assert (tmp_path / "model" / "model.safetensors").stat().st_blocks * 512 < 1 << 20


def test_the_page_without_a_run_says_what_makes_one(tmp_path):
    from faultbench.table import page

    assert "make faultbench" in page(tmp_path).data
