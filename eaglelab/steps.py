"""One round, step by step: what the drafter saw, thought and chose, and what the target took of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.simulate import Speculation, Text, captured_text

if TYPE_CHECKING:
    from eaglelab.capture import Capture


@dataclass
class Step:
    """One draft token. `fed`: the token before it on its path, with whose hidden state it was drafted.

    server: the server's token at this place; choices: the drafter's likeliest target ids with their
    probability; target: the target's own choice here, None where it is not known (after a rejection, or
    past the end of the text); norms: stage -> L2 norm of its one row, in the order of the stages.
    """

    number: int
    fed: int
    own: int
    server: int | None
    probability: float
    accepted: bool
    target: int | None
    parent: int = 0  # trees: node of its parent; node i is step i, 0 is the root
    choices: list[tuple[int, float]] = field(default_factory=list)
    norms: dict[str, float] = field(default_factory=dict)


@dataclass
class View:
    """A round of a request. `before`: tokens up to and with the root; `bonus`: the target's own token."""

    rid: str
    n: int
    before: list[int]
    steps: list[Step]
    accept_len: int
    bonus: int
    tree: bool


def view(
    capture: Capture,
    drafter: Drafter,
    rid: str,
    number: int = 0,
    choices: int = 3,
    text: Text | None = None,
) -> View:
    """Round `number` of a captured request, drafted again with every stage read. BadInput: there is none.

    text: the same request under another feed (`simulate.reprefilled_text`); default: the rows as captured.
    """
    trace = capture.requests.get(rid)
    if trace is None or not 0 <= number < len(trace.rounds):
        have = "no such request" if trace is None else f"it has {len(trace.rounds)} rounds"
        raise BadInput(f"request {rid}, round {number}: {have}; requests: {', '.join(capture.requests)}")
    text, happened = text or captured_text(trace), trace.rounds[number]
    n, speculation = happened.n, Speculation.of(capture.launch)
    reader = _Reader(drafter, choices)
    state = Drafting.over(drafter, text.tokens[: n + 1], text.features[:n], reader)
    if speculation.topk == 1:
        count = len(happened.draft_tokens) or speculation.steps
        drafts = state.chain([n], count, tap=reader)
        steps = _chain(reader, drafts, text.tokens[n], happened)
    else:
        count = len(happened.draft_tokens) + 1 if happened.draft_tokens else speculation.draft_tokens
        steps = _tree(state.tree([n], speculation.steps, speculation.topk, count), text.tokens[n], happened)
    committed = happened.committed
    return View(rid, n, text.tokens[: n + 1], steps, happened.accept_len, committed[-1], speculation.topk > 1)


class _Reader:
    """A tap: keeps the norm of each stage's last row, and the likeliest tokens at every "logits"."""

    def __init__(self, drafter: Drafter, choices: int):
        self.drafter, self.choices = drafter, choices
        self.norms: dict[str, float] = {}
        self.read: list[tuple[dict[str, float], list[tuple[int, float]]]] = []

    def __call__(self, stage: str, tensor: torch.Tensor) -> None:
        if stage == "vocabulary_map":
            return
        self.norms[stage] = float(tensor[-1].float().norm())
        if stage == "logits":
            top = tensor[-1].softmax(-1).topk(min(self.choices, tensor.shape[-1]))
            ids = self.drafter.vocabulary[top.indices].tolist()
            self.read.append((self.norms, list(zip(ids, top.values.tolist(), strict=True))))
            self.norms = {}


def _chain(reader: _Reader, drafts, root: int, happened) -> list[Step]:
    own, steps = drafts.tokens[0].tolist(), []
    for i, (norms, choices) in enumerate(reader.read):
        steps.append(
            Step(
                number=i + 1,
                fed=own[i - 1] if i else root,
                own=own[i],
                server=happened.draft_tokens[i] if happened.draft_tokens else None,
                probability=float(drafts.probability[0, i]),
                accepted=own[: i + 1] == happened.committed[: i + 1],
                target=happened.committed[i] if i < happened.accept_len else None,
                parent=i,
                choices=choices,
                norms=norms,
            )
        )
    return steps


def _tree(drafts, root: int, happened) -> list[Step]:
    own, parents = drafts.tokens[0].tolist(), drafts.parents[0].tolist()
    steps: list[Step] = []
    paths: list[list[int]] = [[]]  # tokens from the root to each node
    for i, (token, parent) in enumerate(zip(own, parents, strict=True)):
        path = paths[parent] + [token]
        paths.append(path)
        depth, before = len(path), path[:-1] == happened.committed[: len(path) - 1]
        steps.append(
            Step(
                number=i + 1,
                fed=own[parent - 1] if parent else root,
                own=token,
                server=happened.draft_tokens[i] if i < len(happened.draft_tokens) else None,
                probability=float(drafts.score[0, i]) / (float(drafts.score[0, parent - 1]) if parent else 1),
                accepted=path == happened.committed[:depth],
                target=happened.committed[depth - 1] if before and depth <= happened.accept_len else None,
                parent=parent,
            )
        )
    return steps
