"""Rotary positions: the rotation frequencies behind a `Rope`, and the rotation itself.

The scalings are those that trainers write for EAGLE-3 drafters (none, linear, llama3, yarn); the formulas are
the ones that transformers (`modeling_rope_utils.py`) and sglang 0.5.23 (`layers/rotary_embedding/`) share.
"""

from __future__ import annotations

import math

import torch

from eaglelab.errors import BadInput
from eaglelab.wiring import Rope
from eaglelab.yarn import number, rotation_factor


def frequencies(rope: Rope, head_dim: int, max_positions: int = 0) -> tuple[torch.Tensor, float]:
    """-> (radians per position [rotary_dim / 2] float32, factor on cos and sin).

    `max_positions` stands in for a missing `original_max_position_embeddings`.
    """
    dim = rope.rotary_dim or head_dim
    plain = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scaling = dict(rope.scaling)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    factor = number(scaling, "factor", 1.0)
    if kind == "linear":
        return plain / factor, 1.0
    original = number(scaling, "original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return _llama3(plain, scaling, factor, original), 1.0
    if kind == "yarn":
        return _yarn(plain, scaling, factor, original, rope.theta, dim)
    raise BadInput(f"rope_scaling: type {kind!r} is not known here (default, linear, llama3, yarn are)")


def rotate(x: torch.Tensor, positions: torch.Tensor, table: tuple[torch.Tensor, float], layout: str):
    """x [rows, heads, head_dim], positions [rows] -> x rotated in float32, in x's own dtype.

    "half" pairs channel i with i + rotary_dim / 2; "interleaved" pairs 2i with 2i + 1. Other channels stay.
    """
    inverse, factor = table
    angle = positions[:, None].float() * inverse.to(x.device)
    cos, sin = (angle.cos() * factor)[:, None], (angle.sin() * factor)[:, None]
    turned, rest = x[..., : 2 * len(inverse)].float(), x[..., 2 * len(inverse) :]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _llama3(plain: torch.Tensor, scaling: dict, factor: float, original: float) -> torch.Tensor:
    low, high = number(scaling, "low_freq_factor", 1.0), number(scaling, "high_freq_factor", 4.0)
    turns = original * plain / (2 * math.pi)  # full turns within the original context
    share = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast channel, kept; 0: slow channel, stretched
    return plain * share + plain / factor * (1 - share)


def _yarn(plain: torch.Tensor, scaling: dict, factor: float, original: float, theta: float, dim: int):
    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    fast, slow = number(scaling, "beta_fast", 32.0), number(scaling, "beta_slow", 1.0)
    low, high = channel(fast), channel(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, rotation_factor(scaling)
