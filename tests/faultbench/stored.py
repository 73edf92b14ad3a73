"""Faults of the trainer's stored features. Checkpoint, config and launch are right in all of them.

Given: the shipped drafter, its target, a damaged dump, the launch. The accept lengths are those of the same
drafter, fed the rows of the dump and the right ones: a drafter trained on such a dump could not be better.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.drafter import Drafter
from eaglelab.errors import BadInput
from eaglelab.features import StoredFeatures
from eaglelab.simulate import Rounds
from eaglelab.stored import Truth, measure_stored, stored_texts, usable_starts
from eaglelab.trained import trained

from .cases import FEATURES, SPECULATORS, TARGET, Bench, Case, Injected, Length
from .drafters import normed
from .made import CHAIN, Tensors, edit_masks, edit_stored, store

Make = Callable[[Bench], Path]


def on_dump(folder: Path) -> Length | None:
    """Accept length on a dump's own rows, over all starts; None where the dump cannot be read."""
    checkpoint, target = open_checkpoint(SPECULATORS), open_target(TARGET)
    feed, wiring = trained(checkpoint, target.facts)
    drafter, parts = Drafter(checkpoint, wiring, target, dtype=torch.float32), []
    try:
        for text in stored_texts(StoredFeatures.open(folder), feed):
            text.starts = usable_starts(text, Truth(target), 5)
            parts.append(measure_stored(drafter, text, 5)[1])
    except BadInput:
        return None
    found = Rounds.join(parts, 5)
    return Length(found.accept_length, "simulated") if len(found.lengths) else None


def dump(name: str, make: Make, slug: str = "", rung: int = 3, note: str = "", sweep: str = "") -> Case:
    """A damaged dump. On rung 1 it spoils training only: what a server accepts is not simulated."""

    def inject(bench: Bench) -> Injected:
        folder = make(bench)
        inputs = {"drafter": SPECULATORS, "target": TARGET, "features": folder, "launch": CHAIN}
        return Injected(inputs, on_dump(FEATURES), on_dump(folder) if rung > 1 else None)

    fast = not sweep
    return Case(name, "fault", inject, (slug or name,), rung, True, fast=fast, note=note, sweep=sweep)


def short(held: Tensors) -> Tensors:
    """The first 64 rows, which a prefix cache held, were not computed again."""
    return {"token_ids": held["token_ids"], "hidden_states": held["hidden_states"][64:]}


def short_on_both(held: Tensors) -> Tensors:
    """The same, and the ids cut alike: only the dataset knows how long the text was."""
    return {name: tensor[64:] for name, tensor in held.items()}


def overflown(held: Tensors) -> Tensors:
    states = held["hidden_states"].clone()
    states[7, 1, 3] = float("inf")
    return held | {"hidden_states": states}


def rotation(width: int = 128) -> torch.Tensor:
    """An orthogonal matrix: it keeps every norm and every product of two rotated vectors."""
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(4)))[0]


def rotated(states: torch.Tensor) -> torch.Tensor:
    return states @ rotation()


def later(states: torch.Tensor) -> torch.Tensor:
    """Row i holds what belongs to token i + 1."""
    return torch.cat([states[1:], states[-1:]])


def mask_on_prompt(mask: list[int]) -> list[int]:
    return [int(i > 0 and not m) for i, m in enumerate(mask)]


CASES = (
    dump("stored-features-shifted", lambda bench: store(bench, (3, 5, 6))),
    dump("teacher-norm", lambda bench: store(bench, last=normed), rung=1),
    dump("features-overflow", lambda bench: edit_stored(bench, overflown)),
    dump("dump-truncated", lambda bench: edit_stored(bench, short), rung=1),
    dump(
        "dump-and-ids-truncated",
        lambda bench: edit_stored(bench, short_on_both),
        "dump-truncated",
        1,
        sweep="dump-truncated",
    ),
    dump(
        "target-quantized-or-rotated",
        lambda bench: store(bench, edit=rotated),
        note="the dump comes from a rotated model, and so does its teacher's state",
    ),
    dump("token-shift", lambda bench: store(bench, edit=later)),
    dump("loss-mask", lambda bench: edit_masks(bench, mask_on_prompt), rung=1),
    dump(
        "loss-mask-empty",
        lambda bench: edit_masks(bench, lambda mask: [0] * len(mask)),
        "loss-mask",
        1,
        sweep="loss-mask",
    ),
    dump(
        "stored-chunks-swapped",
        lambda bench: store(bench, (4, 2, 5)),
        "chunk-order",
        note="the dump holds the right depths in another order",
    ),
)
