"""Multi-head latent attention (MLA): queries, keys and values of a drafter such as Kimi's, head by head.

A row is squeezed into a query latent and a key-value latent, each under its own norm; every head's keys and
values are unfolded from the latter. One slice of the key is rotated and shared by all heads. An engine caches
the latents and folds the unfolding into queries and output (SGLang's `forward_absorb`), which is the same
sum. Facts: transformers `models/deepseek_v3`; sglang 0.5.23 `models/{deepseek_v2,kimi_k25_eagle3}.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from eaglelab.errors import BadInput
from eaglelab.rope import rotate
from eaglelab.wiring import Wiring
from eaglelab.yarn import score_factor

PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")


def qkv(drafter: Any, at: str, x: torch.Tensor, positions: torch.Tensor, see: Any):
    """x [rows, 2 * H] at layer `at` ("layers.0.") -> q and k [rows, heads, nope + rope], v [rows, heads, v].

    Both are rotated at `positions` [rows]; `see` is the drafter's tap.
    """
    wiring, own = drafter.wiring, at + "self_attn."
    m, rows, heads, rope = wiring.latent, len(x), wiring.heads, drafter.rope
    squeezed = see(at + "q_latent", drafter.norm(own + "q_a_layernorm", drafter.linear(own + "q_a_proj", x)))
    q = see(at + "q", drafter.linear(own + "q_b_proj", squeezed).unflatten(-1, (heads, -1)))
    plain, turning = q.split([m.qk_nope_head_dim, m.qk_rope_head_dim], dim=-1)
    q = torch.cat([plain, rotate(turning, positions, rope, wiring.rope.layout)], dim=-1)
    shared = drafter.linear(own + "kv_a_proj_with_mqa", x)
    squeezed, turning = shared.split([m.kv_lora_rank, m.qk_rope_head_dim], dim=-1)
    squeezed = see(at + "kv_latent", drafter.norm(own + "kv_a_layernorm", squeezed))
    unfolded = drafter.linear(own + "kv_b_proj", squeezed).unflatten(-1, (heads, -1))
    plain, v = unfolded.split([m.qk_nope_head_dim, m.v_head_dim], dim=-1)
    turned = rotate(turning[:, None], positions, rope, wiring.rope.layout).expand(rows, heads, -1)
    k = torch.cat([plain, turned], dim=-1)
    return see(at + "q_rope", q), see(at + "k_rope", k), see(at + "v", v)


def scale(wiring: Wiring) -> float:
    """What scores are multiplied by: one over the root of a head's width, and YaRN's factor."""
    m = wiring.latent
    if m is None:
        raise BadInput("this drafter has no latent attention")
    return (m.qk_nope_head_dim + m.qk_rope_head_dim) ** -0.5 * score_factor(dict(wiring.rope.scaling))


def shapes(wiring: Wiring, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of latent attention, by the last part of their names."""
    m, heads = wiring.latent, wiring.heads
    if m is None:
        return {}
    return {
        "q_a_proj": (m.q_lora_rank, 2 * hidden), "q_a_layernorm": (m.q_lora_rank,),
        "q_b_proj": (heads * (m.qk_nope_head_dim + m.qk_rope_head_dim), m.q_lora_rank),
        "kv_a_proj_with_mqa": (m.kv_lora_rank + m.qk_rope_head_dim, 2 * hidden),
        "kv_a_layernorm": (m.kv_lora_rank,),
        "kv_b_proj": (heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank),
        "o_proj": (hidden, heads * m.v_head_dim),
    }  # fmt: skip
