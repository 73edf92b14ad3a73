"""Diagnose: gather evidence, run the checks and the ladder, rank what failed, give one verdict.

`broken` if a rung or a check failed; else `inconclusive` if rung 4, rung 5 or the static diff could not be
measured (rungs that rest on less than half of our requests were not), or a check broke; else `healthy`.
Causes rank before symptoms (a rung that fails says where acceptance is lost, a cause says why), and among
causes the one whose undoing is predicted to bring most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglelab import records
from eaglelab.catalogue import faults
from eaglelab.checkpoint import open_checkpoint
from eaglelab.checks import (
    counters,
    data,
    feed,
    hypothesised,
    names,
    recorded,
    rungs,
    static,
    texts,
    vocabulary,
    weights,
)
from eaglelab.checks.causes import CAUSES
from eaglelab.evidence import Evidence
from eaglelab.gather import (
    audited,
    climb_ladder,
    dynamic_evidence,
    launch_of,
    record,
    served_copy,
    static_evidence,
    target_of,
)
from eaglelab.progress import Progress, quiet
from eaglelab.records import Finding, Measurement, Provenance, Summary, Verdict

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.features import StoredFeatures
    from eaglelab.ladder import Ladder

# From cause to symptom: first whatever the catalogue has a name for; what is not listed comes last.
RANKS = (
    {fault.slug for fault in faults().values() if fault.number} | {cause.slug for cause in CAUSES},
    {static.REFUSED.fault, weights.LOADED.fault, static.UNLOADED.fault, static.DROPPED.fault, names.TENSORS}
    | {weights.SANE.fault},
    {feed.FINITE.fault, recorded.RANKS.fault, static.FEED.fault, static.WIRING.fault},
    {feed.DEPTHS.fault, feed.WIDTH.fault},
)
SYMPTOMS = {check.fault for check in rungs.DROPS.values()}  # where acceptance is lost, not why
LENGTH = "tokens per verify"
RUNTIME = rungs.DROPS["runtime"].fault


@dataclass
class Diagnosis:
    """The verdict, and everything that it rests on. `findings`: failed first, the likeliest cause first."""

    verdict: Verdict
    fault: str | None
    findings: list[Finding]
    measurements: list[Measurement]
    evidence: Evidence
    facts: dict[str, Any] = field(default_factory=dict)  # provenance: no secret belongs here

    @property
    def capture(self) -> Capture | None:
        return self.evidence.capture

    @property
    def ladder(self) -> Ladder | None:
        return self.evidence.ladder

    @property
    def failed(self) -> list[Finding]:
        return [f for f in self.findings if f.verdict == "failed"]

    @property
    def missing(self) -> list[Finding]:
        """What keeps a run without a failure from being called healthy, besides numbers without a value."""
        wanted = (RUNTIME, recorded.WHOLE.fault) if self.capture else ()
        return [
            f
            for f in self.findings
            if f.verdict == "errored" or (f.verdict == "skipped" and f.fault in wanted)
        ]

    def summary(self) -> Summary:
        return records.summarise(self.findings, self.verdict, self.fault)

    def records(self) -> list[records.Record]:
        """Provenance, measurements, findings, and the summary as the last line."""
        return [Provenance(facts=self.facts), *self.measurements, *self.findings, self.summary()]


def run(
    *,
    drafter: str | Path,
    served_drafter: str | Path | None = None,
    server: Any = None,
    capture: str | Path | None = None,
    target: str | Path | None = None,
    features: str | Path | None = None,
    launch: str = "",
    engine: str = "",
    dialect: str = "",
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    max_new_tokens: int = 128,
    max_requests: int = 0,
    allow_pickle: bool = False,
    all_ranks: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Diagnosis:
    """Diagnose a drafter from whatever is given: a server (it is captured), a capture, or files and flags.

    drafter: as its trainer saved it. served_drafter: the folder that the server loads; empty: the launch's
    own path where it is readable here, else `drafter` as our own conversion writes it. server: an
    eaglelab.server.Server or its address (the key then comes from EAGLELAB_API_KEY). launch, engine: SGLang
    flags and "sglang==VERSION" to believe instead of what the server says. out: folder that receives
    `capture/`. Raises BadInput (its `faults` name what is known of the reason) and AttachError.
    """
    say = progress or quiet
    checkpoint = open_checkpoint(drafter, dialect or None)
    stored = _open_features(features, allow_pickle)
    recorded = _open_capture(capture)
    if recorded is None and server:
        say("capturing the server")
        recorded = record(
            server,
            Path(out) if out else None,
            prompts,
            stored,
            max_new_tokens=max_new_tokens,
            max_requests=max_requests,
            all_ranks=all_ranks,
            with_target=not target,
            progress=say,
        )
    model = target_of(target, recorded)
    if model is not None:
        checkpoint.check_target(model.facts)
    say("comparing what was trained with what is served")
    how = launch_of(launch, recorded, model, engine)
    copy = served_copy(served_drafter, checkpoint.path, how)
    evidence = static_evidence(checkpoint, how, model, copy)
    if recorded is not None:
        dynamic_evidence(evidence, recorded, stored, device, say)
    elif stored is not None:
        climb_ladder(evidence, stored, device, say)
    if stored is not None:
        evidence.data = audited(stored, evidence, say)
    return conclude(evidence, _pricer(evidence, device, say))


def conclude(evidence: Evidence, price: static.Price | None = None) -> Diagnosis:
    """Run every check on the evidence and weigh the findings."""
    checks: dict[str, Callable[[Evidence], Finding | list[Finding]]] = {
        static.WIRING.fault: lambda evidence: static.findings(evidence, price),
        feed.WIDTH.fault: feed.widths,
        feed.DEPTHS.fault: feed.depths,
        feed.FINITE.fault: feed.finite,
        weights.LOADED.fault: weights.loaded,
        weights.SANE.fault: weights.sane,
        RUNTIME: lambda evidence: [
            *hypothesised.runtime(evidence),
            *hypothesised.training(evidence),
            *rungs.findings(evidence),
        ],
        counters.COUNTERS.fault: counters.reconcile,
        recorded.WHOLE.fault: recorded.findings,
        data.DEPTHS.fault: data.findings,
        vocabulary.COVERS.fault: vocabulary.findings,
        texts.LENGTH.fault: texts.findings,
    }
    found = _merged([finding for fault, check in checks.items() for finding in _run(fault, check, evidence)])
    found.sort(key=_order)
    failed = [f for f in found if f.verdict == "failed"]
    verdict: Verdict = "broken" if failed else "healthy" if _measured(evidence, found) else "inconclusive"
    return Diagnosis(verdict, failed[0].fault if failed else None, found, measurements(evidence), evidence)


def _merged(findings: list[Finding]) -> list[Finding]:
    """One finding a fault that failed, also where several mechanisms found it, or one of them did not."""
    first: dict[str, Finding] = {}
    out: list[Finding] = []
    for finding in findings:
        if finding.verdict != "failed" or finding.fault not in first:
            out.append(finding)
            if finding.verdict == "failed":
                first[finding.fault] = finding
            continue
        old = first[finding.fault]
        known = old.predicted_accept_length
        predicted = finding.predicted_accept_length if known is None else known
        lines = list(dict.fromkeys([*old.evidence, *finding.evidence]))
        new = old.model_copy(update={"evidence": lines, "predicted_accept_length": predicted})
        out[next(i for i, f in enumerate(out) if f is old)] = first[finding.fault] = new
    return [f for f in out if f.verdict != "passed" or f.fault not in first]


def _run(
    fault: str, check: Callable[[Evidence], Finding | list[Finding]], evidence: Evidence
) -> list[Finding]:
    """What a check finds. One that breaks is errored; it does not cost the findings of the others."""
    try:
        found = check(evidence)
    except Exception as error:
        line = f"{type(error).__name__}: {error}"
        title = "a check broke: this is a fault of eaglelab's"
        return [Finding(fault=fault, verdict="errored", title=title, evidence=[line])]
    return found if isinstance(found, list) else [found]


def measurements(evidence: Evidence) -> list[Measurement]:
    """Every number of the run with its definition; one that could not be measured says why."""
    found = list(evidence.counters or [])
    if not found:
        words = "1 + correct drafts / verifies of our own requests"
        found.append(_absent("accept_length.server", LENGTH, words, evidence.why_not("counters")))
    widths = evidence.capture.widths if evidence.capture else {}
    for site, words in feed.SITES.items():
        words = f"last dimension of spec_info.hidden_states at the {words}"
        why = "no such event was captured" if evidence.capture else evidence.why_not("capture")
        if site in widths:
            found.append(
                Measurement(name=f"width.{site}", value=widths[site], unit="numbers", definition=words)
            )
        else:
            found.append(_absent(f"width.{site}", "numbers", words, why))
    if evidence.ladder:
        found += evidence.ladder.measurements()
        if evidence.ladder.replay:
            return found
        why = evidence.ladder.rungs["4"].reason or "rung 4 was not measured"
    else:
        why = evidence.why_not("ladder")
        names = [f"accept_length.rung{name}" for name in ("1", "2", "3.stored", "3", "4", "5")]
        found += [_absent(name, LENGTH, "mean tokens committed per verify", why) for name in names]
    return [
        *found,
        _absent("replay.agreement", "share", "the server's draft tokens that replay drafts too", why),
    ]


def _absent(name: str, unit: str, definition: str, reason: str) -> Measurement:
    return Measurement(name=name, value=None, unit=unit, definition=definition, reason=reason)


def _order(finding: Finding) -> tuple[int, int, bool, float]:
    """Failed first; by rank; what is read or seen before what a trained setting is only suspected of."""
    outcome = ("failed", "errored", "skipped", "passed").index(finding.verdict)
    rank = next((i for i, some in enumerate(RANKS) if finding.fault in some), len(RANKS))
    rank = len(RANKS) if finding.fault in SYMPTOMS else rank
    doubted = bool(finding.evidence) and finding.evidence[0].startswith(hypothesised.DOUBTED)
    return outcome, rank, doubted, -(finding.predicted_accept_length or 0.0)


def _measured(evidence: Evidence, found: list[Finding]) -> bool:
    """Whether there is enough to call it healthy: the diff; rungs 4 and 5 compared, on most requests."""
    if evidence.served is None or evidence.capture is None or any(f.verdict == "errored" for f in found):
        return False
    compared = any(f.fault == RUNTIME and f.verdict == "passed" for f in found)
    return compared and recorded.enough(evidence.capture)


def _open_features(path: str | Path | None, allow_pickle: bool) -> StoredFeatures | None:
    if not path:
        return None
    from eaglelab.features import StoredFeatures

    return StoredFeatures.open(path, strict=False, allow_pickle=allow_pickle)


def _open_capture(path: str | Path | None) -> Capture | None:
    if not path:
        return None
    from eaglelab.capture import open_capture

    return open_capture(path)


def _pricer(evidence: Evidence, device: str, say: Progress) -> static.Price | None:
    """What tells the accept length after a fix, simulated on this capture; None without capture or target."""
    capture, target = evidence.capture, evidence.target
    if capture is None or target is None:
        return None
    from eaglelab.counterfactual import undo

    def price(*some: static.Culprit) -> tuple[float | None, str]:
        say(f"pricing the fix: {' and '.join(one.slug for one in some)}")
        found = undo(evidence, *static.undoing(*some), device)
        if found.accept_length is None:
            return None, f"what this fix would bring cannot be predicted: {found.reason}"
        between = found.interval and f"95 % interval {found.interval[0]:.2f} to {found.interval[1]:.2f}"
        return found.accept_length, (
            f"predicted accept length after this fix: {found.accept_length:.2f} "
            f"({between or 'too few rounds for an interval'}), simulated on this server's own texts "
            f"({found.source})"
        )

    return static.priced_once(price)
