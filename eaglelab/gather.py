"""Gather evidence: from files and flags (the static side), and from a capture (the dynamic side)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglelab.checkpoint import FLOATS, Checkpoint, TargetModel, open_checkpoint, open_target
from eaglelab.diff import diff, diff_tensors
from eaglelab.errors import BadInput
from eaglelab.evidence import Evidence
from eaglelab.launch import Launch, engine_version
from eaglelab.loader import loading
from eaglelab.progress import Progress
from eaglelab.records import Measurement
from eaglelab.served import served
from eaglelab.trained import trained

if TYPE_CHECKING:
    from eaglelab.audit import Audit
    from eaglelab.capture import Capture
    from eaglelab.features import StoredFeatures

NO_CAPTURE = "no server and no capture were given (--server URL or --capture DIR)"
DYNAMIC = ("capture", "ladder", "live parameters", "depths", "stats", "counters")


def static_evidence(
    checkpoint: Checkpoint,
    launch: Launch,
    target: TargetModel | None,
    copy: Checkpoint | BadInput | None = None,
) -> Evidence:
    """Trained, served and their differences.

    copy: the drafter that the server loads, or why it cannot be read. Without it a drafter in its trainer's
    form is served as our own conversion writes it.
    """
    facts = target.facts if target else launch.target
    right = _converted(checkpoint, target, needed=copy is None)
    form = copy if isinstance(copy, Checkpoint) else right
    evidence = Evidence(checkpoint, form, launch, trained(checkpoint, facts), target=target, right=right)
    evidence.copied = isinstance(copy, Checkpoint)
    evidence.missing |= dict.fromkeys(DYNAMIC, NO_CAPTURE)
    try:
        if isinstance(copy, BadInput):
            raise copy
        evidence.served = served(form, launch)
        evidence.loading = loading(form, launch)
        evidence.differences = diff(evidence.trained, evidence.served, checkpoint, target, form)
        if evidence.copied:
            evidence.differences += diff_tensors(right, form, evidence.served[1])
    except BadInput as error:
        evidence.missing["served"], evidence.refused = str(error), error.faults
    return evidence


def _converted(checkpoint: Checkpoint, target: TargetModel | None, needed: bool) -> Checkpoint:
    """The drafter as our own conversion would serve it; as given where that cannot be and is not needed.

    A file that SGLang loads as it is stays so, though its chunks may come in another order than SGLang's; a
    copy of it is compared with what puts them right.
    """
    from eaglelab.convert import convert_view, view

    if checkpoint.dialect == "sglang":
        return checkpoint
    try:
        depths = checkpoint.depths_in(target.facts if target else None)
        make = view if needed or depths == tuple(sorted(depths)) else convert_view
        return make(checkpoint, "sglang", target)
    except BadInput:
        if needed:
            raise
        return checkpoint


def served_copy(path: str | Path | None, drafter: Path, launch: Launch) -> Checkpoint | BadInput | None:
    """The drafter that the server loads, where it is another folder than the one given.

    path: as the user says it; else the launch's own absolute path, if it is readable here and is not the
    target's. None: nothing else is known than the drafter given. BadInput is returned where a folder that the
    user named cannot be what an engine loads, and raised where it is no folder.
    """
    asked = Path(path) if path else Path(launch.draft_path or "")
    if path and not asked.is_dir():
        raise BadInput(f"--served-drafter {asked}: not a folder; give the folder that the server loads")
    if not path and (not asked.is_absolute() or not (asked / "config.json").is_file()):
        return None
    same = [Path(p) for p in (drafter, None if path else launch.target_path) if p]
    if any(p.exists() and p.samefile(asked) for p in same):
        return None
    try:
        return open_checkpoint(asked)
    except BadInput as error:
        return error if path else None


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


def launch_of(flags: str, capture: Capture | None, target: TargetModel | None, engine: str = "") -> Launch:
    """What the server says of its launch; `flags` and `engine` are believed instead where they are given."""
    facts = target.facts if target else capture.launch.target if capture else None
    if capture is not None:
        launch = capture.launch.with_flags(flags) if flags else capture.launch
        kinds = {str(p["dtype"]).removeprefix("torch.") for some in capture.parameters.values() for p in some}
        if launch.dtype is None and len(live := kinds & set(FLOATS)) == 1:  # it runs, whatever configs say
            launch = launch.edit(dtype=live.pop())
        launch = launch.edit(version=engine_version(engine)) if engine else launch
        return launch.with_target(facts)
    if not flags:
        raise BadInput(
            'nothing says how the drafter is served: give --server URL, --capture DIR or --launch "FLAGS"'
        )
    said = {"version": engine_version(engine)} if engine else {}
    return Launch.parse(flags, target=facts, **said)


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
    """Measure the rungs that the evidence allows; look for what the server does against its own files."""
    from eaglelab.hypotheses import search
    from eaglelab.ladder import climb
    from eaglelab.training import doubt

    target = evidence.target
    if target is None or not {"lm_head.weight", "embed_tokens.weight", "norm.weight"} <= set(target.tensors):
        evidence.missing["ladder"] = "replay needs the target's embedding, norm and head: give --target PATH"
        return
    say("climbing the ladder: replaying the drafter")
    evidence.ladder = climb(
        evidence.original, target, evidence.capture, stored, evidence.launch, device, evidence.checkpoint
    )
    evidence.stored = stored
    evidence.runtime = search(evidence, device, say)
    evidence.doubt = doubt(evidence, device, say)


def audited(stored: StoredFeatures, evidence: Evidence, say: Progress) -> Audit:
    """What the trainer's stored features are."""
    from eaglelab.audit import audit

    say("reading the stored features")
    return audit(stored, evidence)


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
