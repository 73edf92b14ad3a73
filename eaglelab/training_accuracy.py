"""The trainer's own validation accuracy, by its definition, and what another truth makes of the same drafts.

speculators 0.9.0 (models/eagle3/core.py forward, metrics.py, ../metrics.py): every position of a stored text
starts a draft of S steps. Step t is fed the *stored* token t further on and its own state of the step before;
it is right if it drafts the argmax of the target's stored state there, taken over the draft vocabulary only.
*full* accuracy of step t: steps 0 ... t all right / positions under the loss mask; *conditional*: of those
whose steps before t were right. Positions at the end of a text, whose target lies beyond it, are not counted
(speculators packs several texts into one sequence, where they run into the next text: `pack`). A window is
counted from the drafted token here, from the start there.

That is a number about training. A server takes the argmax over the *whole* vocabulary, feeds the drafter its
own drafts, and goes on only where the text is what the target says: `counted`, then rungs 1 and 2 of the
ladder. The two are never compared with each other; each is printed with its definition.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.records import Measurement

if TYPE_CHECKING:
    from eaglelab.features import StoredFeatures
    from eaglelab.stored import StoredText, Truth

_STARTS = 256  # drafted at once: bounds memory
MOST_ROWS = 4096  # of the ladder's stored texts
_ROWS = 1 << 14  # rows of the target's head at a time
SOURCE = "speculators 0.9.0 models/eagle3/metrics.py"
STEP = "step {0}: the stored token {0} further on is fed, with the drafter's own state"
WORDS = {
    "full": "share of stored positions at which drafts of steps 0 to {0} all are the argmax of the target's "
    "stored state over the draft vocabulary",
    "conditional": "share of the positions right up to the step before at which step {0} is right too; the "
    "argmax is taken over the draft vocabulary",
    "counted": "the drafts of training_accuracy.full.step{0}, judged by the argmax over the whole "
    "vocabulary, as a server does: a position whose token has no draft id counts as wrong",
    "left_out": "training_accuracy.counted.step{0} with the positions whose token has no draft id left out "
    "of the denominator: inflated, as in SpecForge before #492",
}
SURVIVES = "what is left of it with own drafts fed back, where the text goes on so: acceptance.rung2.draft{}"


@dataclass(frozen=True)
class Document:
    """One stored text of n tokens: features [n, width], last [n, H] before the final norm, mask [n] bool."""

    tokens: torch.Tensor
    features: torch.Tensor
    last: torch.Tensor
    mask: torch.Tensor


@dataclass
class Counts:
    """Per step: starts still right, positions counted, starts right before the step."""

    right: torch.Tensor
    counted: torch.Tensor
    before: torch.Tensor

    @classmethod
    def none(cls, steps: int) -> Counts:
        return cls(*(torch.zeros(steps, dtype=torch.long) for _ in range(3)))

    def add(self, predicted: torch.Tensor, truth: torch.Tensor, mask: torch.Tensor) -> None:
        """predicted [rows, S], truth [rows], mask [rows]: as `compute_accuracy_single_step` counts them."""
        alive = mask.clone()
        for t in range(predicted.shape[1]):
            rows = max(len(mask) - t, 0)
            self.before[t] += alive[:rows].sum()
            alive[:rows] &= predicted[:rows, t] == truth[t:]
            self.right[t] += (alive[:rows] & mask[t:]).sum()
            self.counted[t] += mask[t:].sum()

    @property
    def full(self) -> list[float]:
        return _shares(self.right, self.counted)

    @property
    def conditional(self) -> list[float]:
        return _shares(self.right, self.before)


@dataclass
class TrainingAccuracy:
    """Counts by truth: the trainer's, the whole vocabulary's, and that with positions left out.

    `said`: what the trainer wrote beside the drafter (val_metrics.json), on its own validation texts.
    """

    steps: int
    trainer: Counts
    counted: Counts
    left_out: Counts
    positions: int = 0
    outside: int = 0  # positions whose argmax has no draft id
    masked: bool = True  # False: no loss mask was found, and every position counts
    dtype: str = "float32"  # of the drafter's arithmetic
    said: dict[str, list[float]] = field(default_factory=dict)

    def measurements(self) -> list[Measurement]:
        rows: list[tuple[str, float | None, str, int]] = []
        figures = {
            "full": self.trainer.full,
            "conditional": self.trainer.conditional,
            "counted": self.counted.full,
            "left_out": self.left_out.full,
        }
        mask = f", in {self.dtype}"
        mask += "" if self.masked else "; no loss mask was found, so that prompts count too"
        for kind, values in figures.items():
            counts = self.left_out if kind == "left_out" else self.trainer
            of = counts.before if kind == "conditional" else counts.counted
            for t, value in enumerate(values):
                words = f"{WORDS[kind].format(t)}; {STEP.format(t)}; {SOURCE}{mask}"
                words += f"; {SURVIVES.format(t + 1)}" if kind == "full" else ""
                rows.append((f"training_accuracy.{kind}.step{t}", value, words, int(of[t])))
        share = self.outside / self.positions if self.positions else None
        words = "share of stored positions whose argmax over the whole vocabulary has no draft id"
        rows.append(("training_accuracy.out_of_vocabulary", share, words, self.positions))
        none = "no position of the stored texts is counted here"
        found = [
            Measurement(
                name=n, value=v, unit="share", definition=w, count=c, reason=none if v is None else None
            )
            for n, v, w, c in ((name, value if c else None, w, c) for name, value, w, c in rows)
        ]
        for kind, values in self.said.items():
            found += [
                Measurement(
                    name=f"training_accuracy.said.{kind}.step{t}",
                    value=value,
                    unit="share",
                    definition=f"{kind} accuracy of step {t} as the trainer wrote it (val_metrics.json): the "
                    f"definition of training_accuracy.{kind}, on other texts, those of its validation",
                )
                for t, value in enumerate(values)
            ]
        return found


def measure(
    drafter: Drafter,
    truth: Truth,
    documents: Iterable[Document],
    steps: int,
    pack: int = 1,
) -> TrainingAccuracy:
    """The trainer's accuracy on these texts. `pack`: how many of them share a sequence, as in its batches.

    drafter: under its trained wiring. truth: eaglelab.stored.Truth, for the target's head.
    """
    found = TrainingAccuracy(steps, Counts.none(steps), Counts.none(steps), Counts.none(steps))
    found.dtype = str(drafter.dtype).removeprefix("torch.")
    waiting = list(documents)
    for at in range(0, len(waiting), pack):
        _sequence(found, drafter, truth, waiting[at : at + pack])
    return found


def _sequence(found: TrainingAccuracy, drafter: Drafter, truth: Truth, documents: Sequence[Document]) -> None:
    """Count one sequence of texts, one after the other."""
    predicted = drafts(drafter, documents, found.steps)
    last = torch.cat([d.last[1:] for d in documents])
    mask = torch.cat([d.mask[1:] for d in documents]).to(torch.bool)
    among, whole = _argmax(truth, last, drafter.vocabulary.cpu())
    inside = torch.isin(whole, drafter.vocabulary.cpu())
    found.trainer.add(predicted, among, mask)
    found.counted.add(predicted, whole, mask)
    found.left_out.add(predicted, whole, mask & inside)
    found.positions += int(mask.sum())
    found.outside += int((mask & ~inside).sum())


@torch.no_grad()
def drafts(drafter: Drafter, documents: Sequence[Document], steps: int) -> torch.Tensor:
    """Target ids [rows, S] drafted from every row of a sequence of texts, stored tokens fed at each step.

    Row i of a text of n tokens (n - 1 rows) pairs its feature i with token i + 1. Past the end of the
    sequence zeros are fed, as the trainer does.
    """
    ids = torch.cat([*(d.tokens[1:] for d in documents), torch.zeros(steps, dtype=torch.long)])
    forced = ids.unfold(0, steps, 1)[1:]  # [rows, S]: token t + 1 further on
    out, start = [], 0
    for document in documents:
        rows = len(document.tokens) - 1
        if rows < 1:
            continue
        state = Drafting.over(drafter, document.tokens, document.features[:rows])
        for some in torch.arange(rows).split(_STARTS):
            out.append(state.chain(some + 1, steps, forced[start + some]).tokens.cpu())
        start += rows
    return torch.cat(out) if out else torch.zeros(0, steps, dtype=torch.long)


@torch.no_grad()
def _argmax(truth: Truth, last: torch.Tensor, vocabulary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """last [n, H] -> target ids [n]: the argmax among the draft vocabulary's tokens, and among all."""
    device = truth.device
    states = F.rms_norm(last.float(), (last.shape[-1],), truth.norm, truth.eps).to(device)
    wanted = torch.zeros(len(truth.head), dtype=torch.bool, device=device)
    wanted[vocabulary.to(device)] = True
    best = torch.full((2, len(states)), -torch.inf, device=device)
    choice = torch.zeros(2, len(states), dtype=torch.long, device=device)
    for start in range(0, len(truth.head), _ROWS):
        logits = states @ truth.head[start : start + _ROWS].to(device, torch.float32).T
        some = wanted[start : start + _ROWS]
        for i, scores in enumerate((logits.masked_fill(~some, -torch.inf), logits)):
            value, index = scores.max(dim=-1)
            better = value > best[i]
            best[i], choice[i] = (
                torch.where(better, value, best[i]),
                torch.where(better, index + start, choice[i]),
            )
    return choice[0].cpu(), choice[1].cpu()


def of_stored(
    drafter: Drafter,
    truth: Truth,
    stored: StoredFeatures,
    texts: Sequence[StoredText],
    steps: int,
    folder: str | Path,
) -> TrainingAccuracy:
    """The same of the ladder's stored texts, with what the trainer said of the drafter in `folder`."""
    masks: list[Any] = []
    rows = [sum(len(t.tokens) for t in texts[:i]) for i in range(len(texts))]
    texts = [t for t, before in zip(texts, rows, strict=True) if before < MOST_ROWS]
    for text in texts:
        try:
            masks.append(getattr(stored.samples[text.index], "loss_mask", None))
        except BadInput:  # the ladder reads the states alone, and so do we
            masks.append(None)
    documents = [
        Document(
            torch.as_tensor(text.tokens),
            text.features,
            text.last,
            torch.ones(len(text.tokens), dtype=torch.bool) if mask is None else torch.as_tensor(mask),
        )
        for text, mask in zip(texts, masks, strict=True)
    ]
    found = measure(drafter, truth, documents, steps)
    found.masked = all(mask is not None for mask in masks)
    found.said = said(folder, steps)
    return found


def said(folder: str | Path, steps: int) -> dict[str, list[float]]:
    """full and conditional accuracies of val_metrics.json beside the drafter, by step; {} without it."""
    file = Path(folder) / "val_metrics.json"
    try:
        metrics: Any = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError):
        return {}
    found: dict[str, list[float]] = {}
    for kind, name in (("full", "full_acc"), ("conditional", "cond_acc")):
        values: list[float] = []
        for t in range(steps):
            value = metrics.get(f"{name}_{t}_epoch") if isinstance(metrics, dict) else None
            if not isinstance(value, int | float):
                break
            values.append(float(value))
        if values:
            found[kind] = values
    return found


def _shares(part: torch.Tensor, whole: torch.Tensor) -> list[float]:
    """As the trainer: 0 where nothing was counted."""
    return [float(a) / float(b) if b else 0.0 for a, b in zip(part.tolist(), whole.tolist(), strict=True)]
