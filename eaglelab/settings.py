"""A drafter's config in one vocabulary, `Settings`, and the readers that fill it from each spelling.

A reader takes a config as in the file and says what its trainer meant. Sources: speculators 0.9.0
models/eagle3/config.py and convert/eagle/eagle3_legacy_model.py; sglang 0.5.23 models/llama_eagle3.py and
kimi_k25_eagle3.py; vllm models/llama_eagle3.py; for the trainers see `dialects.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from eaglelab.errors import BadInput
from eaglelab.wiring import Latent, Rope

# The defaults that transformers fills in for keys a config leaves out (LlamaConfig, Qwen3Config of
# transformers 5).
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "qwen3": {
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    },
}
_SHARED: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Settings:
    """A drafter's config in one vocabulary, as its trainer meant it.

    `ids` are as written; None where not said.
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: int
    eps: float
    max_positions: int
    rope: Rope
    ids: tuple[int, ...] | None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    full_layers: tuple[int, ...] = ()  # layers that the window spares
    tied: bool = False
    embedding_trained: bool | None = None  # None: the config does not say
    dtype: str = "float32"
    uses_features: bool = True  # False: fed the target's last hidden state, as EAGLE-1 and 2 are
    latent: Latent | None = None  # multi-head latent attention (MLA); None: plain attention


def field(config: dict, key: str, kind: type | tuple[type, ...], where: str, default: Any = ...) -> Any:
    """One value of a config.

    BadInput names file and field when it is missing (and has no default) or of another type.
    """
    value = config.get(key)
    if value is None:
        if default is ...:
            raise BadInput(f"{where}: field {key!r} is missing; add it to the config")
        return default
    wrong_bool = isinstance(value, bool) and kind in (int, float, (int, float))
    if wrong_bool or not isinstance(value, kind):
        raise BadInput(f"{where}: field {key!r} is {value!r}, which is not of the right type")
    if isinstance(value, int) and value < 0:
        raise BadInput(f"{where}: field {key!r} is {value!r}, which is negative")
    return value


def read_rope(config: dict, where: str) -> Rope:
    """Rope as transformers 5 and SGLang read it: `rope_parameters` before `rope_scaling`."""
    inner = field(config, "rope_parameters", dict, where, None) or field(
        config, "rope_scaling", dict, where, None
    )
    inner = dict(inner or {})
    theta = inner.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if not isinstance(theta, (int, float)):
        raise BadInput(f"{where}: field 'rope_theta' is {theta!r}, which is not a number")
    kind = inner.pop("rope_type", None) or inner.get("type") or "default"
    inner.pop("type", None)
    inner.pop("partial_rotary_factor", None)
    if "mrope_section" in inner:  # for text the three positions are one (sglang models/llama_eagle3.py)
        kind = "default"
    if kind == "default":
        return Rope(theta=float(theta))
    if kind in ("yarn", "llama3", "longrope"):
        inner.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    items = {"rope_type": kind, **inner}
    return Rope(
        float(theta), tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in items.items()))
    )


def read_ids(config: dict, where: str) -> tuple[int, ...] | None:
    ids = field(config, "eagle_aux_hidden_state_layer_ids", list, where, None)
    if ids is None:
        return None
    if not all(type(i) is int for i in ids):
        raise BadInput(
            f"{where}: field 'eagle_aux_hidden_state_layer_ids' is {ids!r}; expected a list of integers"
        )
    return tuple(ids)


def _no_other_ids(where: str, *configs: dict) -> None:
    """BadInput if ids stand under a key that no engine reads: the default would be taken without a word."""
    for config in configs:
        for key, value in config.items():
            if (
                re.search(r"(?<!moe_)layer_ids$|layers_to_capture$", key)
                and isinstance(value, list)
                and value
            ):
                raise BadInput(
                    f"{where}: field {key!r} is {value}, which neither SGLang nor vLLM reads. Are these the "
                    "target's layers that fc takes? Then write them as eagle_aux_hidden_state_layer_ids, at "
                    "the top and in eagle_config; else take them out"
                )


def transformer_settings(config: dict, where: str, strict: bool) -> dict[str, Any]:
    """The keys that every dialect spells as transformers does.

    `strict`: shapes may not be left to defaults.
    """
    known = _SHARED | DEFAULTS["qwen3" if config.get("model_type") == "qwen3" else "llama"]

    def number(key: str) -> int:
        return field(config, key, int, where, ... if strict else known[key])

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    if not heads or not hidden:
        raise BadInput(f"{where}: field 'hidden_size' or 'num_attention_heads' is 0")
    kinds = field(config, "layer_types", list, where, None) or []
    layers = field(config, "num_hidden_layers", int, where, known["num_hidden_layers"])
    window = field(config, "sliding_window", int, where, None) if "sliding_attention" in kinds else None
    full = tuple(n for n, kind in enumerate(kinds[:layers]) if window and kind != "sliding_attention")
    return dict(
        hidden_size=hidden,
        vocab_size=number("vocab_size"),
        heads=heads,
        kv_heads=field(config, "num_key_value_heads", int, where, heads),
        head_dim=field(config, "head_dim", int, where, known.get("head_dim") or hidden // heads),
        intermediate_size=number("intermediate_size"),
        layers=layers,
        eps=float(field(config, "rms_norm_eps", (int, float), where, known["rms_norm_eps"])),
        max_positions=field(config, "max_position_embeddings", int, where, known["max_position_embeddings"]),
        rope=read_rope(config, where),
        attention_bias=bool(config.get("attention_bias") or False),
        window=window,
        full_layers=full,
    )


def _partial(rope: Rope, inner: dict, head_dim: int) -> Rope:
    """Partial rope as speculators trains it: transformers' Llama and Qwen3 know it for scaled rope only."""
    nested = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    partial = nested.get("partial_rotary_factor", inner.get("partial_rotary_factor"))
    if not rope.scaling or not isinstance(partial, int | float) or partial == 1:
        return rope
    return replace(rope, rotary_dim=int(partial * head_dim))


def _dtype(*configs: dict) -> str:
    for config in configs:
        if name := config.get("dtype") or config.get("torch_dtype"):
            return str(name).removeprefix("torch.")
    return "float32"


def read_speculators(config: dict, where: str) -> Settings:
    """Eagle3DraftModel, speculators 0.5 to 0.9: the layer is nested, the ids and norm flags are not."""
    inner = field(config, "transformer_layer_config", dict, where)
    values = transformer_settings(inner, f"{where}: transformer_layer_config", strict=False)
    values["rope"] = _partial(values["rope"], inner, values["head_dim"])
    return Settings(
        **values,
        # models/eagle3/core.py sizes fc by the drafter's own width and never reads target_hidden_size
        target_hidden_size=values["hidden_size"],
        draft_vocab_size=field(config, "draft_vocab_size", int, where, 32000),
        ids=read_ids(config, where),
        norm_before_fc=bool(config.get("norm_before_fc")),
        fc_norm=bool(config.get("fc_norm")),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
        qk_norm=inner.get("model_type", "qwen3") == "qwen3",
        embedding_trained=bool(config.get("embed_requires_grad")),
        dtype=_dtype(config, inner),
    )


def read_old_speculators(config: dict, where: str) -> Settings:
    """Eagle3Speculator, speculators 0.1: one Llama layer, and `fc` takes the target's own width.

    Its class trains with norm_before_residual false where the field is left out, vLLM serves it with true:
    BadInput asks.
    """
    if not isinstance(config.get("norm_before_residual"), bool):
        raise BadInput(
            f"{where}: field 'norm_before_residual' is missing: speculators takes that as false, vLLM as "
            "true. Which was it trained with? Write it into the config"
        )
    read = read_speculators(config, where)
    width = field(config, "target_hidden_size", int, where, read.hidden_size)
    nested = config["transformer_layer_config"].get("model_type", "llama") == "qwen3"
    return replace(read, target_hidden_size=width, qk_norm=nested, embedding_trained=None)


def read_llama(config: dict, where: str) -> Settings:
    """The flat form that SGLang, vLLM and most trainers share: a Llama config with a few fields more.

    `eagle_config` may hold ids and norm_before_fc; it outranks the top level, as in sglang 0.5.23.
    """
    values = transformer_settings(config, where, strict=True)
    return Settings(**values, **_flat(config, where, values), tied=bool(config.get("tie_word_embeddings")))


def read_untied(config: dict, where: str) -> Settings:
    """The same where tie_word_embeddings ties nothing: the class makes a head of its own in any case.

    vLLM's Eagle3LlamaForCausalLM and AngelSlim's draft class (14 of its configs say true).
    """
    return replace(read_llama(config, where), tied=False)


def read_latent(config: dict, where: str) -> Settings:
    """Eagle3DeepseekV2ForCausalLM: the flat form with MLA; a head is qk_nope + qk_rope wide."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = Latent(**{name: field(config, name, int, where) for name in names})
    values = transformer_settings(config, where, strict=True)
    values["head_dim"] = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    if config.get("rope_interleave", True):  # as transformers' DeepseekV3Config
        values["rope"] = replace(values["rope"], layout="interleaved")
    flat = _flat(config, where, values)
    return Settings(**values, **flat, tied=bool(config.get("tie_word_embeddings")), latent=latent)


def _flat(config: dict, where: str, values: dict[str, Any]) -> dict[str, Any]:
    nested = field(config, "eagle_config", dict, where, None) or {}
    ids, outer = read_ids(nested, f"{where}: eagle_config"), read_ids(config, where)
    if None not in (ids, outer) and ids != outer:
        raise BadInput(
            f"{where}: field 'eagle_aux_hidden_state_layer_ids' is {list(outer or ())} at the top level, "
            f"which vLLM reads first, and {list(ids or ())} in eagle_config, which SGLang reads. Which "
            "was it trained with? Correct the other"
        )
    if ids is None and outer is None:
        _no_other_ids(where, nested, config)
    return dict(
        target_hidden_size=field(config, "target_hidden_size", int, where, values["hidden_size"]),
        draft_vocab_size=field(config, "draft_vocab_size", int, where, values["vocab_size"]),
        ids=ids if ids is not None else outer,
        norm_before_fc=bool(nested.get("norm_before_fc", config.get("norm_before_fc"))),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
        uses_features=bool(nested.get("use_aux_hidden_state", True)),
        dtype=_dtype(config),
    )
