"""The stepper's model: where a reader stands in a capture, and its round drafted again under several wirings.

No widget and no HTML here: `workbook.stops` renders what this computes, `widgets.stepping` hears keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch

from eaglelab.drafter import Drafter
from eaglelab.errors import BadInput
from eaglelab.misses import generations
from eaglelab.served import served
from eaglelab.simulate import Speculation, captured_text, reprefilled_text
from eaglelab.steps import Pass, View, Walk
from eaglelab.verifier import Verifier
from eaglelab.wiring import Feed, Rope, Wiring

if TYPE_CHECKING:
    from eaglelab.checkpoint import Checkpoint
    from eaglelab.evidence import Evidence
    from eaglelab.launch import Launch
    from eaglelab.traces import Round, Trace

EXTEND, VERIFY = "draft-extend", "verify"
KEPT = 24  # views that are kept: each holds rows as wide as the vocabulary
# Fields whose change means something for one replayed round; sizes and names of tensors are not among them.
FIELDS = (
    "fc", "norm_before_fc", "residual", "feedback", "rope.theta", "rope.layout", "qk_norm", "later_norm",
    "window", "eps", "embedding", "lm_head", "vocab_map", "token_shift", "position_start", "step_offset",
    "tree_kv",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One way to feed and wire the drafter: "served", "trained" or "edited"."""

    name: str
    checkpoint: Checkpoint
    feed: Feed
    wiring: Wiring
    launch: Launch


class Stepper:
    """A request, a round of it, a stop in that round; `sides` to draft it under.

    BadInput: there is nothing to step through. `where`: (request, round, stop), each from 0.
    """

    def __init__(self, evidence: Evidence, request: str = "", number: int = 0):
        self.evidence = evidence
        self.requests = _requests(evidence)
        self.sides: dict[str, Side | str] = _sides(evidence)
        self._walks: dict[tuple[str, str], Walk | str] = {}
        self._views: dict[tuple[str, str, int], View | str] = {}
        self._drafters: dict[str, Drafter] = {}
        self.request = self.number = self.stop = 0
        self.edits = ""
        self.go(request=request or self.requests[0].rid, number=number)

    # -- where the reader stands

    @property
    def trace(self) -> Trace:
        return self.requests[self.request]

    @property
    def round(self) -> Round:
        """The round as it happened on the server."""
        return self.trace.rounds[self.number]

    @property
    def stops(self) -> list[str]:
        """The draft-extend, a stop a draft step, the verify."""
        steps = [len(v.passes) for v in self.views.values() if not isinstance(v, str)]
        return [EXTEND, *(f"draft step {i + 1}" for i in range(max(steps, default=0))), VERIFY]

    def go(self, request: str | None = None, number: int | None = None, stop: int | None = None) -> None:
        """Go to a request by its id, a round, a stop. BadInput, and no move, where there is none."""
        at, rids = self.request, [t.rid for t in self.requests]
        if request is not None:
            if request not in rids:
                raise BadInput(f"request {request!r}: there is none; there are {', '.join(rids)}")
            at = rids.index(request)
        rounds = len(self.requests[at].rounds)
        asked = number if number is not None else 0 if at != self.request else self.number
        if not 0 <= asked < rounds:
            raise BadInput(f"round_number {asked}: request {rids[at]} has rounds 0 to {rounds - 1}")
        if stop is not None:
            self.stop = stop
        elif (at, asked) != (self.request, self.number):
            self.stop = 0
        self.request, self.number = at, asked
        self.stop = max(0, min(self.stop, len(self.stops) - 1))

    def forward(self, by: int = 1) -> None:
        """The next stop; behind the verify comes the next round. Before the first and past the last: stay."""
        for _ in range(abs(by)):
            stop = self.stop + (1 if by > 0 else -1)
            if 0 <= stop < len(self.stops):
                self.stop = stop
            elif stop < 0 and self.number > 0:
                self.go(number=self.number - 1, stop=0)
                self.stop = len(self.stops) - 1
            elif stop > 0 and self.number + 1 < len(self.trace.rounds):
                self.go(number=self.number + 1, stop=0)

    # -- the round under every side

    @property
    def views(self) -> dict[str, View | str]:
        """The round as drafted under each side, or why it cannot be."""
        return {name: self._view(name) for name in self.sides}

    def _view(self, side: str) -> View | str:
        key = (side, self.trace.rid, self.number)
        if key not in self._views:
            walk = self._walk(side)
            while len(self._views) >= KEPT:
                del self._views[next(iter(self._views))]
            try:
                self._views[key] = walk if isinstance(walk, str) else walk.view(self.number)
            except BadInput as error:
                self._views[key] = str(error)
        return self._views[key]

    def _walk(self, side: str) -> Walk | str:
        key = (side, self.trace.rid)
        if key not in self._walks:
            try:
                self._walks[key] = self._open(side)
            except BadInput as error:
                self._walks[key] = str(error)
        return self._walks[key]

    def _open(self, side: str) -> Walk:
        e, asked = self.evidence, self.sides[side]
        if isinstance(asked, str):
            raise BadInput(asked)
        if e.target is None or e.capture is None:
            raise BadInput(e.why_not("ladder" if e.target is None else "capture"))
        if side not in self._drafters:
            dtype = getattr(torch, self._dtype)
            self._drafters[side] = Drafter(asked.checkpoint, asked.wiring, e.target, "cpu", dtype)
        trace, again = self.trace, e.capture.reprefill.get(self.trace.rid)
        if self._is_captured(asked.feed):
            text = captured_text(trace, again)
        elif again is None:
            width = trace.features.shape[1]
            raise BadInput(f"rows are {width} wide, {asked.feed.width} are needed, no re-prefill")
        else:
            text = reprefilled_text(again, asked.feed, trace)
        speculation = Speculation.of(asked.launch)
        return Walk(e.capture, self._drafters[side], trace.rid, text, speculation, self.verifier)

    def _is_captured(self, feed: Feed) -> bool:
        """Whether the rows as captured are of this feed."""
        fed = self._fed
        if fed is not None and fed.width == self.trace.features.shape[1]:
            return replace(fed, dtype=feed.dtype) == feed
        return feed.width == self.trace.features.shape[1]

    @cached_property
    def _fed(self) -> Feed | None:
        """What the server was fed, by the launch that it says itself."""
        e = self.evidence
        if e.capture is None:
            return None
        try:
            return served(e.checkpoint, e.capture.launch.with_target(e.launch.target))[0]
        except BadInput:
            return None

    @cached_property
    def verifier(self) -> Verifier | None:
        """The target's own logits, where its head is at hand."""
        e = self.evidence
        if e.capture is None or e.target is None or "lm_head.weight" not in e.target.tensors:
            return None
        return Verifier(e.capture, e.target)

    @property
    def _dtype(self) -> str:
        return (self.evidence.served or self.evidence.trained)[1].dtype

    # -- edits

    @cached_property
    def fields(self) -> dict[str, list[str]]:
        """Fields of the wiring that `edit` takes, each with its values ([]: any number)."""
        hints = {**get_type_hints(Wiring), **{f"rope.{k}": v for k, v in get_type_hints(Rope).items()}}
        return {name: [str(v) for v in get_args(hints[name]) if isinstance(v, str)] for name in FIELDS}

    def value(self, field: str) -> str:
        """A field of the wiring as served now, as text."""
        side = self.sides["served"]
        return "" if isinstance(side, str) else str(_read(side.wiring, field))

    def edit(self, flags: str = "", field: str = "", value: str = "") -> None:
        """Draft under other launch flags, or one other field of the served wiring, too; nothing given: not.

        BadInput, and no change, where SGLang would refuse it or the field takes no such value.
        """
        base = self.sides["served"]
        if not flags and not field:
            self._forget()
            return
        if isinstance(base, str):
            raise BadInput(base)
        side = replace(base, name="edited")
        if flags:
            launch = base.launch.with_flags(flags)
            feed, wiring = served(base.checkpoint, launch)
            side = replace(side, feed=feed, wiring=wiring, launch=launch)
        if field:
            side = replace(side, wiring=_changed(side.wiring, field, value, self.fields))
        self._forget()
        self.sides["edited"] = side
        self.edits = ", ".join(filter(None, (flags, f"{field} = {value}" if field else "")))
        self.stop = min(self.stop, len(self.stops) - 1)

    def _forget(self) -> None:
        self.sides.pop("edited", None)
        self._drafters.pop("edited", None)
        self.edits = ""
        self._walks = {key: walk for key, walk in self._walks.items() if key[0] != "edited"}
        self._views = {key: view for key, view in self._views.items() if key[0] != "edited"}
        self.stop = min(self.stop, len(self.stops) - 1)


def on_text(passes: list[Pass]) -> int:
    """Which pass of a draft step to look at first: the one on the target's text, else the likeliest."""
    return next((i for i, p in enumerate(passes) if p.target is not None), 0)


def _requests(evidence: Evidence) -> list[Trace]:
    """The requests that can be replayed. BadInput: there is none."""
    capture = evidence.capture
    whole = [t for t in generations(capture) if t.state == "complete" and t.rounds] if capture else []
    if not whole:
        why = "none is complete" if capture else evidence.why_not("capture")
        raise BadInput(f"no request to step through: {why}")
    return whole


def _sides(evidence: Evidence) -> dict[str, Side | str]:
    trained = Side("trained", evidence.original, *evidence.trained, evidence.launch)
    if evidence.served is None:
        return {"served": evidence.why_not("served"), "trained": trained}
    now = Side("served", evidence.checkpoint, *evidence.served, evidence.launch)
    return {"served": now, "trained": trained}


def _read(wiring: Wiring, field: str) -> Any:
    return getattr(wiring.rope, field[5:]) if field.startswith("rope.") else getattr(wiring, field)


def _changed(wiring: Wiring, field: str, value: str, fields: dict[str, list[str]]) -> Wiring:
    """The wiring with one field read from text."""
    if field not in fields:
        raise BadInput(f"wiring has no field {field!r} to change; there are {', '.join(fields)}")
    if fields[field] and value not in fields[field]:
        raise BadInput(f"{field}: {value!r} is none of {', '.join(fields[field])}")
    new: Any = value if fields[field] else _number(field, value, _read(wiring, field))
    if field.startswith("rope."):
        return replace(wiring, rope=replace(wiring.rope, **{field[5:]: new}))
    return replace(wiring, **{field: new})


def _number(field: str, value: str, old: Any) -> Any:
    """A number or a truth value, of the kind that the field holds now."""
    word = value.strip().lower()
    if isinstance(old, bool) and word in ("true", "false"):
        return word == "true"
    if field == "window" and word in ("none", ""):
        return None
    try:
        number = float(word) if isinstance(old, float) else int(word)
    except ValueError:
        number = None
    if number is None or isinstance(old, bool) or (field == "window" and number < 1):
        wanted = "true or false" if isinstance(old, bool) else "a number"
        raise BadInput(f"{field}: {value!r} is not {wanted}")
    return number
