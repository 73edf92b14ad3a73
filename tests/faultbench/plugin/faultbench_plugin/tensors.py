"""Faults of the drafter's live tensors: not loaded, loaded into the wrong place, replaced."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from faultbench_plugin import Site

NORMS = (
    "input_norm",
    "layers.0.hidden_norm",
    "layers.0.input_layernorm",
    "layers.0.post_attention_layernorm",
    "norm",
)


@contextlib.contextmanager
def held(*tensors: Any):
    """The numbers that these tensors hold now come back afterwards."""
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for tensor, numbers in zip(tensors, before, strict=True):
                tensor.copy_(numbers)


def _named(site: Site, name: str) -> Any:
    return dict(site.drafter.named_parameters(remove_duplicate=False))[name]


@contextlib.contextmanager
def initial(site: Site, name: str = "model.layers.0.self_attn.qkv_proj.weight", std: float = 0.02):
    """A tensor that was never loaded: random numbers of an initialisation; std 0: zeros."""
    tensor = _named(site, name)
    with held(tensor):
        tensor.copy_(std * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
        yield


@contextlib.contextmanager
def block_initial(site: Site, std: float = 0.02):
    """The whole decoder layer was never loaded: matrices random, norms ones."""
    found = dict(site.layer.named_parameters())
    draw = torch.Generator().manual_seed(3)
    with held(*found.values()):
        for tensor in found.values():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.copy_(std * torch.randn(tensor.shape, generator=draw))
        yield


@contextlib.contextmanager
def norms_at_ones(site: Site, only: tuple[str, ...] = NORMS):
    """Norm weights were never loaded."""
    found = [_named(site, f"model.{name}.weight") for name in only]
    with held(*found):
        for tensor in found:
            tensor.fill_(1.0)
        yield


@contextlib.contextmanager
def targets_head(site: Site):
    """The target's head, its rows of the draft vocabulary, although the drafter trained its own."""
    head, theirs = site.drafter.lm_head.weight, site.target.lm_head.weight
    ids = site.drafter.hot_token_id
    with held(head):
        head[: len(ids)].copy_(theirs[ids])
        yield


@contextlib.contextmanager
def swapped(site: Site):
    """The fused projection was filled in another order: keys where values belong."""
    tensor, attention = _named(site, "model.layers.0.self_attn.qkv_proj.weight"), site.attention
    q, kv = attention.q_size, attention.kv_size
    with held(tensor):
        k, v = tensor[q : q + kv].clone(), tensor[q + kv :].clone()
        tensor[q : q + kv], tensor[q + kv :] = v, k
        yield


@contextlib.contextmanager
def quantized(site: Site, bits: int = 3):
    """The drafter's matrices went through a quantisation of few bits, a scale a tensor."""
    found = [t for n, t in site.drafter.named_parameters() if t.dim() == 2 and "embed" not in n]
    with held(*found):
        for tensor in found:
            step = tensor.abs().max() / (2 ** (bits - 1) - 0.5)
            tensor.copy_((tensor / step).round() * step)
        yield


@contextlib.contextmanager
def other_ranks_shard(site: Site, rank: int = 1):
    """One rank's part of the MLP is that of the rank before it."""
    from sglang.srt.distributed import get_tp_group

    mlp = site.layer.mlp
    with held(mlp.gate_up_proj.weight, mlp.down_proj.weight):
        group = get_tp_group()
        for tensor in (mlp.gate_up_proj.weight, mlp.down_proj.weight):
            whole = group.all_gather(tensor.detach().clone().contiguous(), dim=0)
            if group.rank_in_group == rank:
                tensor.copy_(whole[: tensor.shape[0]])
        yield


FAULTS = {
    "initial": initial,
    "block-initial": block_initial,
    "norms-at-ones": norms_at_ones,
    "targets-head": targets_head,
    "swapped": swapped,
    "quantized": quantized,
    "other-ranks-shard": other_ranks_shard,
}
