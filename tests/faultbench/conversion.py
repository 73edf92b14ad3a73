"""Faults between the trainer's folder and the served one: conversion, config, names, tensors, launch flags.

Each case gives the trainer's folder as --drafter, a damaged copy of its right conversion as --served-drafter,
and the launch. No stored features: nothing is wrong with what was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .cases import SPECULATORS, TARGET, Bench, Case, Injected
from .drafters import (
    bias_of_values,
    frozen_signs,
    narrow,
    own_head,
    shipped,
    small_head,
    two_layers,
    windowed,
)
from .made import CHAIN, Tensors, as_served, as_trained, converted, copied, refit

IDS = "eagle_aux_hidden_state_layer_ids"
Make = Callable[[Bench], Path]


def nested(**values: Any) -> dict[str, Any]:
    return {"eagle_config": values}


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    """Leave out the tensors whose name holds one of these."""
    return lambda held: {n: t for n, t in held.items() if not any(part in n for part in parts)}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {n.replace(old, new): t for n, t in held.items()}


def exchanged(one: str, other: str) -> Callable[[Tensors], Tensors]:
    swap = {one: other, other: one}
    return lambda held: {
        next((n.replace(a, b) for a, b in swap.items() if a in n), n): t for n, t in held.items()
    }


def changed(**edits: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    """Edit the tensors whose name begins so (`lm_head=...`)."""

    def change(held: Tensors) -> Tensors:
        for start, edit in edits.items():
            held |= {n: edit(t) for n, t in held.items() if n.startswith(start)}
        return held

    return change


def serving(
    bench: Bench,
    original: Make,
    flags: str = CHAIN,
    right: Make | None = None,
    **edits: Any,
) -> Injected:
    """The trainer's folder, and its conversion with the edits of `made.copied`."""
    trainers = original(bench)
    served = copied(bench, right(bench) if right else converted(bench, trainers), **edits)
    inputs = {"drafter": trainers, "served_drafter": served, "target": TARGET, "launch": flags}
    return Injected(inputs, as_trained(bench, trainers, CHAIN), as_served(bench, served, flags))


def fault(
    name: str,
    slug: str = "",
    rung: int = 4,
    original: Make = shipped,
    flags: str = CHAIN,
    right: Make | None = None,
    sweep: str = "",
    note: str = "",
    priced: bool = True,
    **edits: Any,
) -> Case:
    """A case of this module; `slug` is its name unless given. Not `priced`: no simulation shows it."""

    def inject(bench: Bench) -> Injected:
        found = serving(bench, original, flags, right, **edits)
        return found if priced else replace(found, after=None)

    return Case(
        name,
        "fault",
        inject,
        (slug or name,),
        rung,
        fast=True,
        sweep=sweep,
        note=note,
    )


def depths(*wanted: int, **config: Any) -> Make:
    """The drafter that reads these depths."""
    return lambda bench: refit(bench, wanted, config=config or None)


def past_the_end(bench: Bench) -> Path:
    """The conversion of the drafter of depths 2, 4, 8 by a tool that does not know that 8 is not captured."""
    from safetensors.torch import load_file

    odd = load_file(refit(bench, (2, 4, 8)) / "model.safetensors")
    swap = {n: odd[n] for n in ("fc.weight", "input_norm.weight")}
    right = converted(bench, refit(bench, (2, 4, 7)))
    return copied(bench, right, nested(**{IDS: [1, 3, 7]}), tensors=lambda held: held | swap)


def turned(bench: Bench) -> Path:
    """A conversion that sorts the layer ids and leaves fc's columns in the trainer's order, 5, 2, 4."""
    return converted(bench, refit(bench, (5, 2, 4)))


def listed(bench: Bench) -> Path:
    """The same drafter as SpecForge saves it, which concatenates in the order of its ids."""
    return copied(bench, turned(bench), nested(**{IDS: [4, 1, 3]}) | {"eaglelab_dialect": "specforge"})


def residual_normed(bench: Bench) -> Path:
    return copied(bench, SPECULATORS, {"norm_before_residual": True})


CONFIG_ONLY = "only the trainer's config says so: this drafter was trained otherwise, and is better as served"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
WEIGHTS = (
    fault("lm-head-missing", tensors=without("lm_head")),
    fault("tied-head-reduced-vocab", config={"tie_word_embeddings": True}),
    fault(
        "served-map-missing",
        "d2t-not-exported|d2t-dropped",
        tensors=without("d2t", "t2d"),
        note="the conversion lost the map: the served file has none, and the engine applies none",
    ),
    fault("d2t-absolute", tensors=changed(d2t=lambda t: t + torch.arange(len(t)))),
    fault("midlayer-name", tensors=renamed("midlayer.", "decoder_layer.")),
    fault(
        "every-name-wrapped",
        "midlayer-name",
        tensors=lambda held: {f"module.{n}": t for n, t in held.items()},
        sweep="midlayer-name",
        note="saved from within a wrapper: no name is the loader's, and nothing is missing",
    ),
    fault("qk-norm-or-bias-dropped", original=bias_of_values),
    fault("trained-head-replaced", original=own_head, config={"draft_vocab_size": None}),
    fault("trained-embedding-replaced", original=frozen_signs),
    fault("head-dim-wrong", config={"head_dim": 32}),
    fault("drafter-width-differs", original=narrow, right=lambda bench: narrow(bench, "sglang")),
    fault("fc-width-differs", config=nested(**{IDS: [1, 3, 4, 6]})),
    fault(
        "checkpoint-dtype",
        original=small_head,
        flags=CHAIN.replace(" --dtype float32", ""),
        config={"torch_dtype": "float16"},
        tensors=lambda held: {n: t.half() if t.dtype == torch.bfloat16 else t for n, t in held.items()},
    ),
    fault("parameters-not-loaded", tensors=without("mlp.down_proj")),
    fault(
        "one-name-unknown",
        "tensors-dropped|parameters-not-loaded",
        tensors=renamed("mlp.gate_proj", "mlp.w1"),
        note="a tensor under a name that the loader does not know is dropped, and its parameter not loaded",
    ),
    fault("engine-refuses-drafter", original=own_head, remove=["draft_vocab_size"]),
    fault(
        "conversion-changed-tensors",
        tensors=changed(**{"midlayer.mlp.up_proj": lambda t: t.roll(1, 0)}),
        note="one tensor of the served file is not the trainer's",
    ),
    fault(
        "two-tensors-exchanged",
        "conversion-changed-tensors",
        tensors=exchanged("gate_proj", "up_proj"),
        sweep="conversion-changed-tensors",
    ),
    fault(
        "tensor-cut-short",
        "weights-not-sane",
        tensors=changed(**{"midlayer.self_attn.q_proj": lambda t: t[:100].contiguous()}),
        note="no value of the config is wrong: the other tensors bear it out",
    ),
    fault(
        "served-tensor-of-zeros",
        "conversion-changed-tensors|weights-not-sane",
        tensors=changed(**{"midlayer.self_attn.o_proj": torch.zeros_like}),
        sweep="conversion-changed-tensors",
        note="an export that was cut short leaves zeros: it is both",
    ),
)
LAYERS = (
    fault(
        "ids-copied-in-conversion",
        "ids-copied-in-conversion|ids-plus-one",
        3,
        config=nested(**{IDS: [2, 4, 5]}),
        note="the trainer's ids copied as they are, to which the engine adds one: both names say so",
    ),
    fault(
        "ids-off-by-one",
        "ids-off-by-one|embedding-counted",
        3,
        config=nested(**{IDS: [0, 2, 3]}),
        note="one layer early: an embedding counted on one side does just that",
    ),
    fault("ids-missing", rung=3, original=depths(2, 4, 6), config=nested(**{IDS: None})),
    fault("id-past-the-last-layer", rung=3, original=depths(2, 4, 8), right=past_the_end),
    fault(
        "chunks-in-another-order",
        "chunk-order",
        3,
        original=listed,
        right=turned,
        note="rows come by ascending depth, fc expects the trainer's order",
    ),
)
WIRING = (
    fault("norm-before-residual", original=residual_normed, note=CONFIG_ONLY),
    fault("norm-before-fc-not-applied", config=nested(norm_before_fc=False)),
    fault("norm-output", config={"norm_output": False}),
    fault("rope-theta", config={"rope_theta": 1e6}),
    fault("rope-theta-small", "rope-theta", config={"rope_theta": 100.0}, sweep="rope-theta"),
    fault(
        "override-args-reach-drafter",
        flags=CHAIN + """ --json-model-override-args '{"rope_theta": 100.0}'""",
        note="an override that was meant for the target",
    ),
    fault("rope-scaling", config={"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    fault("rope-scaling-yarn", "rope-scaling", config={"rope_scaling": YARN}, sweep="rope-scaling"),
    fault("mrope-or-partial-rotary", config={"partial_rotary_factor": 0.5}),
    fault(
        "rope-layout",
        "mrope-or-partial-rotary|wiring-difference",
        config={"rope_is_neox_style": False},
        note="the catalogue has no slug for the layout; half-split against interleaved",
    ),
    fault("sliding-window-ignored", original=windowed, note=CONFIG_ONLY),
    fault("multi-layer-drafter", original=two_layers, tensors=renamed("hidden_norm", "input_layernorm")),
    fault("draft-context-too-short", config={"max_position_embeddings": 64}, priced=False),
    fault(
        "eps",
        "wiring-difference",
        config={"rms_norm_eps": 0.3},
        note="no slug of its own: a field of the wiring that no known cause explains",
    ),
    fault("aux-hidden-state-off", config=nested(use_aux_hidden_state=False)),
)


def launched(name: str, flags: str, rung: int = 4) -> Case:
    """A fault of the launch: the served copy is right. On rung 5 only a server has a price for it."""
    return fault(name, rung=rung, flags=flags, priced=rung < 5)


LAUNCH = (
    launched("eagle-flag-on-eagle3-drafter", CHAIN.replace("EAGLE3", "EAGLE")),
    Case("draft-path-omitted", "fault", lambda bench: omitted(bench), ("draft-path-omitted",), 4, fast=True),
    launched("draft-attention-backend-inherited", CHAIN + " --attention-backend trtllm_mla", 5),
    launched("draft-quantization-inherited", CHAIN + " --quantization modelopt_fp4", 5),
)


def omitted(bench: Bench) -> Injected:
    """The whole command line, without the flag that names the drafter."""
    flags = f"python -m sglang.launch_server --model-path '{TARGET}' {CHAIN}"
    inputs = {"drafter": SPECULATORS, "target": TARGET, "launch": flags}
    return Injected(inputs, as_trained(bench, SPECULATORS), None)


CASES = (*WEIGHTS, *LAYERS, *WIRING, *LAUNCH)
