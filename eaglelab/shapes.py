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
    """The config's sizes against the tensors: what is wrong is named here, not by an engine's stack trace.

    A size that no tensor bears out is the config's fault; one that others bear out, the odd tensor's.
    """
    sizes = [size for size in _sizes(s) if size[0] in tensors]
    wrong = [size for size in sizes if not _has(tensors[size[0]], *size[1:3])]
    for name, dimension, expected, fields in wrong:
        right = [size[0] for size in sizes if size[3] == fields and size not in wrong]
        what = f"{tensors[name].name_in_file!r} has shape {list(tensors[name].shape)}"
        if right:
            raise BadInput(
                f"{path}: tensor {what}: field {fields!r} and {tensors[right[0]].name_in_file!r} both want "
                f"{expected:,} {('rows', 'columns')[dimension]}, so it is damaged or cut short; "
                "export or copy it again",
                "weights-not-sane",
            )
        raise BadInput(
            f"{path}/config.json: field {fields!r} gives {expected:,}, but tensor {what}; correct the config",
            next((fault for word, fault in FAULTS.items() if word in fields), ""),
        )
    if (fc := tensors.get("fc.weight")) and (len(fc.shape) != 2 or fc.shape[1] % (s.target_hidden_size or 1)):
        raise BadInput(
            f"{path}: fc.weight has shape {list(fc.shape)}: its input is no multiple of the target's hidden "
            f"size {s.target_hidden_size:,} (field 'target_hidden_size', else 'hidden_size')",
            "drafter-width-differs",
        )


def _has(info: TensorInfo, dimension: int, size: int) -> bool:
    return len(info.shape) > dimension and info.shape[dimension] == size


def _sizes(s: Settings) -> list[tuple[str, int, int, str]]:
    """(tensor, dimension, what the config wants there, the fields that say so)."""
    hidden, wide = "hidden_size", "2 x hidden_size"
    found = [
        ("fc.weight", 0, s.hidden_size, hidden),
        ("norm.weight", 0, s.hidden_size, hidden),
        ("embed_tokens.weight", 0, s.vocab_size, "vocab_size"),
        ("lm_head.weight", 1, s.hidden_size, hidden),
        ("d2t", 0, s.draft_vocab_size, "draft_vocab_size"),
        ("t2d", 0, s.vocab_size, "vocab_size"),
        *_latent_sizes(s),
    ]
    if not s.tied:
        found.append(("lm_head.weight", 0, s.draft_vocab_size, "draft_vocab_size"))
    for n in range(s.layers):
        at, mlp = f"layers.{n}.self_attn.", f"layers.{n}.mlp."
        if not s.latent:
            q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
            found += [
                (at + f"{p}_proj.weight", d, q, "num_attention_heads x head_dim")
                for p, d in (("q", 0), ("o", 1))
            ]
            found += [(at + f"{p}_proj.weight", 0, kv, "num_key_value_heads x head_dim") for p in "kv"]
            found += [(at + f"{p}_proj.weight", 1, 2 * s.hidden_size, wide) for p in "qkv" if n == 0]
        found += [(mlp + f"{p}_proj.weight", d, s.intermediate_size, "intermediate_size")
                  for p, d in (("gate", 0), ("up", 0), ("down", 1))]  # fmt: skip
        found += [
            (mlp + f"{p}_proj.weight", d, s.hidden_size, hidden)
            for p, d in (("gate", 1), ("up", 1), ("down", 0))
        ]
        found.append((at + "o_proj.weight", 0, s.hidden_size, hidden))
    return found


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
