"""The bench's genuine server, whose faults are switched while it runs, and one way to capture it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglelab.capture import Capture
from eaglelab.collect import capture_server
from eaglelab.features import StoredFeatures
from eaglelab.prompts import load_prompts
from eaglelab.serve import RunningServer, start_server
from eaglelab.server import Server
from eaglelab.stored import to_send
from faultbench.cases import DATA, FEATURES, Length

PLUGIN = Path(__file__).resolve().parent / "plugin"
TOKENS = 48  # of each prompt
Fault = tuple[str, dict[str, Any]]
METADATA = "Metadata-Version: 2.1\nName: faultbench-plugin\nVersion: 0\n"
ENTRY = "[sglang.srt.plugins]\nfaultbench = faultbench_plugin:register\n"


class Live:
    """A running server and the switch of its faults."""

    def __init__(self, server: RunningServer, orders: Path, ranks: int) -> None:
        self.server, self.orders, self.ranks = server, orders, ranks
        self._count = 0

    def switch(self, *faults: Fault) -> None:
        """These faults and no others are in force when this returns."""
        self._count += 1
        part = self.orders / "order.part"
        part.write_text(json.dumps({"id": self._count, "faults": faults}))
        part.replace(self.orders / "order.json")
        until = time.monotonic() + 60
        for rank in range(self.ranks):
            while (said := self._said(rank)).get("id") != self._count:
                if time.monotonic() > until:
                    raise RuntimeError(f"rank {rank} did not obey within 60 s")
                time.sleep(0.02)
            if said["error"]:
                raise RuntimeError(said["error"])

    def _said(self, rank: int) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.orders / f"rank-{rank}.json").read_text())
        return {}

    def capture(self, out: Path, faults: Sequence[Fault] = (), stored: bool = False, **more: Any) -> Capture:
        """Switch, capture the held-out prompts (and the trainer's stored texts), switch off."""
        self.switch(*faults)
        try:
            return take(self.server, out, stored, **more)
        finally:
            self.switch()


def take(
    server: RunningServer, out: Path, stored: bool = False, tokens: int = TOKENS, **more: Any
) -> Capture:
    """Capture a server as `eaglelab report` does, with the bench's prompts."""
    texts = to_send(StoredFeatures.open(FEATURES)) if stored else ()
    prompts = load_prompts(DATA / "prompts.jsonl")
    return capture_server(
        Server(server.url),
        prompts,
        out,
        tokens,
        ignore_eos=True,
        texts=texts,
        progress=lambda *_: None,
        **more,
    )


def length_of(capture: Capture) -> Length:
    """The accept length that the server's own counters give for the captured requests."""
    (value,) = [m["value"] for m in capture.meta["measurements"] if m["name"] == "accept_length.server"]
    return Length(value, "server")


@contextlib.contextmanager
def live_server(
    python: str = "", tp: int = 1, env: Mapping[str, str] | None = None, **how: Any
) -> Iterator[Live]:
    """Genuine SGLang with the bench's plugin; arguments of `start_server`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        orders, found = Path(folder) / "orders", Path(folder) / "faultbench_plugin-0.dist-info"
        orders.mkdir()
        found.mkdir()
        (found / "METADATA").write_text(METADATA)
        (found / "entry_points.txt").write_text(ENTRY)
        paths = [str(PLUGIN), folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), "EAGLELAB_FAULTBENCH": str(orders), **(env or {})}
        with start_server(tp=tp, env=more, python=python or None, **how) as server:
            yield Live(server, orders, tp)
