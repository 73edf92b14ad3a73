"""Differences between training and serving, in words that an engineer can act on."""

from __future__ import annotations

from eaglelab.checks import changed
from eaglelab.diff import Difference
from eaglelab.errors import BadInput
from eaglelab.evidence import Evidence
from eaglelab.launch import Launch
from eaglelab.layer_ids import sglang_ids


def describe(difference: Difference, evidence: Evidence) -> str:
    """One sentence for one difference. Falls back to field, both values and the reason."""
    feed, wiring = evidence.served or evidence.trained
    a, b = difference.trained, difference.served
    if difference.part == "tensors":
        how = changed.words(evidence, difference.field)
        return f"{difference.field}: the served file holds other numbers than the trainer's: {how}"
    if difference.field == "width":
        return f"the drafter is fed {b:,} numbers a token where {a:,} were trained"
    if difference.field == "depths":
        norm = " (after the final norm)" if feed.final_norm else ""
        fed = _list(b) if b or not norm else "the last"  # which one it is, a target's config tells
        return f"depths fed: {fed}{norm}; trained: {_list(a)}{_ids(tuple(a), evidence.launch)}"
    if difference.field == "final_norm":
        what = "went through the target's final norm" if b else "did not go through the target's final norm"
        return f"the rows that are fed {what}; in training they {'did' if a else 'did not'}"
    if difference.field == "fc" and b == "bypassed":
        width = f"rows {feed.width:,} wide have the drafter's own width"
        return f"fc is bypassed: {width}, and its shape check skips fc"
    if difference.field == "lm_head" and b == "target":
        return (
            f"the target's lm_head, cut to its first {wiring.logits_width:,} rows (the draft vocabulary), "
            "stands in place of the drafter's"
        )
    if difference.field == "lm_head" and b == "initial":
        return "lm_head stays at its initial value: the file has none that this engine takes"
    if difference.field == "vocab_map" and b == "dropped":
        return "d2t is not applied: draft ids are taken for target ids"
    if difference.field in ("unloaded", "dropped"):
        verb = (
            "stay at their initial values" if difference.field == "unloaded" else "are dropped without a word"
        )
        names = [n for n in b if n not in a]
        return f"{_list(names)} {verb}" + (f" ({difference.why})" if difference.why else "")
    why = f" ({difference.why})" if difference.why else ""
    if difference.field == "rope":  # its parts that differ
        parts = [n for n in a.__dataclass_fields__ if getattr(a, n) != getattr(b, n)]
        said = (f"rope {n}: trained {getattr(a, n)!r}, served {getattr(b, n)!r}" for n in parts)
        return "; ".join(said) + why
    return f"{difference.field}: trained {a!r}, served {b!r}{why}"


def _ids(depths: tuple[int, ...], launch: Launch) -> str:
    """The layer ids that would make SGLang feed these depths, where it can."""
    target = launch.target
    if launch.algorithm != "EAGLE3" or target is None:
        return ""
    try:
        return f" (ids {list(sglang_ids(depths, target.architecture, target.num_layers))} for SGLang)"
    except BadInput:
        return ""


def _list(values) -> str:
    values = [str(v) for v in values]
    return ", ".join(values) if values else "none"
