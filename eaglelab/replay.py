"""Replay a capture: draft every round again from the target's features and the committed tokens alone.

The server's draft tokens and the drafter's own states are only compared with, never read; a forced replay,
for bfloat16 servers, feeds the server's draft tokens back so that one near-tie does not spoil the rest of
its round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from eaglelab.capture import to_float32
from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.records import Measurement
from eaglelab.simulate import Rounds, Speculation, Text, captured_text, is_stored

if TYPE_CHECKING:
    from eaglelab.capture import Capture, Round

_BRANCHES = 256


@dataclass
class ReplayedRound:
    """One round.

    server, own: draft tokens without the root, with their parents in a tree (see `Trees`); gap: see
    `Chains.gap` (one a token) and `Trees.gap` (one a tree); fed_error: |own - server| / |server| of the state
    that the first draft step is fed.
    """

    rid: str
    n: int
    server: list[int]
    own: list[int]
    gap: list[float]
    accept_len: int
    fed_error: float | None = None
    server_parents: list[int] | None = None
    own_parents: list[int] | None = None

    @property
    def equal(self) -> list[bool]:
        """Per draft token of the server, whether replay has it too.

        In a chain at the same step; in a tree along the same path (a near-tie can renumber a tree's nodes).
        """
        if self.server_parents is None or self.own_parents is None:
            return [a == b for a, b in zip(self.own, self.server, strict=True)]
        mine = set(paths(self.own, self.own_parents))
        return [path in mine for path in paths(self.server, self.server_parents)]


@dataclass
class Replay:
    """All rounds of a capture under one wiring. `skipped`: requests that cannot be replayed, and why."""

    rounds: list[ReplayedRound]
    skipped: dict[str, str]
    forced: bool
    dtype: str
    steps: int = 0
    guessed: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int:
        return sum(len(r.server) for r in self.rounds)

    @property
    def equal(self) -> int:
        return sum(sum(r.equal) for r in self.rounds)

    @property
    def agreement(self) -> float:
        """Share of the server's draft tokens that replay drafts too, at the same step or path."""
        return self.equal / self.tokens if self.tokens else float("nan")

    @property
    def exact(self) -> bool:
        return self.tokens > 0 and self.equal == self.tokens

    @property
    def disagreements(self) -> list[tuple[ReplayedRound, int, float]]:
        """(round, index of its first unequal draft token, gap there), the widest gap first."""
        found = []
        for r in self.rounds:
            if not all(r.equal):
                step = r.equal.index(False)
                found.append((r, step, r.gap[min(step, len(r.gap) - 1)]))
        return sorted(found, key=lambda item: -item[2])

    @property
    def fed_errors(self) -> np.ndarray:
        """Relative errors of the fed-back states, one a round, sorted."""
        return np.sort([r.fed_error for r in self.rounds if r.fed_error is not None])

    @property
    def captured(self) -> Rounds:
        """The server's own accept lengths at these rounds."""
        return Rounds(
            [r.rid for r in self.rounds],
            np.asarray([r.n for r in self.rounds], dtype=np.int64),
            np.asarray([r.accept_len for r in self.rounds], dtype=np.int64),
            self.steps,
        )

    def measurements(self) -> list[Measurement]:
        way = "the server's draft tokens fed back" if self.forced else "its own draft tokens fed back"
        where = f"drafting every captured round again from the target's features ({self.dtype}, {way})"
        count, errors = len(self.rounds), self.fed_errors
        widest = max((gap for *_, gap in self.disagreements), default=0.0)
        worst = float(errors[int(0.99 * (len(errors) - 1))]) if len(errors) else None
        return [
            _measured("replay.agreement", self.agreement, "share", self.tokens,
                      f"draft tokens of the server that come out equal when {where}"),
            _measured("replay.rounds_equal", sum(all(r.equal) for r in self.rounds), "rounds", count,
                      f"rounds whose draft tokens all come out equal when {where}"),
            _measured("replay.widest_gap", widest, "logit", count,
                      "at a round's first unequal draft token, how far the better choice leads; the widest. "
                      "Trees: difference of path probabilities"),
            _measured("replay.fed_error", worst, "relative", len(errors),
                      "99th percentile of |replayed - captured| / |captured| of the state that the first "
                      "draft step is fed"),
        ]  # fmt: skip


def _measured(name: str, value: float | None, unit: str, count: int, definition: str) -> Measurement:
    missing = value is None or value != value
    reason = "no round of this capture can be replayed" if missing else None
    return Measurement(
        name=name,
        value=None if missing else value,
        unit=unit,
        definition=definition,
        reason=reason,
        count=count,
    )


def replay(capture: Capture, drafter: Drafter, forced: bool | None = None) -> Replay:
    """Draft every captured round again. `forced` (chains only) is the default outside float32."""
    speculation = Speculation.of(capture.launch)
    chain = speculation.topk == 1
    forced = (drafter.dtype != torch.float32 if forced is None else forced) and chain
    rounds: list[ReplayedRound] = []
    skipped = {}
    for rid, trace in capture.requests.items():
        if is_stored(rid):
            continue
        try:
            text = captured_text(trace)
        except BadInput as error:
            skipped[rid] = str(error)
            continue
        drafted = [r for r in trace.rounds if r.draft_tokens]
        rounds += replay_text(drafter, text, drafted, speculation, forced)
    return Replay(
        rounds, skipped, forced, str(drafter.dtype).removeprefix("torch."), speculation.steps, drafter.guessed
    )


def replay_text(
    drafter: Drafter, text: Text, rounds: list[Round], speculation: Speculation, forced: bool = False
) -> list[ReplayedRound]:
    """Replay some rounds of one text, batched by their lengths (adaptive speculation has several)."""
    state = Drafting.over(drafter, text.tokens, text.features)
    out: list[ReplayedRound] = []
    size = max(1, _BRANCHES // speculation.topk)
    for count in sorted({len(r.draft_tokens) for r in rounds}):
        alike = [r for r in rounds if len(r.draft_tokens) == count]
        for i in range(0, len(alike), size):
            some = alike[i : i + size]
            starts = [r.n for r in some]
            if speculation.topk == 1:
                fed = [r.draft_tokens for r in some] if forced else None
                chains = state.chain(starts, count, fed)
                own, gaps, parents = chains.tokens.tolist(), chains.gap.tolist(), [None] * len(some)
            else:
                trees = state.tree(starts, speculation.steps, speculation.topk, count + 1)
                own, parents = trees.tokens.tolist(), trees.parents.tolist()
                gaps = [[gap] for gap in trees.gap.tolist()]
            for r, tokens, gap, tree in zip(some, own, gaps, parents, strict=True):
                error = fed_error(state.feedback[r.n - 1], r.fed)
                found = ReplayedRound(text.rid, r.n, r.draft_tokens, tokens, gap, r.accept_len, error)
                found.server_parents, found.own_parents = r.parents, tree
                out.append(found)
    return sorted(out, key=lambda r: r.n)


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from a tree's root to each of its nodes; parents as in `Trees`."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


def fed_error(own: torch.Tensor, fed: np.ndarray | None) -> float | None:
    if fed is None:
        return None
    dtype = "bfloat16" if fed.dtype == np.uint16 else str(fed.dtype)  # bfloat16 is stored as its bits
    server = torch.from_numpy(to_float32(fed, dtype)).to(own.device)
    return float((own.float() - server).norm() / server.norm().clamp_min(1e-30))
