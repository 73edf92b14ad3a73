"""05: what did the drafter see, think and choose in one round, as served and as trained?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eaglelab import charts, strip, tables
from eaglelab.errors import BadInput
from eaglelab.html import Html, lines, panel, verdict_box
from eaglelab.html import table as html_table
from eaglelab.workbook.book import Workbook

if TYPE_CHECKING:
    from eaglelab.steps import View
    from eaglelab.traces import Trace


def chosen(book: Workbook, request: str = "") -> Trace:
    """The request asked for, or the first that can be replayed. BadInput names those there are."""
    from eaglelab.misses import generations

    whole = [t for t in generations(book.capture) if t.state == "complete"] if book.capture else []
    if not whole:
        why = "none is complete" if book.capture else book.evidence.why_not("capture")
        raise BadInput(f"no request to step through: {why}")
    for trace in whole:
        if request in ("", trace.rid):
            return trace
    raise BadInput(f"request {request!r}: there is none; there are {', '.join(t.rid for t in whole)}")


def views(book: Workbook, request: str = "", number: int = 0) -> dict[str, View | str]:
    """The round under the "served" and the "trained" wiring, or why it cannot be drafted so."""
    key = f"views {request} {number}"
    if key not in book.kept:
        trace = chosen(book, request)
        if not 0 <= number < len(trace.rounds):
            raise BadInput(
                f"round_number {number}: request {trace.rid} has rounds 0 to {len(trace.rounds) - 1}"
            )
        book.kept[key] = {side: _view(book, trace, number, side) for side in ("served", "trained")}
    return book.kept[key]


def _view(book: Workbook, trace: Trace, number: int, side: str) -> View | str:
    import torch

    from eaglelab import steps
    from eaglelab.drafter import Drafter
    from eaglelab.simulate import reprefilled_text

    e = book.evidence
    if e.target is None or book.capture is None:
        return e.why_not("ladder")
    if e.served is None:
        return e.why_not("served")
    checkpoint, (feed, wiring) = (e.checkpoint, e.served) if side == "served" else (e.original, e.trained)
    try:
        drafter = Drafter(checkpoint, wiring, e.target, "cpu", getattr(torch, e.served[1].dtype))
        text = None
        if trace.features.shape[1] != feed.width:  # the rows as captured are of another feed
            if trace.rid not in book.capture.reprefill:
                return f"rows are {trace.features.shape[1]} wide, {feed.width} are needed, no re-prefill"
            text = reprefilled_text(book.capture.reprefill[trace.rid], feed, trace)
        return steps.view(book.capture, drafter, trace.rid, number, choices=5, text=text)
    except BadInput as error:
        return str(error)


def answer(book: Workbook, request: str = "", number: int = 0) -> Html:
    """What became of the round's drafts, and whether the trained wiring would have drafted the same."""
    try:
        trace = chosen(book, request)
        both = views(book, request, number)
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
            _quote(book, t) for t in (happened.draft_tokens[at], happened.committed[at])
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


def _quote(book: Workbook, token: int) -> str:
    text = book.word(token)
    return f"#{token}" if text is None else f"{text!r} (#{token})"


def request_strip(book: Workbook, request: str = "") -> Html:
    """Every round of the request as a token strip; hover for id, position and probability."""
    try:
        return strip.of_evidence(book.evidence, chosen(book, request).rid)
    except BadInput as error:
        return panel(str(error))


def candidates(book: Workbook, request: str = "", number: int = 0) -> Html:
    """Each draft step: its likeliest tokens under both wirings, beside the target's own choice."""
    try:
        both = views(book, request, number)
    except BadInput as error:
        return panel(str(error))
    shown = {side: v for side, v in both.items() if not isinstance(v, str)}
    if not shown:
        return panel(f"Not drafted again: {next(iter(both.values()))}")
    first = next(iter(shown.values()))
    rows: list[list[object]] = []
    for i, step in enumerate(first.steps):
        target = "not known" if step.target is None else _quote(book, step.target)
        fate = "accepted" if step.accepted else "rejected" if step.target is not None else "not reached"
        row: list[object] = [step.number, _quote(book, step.fed), target, fate]
        rows.append(row + [_choices(book, v.steps[i]) if i < len(v.steps) else None for v in shown.values()])
    head = ["step", "given token", "target's choice", "fate", *(f"likeliest as {side}" for side in shown)]
    words = "in bold: the token drafted; probability by the drafter, over its own vocabulary"
    return html_table(head, rows, f"Round {number}, draft step by draft step; {words}")


def _choices(book: Workbook, step: Any) -> Html:
    from eaglelab.html import element

    choices = step.choices or [(step.own, step.probability)]
    texts = [f"{_quote(book, token)}  {chance:.3f}" for token, chance in choices]
    bold = (element("b", t) if token == step.own else t for t, (token, _) in zip(texts, choices, strict=True))
    return lines(bold)


def stages(book: Workbook, request: str = "", number: int = 0) -> Any:
    """Norm of the first draft step's row at each stage of the drafter, under both wirings."""
    try:
        both = views(book, request, number)
    except BadInput as error:
        return panel(str(error))
    norms = {side: {} if isinstance(v, str) or not v.steps else v.steps[0].norms for side, v in both.items()}
    names = merged(list(norms["served"]), list(norms["trained"]))
    if not names:
        return panel("No stage was read: trees are drafted in one piece, and other reasons stand above.")
    sides = [[norms[side].get(name) for name in names] for side in ("served", "trained")]
    return book.figure("stages", charts.norms(names, *sides), "norm at each stage of the first draft step")


def merged(first: list[str], second: list[str]) -> list[str]:
    """The names of both, each list's order kept.

    >>> merged(["features", "embed", "norm"], ["features", "fc", "embed", "norm", "map"])
    ['features', 'fc', 'embed', 'norm', 'map']
    """
    out = list(first)
    after = 0
    for name in second:
        if name in out:
            after = out.index(name) + 1
        else:
            out.insert(after, name)
            after += 1
    return out


def wiring(book: Workbook) -> Html:
    """The fields in which the two wirings differ."""
    if book.evidence.served is None:
        return book.missing("served")
    return tables.wiring_table(book.evidence.differences)
