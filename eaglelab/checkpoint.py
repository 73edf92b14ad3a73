"""Checkpoints: a drafter of any known dialect, and the three tensors of its target, opened lazily.

Names are canonical from here on (`fc.weight`, `layers.0.self_attn.q_proj.weight`, `d2t`, ...); the file's own
names stay in `TensorInfo.name_in_file`. Opening reads headers and config only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eaglelab.dialects import Dialect, Settings, ask_about_ids, field, recognise
from eaglelab.errors import BadInput
from eaglelab.launch import Target
from eaglelab.layer_ids import default_depths
from eaglelab.shapes import check_shapes
from eaglelab.tensorfile import TensorInfo, read_folder, read_json
from eaglelab.vocabulary import as_offsets

FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Checkpoint:
    """A drafter. `tensors` by canonical name; `unknown`: names in the file that its dialect does not know."""

    path: Path
    spelling: Dialect
    config: dict[str, Any]  # as in the file
    settings: Settings  # the same, in one vocabulary
    tensors: dict[str, TensorInfo]
    unknown: tuple[str, ...]
    file_names: tuple[str, ...]  # every tensor, in the order an engine's loader meets them
    rivals: tuple[Dialect, ...] = ()  # others that could have written this very file
    map_form: Literal["none", "offset", "absolute"] = "none"  # what d2t holds in the file; here: offsets

    @property
    def dialect(self) -> str:
        return self.spelling.name

    @property
    def hidden_size(self) -> int:
        return self.settings.hidden_size

    @property
    def target_hidden_size(self) -> int:
        return self.settings.target_hidden_size

    @property
    def vocab_size(self) -> int:
        return self.settings.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.settings.draft_vocab_size

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """Layer ids as the config writes them; None if it has none."""
        return self.settings.ids

    @property
    def feature_count(self) -> int:
        """k: how many of the target's hidden states stand side by side in a row that `fc` takes."""
        if not self.takes_features:
            return 1
        if "fc.weight" in self.tensors:
            return self.tensors["fc.weight"].shape[1] // self.target_hidden_size
        return len(self.aux_layer_ids or (0, 0, 0))

    @property
    def dtype(self) -> str:
        """What most of its numbers are stored in; a config may say otherwise, or nothing."""
        stored = [info.dtype for info in self.tensors.values() if info.dtype in FLOATS]
        return max(stored, key=stored.count) if stored else self.settings.dtype

    @property
    def takes_features(self) -> bool:
        """Whether it was trained on several hidden states; a saved `fc` outranks a flag that denies it."""
        return self.settings.uses_features or "fc.weight" in self.tensors

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths that the trainer meant, in feed order, as far as the config alone tells; else ()."""
        return self.depths_in(None)

    def depths_in(self, target: Target | None) -> tuple[int, ...]:
        """The same for a known target: its architecture can change what ids mean, its layers the default.

        BadInput asks which tool wrote the file where the same ids mean other depths to another one.
        """
        architecture, layers = (target.architecture, target.num_layers) if target else (None, None)
        ids = self.aux_layer_ids
        if not ids:
            if target is None:
                return ()
            default = default_depths(target.architecture, target.num_layers)
            return default if self.dialect == "sglang" else default_depths(None, target.num_layers)
        if (
            "fc.weight" in self.tensors
            and len(ids) == self.feature_count + 1
            and self.dialect == "speculators"
        ):
            ids = ids[:-1]  # its last layer, stored for the teacher alone, is listed too (speculators#1065)
        readings = {d.name: d.to_depth(ids, architecture, layers) for d in (self.spelling, *self.rivals)}
        depths = readings[self.dialect]
        possible = {n: r for n, r in readings.items() if layers is None or max(r) <= layers}
        if any(reading != depths for reading in possible.values()):
            where = str(self.path / "config.json")
            raise ask_about_ids(where, ids, {self.dialect: depths} | possible, architecture)
        return depths

    def load(self, name: str, dtype: object = None):
        """One tensor as torch, read now; cast to `dtype` if given.

        BadInput if this drafter has no such tensor.
        """
        if name not in self.tensors:
            raise BadInput(f"{self.path}: has no tensor {name!r}")
        return self.tensors[name].torch(dtype)

    @cached_property
    def d2t(self) -> np.ndarray | None:
        """Offsets [draft_vocab_size]: target id = draft id + d2t[draft id]. None if the file has no map."""
        return self.tensors["d2t"].array().astype(np.int64) if "d2t" in self.tensors else None

    def with_config(self, changes: Mapping[str, Any]) -> Checkpoint:
        """The same tensors under an edited config (nested as in the file; None removes a field).

        BadInput if config and tensors no longer fit.
        """
        config = _merged(self.config, changes)
        settings = self.spelling.read(config, str(self.path / "config.json"))
        check_shapes(self.path, settings, self.tensors)
        return replace(self, config=config, settings=settings)

    def check_target(self, target: Target) -> None:
        """BadInput if this drafter cannot belong to that target: another width, or another vocabulary."""
        for key, mine, theirs, fault in (
            ("hidden_size", self.target_hidden_size, target.hidden_size, "drafter-width-differs"),
            ("vocab_size", self.vocab_size, target.vocab_size, "checkpoint-dtype"),
        ):
            if mine != theirs:
                raise BadInput(
                    f"{self.path}/config.json: field {key!r}: the drafter was trained for a target of "
                    f"{mine:,}, this target ({target.architecture}) has {theirs:,}; it is a drafter for "
                    "another target",
                    fault,
                )


@dataclass(frozen=True)
class TargetModel:
    """A target's facts and, where its files hold them, the three tensors that a drafter shares or needs."""

    path: Path
    facts: Target
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]  # embed_tokens.weight, norm.weight, lm_head.weight

    def load(self, name: str, dtype: object = None):
        """`embed_tokens.weight` and `lm_head.weight` [vocab, hidden], `norm.weight` [hidden]."""
        if name not in self.tensors:
            raise BadInput(f"{self.path}: target tensor {name!r} is not here; give the target's own folder")
        return self.tensors[name].torch(dtype)


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(config)
    for name, value in changes.items():
        if value is None:
            out.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(out.get(name), Mapping):
            out[name] = _merged(out[name], value)
        else:
            out[name] = value
    return out


def open_checkpoint(path: str | Path, dialect: str | None = None) -> Checkpoint:
    """Open a drafter's folder. `dialect` says which tool wrote it where the file alone does not tell.

    BadInput names file and field when it is damaged, incomplete or of no known dialect.
    """
    path = Path(path)
    if not path.is_dir():
        raise BadInput(
            f"{path}: not a folder; give the folder with the drafter's config.json and safetensors"
        )
    config = read_json(path / "config.json")
    return assemble(path, config, read_folder(path), dialect)


def assemble(
    path: Path, config: dict[str, Any], by_file_name: dict[str, TensorInfo], asked: str | None = None
) -> Checkpoint:
    """A checkpoint from its config and its tensors by the names in the file."""
    where, wrapper = str(path / "config.json"), _wrapper(by_file_name)
    names = [name.removeprefix(wrapper) for name in by_file_name]
    dialect, rivals = recognise(config, names, where, asked)
    tensors: dict[str, TensorInfo] = {}
    unknown = []
    for name, info in by_file_name.items():
        canonical = dialect.canonical(name.removeprefix(wrapper))
        if canonical is None:
            unknown.append(name)
        elif canonical in tensors:
            raise BadInput(
                f"{path}: {name!r} and {tensors[canonical].name_in_file!r} are both {canonical}; remove one"
            )
        else:
            tensors[canonical] = info
    settings = dialect.read(config, where)
    check_shapes(path, settings, tensors)
    form: Literal["none", "offset", "absolute"] = "none"
    if "d2t" in tensors:
        tensors["d2t"], absolute = as_offsets(tensors["d2t"], tensors.get("t2d"), settings.vocab_size)
        form = "absolute" if absolute else "offset"
    file_names = tuple(by_file_name)
    return Checkpoint(path, dialect, config, settings, tensors, tuple(unknown), file_names, rivals, form)


def _wrapper(names: Mapping[str, Any]) -> str:
    """What a wrapper of the trainer's (module., _orig_mod.) put before every name: no engine strips it."""
    shared = commonprefix(list(names)) if len(names) > 1 else ""
    shared = shared[: shared.rfind(".") + 1]
    return "" if shared == "model." else shared  # which dialects and engines know


TARGET_NAMES = {
    "embed_tokens.weight": ("embed_tokens.weight", "word_embeddings.weight", "tok_embeddings.weight"),
    "norm.weight": ("norm.weight", "final_layernorm.weight"),
    "lm_head.weight": ("lm_head.weight", "output.weight"),
}
PREFIXES = ("", "model.", "language_model.model.", "model.language_model.", "language_model.")


def open_target(path: str | Path) -> TargetModel:
    """Open a target: its folder, one with `target.safetensors` and `config.json`, or a config.json alone.

    A config alone gives facts and no tensors. A tied target's head is its embedding. Multimodal configs are
    read through `text_config`.
    """
    path = Path(path)
    if path.is_file():
        config, folder = read_json(path), None
    elif path.is_dir():
        config, folder = read_json(path / "config.json"), path
    else:
        raise BadInput(f"{path}: not a file or folder; give the target's folder or its config.json")
    facts = target_facts(config, str(path if folder is None else path / "config.json"))
    tensors: dict[str, TensorInfo] = {}
    if folder is not None and any(folder.glob("*.safetensors")):
        stored = read_folder(folder, ("target.safetensors", "model.safetensors"))
        for canonical, spellings in TARGET_NAMES.items():
            names = (prefix + name for prefix in PREFIXES for name in spellings)
            if found := next((n for n in names if n in stored), None):
                tensors[canonical] = stored[found]
        text = config.get("text_config") or config
        if (
            text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
            and "embed_tokens.weight" in tensors
        ):
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        for name in set(tensors) & {"embed_tokens.weight", "lm_head.weight"}:
            if tensors[name].shape != (facts.vocab_size, facts.hidden_size):
                raise BadInput(
                    f"{path}: target tensor {tensors[name].name_in_file!r}: shape "
                    f"{list(tensors[name].shape)}, its config says {facts.vocab_size} x {facts.hidden_size}"
                )
    return TargetModel(path, facts, config, tensors)


def target_facts(config: dict[str, Any], where: str) -> Target:
    """The facts of a target's config that decide how its drafter is served."""
    listed = field(config, "architectures", list, where)
    text = field(config, "text_config", dict, where, None) or config
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return Target(
        architecture=str(listed[0]) if listed else "",
        hidden_size=field(text, "hidden_size", int, where),
        num_layers=field(text, "num_hidden_layers", int, where),
        vocab_size=field(text, "vocab_size", int, where),
        dtype=str(dtype or "float32").removeprefix("torch."),
    )
