"""Faults of what the engine does with right tensors: norms, feedback, positions, tokens, maps."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from faultbench_plugin import Site, assigned, wrapped


@contextlib.contextmanager
def _around_drafter(site: Site, change: Any):
    """`change(ids, positions, batch)` -> the (ids, positions) with which the drafter's model runs."""

    def around(original: Any, ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        ids, positions = change(ids, positions, batch)
        return original(ids, positions, batch, *args, **kwargs)

    with wrapped(site.drafter.model, around):
        yield


def _blocks(batch: Any) -> list[tuple[int, int, int]]:
    """(first row, end, accepted rows) of each request in a draft-extend."""
    accepted = getattr(batch.spec_info, "num_accept_tokens", None)
    found, start = [], 0
    for i, length in enumerate(batch.extend_seq_lens.tolist()):
        found.append((start, start + length, length if accepted is None else int(accepted[i])))
        start += length
    return found


def no_map(site: Site):
    """The vocabulary map is dropped: the drafter's ids are taken for the target's."""
    return assigned(site.worker, "hot_token_id", None)


def map_absolute(site: Site):
    """The stored offsets (target id - draft id) are taken for target ids."""
    ids = site.worker.hot_token_id
    return assigned(site.worker, "hot_token_id", ids - torch.arange(len(ids)))


@contextlib.contextmanager
def no_map_unseen(site: Site):
    """As `no_map`, but only while drafting: whoever looks at the worker's map finds it in place."""

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        with assigned(site.worker, "hot_token_id", None):
            return original(*args, **kwargs)

    with wrapped(site.worker, around, "draft_forward"):
        yield


@contextlib.contextmanager
def rope(
    site: Site, theta: float = 10000.0, half: bool = True, rotary: int | None = None, scaling: Any = None
):
    """Queries and keys are turned otherwise: theta, layout (half-split or interleaved), partial, scaled."""
    from sglang.srt.layers.rotary_embedding import get_rope

    now = site.attention.rotary_emb
    size = now.head_size
    other = get_rope(size, rotary or now.rotary_dim, now.max_position_embeddings, theta, half, scaling)
    with assigned(site.attention, "rotary_emb", other):
        yield


def feedback(site: Site):
    """What goes from one draft step to the next is normed where it should not be, or the other way round."""
    return assigned(site.drafter.model, "norm_output", not site.drafter.model.norm_output)


def no_input_norm(site: Site):
    """The norm before fc is not applied."""
    return wrapped(site.drafter.model.input_norm, lambda _original, rows: rows)


def no_hidden_norm(site: Site):
    """The decoder layer's norm of its features is not applied."""
    return wrapped(site.layer.hidden_norm, lambda _original, rows: rows)


@contextlib.contextmanager
def normed_residual(site: Site):
    """The residual is taken behind the norm."""
    layer = site.layer

    def forward(positions: Any, embeds: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        residual = layer.hidden_norm(hidden_states)
        rows = torch.cat([layer.input_layernorm(embeds), residual], dim=-1)
        rows = layer.self_attn(positions=positions, hidden_states=rows, forward_batch=forward_batch)
        rows, residual = layer.post_attention_layernorm(rows, residual)
        return layer.mlp(rows), residual

    with assigned(layer, "forward", forward):
        yield


def fc_bypassed(site: Site):
    """fc is not applied: the last chunk goes in as it is."""
    width = site.drafter.model.fc.out_features
    return wrapped(site.drafter.model.fc, lambda _original, rows: rows[:, -width:])


def embedding_shift(site: Site, by: int = 1):
    """Every token is looked up `by` rows off in the embedding."""
    embed = site.drafter.model.embed_tokens
    rows = embed.org_vocab_size
    return wrapped(embed, lambda original, ids: original((ids + by) % rows))


def token_shift(site: Site):
    """Features of position t are paired with token t, not with token t + 1."""
    last: dict[int, Any] = {}  # row of the request pool -> the token at its last committed position

    def change(ids: Any, positions: Any, batch: Any) -> Any:
        if batch.forward_mode.is_decode():
            return ids, positions
        old = ids.clone()
        for row, (start, end, accepted) in zip(batch.req_pool_indices.tolist(), _blocks(batch), strict=True):
            first = last.get(row) if int(positions[start]) else None
            ids[start + 1 : end] = old[start : end - 1]
            ids[start] = old[start] if first is None else first
            last[row] = old[start + accepted - 1].clone()
        return ids, positions

    def safely(ids: Any, positions: Any, batch: Any) -> Any:
        return change(ids.clone(), positions, batch)

    return _around_drafter(site, safely)


def step_offset(site: Site, by: int = 1):
    """Draft steps run at positions that are `by` off from those of the draft-extends."""

    def change(ids: Any, positions: Any, batch: Any) -> Any:
        return ids, positions + by if batch.forward_mode.is_decode() else positions

    return _around_drafter(site, change)


def frozen_steps(site: Site):
    """Every draft step of a round runs at the round's first position."""

    def change(ids: Any, positions: Any, batch: Any) -> Any:
        return ids, batch.seq_lens.clone().to(
            positions.dtype
        ) if batch.forward_mode.is_decode() else positions

    return _around_drafter(site, change)


@contextlib.contextmanager
def kept_kv(site: Site):
    """Keys and values that draft steps wrote stay: the draft-extend after verify does not write them anew."""
    drafts = site.worker.speculative_num_steps - 1

    def around(original: Any, ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_draft_extend_v2():
            return original(ids, positions, batch, *args, **kwargs)
        rows = [r for start, _, n in _blocks(batch) for r in range(start, start + min(n - 1, drafts))]
        slots = batch.out_cache_loc[rows].clone()
        buffers = [site.pool.get_key_buffer(0), site.pool.get_value_buffer(0)]
        old = [buffer[slots].clone() for buffer in buffers]
        out = original(ids, positions, batch, *args, **kwargs)
        for buffer, numbers in zip(buffers, old, strict=True):
            buffer[slots] = numbers
        return out

    with wrapped(site.drafter.model, around):
        yield


FAULTS = {
    "no-map": no_map,
    "map-absolute": map_absolute,
    "no-map-unseen": no_map_unseen,
    "rope": rope,
    "feedback": feedback,
    "no-input-norm": no_input_norm,
    "no-hidden-norm": no_hidden_norm,
    "normed-residual": normed_residual,
    "fc-bypassed": fc_bypassed,
    "embedding-shift": embedding_shift,
    "token-shift": token_shift,
    "step-offset": step_offset,
    "frozen-steps": frozen_steps,
    "kept-kv": kept_kv,
}
