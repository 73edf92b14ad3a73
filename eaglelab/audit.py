"""What a trainer's stored features are, as far as they tell: the facts that the checks on data judge.

Gathered once, from a bounded part of the data (training sets are larger than memory): whole texts, evenly
spaced. Nothing here judges; what could not be told is None or empty, and `why` says why.

The teacher's last state is before or after the target's final norm: after it, every row divided by the norm's
weight has a root mean square of 1, which no row before it has. Whether rows belong to their tokens shows in
the target's own choice from that state: it is the next token far more often than any other one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.errors import BadInput
from eaglelab.tensorfile import to_float32

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.checkpoint import TargetModel
    from eaglelab.depths import DepthNames
    from eaglelab.evidence import Evidence
    from eaglelab.features import Sample, StoredFeatures

MOST_SAMPLES = 256
MOST_ROWS = 20_000
OFFSETS = 64  # rows against tokens: how far apart is tried
WORK = 2e11  # multiplications spent on the target's head
RMS_OFF = 0.02  # of 1: bf16 rounds a row's root mean square far less than this
TOP = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.40e38}

Last = Literal["before the final norm", "after the final norm", "unknown"]


@dataclass
class Audit:
    """Facts about stored features. `agreement`: rows' offset against tokens -> share of the target's own
    choices that are the token there (0: where it belongs). `greedy`: per sample, [length - 1] bool: token
    i + 1 is the target's choice at row i; only of the samples that the head was applied to, by position in
    `samples`. `depths`: of the k chunks and the last state."""

    samples: list[Sample] = field(default_factory=list)
    rows: int = 0
    truncated: list[str] = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
    saturated: int = 0
    zero_rows: int = 0
    dtype: str = ""
    declared_last: Last = "unknown"
    last: Last = "unknown"
    last_rms: float = float("nan")
    agreement: dict[int, float] = field(default_factory=dict)
    greedy: dict[int, Array] = field(default_factory=dict)
    masks: dict[int, Array] = field(default_factory=dict)
    no_masks: str = ""
    depths: DepthNames | None = None
    better_on: tuple[float, float] | None = None  # accuracy on the stored rows, on the config's depths
    source: str = ""  # of the streams that the chunks were compared with
    why: dict[str, str] = field(default_factory=dict)

    @property
    def offset(self) -> int | None:
        """By how many rows the states lie behind their tokens, where the target's choices tell; else None."""
        if not self.agreement:
            return None
        best = max(self.agreement, key=lambda o: self.agreement[o])
        clear = self.agreement[best] > 0.2 and self.agreement[best] > 2 * self.agreement[0]
        return best if clear else 0 if self.agreement[0] > 0.2 else None


def audit(stored: StoredFeatures, evidence: Evidence) -> Audit:
    """Read a part of the stored features and tell what they are.

    Of the evidence: the trained feed, the target, the capture if there is one.
    """
    found = Audit(truncated=list(stored.truncated), declared_last=stored.last_is)
    if not stored.samples:
        return found
    found.dtype, found.no_masks = stored.dtype, stored.no_loss_mask or ""
    _read(stored, found)
    if found.samples and evidence.target is not None and "norm.weight" in evidence.target.tensors:
        _last(found, evidence.target)
    try:
        _depths(stored, found, evidence)
    except BadInput as error:
        found.why["depths"] = str(error)
    return found


def _read(stored: StoredFeatures, found: Audit) -> None:
    """Lengths, token ids, finite numbers, loss masks."""
    picked = np.unique(
        np.linspace(0, len(stored.samples) - 1, min(len(stored.samples), MOST_SAMPLES)).astype(int)
    )
    for i in picked:
        sample = stored.samples[int(i)]
        if wrong := _truncation(sample):
            found.truncated.append(wrong)
            continue
        try:
            _ = sample.last
            if (mask := sample.loss_mask) is not None:
                found.masks[len(found.samples)] = mask
        except BadInput as error:
            into = found.nonfinite if "non-finite" in str(error) else found.truncated
            into.append(str(error))
            continue
        states = to_float32(np.asarray(sample.states), sample.dtype)
        found.saturated += int((np.abs(states) >= TOP[sample.dtype]).sum())
        found.zero_rows += int((np.abs(states).max(axis=(1, 2)) == 0).sum())
        found.samples.append(sample)
        found.rows += sample.length
        if found.rows >= MOST_ROWS:
            break


def _truncation(sample: Sample) -> str:
    """In words, how the dataset's text is not the one whose states were stored; "" if it is."""
    try:
        row, ids = sample.row, sample.token_ids
    except BadInput as error:
        return str(error)
    if row is None or np.array_equal(row["input_ids"], ids):
        return ""
    text = np.asarray(row["input_ids"])
    missing = len(text) - len(ids)
    if missing > 0 and np.array_equal(text[missing:], ids):
        return f"{sample.path}: the first {missing} of the text's {len(text)} tokens have no row"
    if missing > 0 and np.array_equal(text[: len(ids)], ids):
        return f"{sample.path}: the last {missing} of the text's {len(text)} tokens have no row"
    return f"{sample.path}: its {len(ids)} token ids are not the {len(text)} of its row in the dataset"


def _last(found: Audit, target: TargetModel) -> None:
    """Before or after the norm; and what the target would choose from it."""
    weight = to_float32(target.tensors["norm.weight"].array(), target.tensors["norm.weight"].dtype)
    some = found.samples[:: max(1, len(found.samples) // 8)][:8]
    if weight.shape != (some[0].states.shape[2],):
        found.why["last"] = f"the target is {weight.shape[0]} wide, the stored rows {some[0].states.shape[2]}"
        return
    rows = np.concatenate([to_float32(np.asarray(s.states[:256, -1]), s.dtype) for s in some])
    # Gemma and its like store the weight less 1
    rms = min((_over(rows, w) for w in (weight, weight + 1)), key=lambda r: abs(float(np.median(r)) - 1))
    found.last_rms = float(np.median(rms))
    normed = len(rms) > 0 and float(np.quantile(np.abs(rms - 1), 0.9)) <= RMS_OFF
    found.last = (
        "after the final norm" if normed else "before the final norm" if np.isfinite(rms).all() else "unknown"
    )
    if "lm_head.weight" in target.tensors:
        _choices(found, target, normed)


def _over(rows: Array, weight: Array) -> Array:
    """The root mean square of each row over the norm's weight, of rows that are not all zeros [n]."""
    used = np.abs(weight) > 1e-3 * np.abs(weight).max()
    rms = np.sqrt(((rows[:, used] / weight[used]) ** 2).mean(axis=1))
    return rms[rms > 0] if (rms > 0).any() else np.full(1, np.nan)


def _choices(found: Audit, target: TargetModel, normed: bool) -> None:
    import torch

    from eaglelab.stored import Truth

    truth = Truth(target)
    budget = int(np.clip(WORK / truth.head.numel(), 64, 4096))
    hits, counts = np.zeros(2 * OFFSETS + 1), np.zeros(2 * OFFSETS + 1)
    for i, sample in enumerate(found.samples):
        count = min(sample.length, budget)
        if count < 16:
            break
        budget -= count
        last = torch.from_numpy(to_float32(np.asarray(sample.states[-count:, -1]), sample.dtype))
        choice, ids = truth.argmax(last, normed), sample.token_ids
        at = np.arange(sample.length - count, sample.length) + 1
        for j, offset in enumerate(range(-OFFSETS, OFFSETS + 1)):
            there = at + offset
            ok = (there >= 0) & (there < len(ids))
            hits[j] += (choice[ok] == ids[there[ok]]).sum()
            counts[j] += ok.sum()
        if count == sample.length:
            found.greedy[i] = choice[:-1] == ids[1:]
    shares = np.divide(hits, counts, out=np.zeros_like(hits), where=counts > 0)
    found.agreement = {o: float(shares[o + OFFSETS]) for o in range(-OFFSETS, OFFSETS + 1)}


def _depths(stored: StoredFeatures, found: Audit, evidence: Evidence) -> None:
    from eaglelab.depths import name_depths
    from eaglelab.rows import MAX_ROWS, stored_rows

    target, feed = evidence.target, evidence.trained[0]
    pairs, found.source = _beside(stored, found, target, evidence.capture, MAX_ROWS)
    if not pairs:
        return
    rows = stored_rows(pairs)
    layers = target.facts.num_layers if target else max(rows.streams)
    wanted = [*feed.depths, layers] if feed.depths and not feed.final_norm else None
    found.depths = name_depths(
        rows.features, rows.streams, rows.final, layers=layers, expected=wanted, texts=rows.texts
    )
    named = found.depths.depths[:-1]
    if None not in named and tuple(named) != feed.depths and len(named) == len(feed.depths):
        found.better_on = _better_on(pairs, evidence)


def _better_on(pairs: list[tuple[Sample, Any]], evidence: Evidence) -> tuple[float, float] | None:
    """How often the drafter, wired as trained, expects the token two on: fed the stored rows, and fed the
    depths that its config says."""
    import torch

    from eaglelab.drafter import Drafter
    from eaglelab.drafting import Drafting

    feed, wiring = evidence.trained
    try:
        drafter = Drafter(evidence.original, wiring, evidence.target, "cpu", torch.float32)
    except BadInput:
        return None
    right, total = np.zeros(2), 0
    for sample, text in pairs[:4]:
        if not set(feed.depths) <= set(text.depths):
            return None
        ids = sample.token_ids
        streams = [np.asarray(text.stream(d))[: len(ids)] for d in feed.depths]
        kind = getattr(text, "dtype", "float32")
        meant = to_float32(np.concatenate(streams, axis=1), kind)
        for i, rows in enumerate((to_float32(sample.features, sample.dtype), meant)):
            state = Drafting.over(drafter, ids.tolist(), torch.from_numpy(rows))
            expected = drafter.to_target(drafter.logits(state.normed).argmax(-1)).numpy()
            right[i] += (expected[: len(ids) - 2] == ids[2 : len(expected) + 2][: len(ids) - 2]).sum()
        total += len(ids) - 2
    return (float(right[0] / total), float(right[1] / total)) if total > 0 else None


def _beside(
    stored: StoredFeatures, found: Audit, target: TargetModel | None, capture: Capture | None, most: int
) -> tuple[list[tuple[Sample, Any]], str]:
    """Samples with the streams of their texts: as the server saw them, else from the target run here."""
    from eaglelab.forward import run_target
    from eaglelab.traces import stored_index

    places = {id(sample): i for i, sample in enumerate(stored.samples)}
    if capture is not None:
        again = {stored_index(rid): text for rid, text in capture.reprefill.items()}
        pairs = [(s, again[places[id(s)]]) for s in found.samples if places[id(s)] in again]
        pairs = [
            (s, t) for s, t in pairs if t.token_ids[: s.length] == s.token_ids[: len(t.token_ids)].tolist()
        ]
        if pairs:
            return pairs, "the server's re-prefill of the same texts"
    if target is None:
        found.why["depths"] = "no server sent the stored texts, and no target is given to run them here"
        return [], ""
    some: list[Sample] = []
    for sample in found.samples:
        if sum(s.length for s in some) < most // 2:
            some.append(sample)
    if not some:
        return [], ""
    runs = run_target(Path(target.path), [s.token_ids[:most].tolist() for s in some])
    return list(zip(some, runs, strict=True)), "the target run here with transformers, in float32"
