"""What a launch alone tells: the target as its own drafter, a backend or a quantisation that was inherited.

SGLang 0.5.23: the path of the draft model defaults to the target's (arg_groups/speculative_hook.py), its
quantisation (serving_hook.py) and its attention backend (speculative_draft_attention_backend) to the
target's too. What a replay of the server proves harmless is no fault.
"""

from __future__ import annotations

from pathlib import Path

from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.launch import EAGLES
from eaglelab.records import Finding
from eaglelab.releases import caveat, differences

PATH = Check(
    "draft-path-omitted",
    "the drafter has a path of its own",
    "the target is loaded as its own drafter: no other path is given",
    "--speculative-draft-model-path DRAFTER",
    rung=4,
)
BACKEND = Check(
    "draft-attention-backend-inherited",
    "the drafter's attention backend fits its attention",
    "the drafter inherits an attention backend that is made for another kind of attention",
    "--speculative-draft-attention-backend, with a backend for the drafter's own attention",
    rung=5,
)
QUANTIZATION = Check(
    "draft-quantization-inherited",
    "the drafter is served in a quantisation of its own",
    "the target's quantisation is applied to the drafter's tensors",
    "--speculative-draft-model-quantization unquant",
    rung=5,
)
RELEASE = Check("engine-regression", "what this release does with a drafter is known", "", rung=4)
LATENT_BACKENDS = ("trtllm_mla", "cutlass_mla", "flashmla", "tokenspeed_mla")


def findings(evidence: Evidence) -> list[Finding]:
    """Only what speaks: a launch that says nothing of these is no finding at all."""
    found = [check(evidence) for check in (_path, _backend, _quantization, _release)]
    return [finding for finding in found if finding is not None]


def _path(evidence: Evidence) -> Finding | None:
    launch = evidence.launch
    if not launch.target_path or launch.algorithm not in EAGLES:
        return None
    own = launch.draft_path
    if own and Path(own) != Path(launch.target_path):
        return None
    said = f"--speculative-draft-model-path {own}" if own else "no --speculative-draft-model-path"
    return PATH.failed(f"{said}; the target is {launch.target_path}")


def _backend(evidence: Evidence) -> Finding | None:
    launch, latent = evidence.launch, evidence.checkpoint.settings.latent is not None
    own = launch.flag("--speculative-draft-attention-backend")
    used = own or launch.flag("--decode-attention-backend") or launch.flag("--attention-backend")
    if used not in LATENT_BACKENDS or latent:
        return None
    how = "as told" if own else "inherited from the target"
    return _unless_replayed(
        BACKEND, evidence, f"{used} ({how}) is for latent attention, the drafter has none"
    )


def _quantization(evidence: Evidence) -> Finding | None:
    launch = evidence.launch
    used, own = launch.flag("--quantization"), launch.flag("--speculative-draft-model-quantization")
    if not used or used == "unquant" or own == "unquant" or (own and own != used):
        return None
    if evidence.checkpoint.config.get("quantization_config"):
        return None
    line = f"--quantization {used} holds for the drafter too, whose file says nothing of a quantisation"
    return _unless_replayed(QUANTIZATION, evidence, line)


def _unless_replayed(check: Check, evidence: Evidence, line: str) -> Finding:
    """A suspicion; a server whose every draft token comes out in replay is free of it."""
    replay = evidence.ladder.replay if evidence.ladder else None
    if replay is not None and replay.exact:
        return check.passed(line, "yet every draft token of the server comes out in replay")
    return check.failed(line)


def _release(evidence: Evidence) -> Finding | None:
    """What this release does otherwise than the newest; skipped where nobody has looked at it."""
    said, others = caveat(evidence.launch.version), differences(evidence.launch.version)
    if said:
        return RELEASE.skipped(said, *others)
    return RELEASE.passed(f"SGLang {evidence.launch.version}, an older release:", *others) if others else None
