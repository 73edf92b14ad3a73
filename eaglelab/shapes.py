"""A drafter's config against the shapes of its tensors."""

from __future__ import annotations

from pathlib import Path

from eaglelab.errors import BadInput
from eaglelab.settings import Settings
from eaglelab.tensorfile import TensorInfo

FAULTS = {  # a word of the field that is wrong -> the fault that the catalogue knows it by
    "head_dim": "head-dim-wrong",
    "hidden_size": "drafter-width-differs",
    "vocab_size": "checkpoint-dtype",
}


def check_shapes(path: Path, s: Settings, tensors: dict[str, TensorInfo]) -> None:
    """The config's sizes against the tensors: a wrong field is named here, not by an engine's stack trace."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    sizes: list[tuple[str, int, int, str]] = [
        ("fc.weight", 0, s.hidden_size, "hidden_size"),
        ("norm.weight", 0, s.hidden_size, "hidden_size"),
        ("embed_tokens.weight", 0, s.vocab_size, "vocab_size"),
        ("lm_head.weight", 1, s.hidden_size, "hidden_size"),
        ("d2t", 0, s.draft_vocab_size, "draft_vocab_size"),
        ("t2d", 0, s.vocab_size, "vocab_size"),
        *_latent_sizes(s),
        ("layers.0.self_attn.q_proj.weight", 0, q, "num_attention_heads x head_dim"),
        ("layers.0.self_attn.k_proj.weight", 0, kv, "num_key_value_heads x head_dim"),
        ("layers.0.self_attn.q_proj.weight", 1, 2 * s.hidden_size, "2 x hidden_size"),
        ("layers.0.mlp.gate_proj.weight", 0, s.intermediate_size, "intermediate_size"),
    ]
    if not s.tied:
        sizes.append(("lm_head.weight", 0, s.draft_vocab_size, "draft_vocab_size"))
    for name, dimension, expected, fields in sizes:
        if name in tensors and (
            len(tensors[name].shape) <= dimension or tensors[name].shape[dimension] != expected
        ):
            raise BadInput(
                f"{path}/config.json: field {fields!r} gives {expected:,}, but tensor "
                f"{tensors[name].name_in_file!r} has shape {list(tensors[name].shape)}; correct the config",
                next((fault for word, fault in FAULTS.items() if word in fields), ""),
            )
    if (fc := tensors.get("fc.weight")) and (len(fc.shape) != 2 or fc.shape[1] % (s.target_hidden_size or 1)):
        raise BadInput(
            f"{path}: fc.weight has shape {list(fc.shape)}: its input is no multiple of the target's hidden "
            f"size {s.target_hidden_size:,} (field 'target_hidden_size', else 'hidden_size')",
            "drafter-width-differs",
        )


def _latent_sizes(s: Settings) -> list[tuple[str, int, int, str]]:
    if not (m := s.latent):
        return []
    at = "layers.0.self_attn."
    return [
        (at + "q_a_proj.weight", 0, m.q_lora_rank, "q_lora_rank"),
        (at + "q_a_proj.weight", 1, 2 * s.hidden_size, "2 x hidden_size"),
        (at + "q_b_proj.weight", 0, s.heads * s.head_dim, "num_attention_heads x (qk_nope + qk_rope)"),
        (at + "kv_a_proj_with_mqa.weight", 0, m.kv_lora_rank + m.qk_rope_head_dim, "kv_lora_rank + qk_rope"),
        (at + "kv_a_proj_with_mqa.weight", 1, 2 * s.hidden_size, "2 x hidden_size"),
        (
            at + "kv_b_proj.weight",
            0,
            s.heads * (m.qk_nope_head_dim + m.v_head_dim),
            "num_attention_heads x (qk_nope + v_head_dim)",
        ),
        (at + "o_proj.weight", 1, s.heads * m.v_head_dim, "num_attention_heads x v_head_dim"),
    ]
