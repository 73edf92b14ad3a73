"""The capture format: write it, read it, verify it. Standard library, numpy and safetensors; never a pickle.

A capture is a directory:

    capture.json    schema, server facts, ranks, live parameters, requests sent and answered
    events.jsonl    append-only, one event a line; `seq` counts up without gaps within each rank
    shard-RANK-NNNN.safetensors    the tensors that events name, one key a tensor
    target/         optional: the target's embedding, final norm and head, served by the probe

numpy cannot hold bfloat16, so its bits are stored as uint16 and the event says `"dtype": "bfloat16"`.
An event's tensors are on disk before its line is, so a line never names a tensor that a crash has lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eaglelab.errors import BadInput
from eaglelab.tensorfile import to_float32
from eaglelab.traces import Reprefill, Round, Trace, build_reprefills, build_traces

if TYPE_CHECKING:
    from eaglelab.launch import Launch

__all__ = ["Capture", "CaptureWriter", "Event", "Problem", "Reprefill", "Round", "Trace"]
__all__ += ["from_float32", "open_capture", "to_float32", "write_json"]

SCHEMA = 1
KINDS = ("request", "prefill_extend", "draft", "decode_extend", "reprefill")
STORED = {"float64": "float64", "float32": "float32", "float16": "float16", "bfloat16": "uint16"}
SITES = {"prefill_extend": "features", "draft": "fed", "decode_extend": "features"}


def from_float32(array: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of `to_float32`; bfloat16 rounds to nearest even (NaN stays NaN)."""
    if dtype != "bfloat16":
        return array.astype(STORED[dtype])
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


class CaptureWriter:
    """Writes the events of one rank into `folder`; tensors go to shards of about `shard_bytes`."""

    def __init__(self, folder: Path, rank: str, shard_bytes: int = 64 << 20) -> None:
        self.folder, self.rank, self.shard_bytes = Path(folder), rank, shard_bytes
        self.events = self.bytes = 0
        self._shards = self._held = 0
        self._tensors: dict[str, np.ndarray] = {}
        self._lines: list[str] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        self._out = open(self.folder / "events.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def add(self, kind: str, meta: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]]) -> int:
        """Append one event; `tensors` maps a name to (stored array, dtype name). Returns its `seq`."""
        seq, named = self.events, {}
        for name, (array, dtype) in tensors.items():
            if array.dtype != STORED[dtype]:
                raise ValueError(f"{name}: {dtype} is stored as {STORED[dtype]}, not {array.dtype}")
            key = f"{seq}.{name}"
            self._tensors[key] = np.ascontiguousarray(array)
            self._held += array.nbytes
            named[name] = {"shard": self._shard, "key": key, "dtype": dtype, "shape": list(array.shape)}
        line = {"seq": seq, "rank": self.rank, "kind": kind, **meta, "tensors": named}
        self._lines.append(json.dumps(line) + "\n")
        self.events += 1
        if self._held >= self.shard_bytes:
            self.flush()
        return seq

    @property
    def _shard(self) -> str:
        return f"shard-{self.rank}-{self._shards:04d}.safetensors"

    def flush(self) -> None:
        """Put everything so far on disk: the shard first, then the lines that name it."""
        if self._tensors:
            partial = self.folder / (self._shard + ".partial")
            save_file(self._tensors, partial)
            with open(partial, "rb") as written:
                os.fsync(written.fileno())
            os.replace(partial, self.folder / self._shard)
            self.bytes += self._held
            self._tensors, self._held = {}, 0
            self._shards += 1
        self._out.writelines(self._lines)
        self.bytes += sum(map(len, self._lines))
        self._lines = []
        self._out.flush()
        os.fsync(self._out.fileno())

    def close(self) -> None:
        if not self._out.closed:
            self.flush()
            self._out.close()


@dataclass(frozen=True)
class Problem:
    """Something that reading found and that does not stop reading: evidence, not damage."""

    severity: str  # "warning" | "finding"
    where: str
    text: str


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl. `data` is the line; rows are read when asked for."""

    line: int
    data: dict[str, Any]
    capture: Capture = field(repr=False, compare=False)

    @property
    def kind(self) -> str:
        return self.data["kind"]

    @property
    def rank(self) -> str:
        return self.data["rank"]

    @property
    def rids(self) -> list[str]:
        return self.data.get("rids", [])

    def dtype(self, name: str) -> str:
        return self.data["tensors"][name]["dtype"]

    def shape(self, name: str) -> list[int]:
        return self.data["tensors"][name]["shape"]

    def tensor(self, name: str) -> np.ndarray:
        """The stored array ([rows, width]); bfloat16 as uint16 bits, see `to_float32`."""
        return self.capture._read(self, name)

    def fail(self, name: str, text: str) -> BadInput:
        where = f"{self.capture.path / 'events.jsonl'}, line {self.line}"
        return BadInput(
            f"{where} ({self.kind}, rank {self.data.get('rank')}, seq {self.data.get('seq')}), {name}: {text}"
        )


class Capture:
    """A verified capture. `requests` and `reprefill` are the views that replay reads."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path, self.meta = path, meta
        self.problems: list[Problem] = []
        self._events: list[Event] = []
        self._open: dict[str, Any] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """Allow-listed facts of the server, as SGLang names them."""
        return self.meta["server"]

    @property
    def launch(self) -> Launch:
        """The launch as the server's facts say it, with the target's facts."""
        from eaglelab.launch import Launch, Target

        target = self.facts.get("target")
        return Launch.from_server(self.facts, target=Target(**target) if target else None)

    @property
    def ranks(self) -> dict[str, dict[str, Any]]:
        """Per rank: events seen, written, dropped; whether it is the `primary` of its data-parallel group."""
        return self.meta["ranks"]

    @property
    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Per rank, each live parameter of the drafter: name, shape, dtype, checksum, shared_with_target."""
        return self.meta.get("parameters", {})

    @property
    def sent(self) -> dict[str, dict[str, Any]]:
        """Per request id: `input_ids` as sent (None for text), `output_ids` and counters as answered."""
        return self.meta.get("requests", {})

    @property
    def target_dir(self) -> Path | None:
        folder = self.path / "target"
        return folder if (folder / "target.safetensors").exists() else None

    def events(self, rank: str | None = None, kind: str | None = None) -> Iterator[Event]:
        for event in self._events:
            if (rank is None or rank == event.rank) and (kind is None or kind == event.kind):
                yield event

    @cached_property
    def primary_ranks(self) -> list[str]:
        return [rank for rank, counts in self.ranks.items() if counts.get("primary", True)]

    @cached_property
    def requests(self) -> dict[str, Trace]:
        """Each captured request, by id, from the primary rank of its data-parallel group."""
        return build_traces(self)

    @cached_property
    def reprefill(self) -> dict[str, Reprefill]:
        """Each re-prefilled text, by the id of the request whose text it is."""
        return build_reprefills(self)

    @cached_property
    def widths(self) -> dict[str, int]:
        """Width of what the drafter was fed, per site (`prefill_extend`, `draft`, `decode_extend`)."""
        found = {}
        for event in self._events:
            name = SITES.get(event.kind)
            if name and name in event.data["tensors"] and event.kind not in found:
                found[event.kind] = event.shape(name)[-1]
        return found

    def _read(self, event: Event, name: str) -> np.ndarray:
        entry = event.data["tensors"][name]
        shard = entry["shard"]
        if shard not in self._open:
            try:
                self._open[shard] = safe_open(self.path / shard, "np")
            except (OSError, SafetensorError) as error:
                raise event.fail(f"tensors.{name}", f"{shard} cannot be read: {error}") from error
        try:
            array = self._open[shard].get_tensor(entry["key"])
        except SafetensorError as error:
            raise event.fail(f"tensors.{name}", f"{shard} has no whole {entry['key']}: {error}") from error
        if list(array.shape) != entry["shape"] or array.dtype != STORED.get(entry["dtype"]):
            found = f"{array.dtype} {list(array.shape)}"
            raise event.fail(f"tensors.{name}", f"{shard} holds {found}, the event says {entry}")
        return array


def open_capture(path: str | Path) -> Capture:
    """Open and verify a capture. Damage raises BadInput (file, event, field); evidence is in `.problems`."""
    from eaglelab.integrity import verify

    path = Path(path)
    meta = _read_meta(path / "capture.json")
    capture = Capture(path, meta)
    capture._events = list(_read_events(capture))
    if not capture._events:
        raise BadInput(f"{path / 'events.jsonl'}: no events; the server was armed and nothing of ours ran")
    verify(capture)
    return capture


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadInput(f"{path}: not found; a capture is a directory with capture.json in it") from error
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        version = meta.get("schema") if isinstance(meta, dict) else type(meta).__name__
        raise BadInput(f"{path}: schema: {version!r}; this eaglelab reads schema {SCHEMA}")
    for name in ("server", "ranks", "requests"):
        if not isinstance(meta.get(name), dict):
            raise BadInput(f"{path}: {name}: an object is needed, found {type(meta.get(name)).__name__}")
    for rid, sent in meta["requests"].items():
        if not isinstance(sent, dict) or not all(
            _ids(sent.get(name)) for name in ("input_ids", "output_ids")
        ):
            raise BadInput(f"{path}: requests.{rid}: input_ids and output_ids are token ids or null")
    for rank, counts in meta["ranks"].items():
        if not isinstance(counts, dict) or not isinstance(counts.get("dropped_rids", {}), dict):
            raise BadInput(f"{path}: ranks.{rank}: counts and dropped_rids are needed")
    return meta


def _ids(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(i) is int for i in value))


def _read_events(capture: Capture) -> Iterator[Event]:
    path = capture.path / "events.jsonl"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    if text and not text.endswith("\n"):
        raise BadInput(f"{path}, line {text.count(chr(10)) + 1}: the last line is truncated; capture again")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            data = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("kind") not in KINDS:
            raise BadInput(f"{path}, line {number}, kind: not an event of schema {SCHEMA}")
        yield Event(number, data, capture)
