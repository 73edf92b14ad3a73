"""Many runs as one page: accept length over time, a line for each set of prompts, versions marked.

Read from the records alone, so that a history can be made anywhere the run folders are copied to. Only runs
on the same prompts share a line: their accept lengths compare, others' do not. A mark stands where engine,
launch, drafter or eaglelab changed since the run before on that line, because a step in the line may come
from there.
"""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglelab import baseline, export, plots, runs
from eaglelab.errors import BadInput
from eaglelab.html import INK, Html, code, element, outcome, panel, table
from eaglelab.records import Measurement, Provenance, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = ("accept_length.rung5", "accept_length.server")  # the first that a run has
VERSIONS = (  # what a step of the line may come from -> where provenance says it
    ("engine", ("launch", "engine")),
    ("launch", ("launch", "flags")),
    ("drafter", ("drafter", "sha256")),
    ("eaglelab", ("eaglelab", "version")),
)


@dataclass(frozen=True)
class Run:
    """One finished run. `line`: server and prompts, the runs it compares with."""

    folder: Path
    time: datetime
    verdict: str
    fault: str | None
    line: str
    value: float | None
    interval: tuple[float, float] | None
    rounds: int | None
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class History:
    """Runs in order of time; `left_out`: folders that hold no finished run, and why."""

    runs: list[Run]
    left_out: dict[str, str]

    def changes(self, run: Run) -> list[str]:
        """What differs from the run before it on the same line."""
        before = [r for r in self.runs if r.line == run.line and r.time < run.time]
        if not before:
            return []
        then, now = dict(before[-1].versions), dict(run.versions)
        moved = [name for name in now if then.get(name) != now[name]]
        return ["{}: {} → {}".format(name, *baseline.unlike(then.get(name), now[name])) for name in moved]

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(r.line for r in self.runs))

    @property
    def marks(self) -> dict[Path, int]:
        """The runs at which something changed, numbered line by line."""
        changed = [r.folder for line in self.lines for r in self.runs if r.line == line and self.changes(r)]
        return {folder: number for number, folder in enumerate(changed, 1)}


def read(folder: Path) -> History:
    """Every finished run below `folder`. BadInput if there is none."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; name the one that holds your runs")
    found: list[Run] = []
    left_out: dict[str, str] = {}
    for file in sorted(folder.rglob(runs.RECORDS)):
        where = str(file.parent.relative_to(folder))
        if any(part.endswith(".partial") for part in file.parts):
            left_out[where] = "a run that did not finish"
            continue
        try:
            found.append(_run(file))
        except BadInput as error:
            left_out[where] = str(error)
    if not found:
        why = f" ({next(iter(left_out.values()))})" if left_out else ""
        raise BadInput(f"{folder}: no finished run lies in or below it{why}; make one with `eaglelab report`")
    return History(sorted(found, key=lambda r: r.time), left_out)


def _run(file: Path) -> Run:
    found = export.load(file)
    facts = next((r.facts for r in found if isinstance(r, Provenance)), {})
    named = {r.name: r for r in found if isinstance(r, Measurement) and r.value is not None}
    measured = next((named[name] for name in MEASURES if name in named), None)
    summary = found[-1]
    assert isinstance(summary, Summary)
    prompts = str(_at(facts, "capture", "prompts_sha256") or "none")[:8]
    source = (facts.get("parameters") or {}).get("server") or "captures"
    versions = tuple((name, _short(_at(facts, *path))) for name, path in VERSIONS)
    try:
        when = datetime.fromisoformat(str(facts.get("time")))
    except ValueError:
        raise BadInput(f"{file}: its provenance has no time; it is not a report of eaglelab") from None
    return Run(
        file.parent,
        when,
        summary.verdict,
        summary.fault,
        f"{source}, prompts {prompts}",
        measured.value if measured else None,
        measured.interval if measured else None,
        measured.count if measured else None,
        versions,
    )


def _at(facts: dict[str, Any], *path: str) -> Any:
    value: Any = facts
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _short(value: Any) -> str:
    text = str(value)
    digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return text[:12] if digest else text


def rows(history: History) -> list[dict[str, Any]]:
    """One object a run, for `--json`."""
    return [
        {
            "folder": str(r.folder),
            "time": r.time.isoformat(),
            "verdict": r.verdict,
            "fault": r.fault,
            "line": r.line,
            "accept_length": r.value,
            "interval": r.interval,
            "rounds": r.rounds,
            "changed": history.changes(r),
        }
        for r in history.runs
    ]


def figure(history: History) -> Figure:
    """Accept length over time, a line a set of prompts; numbered marks where a version changed."""
    import matplotlib.dates as dates

    figure, (axes,) = plots.blank(1, height=4.4)
    marks = history.marks
    for i, line in enumerate(history.lines):
        some = [r for r in history.runs if r.line == line]
        colour, marker, style = plots.SERIES[i % 7], plots.MARKERS[i % 7], plots.STYLES[i % 7]
        times = dates.date2num([r.time for r in some])
        values = [float("nan") if r.value is None else r.value for r in some]
        label = f"{line} ({_runs(some)})"
        axes.plot(times, values, label=label, color=colour, marker=marker, linestyle=style)  # type: ignore[arg-type]
        for x, r in zip(times, some, strict=True):
            if r.value is None:
                axes.plot(x, 1, "x", color=colour, markersize=9)
            elif r.interval:
                axes.plot((x, x), r.interval, color=colour, linewidth=1.5, alpha=0.6)
            if r.folder in marks:
                axes.axvline(x, color="#888888", linewidth=0.9, linestyle=":")
                top = (
                    r.interval[1] if r.interval else r.value
                ) or 1.0  # beside its own point: lines share nights
                axes.annotate(
                    str(marks[r.folder]), (x, top), xytext=(3, 3), textcoords="offset points", fontsize=9.5,
                    color=INK,
                )  # fmt: skip
    locator = dates.AutoDateLocator(minticks=2, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    axes.set_ylim(bottom=0.9)
    axes.set_xlabel("time of the run (UTC)")
    axes.set_ylabel("accept length: tokens per verify,\nbonus included (1 = nothing accepted)")
    axes.set_title("Accept length over time; whiskers are 95 % intervals", loc="left", fontsize=12, pad=10)
    axes.grid(axis="y", color="#d0d0d0", linewidth=0.6)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), frameon=False, fontsize=9.5)
    return figure


def page(history: History, folder: Path) -> str:
    """The history as one HTML page that reads offline, scripts off."""
    from eaglelab.page import shell

    picture = base64.b64encode(plots.png(figure(history))).decode()
    image = Html(f'<img alt="accept length over time" src="data:image/png;base64,{picture}">')
    body = [element("h1", f"eaglelab: {_runs(history.runs)} of {folder.absolute().name}"), image]
    body += [_table(history)]
    if history.left_out:
        body.append(table(("left out", "why"), list(history.left_out.items())))
    body.append(
        panel(
            "Make it again: ", code(shlex.join(["eaglelab", "history", str(folder), "--out", "history.html"]))
        )
    )
    return shell(f"eaglelab history of {folder.absolute().name}", "\n".join(map(str, body)))


def _runs(some: list[Run]) -> str:
    return f"{len(some)} run{'' if len(some) == 1 else 's'}"


def _table(history: History) -> Html:
    """The newest run first; the numbers are the figure's marks."""
    marks = history.marks
    body = []
    for r in reversed(history.runs):
        when = element("span", f"{r.time:%Y-%m-%d %H:%M}", style="white-space:nowrap")
        fault = element("div", r.fault, style="white-space:nowrap") if r.fault else ""
        length = "–" if r.value is None else f"{r.value:.3f}"
        length += f" ({r.interval[0]:.2f} to {r.interval[1]:.2f})" if r.interval else ""
        changed = f"{marks[r.folder]}: {'; '.join(history.changes(r))}" if r.folder in marks else None
        verdict = Html(outcome(r.verdict) + fault)
        body.append((when, verdict, length, r.rounds, changed, r.line, r.folder.name))
    head = ("time", "verdict", "accept length (95 %)", "rounds", "changed since the run before")
    caption = "newest first; only runs on the same server and prompts compare; numbers are the figure's marks"
    return table((*head, "server and prompts", "folder"), body, caption)
