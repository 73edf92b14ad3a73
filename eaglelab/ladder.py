"""The ladder: the same drafter measured rung by rung, one thing changed a rung.

    1         stored features, trained wiring, every step fed the stored feature and token
    2         stored features, trained wiring, autoregressive           1 -> 2 lost: training
    3.stored  the stored text as this server feeds it, trained wiring   2 -> 3.stored lost: feed
    3         this server's generations, trained wiring
    4         the same, served wiring                                   3 -> 4 lost: wiring
    5         the server itself                                         4 -> 5 lost: runtime

Rungs 1, 2 and 3.stored share their starts, places of the stored text where the next S tokens all are
the target's argmax over its full vocabulary; rungs 3, 4 and 5 walk the same greedy generations. What
lies between 3.stored and 3 is the domain, and is never compared. All rungs use one arithmetic, the
server's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from eaglelab import paired
from eaglelab.drafter import Drafter
from eaglelab.errors import BadInput
from eaglelab.records import Measurement
from eaglelab.replay import Replay, replay
from eaglelab.simulate import Rounds, Speculation, simulate, texts
from eaglelab.stored import StoredText, measure_stored, stored_texts, usable_starts
from eaglelab.wiring import served, trained

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.checkpoint import Checkpoint, TargetModel
    from eaglelab.features import StoredFeatures
    from eaglelab.launch import Launch

FEWEST_STARTS = 100
MEANING = {
    ("1", "2"): "training",
    ("2", "3.stored"): "feed",
    ("3", "4"): "wiring",
    ("4", "5"): "runtime",
}
WHAT = {
    "1": "stored features, trained wiring, each draft step fed the stored feature and token, over all starts",
    "2": "stored features, trained wiring, own drafts fed back, over all starts",
    "3.stored": "stored text as the server feeds it, trained wiring, own drafts fed back, over all starts",
    "3": "captured generations, trained wiring, own drafts fed back, walked from first token to last",
    "4": "captured generations, served wiring, own drafts fed back, walked from first token to last",
    "5": "captured accept lengths of the server's own verifies",
}


@dataclass
class Rung:
    """One rung. `rounds` is None when it could not be measured; then `reason` says why and what to do."""

    name: str
    rounds: Rounds | None = None
    reason: str | None = None
    source: str = ""  # where the features came from

    @property
    def accept_length(self) -> float | None:
        return self.rounds.accept_length if self.rounds else None

    @property
    def definition(self) -> str:
        words = "mean tokens committed per verify, bonus included (1.00: no draft accepted)"
        return f"{words}; {WHAT[self.name]}{f' ({self.source})' if self.source else ''}; {paired.WAY}"


@dataclass
class Ladder:
    """Five rungs (rung 3 on both texts) and the drops between them, by meaning."""

    rungs: dict[str, Rung]
    steps: int
    drops: dict[str, paired.Drop] = field(default_factory=dict)
    replay: Replay | None = None
    skipped: dict[str, str] = field(default_factory=dict)  # requests left out of rungs 3-5, and why

    @property
    def failed(self) -> list[str]:
        """Meanings of the drops that fail: training, feed, wiring, runtime."""
        return [meaning for meaning, drop in self.drops.items() if drop.failed]

    def measurements(self) -> list[Measurement]:
        out = []
        for name, rung in self.rungs.items():
            out.append(_accept_length(rung))
            if rung.rounds is None:
                continue
            share = "share of rounds in which the first j drafts all were accepted"
            for j, value in enumerate(rung.rounds.acceptance, 1):
                out.append(
                    Measurement(
                        name=f"acceptance.rung{name}.draft{j}",
                        value=value,
                        unit="share",
                        definition=f"{share}, j = {j}; {WHAT[name]}",
                        count=len(rung.rounds.lengths),
                    )
                )
        for meaning, drop in self.drops.items():
            out.append(
                Measurement(
                    name=f"drop.{meaning}",
                    value=drop.value,
                    unit="tokens per verify",
                    definition=f"accept length lost to {meaning}; fails if the interval excludes 0 and the "
                    f"loss exceeds 5 % of the rung above; {paired.WAY}",
                    interval=drop.interval,
                    count=drop.stretches,
                )
            )
        return out + (self.replay.measurements() if self.replay else [])


def _accept_length(rung: Rung) -> Measurement:
    return Measurement(
        name=f"accept_length.rung{rung.name}",
        value=rung.accept_length,
        unit="tokens per verify",
        definition=rung.definition,
        reason=rung.reason,
        interval=paired.interval(rung.rounds) if rung.rounds else None,
        count=len(rung.rounds.lengths) if rung.rounds else None,
    )


def climb(
    checkpoint: Checkpoint,
    target: TargetModel,
    capture: Capture | None = None,
    stored: StoredFeatures | None = None,
    launch: Launch | None = None,
    device: str = "cpu",
    served_as: Checkpoint | None = None,
) -> Ladder:
    """Measure every rung that the evidence allows; the others say what is missing.

    stored: eaglelab.features.StoredFeatures. launch: how the server was started, if the capture should
    not be believed. served_as: the same drafter in the form that the engine loads, if
    `checkpoint` is in another. The target gives the truth on stored text and what the drafter shares with it.
    """
    launch = launch or (capture.launch if capture else None)
    launch = launch.with_target(target.facts) if launch else None
    speculation = Speculation.of(launch) if launch else Speculation(5, 1, 6)
    feed, wiring = trained(checkpoint, target.facts)
    form = served_as or checkpoint
    actual, why = _served(form, launch)
    dtype = getattr(torch, actual[1].dtype if actual else wiring.dtype)
    drafter = Drafter(checkpoint, wiring, target, device, dtype)
    ladder = Ladder({name: Rung(name) for name in ("1", "2", "3.stored", "3", "4", "5")}, speculation.steps)
    _stored_rungs(ladder, drafter, target, stored, capture, feed)
    if capture is None or launch is None:
        for name in ("3", "4", "5"):
            ladder.rungs[name].reason = "no capture: give --server or --capture"
    else:
        _rung5(ladder, capture, launch)
        _rung4(ladder, capture, speculation, form, target, actual, why, device, dtype)
        _rung3(ladder, capture, speculation, drafter, feed)
    for (above, below), meaning in MEANING.items():
        upper, lower = ladder.rungs[above].rounds, ladder.rungs[below].rounds
        if upper is not None and lower is not None:
            drop = paired.compare(upper, lower, by_start=above in ("1", "2"))
            if drop.stretches:
                ladder.drops[meaning] = drop
    return ladder


def _served(checkpoint: Checkpoint, launch: Launch | None):
    """-> (feed and wiring that the engine makes of this checkpoint, or None; why not)."""
    if launch is None:
        return None, "no launch: give --server, --capture or --launch"
    try:
        return served(checkpoint, launch), None
    except BadInput as error:
        return None, str(error)


def _stored_rungs(ladder, drafter, target, stored, capture, feed) -> None:
    rungs = [ladder.rungs[name] for name in ("1", "2", "3.stored")]
    if stored is None:
        for rung in rungs:
            rung.reason = "no stored features: give the trainer's (--features)"
        return
    found: list[StoredText] = []
    starts = 0
    try:
        for text in stored_texts(stored, feed):
            text.starts = usable_starts(text, target, ladder.steps)
            found.append(text)
            starts += len(text.starts)
            if starts >= 20 * FEWEST_STARTS:
                break
    except BadInput as error:
        for rung in rungs:
            rung.reason = str(error)
        return
    if starts < FEWEST_STARTS:
        for rung in rungs:
            rung.reason = (
                f"only {starts} starts at which the next {ladder.steps} stored tokens all are the target's "
                f"argmax; {FEWEST_STARTS} are needed: store features of the target's own greedy text"
            )
        return
    pairs = [measure_stored(drafter, text, ladder.steps) for text in found]
    for rung, parts in zip(rungs, zip(*pairs, strict=True), strict=False):
        rung.rounds = Rounds.join(list(parts), ladder.steps)
    again = [text.as_fed(capture, feed) for text in found] if capture else []
    fed = [text for text in again if text is not None]
    if not fed:
        rungs[2].reason = "no capture"
        if capture:
            rungs[2].reason = "the stored texts were not sent to the server: capture with --features"
        return
    rungs[2].rounds = Rounds.join([measure_stored(drafter, t, ladder.steps)[1] for t in fed], ladder.steps)
    rungs[2].source = ", ".join(sorted({text.source for text in fed}))


def _rung5(ladder: Ladder, capture: Capture, launch: Launch) -> None:
    if reason := _not_replayable(launch):
        ladder.rungs["5"].reason = reason
        return
    found, ladder.skipped = texts(capture)
    parts = []
    for text in found:
        rounds = capture.requests[text.rid].rounds
        starts, lengths = ([r.n for r in rounds], [r.accept_len for r in rounds])
        parts.append(Rounds([text.rid] * len(rounds), np.asarray(starts), np.asarray(lengths), ladder.steps))
    joined = Rounds.join(parts, ladder.steps)
    if len(joined.lengths):
        ladder.rungs["5"].rounds = joined
    else:
        ladder.rungs["5"].reason = f"no complete request was captured ({_first(ladder.skipped)})"


def _rung4(ladder, capture, speculation, checkpoint, target, actual, why, device, dtype) -> None:
    rung = ladder.rungs["4"]
    rung.reason = ladder.rungs["5"].reason or why
    if rung.reason:
        return
    drafter = Drafter(checkpoint, actual[1], target, device, dtype)
    try:
        ladder.replay = replay(capture, drafter)
        walks = [simulate(drafter, text, speculation) for text in texts(capture)[0]]
    except BadInput as error:
        rung.reason = f"the served wiring does not fit what was captured: {error}"
        return
    rung.rounds = Rounds.join(walks, ladder.steps)


def _rung3(ladder: Ladder, capture: Capture, speculation: Speculation, drafter: Drafter, feed) -> None:
    rung = ladder.rungs["3"]
    rung.reason = ladder.rungs["5"].reason
    if rung.reason:
        return
    found, _ = texts(capture)
    width = found[0].features.shape[1]
    if width == feed.width:
        rung.source = "rows as captured"
    else:
        found, missing = texts(capture, feed)
        rung.source = f"re-prefilled: served rows are {width} wide, trained ones {feed.width}"
        if not found:
            rung.reason = (
                f"served rows are {width} wide, trained ones {feed.width}, and there is no re-prefill at "
                f"depths {list(feed.depths)} ({_first(missing)}): capture with re-prefill"
            )
            return
    rung.rounds = Rounds.join([simulate(drafter, text, speculation) for text in found], ladder.steps)


def _not_replayable(launch: Launch) -> str | None:
    if launch.flag("--speculative-use-rejection-sampling") is not None:
        return "the server verifies by rejection sampling: drafts are drawn, not chosen"
    if launch.flag("--disaggregation-mode") not in (None, "null"):
        return "prefill and decode run in different servers (disaggregation): neither sees a whole request"
    return None


def _first(reasons: dict[str, str]) -> str:
    return next(iter(reasons.values()), "no request")
