"""Dialects: how each trainer or engine spells a drafter, translated to one set of names and settings.

A dialect is a row of `DIALECTS`: how to recognise it, how its tensor names become canonical ones, which
reader understands its config (`settings.py`), and what its layer ids mean. Most rows share a reader: they
differ in who signed the config and in what that trainer counted. `docs/dialects.md` says which source of each
was read, and when.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eaglelab.errors import BadInput
from eaglelab.layer_ids import sglang_depths
from eaglelab.settings import (
    Settings,
    field,
    read_latent,
    read_llama,
    read_old_speculators,
    read_speculators,
    read_untied,
)

__all__ = ["DIALECTS", "SIGNATURE", "Dialect", "Settings", "field", "recognise"]

CANONICAL = re.compile(
    r"(embed_tokens|fc|input_norm|fc_norm\.\d+|norm|lm_head)\.weight|fc\.bias|d2t|t2d"
    r"|layers\.\d+\.(input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
    r"|layers\.\d+\.self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)"
    r"|layers\.\d+\.mlp\.(gate|up|down)_proj\.(weight|bias)"
)
LATENT = re.compile(
    CANONICAL.pattern
    + r"|layers\.0\.self_attn\.((q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|(q_a|kv_a)_layernorm)\.weight"
)
# A field that settles who meant what; `convert` writes it, and so may anyone whose file is ambiguous.
SIGNATURE = "eaglelab_dialect"

Ids = tuple[int, ...]
ToDepth = Callable[[Ids, str | None, int | None], Ids]  # ids, the target's architecture, its layers


@dataclass(frozen=True)
class Dialect:
    """One spelling. `to_depth(ids, architecture, num_layers)`: the depths that the trainer meant."""

    name: str
    architectures: tuple[str, ...]
    read: Callable[[dict, str], Settings]
    to_depth: ToDepth
    signed: Callable[[dict, set[str]], bool] | None = None  # by config and tensor names
    renames: tuple[tuple[str, str], ...] = ()  # regular expression, replacement; applied in order
    unsigned: Callable[[set[str]], bool] | None = None  # files that it may have left without a signature
    known: re.Pattern[str] = CANONICAL
    engines: tuple[str, ...] = ()  # engines that load the file as it is
    position_start: int = 0  # position of a text's first token in training

    def canonical(self, name: str) -> str | None:
        """The canonical name of a tensor, or None if this dialect does not know it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name if self.known.fullmatch(name) else None


def collected(ids: Ids, architecture: str | None, num_layers: int | None) -> Ids:
    """Id k: transformers' hidden_states[k], k layers done. Rows come in the order of the layers all the same.

    vllm 0.21.0 models/interfaces.py and speculators 0.3.0 custom_worker.py append a state where the layer is
    among the ids; so a list [5, 2, 4] trains on depths 2, 4, 5.
    """
    return tuple(sorted(ids))


def as_listed(ids: Ids, architecture: str | None, num_layers: int | None) -> Ids:
    """Id i: the output of layer i, counted from 0, which is depth i + 1; in the order of the ids.

    So SpecForge's transformers backend (specforge modeling/target/eagle3_target_model.py); its SGLang backend
    collects ascending, and the file does not tell which it was.
    """
    return tuple(i + 1 for i in ids)


def outputs(ids: Ids, architecture: str | None, num_layers: int | None) -> Ids:
    """The same, ascending: TorchSpec's rows come from an engine (torchspec inference/engine)."""
    return tuple(sorted(i + 1 for i in ids))


def hooked(ids: Ids, architecture: str | None, num_layers: int | None) -> Ids:
    """Model-Optimizer: forward hooks fire in the order of the layers, whatever the order of the ids.

    Ids up to the number of layers, as in gpt-oss-120b-Eagle3-v3, count boundaries (sglang#32334).
    """
    return tuple(sorted(ids if ids and max(ids) == num_layers else outputs(ids, architecture, num_layers)))


def as_sglang(ids: Ids, architecture: str | None, num_layers: int | None) -> Ids:
    """What SGLang makes of them, whose rows ascend."""
    return tuple(sorted(sglang_depths(ids, architecture, num_layers)))


def latent(ids: Ids, architecture: str | None, num_layers: int | None) -> Ids:
    """The same on the DeepSeek targets that MLA drafters belong to."""
    return as_sglang(ids, architecture or "KimiK25ForConditionalGeneration", num_layers)


def always(names: set[str]) -> bool:
    return True


def _by_optimizer(config: dict, names: set[str]) -> bool:
    nested = config.get("eagle_config")
    return isinstance(nested, dict) and "next_layer_regular" in nested


LLAMA = ("LlamaForCausalLMEagle3",)
LLAMA_NAMES = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^draft_id_to_target_id$", "d2t"),
)
DIALECTS = (
    Dialect(
        "speculators", ("Eagle3DraftModel",), read_speculators, collected, unsigned=always, position_start=1
    ),
    Dialect(
        "speculators-0.1",
        ("Eagle3Speculator",),
        read_old_speculators,
        collected,
        unsigned=always,
        position_start=1,
    ),
    Dialect("model-optimizer", LLAMA, read_llama, hooked, _by_optimizer, LLAMA_NAMES, engines=("sglang",)),
    Dialect(
        "torchspec",
        LLAMA,
        read_llama,
        outputs,
        lambda config, names: "_torchspec_version" in config,
        LLAMA_NAMES,
        engines=("sglang",),
    ),
    # The same files unsigned: as SGLang reads them, or as SpecForge, which leaves no signature, meant them.
    Dialect("sglang", LLAMA, read_llama, as_sglang, None, LLAMA_NAMES, always, engines=("sglang",)),
    Dialect("specforge", LLAMA, read_llama, as_listed, None, LLAMA_NAMES, always, engines=("sglang",)),
    Dialect(
        "safeailab",
        ("LlamaForCausalLM",),
        read_llama,
        collected,  # eagle/model/modeling_llama_kv.py keeps what goes into layers 2, n // 2, n - 3
        lambda config, names: {"fc.weight", "midlayer.hidden_norm.weight"} <= names,
        LLAMA_NAMES,
    ),
    Dialect(
        "vllm",
        ("Eagle3LlamaForCausalLM",),
        read_untied,
        collected,
        renames=LLAMA_NAMES,
        unsigned=always,
        engines=("vllm",),
    ),
    Dialect(
        "angelslim",
        ("Eagle3LlamaForCausalLM",),
        read_untied,
        outputs,
        lambda config, names: "target_model_type" in config or "modal_type" in config,
        LLAMA_NAMES,
        unsigned=lambda names: any(n.startswith("midlayer.") for n in names),
        engines=("vllm",),
    ),
    Dialect("automodel", ("LlamaEagle3DraftModel",), read_llama, outputs, None, LLAMA_NAMES, always),
    Dialect(
        "model-optimizer-mla",
        ("Eagle3DeepseekV2ForCausalLM",),
        read_latent,
        hooked,
        _by_optimizer,
        LLAMA_NAMES,
        known=LATENT,
        engines=("sglang",),
    ),
    Dialect(
        "sglang-mla",
        ("Eagle3DeepseekV2ForCausalLM",),
        read_latent,
        latent,
        None,
        LLAMA_NAMES,
        always,
        LATENT,
        engines=("sglang",),
    ),
)
BY_NAME = {d.name: d for d in DIALECTS}


def named(name: str, where: str) -> Dialect:
    """The dialect of that name. BadInput lists the names."""
    if name not in BY_NAME:
        raise BadInput(f"{where}: no dialect {name!r}; known are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def recognise(
    config: dict, names: Iterable[str], where: str, asked: str | None = None
) -> tuple[Dialect, tuple[Dialect, ...]]:
    """-> (the dialect of a drafter, others that could have written the very same file).

    By `asked`, else by the signature in the config, else by architecture, config fields and tensor names.
    BadInput asks a clear question when it is none that is known, or when two readings are possible.
    """
    if asked := asked or field(config, SIGNATURE, str, where, None):
        return named(asked, where), ()
    listed, names = field(config, "architectures", list, where, []), set(names)
    rows = [d for d in DIALECTS if set(map(str, listed)) & set(d.architectures)]
    if signed := [d for d in rows if d.signed and d.signed(config, names)]:
        if len(signed) > 1:
            raise _question(where, f"it bears the marks of {' and of '.join(d.name for d in signed)}", signed)
        return signed[0], ()
    if unsigned := [d for d in rows if d.unsigned and d.unsigned(names)]:
        return unsigned[0], tuple(unsigned[1:])
    raise _unknown(config, names, listed, where)


def _question(where: str, why: str, rows: Iterable[Dialect]) -> BadInput:
    choices = " or ".join(f"--dialect {d.name}" for d in rows)
    return BadInput(
        f"{where}: {why}. Which tool wrote it? Give {choices} (or write the name into the config as "
        f"field {SIGNATURE!r})"
    )


def ask_about_ids(
    where: str, ids: Ids, readings: dict[str, Ids], architecture: str | None = None
) -> BadInput:
    """The question when the same ids mean other depths to another tool that could have written the file."""
    said = ", ".join(f"to {name} depths {list(depths)}" for name, depths in readings.items())
    on = f" on {architecture}" if architecture else ""
    return _question(where, f"layer ids {list(ids)}{on} mean {said}", [BY_NAME[n] for n in readings])


def _unknown(config: dict, names: set[str], listed: list, where: str) -> BadInput:
    if "speculators_model_type" in config:
        return BadInput(
            f"{where}: field 'speculators_model_type' is {config['speculators_model_type']!r}, "
            f"architectures {listed}: not an EAGLE-3 drafter of speculators; is this the right folder?"
        )
    fc = any("fc.weight" in n for n in names)
    layers = {m[1] for n in names if (m := re.search(r"\blayers\.(\d+)\.", n))}
    if not fc and len(layers) > 3:
        return BadInput(
            f"{where}: {len(layers)} layers and no fc.weight: this looks like a whole target model "
            f"({', '.join(map(str, listed)) or 'no architecture'}). Give the drafter's folder here, and this "
            "one as --target"
        )
    known = "; ".join(f"{d.name}: {', '.join(d.architectures)}" for d in DIALECTS)
    hint = "its tensors look like an EAGLE-3 drafter's" if fc else "no fc.weight"
    return BadInput(
        f"{where}: field 'architectures' is {listed or 'missing'} ({hint}), which is no dialect known here "
        f"({known}). Is it an EAGLE-3 drafter, and which tool wrote it? If it is spelled like one of these, "
        "give --dialect NAME"
    )
