"""A drafter's settings written as the config that a dialect reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eaglelab.checkpoint import Checkpoint
from eaglelab.dialects import SIGNATURE
from eaglelab.errors import BadInput
from eaglelab.launch import Target
from eaglelab.yarn import for_sglang


def sglang_config(source: Checkpoint, names: set[str], ids: tuple[int, ...]) -> dict[str, Any]:
    """For SGLang's LlamaForCausalLMEagle3.

    `names`: the canonical tensors that go along; `ids`: as SGLang counts.
    """
    config = {SIGNATURE: "sglang", **_flat(source, "LlamaForCausalLMEagle3", names, ids)}
    for key in {"rope_scaling", "rope_parameters"} & set(config):
        config[key] = for_sglang(config[key])
    if any(n.endswith("o_proj.bias") for n in names):
        config["attention_bias"] = True
    if "fc.bias" in names:
        config["bias"] = True
    return config


def vllm_config(source: Checkpoint, names: set[str], ids: tuple[int, ...]) -> dict[str, Any]:
    """For vLLM's Eagle3LlamaForCausalLM, which reads the ids at the top level first.

    Source: vllm models/llama_eagle3.py, v1/worker/gpu_model_runner.py
    (_get_eagle3_aux_layers_from_config).
    """
    s = source.settings
    if "fc.bias" in names:
        raise BadInput(f"{source.path}: tensor 'fc.bias': vLLM has no such parameter")
    config = {SIGNATURE: "vllm", **_flat(source, "Eagle3LlamaForCausalLM", names, ids)}
    config["eagle_aux_hidden_state_layer_ids"] = list(ids)
    config["norm_before_residual"] = s.norm_before_residual
    config["attention_bias"] = any(n.endswith("_proj.bias") for n in names)
    if s.window:
        config |= {"sliding_window": s.window, "layer_types": ["sliding_attention"] * s.layers}
    return config


def _flat(source: Checkpoint, architecture: str, names: set[str], ids: tuple[int, ...]) -> dict[str, Any]:
    """What SGLang and vLLM read alike."""
    s, rope = source.settings, _rope(source)
    partial = rope.pop("partial_rotary_factor", None)
    config: dict[str, Any] = {"architectures": [architecture], "model_type": "llama"}
    config |= {"torch_dtype": s.dtype, "tie_word_embeddings": False, **_transformer(source)}
    config |= {"draft_vocab_size": s.draft_vocab_size, "rope_theta": rope["rope_theta"]}
    if s.target_hidden_size != s.hidden_size:
        config["target_hidden_size"] = s.target_hidden_size
    if s.rope.scaling:  # older transformers read rope_scaling, newer ones rope_parameters
        config |= {
            "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
            "rope_parameters": rope,
        }
    if partial:
        config["partial_rotary_factor"] = partial
    config["eagle_config"] = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "norm_before_fc": "input_norm.weight" in names,
    }
    return config | {"fc_norm": "fc_norm.0.weight" in names, "norm_output": s.norm_output}


def speculators_config(
    source: Checkpoint, names: set[str], ids: tuple[int, ...], verifier: Target | None, path: Path | None
) -> dict[str, Any]:
    """For speculators' Eagle3DraftModel. `path`: the verifier's, None if it is not known."""
    s, where = source.settings, f"{source.path}/config.json"
    if s.target_hidden_size != s.hidden_size:
        raise BadInput(
            f"{where}: field 'target_hidden_size': speculators needs drafter and target equally wide"
        )
    if {"input_norm.weight", "fc_norm.0.weight"} <= names:
        raise BadInput(f"{source.path}: has input_norm and fc_norm; speculators allows one of them")
    if "fc.bias" in names:
        raise BadInput(f"{source.path}: tensor 'fc.bias': speculators has no such parameter")
    bias = any(n.endswith("q_proj.bias") for n in names)
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": s.dtype,
        "tie_word_embeddings": False,
        "draft_vocab_size": s.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "norm_before_fc": "input_norm.weight" in names,
        "fc_norm": "fc_norm.0.weight" in names,
        "norm_before_residual": s.norm_before_residual,
        "norm_output": s.norm_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "architectures": [verifier.architecture] if verifier else [],
                "name_or_path": str(path) if path else None,
            },
        },
        "transformer_layer_config": {
            "model_type": "qwen3" if any("q_norm" in n for n in names) else "llama",
            "attention_bias": bias,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **_transformer(source),
            "rope_parameters": _rope(source),
        },
    }


def _transformer(source: Checkpoint) -> dict[str, Any]:
    """The fields that both dialects spell as transformers does."""
    s, inner = source.settings, source.config.get("transformer_layer_config", source.config)
    act = inner.get("hidden_act") or "silu"
    if act != "silu":
        raise BadInput(f"{source.path}/config.json: field 'hidden_act' is {act!r}; only silu is served")
    kept = {k: inner[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in inner}
    return {
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": act,
        "vocab_size": s.vocab_size,
        "rms_norm_eps": s.eps,
        "max_position_embeddings": s.max_positions,
        **kept,
    }


def _rope(source: Checkpoint) -> dict[str, Any]:
    rope = source.settings.rope
    scaling = {k: list(v) if isinstance(v, tuple) else v for k, v in rope.scaling} or {"rope_type": "default"}
    if rope.rotary_dim:
        scaling["partial_rotary_factor"] = rope.rotary_dim / source.settings.head_dim
    return {"rope_theta": rope.theta, **scaling}
