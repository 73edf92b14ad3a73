"""Launches and configs that genuine SGLang starts, and that go wrong; healthy ones that look odd.

Every case starts the real server on the real (damaged) folder, captures it, and stops it. Where the fault can
be undone by a flag or a line, the right launch is measured too: what `diagnose` predicts must be that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .cases import SGLANG, SPECULATORS, Bench, Case, Injected, Kind, Length
from .live import length_of, take
from .made import Tensors, converted, copied
from .runtime import CHEAP, given, healthy_length, servers
from .variants import variant

NEVER_RIGHT = ("residual-normed", "qk-norms")  # variants that SGLang cannot serve as they were trained
IDS = "eagle_aux_hidden_state_layer_ids"


def measured(bench: Bench, drafter: Path, out: Path | None = None, rest: str = "", **how: Any) -> Length:
    """Start a server with this drafter and flags, capture it into `out`, stop it: its accept length."""
    how |= {"extra_flags": rest.split(), "drafter": drafter, "python": bench.python}
    holder = servers(bench)
    name = f"{drafter} {sorted(map(str, how.items()))}"
    try:
        live = holder.get(name, **how)
        return length_of(take(live.server, out or bench.path(), reprefill=out is not None))
    finally:
        holder.stop()


def served(
    edit: dict[str, Any] | None = None,
    remove: tuple[str, ...] = (),
    tensors: Callable[[Tensors], Tensors] | None = None,
    of: str = "",
    **how: Any,
) -> Callable[[Bench], Injected]:
    """The shipped drafter (or a variant's conversion, `of`) with these edits, served with these arguments."""

    def inject(bench: Bench) -> Injected:
        trainers = trained_otherwise(bench, of) if of else SPECULATORS
        right = converted(bench, trainers) if of else SGLANG
        if of and not (edit or remove or tensors):
            out, length = rightly_served(bench, of)
            return Injected(given(out, drafter=trainers), None if of in NEVER_RIGHT else length, length)
        folder = copied(bench, right, edit, remove, tensors) if edit or remove or tensors else right
        out = bench.path()
        after = measured(bench, folder, out, **how)
        before = rightly_served(bench, of)[1] if of else healthy_length(bench)
        return Injected(given(out, drafter=trainers), before, after)

    return inject


def rightly_served(bench: Bench, of: str) -> tuple[Path, Length]:
    """A capture of a variant's right conversion, and its accept length; made once."""

    def make() -> tuple[Path, Length]:
        out = bench.path()
        return out, measured(bench, converted(bench, trained_otherwise(bench, of)), out)

    return bench.once(f"rightly served {of}", make)


def trained_otherwise(bench: Bench, name: str) -> Path:
    """A variant in a folder whose name says nothing."""
    return bench.once(f"variant {name}", lambda: copied(bench, variant(name, quiet)))


def weak(bench: Bench) -> Injected:
    """A drafter that is merely weak: noise on its fc, in the trainer's file already."""

    def noisy(held: Tensors) -> Tensors:
        weight = held["fc.weight"].float()
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(4))
        return held | {"fc.weight": (weight + weight.std() * noise).to(held["fc.weight"].dtype)}

    trainers = copied(bench, SPECULATORS, tensors=noisy)
    out = bench.path()
    after = measured(bench, converted(bench, trainers), out)
    return Injected(given(out, drafter=trainers), healthy_length(bench), after)


def quiet(_: str) -> None:
    """Say nothing."""


def case(name: str, slug: str, rung: int | None, kind: Kind = "fault", **more: Any) -> Case:
    """One case of this module; `more`: fields of Case, the rest for `served`."""
    fields = {k: more.pop(k) for k in ("fast", "sweep", "relaunch", "note") if k in more}
    inject = served(**more)
    if kind == "healthy":
        inject = unpriced(inject)
    return Case(name, kind, inject, (slug,) if slug else (), rung, False, f"launch {name}", **fields)


def unpriced(inject: Callable[[Bench], Injected]) -> Callable[[Bench], Injected]:
    """There is no other launch to compare a healthy one with."""

    def alike(bench: Bench) -> Injected:
        found = inject(bench)
        return replace(found, before=found.after)

    return alike


def nested(**values: Any) -> dict[str, Any]:
    return {"eagle_config": values}


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {n: t for n, t in held.items() if not any(part in n for part in parts)}


def renamed(held: Tensors) -> Tensors:
    return {n.replace("midlayer.", "decoder_layer."): t for n, t in held.items()}


FAULTS = (
    case("served-eagle-flag", "eagle-flag-on-eagle3-drafter", 4, relaunch=True, algorithm="EAGLE"),
    case(
        "served-nextn",
        "eagle-flag-on-eagle3-drafter",
        4,
        relaunch=True,
        sweep="served-eagle-flag",
        algorithm="NEXTN",
    ),
    case("served-aux-off", "aux-hidden-state-off", 4, relaunch=True, edit=nested(use_aux_hidden_state=False)),
    case("served-no-head", "lm-head-missing", 4, relaunch=True, tensors=without("lm_head")),
    case("served-tied", "tied-head-reduced-vocab", 4, relaunch=True, edit={"tie_word_embeddings": True}),
    case("served-renamed-block", "midlayer-name", 4, relaunch=True, tensors=renamed),
    case(
        "served-no-map",
        "d2t-not-exported|d2t-dropped",
        4,
        relaunch=True,
        tensors=without("d2t", "t2d"),
        note="the conversion lost the map, and the engine applies none",
    ),
    case("served-ids-copied", "ids-copied-in-conversion", 3, relaunch=True, edit=nested(**{IDS: [2, 4, 5]})),
    case(
        "served-ids-one-less",
        "ids-off-by-one|embedding-counted",
        3,
        relaunch=True,
        edit=nested(**{IDS: [0, 2, 3]}),
        note="one layer early: an embedding counted on one side does just that",
    ),
    case("served-feedback", "norm-output", 4, relaunch=True, remove=("norm_output",)),
    case(
        "served-norm-before-fc",
        "norm-before-fc-not-applied",
        4,
        relaunch=True,
        edit=nested(norm_before_fc=False),
    ),
    case("served-theta", "rope-theta", 4, relaunch=True, edit={"rope_theta": 100.0}),
    case(
        "served-partial-rotary",
        "mrope-or-partial-rotary",
        4,
        relaunch=True,
        edit={"partial_rotary_factor": 0.5},
    ),
    case(
        "served-yarn",
        "rope-scaling",
        4,
        relaunch=True,
        edit={"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    ),
)
TRAINED = (
    case("trained-residual-normed", "norm-before-residual", 4, of="residual-normed"),
    case("trained-qk-norms", "qk-norm-or-bias-dropped", 4, of="qk-norms", note=CHEAP),
    case(
        "trained-theta-lost",
        "rope-theta",
        4,
        relaunch=True,
        of="theta",
        edit={"rope_theta": 10000.0},
        note="costs nothing: a drafter of so short contexts hardly minds; `served-theta` costs much",
    ),
    case(
        "trained-feedback-raw", "norm-output", 4, relaunch=True, of="feedback-raw", edit={"norm_output": True}
    ),
    case(
        "trained-norms-lost",
        "norm-before-fc-not-applied",
        4,
        relaunch=True,
        of="norm-per-chunk",
        edit={"fc_norm": False},
    ),
)
HEALTHY = (
    case("genuine-tree", "", None, "healthy", topk=4),
    case(
        "genuine-defaulted-ids",
        "",
        None,
        "healthy",
        edit=nested(**{IDS: None}),
        note="the engine's default ids are the trained ones",
    ),
    case("genuine-theta", "", None, "healthy", of="theta"),
    case("genuine-feedback-raw", "", None, "healthy", of="feedback-raw"),
    case("genuine-norm-per-chunk", "", None, "healthy", of="norm-per-chunk"),
    Case(
        "genuine-weak",
        "healthy",
        weak,
        server="launch genuine-weak",
        note="a weak drafter that is served as it was trained is no fault of serving",
    ),
    case("genuine-bfloat16", "", None, "healthy", rest="--dtype bfloat16"),
)
CASES = (*FAULTS, *TRAINED, *HEALTHY)
