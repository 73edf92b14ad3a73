"""Run a notebook to a folder and an exit code, whatever happens on the way.

papermill alone is not enough: a typo in a parameter runs the defaults, a hung cell hangs for ever, and files
are written in place (papermill 2.7.0 execute.py, engines.py). So it runs in a child process under a clock,
the kernel gets an environment of its own, and what is left behind is judged (`runs.judge`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from eaglelab import errors, runs
from eaglelab.progress import Progress

LAST_SECONDS = 20  # that a run which is stopped has to let go of its server


def run_notebook(
    notebook: Path,
    parameters: Mapping[str, Any],
    out: Path,
    *,
    timeout: float = 3600,
    cell_timeout: float | None = None,
    api_key: str | None = None,
    progress: Progress | None = None,
    finish: Callable[[Path], None] | None = None,
) -> runs.Outcome:
    """Run `notebook` with `parameters` (no secret among them); a complete run leaves its files in `out`.

    timeout, cell_timeout: seconds for the whole run and for one cell. api_key reaches the kernel as the
    environment variable EAGLELAB_API_KEY and no other way. finish(folder) renders a complete run before it
    gets its name. Raises BadInput before any kernel starts for unknown parameters or an `out` that holds
    something; Interrupted on Ctrl-C, after the kernel has been stopped.
    """
    check_parameters(notebook, parameters)
    runs.check_out(out)
    work = runs.partial_folder(out)
    key = api_key or os.environ.get("EAGLELAB_API_KEY")
    request = {"notebook": str(notebook), "out": str(work / runs.NOTEBOOK), "parameters": dict(parameters)}
    try:
        with tempfile.TemporaryDirectory(prefix="eaglelab-run-") as private:
            environment = _environment(Path(private), work, key)
            reply = _run_child(request | {"cell_timeout": cell_timeout}, work, environment, timeout, progress)
            outcome = runs.judge(work, reply)
    except TimeoutError:
        outcome = runs.Outcome(errors.TIMED_OUT, f"the run was stopped after {timeout:g} s", work)
    except KeyboardInterrupt:
        raise runs.Interrupted(work) from None
    finally:
        runs.redact(work, key)
    if not outcome.complete:
        return outcome
    try:
        if finish:
            finish(work)
        (work / runs.LOG).unlink()
        runs.place(work, out)
    except OSError as error:  # a full disk, or a folder that came into being meanwhile
        return runs.Outcome(errors.NO_SUMMARY, f"the report could not be written: {error}", work)
    return replace(outcome, folder=out)


def check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Refuse names that the notebook's `parameters` cell does not have (papermill only warns)."""
    from papermill import inspect_notebook

    known = inspect_notebook(str(notebook))
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise errors.BadInput(
            f"{notebook.name} has no parameter {', '.join(unknown)}; it has {', '.join(known)}"
        )


def _environment(private: Path, work: Path, key: str | None) -> dict[str, str]:
    """The kernel's environment: this interpreter's own kernel, no user start-up files, figures inline."""
    unwanted = (
        "MPLBACKEND",
        "JUPYTER_PATH",
    )  # `agg` would hide figures; another python3 kernel may lie there
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        (private / name).mkdir()
        environment[name] = str(private / name)
    environment |= {
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "EAGLELAB_HEADLESS": "1",
    }
    # the same eaglelab as here, and no module that happens to lie in the current folder
    mine = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [mine, os.environ.get("PYTHONPATH")]))
    environment["PYTHONSAFEPATH"] = "1"
    environment |= {"EAGLELAB_WORK": str(work), "EAGLELAB_PROGRESS": str(private / "progress")}
    return environment | ({"EAGLELAB_API_KEY": key} if key else {})


def _run_child(
    request: dict[str, Any],
    work: Path,
    environment: dict[str, str],
    timeout: float,
    progress: Progress | None,
) -> dict[str, str] | None:
    """papermill in a process of its own: its reply, or None when it died. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    told, news = 0, Path(environment["EAGLELAB_PROGRESS"])
    with open(work / runs.LOG, "wb") as log, _child_process(request, environment, log) as child:
        while child.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.1)
            told = _tell(news, told, progress)
        assert child.stdout is not None
        reply = child.stdout.read().splitlines()
    return json.loads(reply[-1]) if child.returncode == 0 and reply else None


@contextmanager
def _child_process(
    request: dict[str, Any], environment: dict[str, str], log: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The child, in a session of its own, so that Ctrl-C reaches it through us. No process outlives it.

    The kernel is interrupted first, so that its `finally` blocks run and disarm the server: again and again,
    because between two cells, and before the first, a kernel takes no notice. Then all are killed.
    """
    import psutil

    child = subprocess.Popen(
        [sys.executable, "-m", "eaglelab.runner", json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            process, family = psutil.Process(child.pid), set()
            with suppress(psutil.NoSuchProcess, KeyboardInterrupt):
                for _ in range(LAST_SECONDS):
                    family |= set(kernels := process.children(recursive=True))
                    for kernel in kernels:
                        kernel.send_signal(signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(1 if kernels else 0)
                        break
                    if not kernels:
                        break
            for member in [process, *family]:
                if member.is_running():
                    member.kill()
            child.wait()


def _tell(news: Path, told: int, progress: Progress | None) -> int:
    """Pass on the progress lines that the kernel has written since byte `told`; returns how far we are."""
    if progress is None or not news.exists():
        return told
    with open(news, "rb") as lines:
        lines.seek(told)
        for line in lines:
            if line.endswith(b"\n"):
                told += len(line)
                progress(*json.loads(line))
    return told


def _execute(request: dict[str, Any]) -> dict[str, str]:
    """In the child: papermill. What it raises is told by name; the notebook itself is judged."""
    import ctypes

    from papermill import execute_notebook

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the parent; the kernel follows
    try:
        execute_notebook(
            request["notebook"],
            request["out"],
            request["parameters"],
            kernel_name="python3",
            progress_bar=False,
            execution_timeout=request["cell_timeout"],
        )
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)[:2000]}
    return {}


if __name__ == "__main__":
    print(json.dumps(_execute(json.loads(sys.argv[1]))))
