"""Edited copies of the tiny drafters, for tests of what engines do with damaged or unusual checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"
SGLANG, SPECULATORS, TARGET = DATA / "drafter-sglang", DATA / "drafter-speculators", DATA / "target"


def edited(
    folder: Path, base: Path = SGLANG, *, config=None, drop=(), rename=None, add=None, remove=()
) -> Path:
    """A copy of `base` in `folder`. config: merged in (nested too); remove: config keys; drop: tensors whose
    name contains one of these; rename: text in names; add: name -> torch tensor."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    values = json.loads((folder / "config.json").read_text())
    merge(values, config or {})
    for key in remove:
        del values[key]
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if not any(part in n for part in drop)}
    for old, new in (rename or {}).items():
        tensors = {n.replace(old, new): t for n, t in tensors.items()}
    save_file({**tensors, **(add or {})}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def merge(values: dict, changes: dict) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            merge(values[key], value)
        else:
            values[key] = value
