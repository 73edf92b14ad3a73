"""Feed and Wiring: what reaches the drafter, and what the drafter does with it.

A drafter that works in training and fails in serving is, nearly always, the same weights fed or wired
differently. So both are values: `trained.trained(checkpoint)` reads them off the trainer's config and
tensors, `served.served(checkpoint, launch)` derives what an engine will do, and `diff.diff` of the two is the
static diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    scaling: tuple[tuple[str, object], ...] = ()  # sorted items of the config's rope_scaling; () for none
    layout: Literal["half", "interleaved"] = "half"
    rotary_dim: int = 0  # 0: the whole head


@dataclass(frozen=True)
class Latent:
    """Widths of multi-head latent attention (MLA), as DeepSeek-V2 names them; only the rope part turns."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


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
    norm_before_fc: Literal["none", "whole", "per-chunk", "both"] = "none"  # both: whole, then per chunk
    residual: Literal["raw", "normed"] = "raw"
    feedback: Literal["pre-norm", "post-norm"] = "pre-norm"
    rope: Rope = Rope()
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: Latent | None = None  # multi-head latent attention; None: plain attention
    qk_norm: bool = False
    attention_bias: bool = False  # biases of the q, k and v projections
    output_bias: bool = False  # bias of the o projection
    layers: int = 1
    later_norm: Literal["input_layernorm", "hidden_norm"] = (
        "input_layernorm"  # before attention in layers 1, 2, ...
    )
    window: int | None = None  # keys that a token sees, its own included; None: all
    full_layers: tuple[int, ...] = ()  # layers that see all keys in spite of the window
    window_moves: bool = (
        True  # a draft step's window ends at that step; False: at the row that it starts from
    )
    max_positions: int = 0
    eps: float = 1e-5
    embedding: Literal["own", "target"] = "target"
    # target: its rows at the ids of d2t under vocab_map "d2t", else its first rows; tied: the embedding's
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

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.window


def feature_norm(whole: bool, per_chunk: bool) -> Literal["none", "whole", "per-chunk", "both"]:
    """`norm_before_fc` from its two switches."""
    return ("both" if per_chunk else "whole") if whole else "per-chunk" if per_chunk else "none"
