"""Counterfactuals: change a cause, derive feed and wiring anew, and simulate.

A cause is something that a person can change: a launch flag, or a line of the drafter's config. One
field of a wiring is not a cause: a wrong flag moves fc, head and vocabulary map together, and undoing
one of them explains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from eaglelab import paired
from eaglelab.drafter import Drafter
from eaglelab.errors import BadInput
from eaglelab.overlay import Overlay
from eaglelab.served import served
from eaglelab.simulate import Rounds, Speculation, simulate, texts
from eaglelab.wiring import Feed, Wiring

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.checkpoint import Checkpoint, TargetModel
    from eaglelab.diff import Difference
    from eaglelab.evidence import Evidence
    from eaglelab.launch import Launch


@dataclass
class Prediction:
    """What an edit would give. `rounds` is None when it cannot be predicted; then `reason` says why."""

    edit: str
    launch: Launch
    feed: Feed | None = None
    wiring: Wiring | None = None
    rounds: Rounds | None = None
    reason: str | None = None
    source: str = ""

    @property
    def accept_length(self) -> float | None:
        return self.rounds.accept_length if self.rounds else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return paired.interval(self.rounds) if self.rounds else None


def counterfactual(
    capture: Capture,
    checkpoint: Checkpoint,
    target: TargetModel,
    flags: str = "",
    config: Mapping[str, Any] | None = None,
    launch: Launch | None = None,
    device: str = "cpu",
) -> Prediction:
    """Predict the accept length after an edit.

    flags: launch flags given in place of the old ones ("--speculative-algorithm EAGLE3"). config: fields of
    the drafter's config.json, nested as in the file; None removes one. Features come from the capture if
    the edit leaves the feed alone, else from its re-prefill.
    """
    before = (launch or capture.launch).with_target(target.facts)
    after = before.with_flags(flags) if flags else before
    words = [flags] if flags else []
    words += [f"config.json: {name} = {value!r}" for name, value in (config or {}).items()]
    found = Prediction(", ".join(words) or "as it is", after)
    try:
        edited = checkpoint.with_config(config) if config else checkpoint
        found.feed, found.wiring = served(edited, after)
        _simulate(found, capture, edited, target, _feed(checkpoint, before), device)
    except BadInput as error:
        found.reason = str(error)
    return found


def undo(
    evidence: Evidence,
    flags: str = "",
    config: Mapping[str, Any] | None = None,
    fields: Sequence[Difference] = (),
    device: str = "cpu",
) -> Prediction:
    """Predict the accept length if causes were undone: by flags, by config, or `fields` served as trained.

    fields: differences as `diff` tells them, or parts of them ("rope.theta"; some of the names in "dropped").
    Each takes the trained value in the served wiring or feed, and the trainer's tensors where it is one.
    """
    capture, target, launch = evidence.capture, evidence.target, evidence.launch
    if capture is None or target is None:
        raise BadInput(evidence.why_not("capture" if capture is None else "ladder"))
    after = launch.with_flags(flags) if flags else launch
    found = Prediction(
        ", ".join([*filter(None, [flags]), *(config or {}), *(d.field for d in fields)]), after
    )
    try:
        form = evidence.checkpoint.with_config(config) if config else evidence.checkpoint
        feed, wiring = served(form, after)
        found.feed, found.wiring = as_trained((feed, wiring), evidence.trained, fields)
        tensors = _tensors(evidence, form, fields)
        _simulate(found, capture, tensors, target, _feed(evidence.checkpoint, launch), device)
    except BadInput as error:
        found.reason = str(error)
    return found


def _simulate(
    found: Prediction, capture: Capture, tensors: Any, target: TargetModel, now: Feed | None, device: str
) -> None:
    """Fill in the rounds of a prediction with feed and wiring; `now`: the feed that was captured."""
    assert found.feed is not None and found.wiring is not None
    used, found.source = _texts(capture, found.feed, now)
    drafter = Drafter(tensors, found.wiring, target, device, getattr(torch, found.wiring.dtype))
    speculation = Speculation.of(found.launch)
    found.rounds = Rounds.join([simulate(drafter, text, speculation) for text in used], found.launch.steps)


def as_trained(
    now: tuple[Feed, Wiring], trained: tuple[Feed, Wiring], fields: Sequence[Difference]
) -> tuple[Feed, Wiring]:
    """Feed and wiring `now`, with the trained value in each of `fields`."""
    feed, wiring = now
    for d in fields:
        name = d.field
        if d.part == "tensors":
            continue
        if d.part == "feed":
            feed = replace(feed, **{name: getattr(trained[0], name)})
        elif name.startswith("rope."):
            part = name.removeprefix("rope.")
            wiring = replace(wiring, rope=replace(wiring.rope, **{part: getattr(trained[1].rope, part)}))
        elif name in ("unloaded", "dropped"):
            left: dict[str, Any] = {name: tuple(n for n in getattr(wiring, name) if n not in d.served)}
            wiring = replace(wiring, **left)
        else:
            wiring = replace(wiring, **{name: getattr(trained[1], name)})
    if any(d.field == "depths" for d in fields):  # width and a bypassed fc follow from them
        feed = replace(feed, width=trained[0].width)
        wiring = replace(wiring, fc=trained[1].fc)
    return feed, wiring


def _tensors(evidence: Evidence, form: Checkpoint, fields: Sequence[Difference]) -> Overlay:
    """The served file's tensors, with the trainer's where `fields` undo a difference of them."""
    right, names = evidence.right or evidence.original, {d.field for d in fields if d.part == "tensors"}
    for d in fields:
        if d.field in ("unloaded", "dropped"):
            names |= set(d.served)
        if d.field == "lm_head":
            names.add("lm_head.weight")
    replaced = {name: right.tensors[name] for name in names if name in right.tensors}
    if any(d.field == "depths" for d in fields):  # in the order in which the trainer wrote its ids
        first = ("fc.weight", "input_norm.weight", "fc_norm.")
        replaced |= {n: info for n, info in evidence.original.tensors.items() if n.startswith(first)}
    return Overlay(form, replaced, spare=evidence.original)


def _feed(checkpoint: Checkpoint, launch: Launch) -> Feed | None:
    try:
        return served(checkpoint, launch)[0]
    except BadInput:
        return None


def _texts(capture: Capture, feed: Feed, now: Feed | None):
    """Texts under a feed -> (texts, where their features came from)."""
    if now is not None and replace(now, dtype=feed.dtype) == feed:
        found, _ = texts(capture)
        if found and found[0].features.shape[1] == feed.width:
            return found, "rows as captured"
    found, missing = texts(capture, feed)
    if not found:
        why = next(iter(missing.values()), "no request was captured")
        raise BadInput(f"no features for depths {list(feed.depths)}: {why}; capture with re-prefill")
    return found, "re-prefilled"
