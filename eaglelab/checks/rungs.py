"""The ladder's drops as findings; and rung 4 against rung 5: does the server do what its launch says?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eaglelab.checks import Check
from eaglelab.checks.hypothesised import unexplained
from eaglelab.evidence import Evidence
from eaglelab.records import Finding

if TYPE_CHECKING:
    from eaglelab.replay import Replay

DROPS = {
    "training": Check(
        "exposure-bias",
        "the drafter keeps its accuracy on its own drafts",
        "the drafter loses its accuracy when it is fed its own drafts",
        "train with more steps of its own drafts (test-time training), and evaluate autoregressively",
        rung=2,
    ),
    "feed": Check(
        "feed-mismatch",
        "the server feeds what the trainer stored",
        "the server feeds something else than the trainer stored",
        "compare depths, order, norm and dtype of the served features with the stored ones",
        rung=3,
    ),
    "wiring": Check(
        "wiring-mismatch",
        "the engine wires the drafter as it was trained",
        "the engine wires the drafter otherwise than it was trained",
        "see the differences between the trained and the served wiring",
        rung=4,
    ),
    "runtime": Check(
        "runtime-mismatch",
        "the server drafts what its launch and checkpoint say",
        "the server drafts otherwise than its launch and checkpoint say",
        "look at kernels, CUDA graphs, caches and stale rows; or eaglelab is wrong about this engine",
        rung=5,
    ),
}


def findings(evidence: Evidence) -> list[Finding]:
    """One finding a drop; the runtime one also asks for equal draft tokens."""
    found = {meaning: _drop(check, meaning, evidence) for meaning, check in DROPS.items()}
    if evidence.ladder and evidence.ladder.replay and evidence.ladder.replay.tokens:
        drop = _runtime(evidence.ladder.replay, found["runtime"])
        found["runtime"] = drop.model_copy(update={"evidence": [*drop.evidence, *unexplained(evidence)]})
    return list(found.values())


def _drop(check: Check, meaning: str, evidence: Evidence) -> Finding:
    ladder = evidence.ladder
    if ladder is None:
        return check.skipped(evidence.why_not("ladder"))
    drop = ladder.drops.get(meaning)
    if drop is None or drop.interval is None:
        from eaglelab.ladder import MEANING

        between = next(names for names, words in MEANING.items() if words == meaning)
        reasons = {ladder.rungs[name].reason: name for name in between if ladder.rungs[name].reason}
        lines = [f"rung {name}: {reason}" for reason, name in reasons.items()]
        return check.skipped(*(lines or ["too few rounds for an interval: send more prompts"]))
    if meaning == "feed" and "re-prefilled" in ladder.rungs["3.stored"].source:
        line = (
            "served rows have another width: rung 3 walks the stored texts re-prefilled at the trained depths"
        )
        return check.skipped(line, "so it cannot see what the server feeds; the checks of width and depth do")
    line = (
        f"accept length {drop.upper:.3f} above, {drop.lower:.3f} below; lost {drop.value:.3f}, 95 % interval "
        f"{drop.interval[0]:.3f} to {drop.interval[1]:.3f} (a loss counts beyond noise and 5 %)"
    )
    return check.failed(line) if drop.failed else check.passed(line)


def _runtime(replay: Replay, drop: Finding) -> Finding:
    check = DROPS["runtime"]
    way = "the server's tokens fed back" if replay.forced else "its own tokens fed back"
    share = f"{replay.equal:,} of {replay.tokens:,} draft tokens"
    lines = [f"replay: {share} equal the server's ({replay.dtype}, {way})", *drop.evidence]
    equal = replay.exact
    if not equal:
        round_, step, gap = replay.disagreements[0]
        from eaglelab.hypotheses import beyond_rounding

        equal = not beyond_rounding(replay)
        what = "a near-tie: rounding, not a fault" if equal else "more than rounding"
        lines.append(
            f"widest disagreement: request {round_.rid}, {round_.n} rows, draft {step + 1}: the replayed "
            f"choice leads by {gap:.4g}, {what}"
        )
    if not equal and replay.guessed:
        lines.append(f"replay can only guess what the server holds in {', '.join(replay.guessed)}")
    if not equal or drop.verdict == "failed":
        return check.failed(*lines)
    # equal token by token needs no interval; near-ties do
    return check.passed(*lines) if replay.exact or drop.verdict == "passed" else check.skipped(*lines)
