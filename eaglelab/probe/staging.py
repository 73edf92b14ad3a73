"""Bring tensors to the host without making the scheduler wait.

`stage` returns at once with copies under way; `Staged.wait` (called by the writer thread) returns them as
numpy. The caller hands over tensors of its own, never the engine's buffers. On an accelerator the copies go
to pinned memory on a side stream, behind an event; on the CPU there is nothing to wait for.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def as_numpy(tensor: Any) -> tuple[np.ndarray, str]:
    """A CPU tensor as (stored array, dtype name); bfloat16 as its bits."""
    import torch

    tensor, name = tensor.detach(), str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16), name
    return tensor.contiguous().numpy(), name


class Staged:
    """Copies under way. `keep` holds what they read until they are done."""

    def __init__(self, host: dict[str, Any], done: Any = None, keep: Any = None) -> None:
        self._host, self._done, self._keep = host, done, keep
        self.bytes = sum(t.numel() * t.element_size() for t in host.values())

    def wait(self) -> dict[str, tuple[np.ndarray, str]]:
        if self._done is not None:
            self._done.synchronize()
        self._keep = None
        return {name: as_numpy(tensor) for name, tensor in self._host.items()}


class CpuStager:
    def stage(self, tensors: dict[str, Any]) -> Staged:
        return Staged(dict(tensors))


class DeviceStager:
    """`device` is `torch.cuda` or anything with its Stream, Event, stream and current_stream."""

    def __init__(self, device: Any, pinned: Any = None) -> None:
        self._device, self._pinned = device, pinned or _pinned
        self._side = device.Stream()

    def stage(self, tensors: dict[str, Any]) -> Staged:
        ready = self._device.Event()
        ready.record(self._device.current_stream())
        host = {name: self._pinned(tensor) for name, tensor in tensors.items()}
        with self._device.stream(self._side):
            self._side.wait_event(ready)
            for name, tensor in tensors.items():
                host[name].copy_(tensor, non_blocking=True)
            done = self._device.Event()
            done.record(self._side)
        return Staged(host, done, keep=tensors)


def _pinned(tensor: Any) -> Any:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def stager_for(device_type: str) -> CpuStager | DeviceStager:
    if device_type == "cpu":
        return CpuStager()
    import torch

    return DeviceStager(torch.get_device_module(device_type))
