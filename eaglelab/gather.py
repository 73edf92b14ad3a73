"""Gather evidence: from files and flags (the static side), and from a capture (the dynamic side)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglelab.checkpoint import Checkpoint, TargetModel, open_target
from eaglelab.diff import diff
from eaglelab.errors import BadInput
from eaglelab.evidence import Evidence
from eaglelab.launch import Launch
from eaglelab.loader import loading
from eaglelab.progress import Progress
from eaglelab.records import Measurement
from eaglelab.served import served
from eaglelab.trained import trained

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.features import StoredFeatures

NO_CAPTURE = "no server and no capture were given (--server URL or --capture DIR)"
DYNAMIC = ("capture", "ladder", "live parameters", "depths", "stats", "counters")


def static_evidence(checkpoint: Checkpoint, launch: Launch, target: TargetModel | None) -> Evidence:
    """Trained, served and their differences. A drafter in its trainer's form is served converted."""
    from eaglelab.convert import view

    facts = target.facts if target else launch.target
    form = checkpoint if checkpoint.dialect == "sglang" else view(checkpoint, "sglang", target)
    evidence = Evidence(checkpoint, form, launch, trained(checkpoint, facts), target=target)
    evidence.missing |= dict.fromkeys(DYNAMIC, NO_CAPTURE)
    try:
        evidence.served = served(form, launch)
        evidence.loading = loading(form, launch)
        evidence.differences = diff(evidence.trained, evidence.served, checkpoint, target)
    except BadInput as error:
        evidence.missing["served"] = str(error)
    return evidence


def record(
    server: Any,
    folder: Path | None,
    prompts: str | Path | None,
    stored: StoredFeatures | None,
    *,
    max_new_tokens: int,
    max_requests: int,
    all_ranks: bool,
    with_target: bool,
    progress: Progress | None = None,
) -> Capture:
    """Capture a server: our prompts (default: the held-out ones of data/) and the trainer's stored texts."""
    from eaglelab.collect import capture_server
    from eaglelab.prompts import load_prompts
    from eaglelab.serve import data_dir
    from eaglelab.server import Server
    from eaglelab.stored import to_send

    attached = Server(server, os.environ.get("EAGLELAB_API_KEY")) if isinstance(server, str) else server
    asked = load_prompts(Path(prompts) if prompts else data_dir() / "prompts.jsonl")
    texts = to_send(stored) if stored else []
    return capture_server(
        attached,
        asked[: max_requests or None],
        (folder or Path(tempfile.mkdtemp(prefix="eaglelab-"))) / "capture",
        max_new_tokens,
        all_ranks=all_ranks,
        target=with_target,
        progress=progress,
        texts=texts,
    )


def target_of(path: str | Path | None, capture: Capture | None) -> TargetModel | None:
    """The target as given, else the tensors that the probe handed over, else where the server has it."""
    if path:
        return open_target(path)
    if capture and capture.target_dir:
        return open_target(capture.target_dir)
    there = capture.launch.target_path if capture else None
    return open_target(there) if there and (Path(there) / "config.json").exists() else None


def launch_of(flags: str, capture: Capture | None, target: TargetModel | None) -> Launch:
    """What the server says of its launch, with `flags` believed instead where they are given."""
    facts = target.facts if target else capture.launch.target if capture else None
    if capture is not None:
        launch = capture.launch.with_flags(flags) if flags else capture.launch
        return launch.with_target(facts)
    if not flags:
        raise BadInput(
            'nothing says how the drafter is served: give --server URL, --capture DIR or --launch "FLAGS"'
        )
    return Launch.parse(flags, target=facts)


def dynamic_evidence(
    evidence: Evidence, capture: Capture, stored: StoredFeatures | None, device: str, say: Progress
) -> None:
    """Fill in what a capture shows: counters, live parameters, depths, statistics, the ladder."""
    from eaglelab import depths

    evidence.capture = capture
    found = [Measurement(**m) for m in capture.meta.get("measurements", [])]
    if found:
        evidence.counters = found
    else:
        evidence.missing["counters"] = "the capture holds no counters of the server"
    _live(evidence, capture, say)
    say("naming depths, counting features")
    layers = evidence.launch.target.num_layers if evidence.launch.target else None
    try:
        evidence.depths = depths.name_capture(
            capture, layers=layers, expected=evidence.trained[0].depths or None
        )
    except BadInput as error:
        evidence.missing["depths"] = str(error)
    _stats(evidence, capture)
    climb_ladder(evidence, stored, device, say)


def climb_ladder(evidence: Evidence, stored: StoredFeatures | None, device: str, say: Progress) -> None:
    """Measure the rungs that the evidence allows."""
    from eaglelab.ladder import climb

    target = evidence.target
    if target is None or not {"lm_head.weight", "embed_tokens.weight", "norm.weight"} <= set(target.tensors):
        evidence.missing["ladder"] = "replay needs the target's embedding, norm and head: give --target PATH"
        return
    say("climbing the ladder: replaying the drafter")
    evidence.ladder = climb(
        evidence.original, target, evidence.capture, stored, evidence.launch, device, evidence.checkpoint
    )


def _live(evidence: Evidence, capture: Capture, say: Progress) -> None:
    from eaglelab import live

    if not capture.parameters:
        evidence.missing["live parameters"] = "the capture holds no live parameters"
        return
    if evidence.loading is None:
        evidence.missing["live parameters"] = evidence.why_not("served")
        return
    say("comparing live parameters with the file")
    evidence.live = {
        rank: live.compare(
            found, evidence.checkpoint, evidence.target, evidence.launch, int(rank.rpartition("tp")[2])
        )
        for rank, found in capture.parameters.items()
    }


def _stats(evidence: Evidence, capture: Capture) -> None:
    """Every row fed at a draft-extend, in chunks of the target's width."""
    from eaglelab.stats import FeatureStats

    traces = [trace for trace in capture.requests.values() if trace.rows]
    if not traces:
        evidence.missing["stats"] = "no row was captured"
        return
    width = traces[0].features.shape[1]
    evidence.stats = FeatureStats(width, max(1, width // evidence.checkpoint.target_hidden_size))
    for trace in traces:
        evidence.stats.update(trace.features)
