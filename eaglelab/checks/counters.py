"""The server's counters, each by its definition, and the capture's own count beside them."""

from __future__ import annotations

from eaglelab.checks import Check
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
    of_server = next((m.value for m in counted if m.name == "accept_length.server"), None)
    if rung is None or rung.rounds is None or of_server is None:
        return COUNTERS.skipped(rung.reason if rung and rung.reason else evidence.why_not("counters"))
    captured = float(rung.rounds.accept_length)
    lines = [f"captured: {captured:.3f} tokens per verify over {len(rung.rounds.lengths)} verifies"]
    lines += [f"{m.name} = {m.value:.3f}: {m.definition}" for m in counted]
    close = abs(captured - of_server) <= TOLERANCE * of_server
    return COUNTERS.passed(*lines) if close else COUNTERS.failed(*lines)
