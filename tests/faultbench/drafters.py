"""Drafters built from the shipped one, most of them the same function with other tensors.

Each takes the bench and returns a folder in the trainer's form (speculators), the same folder each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .cases import SGLANG, SPECULATORS, TARGET, Bench
from .made import DEPTHS, EPS, Tensors, copied, refit

Edit = Callable[[Tensors], Tensors]
ATTENTION = "layers.0.self_attn."
SIZES = (("q", 128), ("k", 32), ("v", 32))


def shipped(bench: Bench) -> Path:
    """data/drafter-speculators, as it is."""
    return SPECULATORS


def variant(
    bench: Bench, key: str, config: dict[str, Any] | None = None, tensors: Edit | None = None
) -> Path:
    """An edited copy of the shipped drafter, made once."""
    return bench.once(f"variant {key}", lambda: copied(bench, SPECULATORS, config, tensors=tensors))


def inner(**values: Any) -> dict[str, Any]:
    """Fields of the nested layer config."""
    return {"transformer_layer_config": values}


def bias_of_values(bench: Bench) -> Path:
    """The same function: a bias of the values, taken off again by a bias of the output projection.

    Attention weights sum to one, so a bias of the values comes out of the mix as it went in.
    """

    def add(held: Tensors) -> Tensors:
        bias = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        mixed = bias.repeat_interleave(4, dim=0).flatten().float()  # 8 heads share 2 kv heads
        off = -(held[ATTENTION + "o_proj.weight"].float() @ mixed)
        zeros = {"q": 128, "k": 32}
        held |= {f"{ATTENTION}{p}_proj.bias": torch.zeros(n).bfloat16() for p, n in zeros.items()}
        return held | {
            ATTENTION + "v_proj.bias": bias.flatten(),
            ATTENTION + "o_proj.bias": off.bfloat16(),
        }

    return variant(bench, "bias", inner(attention_bias=True), add)


def frozen_signs(bench: Bench) -> Path:
    """The same function with an embedding of its own: some columns change sign, and their norm with them."""

    def flip(held: Tensors) -> Tensors:
        signs = torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0).bfloat16()
        norm = "layers.0.input_layernorm.weight"
        return held | {"embed_tokens.weight": held["embed_tokens.weight"] * signs, norm: held[norm] * signs}

    return variant(bench, "signs", {"embed_requires_grad": True}, flip)


def whole_head(held: Tensors) -> Tensors:
    """A head over the whole vocabulary; tokens that had no row get the mean row, which never is the best."""
    rows = held["lm_head.weight"].float()
    head = rows.mean(0, keepdim=True).repeat(1024, 1)
    head[torch.arange(len(rows)) + held["d2t"]] = rows
    left = {n: t for n, t in held.items() if n not in ("d2t", "t2d")}
    maps = {"d2t": torch.zeros(1024, dtype=held["d2t"].dtype), "t2d": torch.ones(1024, dtype=torch.bool)}
    return left | maps | {"lm_head.weight": head.bfloat16()}


def own_head(bench: Bench) -> Path:
    """The whole vocabulary with a head of its own and a map of zeros."""
    return variant(bench, "own head", {"draft_vocab_size": 1024}, whole_head)


def identity(bench: Bench) -> Path:
    """The whole vocabulary, and no map in the file."""

    def unmapped(held: Tensors) -> Tensors:
        return {n: t for n, t in whole_head(held).items() if n not in ("d2t", "t2d")}

    return variant(bench, "identity", {"draft_vocab_size": 1024}, unmapped)


def targets_head(bench: Bench) -> Path:
    """The whole vocabulary with the target's own head, as trainers start from: weak here, but no fault."""

    def share(held: Tensors) -> Tensors:
        from safetensors.torch import load_file

        return whole_head(held) | {
            "lm_head.weight": load_file(TARGET / "model.safetensors")["lm_head.weight"]
        }

    return variant(bench, "target's head", {"draft_vocab_size": 1024}, share)


def in_float32(bench: Bench) -> Path:
    """The same numbers, saved as float32."""
    return variant(
        bench,
        "float32",
        {"dtype": "float32"},
        lambda held: {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in held.items()},
    )


def untrained(bench: Bench) -> Path:
    """Noise in place of fc: as weak as a drafter can be."""

    def noise(held: Tensors) -> Tensors:
        draw = torch.Generator().manual_seed(6)
        return held | {"fc.weight": (torch.randn(held["fc.weight"].shape, generator=draw) * 0.05).bfloat16()}

    return variant(bench, "untrained", None, noise)


def wide_window(bench: Bench) -> Path:
    """A sliding window longer than any text it may see."""
    config = inner(layer_types=["sliding_attention"], sliding_window=2048, use_sliding_window=True)
    return variant(bench, "wide window", config)


def zero_biases(bench: Bench) -> Path:
    """Biases of queries, keys and values that are all zeros."""

    def add(held: Tensors) -> Tensors:
        return held | {f"{ATTENTION}{p}_proj.bias": torch.zeros(n).bfloat16() for p, n in SIZES}

    return variant(bench, "zero biases", inner(attention_bias=True), add)


def respelled(bench: Bench, dialect: str) -> Path:
    """The drafter without a norm before fc, in the names and config of one dialect."""
    from spellings import SPELLINGS

    def make() -> Path:
        from safetensors.torch import load_file, save_file

        config, layer, rest, kept = SPELLINGS[dialect]
        source = load_file(refit(bench, DEPTHS, "none") / "model.safetensors")
        named: Tensors = {}
        for name, tensor in source.items():
            if name.startswith("layers.0."):
                named[layer + name.removeprefix("layers.0.")] = tensor
            elif name.split(".")[0] in kept:
                named[name if name in ("lm_head.weight", "d2t", "t2d") else rest + name] = tensor
        path = bench.path()
        path.mkdir()
        values = {**config, "norm_output": True, "norm_before_residual": False}
        (path / "config.json").write_text(json.dumps(values))
        save_file(named, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return bench.once(f"respelled {dialect}", make)


def small_head(bench: Bench) -> Path:
    """The same choices from a head whose numbers float16 cannot hold."""
    return variant(
        bench, "small", None, lambda held: held | {"lm_head.weight": held["lm_head.weight"] * 2.0**-20}
    )


def windowed(bench: Bench) -> Path:
    """Trained with a sliding window of 16 tokens, says its config."""
    return variant(
        bench,
        "window",
        inner(layer_types=["sliding_attention"], sliding_window=16, use_sliding_window=True),
    )


def second_layer(strength: float) -> Edit:
    """Add a layer whose attention adds little; its norm's weight matters. `strength` 1e-6: none."""

    def add(held: Tensors) -> Tensors:
        draw = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=draw) * shape[-1] ** -0.5).bfloat16()

        new = {
            **{
                f"self_attn.{p}_proj.weight": noise(n, 128) for p, n in zip("qkv", (128, 32, 32), strict=True)
            },
            "self_attn.o_proj.weight": noise(128, 128) * strength,
            "mlp.gate_proj.weight": noise(384, 128),
            "mlp.up_proj.weight": noise(384, 128),
            "mlp.down_proj.weight": noise(128, 384) * 1e-6,
            "input_layernorm.weight": torch.full((128,), 0.02).bfloat16(),
            "post_attention_layernorm.weight": torch.ones(128).bfloat16(),
        }
        return held | {f"layers.1.{name}": tensor for name, tensor in new.items()}

    return add


def two_layers(bench: Bench) -> Path:
    """Two layers; the second, small as its norm makes it, does little harm, and much with a norm of ones."""
    config = inner(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    return variant(bench, "two", config, second_layer(8.0))


def silent_layer(bench: Bench) -> Path:
    """The same function: a second layer that adds next to nothing."""
    config = inner(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    return variant(bench, "silent", config, second_layer(1e-6))


def narrow(bench: Bench, form: str = "trainer") -> Path:
    """A drafter half as wide as its target, with noise for weights; "sglang": served without saying so."""

    def make() -> Path:
        from safetensors.torch import save_file

        path, draw = bench.path(), torch.Generator().manual_seed(2)
        shapes = {
            "embed_tokens.weight": (1024, 64), "fc.weight": (64, 384), "norm.weight": (64,),
            "lm_head.weight": (640, 64), "input_norm.weight": (384,),
            **{f"midlayer.{n}.weight": (64,) for n in ("input_layernorm", "hidden_norm")},
            "midlayer.post_attention_layernorm.weight": (64,),
            **{f"midlayer.self_attn.{p}_proj.weight": (n, 128) for p, n in SIZES},
            "midlayer.self_attn.o_proj.weight": (64, 128), "midlayer.mlp.gate_proj.weight": (192, 64),
            "midlayer.mlp.up_proj.weight": (192, 64), "midlayer.mlp.down_proj.weight": (64, 192),
        }  # fmt: skip
        tensors = {n: (torch.randn(s, generator=draw) * s[-1] ** -0.5).bfloat16() for n, s in shapes.items()}
        from safetensors.torch import load_file

        tensors |= {n: t for n, t in load_file(SGLANG / "model.safetensors").items() if n in ("d2t", "t2d")}
        values = json.loads((SGLANG / "config.json").read_text())
        values |= {"hidden_size": 64, "intermediate_size": 192}
        if form == "trainer":
            values["target_hidden_size"] = 128
        path.mkdir()
        (path / "config.json").write_text(json.dumps(values))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return bench.once(f"narrow {form}", make)


def target_copy(bench: Bench, noise: float) -> Path:
    """A fine-tune of the target: noise on every matrix, relative to its spread. The embedding stays."""
    import shutil

    from safetensors.torch import load_file, save_file

    path, draw = bench.path(), torch.Generator().manual_seed(3)
    shutil.copytree(TARGET, path)
    held = load_file(TARGET / "model.safetensors")
    for name, tensor in held.items():
        if tensor.ndim == 2:
            noisy = tensor.float() + noise * tensor.float().std() * torch.randn(tensor.shape, generator=draw)
            held[name] = noisy.to(tensor.dtype)
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    return path


def normed(state: torch.Tensor) -> torch.Tensor:
    """The state after the target's final norm."""
    from safetensors.torch import load_file

    weight = load_file(TARGET / "model.safetensors")["model.norm.weight"].float()
    return F.rms_norm(state, weight.shape, weight, EPS)
