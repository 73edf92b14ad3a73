"""Was the drafter trained as its config says? The trained setting is edited, and its accuracy measured again.

On the trainer's stored rows (else, where they are known to be right, on the server's) a config that says what
was trained drafts best: an edit that raises the accept length far beyond noise says that config and training
disagree. A gain counts if the lower end of its 99.9 % interval (there are some fifty edits) and its value say
so; then the search goes on from there, for a second fault. Of rope, which hardly moves the accept length of
short texts, the likelihood of the text's own tokens is asked as well: it needs no draft to come true. Only an
edit that leaves a drafter which drafts well is believed: a weak one may gain by almost anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eaglelab import paired
from eaglelab.drafting import Drafting
from eaglelab.edits import Edit, build, of_rows, of_setting
from eaglelab.errors import BadInput
from eaglelab.overlay import Overlay
from eaglelab.progress import Progress, quiet
from eaglelab.simulate import Rounds, Speculation, Text, accept_lengths, texts
from eaglelab.stored import StoredText, Truth, measure_stored, stored_texts, usable_starts

if TYPE_CHECKING:
    from eaglelab.evidence import Evidence

FEW, MANY = 150, 2000  # starts: to sort edits, and to be sure of one
FEWEST = 100
FINALISTS = 6
LARGE = 0.1  # of the drafts that come true: less may be luck of these texts, or of a drafter half trained
LIKELY = 0.5  # of that gain, on a few starts: less is not measured on many
STRICTER = 3.29 / 1.96  # a 99.9 % interval beside the 95 % one that is drawn
MOST = 3  # faults of one config
ROPE = ("rope-theta", "rope-scaling", "mrope-or-partial-rotary")
BLOCK = 16  # rows that are taken for one in the spread of a likelihood
SURE, LIKELIER = 2.6, 2e-3  # standard errors, and nats a token, that a likelihood must rise by
WELL = 0.7  # of first drafts come true, under the edit: what a merely weak drafter gains by chance is no news
SECONDS = 60.0


@dataclass(frozen=True)
class Gain:
    """One edit of the trained setting, and what it raises the accept length by (upper: with the edit)."""

    edit: Edit
    drop: paired.Drop
    taught: bool  # the accuracy of single steps, each given the right token, rises too
    likelier: tuple[float, float] | None = None  # nats a token, and its standard error, where that decided


@dataclass
class Doubt:
    """Edits that raise what was trained, in the order in which they were found; each goes on from the last.

    source: where the features come from; tried: how many edits were.
    """

    source: str
    tried: int = 0
    gains: list[Gain] = field(default_factory=list)


def doubt(evidence: Evidence, device: str = "cpu", say: Progress = quiet) -> Doubt | None:
    """Look for edits that make the drafter draft better than its config does. None: nothing to go by."""
    if evidence.target is None:
        return None
    try:
        found, source = _texts(evidence, device)
        if sum(len(text.starts) for text in found) < FEWEST:
            return None
        say("asking whether the config says what was trained")
        return _Doubts(evidence, found, device, say).run(source)
    except BadInput:
        return None


def _texts(evidence: Evidence, device: str) -> tuple[list[StoredText], str]:
    """Texts with the features that the drafter was trained on, and the places to start from."""
    feed, steps = evidence.trained[0], _steps(evidence)
    if evidence.stored is not None and evidence.target is not None:
        truth, found, starts = Truth(evidence.target, device), [], 0
        for text in stored_texts(evidence.stored, feed):
            text.starts = usable_starts(text, truth, steps)
            found.append(text)
            starts += len(text.starts)
            if starts >= MANY:
                break
        if starts >= FEWEST:
            return found, "the trainer's stored texts"
    if evidence.capture is None:
        return [], ""
    generations, _ = texts(evidence.capture, feed)
    if generations:
        return [_generation(i, t, steps) for i, t in enumerate(generations)], "re-prefilled at its depths"
    return [], ""


def _generation(index: int, text: Text, steps: int) -> StoredText:
    starts = np.arange(max(1, text.prompt_len), len(text.tokens) - steps)
    return StoredText(index, text.tokens, text.features, torch.empty(0), starts)


def _steps(evidence: Evidence) -> int:
    return evidence.ladder.steps if evidence.ladder else evidence.launch.steps


class _Doubts:
    def __init__(self, evidence: Evidence, found: list[StoredText], device: str, say: Progress):
        self.feed, self.wiring = evidence.trained
        self.target, self.device, self.say = evidence.target, device, say
        self.source, self.steps = Overlay(evidence.original), _steps(evidence)
        self.dtype = torch.float32 if device == "cpu" else getattr(torch, self.wiring.dtype)
        self.many = found
        self.few = _fewer(found, FEW)
        self.chunks = len(self.feed.depths)
        self.width = evidence.original.target_hidden_size
        self.until = time.monotonic() + SECONDS

    def edits(self) -> Iterable[Edit]:
        yield from of_setting(self.wiring, self.source, self.target, engine=False)
        yield from of_rows(self.wiring, self.chunks, self.width, self.target, engine=False)

    def run(self, source: str) -> Doubt:
        found = Doubt(source)
        base = Edit(None, "as its config says", self.wiring)
        edits = list(self.edits())
        for _ in range(MOST):
            gain = self.step(base, edits, found)
            if gain is None:
                break
            found.gains.append(gain)
            base = gain.edit if base.slug is None else base.then(gain.edit, self.wiring)
            edits = [e for e in edits if e.slug != gain.edit.slug]
        if len(found.gains) > 1:
            self.again(found)
        if not any(gain.edit.slug in ROPE for gain in found.gains) and _well(
            self.measure(base, self.many)[1]
        ):
            found.gains += self.rope(base)
        return found

    def again(self, found: Doubt) -> None:
        """The first edit was chosen before the others were known: choose it again beside them."""
        base = found.gains[1].edit
        for gain in found.gains[2:]:
            base = base.then(gain.edit, self.wiring)
        others = {gain.edit.slug for gain in found.gains[1:]}
        better = self.step(base, [e for e in self.edits() if e.slug not in others], found)
        if better is not None:
            found.gains[0] = better

    def rope(self, base: Edit) -> list[Gain]:
        """Another rope under which the texts' own tokens are likelier than under this one."""
        now = self.likelihood(base)
        best: tuple[float, float, Edit, Edit] | None = None
        for edit in self.edits():
            if edit.slug not in ROPE or time.monotonic() > self.until:
                continue
            both = edit if base.slug is None else base.then(edit, self.wiring)
            rise = self.likelihood(both) - now
            blocks = rise[: len(rise) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(axis=1)
            mean = float(blocks.mean())
            error = float(blocks.std(ddof=1)) / len(blocks) ** 0.5
            if mean > max(LIKELIER, SURE * error) and (best is None or mean > best[0]):
                best = (mean, error, edit, both)
        if best is None:
            return []
        mean, error, edit, both = best
        drop = paired.compare(
            self.measure(both, self.many)[1], self.measure(base, self.many)[1], by_start=True
        )
        return [Gain(edit, drop, True, (mean, error))]

    def likelihood(self, edit: Edit) -> np.ndarray:
        """Log-likelihood [rows] of each text's next token but one, where the draft vocabulary holds it."""
        drafter, found = self.drafter(edit), []
        place = torch.full((int(drafter.vocabulary.max()) + 1,), -1)
        place[drafter.vocabulary.cpu()] = torch.arange(len(drafter.vocabulary))
        for text in self.many:
            state = Drafting.over(drafter, text.tokens, text.features)
            rows = min(state.rows, len(text.tokens) - 2)
            truth = torch.tensor(text.tokens[2 : rows + 2])
            ids = torch.where(truth < len(place), place[truth.clamp(max=len(place) - 1)], -1)
            logits = drafter.logits(state.normed[:rows]).cpu()
            said = logits.log_softmax(-1).gather(1, ids.clamp(min=0)[:, None])[:, 0]
            found.append(torch.where(ids >= 0, said.clamp(min=-8.0), torch.zeros(())).numpy())
        return np.concatenate(found)

    def step(self, base: Edit, edits: list[Edit], found: Doubt) -> Gain | None:
        """The edit that raises the accept length most, if it does so beyond doubt."""
        now = self.measured(base, self.few) or 0.0
        scores = []
        for i, edit in enumerate(edits):
            if time.monotonic() > self.until:
                break
            self.say("trying edits of the trained setting", i, len(edits))
            both = edit if base.slug is None else base.then(edit, self.wiring)
            value = self.measured(both, self.few)
            found.tried += 1
            if value is not None and value - now > LIKELY * LARGE * (now - 1):
                scores.append((value, -i, both, edit))
        best = sorted(scores, key=lambda s: s[:2], reverse=True)[:FINALISTS]
        if not best:
            return None
        forced, free = self.measure(base, self.many)
        gains = []
        for *_, both, edit in best:
            taught, drafted = self.measure(both, self.many)
            drop = paired.compare(drafted, free, by_start=True)
            if _counts(drop) and _well(drafted):
                gains.append(Gain(edit, drop, _counts(paired.compare(taught, forced, by_start=True))))
        return max(gains, key=lambda g: g.drop.value, default=None)

    def measured(self, edit: Edit, some: list[StoredText]) -> float | None:
        """Accept length, own drafts fed back; None where these shapes do not allow the edit."""
        drafter, speculation = self.drafter(edit), Speculation(self.steps, 1, self.steps + 1)
        lengths = []
        try:
            for text in self.edited(edit, some):
                state = Drafting.over(drafter, text.tokens, text.features)
                lengths.append(accept_lengths(state, text.starts, text.tokens, speculation)[0])
            return float(np.concatenate(lengths).mean())
        except (BadInput, ValueError, LookupError, RuntimeError):
            return None

    def drafter(self, edit: Edit) -> Any:
        return build(edit, self.source, self.target, self.device, self.dtype)

    def edited(self, edit: Edit, some: list[StoredText]) -> Iterator[StoredText]:
        """The texts with the edit's rows, and those starts from which every step can be judged."""
        for text in some:
            rows = edit.rows(text.features, ()) if edit.rows else text.features
            last = min(len(rows), len(text.tokens) - edit.wiring.token_shift) - self.steps + 1
            last = min(last, len(text.tokens) - 1 - self.steps)
            yield replace(text, features=rows, starts=text.starts[text.starts <= last])

    def measure(self, edit: Edit, some: list[StoredText]) -> tuple[Rounds, Rounds]:
        """-> accept lengths (every step given the right token; own drafts fed back) from every start."""
        drafter = self.drafter(edit)
        pairs = [measure_stored(drafter, text, self.steps) for text in self.edited(edit, some)]
        forced, free = zip(*pairs, strict=True)
        return Rounds.join(list(forced), self.steps), Rounds.join(list(free), self.steps)


def _fewer(found: list[StoredText], count: int) -> list[StoredText]:
    """The beginnings of some texts, with at most `count` starts in all."""
    few: list[StoredText] = []
    left = count
    each = max(1, count // 4)
    for text in found:
        if left <= 0:
            break
        some = text.starts[: min(each, left)]
        end = int(some[-1]) + 16 if len(some) else 0
        few.append(replace(text, tokens=text.tokens[:end], features=text.features[:end], starts=some))
        left -= len(some)
    return few


def _well(rounds: Rounds) -> bool:
    return bool(rounds.acceptance) and rounds.acceptance[0] >= WELL


def _counts(drop: paired.Drop) -> bool:
    """A gain that is large, and beyond noise by a 99.9 % interval."""
    if drop.interval is None:
        return False
    low = drop.value - STRICTER * (drop.value - drop.interval[0])
    return low > 0 and drop.value > LARGE * (drop.lower - 1)
