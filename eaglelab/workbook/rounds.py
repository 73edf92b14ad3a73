"""05: what did the drafter see, think and choose in one round, as served and as trained?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eaglelab import charts, strip, tables
from eaglelab.errors import BadInput
from eaglelab.html import Html, panel, verdict_box
from eaglelab.stepper import Stepper
from eaglelab.workbook import stops
from eaglelab.workbook.book import Workbook
from eaglelab.workbook.stops import quote

if TYPE_CHECKING:
    from eaglelab.steps import View


def model(book: Workbook, request: str = "", number: int = 0) -> Stepper:
    """The stepper's model at this round, one a book. BadInput names the requests and rounds there are."""
    if "stepper" not in book.kept:
        book.kept["stepper"] = Stepper(book.evidence)
    found: Stepper = book.kept["stepper"]
    found.go(request=request or found.requests[0].rid, number=number, stop=0)
    return found


def views(book: Workbook, request: str = "", number: int = 0) -> dict[str, View | str]:
    """The round under the "served" and the "trained" wiring, or why it cannot be drafted so."""
    return model(book, request, number).views


def answer(book: Workbook, request: str = "", number: int = 0) -> Html:
    """What became of the round's drafts, and whether the trained wiring would have drafted the same."""
    try:
        stepper = model(book, request, number)
        trace, both = stepper.trace, stepper.views
    except BadInput as error:
        return verdict_box("inconclusive", None, str(error)[:1].upper() + str(error)[1:] + ".")
    happened = trace.rounds[number]
    drafted = len(happened.draft_tokens)
    line = (
        f"Round {number} of {trace.rid}: {happened.accept_len - 1} of {drafted} drafts accepted, one bonus."
    )
    said = strip.fates(happened.draft_tokens, happened.parents, happened.committed)
    details = []
    if "rejected" in said and happened.parents is None:
        at = said.index("rejected")
        drafted_word, target_word = (
            quote(book.word, t) for t in (happened.draft_tokens[at], happened.committed[at])
        )
        details.append(
            f"At draft {at + 1} the server drafted {drafted_word}; the target chose {target_word}."
        )
    served, trained = both["served"], both["trained"]
    for side, view in both.items():
        if isinstance(view, str):
            details.append(f"As {side}: not drafted again: {view}")
    word = "inconclusive"
    if not isinstance(served, str):
        equal = [s.own == s.server for s in served.steps if s.server is not None]
        details.append(f"Drafted again as served: {sum(equal)} of {len(equal)} tokens equal the server's.")
        word = "passed" if all(equal) else "failed"
        if not isinstance(trained, str):
            same = [s.own for s in served.steps] == [s.own for s in trained.steps]
            kept = sum(s.accepted for s in trained.steps)
            details.append(f"As trained: {'the same drafts' if same else f'other drafts, {kept} accepted'}.")
            word = word if same else "failed"
    return verdict_box(word, None, line, details)


def request_strip(book: Workbook, request: str = "") -> Html:
    """Every round of the request as a token strip; hover for id, position and probability."""
    try:
        return strip.of_evidence(book.evidence, model(book, request).trace.rid)
    except BadInput as error:
        return panel(str(error))


def walk(book: Workbook, request: str = "", number: int = 0) -> Html:
    """The whole round, a fold a stop: what the stepper shows, without a kernel."""
    try:
        return stops.walk(model(book, request, number), book.word)
    except BadInput as error:
        return panel(str(error))


def verified(book: Workbook, request: str = "", number: int = 0) -> Html:
    """Every draft token on the target's text, beside the target's choice there, with both probabilities."""
    try:
        stepper = model(book, request, number)
    except BadInput as error:
        return panel(str(error))
    if not stops.drawn(stepper):
        return panel(f"Not drafted again: {next(iter(stepper.views.values()))}")
    return stops.verified(stepper, book.word)


def stages(book: Workbook, request: str = "", number: int = 0) -> Any:
    """Norm of the first draft step's row at each stage of the drafter, under both wirings."""
    try:
        both = views(book, request, number)
    except BadInput as error:
        return panel(str(error))
    norms = {side: {} if isinstance(v, str) or not v.steps else v.steps[0].norms for side, v in both.items()}
    names = stops.merged(list(norms["served"]), list(norms["trained"]))
    if not names:
        return panel("No stage was read; the reasons stand above.")
    sides = [[norms[side].get(name) for name in names] for side in ("served", "trained")]
    return book.figure("stages", charts.norms(names, *sides), "norm at each stage of the first draft step")


def wiring(book: Workbook) -> Html:
    """The fields in which the two wirings differ."""
    if book.evidence.served is None:
        return book.missing("served")
    return tables.wiring_table(book.evidence.differences)
