"""One round, step by step: what the drafter saw, thought and chose, and what the target made of it.

A round's draft steps are forward passes: the first token comes from the last row of the draft-extend, each
later one from a pass of its own (in a tree, a pass for each branch that goes on).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.simulate import Speculation, Text, captured_text, matched

if TYPE_CHECKING:
    from eaglelab.capture import Capture, Round
    from eaglelab.verifier import Verifier

Choices = list[tuple[int, float]]  # (target id, probability), the likeliest first


@dataclass
class Pass:
    """One forward pass of the drafter, up to its logits.

    path: tokens drafted on this branch before it; score: product of their probabilities; choices: the
    drafter's likeliest; target: the target's own choice here, None where it is not known (off the text, or
    past its end); rank: of that choice among the drafter's, from 1 (None: outside the draft vocabulary);
    target_choices: the target's likeliest, [] where its logits are not known; tensors: stage -> its one row,
    float32.
    """

    path: tuple[int, ...]
    score: float
    choices: Choices
    target: int | None = None
    rank: int | None = None
    target_choices: Choices = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    target_logits: torch.Tensor | None = field(default=None, repr=False)

    @property
    def norms(self) -> dict[str, float]:
        """Stage -> L2 norm of its row, in the order of the stages."""
        return {stage: float(row.norm()) for stage, row in self.tensors.items()}

    def target_probability(self, token: int) -> float | None:
        """The target's own probability of a token here."""
        return None if self.target_logits is None else float(self.target_logits.softmax(-1)[token])

    def target_rank(self, token: int) -> int | None:
        """Place of a token among the target's own choices, from 1."""
        if self.target_logits is None:
            return None
        return int((self.target_logits > self.target_logits[token]).sum()) + 1


@dataclass
class Step:
    """One draft token. `fed`: the token before it on its path; `source`: the pass that it was chosen from.

    server: the server's token at this place; target: as in `Pass`; parent: node of its parent (node i is
    step i, 0 is the root).
    """

    number: int
    fed: int
    own: int
    server: int | None
    probability: float
    accepted: bool
    parent: int
    source: Pass

    @property
    def target(self) -> int | None:
        return self.source.target

    @property
    def choices(self) -> Choices:
        return self.source.choices

    @property
    def norms(self) -> dict[str, float]:
        return self.source.norms

    @property
    def depth(self) -> int:
        """Which token after the root, from 1."""
        return len(self.source.path) + 1


@dataclass
class View:
    """A round of a request. `before`: tokens up to and with the root.

    passes: per draft step, those of its branches (one in a chain); accept_len: what these drafts would
    commit, the bonus included; None where the text ends too soon; bonus: the target's token after the
    accepted ones; fed_error: |own - server's| / |server's| of the state that the draft-extend hands on.
    """

    rid: str
    n: int
    before: list[int]
    steps: list[Step]
    passes: list[list[Pass]]
    accept_len: int | None
    bonus: int | None
    tree: bool
    fed_error: float | None = None


class Walk:
    """A drafter along one request, ready to draft any round of it again with every stage read.

    text: the request under another feed (`simulate.reprefilled_text`); speculation: another shape than the
    server's. Then the server's own draft tokens stand beside no others.
    """

    def __init__(
        self,
        capture: Capture,
        drafter: Drafter,
        rid: str,
        text: Text | None = None,
        speculation: Speculation | None = None,
        verifier: Verifier | None = None,
        choices: int = 5,
    ):
        self.trace = capture.requests[rid]
        self.text = text or captured_text(self.trace, capture.reprefill.get(rid))
        self.drafter, self.verifier, self.choices = drafter, verifier, choices
        self.speculation = speculation or Speculation.of(capture.launch)
        self.same_shape = self.speculation == Speculation.of(capture.launch)
        self.state = Drafting.over(drafter, self.text.tokens, self.text.features)

    def view(self, number: int) -> View:
        """Round `number`, drafted again."""
        happened = self.trace.rounds[number]
        n, truth = happened.n, self.text.tokens[happened.n + 1 :]
        shape, drafted = self.speculation, happened.draft_tokens if self.same_shape else []
        reader = _Reader(self, n)
        self._draft_extend(n, reader)
        if shape.topk == 1:
            chains = self.state.chain([n], len(drafted) or shape.steps, tap=reader)
            own = chains.tokens[0].tolist()
            parents, chance = list(range(len(own))), chains.probability[0].tolist()
        else:
            nodes = len(drafted) + 1 if drafted else shape.draft_tokens
            trees = self.state.tree([n], shape.steps, shape.topk, nodes, reader)
            own, parents = trees.tokens[0].tolist(), trees.parents[0].tolist()
            score = [1.0, *trees.score[0].tolist()]
            chance = [s / score[p] for s, p in zip(score[1:], parents, strict=True)]
        steps = _steps(reader, own, parents, chance, drafted, truth, self.text.tokens[n])
        taken = matched(own, parents, truth)
        known = taken < len(truth)
        view = View(
            self.text.rid, n, self.text.tokens[: n + 1], steps, reader.passes,
            taken + 1 if known else None, truth[taken] if known else None, shape.topk > 1,
        )  # fmt: skip
        view.fed_error = self._fed_error(happened)
        return view

    def _fed_error(self, happened: Round) -> float | None:
        from eaglelab.replay import fed_error

        fed, own = happened.fed, self.state.feedback[happened.n - 1]
        return None if fed is None or fed.shape != tuple(own.shape) else fed_error(own, fed)

    def _draft_extend(self, n: int, reader: _Reader) -> None:
        """The last row of the draft-extend once more, alone, so that its stages can be read."""
        state, before = self.state, Drafting(self.drafter)
        before.keys, before.values = ([rows[: n - 1] for rows in kept] for kept in (state.keys, state.values))
        before.normed, before.feedback = state.normed[: n - 1], state.feedback[: n - 1]
        at = n - 1 + self.drafter.wiring.token_shift
        token = torch.as_tensor(self.text.tokens[at : at + 1], dtype=torch.long)
        before.extend(token, self.text.features[n - 1 : n], reader)


def view(
    capture: Capture,
    drafter: Drafter,
    rid: str,
    number: int = 0,
    choices: int = 3,
    text: Text | None = None,
) -> View:
    """Round `number` of a captured request, drafted again. BadInput: there is none."""
    trace = capture.requests.get(rid)
    if trace is None or not 0 <= number < len(trace.rounds):
        have = "no such request" if trace is None else f"it has {len(trace.rounds)} rounds"
        raise BadInput(f"request {rid}, round {number}: {have}; requests: {', '.join(capture.requests)}")
    return Walk(capture, drafter, rid, text, choices=choices).view(number)


def fingerprint(row: torch.Tensor) -> str:
    """Eight hex digits of the sha256 of a row's float32 bytes: equal for equal numbers only."""
    return hashlib.sha256(row.float().cpu().contiguous().numpy().tobytes()).hexdigest()[:8]


class _Reader:
    """A tap: keeps every stage's rows, and makes passes of them at each "logits"."""

    def __init__(self, walk: Walk, n: int):
        self.walk, self.n = walk, n
        self.passes: list[list[Pass]] = []
        self._rows: dict[str, torch.Tensor] = {}
        self._paths: list[tuple[int, ...]] = [()]
        self._score = torch.ones(1)

    def __call__(self, stage: str, tensor: torch.Tensor) -> None:
        if stage == "vocabulary_map":
            return
        self._rows[stage] = tensor.detach().float().cpu().flatten(1).clone()
        if stage == "logits":
            chances = self._rows[stage].softmax(-1)
            self.passes.append([self._pass(i, chances[i]) for i in range(len(chances))])
            self._go_on(chances)
            self._rows = {}

    def _pass(self, i: int, chances: torch.Tensor) -> Pass:
        drafter, path = self.walk.drafter, self._paths[i]
        vocabulary = drafter.vocabulary.cpu()
        top = chances.topk(min(self.walk.choices, len(chances)))
        found = Pass(path, float(self._score[i]), _pairs(vocabulary[top.indices], top.values))
        found.tensors = {stage: rows[i] for stage, rows in self._rows.items()}
        text, at = self.walk.text, self.n + 1 + len(path)  # the position of the token to be drafted
        if at < len(text.tokens) and tuple(text.tokens[self.n + 1 : at]) == path:
            found.target = text.tokens[at]
            place = (vocabulary == found.target).nonzero()
            if len(place):
                found.rank = int((chances > chances[place[0, 0]]).sum()) + 1
            verifier = self.walk.verifier
            if verifier is not None and verifier.knows(text.rid, at):
                found.target_logits = verifier.logits(text.rid, [at])[0]
                best = found.target_logits.softmax(-1).topk(min(self.walk.choices, len(found.target_logits)))
                found.target_choices = _pairs(best.indices, best.values)
        return found

    def _go_on(self, chances: torch.Tensor) -> None:
        """The branches of the next step, chosen as `Drafting.tree` does; of a chain the likeliest token."""
        topk = self.walk.speculation.topk
        best, ids = chances.topk(topk)
        ids = self.walk.drafter.vocabulary.cpu()[ids].flatten()
        expanded = (self._score[:, None] * best).flatten()
        self._score, chosen = expanded.topk(topk)
        self._paths = [(*self._paths[c // topk], int(ids[c])) for c in chosen.tolist()]


def _pairs(ids: torch.Tensor, chances: torch.Tensor) -> Choices:
    return list(zip(ids.tolist(), chances.tolist(), strict=True))


def _steps(
    reader: _Reader,
    own: list[int],
    parents: list[int],
    chance: list[float],
    server: list[int],
    truth: list[int],
    root: int,
) -> list[Step]:
    by_path = {p.path: p for some in reader.passes for p in some}
    paths: list[tuple[int, ...]] = [()]
    steps = []
    for i, (token, parent) in enumerate(zip(own, parents, strict=True)):
        path = (*paths[parent], token)
        paths.append(path)
        steps.append(
            Step(
                number=i + 1,
                fed=own[parent - 1] if parent else root,
                own=token,
                server=server[i] if i < len(server) else None,
                probability=chance[i],
                accepted=list(path) == truth[: len(path)],
                parent=parent,
                source=by_path[path[:-1]],
            )
        )
    return steps
