"""Faults that are in nobody's catalogue: eaglelab has no name for them, and must still find the rung."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from faultbench_plugin import Site, assigned, wrapped
from faultbench_plugin.wiring import _around_drafter, _blocks


def softmax_scale(site: Site, by: float = 3.0):
    """Attention's logits are scaled by another factor than 1 / sqrt(head_dim)."""
    return assigned(site.attention.attn, "scaling", site.attention.attn.scaling * by)


@contextlib.contextmanager
def flipped_head(site: Site, heads: tuple[int, ...] = (0, 1, 2, 3)):
    """The output of some attention heads has the other sign."""
    size = site.attention.head_dim

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs).clone()
        for head in heads:
            out[..., head * size : (head + 1) * size] *= -1
        return out

    with wrapped(site.attention.attn, around):
        yield


def half_mlp(site: Site):
    """The second half of the MLP's inner neurons gives nothing."""

    def around(original: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        rows = rows.clone()
        rows[..., rows.shape[-1] // 2 :] = 0
        return original(rows, *args, **kwargs)

    return wrapped(site.layer.mlp.down_proj, around)


def other_activation(site: Site):
    """The MLP's gate goes through a sigmoid in place of silu."""

    def around(_original: Any, rows: Any) -> Any:
        gate, up = rows.chunk(2, dim=-1)
        return torch.sigmoid(gate) * up

    return wrapped(site.layer.mlp.act_fn, around)


def bonus_embedding(site: Site):
    """The last committed token of a draft-extend is looked up as the one before it."""

    def change(ids: Any, positions: Any, batch: Any) -> Any:
        if not batch.forward_mode.is_decode():
            ids = ids.clone()
            for start, _, accepted in _blocks(batch):
                ids[start + accepted - 1] = ids[start + max(accepted - 2, 0)]
        return ids, positions

    return _around_drafter(site, change)


def second_best(site: Site, every: int = 3):
    """At every third position a draft step takes the second best token."""

    def around(original: Any, ids: Any, states: Any, head: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(ids, states, head, batch, *args, **kwargs)
        if batch.forward_mode.is_decode():
            rows = (batch.positions % every == 0).nonzero().flatten()
            logits = out.next_token_logits
            logits[rows, logits[rows].argmax(-1)] = float("-inf")
        return out

    return wrapped(site.drafter.logits_processor, around)


def kv_heads_swapped(site: Site):
    """The keys of two key-value heads are exchanged, the values are not."""
    attention = site.attention
    q, kv = attention.q_size, attention.kv_size

    def around(original: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        out, bias = original(rows, *args, **kwargs)
        keys = out[..., q : q + kv]
        return torch.cat([out[..., :q], keys.roll(kv // 2, -1), out[..., q + kv :]], dim=-1), bias

    return wrapped(attention.qkv_proj, around)


def no_sum(site: Site):
    """Ranks do not add up what their attention heads give: each goes on with its own part."""
    return assigned(site.attention.o_proj, "reduce_results", False)


FAULTS = {
    "softmax-scale": softmax_scale,
    "flipped-head": flipped_head,
    "half-mlp": half_mlp,
    "other-activation": other_activation,
    "bonus-embedding": bonus_embedding,
    "second-best": second_best,
    "kv-heads-swapped": kv_heads_swapped,
    "no-sum": no_sum,
}
