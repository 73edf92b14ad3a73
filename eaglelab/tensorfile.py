"""safetensors read lazily with the standard library: the header now, a tensor's bytes only when asked for.

Layout: 8 bytes little-endian header length, a JSON header, then the bytes. A 2.4 GB file is described from
its first kilobytes. Nothing is executed; sizes are checked before anything is allocated. bfloat16 comes back
as its uint16 bits.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eaglelab.errors import BadInput

MAX_HEADER = 100_000_000  # the format's own cap
MAX_JSON = 64_000_000  # config.json and index files
ITEM_SIZE = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEM_SIZE |= {"I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}
DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BOOL": "bool",
    "U8": "uint8",
}
DTYPES |= {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U16": "uint16", "U32": "uint32"}
DTYPES |= {"U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
BLOCK = 1 << 22  # numbers per step of `statistics`
COPY = 1 << 24  # bytes per step of `write_safetensors`
AGAIN = "copy or download it again"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    `dtype` is named as torch names it; `offsets` are absolute byte positions in `file`.
    """

    name_in_file: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, int]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def _stored(self) -> np.dtype:
        bits = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
        return np.dtype(bits.get(self.dtype, self.dtype))

    def array(self) -> np.ndarray:
        """The tensor as numpy, read now. bfloat16 as uint16 bits, float8 as uint8 bits."""
        try:
            flat = np.fromfile(self.file, self._stored, self.count, offset=self.offsets[0])
        except OSError as error:
            raise BadInput(f"{self.file}: cannot read tensor {self.name_in_file!r}: {error}") from error
        if flat.size != self.count:
            raise BadInput(f"{self.file}: tensor {self.name_in_file!r} ends early; {AGAIN}")
        return flat.reshape(self.shape)

    def mapped(self) -> np.ndarray:
        """The same without reading it yet: a read-only array whose parts are read as they are used."""
        return (
            np.memmap(self.file, self._stored, "r", self.offsets[0], self.shape)
            if self.count
            else self.array()
        )

    def blocks(self, size: int) -> Iterator[bytes]:
        """The tensor's bytes, at most `size` at a time."""
        with open(self.file, "rb") as file:
            file.seek(self.offsets[0])
            left = self.offsets[1] - self.offsets[0]
            while left > 0:
                block = file.read(min(size, left))
                if not block:
                    raise BadInput(f"{self.file}: tensor {self.name_in_file!r} ends early; {AGAIN}")
                left -= len(block)
                yield block

    def torch(self, dtype: Any = None):
        """The tensor as a torch tensor in its own dtype, or cast to `dtype` (a torch dtype or its name)."""
        import torch

        tensor = torch.from_numpy(self.array())
        if str(tensor.dtype) != f"torch.{self.dtype}":
            tensor = tensor.view(getattr(torch, self.dtype))
        if dtype is None:
            return tensor
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


@dataclass(frozen=True)
class HeldTensor(TensorInfo):
    """A tensor that is not in a file as it is: one computed from others, held in memory."""

    data: np.ndarray = field(default_factory=lambda: np.empty(0), compare=False, repr=False)

    def array(self) -> np.ndarray:
        return self.data

    def mapped(self) -> np.ndarray:
        return self.data

    def blocks(self, size: int) -> Iterator[bytes]:
        raw = np.ascontiguousarray(self.data).tobytes()
        yield from (raw[i : i + size] for i in range(0, len(raw), size))


def hold(name: str, like: TensorInfo, data: np.ndarray) -> HeldTensor:
    """A computed tensor of the same dtype as `like`."""
    return HeldTensor(name, like.file, tuple(data.shape), like.dtype, (0, data.nbytes), data)


def some_rows(info: TensorInfo, most: int = 2 << 20) -> np.ndarray:
    """The tensor, or of one larger than `most` bytes a few blocks of rows from first to last.

    Single rows far apart would cost a page of disk each.
    """
    rows, every = info.mapped(), -(-(info.offsets[1] - info.offsets[0]) // most)
    if every <= 1:
        return rows
    size = max(1, len(rows) // (every * 8))
    starts = np.unique(np.linspace(0, len(rows) - size, 8).astype(int))
    return np.concatenate([rows[start : start + size] for start in starts])


def to_float32(array: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers of an array as `TensorInfo.array` or a capture stores it, any shape; `dtype` as torch names it.

    bfloat16's bits are the top half of a float32. BadInput for float8, whose scale lies elsewhere.
    """
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        raise BadInput(f"{dtype} tensors are not supported here; dequantise the checkpoint first")
    return array.astype(np.float32)


def read_json(path: Path) -> dict:
    """A JSON object from a file.

    BadInput names the file when it is missing, too large, or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise BadInput(f"{path}: {path.stat().st_size:,} bytes is no configuration file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); is this the model's folder?") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON ({error}); {AGAIN} or correct it by hand") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def read_header(path: Path) -> Iterator[TensorInfo]:
    """The tensors of one safetensors file, in header order, checked to cover its bytes exactly once."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            first = file.read(8)
            if first == b"version ":
                raise BadInput(f"{path}: a pointer of git-lfs, not the file itself; run git lfs pull")
            length = int.from_bytes(first, "little")
            if size < 8 or length > size - 8:
                raise BadInput(
                    f"{path}: truncated: header of {length:,} bytes in a file of {size:,}; {AGAIN}"
                )
            if length > MAX_HEADER:
                raise BadInput(f"{path}: header of {length:,} bytes; not a safetensors file")
            raw = file.read(length)
        header = json.loads(raw)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadInput(
            f"{path}: its header is not JSON; not a safetensors file, or damaged; {AGAIN}"
        ) from error
    if not isinstance(header, dict):
        raise BadInput(f"{path}: its header is not a JSON object; not a safetensors file")
    header.pop("__metadata__", None)
    found = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    _check_cover(path, found, 8 + length, size)
    yield from found


def _tensor(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    try:
        kind, shape = entry["dtype"], entry["shape"]  # type: ignore[index]
        begin, end = entry["data_offsets"]  # type: ignore[index]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise BadInput(f"{path}: header entry {name!r} is incomplete; {AGAIN}") from error
    if not whole or kind not in ITEM_SIZE:
        raise BadInput(f"{path}: header entry {name!r}: dtype {kind!r}, shape {shape} not understood")
    if end - begin != math.prod(shape) * ITEM_SIZE[kind]:
        raise BadInput(f"{path}: tensor {name!r}: {end - begin:,} bytes do not fit shape {shape} of {kind}")
    return TensorInfo(name, path, tuple(shape), DTYPES[kind], (start + begin, start + end))


def _check_cover(path: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    position = start
    for tensor in sorted(tensors, key=lambda t: t.offsets):
        if tensor.offsets[0] != position:
            what = "overlaps the one before" if tensor.offsets[0] < position else "follows unclaimed bytes"
            raise BadInput(f"{path}: tensor {tensor.name_in_file!r} {what}; damaged, {AGAIN}")
        position = tensor.offsets[1]
    if position != size:
        what = "truncated" if position > size else "longer than its header says"
        raise BadInput(f"{path}: {what}: {size:,} bytes, its header says {position:,}; {AGAIN}")


def read_folder(folder: Path, single: tuple[str, ...] = ("model.safetensors",)) -> dict[str, TensorInfo]:
    """Every tensor of a model folder by its name in the file, from `model.safetensors` or its index's shards.

    `single`: file names tried in order; a lone other *.safetensors is taken. BadInput if a shard is missing.
    """
    index = folder / "model.safetensors.index.json"
    where: dict[str, str] = {}
    if index.is_file():
        where = read_json(index).get("weight_map")  # type: ignore[assignment]
        if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
            raise BadInput(
                f"{index}: field 'weight_map' is missing or not a map of tensor names to file names"
            )
        files = sorted(set(where.values()))
        if outside := [f for f in files if Path(f).name != f]:
            raise BadInput(f"{index}: field 'weight_map' points outside the folder: {outside[0]!r}")
        if missing := [f for f in files if not (folder / f).is_file()]:
            raise BadInput(f"{folder}: {missing[0]!r} is named by {index.name} but missing; download it too")
    else:
        files = [f for f in single if (folder / f).is_file()][:1]
        files = files or sorted(f.name for f in folder.glob("*.safetensors"))
        if len(files) != 1:
            problem = (
                "no .safetensors file"
                if not files
                else f"{len(files)} .safetensors files and no {index.name}"
            )
            raise BadInput(f"{folder}: {problem}; give the folder of a model saved as safetensors")
    found: dict[str, TensorInfo] = {}
    for name in files:
        for tensor in read_header(folder / name):
            if tensor.name_in_file in found:
                raise BadInput(
                    f"{folder}: tensor {tensor.name_in_file!r} is in two files; remove the old shards"
                )
            found[tensor.name_in_file] = tensor
    if index.is_file() and (absent := sorted(set(where) - set(found))):
        raise BadInput(f"{index}: tensor {absent[0]!r} is listed but in no shard; {AGAIN}")
    return found


def statistics(info: TensorInfo) -> dict[str, float]:
    """Mean, standard deviation, largest magnitude, share of zeros, count of non-finite numbers of one tensor.

    One pass in blocks, float64 accumulators, constant memory. Non-finite numbers are
    counted and left out of the rest.
    """
    flat = info.mapped().reshape(-1)
    total = squares = largest = 0.0
    zeros = bad = 0
    for start in range(0, flat.size, BLOCK):
        block = to_float32(flat[start : start + BLOCK], info.dtype).astype(np.float64)
        finite = block[np.isfinite(block)]
        bad += block.size - finite.size
        zeros += int((finite == 0).sum())
        total += float(finite.sum())
        squares += float((finite * finite).sum())
        largest = max(largest, float(np.abs(finite).max(initial=0.0)))
    good = max(flat.size - bad, 1)
    mean = total / good
    std = math.sqrt(max(squares / good - mean * mean, 0.0))
    return {"mean": mean, "std": std, "absmax": largest, "zeros": zeros / max(flat.size, 1), "nonfinite": bad}


def write_safetensors(
    path: Path, tensors: dict[str, TensorInfo], progress: Callable[[int, int], None] | None = None
) -> None:
    """One safetensors file from tensors of other files, copied in steps: constant memory."""
    code = {name: kind for kind, name in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    order = sorted(
        tensors, key=lambda n: (-ITEM_SIZE[code[tensors[n].dtype]], n)
    )  # wide numbers first: aligned
    for name in order:
        info = tensors[name]
        size = info.count * ITEM_SIZE[code[info.dtype]]
        header[name] = {
            "dtype": code[info.dtype], "shape": list(info.shape), "data_offsets": [position, position + size]
        }  # fmt: skip
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for block in tensors[name].blocks(COPY):
                file.write(block)
                done += len(block)
                if progress:
                    progress(done, position)
        file.flush()
        os.fsync(file.fileno())
