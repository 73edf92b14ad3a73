"""Faults of the trainer's own folder: its config or tensors are wrong, and what is served is true to them.

Nothing differs between training and serving. What shows them is the file itself, or the trainer's stored
features: the drafter must be good on what it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cases import FEATURES, SPECULATORS, TARGET, Bench, Case, Injected
from .drafters import inner, target_copy
from .made import CHAIN, Tensors, as_served, as_trained, copied

QUICK = ("config-norm-output", "d2t-not-exported", "draft-vocab-coverage", "weights-not-sane")


def damaged(name: str, slug: str = "", rung: int = 2, sweep: str = "", **edits: Any) -> Case:
    """The shipped drafter with the edits of `made.copied`, and the features it was really trained on."""

    def inject(bench: Bench) -> Injected:
        path = copied(bench, SPECULATORS, **edits)
        inputs = {"drafter": path, "target": TARGET, "features": FEATURES, "launch": CHAIN}
        return Injected(inputs, as_trained(bench, SPECULATORS), as_served(bench, path))

    return Case(name, "fault", inject, (slug or name,), rung, fast=name in QUICK, sweep=sweep)


def starting(start: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda held: held | {n: edit(t) for n, t in held.items() if n.startswith(start)}


def unmapped(held: Tensors) -> Tensors:
    return {n: t for n, t in held.items() if n not in ("d2t", "t2d")}


def rare_words(held: Tensors) -> Tensors:
    """A draft vocabulary of the 640 ids that begin last: most of what the target writes has no draft id."""
    ids = torch.arange(1024 - 640, 1024)
    reached = torch.zeros(1024, dtype=torch.bool)
    reached[ids] = True
    old = torch.arange(640) + held["d2t"]
    rows = held["lm_head.weight"].float()
    head = rows.mean(0, keepdim=True).repeat(1024, 1)
    head[old] = rows
    maps = {"d2t": (ids - torch.arange(640)).to(held["d2t"].dtype), "t2d": reached.to(held["t2d"].dtype)}
    return held | maps | {"lm_head.weight": head[ids].bfloat16()}


def unlike_feedback(held: Tensors) -> Tensors:
    """The same first draft; of what is fed back to the next step, half of the columns have the other sign.

    So does a drafter that was never shown its own states: right where it is given the target's, lost after.
    """
    signs = torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0).bfloat16()
    return held | {
        "norm.weight": held["norm.weight"] * signs,
        "lm_head.weight": held["lm_head.weight"] * signs,
    }


def noise_for(name: str) -> Callable[[Tensors], Tensors]:
    def change(held: Tensors) -> Tensors:
        spread, draw = held[name].float().std(), torch.Generator().manual_seed(5)
        return held | {name: (torch.randn(held[name].shape, generator=draw) * spread).bfloat16()}

    return change


def another_target(bench: Bench) -> Injected:
    """A fine-tune of the target is served; the drafter and its features belong to the one before."""
    tuned = bench.once("tuned target", lambda: target_copy(bench, 0.5))
    inputs = {"drafter": SPECULATORS, "target": tuned, "features": FEATURES, "launch": CHAIN}
    return Injected(inputs, as_trained(bench, SPECULATORS), None)


def without_layer(name: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {n: t for n, t in held.items() if n != name}


CASES = (
    damaged("config-norm-output", "norm-output", config={"norm_output": False}),
    damaged(
        "config-rope-theta",
        "rope-theta",
        config=inner(rope_parameters={"rope_theta": 100.0}),
        sweep="rope-theta",
    ),
    damaged(
        "config-rope-theta-large",
        "rope-theta",
        config=inner(rope_parameters={"rope_theta": 1e6}),
        sweep="rope-theta",
    ),
    damaged("config-norm-before-residual", "norm-before-residual", config={"norm_before_residual": True}),
    damaged("d2t-not-exported", tensors=unmapped),
    damaged("draft-vocab-coverage", tensors=rare_words),
    damaged("random-embedding-exported", tensors=noise_for("embed_tokens.weight")),
    damaged("exposure-bias", tensors=unlike_feedback),
    damaged("weights-not-sane", tensors=starting("layers.0.mlp.up_proj", torch.zeros_like)),
    damaged(
        "weights-not-finite",
        "weights-not-sane",
        tensors=starting("layers.0.mlp.up_proj", lambda t: torch.full_like(t, float("nan"))),
        sweep="weights-not-sane",
    ),
    Case(
        "target-not-the-trained-one",
        "fault",
        another_target,
        ("target-not-the-trained-one",),
        3,
        untouched=True,
    ),
)
