"""What did the server do otherwise than it says? Its drafts are replayed under single edits of the setting.

Where rung 4 and rung 5 disagree, something between launch and draft tokens is not as read. An edit (`edits`)
under which the server's draft tokens come out is what it is. A few rounds sort out most edits; those that
come near are replayed on more. Every draft step is given the server's own tokens before it, so that one
token that differs does not spoil the rest of its round. If no edit explains it, no two of the best together
either, then that is said, with the best one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eaglelab.edits import KEPT, Edit, Kept, build, of_engine, of_rows, of_setting
from eaglelab.errors import BadInput
from eaglelab.overlay import Overlay
from eaglelab.progress import Progress, quiet
from eaglelab.replay import Replay, ReplayedRound, replay_text
from eaglelab.simulate import Speculation, Text, captured_text, is_stored

if TYPE_CHECKING:
    from eaglelab.capture import Capture, Round
    from eaglelab.evidence import Evidence

# How far ahead of the server's token our best choice may lie and still be rounding: (logits, agreement).
# float32: sums in another order, as tensor-parallel ranks make them. bfloat16: measured on the tiny models,
# where every disagreement lay within 0.0625; the agreement was 0.97 and more.
ROUNDING = {"float32": (1e-3, 0.99), "float16": (0.05, 0.9), "bfloat16": (0.25, 0.9)}
FEW, MANY = 24, 160  # rounds: to sort edits, and to name one
TEXTS = 6
KEPT_ON = 32  # edits that go on after the first text, which costs most of the others their place
FINALISTS = 8
MUCH = 0.4  # of the disagreement
BEAM, START = 3, 0.1  # best edits that are tried together with every other, if alone they bring that share
SECONDS = 60.0  # for everything: what was not tried until then is said
NEARLY, GAP = 0.9, 0.2  # share that must come out; of the disagreement, what may stay: an edit is one form of
# a fault, and the engine may have another (what stands in the first row, in padding)


@dataclass(frozen=True)
class Tried:
    """An edit and the share of the server's draft tokens that come out under it (on the larger sample)."""

    edit: Edit
    agreement: float
    parts: tuple[Edit, ...] = ()  # of two edits at once


@dataclass
class Search:
    """What a search found. `explaining`: edits, best first, that tie within the noise of a few tokens."""

    before: float
    tokens: int
    explaining: list[Tried] = field(default_factory=list)
    best: Tried | None = None
    nearest: Tried | None = None  # it explains much, and nothing else does
    tried: int = 0
    left_out: int = 0
    where: list[str] = field(default_factory=list)


def beyond_rounding(replay: Replay) -> bool:
    """Whether a replay differs from the server by more than near-ties."""
    if replay.exact or not replay.tokens:
        return False
    _, _, gap = replay.disagreements[0]
    logits, agreement = ROUNDING.get(replay.dtype, ROUNDING["bfloat16"])
    return not (gap <= logits and replay.agreement >= agreement)


def search(evidence: Evidence, device: str = "cpu", say: Progress = quiet) -> Search | None:
    """Look for the edit of the served setting under which the server's drafts come out.

    None where there is nothing to look for: no replay, one that agrees, or one that has to guess tensors.
    """
    replay = evidence.ladder.replay if evidence.ladder else None
    if replay is None or evidence.capture is None or evidence.served is None:
        return None
    if replay.guessed or not beyond_rounding(replay):
        return None
    say("looking for what the server does otherwise")
    return _Search(evidence, device, say).run()


class _Search:
    def __init__(self, evidence: Evidence, device: str, say: Progress):
        assert evidence.served is not None and evidence.capture is not None
        self.feed, self.wiring = evidence.served
        self.capture, self.target, self.device, self.say = evidence.capture, evidence.target, device, say
        self.source = Overlay(evidence.checkpoint)
        self.dtype = getattr(torch, self.wiring.dtype)
        self.speculation = Speculation.of(evidence.capture.launch)
        self.until = time.monotonic() + SECONDS
        self.chunks = max(1, self.feed.width // evidence.checkpoint.target_hidden_size)
        self.width = evidence.checkpoint.target_hidden_size
        self.blocks = {
            rid: [(r.n, r.accept_len) for r in trace.rounds]
            for rid, trace in evidence.capture.requests.items()
        }
        self.many = sample(evidence.capture, MANY)
        nothing = Edit(None, "", self.wiring)
        drafter = build(nothing, self.source, self.target, self.device, self.dtype)
        self.as_said = [(text, self.replayed(drafter, nothing, text, some)) for text, some in self.many]
        self.few = self.telling()

    def telling(self) -> list[tuple[Text, list[Round]]]:
        """A few rounds to sort edits by: two thirds of them came out otherwise than the server drafted."""
        found = []
        for (text, some), (_, rounds) in zip(self.many, self.as_said, strict=True):
            equal = {r.n: all(r.equal) for r in rounds}
            wrong = [r for r in some if equal.get(r.n) is False]
            found.append((len(wrong), text, wrong, [r for r in some if equal.get(r.n)]))
        found.sort(key=lambda item: -item[0])
        out, left = [], FEW
        for _, text, wrong, right in found:
            each = max(1, min(left, FEW // 2))
            rounds = right[: each // 3]
            rounds += wrong[: max(1, each - len(rounds) if len(rounds) < each // 3 else each * 2 // 3)]
            if left > 0 and rounds:
                out.append((text, sorted(rounds, key=lambda r: r.n)))
                left -= len(rounds)
        return out

    def edits(self) -> Iterable[Edit]:
        yield from of_setting(self.wiring, self.source, self.target, engine=True)
        yield from of_rows(self.wiring, self.chunks, self.width, self.target, engine=True)
        yield from of_engine(self.wiring, self.source, self.target)

    def run(self) -> Search:
        found = Search(*_agreement(r for _, rounds in self.as_said for r in rounds))
        found.where = self.localise()
        edits = list(self.edits())
        ranked = self.rank(edits, found)
        finalists = [Tried(edit, self.agreement(edit, self.many)[0]) for edit in ranked[:FINALISTS]]
        finalists.sort(key=lambda t: -t.agreement)
        found.best = finalists[0] if finalists else None
        found.explaining = self.explaining(finalists, found.before)
        if not found.explaining and finalists:
            self.pairs(finalists, edits, found)
        if not found.explaining:
            found.nearest = self.nearest(finalists, found.before)
        return found

    def nearest(self, finalists: list[Tried], before: float) -> Tried | None:
        """An edit that explains much of a disagreement, far more than any edit of another name does."""
        best, *others = finalists
        rest = [t.agreement - before for t in others if t.edit.slug != best.edit.slug]
        gained = best.agreement - before
        far = gained >= MUCH * (1 - before) and max(rest, default=0.0) <= gained / 2
        return best if far and best.edit.slug else None

    def rank(self, edits: list[Edit], found: Search) -> list[Edit]:
        """The best edits by their agreement on a few rounds; those that do not fit are left out.

        On one text first: an edit costs a pass over each text, and most are told apart by the first.
        """
        scores = []
        for i, edit in enumerate(edits):
            if time.monotonic() > self.until:
                found.left_out += 1
                continue
            self.say("trying edits of the served setting", i, len(edits))
            try:
                scores.append((self.agreement(edit, self.few[:1])[0], edit))
                found.tried += 1
            except (BadInput, ValueError, LookupError, RuntimeError):
                continue  # an edit that these shapes do not allow is none that the server made
        scores.sort(key=lambda s: -s[0])
        again = [(self.agreement(edit, self.few)[0], edit) for _, edit in scores[:KEPT_ON]]
        return [edit for _, edit in sorted(again, key=lambda s: -s[0])]

    def pairs(self, best: list[Tried], edits: list[Edit], found: Search) -> None:
        """The best edits, each together with every other that changes something else."""
        start = [t.edit for t in best[:BEAM] if t.agreement - found.before > START * (1 - found.before)]
        both = [
            (a.then(b, self.wiring), (a, b)) for a in start for b in edits if a is not b and a.slug != b.slug
        ]
        names = {id(edit): parts for edit, parts in both}
        ranked = self.rank([edit for edit, _ in both], found)[:FINALISTS]
        tried = [Tried(e, self.agreement(e, self.many)[0], names[id(e)]) for e in ranked]
        tried.sort(key=lambda t: -t.agreement)
        found.explaining = self.explaining(tried, found.before)[:1]

    def explaining(self, tried: list[Tried], before: float) -> list[Tried]:
        """Those under which nearly every token comes out, and no other does better."""
        enough = [t for t in tried if t.agreement >= NEARLY and 1 - t.agreement <= GAP * (1 - before)]
        return [t for t in enough if t.agreement >= enough[0].agreement - 0.002]

    def agreement(self, edit: Edit, rounds: list[tuple[Text, list[Round]]]) -> tuple[float, int]:
        """-> (share of the server's draft tokens that come out under an edit, how many there are)."""
        drafter = build(edit, self.source, self.target, self.device, self.dtype)
        return _agreement(r for text, some in rounds for r in self.replayed(drafter, edit, text, some))

    def replayed(self, drafter: Any, edit: Edit, text: Text, some: list[Round]) -> list[Any]:
        fed = edit.rows(text.features, self.blocks[text.rid]) if edit.rows else text.features
        tokens = edit.tokens(text.tokens, text.prompt_len) if edit.tokens else text.tokens
        text = Text(text.rid, tokens, fed, text.prompt_len, text.end)
        if edit.twist == KEPT:
            return self.kept(drafter, text, some)
        text.features = fed[: max(r.n for r in some)]  # what follows is seen by none of these rounds
        rows = min(len(text.features), len(text.tokens) - edit.wiring.token_shift)
        some = [r for r in some if r.n <= rows]
        return replay_text(drafter, text, some, self.speculation, forced=self.speculation.topk == 1)

    def kept(self, drafter: Any, text: Text, some: list[Round]) -> list[ReplayedRound]:
        """Rounds in order up to the last one that is asked for: each leaves something to the next."""
        if self.speculation.topk > 1:
            raise BadInput("not replayed for trees")
        wanted = {r.n for r in some}
        rounds = [r for r in self.capture.requests[text.rid].rounds if r.draft_tokens and r.n <= max(wanted)]
        drafts = Kept(drafter).walk(text, rounds)
        return [
            ReplayedRound(text.rid, r.n, r.draft_tokens, own, [], r.accept_len)
            for r, own in zip(rounds, drafts, strict=True)
            if r.n in wanted
        ]

    def localise(self) -> list[str]:
        """Where the disagreement lies: from which draft step on, in which rounds."""
        found = [(r, text) for text, rounds in self.as_said for r in rounds]
        lines = []
        if self.speculation.topk == 1 and found:
            most = max(len(r.server) for r, _ in found)
            steps = [[r.equal[j] for r, _ in found if len(r.equal) > j] for j in range(most)]
            shares = ", ".join(f"{np.mean(step):.3f}" for step in steps)
            lines.append("agreement by draft step, given the server's tokens before it: " + shares)
        first = [all(r.equal) for r, text in found if r.n == text.prompt_len]
        later = [all(r.equal) for r, text in found if r.n != text.prompt_len]
        if first and later:
            lines.append(
                f"rounds that come out whole: {sum(first)} of {len(first)} first ones after a prefill, "
                f"{sum(later)} of {len(later)} later ones"
            )
        return lines


def _agreement(rounds: Iterable[ReplayedRound]) -> tuple[float, int]:
    """-> (share of the server's draft tokens that came out, how many there are)."""
    equal = [same for r in rounds for same in r.equal]
    return (sum(equal) / len(equal) if equal else float("nan")), len(equal)


def sample(capture: Capture, count: int) -> list[tuple[Text, list[Round]]]:
    """At most `count` drafted rounds, of a few texts, spread over each: first and last ones among them."""
    whole = []
    for rid, trace in capture.requests.items():
        if is_stored(rid) or trace.state != "complete":
            continue
        drafted = [r for r in trace.rounds if r.draft_tokens]
        if drafted:
            whole.append((captured_text(trace), drafted))
    whole = whole[: max(2, min(TEXTS, count // 12))]
    found = []
    for text, rounds in whole:
        places = np.unique(np.linspace(0, len(rounds) - 1, max(1, count // len(whole))).astype(int))
        found.append((text, [rounds[i] for i in places]))
    return found
