"""A report: one diagnosis, its records, and the pieces that a notebook shows of it.

Records come first: every piece is drawn from the diagnosis that `finish` writes to report.jsonl. A notebook
calls `measure`, shows the pieces it wants, and calls `finish` in its last cell; a run that did not reach its
last cell has no summary and passes for nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglelab import baseline, plots, provenance, records, runs, strip, tables
from eaglelab.errors import BadInput
from eaglelab.html import Html, code, panel, printable, verdict_box
from eaglelab.params import ReportParams
from eaglelab.progress import Progress, quiet, teller
from eaglelab.turn import turn

if TYPE_CHECKING:
    from eaglelab.diagnose import Diagnosis

CHECKOUT = Path(__file__).resolve().parent.parent
KEY = "EAGLELAB_API_KEY"


def notebook() -> Path:
    """The report's notebook; it comes with the checkout."""
    path = CHECKOUT / "notebooks" / "regression_report.ipynb"
    if not path.exists():
        raise BadInput(
            f"{path} is not there: reports run from a checkout (install it with `pip install -e .`)"
        )
    return path


def run(
    params: ReportParams,
    *,
    timeout: float = 3600,
    wait: float = 0,
    api_key: str | None = None,
    progress: Progress | None = None,
) -> runs.Outcome:
    """Run the notebook headless, alone on its server: `wait` seconds for another report's turn to end.

    A complete run leaves report.jsonl, report.html, report.ipynb and capture/ in `params.out` (default: runs/
    and the time).
    """
    from eaglelab.page import render
    from eaglelab.runner import run_notebook

    out = run_folder(params)
    runs.check_out(out)
    title = f"eaglelab report {out.name}"
    until = time.monotonic() + wait
    with turn(params.server, wait, progress or quiet):
        left = max(0.0, until - time.monotonic())
        preflight(params, api_key or os.environ.get(KEY), left, progress or quiet)
        return run_notebook(
            notebook(),
            params.model_dump() | {"out": str(out)},
            out,
            timeout=timeout,
            api_key=api_key,
            progress=progress,
            finish=lambda folder: render(folder / runs.NOTEBOOK, folder / runs.PAGE, title),
        )


def run_folder(params: ReportParams) -> Path:
    """Where this run's files go: as asked, else runs/ and the time (UTC)."""
    stamp = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
    return Path(params.out) if params.out else Path("runs").absolute() / stamp


def preflight(params: ReportParams, key: str | None, wait: float = 0, say: Progress = quiet) -> None:
    """Everything that can be refused in a second is refused before a kernel starts.

    wait: seconds for another capture of this server, from whatever machine, to end.
    """
    from eaglelab.capture import open_capture
    from eaglelab.checkpoint import open_checkpoint, open_target
    from eaglelab.features import StoredFeatures
    from eaglelab.prompts import load_prompts
    from eaglelab.server import Server

    if params.baseline:
        baseline.load(Path(params.baseline))
    drafter = open_checkpoint(params.drafter, params.dialect or None)
    if params.target:
        drafter.check_target(open_target(params.target).facts)
    if params.prompts:
        load_prompts(params.prompts)
    if params.features:
        StoredFeatures.open(params.features, strict=False, allow_pickle=params.allow_pickle)
    if params.capture:
        open_capture(params.capture)
    if params.server:
        with Server(params.server, key) as server:
            server.wait_until_free(server.require_speculation(), wait, say)


def gather(params: ReportParams, folder: Path, key: str | None, progress: Progress) -> Diagnosis:
    """The diagnosis that `params` ask for; a capture of its server goes to folder/capture."""
    from eaglelab import diagnose
    from eaglelab.server import Server

    asked = params.model_dump(exclude={"server", "baseline", "out"})
    server = Server(params.server, key) if params.server else None
    return diagnose.run(server=server, out=folder, progress=progress, **asked)


def measure(params: ReportParams) -> Report:
    """For notebooks: gather, and compare with the baseline. The key comes from EAGLELAB_API_KEY."""
    folder = Path(os.environ.get("EAGLELAB_WORK") or run_folder(params))
    folder.mkdir(parents=True, exist_ok=True)
    with told() as say:
        return Report(params, folder, gather(params, folder, os.environ.get(KEY), say))


@contextlib.contextmanager
def told(asked: bool = True) -> Iterator[Progress]:
    """Progress of what takes long: in a notebook a line above the answer, which is gone when it comes.

    asked: whether there is a server to wait for; what is only read takes seconds and says nothing.
    """
    kernel = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not asked or os.environ.get("EAGLELAB_PROGRESS") or not hasattr(kernel, "kernel"):
        yield teller() if asked else quiet
        return
    from IPython.display import clear_output, display

    line = display(panel("…"), display_id=True)

    def say(what: str, done: int = 0, of: int = 0) -> None:
        line.update(panel(f"{what}: {done} of {of}" if of else f"{what} …"))

    try:
        yield say
    finally:
        clear_output(wait=True)


@dataclass
class Report:
    """What a notebook shows, piece by piece, and writes down at its end."""

    params: ReportParams
    folder: Path
    found: Diagnosis
    movements: list[baseline.Movement] = field(default_factory=list)
    figures: list[records.Figure] = field(default_factory=list)

    def __post_init__(self) -> None:
        facts = provenance.facts(self.params, self.found)
        if self.params.baseline:
            before = baseline.load(Path(self.params.baseline))
            self.movements = baseline.compare(before, self.found.measurements)
            changed = baseline.conditions(before, facts)
            self._weigh(baseline.finding(self.movements, self.params.baseline, changed))
        self.found.facts = facts

    def _weigh(self, extra: records.Finding) -> None:
        """A regression makes a run broken; the fault that was found without it keeps its name."""
        broken = extra.verdict == "failed"
        self.found = replace(
            self.found,
            findings=[*self.found.findings, extra],
            verdict="broken" if broken else self.found.verdict,
            fault=self.found.fault or (extra.fault if broken else None),
        )

    # -- pieces, in the order of the page

    def verdict(self) -> Html:
        """Verdict, fault, what to do, and the accept lengths that say how bad it is."""
        headline, details = self._verdict_lines()
        return verdict_box(self.found.verdict, self.found.fault, headline, [*details, self._what_and_when()])

    def _what_and_when(self) -> str:
        """Which server, drafter and launch this page is about, and when it was made."""
        facts, launch = self.found.facts, self.found.evidence.launch
        source = self.params.server or self.params.capture or "files and flags"
        shape = f"{launch.steps} steps, topk {launch.topk}, {launch.draft_tokens} draft tokens"
        how = f"{launch.algorithm}, {shape}, TP {launch.tp_size}"
        when = facts["time"].replace("T", " ").replace("+00:00", " UTC")
        return f"{source}; drafter {self.params.drafter}; {facts['launch']['engine']}, {how}; {when}"

    def _verdict_lines(self) -> tuple[str, list[object]]:
        found, values = self.found, self.values
        details: list[object] = []
        if found.verdict == "healthy":
            skipped = sum(f.verdict == "skipped" for f in found.findings)
            headline = "The server drafts what training promised: "
            headline += f"no check failed{f', {skipped} skipped' if skipped else ''}."
        elif found.verdict == "inconclusive":
            headline = "Nothing failed, but what is needed to call it healthy could not be measured:"
            reasons: dict[str, list[str]] = {}
            for m in found.measurements:
                if m.value is None:
                    reasons.setdefault(m.reason or "", []).append(m.name)
            details += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
            details += [f"{f.fault}: {'; '.join(f.evidence)}" for f in found.missing]
        else:
            first = found.failed[0]
            headline = first.title[:1].upper() + first.title[1:] + "."
            if first.fix:
                details.append(Html("Fix: " + code(first.fix)))
            if first.predicted_accept_length is not None:
                details.append(f"Accept length to expect after the fix: {first.predicted_accept_length:.2f}")
        names = (
            ("accept_length.rung5", "accept length now"),
            ("accept_length.server", "by the server's own counters"),
            ("accept_rate.old_style", "which an older server prints as an accept rate of"),
        )
        told = [f"{words} {values[name]:.2f}" for name, words in names if values.get(name) is not None]
        if told:
            details.append("; ".join(told)[:1].upper() + "; ".join(told)[1:])
        return headline, details

    def ladder(self) -> Any:
        """The ladder as a figure."""
        figure = plots.ladder(plots.bars(self.found.ladder), self.found.evidence.launch.steps + 1)
        return self.figure("ladder", figure, "accept length per rung")

    def acceptance(self) -> Any:
        """Acceptance per draft position, a line a rung."""
        figure = plots.acceptance(plots.bars(self.found.ladder))
        return self.figure("acceptance", figure, "acceptance per draft position")

    def sites(self) -> Html:
        """Width of what is fed at each site, and the depth of each chunk of it."""
        evidence = self.found.evidence
        return Html(tables.sites_table(evidence) + tables.depths_table(evidence))

    def wiring(self) -> Html:
        """Where training and serving differ, by files and flags alone."""
        evidence = self.found.evidence
        if evidence.served is None:
            return panel(f"This engine would not serve the drafter: {evidence.why_not('served')}")
        return tables.wiring_table(evidence.differences)

    def chunks(self) -> Any:
        """Statistics of the hidden states per chunk, as a figure."""
        found = self.chunk_stats()
        if not found:
            return panel(f"No statistics: {self.found.evidence.why_not('stats')}")
        return self.figure("chunks", plots.chunks(found), "row norms and values of each chunk")

    def chunks_table(self) -> Html:
        """The same in numbers."""
        return tables.chunks_table(self.chunk_stats())

    def chunk_stats(self) -> list[Any]:
        """Chunk statistics, under the names that the chunks were recognised by."""
        evidence = self.found.evidence
        stats, named = evidence.stats, evidence.depths.chunks if evidence.depths else ()
        found = [stats.chunk(i) for i in range(stats.chunks)] if stats else []
        places = [f" ({c.place})" if c.match != "none" else "" for c in named] or [""] * len(found)
        return [replace(c, name=c.name + place) for c, place in zip(found, places, strict=False)]

    def steps(self) -> Html:
        """One prompt replayed round by round."""
        return strip.of_evidence(self.found.evidence)

    def findings(self) -> Html:
        """Every finding, failed ones first."""
        return tables.findings_table(self.found.findings)

    def comparison(self) -> Html:
        """What moved since the baseline."""
        if not self.params.baseline:
            return panel("No baseline was given (--baseline DIR).")
        return tables.comparison_table(self.movements, self.params.baseline)

    def measurements(self) -> Html:
        """Every number with its definition; before them, what the trainer's accuracy is worth."""
        found = self.found.measurements
        return Html(tables.accuracy_table(found) + tables.measurements_table(found))

    def provenance(self) -> Html:
        """Where it came from, and the command that makes it again."""
        return Html(
            panel("Make it again: ", code(self.params.command()))
            + tables.facts_table(self.found.facts, folded=("server",))
        )

    # -- the end

    def finish(self) -> Html:
        """Write report.jsonl, the summary last."""
        path, summary = self.folder / runs.RECORDS, self.found.summary()
        found = [*self.found.records()[:-1], *self.figures, summary]
        records.write(path, _writable(found))
        return panel(f"{path.name}: {len(found)} records; verdict {summary.verdict}")

    @cached_property
    def values(self) -> dict[str, float | None]:
        return {m.name: m.value for m in self.found.measurements}

    def figure(self, name: str, figure: Any, alt: str) -> Any:
        """Save a figure beside the records, note it as one, and hand it to the notebook as a picture."""
        from IPython.display import Image

        picture = plots.png(figure)
        path = self.folder / "figures" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture)
        self.figures.append(
            records.Figure(name=name, path=f"figures/{path.name}", command=self.params.command())
        )
        return Image(data=picture, format="png", alt=alt)


def _writable(found: Iterable[Any]) -> list[Any]:
    """Records whose texts can be written as UTF-8 and read in a terminal: see `html.printable`."""
    return [type(record).model_validate(_clean(record.model_dump())) for record in found]


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, (list, tuple)) else value
