"""Dialects: how each trainer or engine spells a drafter, translated to one set of names and settings.

A dialect is a row of `DIALECTS`: how to recognise it, how its tensor names become canonical ones, how its
config is read, and what its layer ids mean. Adding a dialect adds a row and, if its config is nested
elsewhere, a reader. Sources: speculators 0.9.0 models/eagle3, sglang 0.5.23 models/llama_eagle3.py and
set_eagle3_layers_to_capture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eaglelab.errors import BadInput
from eaglelab.layer_ids import sglang_depths
from eaglelab.wiring import Rope

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

CANONICAL = re.compile(
    r"(embed_tokens|fc|input_norm|fc_norm\.\d+|norm|lm_head)\.weight|fc\.bias|d2t|t2d"
    r"|layers\.\d+\.(input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
    r"|layers\.\d+\.self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)"
    r"|layers\.\d+\.mlp\.(gate|up|down)_proj\.(weight|bias)"
)


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
    tied: bool = False
    embedding_trained: bool | None = None  # None: the config does not say
    dtype: str = "float32"


@dataclass(frozen=True)
class Dialect:
    """One spelling. `to_depth(ids, architecture, num_layers)`: the depths that the trainer meant."""

    name: str
    architectures: tuple[str, ...]
    renames: tuple[tuple[str, str], ...]  # regular expression, replacement; applied in order
    read: Callable[[dict, str], Settings]
    to_depth: Callable[[tuple[int, ...], str | None, int | None], tuple[int, ...]]

    def canonical(self, name: str) -> str | None:
        """The canonical name of a tensor, or None if this dialect does not know it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name if CANONICAL.fullmatch(name) else None


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
    window = field(config, "sliding_window", int, where, None)
    return dict(
        hidden_size=hidden,
        vocab_size=number("vocab_size"),
        heads=heads,
        kv_heads=field(config, "num_key_value_heads", int, where, heads),
        head_dim=field(config, "head_dim", int, where, known.get("head_dim") or hidden // heads),
        intermediate_size=number("intermediate_size"),
        layers=field(config, "num_hidden_layers", int, where, known["num_hidden_layers"]),
        eps=float(field(config, "rms_norm_eps", (int, float), where, known["rms_norm_eps"])),
        max_positions=field(config, "max_position_embeddings", int, where, known["max_position_embeddings"]),
        rope=read_rope(config, where),
        attention_bias=bool(config.get("attention_bias") or False),
        window=window if "sliding_attention" in kinds else None,
    )


def _dtype(*configs: dict) -> str:
    for config in configs:
        if name := config.get("dtype") or config.get("torch_dtype"):
            return str(name).removeprefix("torch.")
    return "float32"


def _read_speculators(config: dict, where: str) -> Settings:
    inner = field(config, "transformer_layer_config", dict, where)
    values = transformer_settings(inner, f"{where}: transformer_layer_config", strict=False)
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


def _read_sglang(config: dict, where: str) -> Settings:
    values = transformer_settings(config, where, strict=True)
    nested = field(config, "eagle_config", dict, where, None) or {}
    ids = read_ids(nested, f"{where}: eagle_config")
    return Settings(
        **values,
        target_hidden_size=field(config, "target_hidden_size", int, where, values["hidden_size"]),
        draft_vocab_size=field(config, "draft_vocab_size", int, where, values["vocab_size"]),
        ids=ids if ids is not None else read_ids(config, where),
        norm_before_fc=bool(nested.get("norm_before_fc", config.get("norm_before_fc"))),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
        tied=bool(config.get("tie_word_embeddings")),
        dtype=_dtype(config),
    )


DIALECTS = (
    Dialect(
        "speculators",
        ("Eagle3DraftModel", "Eagle3Speculator"),
        (),
        _read_speculators,
        lambda ids, architecture, num_layers: ids,  # id k: transformers' hidden_states[k], k layers done
    ),
    Dialect(
        "sglang",
        ("LlamaForCausalLMEagle3",),
        (
            (r"^model\.", ""),
            (r"^midlayer\.", "layers.0."),
            (r"^aux_norm_low\.", "fc_norm.0."),
            (r"^aux_norm_mid\.", "fc_norm.1."),
            (r"^aux_norm_high\.", "fc_norm.2."),
        ),
        _read_sglang,
        sglang_depths,
    ),
)


def recognise(config: dict, names: Iterable[str], where: str) -> Dialect:
    """The dialect of a drafter, by its config.

    BadInput asks a clear question when it is none that is known.
    """
    listed = field(config, "architectures", list, where, [])
    for dialect in DIALECTS:
        if set(listed) & set(dialect.architectures):
            return dialect
    if "speculators_model_type" in config:
        raise BadInput(
            f"{where}: field 'speculators_model_type' is {config['speculators_model_type']!r}, "
            f"architectures {listed}: not an EAGLE-3 drafter of speculators; is this the right folder?"
        )
    known = "; ".join(f"{d.name}: {', '.join(d.architectures)}" for d in DIALECTS)
    hint = (
        "its tensors look like an EAGLE-3 drafter's"
        if any("fc.weight" in n for n in names)
        else "no fc.weight"
    )
    raise BadInput(
        f"{where}: field 'architectures' is {listed or 'missing'} ({hint}), which is no dialect known here "
        f"({known}). Is it an EAGLE-3 drafter, and which tool wrote it? If it is one of these, write that "
        "architecture into the config"
    )
