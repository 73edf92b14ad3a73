"""04: where is acceptance lost?"""

from __future__ import annotations

from typing import Any

from eaglelab import charts, tables
from eaglelab.html import Html, table, verdict_box
from eaglelab.misses import PromptLoss, along_text, per_prompt, per_token
from eaglelab.workbook.book import Workbook

FROM = {"training": ("1", "2"), "feed": ("2", "3.stored"), "wiring": ("3", "4"), "runtime": ("4", "5")}


def answer(book: Workbook) -> Html:
    """The rung where acceptance is lost, what every rung lost, and which could not be measured."""
    ladder = book.evidence.ladder
    if ladder is None:
        why = book.evidence.why_not("ladder")
        return verdict_box("inconclusive", None, f"No ladder was climbed: {why}")
    details = [
        f"{name} (rung {FROM[name][0]} to {FROM[name][1]}): {drop.upper:.2f} to {drop.lower:.2f} tokens per "
        f"verify, {_interval(drop.interval)}"
        for name, drop in ladder.drops.items()
    ]
    details += [f"Rung {n} was not measured: {r.reason}" for n, r in ladder.rungs.items() if r.rounds is None]
    details.append(book.diagnosis)
    if ladder.failed:
        return verdict_box("failed", None, f"Lost to {' and '.join(ladder.failed)}.", details)
    unsure = [name for name, drop in ladder.drops.items() if drop.failed is None and drop.share > 0.05]
    if unsure:
        line = f"A loss to {' and '.join(unsure)} that noise may explain: capture more prompts."
        return verdict_box("inconclusive", None, line, details)
    if ladder.rungs["4"].rounds is None or ladder.rungs["5"].rounds is None:
        line = "No drop was seen, but the rungs that tell could not be measured."
        return verdict_box("inconclusive", None, line, details)
    return verdict_box("passed", None, "Nowhere: no rung loses more than noise and 5 %.", details)


def _interval(found: tuple[float, float] | None) -> str:
    if found is None:
        return "too few stretches of text for an interval"
    return f"95 % interval of the loss {found[0]:+.2f} to {found[1]:+.2f}"


def prompts(book: Workbook) -> list[PromptLoss]:
    """Every prompt, the worst first; rungs 3 and 4 beside the server."""
    ladder = book.evidence.ladder
    rungs = {n: ladder.rungs[n].rounds for n in ("3", "4")} if ladder else {}
    return per_prompt(book.capture, rungs) if book.capture else []


def prompts_figure(book: Workbook) -> Any:
    found = prompts(book)
    if not found:
        return book.missing()
    labels = [book.label(p.prompt_ids) for p in found[: charts.MOST_LINES]]
    return book.figure("prompts", charts.prompts(found, labels), "accept length per prompt")


def prompts_table(book: Workbook, most: int = 15) -> Html:
    found = prompts(book)
    rows = [
        (book.label(p.prompt_ids, 48), p.rid, p.rounds, p.others.get("3"), p.others.get("4"), p.accept_length)
        for p in found[:most]
    ]
    head = ("prompt ends", "request", "rounds", "trained (rung 3)", "served (rung 4)", "server (rung 5)")
    return table(head, rows, f"Accept length of {len(rows)} of {len(found)} prompts, the worst first")


def tokens(book: Workbook) -> Html:
    """The tokens that drafts missed most."""
    if not prompts(book) or book.capture is None:
        return book.missing()
    return tables.tokens_table(per_token(book.capture, draftable(book)), book.word)


def draftable(book: Workbook) -> set[int] | None:
    """Target ids that the drafter can propose; None: all of them, or not known."""
    checkpoint = book.evidence.checkpoint
    if "d2t" not in checkpoint.tensors:
        return None
    return {i + int(offset) for i, offset in enumerate(checkpoint.load("d2t").tolist())}


def along(book: Workbook) -> Any:
    """Accept length by distance from the prompt."""
    found = along_text(book.capture) if book.capture else []
    return (
        book.figure("along", charts.along_text(found), "accept length along the text")
        if found
        else book.missing()
    )
