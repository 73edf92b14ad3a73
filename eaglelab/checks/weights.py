"""Did the weights load, and are they sane? The first suspect of the founding incident, proven or not."""

from __future__ import annotations

import numpy as np

from eaglelab.checks import Check
from eaglelab.evidence import Evidence
from eaglelab.records import Finding
from eaglelab.tensorfile import hold, statistics

LOADED = Check(
    "weights-not-loaded",
    "every parameter in the server holds its source's numbers: the weights did load",
    "some weights in the server are not what the file holds",
    "give the tensors the names that this engine's loader takes (`eaglelab inspect` lists those it drops)",
    rung=5,
)
SANE = Check(
    "weights-not-sane",
    "the drafter's numbers are sane",
    "the drafter's file holds numbers that were never trained",
    "export the checkpoint again, and look at the training run that wrote it",
)
LARGEST = 2 << 20  # bytes read of a tensor: of larger ones a few blocks of rows, so that this stays quick
BLOCKS = 8
LISTED = 20


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
    if differing:
        return LOADED.failed(seen, *differing[:LISTED], *unknown[:LISTED])
    return LOADED.skipped(seen, *unknown[:LISTED]) if unknown or not equal else LOADED.passed(seen)


def sane(evidence: Evidence) -> Finding:
    """Trained numbers are finite, not all zero, and not all one value (norm weights may well be ones)."""
    odd, checked, sampled = [], 0, 0
    for name, info in evidence.checkpoint.tensors.items():
        if info.dtype not in ("bfloat16", "float16", "float32"):
            continue
        checked += 1
        every = -(-(info.offsets[1] - info.offsets[0]) // LARGEST)
        if every > 1:
            sampled += 1
            info = hold(info.name_in_file, info, _some_rows(info.mapped(), every))
        numbers = statistics(info)
        where = f"{name} ({info.name_in_file})"
        if numbers["nonfinite"]:
            odd.append(f"{where}: {numbers['nonfinite']:,} numbers are not finite")
        elif numbers["absmax"] == 0:
            odd.append(f"{where}: all zeros")
        elif numbers["std"] == 0 and "norm" not in name:
            odd.append(f"{where}: all {numbers['mean']:g}")
    seen = f"{checked} of {len(evidence.checkpoint.tensors)} tensors read"
    seen += f" (of {sampled} a sample of rows)" if sampled else ""
    if odd:
        return SANE.failed(f"{seen}, {len(odd)} are odd", *odd[:LISTED])
    if not checked:
        return SANE.skipped("no tensor is of a dtype that is read here (bfloat16, float16, float32)")
    return SANE.passed(f"{seen}: finite, not all zero, not constant")


def _some_rows(rows: np.ndarray, every: int) -> np.ndarray:
    """One row in `every`, in blocks from first to last: single rows far apart cost a page of disk each."""
    size = max(1, len(rows) // (every * BLOCKS))
    starts = np.unique(np.linspace(0, len(rows) - size, BLOCKS).astype(int))
    return np.concatenate([rows[start : start + size] for start in starts])
