"""A test-only SGLang general plugin that makes a running server misbehave; a file switches its faults.

It is a distribution of its own, which only the bench's server sees (`faultbench.live` puts it on that
server's PYTHONPATH), and no part of eaglelab. Every fault is a context manager around objects of one
scheduler: entered when the order names it, left, which undoes it, with the next order. Orders come while the
server is idle.

EAGLELAB_FAULTBENCH names a folder: `order.json` {"id": 3, "faults": [["name", {arguments}], ...]} comes in,
every rank answers in `rank-<tensor-parallel rank>.json` {"id": 3, "error": null}.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "EAGLELAB_FAULTBENCH"
SECTIONS = ("feed", "wiring", "tensors", "hidden")


@dataclass
class Site:
    """What faults get at: one scheduler's draft worker, its target and its drafter."""

    worker: Any

    @property
    def target(self) -> Any:
        return self.worker.target_worker.model_runner.model

    @property
    def drafter(self) -> Any:
        """LlamaForCausalLMEagle3; `.model` has fc, input_norm, layers, norm."""
        return self.worker.draft_runner.model

    @property
    def layer(self) -> Any:
        return self.drafter.model.layers[0]

    @property
    def attention(self) -> Any:
        return self.layer.self_attn

    @property
    def pool(self) -> Any:
        """The drafter's KV pool."""
        return self.worker.draft_runner.token_to_kv_pool


@contextlib.contextmanager
def assigned(owner: Any, name: str, value: Any):
    """An attribute with another value; a method of the class comes back when the instance's is removed."""
    old = getattr(owner, name)
    of_class = inspect.ismethod(old) and name not in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if of_class:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


@contextlib.contextmanager
def wrapped(module: Any, around: Any, method: str = "forward"):
    """`around(original, *args, **kwargs)` in place of a method of this one instance."""
    original = getattr(module, method)
    with assigned(module, method, lambda *args, **kwargs: around(original, *args, **kwargs)):
        yield


def faults() -> dict[str, Any]:
    """Every fault by its name: `fault(site, **arguments)` is a context manager."""
    found: dict[str, Any] = {}
    for section in SECTIONS:
        found |= importlib.import_module(f"{__name__}.{section}").FAULTS
    return found


class Switch:
    """Obeys the orders in the folder, in a thread of its own: at most one set of faults is in force."""

    def __init__(self, site: Site, rank: int, folder: Path) -> None:
        self.site, self.rank, self.folder = site, rank, folder
        self.stack = contextlib.ExitStack()
        self.done = -1

    def watch(self) -> None:
        while True:
            with contextlib.suppress(FileNotFoundError, ValueError):
                order = json.loads((self.folder / "order.json").read_text())
                if order["id"] != self.done:
                    self.obey(order)
            time.sleep(0.05)

    def obey(self, order: dict[str, Any]) -> None:
        error = None
        try:
            self.stack.close()
            known = faults()
            for name, arguments in order["faults"]:
                self.stack.enter_context(known[name](self.site, **arguments))
        except Exception:
            error = traceback.format_exc()
        self.done = order["id"]
        part = self.folder / f"rank-{self.rank}.part"
        part.write_text(json.dumps({"id": self.done, "error": error}))
        part.replace(self.folder / f"rank-{self.rank}.json")


def register() -> None:
    """Entry point `sglang.srt.plugins`: be there when a scheduler's draft worker has its weights."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_parallel

    def attach(result: Any, worker: Any, *_args: Any, **_kwargs: Any) -> None:
        switch = Switch(Site(worker), get_parallel().tp_rank, Path(folder))
        threading.Thread(target=switch.watch, name="faultbench", daemon=True).start()

    target = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.alloc_memory_pool"
    HookRegistry.register(target, attach, HookType.AFTER)
