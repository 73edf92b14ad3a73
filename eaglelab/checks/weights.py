"""Did the weights load, and are they sane? The first suspect of the founding incident, proven or not."""

from __future__ import annotations

from dataclasses import replace

from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.records import Finding
from eaglelab.tensorfile import hold, some_rows, statistics

LOADED = Check(
    "weights-not-loaded",
    "every parameter in the server holds its source's numbers: the weights did load",
    "some weights in the server are not what the file holds",
    "give the tensors the names that this engine's loader takes (`eaglelab inspect` lists those it drops)",
    rung=5,
)
OTHER = replace(
    LOADED,
    bad="the server's drafter is not this file: another one, another step or epoch, or quantised in loading",
    fix="restart the server with this file, or give the one that it loads (--served-drafter)",
)
SANE = Check(
    "weights-not-sane",
    "the drafter's numbers are sane",
    "the drafter's file holds numbers that were never trained",
    "export the checkpoint again, and look at the training run that wrote it",
)
LISTED = 20
BLANK = 0.1  # of the rows of a matrix that may be zeros


def loaded(evidence: Evidence) -> Finding:
    """Every live parameter against the checksum of its source tensors, cast, fused and sharded alike."""
    if evidence.live is None:
        return LOADED.skipped(evidence.why_not("live parameters"))
    matches = [(rank, match) for rank, found in evidence.live.items() for match in found]
    equal = [match for _, match in matches if match.equal]
    differing = [f"{match.param} on {rank}: {match.why}" for rank, match in matches if match.equal is False]
    unknown = [f"{match.param} on {rank}: {match.why}" for rank, match in matches if match.equal is None]
    shared = sum(match.kind == "target" for match in equal)
    seen = (
        f"{len(equal)} of {len(matches)} live parameters on {len(evidence.live)} rank(s) equal the checksum "
        "of their source tensors after the engine's cast, fusion and sharding "
        f"({shared} of them are the target's, shared)"
    )
    own = [m for _, m in matches if m.kind == "own" and m.param.endswith(".weight") and "norm" not in m.param]
    if own and not any(match.equal for match in own):
        told = f" (its launch says {evidence.launch.draft_path})" if evidence.launch.draft_path else ""
        line = f"no matrix of the drafter's own is this file's{told}"
        return OTHER.failed(seen, line, *differing[:LISTED], *unknown[:LISTED])
    if differing:
        return LOADED.failed(seen, *differing[:LISTED], *unknown[:LISTED])
    return LOADED.skipped(seen, *unknown[:LISTED]) if unknown or not equal else LOADED.passed(seen)


def sane(evidence: Evidence) -> Finding:
    """Trained numbers are finite, not all zero, and not all one value (norm weights may well be ones)."""
    odd, checked, sampled = [], 0, 0
    for name, info in evidence.checkpoint.tensors.items():
        where = f"{name} ({info.name_in_file})"
        if info.dtype.startswith("float8") and not evidence.checkpoint.config.get("quantization_config"):
            odd.append(f"{where}: {info.dtype}, and no quantization_config says how to scale it")
        if info.dtype not in ("bfloat16", "float16", "float32"):
            continue
        checked += 1
        part = some_rows(info)
        sampled += part.shape != info.shape
        numbers = statistics(hold(info.name_in_file, info, part))
        blank = float((~part.any(axis=1)).mean()) if part.ndim == 2 else 0.0
        if numbers["nonfinite"]:
            odd.append(f"{where}: {numbers['nonfinite']:,} numbers are not finite")
        elif numbers["absmax"] == 0 and not name.endswith(".bias"):  # which start at zero, and may stay there
            odd.append(f"{where}: all zeros")
        elif numbers["std"] == 0 and "norm" not in name and numbers["absmax"]:
            odd.append(f"{where}: all {numbers['mean']:g}")
        elif blank > BLANK and name not in ("embed_tokens.weight", "lm_head.weight"):  # those may be padded
            odd.append(f"{where}: {blank:.0%} of its rows are zeros, as if it was written in part")
    seen = f"{checked} of {len(evidence.checkpoint.tensors)} tensors read"
    seen += f" (of {sampled} a sample of rows)" if sampled else ""
    if odd:
        return SANE.failed(f"{seen}, {len(odd)} are odd", *odd[:LISTED])
    if not checked:
        return SANE.skipped("no tensor is of a dtype that is read here (bfloat16, float16, float32)")
    return SANE.passed(f"{seen}: finite, not all zero, not constant")
