"""Paged attention over SGLang's KV pool: the two attention operators of its CPU backend.

Signatures are those with which `srt/layers/attention/intel_amx_backend.py` (sglang 0.5.23) calls them. A
*slot* is a row of the pool; `req_to_token[r, p]` is the slot of position p of request row r.
"""

from __future__ import annotations

import torch
from torch import Tensor

DECODE_SCHEMA = (
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale,"
    " Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor attn_logits, Tensor req_to_token,"
    " Tensor req_pool_indices, Tensor seq_lens, float scale, float logit_cap, bool is_cross, int window,"
    " Tensor? encoder_lens, Tensor? sinks) -> ()"
)
EXTEND_SCHEMA = (
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer,"
    " float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,"
    " Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float scale, float logit_cap,"
    " bool is_cross, int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask,"
    " bool is_causal) -> ()"
)


def decode_attention(
    q, k_buffer, v_buffer, k_scale, v_scale, o, k, v, loc, attn_logits, req_to_token, req_pool_indices,
    seq_lens, scale, logit_cap, is_cross, window, encoder_lens, sinks,
) -> None:  # fmt: skip
    """One new token a sequence: store its k and v at `loc`, then attend over positions 0..seq_len-1 into `o`.

    q, o [n_sequences, heads, head_dim]; k, v [n_sequences, kv_heads * head_dim] (None: already stored);
    buffers [slots, kv_heads, head_dim]; seq_lens counts the new token. All sequences go in one padded batch.
    """
    _only_plain(k_buffer, is_cross, window, encoder_lens)
    if k is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    longest = int(seq_lens.max())
    slots = req_to_token[req_pool_indices, :longest]
    seen = torch.arange(longest) < seq_lens[:, None]  # padding reads some slot, but is never seen
    slots = slots.where(seen, 0).long()
    o.copy_(
        attend(q[:, None], k_buffer[slots], v_buffer[slots], seen[:, None], scale, logit_cap, sinks)[:, 0]
    )


def extend_attention(
    q, k, v, o, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens,
    extend_seq_lens, extend_start_loc, max_len_extend, scale, logit_cap, is_cross, window, encoder_lens,
    sinks, tree_mask, is_causal,
) -> None:  # fmt: skip
    """Several new tokens a request (prefill, chunk, draft-extend, verify); the caller has stored k and v.

    q, o [n_tokens, heads, head_dim]; request i owns rows `extend_start_loc[i]` on, `extend_seq_lens[i]` of
    them, the last of its `seq_lens[i]` positions. Among its new tokens the order is causal, or, in a tree,
    as `tree_mask` says: the requests' [n, n] masks, flattened, one after the other. Everything before the
    new tokens is visible.
    """
    _only_plain(k_buffer, is_cross, window, encoder_lens)
    mask_start = 0
    requests = (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)
    for row, total, n, start in zip(*(t.tolist() for t in requests), strict=True):
        seen = torch.ones(n, total, dtype=torch.bool)
        if tree_mask is not None:
            seen[:, total - n :] = tree_mask[mask_start : mask_start + n * n].view(n, n)
            mask_start += n * n
        elif is_causal:
            seen.tril_(total - n)
        slots = req_to_token[row, :total].long()
        new = slice(start, start + n)
        o[new] = attend(
            q[None, new], k_buffer[None, slots], v_buffer[None, slots], seen[None], scale, logit_cap, sinks
        )[0]


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, logit_cap: float, sinks) -> Tensor:
    """Softmax attention in float32, grouped heads without copies.

    q [batch, n, heads, d], k [batch, m, kv_heads, d], v [batch, m, kv_heads, dv], seen [batch, n, m] (True:
    may look), sinks [heads] or None (one more logit a head, that takes weight and gives nothing)
    -> [batch, n, heads, dv] float32.
    """
    batch, n, heads, d = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    q = (
        q.float()
        .view(batch, n, kv_heads, group, d)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, kv_heads, group * n, d)
    )
    logits = q @ k.float().permute(0, 2, 3, 1) * scale  # [batch, kv_heads, group * n, m]
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.view(batch, kv_heads, group, n, -1).masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, n, -1)
        weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    out = weights.reshape(batch, kv_heads, group * n, -1) @ v.float().transpose(1, 2)
    return out.view(batch, kv_heads, group, n, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _only_plain(k_buffer: Tensor, is_cross: bool, window: int, encoder_lens) -> None:
    if is_cross or encoder_lens is not None:
        raise NotImplementedError("eaglelab_cpu: no cross attention")
    if window > 0:
        raise NotImplementedError("eaglelab_cpu: no sliding window; serve a model with full attention")
    if not k_buffer.dtype.is_floating_point or k_buffer.element_size() < 2:
        raise NotImplementedError(f"eaglelab_cpu: no {k_buffer.dtype} KV cache; use float32 or bfloat16")
