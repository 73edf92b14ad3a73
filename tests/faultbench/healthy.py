"""Healthy variants, some of them odd: nothing here may raise an alarm.

Without a capture the verdict is "inconclusive" at best, and nothing may fail; with one it must be "healthy".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .cases import FEATURES, GOLDEN, SGLANG, SPECULATORS, TARGET, Bench, Case, Injected
from .conversion import IDS, Make, depths, listed, nested, renamed
from .drafters import (
    identity,
    in_float32,
    own_head,
    respelled,
    shipped,
    silent_layer,
    targets_head,
    untrained,
    wide_window,
    zero_biases,
)
from .made import (
    CHAIN,
    Streams,
    Tensors,
    as_served,
    as_trained,
    converted,
    copied,
    edit_masks,
    edit_stored,
    prompts,
    refit,
    store,
    streams_of,
    target_model,
)

HALF = {"torch_dtype": "float16"}
TREE = CHAIN.replace("topk 1", "topk 4").replace("draft-tokens 6", "draft-tokens 16")


def odd(
    name: str,
    original: Make = shipped,
    flags: str = CHAIN,
    features: Callable[[Bench], Path] | None = None,
    capture: bool = False,
    copy: bool = True,
    trained_on: bool = False,
    fast: bool = True,
    **edits: Any,
) -> Case:
    """A variant: the trainer's folder, its conversion (with edits that change nothing), perhaps its features.

    trained_on: stored features at its depths are given, so that the training is doubted too (seconds).
    copy: the conversion is given too; else diagnose converts, or takes the folder as it is. capture: the one
    of data/, which another spelling of the same tensors must agree with.
    """

    def inject(bench: Bench) -> Injected:
        trainers = original(bench)
        inputs: dict[str, Any] = {"drafter": trainers, "target": TARGET}
        if copy:
            inputs["served_drafter"] = copied(bench, converted(bench, trainers), **edits)
        if capture:
            inputs["capture"] = GOLDEN
        else:
            inputs["launch"] = flags
        if features or trained_on:
            inputs["features"] = features(bench) if features else fitting(bench, trainers)
        served = inputs.get("served_drafter", trainers)
        return Injected(inputs, as_trained(bench, trainers), as_served(bench, served, flags))

    return Case(name, "healthy", inject, fast=fast)


def fitting(bench: Bench, trainers: Path) -> Path:
    """Stored features at the depths of a drafter."""
    from eaglelab.checkpoint import open_checkpoint, open_target

    wanted = open_checkpoint(trainers).depths_in(open_target(TARGET).facts)
    return FEATURES if wanted == (2, 4, 5) else bench.once(f"stored {wanted}", lambda: store(bench, wanted))


def sampled(bench: Bench) -> Path:
    """Features of texts that the target drew at temperature 1: its argmax is often another token."""

    def make() -> list[Streams]:
        torch.manual_seed(0)
        found = []
        for ids in prompts(bench)[:4]:
            one = torch.tensor([ids])
            with torch.no_grad():
                out = target_model(bench).generate(
                    one, attention_mask=torch.ones_like(one), max_new_tokens=128, do_sample=True, top_k=0
                )
            found.append(streams_of(bench, out[0].tolist(), len(ids)))
        return found

    return store(bench, texts=bench.once("sampled", make), dataset=False)


def as_float32(held: Tensors) -> Tensors:
    return held | {"hidden_states": held["hidden_states"].float()}


def in_half(held: Tensors) -> Tensors:
    return {n: t.half() if t.dtype == torch.bfloat16 else t for n, t in held.items()}


def with_buffers(held: Tensors) -> Tensors:
    """A file that holds the rope's buffers too, as older transformers saved them."""
    buffer = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    return held | {"midlayer.self_attn.rotary_emb.inv_freq": buffer}


def with_embedding(held: Tensors) -> Tensors:
    """The served copy brings the target's embedding along, which the engine shares anyway."""
    from safetensors.torch import load_file

    return held | {
        "embed_tokens.weight": load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    }


def named_by(dialect: str) -> Case:
    return odd(f"spelled-{dialect}", lambda bench: respelled(bench, dialect), copy=False)


def trained(name: str, original: Make = shipped, **more: Any) -> Case:
    """A drafter that is odd itself: its training is doubted, and must stand. A few of them are in FAST=1."""
    return odd(name, original, trained_on=True, fast=name in QUICK, **more)


QUICK = ("as-shipped", "head-of-the-target", "five-depths", "chunks-reordered-by-conversion", "weak-drafter")
BACKENDS = " --attention-backend trtllm_mla --speculative-draft-attention-backend fa3"
UNQUANTISED = " --quantization fp8 --speculative-draft-model-quantization unquant"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": None}
WIRINGS = (
    trained("as-shipped"),
    trained("full-vocabulary-zero-offsets", own_head),
    trained("identity-map", identity),
    trained("head-of-the-target", targets_head, config={"draft_vocab_size": None}),
    trained("two-depths", depths(3, 5)),
    trained("five-depths", depths(1, 2, 4, 5, 7)),
    trained("depth-zero", depths(0, 3, 5)),
    trained("chunks-reordered-by-conversion", listed),
    trained("ids-in-another-order", lambda bench: copied(bench, SPECULATORS, {IDS: [5, 2, 4]})),
    trained("norm-per-chunk", lambda bench: refit(bench, (2, 4, 5), "per-chunk")),
    trained("no-norm-before-fc", lambda bench: refit(bench, (2, 4, 5), "none")),
    trained("second-layer-silent", silent_layer),
    trained("weak-drafter", lambda bench: refit(bench, (2, 4, 5), noise=1.5)),
    trained("few-directions-learned", lambda bench: refit(bench, (2, 4, 5), rank=6)),
    trained("hardly-anything-learned", lambda bench: refit(bench, (2, 4, 5), rank=2)),
    trained("untrained-drafter", untrained),
    trained("window-wider-than-any-text", wide_window),
    trained("biases-of-zeros", zero_biases),
    trained("saved-as-float32", in_float32, tensors=lambda held: {n: halved(t) for n, t in held.items()}),
)


def halved(tensor: torch.Tensor) -> torch.Tensor:
    """Served in bfloat16, which holds every one of these numbers."""
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


FILES = (
    odd("ids-defaulted", config=nested(**{IDS: None})),
    odd("ids-in-both-places", config={IDS: [1, 3, 4]}),
    odd("rope-in-the-new-form", config=ROPE, remove=["rope_theta"]),
    odd("config-of-few-keys", remove=["head_dim", "bos_token_id", "eos_token_id", "fc_norm", "torch_dtype"]),
    odd("all-in-float16", flags=CHAIN.replace("float32", "float16"), config=HALF, tensors=in_half),
    odd("named-layers-0", tensors=renamed("midlayer.", "model.layers.0.")),
    odd("rope-buffers-in-the-file", tensors=with_buffers),
    odd("embedding-brought-along", tensors=with_embedding),
    odd("tree", flags=TREE),
    odd("two-ranks", flags=CHAIN + " --tp-size 2"),
    odd("own-attention-backend", flags=CHAIN + BACKENDS),
    odd("target-alone-quantised", flags=CHAIN + UNQUANTISED),
    *(named_by(name) for name in ("safeailab", "specforge", "torchspec", "vllm", "angelslim", "automodel")),
    *(named_by(name) for name in ("model-optimizer", "speculators-0.1")),
)
DUMPS = (
    odd("stored-in-float32", features=lambda bench: edit_stored(bench, as_float32)),
    odd("mask-of-everything", features=lambda bench: edit_masks(bench, lambda m: [0] + [1] * (len(m) - 1))),
    odd("sampled-texts", features=sampled),
)
CAPTURED = (
    odd("golden-capture", capture=True, trained_on=True),
    odd("golden-capture-other-names", capture=True, tensors=renamed("midlayer.", "model.layers.0.")),
    odd("golden-capture-served-folder-alone", lambda bench: SGLANG, capture=True, copy=False),
    odd("golden-capture-trainers-folder-alone", lambda bench: SPECULATORS, capture=True, copy=False),
)
CASES = (*WIRINGS, *FILES, *DUMPS, *CAPTURED)
