"""Faults of a running server: files, config and launch are right, so that nothing can be read off them.

One genuine server for each number of ranks; its faults are switched by the bench's plugin, one after the
other. Each was measured to lower the accept length, or its `note` says that it costs next to nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers import generate

from eaglelab.capture import Capture
from eaglelab.simulate import is_stored

from .cases import FEATURES, SPECULATORS, TARGET, Bench, Case, Injected, Kind, Length
from .live import Fault, Live, length_of, live_server

CHEAP = "costs under 7 % of the accept length on the tiny models"


class Servers:
    """At most one genuine server at a time, started when it is first asked for."""

    def __init__(self) -> None:
        self.name, self.live, self._stack = "", None, contextlib.ExitStack()

    def get(self, name: str, **how: Any) -> Live:
        if name != self.name:
            self.stop()
            self.live, self.name = self._stack.enter_context(live_server(**how)), name
        assert self.live is not None
        return self.live

    def stop(self) -> None:
        self.name, self.live = "", None
        self._stack.close()


@contextlib.contextmanager
def _servers() -> Iterator[Servers]:
    servers = Servers()
    try:
        yield servers
    finally:
        servers.stop()


def servers(bench: Bench) -> Servers:
    return bench.enter("servers", _servers)


def running(bench: Bench, ranks: int = 1, **how: Any) -> Live:
    """The server of this module's cases: EAGLE3, a chain of 5 steps, the shipped drafter."""
    return servers(bench).get(f"runtime, {ranks} ranks", python=bench.python, tp=ranks, **how)


def healthy(bench: Bench, ranks: int = 1) -> tuple[Length, list[list[int]]]:
    """The accept length with no fault in force, and the tokens of the answers; measured once a server."""

    def measure() -> tuple[Length, list[list[int]]]:
        capture = running(bench, ranks).capture(bench.path(), reprefill=False)
        return length_of(capture), answers(capture)

    return bench.once(f"healthy, {ranks} ranks", measure)


def healthy_length(bench: Bench) -> Length:
    return healthy(bench)[0]


def answers(capture: Capture) -> list[list[int]]:
    """Token ids of each generation, in the order of the prompts."""
    return [sent["output_ids"] for rid, sent in sorted(capture.sent.items()) if not is_stored(rid)]


def given(capture: Path, drafter: Path = SPECULATORS, **more: Any) -> dict[str, Any]:
    """What a user would give: the trainer's drafter, the target, and a capture."""
    return {"drafter": drafter, "target": TARGET, "capture": capture, **more}


def switched(
    *faults: Fault, ranks: int = 1, stored: bool = False, **more: Any
) -> Callable[[Bench], Injected]:
    """A capture with these faults in force. stored: the trainer's features are given as well."""

    def inject(bench: Bench) -> Injected:
        before, texts = healthy(bench, ranks)
        out = bench.path()
        capture = running(bench, ranks).capture(out, faults, stored, all_ranks=ranks > 1, **more)
        if answers(capture) != texts:
            raise RuntimeError("the target answers otherwise: this is no fault of drafting")
        features = {"features": FEATURES} if stored else {}
        return Injected(given(out, **features), before, length_of(capture))

    return inject


def fault(name: str, slug: str, rung: int, *faults: Fault, kind: Kind = "fault", **more: Any) -> Case:
    """One case of this module. `more`: fields of Case, and `ranks`, `stored` of `switched`."""
    how = {key: more.pop(key) for key in ("ranks", "stored") if key in more}
    server = f"runtime-tp{how.get('ranks', 1)}"
    slugs = (slug,) if slug else ()
    return Case(name, kind, switched(*faults, **how), slugs, rung, True, server, **more)


def on(name: str, **arguments: Any) -> Fault:
    return name, arguments


FEED = (
    fault(
        "live-depths-up",
        "ids-plus-one|ids-off-by-one",
        3,
        on("depths", by=1),
        sweep="live-depths",
        note=CHEAP,
        fast=True,
    ),
    fault(
        "live-depths-down",
        "ids-off-by-one|embedding-counted",
        3,
        on("depths", by=-1),
        sweep="live-depths",
        note=CHEAP,
    ),
    fault(
        "live-depths-fixed",
        "ids-hard-coded|feed-depths",
        3,
        on("depths", to=[1, 4, 7]),
        sweep="live-depths",
        note="depths 1, 4, 7 are no engine's default, so that nothing tells where they come from",
    ),
    fault(
        "live-chunk-order",
        "chunk-order|feed-depths",
        3,
        on("order"),
        stored=True,
        fast=True,
        note="no entry of the catalogue is a wrong order: the finding that names the order is the name",
    ),
    fault(
        "live-final-norm",
        "engine-residual-or-extra-norm|feed-depths",
        3,
        on("final-norm"),
        note=CHEAP,
    ),
    fault("live-scale-lost", "target-quantized-or-rotated", 3, on("scaled"), sweep="live-basis"),
    fault("live-rotated", "target-quantized-or-rotated", 3, on("rotated"), sweep="live-basis", fast=True),
    fault(
        "live-overflow",
        "features-overflow|features-not-finite",
        3,
        on("overflow"),
        sweep="live-not-finite",
        note="the catalogue's fault, and the finding that names it",
    ),
    fault(
        "live-nan-rows",
        "features-overflow|features-not-finite",
        3,
        on("nan-rows"),
        sweep="live-not-finite",
        note="the catalogue's fault, and the finding that names it",
    ),
    fault("live-stale-rows", "stale-rows", 3, on("stale"), sweep="live-stale"),
    fault("live-stale-rows-unseen", "stale-rows", 5, on("stale", late=True), sweep="live-stale", fast=True),
)
WIRING = (
    fault("live-map-dropped", "d2t-dropped", 5, on("no-map"), sweep="live-map", fast=True),
    fault("live-map-dropped-unseen", "d2t-dropped", 5, on("no-map-unseen"), sweep="live-map"),
    fault("live-map-absolute", "d2t-absolute", 5, on("map-absolute")),
    fault(
        "live-rope-theta", "rope-theta", 5, on("rope", theta=1e6), sweep="live-theta", note=CHEAP, fast=True
    ),
    fault("live-rope-theta-small", "rope-theta", 5, on("rope", theta=100.0), sweep="live-theta"),
    fault("live-rope-layout", "mrope-or-partial-rotary", 5, on("rope", half=False), sweep="live-rotary"),
    fault("live-rope-partial", "mrope-or-partial-rotary", 5, on("rope", rotary=8), sweep="live-rotary"),
    fault(
        "live-rope-linear",
        "rope-scaling",
        5,
        on("rope", scaling={"rope_type": "linear", "factor": 4.0}),
        note=CHEAP,
    ),
    fault("live-feedback", "norm-output", 5, on("feedback"), fast=True),
    fault("live-no-input-norm", "norm-before-fc-not-applied", 5, on("no-input-norm")),
    fault("live-no-hidden-norm", "engine-residual-or-extra-norm", 5, on("no-hidden-norm")),
    fault("live-normed-residual", "norm-before-residual", 5, on("normed-residual")),
    fault("live-token-shift", "token-shift", 5, on("token-shift")),
    fault(
        "live-step-offset",
        "position-offset",
        5,
        on("step-offset", by=8),
        note="costs nothing on the tiny models (0.09 above the right one, within noise)",
    ),
    fault("live-kept-kv", "engine-residual-or-extra-norm", 5, on("kept-kv"), note=CHEAP),
)
TENSORS = (
    fault(
        "live-block-initial",
        "weights-not-loaded|midlayer-name",
        5,
        on("block-initial"),
        fast=True,
        sweep="live-unloaded",
        note="a whole block at its initial values is what a name that was not known leaves",
    ),
    fault("live-attention-zero", "weights-not-loaded", 5, on("initial", std=0.0), sweep="live-unloaded"),
    fault("live-norms-at-ones", "weights-not-loaded", 5, on("norms-at-ones"), sweep="live-unloaded"),
    fault("live-keys-for-values", "weights-not-loaded", 5, on("swapped"), sweep="live-unloaded"),
    fault("live-targets-head", "trained-head-replaced", 5, on("targets-head")),
    fault(
        "live-quantized",
        "draft-quantization-inherited|weights-not-loaded",
        5,
        on("quantized"),
        note="live numbers are not the file's; that a quantisation made them so, they do not say",
    ),
)
UNSEEN = tuple(
    fault(f"unnamed-{name}", "", 5, on(name), kind="out-of-sight", fast=name == "flipped-head", note=note)
    for name, note in {
        "flipped-head": "",
        "softmax-scale": "",
        "half-mlp": "",
        "other-activation": "",
        "bonus-embedding": "",
        "second-best": "",
        "kv-heads-swapped": "",
        "embedding-shift": "",
        "noise": CHEAP,
    }.items()
)
RANKS = (
    fault(
        "live-partial-sums",
        "tensor-parallel-partial-sums",
        3,
        on("partial-sums"),
        ranks=2,
        note="costs nothing on the tiny models: half of one MLP's output is missing from each chunk",
    ),
    fault("live-other-ranks-shard", "weights-not-loaded", 5, on("other-ranks-shard"), ranks=2),
    fault("unnamed-no-sum", "", 5, on("no-sum"), kind="out-of-sight", ranks=2),
)


@contextlib.contextmanager
def _traffic(url: str) -> Iterator[None]:
    """Two other clients that keep the server busy."""
    done = threading.Event()
    texts = [
        "It is a truth universally acknowledged",
        "The family of Dashwood had long been settled in Sussex.",
    ]

    def ask(text: str) -> None:
        while not done.is_set():
            generate(url, text, 24)

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def busy(bench: Bench) -> Injected:
    """A capture in batches while others use the server."""
    before, out, live = healthy_length(bench), bench.path(), running(bench)
    with _traffic(live.server.url):
        capture = live.capture(out, batch=3)
    return Injected(given(out), before, length_of(capture))


HEALTHY = (
    Case("genuine-busy", "healthy", busy, server="runtime-tp1"),
    fault("genuine-chain", "", None, kind="healthy", stored=True, fast=True),
    fault(
        "genuine-chain-once-more", "", None, kind="healthy", note="after all faults were switched on and off"
    ),
    fault("genuine-two-ranks", "", None, kind="healthy", ranks=2),
)
CASES = (*HEALTHY[:2], *FEED, *WIRING, *TENSORS, *UNSEEN, HEALTHY[2], *RANKS, HEALTHY[3])
