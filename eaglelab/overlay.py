"""A checkpoint with some of its tensors replaced, for what-ifs; every tensor is read once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Overlay:
    """As `Checkpoint` for `Drafter`, with `replaced` tensors (torch, or as files hold them) over its own.

    spare: another checkpoint, for names that neither has.
    """

    def __init__(self, base: Any, replaced: Mapping[str, Any] | None = None, spare: Any = None):
        self.base = base
        more = {name: info for name, info in spare.tensors.items() if name != "fc.bias"} if spare else {}
        self.tensors: dict[str, Any] = {**more, **base.tensors, **(replaced or {})}
        self._read: dict[tuple[str, object], torch.Tensor] = {}

    def load(self, name: str, dtype: Any = None) -> torch.Tensor:
        """One tensor, cast to `dtype` if given. KeyError if there is none of that name."""
        if (name, dtype) not in self._read:
            info = self.tensors[name]
            if isinstance(info, torch.Tensor):
                self._read[name, dtype] = info if dtype is None else info.to(dtype)
            else:
                self._read[name, dtype] = info.torch(dtype)
        return self._read[name, dtype]

    def over(self, replaced: Mapping[str, torch.Tensor]) -> Overlay:
        """The same with more tensors replaced; what was read already stays read."""
        other = Overlay(self.base)
        other.tensors = {**self.tensors, **replaced}
        other._read = {key: t for key, t in self._read.items() if key[0] not in replaced}
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)
