"""From the files of a server's probe to a verified capture on this disk, in one step or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eaglelab.capture import Capture, open_capture, write_json
from eaglelab.errors import AttachError, BadInput
from eaglelab.server import Server

SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # names that the server may give to files


def assemble(
    server: Server,
    arm_id: str,
    out: Path,
    meta: dict[str, Any],
    max_bytes: int,
    show: Callable[[str, int, int], None],
) -> Capture:
    """Download into OUT.partial, verify, rename. On any failure nothing is left."""
    files = server.files(arm_id)
    total = sum(int(f["bytes"]) for f in files)
    if total > max_bytes:
        sizes = f"{total >> 20} MiB, over the limit of {max_bytes >> 20} MiB"
        raise AttachError(f"{server.url}: the capture is {sizes}")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if total * 1.2 > free:
        raise BadInput(f"{out.parent}: the capture needs {total >> 20} MiB, {free >> 20} MiB are free")
    partial = out.with_name(out.name + f".partial-{os.getpid()}")
    partial.mkdir()
    try:
        meta["parameters"] = {}
        shards: list[Path] = []
        with open(partial / "events.jsonl", "wb") as events:
            for done, entry in enumerate(files, 1):
                _take(server, arm_id, entry, partial, events, meta, shards)
                show("download", done, len(files))
        if shards:
            write_target(partial / "target", shards, meta["model"])
            for shard in shards:
                shutil.rmtree(shard, ignore_errors=True)
        write_json(partial / "capture.json", meta)
        open_capture(partial)
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return open_capture(out)


def _take(
    server: Server, arm_id: str, entry: dict, partial: Path, events: Any, meta: dict, shards: list[Path]
) -> None:
    """One file of one rank, checked against its announced size and sha256, to its place in the capture."""
    rank, name, size = str(entry["rank"]), str(entry["name"]), int(entry["bytes"])
    if not (SAFE.fullmatch(name) and SAFE.fullmatch(rank)):
        raise AttachError(f"{server.url}: {rank}/{name}: not a file name")
    landing = partial / f"{rank}.{name}.download"
    with open(landing, "wb") as sink:
        server.download(arm_id, rank, name, sink, size)
    digest = hashlib.sha256()
    with open(landing, "rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    if landing.stat().st_size != size or digest.hexdigest() != entry["sha256"]:
        raise AttachError(f"{server.url}: {rank}/{name} arrived damaged; capture again")
    if name == "events.jsonl":
        with open(landing, "rb") as source:
            shutil.copyfileobj(source, events)
    elif name == "parameters.json":
        meta["parameters"][rank] = json.loads(landing.read_text(encoding="utf-8"))
    elif name.startswith("target."):
        folder = partial / f"target-{rank}"
        folder.mkdir(exist_ok=True)
        os.replace(landing, folder / name)
        if folder not in shards:
            shards.append(folder)
        return
    elif name.startswith(f"shard-{rank}-") and name.endswith(".safetensors"):
        os.replace(landing, partial / name)
        return
    else:
        raise AttachError(f"{server.url}: {rank}/{name}: not a file of a capture")
    landing.unlink()


def write_target(folder: Path, shards: list[Path], model: dict[str, Any]) -> None:
    """Join the ranks' rows of the target's tensors, cut to the vocabulary, as a model's folder."""
    from safetensors.numpy import load_file

    facts = model["target"]
    whole: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    filled: dict[str, np.ndarray] = {}
    for shard in shards:
        about = json.loads((shard / "target.json").read_text(encoding="utf-8"))
        dtypes |= about["dtypes"]
        for name, array in load_file(shard / "target.safetensors").items():
            first, end = about["rows"].get(name, [0, len(array)])
            rows = facts["vocab_size"] if name in about["rows"] else len(array)
            joined = whole.setdefault(name, np.zeros((rows, *array.shape[1:]), array.dtype))
            joined[first:end] = array
            filled.setdefault(name, np.zeros(rows, bool))[first:end] = True
    lost = [name for name, rows in filled.items() if not rows.all()]
    if lost:
        raise AttachError(f"the target's {', '.join(lost)}: rows are missing; a rank was not seen")
    folder.mkdir()
    _save(folder / "target.safetensors", whole, dtypes)
    config = {
        "architectures": [facts["architecture"]],
        "hidden_size": facts["hidden_size"],
        "num_hidden_layers": facts["num_layers"],
        "vocab_size": facts["vocab_size"],
        "torch_dtype": facts["dtype"],
        **model["target_config"],
    }
    write_json(folder / "config.json", config)


def _save(path: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str]) -> None:
    """A safetensors file under the tensors' true dtypes, bfloat16 among them, which numpy cannot name."""
    codes = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
    header, offset = {}, 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": codes[dtypes[name]],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            out.write(np.ascontiguousarray(array).data)
        out.flush()
        os.fsync(out.fileno())
