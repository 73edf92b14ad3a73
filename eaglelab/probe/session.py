"""One armed recording of one rank: a bounded queue, and the thread that writes what comes out of it.

The scheduler's thread calls `admit`, `wants` and `record`, which neither block nor wait for a copy. What
does not fit is dropped as whole requests: the request is marked, and nothing more of it is taken.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaglelab.capture import CaptureWriter
from eaglelab.probe.staging import CpuStager, DeviceStager, Staged

Arrays = dict[str, tuple[np.ndarray, str]]
Finish = Callable[[Arrays], tuple[dict[str, Any], Arrays]]

NAMED = 1000  # dropped requests that are listed by name, besides those that had been taken


@dataclass(frozen=True)
class Arm:
    """What an arm order asks for; every bound is per rank."""

    id: str
    rid_prefix: str
    all_traffic: bool = False
    all_ranks: bool = False
    target: bool = False  # also write this rank's shard of the target's embedding, norm and head
    max_requests: int = 256
    max_events: int = 200_000
    max_bytes: int = 8 << 30
    queue_events: int = 256
    queue_bytes: int = 2 << 30
    ttl_s: float = 600.0


@dataclass
class _Item:
    kind: str
    rids: list[str]
    staged: Staged
    finish: Finish


class Session:
    def __init__(self, arm: Arm, folder: Path, rank: str, stager: CpuStager | DeviceStager) -> None:
        self.arm, self.stager = arm, stager
        self.admitted: set[str] = set()
        self.dropped: dict[str, str] = {}
        self.unnamed = 0  # dropped too, a count: see `drop`
        self.seen = 0
        self.errors: dict[str, int] = {}
        self.last_error = ""
        self.closed = False
        self._ending = False
        self._put_bytes = self._done_bytes = 0  # each written by one thread only
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._writer = CaptureWriter(folder, rank)
        self._deadline = time.monotonic() + arm.ttl_s
        threading.Thread(target=self._run, name="eaglelab-writer", daemon=True).start()

    # -- on the scheduler's thread

    def wants(self, rid: str) -> bool:
        return rid in self.admitted and rid not in self.dropped

    def admit(self, rid: str, input_ids: Sequence[int], cached_prefix: int) -> bool:
        """Take a request at its first prefill, if it is ours and there is room: its `request` event."""
        ours = rid.startswith(self.arm.rid_prefix)
        if not ours and not (self.arm.all_traffic and not rid.startswith("HEALTH_CHECK")):
            return False
        if rid not in self.admitted:
            if len(self.admitted) >= self.arm.max_requests:
                self.drop([rid], f"more than {self.arm.max_requests} requests")
                return False
            self.admitted.add(rid)
            ids = input_ids[:]  # its length may be 100,000: the writer makes a list of it
            about = {"rid": rid, "cached_prefix": cached_prefix}
            self.record("request", [rid], {}, lambda _: ({**about, "input_ids": list(map(int, ids))}, {}))
        return self.wants(rid)

    def record(self, kind: str, rids: list[str], tensors: dict[str, Any], finish: Finish) -> None:
        """Queue one event. `tensors` are our own copies; `finish` turns the arrays into the event, later."""
        self.seen += 1
        if self._ending:
            return self.drop(rids, "the probe was disarmed")
        if self.seen > self.arm.max_events:
            return self.drop(rids, f"more than {self.arm.max_events} events")
        if self._put_bytes > self.arm.max_bytes:
            return self.drop(rids, f"more than {self.arm.max_bytes} bytes")
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if (
            self._queue.qsize() >= self.arm.queue_events
            or self._put_bytes - self._done_bytes + size > self.arm.queue_bytes
        ):
            return self.drop(rids, "the queue was full")
        staged = self.stager.stage(tensors)
        self._put_bytes += size
        self._queue.put(_Item(kind, rids, staged, finish))

    def drop(self, rids: list[str], why: str) -> None:
        """Mark requests. Of those never taken only some are named: all traffic has no end of them."""
        for rid in rids:
            if rid in self.admitted or rid in self.dropped or len(self.dropped) < NAMED:
                self.dropped.setdefault(rid, why)
            else:
                self.unnamed += 1

    def failed(self, stage: str, error: Exception, rids: list[str] = ()) -> None:  # type: ignore[assignment]
        """Something of ours went wrong: count it, and drop the requests whose events are now incomplete."""
        self.errors[stage] = self.errors.get(stage, 0) + 1
        self.last_error = f"{stage}: {type(error).__name__}: {error}"
        self.drop(rids, f"an error in the probe ({stage})")

    # -- on the other threads

    @property
    def expired(self) -> bool:
        return time.monotonic() > self._deadline

    def extend(self, ttl_s: float) -> None:
        self._deadline = time.monotonic() + ttl_s

    @property
    def ending(self) -> bool:
        return self._ending

    def end(self) -> None:
        if not self._ending:
            self._ending = True
            self._queue.put(None)

    def status(self) -> dict[str, Any]:
        return {
            "seen": self.seen,
            "written": self._writer.events,
            "bytes": self._writer.bytes,
            "waiting": self._queue.qsize(),
            "requests": len(self.admitted),
            "dropped": len(self.dropped) + self.unnamed,
            "dropped_rids": dict(self.dropped),
            "errors": dict(self.errors),
            "last_error": self.last_error,
        }

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                meta, arrays = item.finish(item.staged.wait())
                self._writer.add(item.kind, meta, arrays)
            except Exception as error:
                self.failed("write", error, item.rids)
                if isinstance(error, OSError):  # a full disk: what is on it stays whole
                    self.end()
            finally:
                self._done_bytes += item.staged.bytes
        try:
            self._writer.close()
        except Exception as error:
            self.failed("close", error, list(self.admitted))
        self.closed = True
