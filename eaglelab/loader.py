"""Which tensors of a file SGLang's drafter class takes, into which parameters, and which it drops.

Read from sglang 0.5.23 models/llama_eagle3.py and kimi_k25_eagle3.py (parameters, load_weights),
models/llama.py (set_embed) and speculative/eagle_worker_v2.py (init_lm_head). The Llama loader reports
nothing: not a name it does not know, not a parameter that nothing fills; the MLA one warns of the former.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from eaglelab.checkpoint import Checkpoint
from eaglelab.errors import BadInput
from eaglelab.launch import EAGLES, Launch
from eaglelab.releases import NEWEST, does
from eaglelab.settings import Settings

Rule = Literal["replicated", "column", "even", "row", "vocab", "qkv"]
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
RENAMED = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}

SCALE = re.compile(r"\.(weight|input)_(scale|zero_point|shape|packed)\w*$|\.(qzeros|scales|g_idx)$")


@dataclass(frozen=True)
class ParamSource:
    """Where the bytes of one engine parameter come from. `tensors`: canonical names in fusion order.

    own: the checkpoint; target: the target's parameter, shared; initial: nothing filled it; partial: only
    some of the tensors fused into it exist (`missing` names the others).
    """

    kind: Literal["own", "target", "initial", "partial"]
    tensors: tuple[str, ...] = ()
    rule: Rule = "replicated"
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loading:
    """What the loader does, parameter by parameter. Names in `dropped` and `replaced` are the file's own."""

    dropped: tuple[str, ...]  # tensors that no parameter takes: lost without a word
    replaced: tuple[str, ...]  # loaded, then replaced by the target's
    initial: tuple[str, ...]  # engine parameters that keep their initial value
    params: dict[str, ParamSource] = field(default_factory=dict)


def as_launched(checkpoint: Checkpoint, launch: Launch) -> Checkpoint:
    """The drafter as SGLang sees it: --json-model-override-args changes its config too.

    BadInput if this engine or class is not one that is modelled.
    """
    where = f"{checkpoint.path}/config.json"
    if launch.engine != "sglang":
        raise BadInput(f"engine {launch.engine!r}: only sglang is modelled")
    if launch.algorithm not in EAGLES:
        said = launch.algorithm or "is left out"
        raise BadInput(f"--speculative-algorithm {said}: no EAGLE drafter is served by this launch")
    if "sglang" not in checkpoint.spelling.engines:
        raise BadInput(
            f"{where}: SGLang {launch.version} has no model class for "
            f"{checkpoint.config.get('architectures')} and does not start with it; convert it first: "
            f"eaglelab convert {checkpoint.path} NEW_FOLDER --to sglang"
        )
    if launch.algorithm == "EAGLE" and launch.flag("--speculative-token-map"):
        raise BadInput("--speculative-token-map with --speculative-algorithm EAGLE is not modelled")
    if not (text := launch.flag("--json-model-override-args")):
        return _as_read_by(launch.version, checkpoint)
    try:
        config = checkpoint.config | json.loads(text)
    except (TypeError, json.JSONDecodeError) as error:
        raise BadInput(f"--json-model-override-args {text!r}: not a JSON object ({error})") from error
    settings = checkpoint.spelling.read(config, f"{where} with --json-model-override-args")
    return _as_read_by(launch.version, replace(checkpoint, config=config, settings=settings))


def _as_read_by(version: str, checkpoint: Checkpoint) -> Checkpoint:
    """What this release does not read has no effect: its default stands in the drafter's settings."""
    s, config = checkpoint.settings, checkpoint.config
    changes: dict[str, Any] = {}
    if not does(version, "norm-before-fc"):
        changes["norm_before_fc"] = False
    if not does(version, "mla-norms" if s.latent else "fc-norm"):
        changes["fc_norm"] = False
    if not does(version, "mla-norms" if s.latent else "norm-output"):
        changes["norm_output"] = False
    if not does(version, "chunk-count"):
        config = {**config, "num_aux_hidden_states": 3}
    settings: Settings = replace(s, **changes)
    return (
        checkpoint
        if (settings, config) == (s, checkpoint.config)
        else replace(checkpoint, config=config, settings=settings)
    )


def parameters(checkpoint: Checkpoint, version: str = NEWEST) -> dict[str, Rule]:
    """Every parameter of the engine's class for this config, by its name, with its sharding rule."""
    config, s = checkpoint.config, checkpoint.settings
    if s.latent:
        return _latent_parameters(checkpoint)
    found: dict[str, Rule] = {"model.embed_tokens.weight": "vocab", "model.fc.weight": "replicated"}
    if config.get("bias"):
        found["model.fc.bias"] = "replicated"
    if s.norm_before_fc:
        found["model.input_norm.weight"] = "replicated"
    if s.fc_norm:
        found |= {f"model.fc_norm.{i}.weight": "replicated" for i in range(chunks(checkpoint))}
    for n in range(s.layers):
        layer = f"model.layers.{n}." if does(version, "several-layers") else "model.midlayer."
        found[layer + "self_attn.qkv_proj.weight"] = "qkv"
        found[layer + "self_attn.o_proj.weight"] = "row"
        if config.get("attention_bias") or config.get("bias"):
            found[layer + "self_attn.o_proj.bias"] = "replicated"
        found[layer + "mlp.gate_up_proj.weight"] = "column"
        found[layer + "mlp.down_proj.weight"] = "row"
        for norm in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
            found[layer + norm + ".weight"] = "replicated"
    found["model.norm.weight"] = "replicated"
    if not s.tied:
        found["lm_head.weight"] = "vocab"
    return found


def _latent_parameters(checkpoint: Checkpoint) -> dict[str, Rule]:
    """The same of Eagle3DeepseekV2ForCausalLM: one layer, the midlayer, and no norm over the whole feed."""
    config, s, layer = checkpoint.config, checkpoint.settings, "model.midlayer."
    rules: dict[str, Rule] = {"model.embed_tokens": "vocab", "model.fc": "even", "model.norm": "replicated"}
    if s.fc_norm:
        rules |= {f"model.fc_norm.{i}": "replicated" for i in range(chunks(checkpoint))}
    for name in ("fused_qkv_a_proj_with_mqa", "q_a_layernorm", "kv_a_layernorm"):
        rules[f"{layer}self_attn.{name}"] = "replicated"
    rules |= {layer + "self_attn.q_b_proj": "even", layer + "self_attn.kv_b_proj": "even"}
    rules |= {layer + "self_attn.o_proj": "row", layer + "mlp.gate_up_proj": "column"}
    rules[layer + "mlp.down_proj"] = "row"
    for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
        rules[layer + name] = "replicated"
    if not s.tied:
        rules["lm_head"] = "vocab"
    bias: dict[str, Rule] = {"model.fc.bias": "even"} if config.get("bias") else {}
    return {f"{name}.weight": rule for name, rule in rules.items()} | bias


def chunks(checkpoint: Checkpoint) -> int:
    """k as the engine's class sizes `fc`: num_aux_hidden_states, else the nested layer ids, else 3.

    The MLA class asks the ids at the top level instead of num_aux_hidden_states.
    """
    if checkpoint.settings.latent:
        outer = checkpoint.config.get("eagle_aux_hidden_state_layer_ids")
        return len(nested_ids(checkpoint) or outer or (0, 0, 0))
    explicit = checkpoint.config.get("num_aux_hidden_states")
    return explicit if explicit is not None else len(nested_ids(checkpoint) or (0, 0, 0))


def nested_ids(checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """The ids that decide what is captured: only those in `eagle_config`."""
    ids = (checkpoint.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return None if ids is None else tuple(ids)


def place(
    name: str, params: dict[str, Rule], latent: bool = False, version: str = NEWEST
) -> tuple[str, str | None] | None:
    """The parameter, and the shard of it, that `load_weights` fills from a tensor; None: it is dropped."""
    if latent:
        return _latent_place(name, params)
    if does(version, "several-layers"):
        for old, new in RENAMED.items():
            name = name.replace(old, new)
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}" in name:
                name = name.replace(f".{part}", f".{fused}")
                return next(((n, part) for n in (name, f"model.{name}") if n in params), None)
    return next(((n, None) for n in (name, f"model.{name}") if n in params), None)


def _latent_place(name: str, params: dict[str, Rule]) -> tuple[str, str | None] | None:
    name = re.sub(r"^layers\.0\.", "midlayer.", name)
    name = name if name.startswith("lm_head.") else f"model.{name}"
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}" in name and (whole := name.replace(f".{part}", f".{fused}")) in params:
                return whole, part
    return (name, None) if name in params else None


def loading(checkpoint: Checkpoint, launch: Launch) -> Loading:
    """What the loader takes, drops and leaves, as `load_weights` and then `init_lm_head` do it."""
    checkpoint = as_launched(checkpoint, launch)
    params = parameters(checkpoint, launch.version)
    filled: dict[str, dict[str | None, str]] = {name: {} for name in params}
    dropped = []
    quantised = bool(checkpoint.config.get("quantization_config"))
    dummy = "dummy" in (launch.flag("--speculative-draft-load-format") or launch.flag("--load-format") or "")
    for name in () if dummy else checkpoint.file_names:
        if "d2t" in name or "t2d" in name or (quantised and SCALE.search(name)):
            continue
        if spot := place(name, params, checkpoint.settings.latent is not None, launch.version):
            filled[spot[0]][spot[1]] = checkpoint.spelling.canonical(name) or name
        else:
            dropped.append(name)
    for name, parts in filled.items():  # the MLA class waits for both halves, and forgets the one that came
        if name.endswith("fused_qkv_a_proj_with_mqa.weight") and len(parts) == 1:
            dropped += [
                n for n in checkpoint.file_names if checkpoint.spelling.canonical(n) in parts.values()
            ]
            parts.clear()
    sources = {name: _source(name, params[name], filled[name]) for name in params}
    replaced = []
    for name in shared_with_target(checkpoint, launch):
        if name in sources:
            replaced += [
                checkpoint.tensors[t].name_in_file for t in sources[name].tensors if t in checkpoint.tensors
            ]
            sources[name] = ParamSource("target", (name.removeprefix("model."),), "vocab")
    initial = tuple(name for name, source in sources.items() if source.kind in ("initial", "partial"))
    return Loading(tuple(dropped), tuple(replaced), initial, sources)


def _source(name: str, rule: Rule, parts: dict[str | None, str]) -> ParamSource:
    fused = name.split(".")[-2]
    order: tuple[str | None, ...] = FUSED.get(fused, (None,))
    plain = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    wanted = {part: plain.replace(fused, part) if part else plain for part in order}
    tensors = tuple(parts[p] for p in order if p in parts)
    missing = tuple(wanted[p] for p in order if p not in parts)
    return ParamSource("own" if not missing else "partial" if tensors else "initial", tensors, rule, missing)


def shared_with_target(checkpoint: Checkpoint, launch: Launch) -> tuple[str, ...]:
    """The engine parameters that are the target's own after start-up."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    if launch.algorithm == "EAGLE" or (
        not checkpoint.settings.tied and checkpoint.config.get("draft_vocab_size") is None
    ):
        return (embed, head)
    narrower = (
        checkpoint.config.get("target_hidden_size") or checkpoint.hidden_size
    ) != checkpoint.hidden_size
    return () if narrower else (embed,)
