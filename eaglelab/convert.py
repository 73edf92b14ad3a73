"""Convert a drafter of any dialect to the form of SGLang, speculators or vLLM: names, layer ids, config.

`plan` decides everything without writing and lists what the destination cannot express; `view` is that plan
as a checkpoint, so that `served` can say what an engine would do with it; `convert` writes it, whole or not
at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from eaglelab.checkpoint import Checkpoint, TargetModel, assemble, open_checkpoint, open_target
from eaglelab.conversion import Conversion, Plan
from eaglelab.errors import BadInput
from eaglelab.tensorfile import write_safetensors

FORMS = ("sglang", "speculators", "vllm")


def plan(checkpoint: Checkpoint, to: str, target: TargetModel | None = None) -> Plan:
    """Decide a conversion. BadInput if the destination cannot hold this drafter, or the target is needed."""
    if to not in FORMS:
        raise BadInput(f"--to {to!r}: this converts to sglang, to speculators or to vllm")
    wrapped = any(checkpoint.spelling.canonical(t.name_in_file) is None for t in checkpoint.tensors.values())
    if checkpoint.dialect == to and not wrapped:
        raise BadInput(f"{checkpoint.path}: is in the {to} dialect already")
    if checkpoint.settings.latent:
        raise BadInput(
            f"{checkpoint.path}/config.json: {checkpoint.config.get('architectures')}: its attention is "
            "multi-head latent attention (MLA), which is not converted; SGLang loads this form as it is"
        )
    if target:
        checkpoint.check_target(target.facts)
    return Conversion(checkpoint, to, target).decide()


def view(checkpoint: Checkpoint, to: str = "sglang", target: TargetModel | None = None) -> Checkpoint:
    """The checkpoint as conversion would make it, nothing written; itself if that engine loads it so."""
    if to in (checkpoint.dialect, *checkpoint.spelling.engines):
        return checkpoint
    return convert_view(checkpoint, to, target)


def convert_view(checkpoint: Checkpoint, to: str, target: TargetModel | None = None) -> Checkpoint:
    """The same, converted in any case."""
    decided = plan(checkpoint, to, target)
    return assemble(checkpoint.path, decided.config, decided.tensors, to)


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    target: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    dialect: str | None = None,
) -> Plan:
    """Convert a drafter's folder into a new one, whole or not at all. BadInput if `dst` exists.

    `progress(bytes written, bytes in all)` is called as the tensors are copied; `dialect`: see
    `open_checkpoint`.
    """
    source, dst = open_checkpoint(src, dialect), Path(dst)
    if dst.exists() or dst.is_symlink():
        raise BadInput(f"{dst}: exists already; give a new folder (nothing was changed)")
    decided = plan(source, to, open_target(target) if target else None)
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{dst.name}.partial-", dir=dst.parent))
    try:
        write_safetensors(partial / "model.safetensors", decided.tensors, progress)
        with open(partial / "config.json", "w", encoding="utf-8") as file:
            file.write(json.dumps(decided.config, indent=2) + "\n")
            os.fsync(file.fileno())
        partial.chmod(0o777 & ~_umask())
        if dst.exists():
            raise BadInput(f"{dst}: exists already; give a new folder (nothing was changed)")
        os.rename(partial, dst)
    except OSError as error:
        raise BadInput(f"{dst}: could not be written ({error.strerror}); nothing was left behind") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return decided


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
