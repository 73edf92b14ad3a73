"""Bookkeeping of KV slots: which row of the pool holds which position of which request.

`req_to_token[r, p]` is the slot of position p of the request in row r. Several operators read or write it
over a ragged range of positions, one range a request; `_cells` turns those ranges into two flat index
lists. Signatures follow the callers in sglang 0.5.23: `kernels/ops/speculative/{cache_locs,eagle}.py`,
`kernels/ops/kvcache/cache_move.py`, `srt/mem_cache/allocation.py`.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor


def _cells(rows: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every cell of the ranges [start, end) of `rows`, in order: two int64 [total]."""
    start, counts = start.long(), (end - start).long()
    before = counts.cumsum(0) - counts  # cells in front of each range
    columns = torch.arange(int(counts.sum())) + (start - before).repeat_interleave(counts)
    return rows.long().repeat_interleave(counts), columns


def assign_req_to_token_pool(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
) -> None:
    """Write the flat list of new slots into the requests' ranges of positions."""
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def assign_extend_cache_locs(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
) -> None:
    """Read the slots of the requests' ranges of positions into one flat list."""
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: len(rows)] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
) -> None:
    """Read the topk * num_steps slots that follow each request's committed tokens."""
    assign_extend_cache_locs(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def build_draft_decode_metadata(
    req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len
) -> Tensor:
    """A page table for draft steps: one row a branch [n_requests * topk, pool_len].

    A branch sees its request's committed tokens, then its own num_steps draft slots. The pool keeps draft
    slots as [request, branch, step], so those of branch b start at position seq_len + b * num_steps.
    """
    branch_rows = req_pool_indices.long().repeat_interleave(topk)[:, None]
    table = req_to_token[branch_rows[:, 0]]  # advanced indexing copies
    after = seq_lens.long().repeat_interleave(topk)[:, None] + torch.arange(num_steps)
    branch = torch.arange(topk).repeat(len(seq_lens))[:, None]
    table[torch.arange(len(table))[:, None], after] = req_to_token[branch_rows, after + branch * num_steps]
    return table


def fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, accept_stride) -> None:
    """The last committed token of each request; accept_lens counts it."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """The slots of accepted nodes, in order (accept_index is -1 where nothing was accepted)."""
    index = accept_index.flatten()
    kept = out_cache_loc[index[index >= 0].long()]
    accept_out_cache_loc[: len(kept)] = kept


def copy_all_layer_kv_cache(data_ptrs, strides, tgt_loc, src_loc) -> None:
    """Move rows src_loc -> tgt_loc inside every layer's buffer, given as address and bytes of a row."""
    target, source = tgt_loc.long().numpy(), src_loc.long().numpy()
    if len(target) == 0:
        return
    n_rows = int(max(target.max(), source.max())) + 1
    for address, row_size in zip(data_ptrs.view(torch.int64).tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (n_rows * row_size)).from_address(address)
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(n_rows, row_size)
        rows[target] = rows[source]  # the right side is copied first, so overlapping moves are safe


def rotate_input_ids(*args) -> None:
    """SGLang imports it with the rest; only its multi-layer EAGLE worker would call it."""
    raise NotImplementedError("eaglelab_cpu: no multi-layer EAGLE")
