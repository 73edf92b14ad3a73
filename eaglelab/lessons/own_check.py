"""Lesson 6: build your own check. Evidence to look at, healthy and doctored, and checks of checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from eaglelab import catalogue, tables
from eaglelab.catalogue import Fault
from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.html import Html
from eaglelab.lessons import material
from eaglelab.lessons.checking import Case, NotYet, ask, compare, given, passed, solved
from eaglelab.records import Finding

Rounds = list[list[int]]
Checker = Callable[[Evidence], Finding]
REASON = "no server and no capture were given"


@dataclass
class Doctored:
    """A capture whose requests have been changed; it has what a check of drafts looks at."""

    requests: dict[str, Any]


@cache
def _static() -> Evidence:
    from eaglelab.gather import static_evidence

    return static_evidence(material.checkpoint(), material.golden().launch, material.target())


def evidence(kind: str) -> Evidence:
    """Evidence of a server.

    "healthy": the shipped capture; "stuck": the same, with each draft's first token drafted again and again;
    "nothing": files and flags alone; "silent": a capture in which nothing was drafted.
    """
    if kind not in ("healthy", "stuck", "nothing", "silent"):
        raise ValueError(f"{kind!r}: there is healthy, stuck, nothing and silent")
    if kind == "nothing":
        return replace(_static(), missing={"capture": REASON})
    return _with({"healthy": 0.0, "stuck": 1.0, "silent": -1.0}[kind])


def _with(share: float) -> Evidence:
    """The shipped capture with this share of its rounds stuck, evenly; a negative one: without drafts."""
    total, requests = 0, {}
    for rid, trace in material.golden().requests.items():
        rounds = []
        for r in trace.rounds:
            drafts = [] if share < 0 else r.draft_tokens
            if int((total + 1) * share) > int(total * share):
                drafts = r.draft_tokens[:1] * len(r.draft_tokens)
            rounds.append(replace(r, draft_tokens=drafts))
            total += 1
        requests[rid] = replace(trace, rounds=rounds)
    doctored: Any = Doctored(requests)
    return replace(_static(), capture=doctored)


def drafts(found: Evidence) -> Rounds:
    """The drafts of every round in the evidence."""
    traces = found.capture.requests.values() if found.capture else ()
    return [r.draft_tokens for trace in traces for r in trace.rounds]


def distinct_figure() -> Any:
    """How many different tokens a draft of five holds, in the shipped capture and in the doctored one."""
    from eaglelab import plots
    from eaglelab.html import BLUE, INK, ORANGE

    figure, (axes,) = plots.blank(1, 3.0)
    for shift, kind, colour, hatch in ((-0.2, "healthy", BLUE, ""), (0.2, "stuck", ORANGE, "//")):
        rounds = drafts(evidence(kind))
        counts = Counter(len(set(r)) for r in rounds)
        for x in range(1, 6):
            label = f"{kind}: n = {len(rounds)} rounds" if x == 1 else None
            axes.bar(x + shift, counts[x], 0.4, color=colour, hatch=hatch, edgecolor="#ffffff", label=label)
            axes.annotate(str(counts[x]), (x + shift, counts[x]), ha="center", va="bottom", color=INK)
    axes.set_xlabel("different tokens in a draft of 5")
    axes.set_ylabel("rounds")
    axes.margins(y=0.15)
    axes.legend(frameon=False, loc="upper center")
    return material.picture(figure, "different tokens in a draft, healthy and stuck")


def check_share(share: Callable[[Rounds], float]) -> Html:
    """Share of rounds whose drafts are all the same token."""
    cases = [
        Case(([[7, 7, 7], [1, 2, 3]],), 0.5, "One round of two is stuck."),
        Case(([[7, 7, 8], [1, 2, 1]],), 0.0, "All drafts of a round must be the same token."),
        Case(([[4, 4]],), 1.0),
        Case(
            ([[4, 4], [5], [1, 2]],),
            0.5,
            "A round of one draft says nothing: it is left out, below the line too.",
        ),
    ]
    hints = [
        (lambda rs: sum(r[0] == r[1] for r in rs if len(r) > 1) / len(rs), "Look at the whole round."),
        (lambda rs: sum(len(set(r)) == 1 for r in rs) / len(rs), "A round of one draft is no evidence."),
    ]
    count = compare(share, cases, hints)
    healthy, stuck = (float(share(drafts(evidence(kind)))) for kind in ("healthy", "stuck"))
    return passed(f"{count} cases. The shipped capture: {healthy:.0%}; the doctored one: {stuck:.0%}.")


def check_check(what: Any, function: Checker) -> Html:
    """The reader's check on evidence of every kind."""
    if not isinstance(what, Check):
        given(what, "REPEAT")
        raise NotYet(f"REPEAT should be a Check; yours is a {type(what).__name__}.")
    if what.fault != "drafts-repeat" or not (what.good and what.bad and what.fix) or what.good == what.bad:
        raise NotYet(
            'The Check\'s slug is "drafts-repeat"; good, bad and fix are sentences, good not the bad.'
        )
    if what.rung != 5:
        raise NotYet(
            f"Its rung is 5, where the server does not do what its launch says; yours is {what.rung}."
        )
    wanted = [
        (evidence("healthy"), "passed", "the shipped capture"),
        (evidence("stuck"), "failed", "a capture in which every round is stuck"),
        (_with(0.3), "passed", "a capture in which 3 rounds of 10 are stuck"),
        (_with(0.7), "failed", "a capture in which 7 rounds of 10 are stuck"),
        (evidence("nothing"), "skipped", "files and flags, without a capture"),
        (evidence("silent"), "skipped", "a capture in which nothing was drafted"),
    ]
    for found, verdict, words in wanted:
        got = ask(function, found)
        if not isinstance(got, Finding):
            raise NotYet(
                f"Of {words}: a Finding is wanted (REPEAT.passed(...)), yours is a {type(got).__name__}."
            )
        if got.verdict != verdict:
            more = " What was not looked at is skipped, never passed." if verdict == "skipped" else ""
            raise NotYet(f"Of {words} it should say {verdict}; yours says {got.verdict}.{more}")
        if got.fault != what.fault or not got.evidence:
            raise NotYet(f"Of {words}: the finding should be REPEAT's, with a line of evidence.")
        if verdict != "skipped" and not any(re.search(r"\d", line) for line in got.evidence):
            raise NotYet(f"Of {words}: the evidence should say how many rounds were seen, and the share.")
    if not any(REASON in line for line in function(evidence("nothing")).evidence):
        raise NotYet('When it is skipped, say why: evidence.why_not("capture") knows.')
    return passed(f"{len(wanted)} kinds of evidence.")


def check_test(test: Callable[[Checker], bool], what: Check, function: Checker) -> Html:
    """A test of a check: it must accept the good one, and reject each bad one."""

    def trusts(candidate: Checker) -> bool:
        try:
            return bool(test(candidate))
        except Exception:  # a test that stops has failed
            return False

    def stuck(found: Evidence) -> bool:
        return bool(found.capture) and all(len(set(r)) == 1 for r in drafts(found))

    if not ask(test, function):  # what stops here, stops with its words
        raise NotYet("Your test rejects your own check, which is right. Which part of it is False?")

    def raising(found: Evidence) -> Finding:
        assert found.capture is not None
        return function(found)

    bad = {
        "one that never fails": lambda e: what.passed("41 rounds") if e.capture else function(e),
        "one that fails on every capture": lambda e: what.failed("41 rounds") if e.capture else function(e),
        "one that passes where there is no capture": lambda e: (
            function(e) if e.capture else what.passed("fine")
        ),
        "one that stops where there is no capture": raising,
        "one that fails without saying what to do": lambda e: function(e).model_copy(update={"fix": None}),
        "one that skips a healthy capture": lambda e: function(e) if stuck(e) else what.skipped("busy"),
        "one that skips a stuck capture": lambda e: what.skipped("busy") if stuck(e) else function(e),
    }
    for words, candidate in bad.items():
        if trusts(candidate):
            raise NotYet(f"Your test trusts {words}.")
    return passed(f"It trusts your check, and none of {len(bad)} bad ones.")


def check_fault(fault: Any, what: Check) -> Html:
    """The entry in the catalogue."""
    if not isinstance(given(fault, "fault"), Fault):
        raise NotYet(f"fault should be a Fault; yours is a {type(fault).__name__}.")
    signals = catalogue.Signal.__args__  # type: ignore[attr-defined]
    way = f"check:{what.fault}"
    problems = [
        (fault.slug != what.fault, f"its slug should be the check's: {what.fault}"),
        (fault.slug in catalogue.faults(), "the catalogue has this slug already"),
        (fault.number != 0, "its number is 0: it is not from the collection of public threads"),
        (not (fault.title and fault.cause and fault.fix), "title, cause and fix are sentences"),
        (not set(fault.signals) <= set(signals) or not fault.signals, f"signals are of {', '.join(signals)}"),
        ("capture" not in fault.signals, "one of its signals is the capture, where the check looks"),
        (fault.rung != what.rung, f"its rung should be the check's: {what.rung}"),
        (
            isinstance(fault.detected_by, str) or way not in fault.detected_by,
            f'detected_by should name what finds it: "{way}"',
        ),
        (bool(fault.undetected), "undetected stays empty: something does find it"),
    ]
    wrong = next((said for bad, said in problems if bad), None)
    if wrong:
        raise NotYet(f"Look at the entry again: {wrong}.")
    return passed(f"An entry like the {len(catalogue.faults())} that are there. Detected: {fault.detected}.")


def side_by_side(function: Checker) -> Html:
    """What the check says of the healthy, the doctored and the missing evidence."""
    return tables.findings_table([solved(function, 2)(evidence(k)) for k in ("healthy", "stuck", "nothing")])
