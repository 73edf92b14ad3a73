"""The recipes of docs/recipes do what they say: run as a scheduler would run them, on the shipped capture."""

import ast
import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from eaglelab.params import ReportParams

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "docs" / "recipes"
CAPTURE = ["--drafter", str(ROOT / "data/drafter-sglang"), "-p", f"capture={ROOT / 'data/golden-capture'}"]
CAPTURE += ["--target", str(ROOT / "data/target")]

pytestmark = pytest.mark.notebook


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `eaglelab` on its PATH, also as .venv/bin/eaglelab."""
    folder = tmp_path_factory.mktemp("a machine")
    (folder / ".venv/bin").mkdir(parents=True)
    command = folder / ".venv/bin/eaglelab"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m eaglelab.cli "$@"\n')
    command.chmod(0o755)
    return folder


def run(place, command, **more):
    path = f"{place / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)


def service():
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str
    found.read(RECIPES / "eaglelab-report.service")
    return found


@pytest.fixture(scope="module")
def nightly(place):
    """The service's own command, on a capture instead of a server, two nights running."""
    words = shlex.split(service()["Service"]["ExecStart"])
    assert words[0] == "/opt/eaglelab/docs/recipes/nightly.sh"
    server = words.index("--server")
    key = words.index("--api-key-file")
    (place / "key").write_text("secret-key-of-tonight\n")
    words[key + 1] = str(place / "key")
    del words[server : server + 2]
    words[words.index("--drafter") + 1] = CAPTURE[1]
    runs = place / "all runs"
    done = []
    for _ in range(2):
        done.append(run(place, [str(RECIPES / "nightly.sh"), str(runs), *words[2:], *CAPTURE[2:]]))
    return runs, done


def test_two_nights_leave_runs_results_a_baseline_and_a_history(nightly):
    runs, done = nightly
    assert [d.returncode for d in done] == [0, 0], done[-1].stderr
    folders = sorted(p for p in runs.iterdir() if p.is_dir())
    assert len(folders) == 2 and not list(runs.glob("*.partial"))
    assert (runs / "baseline").read_text().strip() == str(folders[0])
    second = ElementTree.parse(folders[1] / "junit.xml")
    names = {case.get("name") for case in second.iter("testcase")}
    assert "regression-against-baseline" in names
    assert "2 runs" in (runs / "history.html").read_text()
    assert not any("secret-key" in p.read_text(errors="replace") for p in runs.rglob("*") if p.is_file())


def test_a_report_that_cannot_start_says_so_and_leaves_nothing(place):
    runs = place / "bad runs"
    done = run(place, [str(RECIPES / "nightly.sh"), str(runs), "--drafter", "/nowhere"])
    assert done.returncode == 2 and "/nowhere does not exist" in done.stderr
    assert list(runs.iterdir()) == []


def test_units_are_valid(place, tmp_path):
    found = service()
    assert found["Service"]["Type"] == "oneshot"
    for unit in ("eaglelab-report.service", "eaglelab-report.timer"):
        text = (RECIPES / unit).read_text().replace("/opt/eaglelab/docs", str(tmp_path / "docs"))
        (tmp_path / unit).write_text(
            text.replace("WorkingDirectory=/opt/eaglelab", f"WorkingDirectory={ROOT}")
        )
    if shutil.which("systemd-analyze") is None or " " in str(tmp_path):
        return
    shutil.copytree(RECIPES, tmp_path / "docs" / "recipes")
    units = [str(tmp_path / "eaglelab-report.service"), str(tmp_path / "eaglelab-report.timer")]
    checked = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert checked.returncode == 0 and "eaglelab" not in checked.stderr, checked.stderr


def test_the_workflow_says_what_the_run_found(nightly, place):
    runs, _ = nightly
    workflow = yaml.safe_load((RECIPES / "github-actions.yml").read_text())
    steps = {step.get("name"): step for step in workflow["jobs"]["report"]["steps"]}
    report = shlex.split(steps["Report"]["run"])
    assert run(place, [*report[:2], "--help"]).returncode == 0
    known = set(re.findall(r"--[a-z-]+", run(place, [*report[:2], "--help"]).stdout))
    assert {word for word in report if word.startswith("--")} <= known
    shutil.copytree(next(p for p in runs.iterdir() if p.is_dir()), place / "run")
    summary = place / "summary.md"
    said = run(place, ["bash", "-e", "-c", steps["Say it"]["run"]], GITHUB_STEP_SUMMARY=str(summary))
    assert said.returncode == 0, said.stderr
    assert summary.read_text().startswith("## ✓ healthy")
    assert ElementTree.parse(place / "junit.xml").getroot().get("failures") == "0"
    assert "::notice title=" in said.stdout and "verdict: healthy" in said.stdout


def test_the_dag_gives_parameters_that_the_notebook_has():
    tree = ast.parse((RECIPES / "airflow_dag.py").read_text())
    calls = {c.func.id: c for c in ast.walk(tree) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
    given = {k.arg: k.value for k in calls["PapermillOperator"].keywords}
    assert {key.value for key in given["parameters"].keys} <= set(ReportParams.model_fields)
    assert "notebooks/regression_report.ipynb" in ast.unparse(given["input_nb"])
    assert (ROOT / "notebooks/regression_report.ipynb").exists()
    assert "--exit-code" in ast.unparse(calls["BashOperator"])


def test_the_cron_line_of_the_docs_is_the_service_s_command():
    text = (ROOT / "docs/scheduled-reports.md").read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("20 3 * * *"))
    words = shlex.split(line)[5:]
    unit = shlex.split(service()["Service"]["ExecStart"])
    assert words[:-1] == unit[:-1]
