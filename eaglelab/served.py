"""What SGLang 0.5.23 does with an EAGLE-3 drafter: which tensors it takes, and how it then feeds and wires
them.

Read from models/llama_eagle3.py (parameters, load_weights, forward), models/llama.py (set_embed),
speculative/eagle_worker_v2.py (init_lm_head, init_token_map),
model_runner_components/spec_aux_hidden_state.py (layer ids) and configs/model_config.py (dtype). Other
versions are taken to do the same; a replay of the server is the proof.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Literal

from eaglelab.checkpoint import Checkpoint
from eaglelab.dialects import default_depths, sglang_depths
from eaglelab.errors import BadInput
from eaglelab.launch import EAGLES, Launch, Target
from eaglelab.wiring import Feed, Wiring

Rule = Literal["replicated", "column", "row", "vocab", "qkv"]
FUSED = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
RENAMED = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
# Architectures that also capture after their last layer (depth n); on the others such an id is lost without a
# word.
CAPTURE_LAST = {
    "GptOssForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
}  # fmt: skip


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
        raise BadInput(
            f"--speculative-algorithm {launch.algorithm}: no EAGLE drafter is served by this launch"
        )
    if checkpoint.dialect != "sglang":
        raise BadInput(
            f"{where}: SGLang {launch.version} has no model class for "
            f"{checkpoint.config.get('architectures')} and "
            f"does not start with it; convert it first: eaglelab convert {checkpoint.path} NEW_FOLDER --to "
            "sglang"
        )
    if launch.algorithm == "EAGLE" and launch.flag("--speculative-token-map"):
        raise BadInput("--speculative-token-map with --speculative-algorithm EAGLE is not modelled")
    if not (text := launch.flag("--json-model-override-args")):
        return checkpoint
    try:
        config = checkpoint.config | json.loads(text)
    except (TypeError, json.JSONDecodeError) as error:
        raise BadInput(f"--json-model-override-args {text!r}: not a JSON object ({error})") from error
    settings = checkpoint.spelling.read(config, f"{where} with --json-model-override-args")
    return replace(checkpoint, config=config, settings=settings)


def parameters(checkpoint: Checkpoint) -> dict[str, Rule]:
    """Every parameter of LlamaForCausalLMEagle3 for this config, by the engine's name, with its sharding
    rule.
    """
    config, s = checkpoint.config, checkpoint.settings
    found: dict[str, Rule] = {"model.embed_tokens.weight": "vocab", "model.fc.weight": "replicated"}
    if config.get("bias"):
        found["model.fc.bias"] = "replicated"
    if s.norm_before_fc:
        found["model.input_norm.weight"] = "replicated"
    if s.fc_norm:
        found |= {f"model.fc_norm.{i}.weight": "replicated" for i in range(chunks(checkpoint))}
    for n in range(s.layers):
        layer = f"model.layers.{n}."
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


def chunks(checkpoint: Checkpoint) -> int:
    """k as the engine's class sizes `fc`: num_aux_hidden_states, else the nested layer ids, else 3."""
    explicit = checkpoint.config.get("num_aux_hidden_states")
    return explicit if explicit is not None else len(nested_ids(checkpoint) or (0, 0, 0))


def nested_ids(checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """The ids that decide what is captured: only those in `eagle_config`."""
    ids = (checkpoint.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return None if ids is None else tuple(ids)


def place(name: str, params: dict[str, Rule]) -> tuple[str, str | None] | None:
    """The parameter (and the shard of it) that `load_weights` puts a tensor of this name into; None:
    dropped.
    """
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}_proj" in name:
                name = name.replace(f".{part}_proj", f".{fused}")
                return next(((n, part) for n in (name, f"model.{name}") if n in params), None)
    return next(((n, None) for n in (name, f"model.{name}") if n in params), None)


def loading(checkpoint: Checkpoint, launch: Launch) -> Loading:
    """What the loader takes, drops and leaves, as `load_weights` and then `init_lm_head` do it."""
    checkpoint = as_launched(checkpoint, launch)
    params = parameters(checkpoint)
    filled: dict[str, dict[str | None, str]] = {name: {} for name in params}
    dropped = []
    dummy = "dummy" in (launch.flag("--speculative-draft-load-format") or launch.flag("--load-format") or "")
    for name in () if dummy else checkpoint.file_names:
        if "d2t" in name or "t2d" in name:
            continue
        if spot := place(name, params):
            filled[spot[0]][spot[1]] = checkpoint.spelling.canonical(name) or name
        else:
            dropped.append(name)
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
    plain = name.removeprefix("model.")
    wanted = {part: plain.replace(fused, f"{part}_proj") if part else plain for part in order}
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
    narrower = checkpoint.config.get("target_hidden_size", checkpoint.hidden_size) != checkpoint.hidden_size
    return () if narrower else (embed,)


def captured(checkpoint: Checkpoint, target: Target | None) -> tuple[int, ...]:
    """The depths that the target hands over under EAGLE3: ascending, each once, only those that it passes.

    Without `target` the rule of most architectures is used; BadInput if the ids are left out too.
    """
    ids = nested_ids(checkpoint)
    architecture, layers = (target.architecture, target.num_layers) if target else (None, None)
    if ids is not None:
        depths = sglang_depths(ids, architecture, layers)
    elif target:
        depths = default_depths(target.architecture, target.num_layers)
    else:
        raise BadInput(
            f"{checkpoint.path}/config.json: field 'eagle_config.eagle_aux_hidden_state_layer_ids' is "
            "missing: SGLang "
            "then takes layers by the target's number of layers; give --target"
        )
    last = layers if layers is None or architecture in CAPTURE_LAST else layers - 1
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
        raise BadInput("; ".join(problems))
    return _feed(checkpoint, launch), _wiring(checkpoint, launch)


def _feed(checkpoint: Checkpoint, launch: Launch) -> Feed:
    s, target = checkpoint.settings, launch.target
    dtype = cast(launch.dtype, target.dtype if target else s.dtype)
    use_aux = (checkpoint.config.get("eagle_config") or {}).get("use_aux_hidden_state", True)
    if launch.algorithm == "EAGLE3" and use_aux:
        depths = captured(checkpoint, target)
        return Feed(depths, len(depths) * s.target_hidden_size, dtype=dtype)
    width = target.hidden_size if target else s.target_hidden_size
    return Feed((target.num_layers,) if target else (), width, final_norm=True, dtype=dtype)


def _wiring(checkpoint: Checkpoint, launch: Launch) -> Wiring:
    s, config, takes = checkpoint.settings, checkpoint.config, loading(checkpoint, launch)
    eagle3 = launch.algorithm == "EAGLE3"
    has_map = "d2t" in checkpoint.tensors
    partial = config.get("partial_rotary_factor") or 1
    scaling = dict(s.rope.scaling)
    if scaling and config.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    rope = replace(
        s.rope,
        scaling=tuple(sorted(scaling.items())),
        layout="half" if config.get("rope_is_neox_style", True) else "interleaved",
        rotary_dim=0 if partial == 1 else int(partial * s.head_dim),
    )
    spelling = {checkpoint.tensors[c].name_in_file: c for c in checkpoint.tensors}
    missing = tuple(m for source in takes.params.values() for m in source.missing if not _unused(m))
    return Wiring(
        fc="bypassed" if _feed(checkpoint, launch).width == s.hidden_size else "applied",
        norm_before_fc="per-chunk" if s.fc_norm else "whole" if s.norm_before_fc else "none",
        residual="raw",
        feedback="post-norm" if s.norm_output else "pre-norm",
        rope=rope,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        qk_norm=False,
        attention_bias=False,
        output_bias=any(n.endswith("o_proj.bias") for n in takes.params),
        layers=s.layers,
        later_norm="hidden_norm" if s.layers > 1 else "input_layernorm",
        window=None if launch.draft_window is None else launch.draft_window + 1,  # the backends count so
        max_positions=s.max_positions,
        eps=s.eps,
        embedding="target" if takes.params["model.embed_tokens.weight"].kind == "target" else "own",
        lm_head=_head(takes.params.get("lm_head.weight")),
        logits_width=config.get("draft_vocab_size") or s.vocab_size,
        vocab_map=("d2t" if eagle3 else "dropped") if has_map else "identity",
        dtype=cast(launch.dtype, s.dtype),
        unloaded=missing,
        dropped=tuple(spelling.get(name, name) for name in takes.dropped),
    )


def _unused(name: str) -> bool:
    """Later layers have an input_layernorm that their forward never calls."""
    return name.endswith("input_layernorm.weight") and not name.startswith("layers.0.")


def _head(source: ParamSource | None) -> Literal["own", "target", "tied", "initial"]:
    if source is None:
        return "tied"
    return "initial" if source.kind == "partial" else source.kind


def refusals(checkpoint: Checkpoint, launch: Launch) -> list[str]:
    """Reasons why this engine does not start, or stops at the first request, with this checkpoint and
    launch.
    """
    checkpoint = as_launched(checkpoint, launch)
    config, s, target = checkpoint.config, checkpoint.settings, launch.target
    where = f"{checkpoint.path}/config.json"
    found = []
    if "draft_vocab_size" not in config:
        found.append(
            f"{where}: field 'draft_vocab_size' is missing: SGLang stops; write it, or null for the whole "
            "vocabulary"
        )
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        found.append(f"{where}: field 'target_hidden_size' is null: SGLang stops; remove it")
    if s.tied and launch.algorithm == "EAGLE":
        found.append(
            f"{where}: 'tie_word_embeddings' under EAGLE: SGLang stops when it replaces the shared tensor "
            "twice"
        )
    if s.tied and config.get("draft_vocab_size", 0) is None:
        found.append(
            f"{where}: 'tie_word_embeddings' with 'draft_vocab_size' null: SGLang stops; write the "
            "vocabulary size"
        )
    if target:
        try:
            checkpoint.check_target(target)
        except BadInput as error:
            found.append(str(error))
    feed = _feed(checkpoint, launch)
    if not feed.width:
        found.append(
            f"{where}: none of the layer ids is captured on {target and target.architecture}: SGLang stops"
        )
    fc_in = chunks(checkpoint) * s.target_hidden_size
    if feed.width not in (0, s.hidden_size, fc_in):
        found.append(
            f"{where}: the target hands over {feed.width:,} numbers a token (depths {list(feed.depths)}), fc "
            "takes "
            f"{fc_in:,}: SGLang stops at the first request; correct the layer ids or num_aux_hidden_states"
        )
    fc = checkpoint.tensors.get("fc.weight")
    if fc and fc.shape != (s.hidden_size, fc_in):
        found.append(
            f"{where}: SGLang makes fc {s.hidden_size} x {fc_in}, the file has {fc.shape[0]} x "
            f"{fc.shape[1]}: it stops "
            "while loading; give as many ids in eagle_config as the drafter was trained with"
        )
    return found
