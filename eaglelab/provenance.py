"""Where a run came from: enough to make it again, and never a secret."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglelab import __version__

if TYPE_CHECKING:
    from eaglelab.diagnose import Diagnosis
    from eaglelab.params import ReportParams

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "safetensors", "matplotlib", "papermill", "nbconvert", "speculators")


def facts(params: ReportParams, found: Diagnosis) -> dict[str, Any]:
    """Everything a reader needs to trust or repeat a run, as nested JSON-able facts."""
    evidence, capture = found.evidence, found.capture
    checkpoint, launch = evidence.checkpoint, evidence.launch
    sent = capture.sent if capture else {}
    return {
        "command": params.command(),
        "parameters": params.given(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "eaglelab": {"version": __version__, "git": git_state(CHECKOUT)},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "launch": {
            "engine": f"{launch.engine} {launch.version}",
            "flags": launch.command(),
            "algorithm": launch.algorithm,
            "steps": launch.steps,
            "topk": launch.topk,
            "draft_tokens": launch.draft_tokens,
            "tp_size": launch.tp_size,
        },
        "drafter": {
            "path": str(checkpoint.path),
            "dialect": checkpoint.dialect,
            "layer_ids_as_written": checkpoint.aux_layer_ids,
            "depths": evidence.trained[0].depths,
            "sha256": folder_digest(checkpoint.path),
        },
        "capture": {
            "created": capture.meta.get("created"),
            "requests": len(sent),
            "prompts_sha256": _digest(repr(sorted(str(s.get("input_ids")) for s in sent.values())).encode()),
            "ranks": {
                r: {k: c.get(k) for k in ("seen", "written", "dropped")} for r, c in capture.ranks.items()
            },
            "probe": capture.meta.get("probe", {}).get("version"),
        }
        if capture
        else None,
        "server": capture.facts if capture else None,
    }


def git_state(folder: Path) -> str | None:
    """The commit, with a digest of what is not committed; None outside a git checkout."""
    if not (folder / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20
        ).stdout

    try:
        commit, changes = git("rev-parse", "--short=12", "HEAD").strip(), git("diff", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + (f" with changes {_digest(changes.encode())[:12]}" if changes else "") if commit else None


def folder_digest(folder: Path, limit: int = 64 << 20) -> str | None:
    """sha256 over config and tensors of a checkpoint; of larger files, size and first `limit` bytes."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.glob("*") if p.suffix in (".json", ".safetensors")):
        with open(path, "rb") as file:
            total.update(f"{path.name} {path.stat().st_size}\n".encode() + file.read(limit))
    return total.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
