"""Feed and Wiring: what reaches the drafter, and what the drafter does with it.

A drafter that works in training and fails in serving is, nearly always, the same weights fed or wired
differently. So both are values: `trained(checkpoint)` reads them off the trainer's config and tensors,
`served(checkpoint, launch)` derives what this engine will do, and `diff` of the two is the static diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
    # misread: target ids taken for offsets
    vocab_map: Literal["d2t", "identity", "dropped", "misread"] = "d2t"
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
    why: str  # the proof that it is inert, else what it means
    part: Literal["feed", "wiring"] = "wiring"


def trained(checkpoint: Checkpoint, target: Target | None = None) -> tuple[Feed, Wiring]:
    """What the trainer's config and tensors say. Tensors outrank flags: a norm that was saved was trained.

    `target` is needed only where a dialect's layer ids depend on it, or are left out; else `depths` is ().
    Source: speculators 0.9.0 models/eagle3/core.py and model_definitions.py.
    """
    checkpoint.check_attention()
    s, tensors = checkpoint.settings, checkpoint.tensors
    chunks = checkpoint.feature_count
    if checkpoint.takes_features:
        feed = Feed(checkpoint.depths_in(target), chunks * s.target_hidden_size, dtype=s.dtype)
    else:  # the target's last hidden state, after its final norm, stands in the drafter's place
        last = (target.num_layers,) if target else ()
        feed = Feed(last, s.target_hidden_size, final_norm=True, dtype=s.dtype)
    per_chunk = s.fc_norm or "fc_norm.0.weight" in tensors
    whole = s.norm_before_fc or "input_norm.weight" in tensors
    names = set(tensors)
    own_head = "lm_head.weight" in tensors
    return feed, Wiring(
        fc="applied" if checkpoint.takes_features else "bypassed",
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
        position_start=checkpoint.spelling.position_start,
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
    from eaglelab.inert import Evidence

    evidence = Evidence(before[1], after[1], checkpoint, target)
    parts: tuple[tuple[Literal["feed", "wiring"], Any, Any], ...] = (
        ("feed", before[0], after[0]),
        ("wiring", before[1], after[1]),
    )
    found = []
    for part, old, new in parts:
        for name in old.__dataclass_fields__:
            a, b = getattr(old, name), getattr(new, name)
            if a != b:
                found.append(Difference(name, a, b, *evidence.weigh(name, a, b), part))
    return found
