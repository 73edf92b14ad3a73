"""The decisions of one conversion: what is renamed, reordered, left out, added, warned of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eaglelab.checkpoint import Checkpoint, TargetModel
from eaglelab.configs import sglang_config, speculators_config, vllm_config
from eaglelab.dialects import Settings
from eaglelab.errors import BadInput
from eaglelab.inert import equal_numbers
from eaglelab.launch import Target
from eaglelab.layer_ids import CAPTURE_LAST, sglang_ids
from eaglelab.tensorfile import TensorInfo, hold


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
    ids: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # before, after, and the depths both mean


class Conversion:
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
        if not self.source.takes_features:
            raise BadInput(
                f"{self.where}: field 'use_aux_hidden_state' is false: a drafter of the target's last hidden "
                "state; not convertible"
            )
        depths = self.source.depths_in(facts)
        if not depths:
            raise BadInput(
                f"{self.where}: has no layer ids; give --target, whose number of layers decides them"
            )
        self._head()
        self._map()
        depths = self._ascending(depths)
        if self.to == "sglang":
            ids = self._ids(depths, facts)
            self._leave_out_what_sglang_ignores()
            config = sglang_config(self.source, set(self.tensors), ids)
        elif self.to == "vllm":
            ids = depths
            self._leave_out_what_vllm_ignores()
            config = vllm_config(self.source, set(self.tensors), ids)
        else:
            ids = depths
            self._embedding()
            path = self.target.path if self.target else None
            config = speculators_config(self.source, set(self.tensors), ids, facts, path)
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
        beyond = (
            max(s.ids or (0,)) + 3
        )  # layers: not told; only gpt_oss asks, and ids below its last are plain
        return Target(names[0], s.target_hidden_size, beyond, s.vocab_size) if s.ids else None

    def _name(self, canonical: str) -> str:
        """The forms share names but for SGLang's first layer, and for the norm of its later layers."""
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
        if self.source.map_form == "absolute":
            self.warnings.append(
                "d2t holds target ids in the file: offsets were written, which engines expect"
            )
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
        """Rows come by ascending depth in all three forms: put the chunks of `fc` in that order too."""
        engine = "SGLang" if self.to == "sglang" else "vLLM"
        order = sorted(range(len(depths)), key=lambda i: depths[i])
        if len(set(depths)) != len(depths):
            raise BadInput(
                f"{self.where}: depths {list(depths)} repeat; {engine} hands over each once: not convertible"
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
            f"{engine} hands over depths ascending: the columns of fc were reordered from {list(depths)}"
        )
        return tuple(depths[i] for i in order)

    def _ids(self, depths: tuple[int, ...], facts: Target | None) -> tuple[int, ...]:
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
                "norm_before_residual: SGLang has no such switch and takes the raw residual; acceptance "
                "will suffer"
            )
        if s.window:
            warn(f"sliding window of {s.window}: launch with --speculative-draft-window-size {s.window - 1}")
        for name in sorted(self.tensors):
            if name.endswith(("q_norm.weight", "k_norm.weight")) or (
                name.endswith(".bias") and not name.endswith("o_proj.bias") and name != "fc.bias"
            ):
                warn(f"{name}: SGLang's drafter has no such parameter; left out, acceptance may suffer")
                del self.tensors[name]
        if s.target_hidden_size != s.hidden_size:
            return  # another width: SGLang keeps the drafter's own embedding
        embedding = self.tensors.pop("embed_tokens.weight", None)
        if embedding is None:
            return
        if s.embedding_trained:
            warn(
                "embed_tokens.weight was trained: SGLang puts the target's in its place; acceptance may "
                "suffer"
            )
            return
        theirs = self.target.tensors.get("embed_tokens.weight") if self.target else None
        if theirs is not None and not equal_numbers(embedding, theirs):
            warn("embed_tokens.weight is not the target's: SGLang puts the target's in its place")

    def _leave_out_what_vllm_ignores(self) -> None:
        """vllm models/llama_eagle3.py: biases come with attention_bias, all four of a layer, or none."""
        s, warn = self.settings, self.warnings.append
        if s.window:
            warn(f"sliding window of {s.window}: vLLM before #47568 does not read it")
        if "embed_tokens.weight" not in self.tensors and s.target_hidden_size != s.hidden_size:
            warn("embed_tokens.weight is missing, and the target's has another width: vLLM cannot share it")
        for name in sorted(self.tensors):
            if name.endswith(("q_norm.weight", "k_norm.weight")) or ".mlp." in name and name.endswith("bias"):
                warn(f"{name}: vLLM's Llama drafter has no such parameter; left out, acceptance may suffer")
                del self.tensors[name]
        biases = [n for n in self.tensors if n.endswith("_proj.bias")]
        if biases and len(biases) != 4 * s.layers:
            warn("attention_bias: vLLM makes q, k, v and o biases; those not in the file stay uninitialised")

    def _embedding(self) -> None:
        if "embed_tokens.weight" not in self.tensors:
            if self.target and "embed_tokens.weight" in self.target.tensors:
                self.tensors["embed_tokens.weight"] = self.target.tensors["embed_tokens.weight"]
                self.added.append(self.tensors["embed_tokens.weight"].name_in_file)
            else:
                self.warnings.append(
                    "embed_tokens.weight is not in the file: speculators reads it from its verifier"
                )
