"""One tiny notebook per way of ending a run, and the exit code that a scheduler must see for it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eaglelab import errors, runs
from eaglelab.runner import run_notebook

pytestmark = pytest.mark.notebook
FIXTURES = Path(__file__).parent / "fixtures"


def run(name, out, parameters=None, **options):
    return run_notebook(FIXTURES / f"{name}.ipynb", parameters or {}, out, timeout=90, **options)


def kernels():
    """Those below this process; a JupyterLab of another test may have some."""
    return [p for p in psutil.Process().children(recursive=True) if "ipykernel" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("raises", 6, "the notebook stopped before its end: RuntimeError: this cell is broken"),
        ("raises_after_summary", 1, "the notebook stopped before its end: RuntimeError: this cell is broken"),
        ("sysexit0", 6, "the notebook stopped before its end: SystemExit: 0"),
        ("dies", 4, "the notebook's kernel died"),
        ("no_summary", 6, "the last line of report.jsonl is not the summary"),
        ("no_records", 6, "report.jsonl was not written"),
        ("attach_error", 3, "http://h:1: nothing listens there; start it, or correct --server"),
        ("bad_input", 2, "drafter/config.json: not JSON"),
    ],
)
def test_incomplete_runs_keep_the_partial_name(tmp_path, name, code, message):
    out = tmp_path / "run"
    outcome = run(name, out, {"server": "http://h:1"})
    assert outcome.exit_code == code
    assert message in outcome.message
    assert outcome.folder == tmp_path / "run.partial" and (outcome.folder / "report.ipynb").exists()
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "code", "message"), [("healthy", 0, "healthy"), ("broken_verdict", 1, "broken: no-events")]
)
def test_complete_runs_get_their_name(tmp_path, name, code, message):
    seen = []
    outcome = run(
        name, tmp_path / "run", {"repeats": 3}, finish=lambda folder: seen.append(sorted(os.listdir(folder)))
    )
    assert (outcome.exit_code, outcome.message, outcome.folder) == (code, message, tmp_path / "run")
    assert seen == [["kernel.log", "report.ipynb", "report.jsonl"]]
    assert sorted(os.listdir(tmp_path)) == ["run"]
    assert sorted(os.listdir(tmp_path / "run")) == ["report.ipynb", "report.jsonl"]
    assert "repeats = 3" in (tmp_path / "run/report.ipynb").read_text()


def test_hung_cell_is_timed_out(tmp_path):
    outcome = run("hangs", tmp_path / "run", cell_timeout=3)
    assert outcome.exit_code == 5 and "a cell ran out of time" in outcome.message


@pytest.mark.parametrize("timeout", [8, 3, 1])  # in the cell that hangs; as the kernel starts; before
def test_whole_run_is_timed_out_and_its_finally_blocks_run(tmp_path, timeout):
    earlier, started = set(kernels()), time.monotonic()
    outcome = run_notebook(FIXTURES / "hangs.ipynb", {}, tmp_path / "run", timeout=timeout)
    assert time.monotonic() - started < 30
    assert (outcome.exit_code, outcome.message) == (5, f"the run was stopped after {timeout} s")
    assert not (outcome.folder / "armed").exists()
    assert set(kernels()) <= earlier


def test_unknown_parameter_starts_no_kernel(tmp_path):
    with pytest.raises(errors.BadInput, match="has no parameter repeat; it has server, repeats"):
        run("healthy", tmp_path / "run", {"repeat": 2})
    assert list(tmp_path.iterdir()) == []


def test_occupied_folder_is_refused_and_earlier_partial_runs_are_kept(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run.partial").mkdir()
    (tmp_path / "run.partial/evidence").touch()
    assert run("healthy", tmp_path / "run").exit_code == 0  # an empty folder is fine
    assert (
        sorted(os.listdir(tmp_path)) == ["run", "run.partial"]
        and (tmp_path / "run.partial/evidence").exists()
    )
    with pytest.raises(errors.BadInput, match="exists and is not empty"):
        run("healthy", tmp_path / "run")


def test_the_key_reaches_the_kernel_and_no_artefact(tmp_path):
    key = "canary-6f1d"
    outcome = run("leaks_key", tmp_path / "run", api_key=key)
    assert outcome.exit_code == 0
    texts = [p.read_text() for p in outcome.folder.rglob("*") if p.is_file()]
    assert texts and not any(key in text for text in texts)
    assert "header: [redacted]" in (outcome.folder / "report.ipynb").read_text()


def test_surroundings_do_not_change_a_run(tmp_path, monkeypatch):
    """Another python3 kernel, start-up files and modules in the current folder are none of its business."""
    kernel = tmp_path / "jupyter/kernels/python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "x", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    startup = tmp_path / "ipython/profile_default/startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("import os; os._exit(1)")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    for name in ("papermill", "records"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert run("healthy", tmp_path / "run").exit_code == 0


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_the_kernel_and_keeps_the_partial_folder(tmp_path, signal_number):
    script = f"""
import signal
from pathlib import Path
from eaglelab import runner, runs
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    runner.run_notebook(Path({str(FIXTURES / "hangs.ipynb")!r}), {{}}, Path({str(tmp_path / "run")!r}))
except runs.Interrupted as stop:
    print(stop.folder)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    armed = tmp_path / "run.partial" / "armed"
    deadline = time.monotonic() + 60
    while not armed.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2 and armed.exists()
    process.send_signal(signal_number)
    out, _ = process.communicate(timeout=30)
    assert out.strip() == str(tmp_path / "run.partial")
    assert not any(p.is_running() for p in family)
    assert (
        not armed.exists() and not (tmp_path / "run").exists()
    )  # its `finally` ran; nothing passes for whole


def test_killed_parent_leaves_no_kernel(tmp_path):
    script = f"""
from pathlib import Path
from eaglelab import runner
runner.run_notebook(Path({str(FIXTURES / "hangs.ipynb")!r}), {{}}, Path({str(tmp_path / "run")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while not (tmp_path / "run.partial/armed").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(family, timeout=15)
    assert len(gone) >= 2 and alive == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 300 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_full_disk_is_told_and_nothing_passes_for_whole(small_disk):
    outcome = run("disk_full", small_disk / "run")
    assert outcome.exit_code == 6 and "No space left on device" in outcome.message
    assert os.listdir(small_disk) == ["run.partial"]


def test_full_disk_while_rendering(tmp_path):
    def finish(folder):
        raise OSError(28, "No space left on device")

    outcome = run("healthy", tmp_path / "run", finish=finish)
    assert (outcome.exit_code, outcome.folder) == (6, tmp_path / "run.partial") and not outcome.complete
    assert outcome.message == "the report could not be written: [Errno 28] No space left on device"
    assert os.listdir(tmp_path) == ["run.partial"]


def test_records_alone_do_not_make_a_run(tmp_path):
    """A whole report.jsonl beside a cell that never ran is no pass (papermill marks it `completed`)."""
    outcome = run("healthy", tmp_path / "run")
    path = outcome.folder / "report.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][-1]["execution_count"] = None
    path.write_text(json.dumps(notebook))
    judged = runs.judge(outcome.folder, {})
    assert judged.exit_code == 1 and not judged.complete and "1 of 3 code cells never ran" in judged.message
