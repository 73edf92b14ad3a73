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

from eaglelab import paired, training_accuracy
from eaglelab.drafter import Drafter
from eaglelab.errors import BadInput
from eaglelab.records import Measurement
from eaglelab.replay import Replay, replay
from eaglelab.served import served
from eaglelab.simulate import Rounds, Speculation, Text, simulate, texts
from eaglelab.stored import StoredText, Truth, measure_stored, stored_texts, usable_starts
from eaglelab.trained import trained
from eaglelab.training_accuracy import TrainingAccuracy

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.checkpoint import Checkpoint, TargetModel
    from eaglelab.features import StoredFeatures
    from eaglelab.launch import Launch

FEWEST_STARTS, MOST_STARTS = 100, 2000
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
    accuracy: TrainingAccuracy | None = None  # the trainer's own figure on rung 1's texts: no rung

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
        out += self.accuracy.measurements() if self.accuracy else []
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
    scene = _Scene(checkpoint, served_as or checkpoint, target, capture, stored, launch, device)
    scene.stored_rungs()
    scene.rung5()
    scene.rung4()
    scene.rung3()
    ladder = scene.ladder
    for (above, below), meaning in MEANING.items():
        upper, lower = ladder.rungs[above].rounds, ladder.rungs[below].rounds
        if upper is not None and lower is not None:
            drop = paired.compare(upper, lower, by_start=above in ("1", "2"))
            if drop.stretches:
                ladder.drops[meaning] = drop
    return ladder


class _Scene:
    """What a climb shares between its rungs; each method fills in its own, or the reason why not."""

    def __init__(self, checkpoint, form, target, capture, stored, launch, device):
        self.form, self.target, self.capture, self.stored = form, target, capture, stored
        self.folder = checkpoint.path
        self.launch = launch.with_target(target.facts) if launch else None
        self.speculation = Speculation.of(launch) if launch else Speculation(5, 1, 6)
        self.steps, self.device = self.speculation.steps, device
        self.ladder = Ladder({name: Rung(name) for name in WHAT}, self.steps)
        self.feed, wiring = trained(checkpoint, target.facts)
        self.served, self.not_served = self._served()
        self.dtype = getattr(torch, self.served[1].dtype if self.served else wiring.dtype)
        self.drafter, self.not_trained = None, None
        try:
            self.drafter = Drafter(checkpoint, wiring, target, device, self.dtype)
        except BadInput as error:
            self.not_trained = f"the trained wiring cannot be built: {error}"

    def _served(self):
        """-> (feed and wiring that the engine makes of this checkpoint, or None; why not)."""
        if self.launch is None:
            return None, "no launch: give --server, --capture or --launch"
        try:
            return served(self.form, self.launch), None
        except BadInput as error:
            return None, str(error)

    def skip(self, reason: str, *names: str) -> None:
        for name in names:
            self.ladder.rungs[name].reason = reason

    def stored_rungs(self) -> None:
        names = ("1", "2", "3.stored")
        if self.stored is None:
            return self.skip("no stored features: give the trainer's (--features)", *names)
        if self.drafter is None:
            return self.skip(self.not_trained, *names)
        found: list[StoredText] = []
        starts, truth = 0, Truth(self.target, self.device)
        try:
            for text in stored_texts(self.stored, self.feed):
                text.starts = usable_starts(text, truth, self.steps)
                found.append(text)
                starts += len(text.starts)
                if starts >= MOST_STARTS:
                    break
        except BadInput as error:
            return self.skip(str(error), *names)
        self.ladder.accuracy = training_accuracy.of_stored(
            self.drafter, truth, self.stored, found, self.steps, self.folder
        )
        if starts < FEWEST_STARTS:
            return self.skip(
                f"only {starts} starts at which the next {self.steps} stored tokens all are the target's "
                f"argmax; {FEWEST_STARTS} are needed: store features of the target's own greedy text",
                *names,
            )
        pairs = [measure_stored(self.drafter, text, self.steps) for text in found]
        for name, parts in zip(("1", "2"), zip(*pairs, strict=True), strict=True):
            self.ladder.rungs[name].rounds = Rounds.join(list(parts), self.steps)
        self.stored_as_fed(found)

    def stored_as_fed(self, found: list[StoredText]) -> None:
        if self.capture is None:
            return self.skip("no capture: give --server or --capture", "3.stored")
        again = [text.as_fed(self.capture, self.feed) for text in found]
        fed = [text for text in again if text is not None]
        starts = sum(len(text.starts) for text in fed)
        if starts < FEWEST_STARTS:
            had = f"{starts} of their starts, {FEWEST_STARTS} are needed" if fed else "none of them"
            return self.skip(
                f"the capture has {had}: capture with --features, so that the stored texts are sent too",
                "3.stored",
            )
        rung = self.ladder.rungs["3.stored"]
        rounds = [measure_stored(self.drafter, text, self.steps)[1] for text in fed]
        rung.rounds, rung.source = Rounds.join(rounds, self.steps), ", ".join(sorted({t.source for t in fed}))

    def rung5(self) -> None:
        if self.capture is None or self.launch is None:
            return self.skip("no capture: give --server or --capture", "3", "4", "5")
        if reason := _not_replayable(self.launch):
            return self.skip(reason, "3", "4", "5")
        found, self.ladder.skipped = texts(self.capture)
        parts = []
        for text in found:
            rounds = self.capture.requests[text.rid].rounds
            starts, lengths = np.asarray([(r.n, r.accept_len) for r in rounds], np.int64).reshape(-1, 2).T
            parts.append(Rounds([text.rid] * len(rounds), starts, lengths, self.steps))
        joined = Rounds.join(parts, self.steps)
        if not len(joined.lengths):
            why = next(iter(self.ladder.skipped.values()), "no request")
            none = "no verify was captured: generate more than one token" if parts else ""
            return self.skip(none or f"no complete request was captured ({why})", "3", "4", "5")
        self.ladder.rungs["5"].rounds = joined

    def rung4(self) -> None:
        rung = self.ladder.rungs["4"]
        rung.reason = rung.reason or self.not_served
        if rung.reason:
            return
        try:
            drafter = Drafter(self.form, self.served[1], self.target, self.device, self.dtype)
            self.ladder.replay = replay(self.capture, drafter)
            self.walk(rung, drafter, texts(self.capture)[0])
        except BadInput as error:
            rung.reason = f"the served wiring does not fit what was captured: {error}"

    def rung3(self) -> None:
        rung = self.ladder.rungs["3"]
        rung.reason = rung.reason or self.not_trained
        if rung.reason:
            return
        found, _ = texts(self.capture)
        width, wanted = found[0].features.shape[1], self.feed.width
        rung.source = "rows as captured"
        if width != wanted:
            found, missing = texts(self.capture, self.feed)
            widths = f"served rows are {width} wide, trained ones {wanted}"
            rung.source = f"re-prefilled: {widths}"
            if not found:
                why = f"at depths {list(self.feed.depths)} ({next(iter(missing.values()))})"
                rung.reason = f"{widths}, and there is no re-prefill {why}: capture with re-prefill"
                return
        self.walk(rung, self.drafter, found)

    def walk(self, rung: Rung, drafter: Drafter, found: list[Text]) -> None:
        """Measure a rung along the captured generations."""
        rounds = Rounds.join([simulate(drafter, text, self.speculation) for text in found], self.steps)
        if len(rounds.lengths):
            rung.rounds = rounds
        else:
            rung.reason = "every generation ends before its first round does: ask for more new tokens"


def _not_replayable(launch: Launch) -> str | None:
    if launch.flag("--speculative-use-rejection-sampling") is not None:
        return "the server verifies by rejection sampling: drafts are drawn, not chosen"
    if launch.flag("--disaggregation-mode") not in (None, "null"):
        return "prefill and decode run in different servers (disaggregation): neither sees a whole request"
    return None
