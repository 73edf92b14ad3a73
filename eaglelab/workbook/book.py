"""A workbook: a report whose pieces are shown one question at a time.

Nothing given: the capture that comes with the checkout (data/golden-capture). A server is captured first; if
it can be reached but not captured (no plugin), what can be said without a capture is said, and the rest says
why not.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, model_validator

from eaglelab import plots, report, strip
from eaglelab.errors import AttachError
from eaglelab.html import Html, code, panel
from eaglelab.params import ReportParams

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.diagnose import Diagnosis
    from eaglelab.evidence import Evidence

NOTEBOOKS = {
    "01_start_here": "Can I look into this server, or this capture?",
    "02_what_is_my_drafter_fed": "What is my drafter fed?",
    "03_is_my_checkpoint_what_the_engine_thinks": "Is my checkpoint what the engine thinks it is?",
    "04_where_is_acceptance_lost": "Where is acceptance lost?",
    "05_step_by_step": "What did the drafter see, think and choose in one round?",
    "06_which_fix_pays": "Which fix pays?",
    "07_compare_two_captures": "What moved between two captures?",
    "regression_report": "Does this server accept what the drafter's training promised?",
}


class BookParams(ReportParams):
    """A report's parameters; files and flags alone (no server, no capture) are enough too."""

    engine: str = Field(
        "", description="the engine and release to believe; empty: what the server says, else 0.5.23"
    )

    @model_validator(mode="after")
    def _enough(self) -> BookParams:
        if self.server and self.capture:
            raise ValueError("give one of server (to capture it) and capture (recorded earlier)")
        if not self.drafter:
            raise ValueError("give drafter, the folder of the drafter's checkpoint")
        if not (self.server or self.capture or self.launch):
            raise ValueError("give a server, a capture, or launch: the SGLang flags that it is served with")
        return self


def book_params(namespace: Mapping[str, Any]) -> BookParams:
    """The parameters among a notebook's names; the shipped capture where nothing says what to look at."""
    given = {name: namespace[name] for name in BookParams.model_fields if name in namespace}
    if not any(given.get(name) for name in ("server", "capture", "drafter")):
        from eaglelab.serve import data_dir

        data = data_dir()
        given |= {"capture": str(data / "golden-capture"), "drafter": str(data / "drafter-sglang")}
        for name in ("target", "features"):
            given[name] = given.get(name) or str(data / name)
    return cast(BookParams, BookParams.checked(given))


def open_book(namespace: Mapping[str, Any]) -> Workbook:
    """For notebooks: `open_book(globals())`. The key comes from EAGLELAB_API_KEY."""
    book = read_book(book_params(namespace))
    book.own = {n: v for n, v in book.params.given().items() if namespace.get(n)}
    return book


def read_book(params: BookParams) -> Workbook:
    """Gather what the parameters ask for."""
    folder, key = report.run_folder(params), os.environ.get(report.KEY)
    try:
        with report.told(bool(params.server)) as say:
            return Workbook(params, folder, report.gather(params, folder, key, say))
    except AttachError as error:
        if not params.server:
            raise
        return Workbook(params, folder, _without_capture(params, key, str(error)))


def _without_capture(params: BookParams, key: str | None, why: str) -> Diagnosis:
    """The static side of a server that answers but cannot be captured; AttachError if it does not answer."""
    from eaglelab import diagnose, gather
    from eaglelab.server import Server

    with Server(params.server, key) as server:
        launch = server.require_speculation().launch
    flags = params.launch or launch.command()
    found = diagnose.run(drafter=params.drafter, target=params.target, features=params.features, launch=flags)
    missing = found.evidence.missing
    missing |= {part: why for part, reason in missing.items() if reason == gather.NO_CAPTURE}
    return diagnose.conclude(found.evidence)


class Workbook(report.Report):
    """What the modules of this package read. Figures are shown, not saved."""

    @cached_property
    def own(self) -> dict[str, object]:
        """The parameters that the notebook was given itself, for `again`."""
        return self.params.given()

    @cached_property
    def kept(self) -> dict[str, Any]:
        """Results that several pieces share."""
        return {}

    def figure(self, name: str, figure: Any, alt: str) -> Any:
        from IPython.display import Image

        return Image(data=plots.png(figure), format="png", alt=alt)

    @property
    def evidence(self) -> Evidence:
        return self.found.evidence

    @property
    def capture(self) -> Capture | None:
        return self.found.evidence.capture

    def missing(self, part: str = "capture") -> Html:
        """What stands in the place of a piece that cannot be shown."""
        return panel(f"Not shown: {self.evidence.why_not(part)}")

    @property
    def diagnosis(self) -> str:
        """Verdict, fault and fix by everything that could be measured, in a line."""
        fault = f": {self.found.fault}" if self.found.fault else ""
        fix = next((f" Fix: {f.fix}" for f in self.found.failed if f.fix), "")
        return f"The whole diagnosis: {self.found.verdict}{fault}.{fix}"

    @cached_property
    def word(self) -> Any:
        """Token id -> text or None."""
        return strip.words(self.evidence)

    def label(self, ids: Sequence[int], most: int = 28) -> str:
        """The end of a text, in words where there is a tokenizer."""
        text = "".join(self.word(t) or f" #{t}" for t in ids[-16:])
        return "…" + " ".join(text.split())[-most:]

    def again(self, notebook: str, **more: object) -> Html:
        """The command that makes this page again; `more`: the notebook's own parameters."""
        return again(notebook, {**self.own, **more})


def again(notebook: str, given: Mapping[str, object]) -> Html:
    """The command that makes a page again, with the parameters that are not empty."""
    words = ["papermill", f"notebooks/{notebook}.ipynb", "again.ipynb"]
    for name, value in given.items():
        words += ["-p", name, str(value)] if value != "" else []
    return panel("Make it again: ", code(shlex.join(words)))
