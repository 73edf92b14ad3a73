"""Tiny drafters of every variant with random tensors (norms too), in SGLang's form, and their target."""

from __future__ import annotations

import json
from pathlib import Path

import torch

H, INNER, HEADS, KV, D, VOCAB, DRAFT, LAYERS = 64, 80, 4, 2, 24, 128, 40, 36
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_theta": 500.0,
}
LATENT = {
    **{k: v for k, v in CONFIG.items() if k not in ("head_dim", "rope_theta")},
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": HEADS,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_theta": 500.0,
    "rope_scaling": {
        "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def drafter(
    folder: Path, base: dict, *, ids=(2, 18, 33), config=None, nested=None, add=(), drop=(), seed=0
) -> Path:
    """Config and random tensors. `add`: (parts of) names beyond the plain ones; `drop`: names left out."""
    from safetensors.torch import save_file

    values = {**base, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids), **(nested or {})}}
    values |= config or {}
    torch.manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(values, len(ids), set(add)).items():
        if name in drop:
            continue
        tensors[name] = torch.rand(shape) + 0.5 if "norm" in name else torch.randn(shape) * shape[-1] ** -0.5
    if (size := values["draft_vocab_size"]) and size < VOCAB and "d2t" not in drop:
        tensors["d2t"] = torch.randperm(VOCAB)[:size].sort().values - torch.arange(size)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _shapes(c: dict, chunks: int, extra: set[str]) -> dict[str, tuple[int, ...]]:
    h, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    width = c.get("target_hidden_size", h)
    shapes = {"fc.weight": (h, chunks * width), "norm.weight": (h,)}
    shapes["lm_head.weight"] = (c["draft_vocab_size"] or VOCAB, h)
    for n in range(c["num_hidden_layers"]):
        at, into = f"layers.{n}.", 2 * h if n == 0 else h
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (h,)
        for part, shape in (("gate", (inner, h)), ("up", (inner, h)), ("down", (h, inner))):
            shapes[f"{at}mlp.{part}_proj.weight"] = shape
        at += "self_attn."
        if "q_lora_rank" in c:
            rank, kv_rank, v = c["q_lora_rank"], c["kv_lora_rank"], c["v_head_dim"]
            nope, turning = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
            shapes |= {
                at + "q_a_proj.weight": (rank, into), at + "q_a_layernorm.weight": (rank,),
                at + "q_b_proj.weight": (heads * (nope + turning), rank),
                at + "kv_a_proj_with_mqa.weight": (kv_rank + turning, into),
                at + "kv_a_layernorm.weight": (kv_rank,),
                at + "kv_b_proj.weight": (heads * (nope + v), kv_rank), at + "o_proj.weight": (h, heads * v),
            }  # fmt: skip
        else:
            d, kv = c["head_dim"], c["num_key_value_heads"]
            shapes |= {
                f"{at}{p}_proj.weight": (n * d, into) for p, n in zip("qkv", (heads, kv, kv), strict=True)
            }
            shapes |= {at + "o_proj.weight": (h, heads * d), at + "o_proj.bias": (h,)}
            shapes |= {f"{at}{p}_proj.bias": (n * d,) for p, n in zip("qkv", (heads, kv, kv), strict=True)}
            shapes |= {f"{at}{p}_norm.weight": (d,) for p in "qk"}
    shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(chunks)}
    shapes |= {"input_norm.weight": (chunks * width,), "fc.bias": (h,), "embed_tokens.weight": (VOCAB, h)}
    optional = ("fc_norm.", "input_norm.", "fc.bias", "embed_tokens.", "_proj.bias", "q_norm.", "k_norm.")
    return {
        name: shape
        for name, shape in shapes.items()
        if not any(part in name for part in optional) or any(part in name for part in extra)
    }


def target(folder: Path, width: int = H) -> Path:
    """The three tensors of a target that is `width` wide, and its config."""
    from safetensors.torch import save_file

    torch.manual_seed(9)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, width),
        "lm_head.weight": torch.randn(VOCAB, width),
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": VOCAB,
        "hidden_size": width, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True)
    save_file({**tensors, "model.norm.weight": torch.ones(width)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
