"""A run's folder and how it ended.

A run works in `OUT.partial` and is renamed to OUT only when it is complete: no cell failed, every code cell
ran, and the last record is the summary. papermill alone tells none of this: `sys.exit(0)` in a cell is a
success to it, and cells that never ran are marked completed (papermill 2.7.0 execute.py, engines.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eaglelab import errors, records
from eaglelab.html import printable

NOTEBOOK, RECORDS, PAGE, LOG = "report.ipynb", "report.jsonl", "report.html", "kernel.log"


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `folder`: OUT after a complete run, else the `.partial` folder."""

    exit_code: int
    message: str
    folder: Path
    summary: records.Summary | None = None

    @property
    def complete(self) -> bool:
        return self.summary is not None and self.exit_code in (errors.HEALTHY, errors.NOT_HEALTHY)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during a run; `folder` keeps what there is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"interrupted; what there is lies in {folder}")
        self.folder = folder


def check_out(out: Path) -> None:
    """Refuse an output folder that holds something, so that no run is mixed with another."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise errors.BadInput(f"--out {out}: exists and is not empty; name another folder or remove it")


def partial_folder(out: Path) -> Path:
    """Make a fresh folder beside `out` to work in. Earlier partial runs are left alone."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        work = out.with_name(f"{out.name}{'' if number == 1 else f'-{number}'}.partial")
        try:
            work.mkdir()
            return work
        except FileExistsError:
            continue
    raise errors.BadInput(f"--out {out}: a thousand partial runs lie beside it; remove them")


def place(work: Path, out: Path) -> None:
    """Give a complete run its name: one rename, or file by file where `out` is a mount point."""
    try:
        os.rename(work, out)
    except OSError:
        if not out.is_dir():
            raise
        check_out(out)
        for name in sorted(
            os.listdir(work), key=lambda name: name == RECORDS
        ):  # the records last: "complete"
            shutil.move(str(work / name), str(out / name))
        work.rmdir()


def redact(folder: Path, secret: str | None) -> None:
    """Nothing should have put the key into a text file; if a traceback or a server's echo did, take it out.

    A file that cannot be cleaned is removed.
    """
    for path in folder.rglob("*") if secret else ():
        if secret and path.is_file() and path.suffix in (".ipynb", ".jsonl", ".json", ".html", ".log"):
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            if secret in text:
                try:
                    clean = text.replace(secret, "[redacted]")
                    path.write_text(clean, encoding="utf-8", errors="surrogateescape")
                except OSError:
                    path.unlink()


def judge(work: Path, reply: Mapping[str, str] | None) -> Outcome:
    """Decide the exit code from what a run left in `work`.

    reply: {} when papermill came to its end, {"error": class, "message": text} when it raised, None when it
    died.
    """
    summary, missing = _summary(work / RECORDS)

    def ended(code: int, message: str) -> Outcome:
        return Outcome(code, message, work, summary)

    raised = "" if reply is None else reply.get("error", "")
    message = "" if reply is None else reply.get("message", "")
    if reply is None or raised in (
        "DeadKernelError",
        "RuntimeError",
    ):  # the latter: "Kernel died before replying"
        return ended(errors.KERNEL_DIED, f"the notebook's kernel died{_last_line(work / LOG)}")
    if raised == "CellTimeoutError":
        return ended(errors.TIMED_OUT, f"a cell ran out of time: {printable(message)}")
    told_by_cell = raised in ("", "PapermillExecutionError")
    error = _notebook_error(work / NOTEBOOK) if told_by_cell else (raised, printable(message))
    if error:
        known = getattr(errors, error[0], None)
        if isinstance(known, type) and issubclass(known, errors.EaglelabError):
            return ended(known.exit_code, error[1])
        code = errors.NOT_HEALTHY if summary else errors.NO_SUMMARY
        return Outcome(code, f"the notebook stopped before its end: {error[0]}: {error[1]}", work)
    if summary is None:
        return ended(errors.NO_SUMMARY, f"the notebook finished without a summary record: {missing}")
    code = errors.HEALTHY if summary.verdict == "healthy" else errors.NOT_HEALTHY
    return ended(code, summary.verdict + (f": {summary.fault}" if summary.fault else ""))


def _summary(path: Path) -> tuple[records.Summary | None, str]:
    """The last record if it is a summary, else None and why not."""
    if not path.exists():
        return None, f"{path.name} was not written"
    try:
        found = records.read(path)
    except ValueError as error:
        return None, str(error)
    if found and isinstance(found[-1], records.Summary):
        return found[-1], ""
    return None, f"the last line of {path.name} is not the summary"


def _notebook_error(path: Path) -> tuple[str, str] | None:
    """(class, message) of the first thing that kept the notebook from running to its end, or None."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return type(error).__name__, f"{path.name} cannot be read: {error}"
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    for cell in cells:
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                return output["ename"], printable(re.sub(r"\x1b\[[0-9;]*m", "", output["evalue"]))
    if notebook["metadata"].get("papermill", {}).get("exception") is not None:
        return "Exception", "papermill recorded one"
    silent = [c for c in cells if c["execution_count"] is None and "".join(c["source"]).strip()]
    return ("Incomplete", f"{len(silent)} of {len(cells)} code cells never ran") if silent else None


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    return f" ({printable(text.splitlines()[-1])})" if text else ""
