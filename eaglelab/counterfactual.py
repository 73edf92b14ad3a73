"""Counterfactuals: change a cause, derive feed and wiring anew, and simulate.

A cause is something that a person can change: a launch flag, or a line of the drafter's config. One
field of a wiring is not a cause: a wrong flag moves fc, head and vocabulary map together, and undoing
one of them explains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from eaglelab import paired
from eaglelab.drafter import Drafter
from eaglelab.errors import BadInput
from eaglelab.served import served
from eaglelab.simulate import Rounds, Speculation, simulate, texts
from eaglelab.wiring import Feed, Wiring

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.checkpoint import Checkpoint, TargetModel
    from eaglelab.launch import Launch

DEFINITION = (
    "mean tokens committed per verify, bonus included, that this server's own generations would have "
    f"had after the edit; simulated on recorded features of the target; {paired.WAY}"
)


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
        used, found.source = _texts(capture, found.feed, _feed(checkpoint, before))
        drafter = Drafter(edited, found.wiring, target, device, getattr(torch, found.wiring.dtype))
        speculation = Speculation.of(after)
        found.rounds = Rounds.join([simulate(drafter, text, speculation) for text in used], after.steps)
    except BadInput as error:
        found.reason = str(error)
    return found


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
