"""Rows of features beside the residual streams of the same positions: what naming a depth compares.

From a capture (what a server fed, beside the re-prefill of the same text) or from the trainer's samples
(beside the re-prefill of the same text, or the target run here). Rows are picked evenly for naming; whole
texts where neighbouring rows matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.errors import BadInput

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.features import Sample
    from eaglelab.traces import Reprefill

MAX_ROWS = 1024  # more would not move a median


@dataclass(frozen=True)
class Rows:
    """features [n, width] as stored; streams: depth -> what reads [n, H]; final the same after the norm.

    texts [n]: which text a row is of. after_verify [n]: rows that a verify handed over, not the prefill.
    """

    features: Array
    streams: dict[int, Callable[[], Array]]
    final: Callable[[], Array] | None
    texts: Array
    after_verify: Array


def captured_rows(capture: Capture, most: int = MAX_ROWS, *, whole: bool = False, rank: str = "") -> Rows:
    """Rows that the server fed, of requests that were re-prefilled; `whole`: texts without gaps.

    BadInput if no request was, or a re-prefill is of another text. rank: instead of the primary one.
    """
    requests = of_rank(capture, rank).requests if rank else capture.requests
    pairs = [(t, capture.reprefill[rid]) for rid, t in requests.items() if rid in capture.reprefill]
    picked = []  # (trace, its chosen rows, re-prefill)
    left = most
    for trace, text in pairs:
        shared = min(trace.rows, len(text.token_ids) - trace.first_row)
        if trace.tokens[: trace.first_row + shared] != text.token_ids[: trace.first_row + shared]:
            raise BadInput(f"{capture.path}: request {trace.rid}: its re-prefill is of another text")
        count = min(shared, left if whole else -(-most // len(pairs)))
        if count > 0:
            rows = np.arange(count) if whole else np.linspace(0, shared - 1, count).astype(int)
            picked.append((trace, rows, text))
            left -= count
    if not picked:
        raise BadInput(f"{capture.path}: no captured request was re-prefilled; capture with a re-prefill")
    features = np.concatenate([trace.features[rows] for trace, rows, _ in picked])
    after = [rows + t.first_row >= t.prompt_len for t, rows, _ in picked]
    beside = [(text, rows + t.first_row) for t, rows, text in picked]
    return Rows(features, *_streams(beside), _texts(beside), np.concatenate(after))


def stored_rows(samples: list[tuple[Sample, Reprefill]], most: int = MAX_ROWS) -> Rows:
    """The trainer's rows of all k chunks and the last state [n, (k + 1) * H], beside these texts' streams."""
    features, beside = [], []
    for sample, text in samples:
        count = min(sample.length, len(text.token_ids), most)
        if count <= 0:
            break
        features.append(np.asarray(sample.states[:count]).reshape(count, -1))
        beside.append((text, np.arange(count)))
        most -= count
    texts = _texts(beside)
    return Rows(np.concatenate(features), *_streams(beside), texts, np.zeros(len(texts), bool))


def of_rank(capture: Capture, rank: str) -> Any:
    """The capture as another rank recorded it."""
    view = copy.copy(capture)
    view.__dict__.pop("requests", None)
    view.__dict__["primary_ranks"] = [rank]
    return view


def _streams(
    beside: list[tuple[Reprefill, Array]],
) -> tuple[dict[int, Callable[[], Array]], Callable[[], Array] | None]:
    def read(name: int | None) -> Array:
        found = [text.final if name is None else text.stream(name) for text, _ in beside]
        return np.concatenate([s[rows] for s, (_, rows) in zip(found, beside, strict=True)])

    depths = set.intersection(*(set(text.depths) for text, _ in beside))
    return {depth: partial(read, depth) for depth in depths}, partial(read, None)


def _texts(beside: list[tuple[Reprefill, Array]]) -> Array:
    return np.repeat(np.arange(len(beside)), [len(rows) for _, rows in beside])
