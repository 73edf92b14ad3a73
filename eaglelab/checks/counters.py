"""The server's counters beside the capture's own count; what each of them means, its measurement says."""

from __future__ import annotations

from eaglelab.checks import Check
from eaglelab.definitions import WITH_BONUS, Shape, counted
from eaglelab.evidence import Evidence
from eaglelab.records import Finding

TOLERANCE = 0.05  # share: a request's last verify may commit tokens past its end, which the server cuts off
COUNTERS = Check(
    "counters-disagree",
    "the server's counters agree with what was captured",
    "the server's counters and the capture disagree",
    "requests were recorded in part, or other traffic shares their counters: capture again",
    rung=5,
)


def reconcile(evidence: Evidence) -> Finding:
    """Rung 5 (mean of captured accept lengths) beside 1 + correct drafts / verifies of the same requests."""
    rung = evidence.ladder.rungs["5"] if evidence.ladder else None
    counted = [m for m in evidence.counters or [] if m.value is not None]
    if rung is None or rung.rounds is None:
        return COUNTERS.skipped(rung.reason if rung and rung.reason else evidence.why_not("ladder"))
    rids = sorted(set(rung.rounds.rids))
    of_server = _of(evidence, rids)
    if of_server is None:  # not told request by request
        of_server = next((m.value for m in counted if m.name == "accept_length.server"), None)
    if of_server is None:
        return COUNTERS.skipped(evidence.why_not("counters"))
    captured = float(rung.rounds.accept_length)
    lines = [
        f"captured: {captured:.3f} tokens per verify over {len(rung.rounds.lengths)} verifies of "
        f"{len(rids)} requests; the server's counters of them: {of_server:.3f}"
    ]
    lines += [", ".join(f"{m.name} {m.value:.3f}" for m in counted)] if counted else []
    close = abs(captured - of_server) <= TOLERANCE * of_server
    return COUNTERS.passed(*lines) if close else COUNTERS.failed(*lines)


def _of(evidence: Evidence, rids: list[str]) -> float | None:
    """1 + correct drafts / verifies of these requests; None where one of them has no counters."""
    sent = evidence.capture.sent if evidence.capture else {}
    found = [sent.get(rid, {}).get("counters") or {} for rid in rids]
    told = [[counted(counters, what) for counters in found] for what in ("correct", "verifies")]
    if any(n is None for some in told for n in some):
        return None
    correct, verifies = map(sum, told)
    return WITH_BONUS.value(correct / verifies, Shape(0, None)) if verifies else None
