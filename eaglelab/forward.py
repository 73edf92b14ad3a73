"""The target run here: transformers on the CPU, in float32, over a few of the trainer's texts.

For naming the depths of stored features where no server sent their texts. Small targets only: one layer of a
large one takes longer than asking its server. transformers 5: `hidden_states[i]` is depth i for i < n; the
last one is after the final norm, so depth n is taken where it enters that norm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.errors import BadInput

LARGEST = 1 << 30  # bytes of weights: more is not run unless asked for
NORMS = ("norm", "final_layernorm", "ln_f")


@dataclass(frozen=True)
class TargetRun:
    """One text as the target sees it: what `traces.Reprefill` gives, from here. float32."""

    token_ids: list[int]
    _streams: dict[int, Array] = field(repr=False)
    final: Array = field(repr=False)
    further: tuple[int, ...] = ()

    @property
    def depths(self) -> list[int]:
        return sorted(self._streams)

    def stream(self, depth: int) -> Array:
        """[n_tokens, hidden]: the residual stream after `depth` decoder layers."""
        return self._streams[depth]


def run_target(path: Path, texts: list[list[int]], largest: int = LARGEST) -> list[TargetRun]:
    """Every depth of each text. BadInput says why the target cannot be run here."""
    whole = any((path / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))
    if not whole:
        raise BadInput(f"{path}: no weights of the target lie here; give --target its own folder")
    size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    if size > largest:
        raise BadInput(
            f"{path}: {size / 1e9:.1f} GB of weights are too many to run here; send texts to its server"
        )
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise BadInput(f"the target is not run here: {error.name} is not installed") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True, use_safetensors=True
        )
    except Exception as error:  # whatever a config makes transformers raise
        raise BadInput(f"{path}: transformers cannot load this target: {error}") from error
    model, told = loaded
    if told["missing_keys"]:
        raise BadInput(f"{path}: the target's file lacks {sorted(told['missing_keys'])[0]} and others")
    return [_run(model, ids) for ids in texts]


def _run(model: Any, ids: list[int]) -> TargetRun:
    import torch

    entering: list[Array] = []
    body = model.base_model
    norm = next((m for name in NORMS if (m := getattr(body, name, None)) is not None), None)
    hook = norm and norm.register_forward_pre_hook(
        lambda _, args: entering.append(args[0][0].float().numpy())
    )
    try:
        with torch.no_grad():
            out = body(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    finally:
        if hook:
            hook.remove()
    states = [s[0].float().numpy() for s in out.hidden_states]
    streams = dict(enumerate(states[:-1]))
    if entering:
        streams[len(states) - 1] = np.asarray(entering[-1])
    return TargetRun(list(ids), streams, states[-1])
