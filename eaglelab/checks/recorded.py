"""Is the capture fit to judge by: were our requests recorded whole, and do the recorded ranks agree?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from eaglelab.capture import to_float32
from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.records import Finding
from eaglelab.traces import is_stored

if TYPE_CHECKING:
    from eaglelab.capture import Capture, Event

WHOLE = Check(
    "capture-incomplete",
    "our requests were captured whole",
    "our requests were captured in part",
    rung=5,
)
RANKS = Check(
    "ranks-disagree",
    "the recorded ranks of a group agree",
    "ranks that must hold the same hold something else",
    "look at the collectives between these ranks (all-reduce kernels, their versions), and at their devices",
    rung=5,
)
SAME = ("lengths", "token_ids", "accept_lens", "next_token", "next_sibling", "steps", "topk", "draft_tokens")
ROUNDING = 1e-2  # of the largest number: kernels may sum in another order on each rank
LISTED = 20


def findings(evidence: Evidence) -> list[Finding]:
    """What was lost on the way; and, of a server with several ranks to a group, whether they agree."""
    found = [whole(evidence)]
    if evidence.capture and len(evidence.capture.parameters) > len(evidence.capture.primary_ranks):
        found.append(ranks(evidence.capture))
    return found


def generations(capture: Capture) -> dict[str, str]:
    """Every generation that was sent or seen -> "" if it was captured whole, else why it was not."""
    gone = {rid: why for rank in capture.ranks.values() for rid, why in rank.get("dropped_rids", {}).items()}
    seen = {
        rid: "" if trace.state == "complete" else f"{trace.state}: {trace.why}"
        for rid, trace in capture.requests.items()
    }
    lost = {rid: f"lost: {gone.get(rid, 'nothing of it was captured')}" for rid in capture.sent}
    return {rid: why for rid, why in {**lost, **seen}.items() if not is_stored(rid)}


def enough(capture: Capture) -> bool:
    """Whether rungs 3 to 5 rest on at least half of the generations."""
    found = generations(capture)
    return 2 * sum(not why for why in found.values()) >= len(found) > 0


def whole(evidence: Evidence) -> Finding:
    """Requests that were lost or cut are not measured: said, with the reason, and never passed over."""
    capture = evidence.capture
    if capture is None:
        return WHOLE.skipped(evidence.why_not("capture"))
    found = generations(capture)
    cut = {rid: why for rid, why in found.items() if why}
    lines = [f"{len(found) - len(cut)} of {len(found)} generations were captured whole"]
    lines += [f"{rid} is {why}" for rid, why in list(cut.items())[:LISTED]]
    notes = [f"{p.where}: {p.text}" for p in capture.problems if p.severity == "warning"]
    lines += [line for line in notes[:LISTED] if not any(rid in line for rid in cut)]
    if not cut:
        return WHOLE.passed(*lines)
    rest = "rungs 3 to 5 rest on the others" if enough(capture) else "too few for a verdict: capture again"
    return WHOLE.skipped(*lines, rest)


def ranks(capture: Capture) -> Finding:
    """Each recorded rank against the primary rank of its data-parallel group, event by event."""
    lines, wrong, compared = [], [], 0
    for first in capture.primary_ranks:
        group = first.partition(".")[0]
        ours = dict(keyed(capture, first))
        for rank in capture.ranks:
            if rank == first or rank.partition(".")[0] != group:
                continue
            compared += 1
            theirs = dict(keyed(capture, rank))
            alone = len(ours.keys() ^ theirs.keys())
            dropped = any(capture.ranks[r].get("dropped_rids") for r in (first, rank))
            bad = [text for key in ours.keys() & theirs.keys() if (text := _unlike(ours[key], theirs[key]))]
            lines.append(f"{rank} beside {first}: {len(ours.keys() & theirs.keys())} events compared")
            wrong += [f"{rank} beside {first}: {text}" for text in sorted(bad)[:LISTED]]
            if alone and not dropped:
                wrong.append(f"{rank} beside {first}: {alone} events are on one of them only")
    if not compared:
        return RANKS.skipped("one rank a group was recorded: capture with --all-ranks to compare them")
    return RANKS.failed(*wrong, *lines) if wrong else RANKS.passed(*lines)


def keyed(capture: Capture, rank: str) -> Iterator[tuple[tuple, Event]]:
    """A rank's events, each under what makes it the same event on another rank."""
    for event in capture.events(rank):
        rids = event.rids or [event.data["rid"]]
        yield (event.kind, event.data.get("of"), tuple(rids), tuple(event.data.get("seq_lens", ()))), event


def _unlike(ours: Event, theirs: Event) -> str:
    """In what two records of one event differ beyond rounding; "" if in nothing."""
    where = f"{ours.kind}, seq {ours.data['seq']}"
    for name in SAME:
        if ours.data.get(name) != theirs.data.get(name):
            return f"{where}: {name} {str(theirs.data.get(name))[:60]} for {str(ours.data.get(name))[:60]}"
    for name in ours.data["tensors"]:
        a = to_float32(ours.tensor(name), ours.dtype(name))
        b = to_float32(theirs.tensor(name), theirs.dtype(name)) if name in theirs.data["tensors"] else None
        if b is None or a.shape != b.shape:
            return f"{where}: {name} has another shape"
        gap = float(np.abs(a - b).max(initial=0))
        if not gap <= ROUNDING * max(float(np.abs(a).max(initial=0)), 1e-30):
            return f"{where}: {name} differs by up to {gap:.3g}"
    return ""
