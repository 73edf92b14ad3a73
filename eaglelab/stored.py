"""The trainer's stored texts as the ladder uses them: where to start, and what is accepted from there.

A start n has n rows and n + 1 tokens before it. It counts only if the next S stored tokens all are the
target's argmax over its full vocabulary, computed from the stored last hidden state: only there would
a greedy server have gone on with the stored text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from eaglelab.capture import to_float32
from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.simulate import (
    Rounds,
    Speculation,
    accept_lengths,
    captured_text,
    reprefilled_text,
)
from eaglelab.traces import stored_index
from eaglelab.wiring import Feed

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.checkpoint import TargetModel
    from eaglelab.features import StoredFeatures

_ROWS = 1 << 14  # rows of the target's head at a time: a head of 163,840 x 7,168 is 4.7 GB in float32


@dataclass
class StoredText:
    """tokens [n]; features [n, width] in feed order; last [n, H], after the final norm if `normed`."""

    index: int
    tokens: list[int]
    features: torch.Tensor
    last: torch.Tensor
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    source: str = "stored"
    normed: bool = False

    def as_fed(self, capture: Capture, feed: Feed) -> StoredText | None:
        """The same text as the server's drafter was fed it; None if the capture does not have it.

        Rows as captured if they have the trained width, else its re-prefill at the trained depths.
        """
        found = [rid for rid in {**capture.requests, **capture.reprefill} if stored_index(rid) == self.index]
        for rid in found:
            trace, again = capture.requests.get(rid), capture.reprefill.get(rid)
            options = []
            if trace is not None and trace.state == "complete":
                options.append((captured_text(trace), "rows as captured"))
            if again is not None:
                options.append((reprefilled_text(again, feed), "re-prefilled at the trained depths"))
            for text, source in options:
                rows = text.features
                same = text.tokens[: len(self.tokens)] == self.tokens
                if same and rows.shape[1] == feed.width and len(rows) >= len(self.tokens) - 1:
                    return replace(self, features=rows[: len(self.tokens)], source=source)
        return None


def to_send(stored: StoredFeatures, tokens: int = 8192) -> list[list[int]]:
    """Token ids of the first stored texts, for `capture_server(texts=...)`: enough of them for rung 3."""
    found: list[list[int]] = []
    for sample in stored.samples:
        if sum(map(len, found)) >= tokens:
            break
        found.append(sample.token_ids.tolist())
    return found


def stored_texts(stored: StoredFeatures, feed: Feed) -> Iterator[StoredText]:
    """The trainer's texts, one at a time. BadInput if the rows do not have the trained width."""
    for index, sample in enumerate(stored.samples):
        features = torch.from_numpy(to_float32(sample.features, sample.dtype))
        if features.shape[1] != feed.width:
            raise BadInput(
                f"stored features are {features.shape[1]} wide, the drafter was trained on {feed.width}"
            )
        last = torch.from_numpy(to_float32(np.asarray(sample.last), sample.dtype))
        normed = stored.last_is == "after the final norm"
        yield StoredText(index, [int(t) for t in sample.token_ids], features, last, normed=normed)


class Truth:
    """The target's greedy choice, from its last hidden state."""

    def __init__(self, target: TargetModel, device: str = "cpu"):
        config = target.config.get("text_config") or target.config
        self.eps, self.device = config.get("rms_norm_eps", 1e-6), device
        self.norm, self.head = target.load("norm.weight", torch.float32), target.load("lm_head.weight")

    def argmax(self, last: torch.Tensor, normed: bool = False) -> np.ndarray:
        """last [n, H] before the final norm, or after it -> token ids [n], full vocabulary, float32."""
        states = last.float()
        if not normed:
            states = F.rms_norm(states, (last.shape[-1],), self.norm, self.eps)
        states = states.to(self.device)
        best = torch.full((len(states),), -torch.inf, device=self.device)
        choice = torch.zeros(len(states), dtype=torch.long, device=self.device)
        for start in range(0, len(self.head), _ROWS):
            rows = self.head[start : start + _ROWS].to(self.device, torch.float32)
            value, index = (states @ rows.T).max(dim=-1)
            better = value > best
            best, choice = torch.where(better, value, best), torch.where(better, index + start, choice)
        return choice.cpu().numpy()


def usable_starts(text: StoredText, truth: Truth, steps: int) -> np.ndarray:
    """Starts n with tokens n + 1 ... n + S all the target's argmax (right[i]: token i + 1 is it)."""
    right = np.asarray(
        np.equal(truth.argmax(text.last, text.normed)[:-1], text.tokens[1:]), dtype=bool
    ).reshape(-1)
    if len(right) < steps + 1:
        return np.zeros(0, dtype=np.int64)
    runs = np.lib.stride_tricks.sliding_window_view(right[1:], steps).all(axis=1)
    return np.flatnonzero(runs) + 1


def measure_stored(drafter: Drafter, text: StoredText, steps: int) -> tuple[Rounds, Rounds]:
    """-> (rung 1: every step sees the stored feature and token; rung 2: own drafts fed back), by start."""
    tokens, starts = np.asarray(text.tokens), text.starts
    state = Drafting.over(drafter, text.tokens, text.features)
    predicted = np.concatenate(
        [drafter.to_target(drafter.logits(rows).argmax(-1)).cpu().numpy() for rows in state.normed.split(256)]
    )  # [rows]: what the drafter expects at row + 2, given features and tokens up to there
    steps_ahead = starts[:, None] + np.arange(steps)
    right = predicted[steps_ahead - 1] == tokens[steps_ahead + 1]
    forced = right.cumprod(axis=1).sum(axis=1) + 1
    free, _ = accept_lengths(state, starts, text.tokens, Speculation(steps, 1, steps + 1))
    rid = [f"stored-{text.index}"] * len(starts)
    return Rounds(rid, starts, forced, steps), Rounds(rid, starts, free, steps)
