"""What a difference is called: from (field, one value, the other) to the fault that the catalogue knows.

One table, whichever two are compared: training and serving by files and flags (`static`), the served setting
and the edit of it under which the server's drafts come out (`runtime`), the trained setting and the edit that
raises its accuracy (`training`). What has no name here keeps the name of its general mechanism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eaglelab.catalogue import find
from eaglelab.checks import Check
from eaglelab.diff import Difference
from eaglelab.evidence import Evidence
from eaglelab.inert import Evidence as Proof
from eaglelab.loader import nested_ids
from eaglelab.tensorfile import TensorInfo, to_float32

# field of Feed or Wiring (rope by its parts) -> slug, where the field alone decides.
FIELDS = {
    "rope.theta": "rope-theta",
    "rope.scaling": "rope-scaling",
    "rope.layout": "mrope-or-partial-rotary",
    "rope.rotary_dim": "mrope-or-partial-rotary",
    "norm_before_fc": "norm-before-fc-not-applied",
    "residual": "norm-before-residual",
    "feedback": "norm-output",
    "heads": "head-dim-wrong",
    "kv_heads": "head-dim-wrong",
    "head_dim": "head-dim-wrong",
    "qk_norm": "qk-norm-or-bias-dropped",
    "attention_bias": "qk-norm-or-bias-dropped",
    "output_bias": "qk-norm-or-bias-dropped",
    "layers": "multi-layer-drafter",
    "later_norm": "multi-layer-drafter",
    "window": "sliding-window-ignored",
    "full_layers": "sliding-window-ignored",
    "max_positions": "draft-context-too-short",
    "token_shift": "token-shift",
    "step_offset": "position-offset",
    "dtype": "checkpoint-dtype",
}
HEADS = {"initial": "lm-head-missing", "tied": "tied-head-reduced-vocab", "target": "trained-head-replaced"}
MAPS = {"dropped": "d2t-dropped", "misread": "d2t-absolute", "identity": "d2t-not-exported"}
ROPE = ("theta", "scaling", "layout", "rotary_dim")
ALIKE = 0.2  # mean cosine of rows: a table that was trained from the target's is far closer to it
CHANGED = Check(
    "conversion-changed-tensors",
    "the file that is served holds the trainer's numbers",
    "the file that is served holds other numbers than the trainer's",
    "convert again, with a converter that carries every tensor over",
    rung=4,
)
TENSORS = CHANGED.fault
NAMED = frozenset({*FIELDS.values(), *HEADS.values(), *MAPS.values(), TENSORS}) | {
    "fc-width-differs", "ids-missing", "ids-plus-one", "ids-off-by-one", "ids-copied-in-conversion",
    "id-past-the-last-layer", "embedding-counted", "trained-embedding-replaced", "random-embedding-exported",
    "midlayer-name", "target-not-the-trained-one", "chunk-order",
}  # fmt: skip


@dataclass(frozen=True)
class Named:
    """Differences that one fault is the cause of. slug None: no fault of this name is known."""

    slug: str | None
    differences: tuple[Difference, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(d.field for d in self.differences)


def named(evidence: Evidence, differences: list[Difference] | tuple[Difference, ...]) -> list[Named]:
    """Differences that count, by the fault behind them, the nameless ones last."""
    found: dict[str | None, list[Difference]] = {}
    for difference in differences:
        for part in parts(evidence, difference):
            if not part.inert:
                found.setdefault(slug(evidence, part), []).append(part)
    follow(found)
    groups = [Named(name, tuple(some)) for name, some in found.items() if name is not None]
    return groups + ([Named(None, tuple(found[None]))] if None in found else [])


def follow(found: dict[str | None, list[Difference]]) -> None:
    """Width, norm and a bypassed fc follow from the depths that are fed; they are no faults of their own."""
    if "chunk-order" in found and TENSORS in found:  # columns left in the trainer's order: no other numbers
        kept = [d for d in found[TENSORS] if not d.field.startswith(("fc.", "input_norm.", "fc_norm."))]
        found["chunk-order"] += [d for d in found[TENSORS] if d not in kept]
        found[TENSORS] = kept
        if not kept:
            del found[TENSORS]
    led = next(
        (name for name, some in found.items() if name and any(d.field == "depths" for d in some)), None
    )
    if led is None or None not in found:
        return
    rest = [d for d in found[None] if d.field not in ("width", "final_norm", "fc")]
    found[led] += [d for d in found[None] if d not in rest]
    found[None] = rest
    if not rest:
        del found[None]


def parts(evidence: Evidence, difference: Difference) -> list[Difference]:
    """A difference of rope, or of several tensor names, in parts that can have causes of their own."""
    a, b, field = difference.trained, difference.served, difference.field
    if field == "rope":
        differ = [(n, getattr(a, n), getattr(b, n)) for n in ROPE if getattr(a, n) != getattr(b, n)]
        return [replace(difference, field=f"rope.{n}", trained=x, served=y) for n, x, y in differ]
    if field not in ("unloaded", "dropped") or difference.inert or evidence.served is None:
        return [difference]
    proof = Proof(
        evidence.trained[1], evidence.served[1], evidence.original, evidence.target, evidence.checkpoint
    )
    groups: dict[str | None, list[str]] = {}
    for name in (n for n in b if n not in a):
        groups.setdefault(_tensor(evidence, name, field), []).append(name)
    out = []
    for names in groups.values():
        inert, why = proof.weigh(field, (), tuple(names))
        out.append(replace(difference, trained=(), served=tuple(names), inert=inert, why=why))
    return out


def slug(evidence: Evidence, difference: Difference) -> str | None:
    """The fault behind one difference (a part, see `parts`)."""
    a, b, field = difference.trained, difference.served, difference.field
    if difference.part == "tensors":
        return _numbers(evidence, field)
    if field in ("unloaded", "dropped"):
        return _tensor(evidence, b[0], field)
    if field == "depths":
        return depths(evidence, tuple(a), tuple(b))
    if field == "lm_head":
        renamed = b == "initial" and _renamed(evidence, "lm_head.weight")
        return "midlayer-name" if renamed else HEADS.get(b)
    if field == "vocab_map":
        return MAPS.get(b)
    if field == "logits_width":
        tied = evidence.served is not None and evidence.served[1].lm_head == "tied"
        return "tied-head-reduced-vocab" if tied else "checkpoint-dtype"
    if field == "embedding":
        return _embedding(evidence) if b == "target" else "random-embedding-exported"
    return FIELDS.get(field)


def depths(evidence: Evidence, meant: tuple[int, ...], fed: tuple[int, ...]) -> str | None:
    """Why other depths are fed than were meant, by the ids of both files. None: no reason is known."""
    ours, theirs = evidence.original, evidence.checkpoint
    layers = evidence.launch.target.num_layers if evidence.launch.target else None
    ids = nested_ids(theirs)
    if ids is None:
        return "ids-missing"
    if (
        len(fed) < len(set(ids))
        and layers is not None
        and (max(meant, default=0) >= layers or _past(ids, layers))
    ):
        return "id-past-the-last-layer"
    if len(fed) != len(meant):
        return "fc-width-differs"
    if evidence.copied and ids == ours.aux_layer_ids and ours.dialect != theirs.dialect:
        return "ids-copied-in-conversion"
    if sorted(fed) == sorted(meant):
        return "chunk-order"
    if 0 in (*meant, *fed):
        return "embedding-counted"
    return shifted({f - m for m, f in zip(sorted(meant), sorted(fed), strict=True)})


def shifted(by: set[int]) -> str | None:
    """Depths that all lie one beside those that were meant."""
    return {1: "ids-plus-one", -1: "ids-off-by-one"}.get(by.pop()) if len(by) == 1 else None


def _past(ids: tuple[int, ...], layers: int) -> bool:
    return max(ids, default=0) + 1 >= layers


def _tensor(evidence: Evidence, name: str, field: str) -> str | None:
    """The fault behind a tensor that the engine drops, or a parameter that nothing fills."""
    if _renamed(evidence, name):
        return "midlayer-name"
    if name == "lm_head.weight":
        tied = evidence.served is not None and evidence.served[1].lm_head == "tied"
        return "tied-head-reduced-vocab" if tied else "lm-head-missing" if field == "unloaded" else None
    if any(part in name for part in ("q_norm", "k_norm")) or name.endswith(".bias"):
        return "qk-norm-or-bias-dropped"
    if any(part in name for part in ("input_norm", "fc_norm", "aux_norm")):
        return "norm-before-fc-not-applied"
    if "embed_tokens" in name:
        return None
    if name.startswith("layers.") and not name.startswith("layers.0."):
        return "multi-layer-drafter"
    return None


def _renamed(evidence: Evidence, name: str) -> bool:
    """Whether `name` is a dropped tensor, or a parameter that nothing fills, and the two end alike."""
    wiring = evidence.served[1] if evidence.served else None
    if wiring is None:
        return False
    ends = [unfilled.removeprefix("layers.0.") for unfilled in wiring.unloaded]
    pairs = [(lost, end) for lost in wiring.dropped for end in ends if f".{lost}".endswith(f".{end}")]
    return any(name == lost or name.removeprefix("layers.0.") == end for lost, end in pairs)


def _numbers(evidence: Evidence, name: str) -> str:
    """The fault behind a tensor that holds other numbers in the file that is served."""
    right = evidence.right or evidence.original
    mine, theirs = right.tensors[name], evidence.checkpoint.tensors[name]
    if name == "d2t" and mine.shape == theirs.shape:
        before, after = (i.array().astype(np.int64) for i in (mine, theirs))
        if not after.any():
            return "d2t-not-exported"
        if np.array_equal(after, before + np.arange(len(before))):
            return "d2t-absolute"
    if name == "lm_head.weight" and _is_targets_head(evidence, theirs):
        return "trained-head-replaced"
    if name == "embed_tokens.weight":
        return "random-embedding-exported"
    return TENSORS


def _is_targets_head(evidence: Evidence, head: TensorInfo) -> bool:
    theirs = evidence.target.tensors.get("lm_head.weight") if evidence.target else None
    offsets = evidence.checkpoint.d2t
    if theirs is None or len(head.shape) != 2:
        return False
    rows = np.arange(head.shape[0])
    choices = [rows] if offsets is None or len(offsets) != len(rows) else [rows, rows + offsets]
    return any(_alike(head, theirs, some) > 0.999 for some in choices if some.max() < theirs.shape[0])


def _embedding(evidence: Evidence) -> str:
    """A table of the drafter's own that is not served: trained, or one that never was?"""
    if evidence.original.settings.embedding_trained:
        return "trained-embedding-replaced"
    mine = evidence.original.tensors.get("embed_tokens.weight")
    theirs = evidence.target.tensors.get("embed_tokens.weight") if evidence.target else None
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return "trained-embedding-replaced"
    if _alike(mine, theirs, np.arange(mine.shape[0])) <= ALIKE:
        return "random-embedding-exported"
    frozen = evidence.original.settings.embedding_trained is False
    return "target-not-the-trained-one" if frozen else "trained-embedding-replaced"


def _alike(mine: TensorInfo, theirs: TensorInfo, rows: np.ndarray, most: int = 512) -> float:
    """Mean cosine of rows of `mine` with the `rows` of `theirs`, of at most `most` of them."""
    some = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))
    a, b = to_float32(mine.mapped()[some], mine.dtype), to_float32(theirs.mapped()[rows[some]], theirs.dtype)
    size = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / np.maximum(size, 1e-30)).mean())


def title(name: str) -> str:
    return find(name).title


def fix(name: str, difference: Difference | None = None) -> str:
    """What to do, with the value to write where one line of a config is all."""
    values: dict[str, Any] = {} if difference is None else {difference.field: difference.trained}
    written = {
        "rope.theta": 'write "rope_theta": {} into the config that is served, and into its rope_parameters',
        "feedback": 'write "norm_output": {} into the config that is served',
        "window": "--speculative-draft-window-size {}",
    }
    if "window" in values:
        if values["window"] is None:
            return "take --speculative-draft-window-size out of the launch: no window was trained"
        values["window"] -= 1  # SGLang's backends let a token see itself besides
    for field, value in values.items():
        if field in written:
            value = str(value == "post-norm").lower() if field == "feedback" else value
            return written[field].format(value)
    return find(name).fix
