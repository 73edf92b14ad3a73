"""Convert a drafter between the speculators and the SGLang dialect: names, layer ids, config; back as well.

`plan` decides everything without writing and lists what the destination cannot express; `view` is that plan
as a checkpoint, so that `served` can say what an engine would do with it; `convert` writes it, whole or not
at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eaglelab.checkpoint import Checkpoint, TargetModel, assemble, open_checkpoint, open_target
from eaglelab.dialects import Settings, sglang_ids
from eaglelab.errors import BadInput
from eaglelab.launch import Target
from eaglelab.tensorfile import TensorInfo, hold, to_float32, write_safetensors

To = Literal["sglang", "speculators"]


@dataclass(frozen=True)
class Plan:
    """A conversion, decided.

    `renamed`: name in the source file -> new name; `added`: names taken from the target.
    """

    to: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]  # by new name
    renamed: dict[str, str]
    dropped: tuple[str, ...]  # names in the source file that are not carried over
    added: tuple[str, ...]
    warnings: tuple[str, ...]
    ids: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = field(
        default=((), (), ())
    )  # before, after, depths


def plan(checkpoint: Checkpoint, to: str, target: TargetModel | None = None) -> Plan:
    """Decide a conversion. BadInput if the destination cannot hold this drafter at all, or the target is
    needed.
    """
    if to not in ("sglang", "speculators"):
        raise BadInput(f"--to {to!r}: this converts to sglang or to speculators")
    if checkpoint.dialect == to:
        raise BadInput(f"{checkpoint.path}: is in the {to} dialect already")
    if target:
        checkpoint.check_target(target.facts)
    return _Conversion(checkpoint, to, target).decide()


def view(checkpoint: Checkpoint, to: str = "sglang", target: TargetModel | None = None) -> Checkpoint:
    """The checkpoint as it would be after conversion, without writing anything; itself if it is in that
    dialect.
    """
    if checkpoint.dialect == to:
        return checkpoint
    decided = plan(checkpoint, to, target)
    return assemble(checkpoint.path, decided.config, decided.tensors)


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    target: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Convert a drafter's folder into a new one. BadInput if `dst` exists; on any failure nothing is left
    behind.

    `progress(bytes written, bytes in all)` is called as the tensors are copied.
    """
    source, dst = open_checkpoint(src), Path(dst)
    if dst.exists() or dst.is_symlink():
        raise BadInput(f"{dst}: exists already; give a new folder (nothing was changed)")
    decided = plan(source, to, open_target(target) if target else None)
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{dst.name}.partial-", dir=dst.parent))
    try:
        write_safetensors(partial / "model.safetensors", decided.tensors, progress)
        with open(partial / "config.json", "w", encoding="utf-8") as file:
            file.write(json.dumps(decided.config, indent=2) + "\n")
            os.fsync(file.fileno())
        partial.chmod(0o777 & ~_umask())
        if dst.exists():
            raise BadInput(f"{dst}: exists already; give a new folder (nothing was changed)")
        os.rename(partial, dst)
    except OSError as error:
        raise BadInput(f"{dst}: could not be written ({error.strerror}); nothing was left behind") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return decided


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class _Conversion:
    """The decisions of one conversion, collected."""

    def __init__(self, checkpoint: Checkpoint, to: str, target: TargetModel | None):
        self.source, self.to, self.target = checkpoint, to, target
        self.settings: Settings = checkpoint.settings
        self.tensors = dict(checkpoint.tensors)
        self.warnings: list[str] = []
        self.added: list[str] = []
        self.where = f"{checkpoint.path}/config.json"

    def decide(self) -> Plan:
        facts = self.target.facts if self.target else self._verifier()
        depths = self.source.depths_in(facts)
        if not depths:
            raise BadInput(
                f"{self.where}: has no layer ids; give --target, whose number of layers decides them"
            )
        self._head()
        self._map()
        if self.to == "sglang":
            depths = self._ascending(depths)
            ids = self._ids(depths, facts)
            self._leave_out_what_sglang_ignores()
            config = self._sglang_config(ids)
        else:
            ids = depths
            self._embedding()
            config = self._speculators_config(ids, facts)
        for name in self.source.unknown:
            self.warnings.append(f"{name}: not known in the {self.source.dialect} dialect, left out")
        named = {self._name(canonical): info for canonical, info in self.tensors.items()}
        old = {info.name_in_file: new for new, info in named.items() if info.name_in_file not in self.added}
        dropped = tuple(n for n in self.source.file_names if n not in old)
        before = self.source.aux_layer_ids or ()
        return Plan(
            self.to,
            config,
            named,
            old,
            dropped,
            tuple(self.added),
            tuple(self.warnings),
            (before, ids, depths),
        )

    def _verifier(self) -> Target | None:
        """The target as the trainer's own config names it: enough for the rule of its layer ids."""
        verifier = (self.source.config.get("speculators_config") or {}).get("verifier") or {}
        names = verifier.get("architectures") or []
        if not names:
            self.warnings.append(
                "the target is not known: layer ids by the rule of most architectures (give --target)"
            )
            return None
        s = self.settings
        layers = (
            max(self.source.aux_layer_ids or (0,)) + 3
        )  # only gpt_oss asks: not its last layer, as far as known
        return Target(names[0], s.target_hidden_size, layers, s.vocab_size) if s.ids else None

    def _name(self, canonical: str) -> str:
        """SGLang and speculators share names but for the first layer, and for the norm of later layers."""
        first, later = "layers.0.", "layers."
        if self.to == "sglang":
            if canonical.startswith(first):
                return "midlayer." + canonical.removeprefix(first)
            if canonical.startswith(later):
                return canonical.replace(".input_layernorm.", ".hidden_norm.")
        elif canonical.startswith(later) and not canonical.startswith(first):
            return canonical.replace(".hidden_norm.", ".input_layernorm.")
        return canonical

    def _head(self) -> None:
        """A drafter without a head used the target's, at the rows of its vocabulary."""
        if "lm_head.weight" in self.tensors:
            return
        if self.settings.tied:
            raise BadInput(
                f"{self.where}: field 'tie_word_embeddings' is true and there is no lm_head; not convertible"
            )
        if self.target is None or "lm_head.weight" not in self.target.tensors:
            raise BadInput(
                f"{self.source.path}: has no lm_head.weight: it shares the target's head; give --target"
            )
        head = self.target.tensors["lm_head.weight"]
        rows = np.arange(self.settings.draft_vocab_size)
        rows = rows + (self.source.d2t if self.source.d2t is not None else 0)
        if rows.max(initial=0) >= len(head.array()) or rows.min(initial=0) < 0:
            raise BadInput(
                f"{self.source.path}: d2t points outside the target's {len(head.array()):,} tokens"
            )
        self.tensors["lm_head.weight"] = hold("lm_head.weight", head, head.array()[rows])
        self.added.append("lm_head.weight")

    def _map(self) -> None:
        """d2t and t2d say the same; a missing t2d follows from d2t."""
        d2t = self.source.d2t
        if d2t is None:
            if self.settings.draft_vocab_size != self.settings.vocab_size:
                self.warnings.append(
                    "d2t is missing though the draft vocabulary is reduced: draft ids stand for themselves"
                )
            return
        ids = np.arange(len(d2t)) + d2t
        t2d = np.zeros(self.settings.vocab_size, dtype=bool)
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= len(t2d):
            raise BadInput(f"{self.source.path}: tensor 'd2t' points outside the vocabulary of {len(t2d):,}")
        t2d[ids] = True
        if "t2d" not in self.tensors:
            like = TensorInfo("t2d", self.source.path, t2d.shape, "bool", (0, 0))
            self.tensors["t2d"] = hold("t2d", like, t2d)
            self.added.append("t2d")
        elif not np.array_equal(self.tensors["t2d"].array().astype(bool), t2d):
            self.warnings.append("t2d and d2t disagree; engines follow d2t")

    def _ascending(self, depths: tuple[int, ...]) -> tuple[int, ...]:
        """SGLang hands over depths ascending: put the chunks that `fc` reads in that order too."""
        order = sorted(range(len(depths)), key=lambda i: depths[i])
        if len(set(depths)) != len(depths):
            raise BadInput(
                f"{self.where}: depths {list(depths)} repeat; SGLang hands over each once: not convertible"
            )
        if order == list(range(len(depths))):
            return depths
        width = self.settings.target_hidden_size
        for name in ("fc.weight", "input_norm.weight"):
            if name in self.tensors:
                info = self.tensors[name]
                chunks = info.array().reshape(*info.shape[:-1], len(depths), width)
                moved = np.ascontiguousarray(chunks[..., order, :]).reshape(info.shape)
                self.tensors[name] = hold(info.name_in_file, info, moved)
        norms = [self.tensors.pop(f"fc_norm.{i}.weight", None) for i in range(len(depths))]
        self.tensors |= {
            f"fc_norm.{new}.weight": n for new, i in enumerate(order) if (n := norms[i]) is not None
        }
        self.warnings.append(
            f"SGLang hands over depths ascending: the columns of fc were reordered from {list(depths)}"
        )
        return tuple(depths[i] for i in order)

    def _ids(self, depths: tuple[int, ...], facts: Target | None) -> tuple[int, ...]:
        from eaglelab.served import CAPTURE_LAST

        architecture, layers = (facts.architecture, facts.num_layers) if facts else (None, None)
        if self.target and depths[-1] >= self.target.facts.num_layers and architecture not in CAPTURE_LAST:
            self.warnings.append(
                f"depth {depths[-1]}: SGLang does not hand over the last layer's output on {architecture}"
            )
        return sglang_ids(depths, architecture, layers)

    def _leave_out_what_sglang_ignores(self) -> None:
        s, warn = self.settings, self.warnings.append
        if s.norm_before_residual:
            warn(
                "norm_before_residual: SGLang has no such switch and takes the raw residual; acceptance will "
                "suffer"
            )
        if s.window:
            warn(f"sliding window of {s.window}: launch with --speculative-draft-window-size {s.window - 1}")
        for name in sorted(self.tensors):
            if name.endswith(("q_norm.weight", "k_norm.weight")) or (
                name.endswith(".bias") and not name.endswith("o_proj.bias") and name != "fc.bias"
            ):
                warn(f"{name}: SGLang's drafter has no such parameter; left out, acceptance may suffer")
                del self.tensors[name]
        embedding = self.tensors.pop("embed_tokens.weight", None)
        if embedding is None:
            return
        if s.embedding_trained:
            warn(
                "embed_tokens.weight was trained: SGLang puts the target's in its place; acceptance may "
                "suffer"
            )
        elif self.target and "embed_tokens.weight" in self.target.tensors:
            theirs = self.target.tensors["embed_tokens.weight"]
            if not np.array_equal(
                to_float32(embedding.array(), embedding.dtype), to_float32(theirs.array(), theirs.dtype)
            ):
                warn("embed_tokens.weight is not the target's: SGLang puts the target's in its place")

    def _embedding(self) -> None:
        if "embed_tokens.weight" not in self.tensors:
            if self.target and "embed_tokens.weight" in self.target.tensors:
                self.tensors["embed_tokens.weight"] = self.target.tensors["embed_tokens.weight"]
                self.added.append(self.tensors["embed_tokens.weight"].name_in_file)
            else:
                self.warnings.append(
                    "embed_tokens.weight is not in the file: speculators reads it from its verifier"
                )

    def _shared_config(self) -> dict[str, Any]:
        s, inner = self.settings, self.source.config.get("transformer_layer_config", self.source.config)
        act = inner.get("hidden_act") or "silu"
        if act != "silu":
            raise BadInput(f"{self.where}: field 'hidden_act' is {act!r}; only silu is served")
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

    def _rope(self) -> dict[str, Any]:
        rope = self.settings.rope
        scaling = {k: list(v) if isinstance(v, tuple) else v for k, v in rope.scaling} or {
            "rope_type": "default"
        }
        return {"rope_theta": rope.theta, **scaling}

    def _sglang_config(self, ids: tuple[int, ...]) -> dict[str, Any]:
        s, rope = self.settings, self._rope()
        config: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        config |= {"torch_dtype": s.dtype, "tie_word_embeddings": False, **self._shared_config()}
        config["draft_vocab_size"] = s.draft_vocab_size
        config["rope_theta"] = rope["rope_theta"]
        if s.rope.scaling:  # older transformers read rope_scaling, newer ones rope_parameters
            config |= {
                "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
                "rope_parameters": rope,
            }
        if any(n.endswith("o_proj.bias") for n in self.tensors):
            config["attention_bias"] = True
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(ids),
            "norm_before_fc": "input_norm.weight" in self.tensors,
        }
        config["fc_norm"] = "fc_norm.0.weight" in self.tensors
        config["norm_output"] = s.norm_output
        return config

    def _speculators_config(self, ids: tuple[int, ...], facts: Target | None) -> dict[str, Any]:
        s = self.settings
        if s.target_hidden_size != s.hidden_size:
            raise BadInput(
                f"{self.where}: field 'target_hidden_size': speculators needs drafter and target equally wide"
            )
        if "input_norm.weight" in self.tensors and "fc_norm.0.weight" in self.tensors:
            raise BadInput(f"{self.source.path}: has input_norm and fc_norm; speculators allows one of them")
        if "fc.bias" in self.tensors:
            raise BadInput(f"{self.source.path}: tensor 'fc.bias': speculators has no such parameter")
        bias = any(n.endswith("q_proj.bias") for n in self.tensors)
        inner = {
            "model_type": "llama",
            "attention_bias": bias,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }
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
            "norm_before_fc": "input_norm.weight" in self.tensors,
            "fc_norm": "fc_norm.0.weight" in self.tensors,
            "norm_before_residual": s.norm_before_residual,
            "norm_output": s.norm_output,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
                "verifier": {
                    "architectures": [facts.architecture] if facts else [],
                    "name_or_path": str(self.target.path) if self.target else None,
                },
            },
            "transformer_layer_config": {**inner, **self._shared_config(), "rope_parameters": self._rope()},
        }
