"""YaRN's two factors, in the words of transformers and in those of SGLang, which are not quite the same.

YaRN stretches rope, and makes up for it by a factor on cosines and sines (all attention) and one on the scale
of the scores (multi-head latent attention only). Sources: transformers 5 `modeling_rope_utils.py` and
`models/deepseek_v3`; sglang 0.5.23 `layers/rotary_embedding/{factory,yarn,rope_variant}.py` and
`configs/model_config.py` (compute_mla_mscale_scaling).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eaglelab.errors import BadInput


def number(scaling: Mapping[str, Any], name: str, default: float) -> float:
    """One number of a config's rope_scaling. BadInput names the field when it is something else."""
    value = scaling.get(name, default)
    if not isinstance(value, int | float):
        raise BadInput(f"rope_scaling.{name} is {value!r}: expected a number")
    return float(value)


def magnitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotation_factor(scaling: Mapping[str, Any]) -> float:
    """The factor on cosines and sines, as transformers reads a config."""
    factor = number(scaling, "factor", 1.0)
    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor", 1.0)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(factor, number(scaling, "mscale", 1.0)) / magnitude(
            factor, number(scaling, "mscale_all_dim", 1.0)
        )
    return magnitude(factor)


def score_factor(scaling: Mapping[str, Any]) -> float:
    """The factor on the scores of latent attention; transformers and SGLang agree on it."""
    if not scaling:
        return 1.0
    return magnitude(number(scaling, "factor", 1.0), number(scaling, "mscale_all_dim", 0.0)) ** 2


def as_sglang(scaling: Mapping[str, Any], latent: bool, max_positions: int) -> dict[str, Any]:
    """A rope_scaling as SGLang will act on it, said in transformers' words; unchanged where both do the same.

    SGLang knows no `attention_factor`, has an `attn_factor`, and counts an mscale of 0 as given. Under latent
    attention it takes every kind of scaling for YaRN.
    """
    scaling = dict(scaling)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if latent and scaling:
        scaling["rope_type"] = "yarn"
        scaling.setdefault("original_max_position_embeddings", max_positions)
        if not scaling.get("truncate", True):
            del scaling["truncate"]
    elif kind != "yarn":
        return scaling
    mine = _sglang_factor(scaling, latent)
    scaling.pop("attn_factor", None)
    if not math.isclose(mine, rotation_factor(scaling), rel_tol=1e-9):
        scaling["attention_factor"] = mine
    return scaling


def for_sglang(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A rope_scaling with the `attn_factor` under which SGLang does as transformers, where it needs one."""
    plain = as_transformers(scaling)
    if plain.get("rope_type", plain.get("type")) != "yarn":
        return plain
    factor = rotation_factor(plain) / _sglang_factor(plain, False)
    return plain if math.isclose(factor, 1.0, rel_tol=1e-9) else plain | {"attn_factor": factor}


def as_transformers(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A rope_scaling without what transformers does not know."""
    return {name: value for name, value in scaling.items() if name != "attn_factor"}


def _sglang_factor(scaling: Mapping[str, Any], latent: bool) -> float:
    """SGLang's factor on cosines and sines."""
    factor, given = number(scaling, "factor", 1.0), {"mscale", "mscale_all_dim"}
    own = number(scaling, "attn_factor", 1.0)
    if latent:
        all_dim = magnitude(factor, number(scaling, "mscale_all_dim", 0.0))
        return magnitude(factor, number(scaling, "mscale", 1.0)) / all_dim * own
    if given <= {name for name, value in scaling.items() if value is not None}:
        all_dim = magnitude(factor, number(scaling, "mscale_all_dim", 1.0))
        return magnitude(factor, number(scaling, "mscale", 1.0)) / all_dim * own
    return magnitude(factor) * own
