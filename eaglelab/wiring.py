"""Feed and Wiring: what reaches the drafter, and what the drafter does with it.

A drafter that works in training and fails in serving is, nearly always, the same weights fed or wired
differently. So both are values: `trained(checkpoint)` reads them off the trainer's config and tensors,
`served(checkpoint, launch)` derives what this engine will do, and `diff` of the two is the static diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from eaglelab.checkpoint import Checkpoint, TargetModel
    from eaglelab.launch import Launch, Target
    from eaglelab.served import Loading


@dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    scaling: tuple[tuple[str, object], ...] = ()  # sorted items of the config's rope_scaling; () for none
    layout: Literal["half", "interleaved"] = "half"
    rotary_dim: int = 0  # 0: the whole head


@dataclass(frozen=True)
class Feed:
    """What reaches the drafter at a draft-extend.

    `depths` are in feed order: 0 embedding output, n after the last layer.
    """

    depths: tuple[int, ...]
    width: int
    final_norm: bool = False  # the rows went through the target's final norm
    dtype: str = "bfloat16"
    basis: Literal["target", "unknown"] = "target"


@dataclass(frozen=True)
class Wiring:
    """What the drafter does with its feed."""

    fc: Literal["applied", "bypassed"] = "applied"
    norm_before_fc: Literal["none", "whole", "per-chunk"] = "none"
    residual: Literal["raw", "normed"] = "raw"
    feedback: Literal["pre-norm", "post-norm"] = "pre-norm"
    rope: Rope = Rope()
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    qk_norm: bool = False
    attention_bias: bool = False  # biases of the q, k and v projections
    output_bias: bool = False  # bias of the o projection
    layers: int = 1
    later_norm: Literal["input_layernorm", "hidden_norm"] = (
        "input_layernorm"  # before attention in layers 1, 2, ...
    )
    window: int | None = None  # keys that a token sees, its own included; None: all
    max_positions: int = 0
    eps: float = 1e-5
    embedding: Literal["own", "target"] = "target"
    # target: its rows at the ids of d2t if vocab_map is "d2t", else its first rows; tied: the embedding's
    # rows
    lm_head: Literal["own", "target", "tied", "initial"] = "own"
    logits_width: int = 0  # logits are cut to this many columns
    vocab_map: Literal["d2t", "identity", "dropped"] = "d2t"
    token_shift: int = 1
    position_start: int = 0  # position of a text's first token
    step_offset: int = 0
    tree_kv: Literal["branch", "parent"] = "branch"
    dtype: str = "bfloat16"
    unloaded: tuple[str, ...] = ()  # parameters (canonical names) that stay at their initial values
    dropped: tuple[str, ...] = ()  # tensors of the file (canonical names, else its own) that have no effect


@dataclass(frozen=True)
class Difference:
    """One field that training and serving do not share. `inert`: proven to change no draft token."""

    field: str
    trained: Any
    served: Any
    inert: bool
    why: str


def trained(checkpoint: Checkpoint, target: Target | None = None) -> tuple[Feed, Wiring]:
    """What the trainer's config and tensors say. Tensors outrank flags: a norm that was saved was trained.

    `target` is needed only where a dialect's layer ids depend on it, or are left out; else `depths` is ().
    Source: speculators 0.9.0 models/eagle3/core.py and model_definitions.py.
    """
    s, tensors = checkpoint.settings, checkpoint.tensors
    chunks = checkpoint.feature_count
    feed = Feed(checkpoint.depths_in(target), chunks * s.target_hidden_size, dtype=s.dtype)
    per_chunk = s.fc_norm or "fc_norm.0.weight" in tensors
    whole = s.norm_before_fc or "input_norm.weight" in tensors
    names = set(tensors)
    own_head = "lm_head.weight" in tensors
    return feed, Wiring(
        norm_before_fc="per-chunk" if per_chunk else "whole" if whole else "none",
        residual="normed" if s.norm_before_residual else "raw",
        feedback="post-norm" if s.norm_output else "pre-norm",
        rope=s.rope,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        qk_norm=s.qk_norm or any(n.endswith((".q_norm.weight", ".k_norm.weight")) for n in names),
        attention_bias=any(n.endswith("q_proj.bias") for n in names),
        output_bias=any(n.endswith("o_proj.bias") for n in names),
        layers=s.layers,
        later_norm="hidden_norm" if "layers.1.hidden_norm.weight" in names else "input_layernorm",
        window=s.window,
        max_positions=s.max_positions,
        eps=s.eps,
        embedding="own" if "embed_tokens.weight" in names else "target",
        lm_head="own" if own_head else "tied" if s.tied else "target",
        logits_width=s.draft_vocab_size,
        vocab_map="d2t" if "d2t" in names else "identity",
        position_start=1 if checkpoint.dialect == "speculators" else 0,
        dtype=s.dtype,
    )


def served(checkpoint: Checkpoint, launch: Launch) -> tuple[Feed, Wiring]:
    """What this engine does with this checkpoint under this launch, silent drops included (see `served.py`).

    BadInput if the engine has no class for it or would stop: the message says why and what to do.
    """
    from eaglelab import served as engine

    return engine.served(checkpoint, launch)


def loading(checkpoint: Checkpoint, launch: Launch) -> Loading:
    """What this engine's loader takes, drops and leaves at its initial value."""
    from eaglelab import served as engine

    return engine.loading(checkpoint, launch)


def diff(
    before: tuple[Feed, Wiring],
    after: tuple[Feed, Wiring],
    checkpoint: Checkpoint | None = None,
    target: TargetModel | None = None,
) -> list[Difference]:
    """Every field in which two (Feed, Wiring) differ, feed first.

    Tensors of `checkpoint` and `target` prove inertness.
    """
    found = []
    pairs: tuple[tuple[Any, Any], ...] = ((before[0], after[0]), (before[1], after[1]))
    for old, new in pairs:
        for name in old.__dataclass_fields__:
            a, b = getattr(old, name), getattr(new, name)
            if a != b:
                inert, why = _inert(name, a, b, before[1], after[1], checkpoint, target)
                found.append(Difference(name, a, b, inert, why))
    return found


_MANTISSA = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_EXPONENT = {"float16": 5, "bfloat16": 8, "float32": 8, "float64": 11}


def _inert(
    name: str,
    a: Any,
    b: Any,
    old: Wiring,
    new: Wiring,
    checkpoint: Checkpoint | None,
    target: TargetModel | None,
) -> tuple[bool, str]:
    """Whether a difference changes nothing, and the proof (or what is lacking for one)."""
    if name == "position_start":
        plain = not old.rope.scaling or dict(old.rope.scaling).get("rope_type") != "dynamic"
        return plain, "rope is relative: the same shift of every position changes no attention score"
    if name == "dtype":
        wider = _MANTISSA.get(b, 0) >= _MANTISSA.get(a, 99) and _EXPONENT.get(b, 0) >= _EXPONENT.get(a, 99)
        return wider, f"every {a} number is exact in {b}" if wider else f"{b} cannot hold every {a} number"
    if name == "embedding":
        return _same_embedding(checkpoint, target)
    if name == "lm_head":
        return _same_head(b, checkpoint, target)
    if name == "vocab_map":
        offsets = checkpoint.d2t if checkpoint else None
        zero = offsets is not None and not offsets.any()
        return zero, "every offset in d2t is 0" if zero else "d2t maps draft ids to other target ids"
    if name == "window" and checkpoint:
        longest = max(old.max_positions, new.max_positions)
        inside = all(w is None or w >= longest for w in (a, b)) and longest > 0
        return (
            inside,
            f"no text is longer than {longest}" if inside else "keys beyond the window are seen by one only",
        )
    if name == "later_norm":
        return (
            old.layers == 1,
            "there are no later layers" if old.layers == 1 else "another norm weight is applied",
        )
    if name == "norm_before_fc" and b == "none":
        return False, "its weight cannot make up for the division by the root mean square"
    if name == "dropped" and checkpoint:
        return _dropped_do_nothing(set(b) - set(a), checkpoint)
    if name == "unloaded":
        return _ones_anyway(set(b) - set(a))
    return False, ""


def _same_embedding(checkpoint: Checkpoint | None, target: TargetModel | None) -> tuple[bool, str]:
    if checkpoint is None or "embed_tokens.weight" not in checkpoint.tensors:
        return True, "the drafter has no embedding of its own"
    if target is None or "embed_tokens.weight" not in target.tensors:
        if checkpoint.settings.embedding_trained is False:
            return True, "by its config it was frozen to the target's (give --target to prove it)"
        return False, "not proven equal to the target's: give --target"
    same = _equal(checkpoint.tensors["embed_tokens.weight"], target.tensors["embed_tokens.weight"])
    return same, "the drafter's embedding " + (
        "equals the target's, number by number" if same else "is not the target's"
    )


def _same_head(now: str, checkpoint: Checkpoint | None, target: TargetModel | None) -> tuple[bool, str]:
    if now != "target":
        return (
            False,
            "the head that serves was never trained for this" if now == "initial" else "another head serves",
        )
    if checkpoint is None or target is None or "lm_head.weight" not in target.tensors:
        return False, "not proven equal to the target's: give --target"
    if "lm_head.weight" not in checkpoint.tensors:
        return True, "the drafter has no head of its own"
    same = _equal(checkpoint.tensors["lm_head.weight"], target.tensors["lm_head.weight"], cut=True)
    rows = "the target's first rows" if same else "not the target's first rows"
    return same, f"the drafter's head is {rows}, number by number"


def _equal(mine: Any, theirs: Any, cut: bool = False) -> bool:
    """Equal numbers, whatever the two dtypes. `cut`: against the first rows of the other only."""
    from eaglelab.tensorfile import to_float32

    if mine.shape[1:] != theirs.shape[1:] or mine.shape[0] > theirs.shape[0]:
        return False
    if not cut and mine.shape != theirs.shape:
        return False
    a, b = mine.array(), theirs.array()[: mine.shape[0]]
    step = max(1, (1 << 22) // max(1, a[:1].size))
    return all(
        np.array_equal(to_float32(a[i : i + step], mine.dtype), to_float32(b[i : i + step], theirs.dtype))
        for i in range(0, len(a), step)
    )


def _dropped_do_nothing(names: set[str], checkpoint: Checkpoint) -> tuple[bool, str]:
    """A bias of zeros that is dropped changes nothing; any other dropped tensor does."""
    for name in sorted(names):
        info = checkpoint.tensors.get(name)
        if info is None or not name.endswith(".bias") or info.array().any():
            return False, f"{name} was trained and is not used"
    return True, "every dropped tensor is a bias of zeros"


def _ones_anyway(names: set[str]) -> tuple[bool, str]:
    return not names, f"{sorted(names)[0]} is at its initial value" if names else ""
