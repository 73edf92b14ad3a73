"""Two faults at once: both must be named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .cases import FEATURES, SPECULATORS, TARGET, Bench, Case, Injected
from .conversion import IDS, YARN, Make, changed, depths, nested, renamed, serving, without
from .drafters import bias_of_values, frozen_signs, inner, normed, own_head, shipped, windowed
from .made import CHAIN, Tensors, as_served, as_trained, converted, copied, edit_masks, store
from .stored import mask_on_prompt
from .trainers import rare_words

EAGLE = CHAIN.replace("EAGLE3", "EAGLE")
MAP = "d2t-not-exported|d2t-dropped"
COPIED = "ids-copied-in-conversion|ids-plus-one"


def both(
    name: str,
    first: str,
    second: str,
    original: Make = shipped,
    flags: str = CHAIN,
    **edits: Any,
) -> Case:
    """Two faults between the trainer's folder and the served one."""

    def inject(bench: Bench) -> Injected:
        return serving(bench, original, flags, **edits)

    return Case(name, "pair", inject, (first, second), fast=True)


def with_dump(
    name: str, first: str, second: str, features: Make, drafter: Make = shipped, **edits: Any
) -> Case:
    """A fault of the stored features, and one of serving (edits of the conversion) or of the drafter."""

    def inject(bench: Bench) -> Injected:
        path = drafter(bench)
        inputs = {"drafter": path, "target": TARGET, "features": features(bench), "launch": CHAIN}
        served = path
        if edits:
            served = inputs["served_drafter"] = copied(bench, converted(bench, path), **edits)
        return Injected(inputs, as_trained(bench, SPECULATORS), as_served(bench, served))

    return Case(name, "pair", inject, (first, second))


def sequence(*edits: Any) -> Any:
    """One edit of the tensors after another."""

    def change(held: Tensors) -> Tensors:
        for edit in edits:
            held = edit(held)
        return held

    return change


def few_words(bench: Bench) -> Path:
    return copied(bench, SPECULATORS, tensors=rare_words)


CASES = (
    both("flag-and-feedback", "eagle-flag-on-eagle3-drafter", "norm-output", flags=EAGLE,
         config={"norm_output": False}),
    both("flag-and-theta", "eagle-flag-on-eagle3-drafter", "rope-theta", flags=EAGLE,
         config={"rope_theta": 1e6}),
    both("head-and-theta", "lm-head-missing", "rope-theta", tensors=without("lm_head"),
         config={"rope_theta": 1e6}),
    both("head-and-norm", "lm-head-missing", "norm-before-fc-not-applied", tensors=without("lm_head"),
         config=nested(norm_before_fc=False)),
    both("ids-and-norm", COPIED, "norm-before-fc-not-applied",
         config=nested(norm_before_fc=False, **{IDS: [2, 4, 5]})),
    both("ids-and-rotary", "ids-off-by-one|embedding-counted", "mrope-or-partial-rotary",
         config={"partial_rotary_factor": 0.5, **nested(**{IDS: [0, 2, 3]})}),
    both("default-ids-and-tie", "ids-missing", "tied-head-reduced-vocab", original=depths(2, 4, 6),
         config={"tie_word_embeddings": True, **nested(**{IDS: None})}),
    both("map-and-feedback", MAP, "norm-output", tensors=without("d2t", "t2d"),
         config={"norm_output": False}),
    both("map-and-name", MAP, "midlayer-name",
         tensors=sequence(without("d2t", "t2d"), renamed("midlayer.", "decoder_layer."))),
    both("aux-and-tie", "aux-hidden-state-off", "tied-head-reduced-vocab",
         config={"tie_word_embeddings": True, **nested(use_aux_hidden_state=False)}),
    both("window-and-theta", "sliding-window-ignored", "rope-theta", original=windowed,
         config={"rope_theta": 1e6}),
    both("backend-and-scaling", "draft-attention-backend-inherited", "rope-scaling",
         flags=CHAIN + " --attention-backend trtllm_mla", config={"rope_scaling": YARN}),
    both("embedding-and-scaling", "trained-embedding-replaced", "rope-scaling", original=frozen_signs,
         config={"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    both("replaced-head-and-feedback", "trained-head-replaced", "norm-output", original=own_head,
         config={"draft_vocab_size": None, "norm_output": False}),
    both("bias-and-ids", "qk-norm-or-bias-dropped", COPIED, original=bias_of_values,
         config=nested(**{IDS: [2, 4, 5]})),
    both("numbers-and-feedback", "conversion-changed-tensors", "norm-output",
         tensors=changed(**{"midlayer.mlp.up_proj": lambda t: t.roll(1, 0)}), config={"norm_output": False}),
    with_dump("dump-and-theta", "stored-features-shifted", "rope-theta",
              lambda bench: store(bench, (3, 5, 6)), config={"rope_theta": 1e6}),
    with_dump("teacher-and-head", "teacher-norm", "lm-head-missing",
              lambda bench: store(bench, last=normed), tensors=without("lm_head")),
    with_dump("mask-and-words", "loss-mask", "draft-vocab-coverage",
              lambda bench: edit_masks(bench, mask_on_prompt), few_words),
    with_dump("zeros-and-map", "weights-not-sane", "d2t-not-exported", lambda bench: FEATURES,
              lambda bench: copied(bench, SPECULATORS, tensors=sequence(
                  without("d2t", "t2d"), changed(**{"layers.0.mlp.up_proj": torch.zeros_like})))),
    with_dump("theta-of-training-and-feedback", "rope-theta", "norm-output", lambda bench: FEATURES,
              lambda bench: copied(bench, SPECULATORS, {
                  "norm_output": False, **inner(rope_parameters={"rope_theta": 100.0})})),
)  # fmt: skip
