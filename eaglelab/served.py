"""What SGLang does with an EAGLE-3 drafter: how it feeds and wires the tensors that its loader took.

Read from models/{llama,kimi_k25}_eagle3.py (forward), speculative/eagle_worker_v2.py (init_token_map),
model_runner_components/spec_aux_hidden_state.py (layer ids) and configs/model_config.py (dtype) of 0.5.23;
where older releases differ is in `releases`. A replay of the server is the proof.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from eaglelab.checkpoint import Checkpoint
from eaglelab.errors import BadInput, Refusal
from eaglelab.launch import Launch, Target
from eaglelab.layer_ids import captures_last, default_depths, sglang_depths
from eaglelab.loader import (
    Loading,
    ParamSource,
    as_launched,
    chunks,
    loading,
    nested_ids,
    shared_with_target,
)
from eaglelab.releases import NEWEST, does
from eaglelab.wiring import Feed, Rope, Wiring, feature_norm
from eaglelab.yarn import as_sglang

ROPES = ("default", "linear", "llama3", "yarn", "deepseek_yarn", "dynamic", "longrope", "proportional")

__all__ = ["Loading", "captured", "cast", "loading", "refusals", "served"]


def captured(checkpoint: Checkpoint, target: Target | None, version: str = NEWEST) -> tuple[int, ...]:
    """The depths that the target hands over under EAGLE3: ascending, each once, only those that it passes.

    Without `target` the rule of most architectures is used; BadInput if the ids are left out too.
    """
    ids = nested_ids(checkpoint)
    architecture, layers = (target.architecture, target.num_layers) if target else (None, None)
    if ids is not None:
        depths = sglang_depths(ids, architecture, layers, version)
    elif target:
        depths = default_depths(target.architecture, target.num_layers)
    else:
        raise BadInput(
            f"{checkpoint.path}/config.json: field 'eagle_config.eagle_aux_hidden_state_layer_ids' is "
            "missing: SGLang then takes layers by the target's number of layers; give --target"
        )
    last = layers if layers is None or captures_last(architecture, version) else layers - 1
    return tuple(d for d in sorted(set(depths)) if d >= 0 and (last is None or d <= last))


def cast(asked: str | None, config_dtype: str) -> str:
    """The dtype that parameters have live: --dtype, else the config's own, with float32 served as float16."""
    if asked:
        return asked
    return "float16" if config_dtype not in ("float16", "bfloat16", "float64") else config_dtype


def served(checkpoint: Checkpoint, launch: Launch) -> tuple[Feed, Wiring]:
    """(Feed, Wiring) under this launch.

    BadInput if the engine would stop on this checkpoint, with the reason.
    """
    checkpoint = as_launched(checkpoint, launch)
    if problems := refusals(checkpoint, launch):
        raise BadInput("; ".join(problems), *(p.fault for p in problems))
    return _feed(checkpoint, launch), _wiring(checkpoint, launch)


def _feed(checkpoint: Checkpoint, launch: Launch) -> Feed:
    s, target = checkpoint.settings, launch.target
    dtype = cast(launch.dtype, target.dtype if target else s.dtype)
    use_aux = (checkpoint.config.get("eagle_config") or {}).get("use_aux_hidden_state", True)
    if launch.algorithm == "EAGLE3" and use_aux:
        depths = captured(checkpoint, target, launch.version)
        return Feed(depths, len(depths) * s.target_hidden_size, dtype=dtype)
    width = target.hidden_size if target else s.target_hidden_size
    return Feed((target.num_layers,) if target else (), width, final_norm=True, dtype=dtype)


def _wiring(checkpoint: Checkpoint, launch: Launch) -> Wiring:
    s, config, takes = checkpoint.settings, checkpoint.config, loading(checkpoint, launch)
    eagle3 = launch.algorithm == "EAGLE3"
    has_map = "d2t" in checkpoint.tensors
    applied: Literal["d2t", "misread"] = "misread" if checkpoint.map_form == "absolute" else "d2t"
    spelling = {checkpoint.tensors[c].name_in_file: c for c in checkpoint.tensors}
    missing = tuple(m for source in takes.params.values() for m in source.missing if not _unused(m))
    return Wiring(
        fc="bypassed" if _feed(checkpoint, launch).width == s.hidden_size else "applied",
        norm_before_fc=feature_norm(s.norm_before_fc and not s.latent, s.fc_norm),
        residual="raw",
        feedback="post-norm" if s.norm_output else "pre-norm",
        rope=_rope(checkpoint),
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        latent=s.latent,
        qk_norm=False,
        attention_bias=False,
        output_bias=any(n.endswith("o_proj.bias") for n in takes.params),
        layers=s.layers,
        later_norm="hidden_norm" if s.layers > 1 else "input_layernorm",
        window=_window(checkpoint, launch),
        max_positions=s.max_positions,
        eps=s.eps,
        embedding="target" if takes.params["model.embed_tokens.weight"].kind == "target" else "own",
        lm_head=_head(takes.params.get("lm_head.weight")),
        logits_width=config.get("draft_vocab_size") or s.vocab_size,
        vocab_map=(applied if eagle3 else "dropped") if has_map else "identity",
        step_offset=0 if does(launch.version, "step-positions") else 1,
        dtype=cast(launch.dtype, s.dtype),
        unloaded=missing,
        dropped=tuple(spelling.get(name, name) for name in takes.dropped),
    )


def _window(checkpoint: Checkpoint, launch: Launch) -> int | None:
    """Keys that a token sees: the attention backends count the token itself besides the window."""
    if launch.draft_window is None or checkpoint.settings.latent or not does(launch.version, "draft-window"):
        return None
    return launch.draft_window + 1


def _rope(checkpoint: Checkpoint) -> Rope:
    config, s = checkpoint.config, checkpoint.settings
    scaling, latent = dict(s.rope.scaling), s.latent is not None
    if scaling and config.get("original_max_position_embeddings") and not latent:
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    partial = 1 if latent else config.get("partial_rotary_factor") or 1
    half = not config.get("rope_interleave", True) if latent else config.get("rope_is_neox_style", True)
    return replace(
        s.rope,
        scaling=tuple(sorted(as_sglang(scaling, latent, s.max_positions).items())),
        layout="half" if half else "interleaved",
        rotary_dim=0 if partial == 1 else int(partial * s.head_dim),
    )


def _unused(name: str) -> bool:
    """Later layers have an input_layernorm that their forward never calls."""
    return name.endswith("input_layernorm.weight") and not name.startswith("layers.0.")


def _head(source: ParamSource | None) -> Literal["own", "target", "tied", "initial"]:
    if source is None:
        return "tied"
    return "initial" if source.kind == "partial" else source.kind


def _latent_refusals(checkpoint: Checkpoint, launch: Launch) -> list[str]:
    """What stops Eagle3DeepseekV2ForCausalLM alone."""
    found = []
    if not does(launch.version, "mla-drafter"):
        found.append(f"SGLang {launch.version} has no MLA drafter: 0.5.12 and later have one")
    if checkpoint.settings.layers != 1:
        found.append(
            f"field 'num_hidden_layers' is {checkpoint.settings.layers}: SGLang's MLA drafter has one layer"
        )
    shared = "model.embed_tokens.weight" in shared_with_target(checkpoint, launch)
    if launch.flag("--device") == "cpu" and shared:
        found.append("SGLang's MLA drafter waits for CUDA when it takes over the target's embedding: no CPU")
    return found


def refusals(checkpoint: Checkpoint, launch: Launch) -> list[Refusal]:
    """Reasons why this engine does not start with this checkpoint, or stops at the first request."""
    checkpoint = as_launched(checkpoint, launch)
    config, s, target = checkpoint.config, checkpoint.settings, launch.target
    where = f"{checkpoint.path}/config.json"
    found: list[Refusal] = []

    def refuse(text: str, fault: str = "") -> None:
        found.append(Refusal(text, fault))

    if s.layers != 1 and not does(launch.version, "several-layers"):
        refuse(
            f"{where}: field 'num_hidden_layers' is {s.layers}: SGLang {launch.version} serves one "
            "layer only; 0.5.12 and later serve several",
            "multi-layer-drafter",
        )
    if (act := config.get("hidden_act") or "silu") != "silu":
        refuse(
            f"{where}: field 'hidden_act' is {act!r}: SGLang's drafters take silu only, and stop on another"
        )
    if s.latent:
        for text in _latent_refusals(checkpoint, launch):
            refuse(f"{where}: {text}")
    elif "draft_vocab_size" not in config:
        refuse(
            f"{where}: field 'draft_vocab_size' is missing: SGLang stops; write it, or null for the whole "
            "vocabulary"
        )
    if not s.latent and "target_hidden_size" in config and config["target_hidden_size"] is None:
        refuse(f"{where}: field 'target_hidden_size' is null: SGLang stops; remove it")
    kind = dict(s.rope.scaling).get("rope_type", "default")
    if not s.latent and kind not in ROPES:
        refuse(f"{where}: rope type {kind!r} is not one of SGLang's ({', '.join(ROPES)}): it stops")
    if s.tied and launch.algorithm == "EAGLE":
        refuse(
            f"{where}: 'tie_word_embeddings' under EAGLE: SGLang stops when it replaces the shared tensor "
            "twice",
            "tied-head-reduced-vocab",
        )
    if s.tied and not s.latent and config.get("draft_vocab_size", 0) is None:
        refuse(
            f"{where}: 'tie_word_embeddings' with 'draft_vocab_size' null: SGLang stops; write the "
            "vocabulary size"
        )
    if target:
        try:
            checkpoint.check_target(target)
        except BadInput as error:
            refuse(str(error), *error.faults)
    if checkpoint.map_form == "absolute" and (offsets := checkpoint.d2t) is not None:
        reached = int((offsets + 2 * np.arange(len(offsets))).max())
        if launch.algorithm == "EAGLE3" and reached >= s.vocab_size:
            refuse(
                f"{checkpoint.path}: d2t holds target ids, SGLang takes them for offsets and drafts ids up "
                f"to {reached:,} of {s.vocab_size:,}; convert it: offsets are written then",
                "d2t-absolute",
            )
    feed, own = _feed(checkpoint, launch), cast(launch.dtype, s.dtype)
    if feed.dtype != own:  # run on a CPU: "expected m1 and m2 to have the same dtype"
        refuse(
            f"{where}: the target hands over {feed.dtype}, and this drafter's parameters are {own} (field "
            f"'torch_dtype' is {config.get('dtype') or config.get('torch_dtype')!r}): SGLang stops at the "
            f"first request; write {feed.dtype} there, or launch with --dtype {feed.dtype}",
            "checkpoint-dtype",
        )
    if not feed.width:
        refuse(
            f"{where}: none of the layer ids is captured on {target and target.architecture}: SGLang stops",
            "id-past-the-last-layer",
        )
    fc_in = chunks(checkpoint) * s.target_hidden_size
    if feed.width not in (0, s.hidden_size, fc_in):
        lost = len(set(nested_ids(checkpoint) or ())) > len(feed.depths)
        refuse(
            f"{where}: the target hands over {feed.width:,} numbers a token (depths {list(feed.depths)}), "
            f"fc takes {fc_in:,}: SGLang stops at the first request; correct the layer ids or "
            "num_aux_hidden_states",
            "id-past-the-last-layer" if lost else "fc-width-differs",
        )
    fc = checkpoint.tensors.get("fc.weight")
    if fc and fc.shape != (s.hidden_size, fc_in):
        refuse(
            f"{where}: SGLang makes fc {s.hidden_size} x {fc_in}, the file has {fc.shape[0]} x "
            f"{fc.shape[1]}: it stops while loading; give as many ids in eagle_config as the drafter was "
            "trained with",
            "fc-width-differs",
        )
    return found
