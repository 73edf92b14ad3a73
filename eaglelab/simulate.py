"""Walk a known text as speculative decoding would: which accept lengths would this drafter have had?

The target is greedy, so its text is the same whatever is drafted. With the features of every position
known, the whole generation can be simulated without a server: draft, compare with the text, go on after the
bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eaglelab.capture import to_float32
from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.traces import is_stored
from eaglelab.wiring import Feed

if TYPE_CHECKING:
    from eaglelab.capture import Capture, Reprefill, Trace

_BRANCHES = 256  # rows drafted at once: bounds memory


@dataclass(frozen=True)
class Speculation:
    """The shape of a draft, in the words of SGLang's flags; a chain has topk 1."""

    steps: int
    topk: int = 1
    draft_tokens: int = 0

    @classmethod
    def of(cls, launch: Any) -> Speculation:
        return cls(launch.steps, launch.topk, launch.draft_tokens)


@dataclass
class Text:
    """A text and what the target's features were along it.

    tokens: from position 0, as far as known (beyond `end` too); features [rows, width] from position 0; the
    prompt has `prompt_len` tokens; the server stopped when it had `end`.
    """

    rid: str
    tokens: list[int]
    features: torch.Tensor
    prompt_len: int
    end: int


@dataclass
class Rounds:
    """Accept lengths (tokens committed per verify, bonus included), each with its place.

    `starts`: committed rows before the draft; `censored`: rounds left out, as the text ends before they do.
    """

    rids: list[str]
    starts: np.ndarray
    lengths: np.ndarray
    steps: int
    censored: int = 0

    @property
    def accept_length(self) -> float:
        return float(self.lengths.mean()) if len(self.lengths) else float("nan")

    @property
    def acceptance(self) -> list[float]:
        """Per draft position j = 1 ... S: share of rounds in which the first j drafts all were accepted."""
        if not len(self.lengths):
            return []
        return [float((self.lengths > j).mean()) for j in range(1, self.steps + 1)]

    def where(self, kept: list[bool]) -> Rounds:
        """Only the rounds that are marked."""
        mask = np.asarray(kept, dtype=bool)
        rids = [rid for rid, keep in zip(self.rids, kept, strict=True) if keep]
        return Rounds(rids, self.starts[mask], self.lengths[mask], self.steps, self.censored)

    @classmethod
    def join(cls, parts: list[Rounds], steps: int) -> Rounds:
        empty = [np.zeros(0, dtype=np.int64)]
        return cls(
            [rid for part in parts for rid in part.rids],
            np.concatenate(empty + [part.starts for part in parts]),
            np.concatenate(empty + [part.lengths for part in parts]),
            steps,
            sum(part.censored for part in parts),
        )


def captured_text(trace: Trace, again: Reprefill | None = None) -> Text:
    """A captured request: the rows that the server's drafter was fed. BadInput if it is not complete.

    again: its re-prefill, which knows some more greedy tokens, so that no round near the end is censored.
    """
    if trace.state != "complete":
        raise BadInput(f"request {trace.rid} is {trace.state}: {trace.why}")
    tokens = list(trace.tokens)
    longer = again.token_ids + again.further if again else []
    if longer[: len(tokens)] == tokens:
        tokens = longer
    features = torch.from_numpy(to_float32(trace.features, trace.feature_dtype))
    return Text(trace.rid, tokens, features, trace.prompt_len, _end(trace))


def reprefilled_text(reprefill: Reprefill, feed: Feed, trace: Trace | None = None) -> Text:
    """A re-prefilled text under any feed: its depths side by side, or the state after the final norm."""
    if feed.final_norm:
        streams = [reprefill.final]
    else:
        missing = sorted(set(feed.depths) - set(reprefill.depths))
        if missing:
            raise BadInput(
                f"re-prefill of {reprefill.rid}: depths {missing} were not recorded ({reprefill.depths} were)"
            )
        streams = [reprefill.stream(depth) for depth in feed.depths]
    features = torch.from_numpy(to_float32(np.concatenate(streams, axis=1), reprefill.dtype))
    tokens = reprefill.token_ids + reprefill.further
    prompt_len = trace.prompt_len if trace else 1
    return Text(reprefill.rid, tokens, features, prompt_len, len(reprefill.token_ids))


def texts(capture: Capture, feed: Feed | None = None) -> tuple[list[Text], dict[str, str]]:
    """Every generation of a capture, as fed (no `feed`) or from its re-prefill under `feed`.

    -> (texts, requests that cannot be used and why). Stored texts that were only prefilled are not
    generations.
    """
    found, skipped = [], {}
    for rid, trace in capture.requests.items():
        if is_stored(rid):
            continue
        try:
            if feed is None:
                found.append(captured_text(trace, capture.reprefill.get(rid)))
            elif rid in capture.reprefill:
                found.append(reprefilled_text(capture.reprefill[rid], feed, trace))
            else:
                skipped[rid] = "it was not re-prefilled"
        except BadInput as error:
            skipped[rid] = str(error)
    return found, skipped


def simulate(drafter: Drafter, text: Text, speculation: Speculation) -> Rounds:
    """The rounds that this drafter would have had along this text, first generated token to its end."""
    last = min(text.end - 2, len(text.features))  # a round starts with fewer than `end` tokens committed
    starts = np.arange(text.prompt_len, last + 1)
    state = Drafting.over(drafter, text.tokens, text.features)
    lengths, known = accept_lengths(state, starts, text.tokens, speculation)
    walked, n = [], text.prompt_len
    while n <= last:
        walked.append(n)
        n += int(lengths[n - text.prompt_len])
    at = np.asarray(walked, dtype=np.int64)
    kept = at[known[at - text.prompt_len]]
    return Rounds(
        [text.rid] * len(kept), kept, lengths[kept - text.prompt_len], speculation.steps, len(at) - len(kept)
    )


def accept_lengths(
    state: Drafting, starts, tokens: list[int], speculation: Speculation
) -> tuple[np.ndarray, np.ndarray]:
    """Draft from every start and compare with the text.

    -> (accept lengths [B], whether the text is long enough to know them [B]; else they are lower bounds)
    """
    starts = np.asarray(starts, dtype=np.int64)
    steps = speculation.steps
    padded = np.concatenate([np.asarray(tokens, dtype=np.int64), np.full(steps + 1, -1)])
    truth = padded[np.minimum(starts[:, None] + 1 + np.arange(steps), len(padded) - 1)]
    correct = np.zeros(len(starts), dtype=np.int64)
    size = max(1, _BRANCHES // speculation.topk)
    for i in range(0, len(starts), size):
        some = slice(i, i + size)
        if speculation.topk == 1:
            drafts = state.chain(starts[some], steps).tokens.cpu().numpy()
            correct[some] = (drafts == truth[some]).cumprod(axis=1).sum(axis=1)
        else:
            trees = state.tree(starts[some], steps, speculation.topk, speculation.draft_tokens)
            rows = zip(trees.tokens.tolist(), trees.parents.tolist(), truth[some].tolist(), strict=True)
            correct[some] = [matched(*row) for row in rows]
    known = (correct == steps) | (truth[np.arange(len(starts)), np.minimum(correct, steps - 1)] >= 0)
    return correct + 1, known


def matched(tokens: list[int], parents: list[int], truth: list[int]) -> int:
    """How many tokens of `truth` a tree holds along one path from its root (node i + 1 is tokens[i])."""
    children: dict[tuple[int, int], int] = {}
    for i, edge in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault(edge, i + 1)
    node = depth = 0
    while depth < len(truth) and (node, truth[depth]) in children:
        node = children[node, truth[depth]]
        depth += 1
    return depth


def _end(trace: Trace) -> int:
    return len(trace.tokens) if trace.output_ids is None else trace.prompt_len + len(trace.output_ids)
