"""Where drafts are lost: by prompt, by token, and along the text. Counted from a capture's own verifies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eaglelab.simulate import Rounds, is_stored

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.traces import Round, Trace

STRETCH = 32  # tokens


@dataclass(frozen=True)
class PromptLoss:
    """One request. `others`: rung name -> accept length of the same text on that rung of the ladder."""

    rid: str
    prompt_ids: list[int]
    rounds: int
    accept_length: float
    others: Mapping[str, float]


@dataclass(frozen=True)
class TokenLoss:
    """A token that the target chose. missed: the drafts did not have it where it was due; found: they had.

    draftable: whether it is in the drafter's vocabulary; None: not known.
    """

    token: int
    missed: int
    found: int
    draftable: bool | None

    @property
    def share(self) -> float:
        return self.missed / (self.missed + self.found)


@dataclass(frozen=True)
class StretchLoss:
    """Rounds that start `start` to `start + STRETCH` generated tokens after the prompt."""

    start: int
    rounds: int
    accept_length: float


def generations(capture: Capture) -> list[Trace]:
    """Requests that generated something; the trainer's texts that were only prefilled are left out."""
    return [t for t in capture.requests.values() if t.rounds and not is_stored(t.rid)]


def per_prompt(capture: Capture, rungs: Mapping[str, Rounds | None] | None = None) -> list[PromptLoss]:
    """Accept length of each request, the worst first; `rungs`: the same texts on the ladder."""
    out = []
    for trace in generations(capture):
        others = {}
        for name, rounds in (rungs or {}).items():
            mine = rounds.where([rid == trace.rid for rid in rounds.rids]) if rounds else None
            if mine is not None and len(mine.lengths):
                others[name] = mine.accept_length
        mean = sum(r.accept_len for r in trace.rounds) / len(trace.rounds)
        out.append(PromptLoss(trace.rid, trace.prompt_ids, len(trace.rounds), mean, others))
    return sorted(out, key=lambda p: p.accept_length)


def per_token(capture: Capture, vocabulary: Collection[int] | None = None) -> list[TokenLoss]:
    """Every token that was due in a draft, the one missed most first.

    A round's last token counts as missed where the drafts could have had it, not as the bonus after drafts
    that all were right.
    """
    missed: Counter[int] = Counter()
    found: Counter[int] = Counter()
    for trace in generations(capture):
        for r in trace.rounds:
            if r.draft_tokens:
                found.update(r.committed[:-1])
                if r.accept_len <= reach(r):
                    missed[r.committed[-1]] += 1
    have = None if vocabulary is None else set(vocabulary)
    rows = [TokenLoss(t, missed[t], found[t], None if have is None else t in have) for t in missed | found]
    return sorted(rows, key=lambda t: (-t.missed, t.found, t.token))


def reach(r: Round) -> int:
    """How many tokens ahead a round drafted: the depth of its tree."""
    depth = [0]
    for i in range(len(r.draft_tokens)):
        depth.append(depth[i if r.parents is None else r.parents[i]] + 1)
    return max(depth)


def along_text(capture: Capture) -> list[StretchLoss]:
    """Accept length by how far a round starts after its prompt, in stretches of 32 tokens."""
    lengths: dict[int, list[int]] = {}
    for trace in generations(capture):
        for r in trace.rounds:
            lengths.setdefault((r.n - trace.prompt_len) // STRETCH, []).append(r.accept_len)
    return [StretchLoss(k * STRETCH, len(v), float(np.mean(v))) for k, v in sorted(lengths.items()) if k >= 0]
