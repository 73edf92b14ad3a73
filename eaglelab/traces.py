"""Views of a capture: one request's tokens, features and rounds; one re-prefilled text's residual streams.

Index convention: row i of `features` is the target's feature at position i, and the drafter sees it together
with token i + 1. So n rows go with n + 1 tokens, and a round that starts with n rows drafts tokens n + 1,
n + 2, ... (token n is the root of its tree).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from eaglelab.counters import abortion

if TYPE_CHECKING:
    from eaglelab.capture import Capture, Event


@dataclass
class Round:
    """One draft and its verify. `n`: rows committed before it."""

    n: int
    draft_tokens: list[int]  # without the root; [] when the server did not draft
    parents: list[int] | None  # trees: parent node of each draft token, 0 is the root; None for a chain
    accept_len: int  # tokens committed, bonus included
    committed: list[int]  # tokens n + 1 ... n + accept_len
    _fed: Slice | None = field(default=None, repr=False)

    @property
    def fed(self) -> np.ndarray | None:
        """[hidden]: the drafter's own state that the first draft step was fed; replay never reads it."""
        return None if self._fed is None else self._fed.read()[0]


@dataclass(frozen=True)
class Slice:
    """Rows of one event's tensor."""

    event: Event
    name: str
    start: int
    rows: int

    def read(self) -> np.ndarray:
        return self.event.tensor(self.name)[self.start : self.start + self.rows]


@dataclass
class Trace:
    """One captured request.

    `state`: complete, partial or cached-prefix (no rows before `first_row`); `why` says why.
    """

    rid: str
    rank: str
    prompt_ids: list[int]
    state: str = "complete"
    why: str = ""
    first_row: int = 0
    tokens: list[int] = field(default_factory=list)  # tokens 0 ... n, prompt first
    rounds: list[Round] = field(default_factory=list)
    chunks: int = 0
    feature_dtype: str = ""
    output_ids: list[int] | None = None  # as the server answered
    extra_rounds: int = (
        0  # rounds that overlap scheduling ran after the request had finished; not in `rounds`
    )
    _slices: list[Slice] = field(default_factory=list, repr=False)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def rows(self) -> int:
        """Number of feature rows; row r of `features` is position `first_row + r`."""
        return sum(piece.rows for piece in self._slices)

    @cached_property
    def features(self) -> np.ndarray:
        """[rows, width] as stored; `capture.to_float32(t.features, t.feature_dtype)` makes numbers of it."""
        return np.concatenate([piece.read() for piece in self._slices])

    @property
    def accept_length(self) -> float | None:
        """Tokens committed per verify, bonus included (1.00: nothing accepted)."""
        return sum(r.accept_len for r in self.rounds) / len(self.rounds) if self.rounds else None

    def spoil(self, why: str) -> None:
        if self.state != "partial":
            self.state, self.why = "partial", why


@dataclass
class Reprefill:
    """One text (prompt and output) sent again as one prefill, its residual stream recorded at some depths."""

    rid: str  # the original request
    token_ids: list[int]  # the whole text
    further: list[int] = field(default_factory=list)  # greedy tokens after it
    dtype: str = ""
    _slices: dict[str, list[Slice]] = field(default_factory=dict, repr=False)

    @property
    def depths(self) -> list[int]:
        return sorted(int(name[5:]) for name in self._slices if name.startswith("depth"))

    def stream(self, depth: int) -> np.ndarray:
        """[n_tokens, hidden] as stored: the residual stream after `depth` decoder layers."""
        return self._read(f"depth{depth}")

    @property
    def streams(self) -> dict[int, np.ndarray]:
        """Every recorded depth -> [n_tokens, hidden]; n is the state before the final norm."""
        return {depth: self.stream(depth) for depth in self.depths}

    @property
    def final(self) -> np.ndarray:
        """[n_tokens, hidden] as stored: after the final norm."""
        return self._read("final")

    def _read(self, name: str) -> np.ndarray:
        return np.concatenate([piece.read() for piece in self._slices[name]])


def parents_of(next_token: list[int], next_sibling: list[int]) -> list[int]:
    """First-child and next-sibling links of N nodes (-1: none) -> the parent of nodes 1 ... N-1."""
    parents = [-1] * len(next_token)
    for node, child in enumerate(next_token):
        while child >= 0:
            if parents[child] >= 0 or child == 0:
                raise ValueError(f"node {child} has two parents")
            parents[child] = node
            child = next_sibling[child]
    return parents[1:]


def build_traces(capture: Capture) -> dict[str, Trace]:
    """Walk the events of the primary ranks. Raises BadInput where a request's `seq_lens` do not follow on."""
    traces: dict[str, Trace] = {}
    drafts: dict[str, tuple[Event, int]] = {}
    gone = {rid: why for rank in capture.ranks.values() for rid, why in rank.get("dropped_rids", {}).items()}
    for rank in capture.primary_ranks:
        for event in capture.events(rank):
            if event.kind == "request":
                _request(event, traces, capture.sent)
            elif event.kind != "reprefill":
                for j, rid in enumerate(event.rids):
                    trace = traces.get(rid)
                    if trace is None and rid in gone:
                        continue
                    if trace is None:
                        raise event.fail("rids", f"{rid} has no request event before it")
                    if trace.state != "partial":
                        _step(event, j, trace, drafts, gone)
    for rid, trace in traces.items():
        words = abortion(capture.sent.get(rid, {}))
        _finish(trace, gone.get(rid) or (None if words is None else f"the server aborted it: {words}"))
    return traces


def _request(event: Event, traces: dict[str, Trace], sent: dict[str, Any]) -> None:
    rid, cached = event.data["rid"], event.data["cached_prefix"]
    if rid in traces:
        traces[rid].spoil("the request was prefilled twice (retracted)")
        return
    trace = Trace(rid, event.rank, event.data["input_ids"], first_row=cached)
    trace.tokens = trace.prompt_ids[: cached + 1]
    trace.output_ids = sent.get(rid, {}).get("output_ids")
    if cached:
        trace.state, trace.why = "cached-prefix", f"the first {cached} positions came from the prefix cache"
    traces[rid] = trace


def _step(
    event: Event, j: int, trace: Trace, drafts: dict[str, tuple[Event, int]], gone: dict[str, str]
) -> None:
    """Apply event `j`-th request's part to its trace."""
    data, n = event.data, trace.first_row + trace.rows
    if data["seq_lens"][j] != n:
        if event.kind == "prefill_extend":
            trace.spoil("the request was prefilled again (retracted)")
        elif trace.rid in gone:
            trace.spoil(gone[trace.rid])
        else:
            raise event.fail(
                f"seq_lens[{j}]", f"{trace.rid} had {n} rows, the event says {data['seq_lens'][j]}"
            )
        return
    if event.kind == "draft":
        drafts[trace.rid] = (event, j)
        return
    ids = data["token_ids"][j]
    if event.kind == "prefill_extend":
        trace.chunks += 1
    else:
        trace.rounds.append(_round(event, j, n, ids, drafts.pop(trace.rid, None)))
    start = sum(data["lengths"][:j])
    trace._slices.append(Slice(event, "features", start, data["lengths"][j]))
    trace.feature_dtype = event.dtype("features")
    trace.tokens.extend(ids)


def _round(event: Event, j: int, n: int, committed: list[int], draft: tuple[Event, int] | None) -> Round:
    accept_len = event.data["accept_lens"][j]
    if draft is None or draft[0].data["seq_lens"][draft[1]] != n:
        return Round(n, [], None, accept_len, committed)
    source, k = draft
    parents = None
    if source.data["topk"] > 1:
        try:
            parents = parents_of(source.data["next_token"][k], source.data["next_sibling"][k])
        except (TypeError, ValueError, LookupError) as error:
            raise source.fail(f"next_token[{k}]", f"not the links of a tree: {error}") from error
    fed = Slice(source, "fed", k, 1) if "fed" in source.data["tensors"] else None
    return Round(n, source.data["token_ids"][k], parents, accept_len, committed, fed)


def _finish(trace: Trace, dropped: str | None) -> None:
    """Set the final state, and set aside rounds that ran after the answer was complete."""
    if dropped:
        trace.spoil(dropped)
    if len(trace.tokens) <= trace.prompt_len:
        trace.spoil("the capture ended during its prefill")
    if trace.output_ids is None:
        return
    end = trace.prompt_len + len(trace.output_ids)
    if len(trace.tokens) < end:
        trace.spoil(f"{len(trace.tokens)} of {end} tokens were captured")
    while trace.rounds and trace.rounds[-1].n + 1 >= end:
        extra = trace.rounds.pop()
        trace.extra_rounds += 1
        trace._slices.pop()
        del trace.tokens[extra.n + 1 :]


def build_reprefills(capture: Capture) -> dict[str, Reprefill]:
    """Join the chunks of each re-prefilled text."""
    answered = capture.meta.get("reprefill", {}).get("requests", {})
    found: dict[str, Reprefill] = {}
    for rank in capture.primary_ranks:
        for event in capture.events(rank, "reprefill"):
            of = event.data["of"]
            item = found.setdefault(of, Reprefill(of, [], answered.get(of, {}).get("further") or []))
            if event.data["seq_lens"][0] != len(item.token_ids):
                have = f"{len(item.token_ids)} tokens came before, the event says {event.data['seq_lens'][0]}"
                raise event.fail("seq_lens[0]", have)
            item.token_ids.extend(event.data["token_ids"][0])
            for name in event.data["tensors"]:
                item._slices.setdefault(name, []).append(Slice(event, name, 0, event.data["lengths"][0]))
                item.dtype = event.dtype(name)
    return found


def is_stored(rid: str) -> bool:
    """Texts of the trainer, prefilled for rung 3, have ids that end in "stored-<i>"."""
    return stored_index(rid) is not None


def stored_index(rid: str) -> int | None:
    head, _, number = rid.rpartition("stored-")
    return int(number) if number.isdigit() and (not head or head[-1] in "-:/.") else None
