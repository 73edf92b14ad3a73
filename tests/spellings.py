"""One tiny drafter in the spelling of every dialect: the shipped weights under each tool's names and config.

Configs hold the keys that each tool writes (sources in docs/dialects.md) with the tiny drafter's sizes.
"""

from __future__ import annotations

import json
from pathlib import Path

from drafters import SGLANG, SPECULATORS

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "vocab_size": 1024,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
FLAT = {"model_type": "llama", "torch_dtype": "bfloat16", "draft_vocab_size": 640, **SIZES}
LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], **FLAT, "tie_word_embeddings": False}
MIDLAYER, LAYERS, MODEL = "midlayer.", "layers.0.", "model.layers.0."
EVERY = ("fc", "norm", "lm_head", "d2t", "t2d")


def eagle_config(ids, **more):
    return {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True, **more}


def nested(**more):
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"}
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 640,
        "torch_dtype": "bfloat16",
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        "transformer_layer_config": {"model_type": "llama", **SIZES, "rope_theta": 10000.0},
        **more,
    }


OPTIMIZER = {
    "next_layer_regular": True,
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
}
# dialect -> (config, prefix of the layer, prefix of the rest, tensors)
SPELLINGS = {
    "safeailab": ({**LLAMA, "architectures": ["LlamaForCausalLM"]}, MIDLAYER, "", EVERY),
    "sglang": ({**LLAMA, "eagle_config": eagle_config([1, 3, 4])}, MODEL, "model.", EVERY),
    "specforge": (
        {**LLAMA, "eagle_config": eagle_config([1, 3, 4]), "rope_scaling": None},
        MIDLAYER,
        "",
        EVERY,
    ),
    "torchspec": ({**LLAMA, "_torchspec_version": "0.1"}, MIDLAYER, "", (*EVERY, "embed_tokens")),
    "model-optimizer": (
        {
            **LLAMA,
            "rope_scaling": {"rope_type": "default", "rope_theta": 10000},
            "eagle_config": eagle_config([1, 3, 4], **OPTIMIZER),
        },
        LAYERS,
        "",
        ("fc", "norm", "lm_head", "d2t"),
    ),
    "vllm": (
        {
            **LLAMA,
            "architectures": ["Eagle3LlamaForCausalLM"],
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "norm_before_residual": True,
        },
        LAYERS,
        "",
        EVERY,
    ),
    "angelslim": (
        {
            **LLAMA,
            "architectures": ["Eagle3LlamaForCausalLM"],
            "target_model_type": "llama",
            "tie_word_embeddings": True,
        },
        MIDLAYER,
        "",
        EVERY,
    ),
    "automodel": (
        {**LLAMA, "architectures": ["LlamaEagle3DraftModel"], "num_aux_hidden_states": 3},
        MODEL,
        "model.",
        (*EVERY, "embed_tokens"),
    ),
    "speculators-0.1": (
        nested(architectures=["Eagle3Speculator"], norm_before_residual=True),
        LAYERS,
        "",
        (*EVERY, "embed_tokens"),
    ),
    "speculators": (
        nested(architectures=["Eagle3DraftModel"], eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
        LAYERS,
        "",
        (*EVERY, "embed_tokens"),
    ),
}


def spelled(folder: Path, dialect: str, *, config=None, tensors=None, drop=()) -> Path:
    """The tiny drafter as `dialect` would have saved it; `config` is merged in at the top level only."""
    from safetensors.torch import load_file, save_file

    written, layer, rest, kept = SPELLINGS[dialect]
    source = load_file(SGLANG / "model.safetensors")
    embedding = load_file(SPECULATORS / "model.safetensors")["embed_tokens.weight"]
    source["embed_tokens.weight"] = embedding
    out = {}
    for name, tensor in source.items():
        if name.startswith(MIDLAYER):
            out[layer + name.removeprefix(MIDLAYER)] = tensor
        elif name.split(".")[0] in kept:
            out[name if name in ("lm_head.weight", "d2t", "t2d") else rest + name] = tensor
    folder.mkdir(parents=True)
    save_file({n: t for n, t in out.items() if n not in drop} | (tensors or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**written, **(config or {})}))
    return folder


LATENT = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    **{k: v for k, v in SIZES.items() if k != "head_dim"},
    "draft_vocab_size": 1024,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "torch_dtype": "bfloat16",
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    "eagle_config": eagle_config([1, 3, 4], use_last_layernorm=True),
}


def latent(folder: Path, prefix: str = MIDLAYER, config=None) -> Path:
    """A tiny random drafter with multi-head latent attention, as TorchSpec saves one for Kimi."""
    import torch
    from safetensors.torch import save_file

    h, heads = 128, 8
    shapes = {
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (1024, h),
        "embed_tokens.weight": (1024, h),
        **{
            prefix + f"{n}.weight": (h,)
            for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        prefix + "self_attn.q_a_proj.weight": (48, 2 * h),
        prefix + "self_attn.q_a_layernorm.weight": (48,),
        prefix + "self_attn.q_b_proj.weight": (heads * 24, 48),
        prefix + "self_attn.kv_a_proj_with_mqa.weight": (40, 2 * h),
        prefix + "self_attn.kv_a_layernorm.weight": (32,),
        prefix + "self_attn.kv_b_proj.weight": (heads * 32, 32),
        prefix + "self_attn.o_proj.weight": (h, heads * 16),
        prefix + "mlp.gate_proj.weight": (384, h),
        prefix + "mlp.up_proj.weight": (384, h),
        prefix + "mlp.down_proj.weight": (h, 384),
    }
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    save_file({n: torch.randn(s).bfloat16() for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**LATENT, **(config or {})}))
    return folder
