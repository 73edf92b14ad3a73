"""Faults of what the drafter is fed.

They are made where the target collects its states, so that a capture sees them, or (`late`) between worker
and drafter, behind the probe, where a capture does not.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from faultbench_plugin import Site, assigned, wrapped


@contextlib.contextmanager
def features(site: Site, change: Any, late: bool = False):
    """`change(rows, batch)` in place of a draft-extend's rows [n, k H]; batch is SGLang's ForwardBatch."""
    k = site.drafter.model.num_aux_hidden_states
    wide = site.drafter.model.fc.in_features

    def early(
        original: Any, input_ids: Any, states: Any, head: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = original(input_ids, states, head, batch, *args, **kwargs)
        if k > 1 and out.hidden_states is not None and out.hidden_states.shape[-1] == wide:
            out.hidden_states = change(out.hidden_states, batch)
        return out

    def behind(original: Any, input_ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        info = batch.spec_info
        rows = info.hidden_states
        if rows.shape[-1] != wide:
            return original(input_ids, positions, batch, *args, **kwargs)
        info.hidden_states = change(rows, batch)
        try:
            return original(input_ids, positions, batch, *args, **kwargs)
        finally:
            info.hidden_states = rows

    where, around = (site.drafter.model, behind) if late else (site.target.logits_processor, early)
    with wrapped(where, around):
        yield


def chunks(rows: Any, site: Site) -> list[Any]:
    return list(rows.chunk(site.drafter.model.num_aux_hidden_states, dim=-1))


@contextlib.contextmanager
def depths(site: Site, by: int = 0, to: tuple[int, ...] = ()):
    """The engine captures other depths than config and launch say: all moved `by`, or `to` these."""
    inner = site.target.model
    wanted = list(to) or [depth + by for depth in inner.layers_to_capture]
    with assigned(inner, "layers_to_capture", wanted):
        yield


def order(site: Site, by: tuple[int, ...] = (2, 1, 0), late: bool = False):
    """The chunks come in another order."""
    return features(site, lambda rows, _: torch.cat([chunks(rows, site)[i] for i in by], dim=-1), late)


def final_norm(site: Site, only: tuple[int, ...] = (0, 1, 2), late: bool = False):
    """The target's final norm is applied to what is captured."""
    norm = site.target.model.norm

    def change(rows: Any, _: Any) -> Any:
        parts = chunks(rows, site)
        return torch.cat([norm(p.contiguous()) if i in only else p for i, p in enumerate(parts)], dim=-1)

    return features(site, change, late)


def scaled(site: Site, by: float = 4.0, only: tuple[int, ...] = (0,), late: bool = False):
    """One chunk's numbers are multiplied, as when a scale of quantisation is left out."""

    def change(rows: Any, _: Any) -> Any:
        return torch.cat([p * by if i in only else p for i, p in enumerate(chunks(rows, site))], dim=-1)

    return features(site, change, late)


def rotated(site: Site, late: bool = False):
    """Every chunk in another basis (one random rotation), as of a target that was rotated to be quantised."""
    width = site.drafter.model.hidden_size_in
    draw = torch.Generator().manual_seed(11)
    turn, _ = torch.linalg.qr(torch.randn(width, width, generator=draw))
    return features(site, lambda rows, _: torch.cat([p @ turn for p in chunks(rows, site)], dim=-1), late)


def overflow(site: Site, largest: float = 8.0, late: bool = False):
    """Half precision overflows: what exceeds `largest` (in the units of the tiny target) becomes infinite."""
    return _clean(site, features(site, lambda rows, _: (rows * (65504.0 / largest)).half().float(), late))


def nan_rows(site: Site, every: int = 7, late: bool = False):
    """Every so many rows were never written: NaN."""

    def change(rows: Any, _: Any) -> Any:
        rows = rows.clone()
        rows[::every] = float("nan")
        return rows

    return _clean(site, features(site, change, late))


@contextlib.contextmanager
def _clean(site: Site, fault: Any):
    """Take NaN out of the drafter's KV pool afterwards: masked slots count 0 times their number."""
    with fault:
        yield
    for buffer in (site.pool.get_key_buffer(0), site.pool.get_value_buffer(0)):
        torch.nan_to_num_(buffer, 0.0, 0.0, 0.0)


def stale(site: Site, late: bool = False):
    """After a verify a request's rows are those of its verify before: a buffer that was not filled anew."""
    last: dict[int, Any] = {}  # row of the request pool -> its rows of the last verify

    def change(rows: Any, batch: Any) -> Any:
        pool = batch.req_pool_indices.tolist()
        if not (batch.forward_mode.is_target_verify() or batch.forward_mode.is_draft_extend_v2()):
            for request in pool:
                last.pop(request, None)
            return rows
        blocks = list(rows.chunk(len(pool)))
        found = [last.get(request, block) for request, block in zip(pool, blocks, strict=True)]
        last.update(zip(pool, blocks, strict=True))
        return torch.cat(found)

    return features(site, change, late)


def noise(site: Site, share: float = 0.5, late: bool = True):
    """Random numbers on top of the features, `share` of each row's spread."""
    draw = torch.Generator().manual_seed(5)

    def change(rows: Any, _: Any) -> Any:
        return rows + share * rows.std(-1, keepdim=True) * torch.randn(rows.shape, generator=draw)

    return features(site, change, late)


def zero_chunk(site: Site, index: int = 2, late: bool = True):
    """One chunk arrives as zeros."""

    def change(rows: Any, _: Any) -> Any:
        return torch.cat([p * (i != index) for i, p in enumerate(chunks(rows, site))], dim=-1)

    return features(site, change, late)


@contextlib.contextmanager
def partial_sums(site: Site):
    """Each rank hands over the last MLP's output before its sum over the ranks, as in sglang#28343."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce as summed

    inner = site.target.model
    parts: dict[int, Any] = {}

    def keep(depth: int) -> Any:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            parts[depth] = out.clone()
            return out

        return around

    def change(rows: Any, _: Any) -> Any:
        found = []
        for depth, chunk in zip(inner.layers_to_capture, chunks(rows, site), strict=True):
            found.append(chunk - summed(parts[depth].clone()) + parts[depth])
        return torch.cat(found, dim=-1)

    with contextlib.ExitStack() as stack:
        for depth in inner.layers_to_capture:
            stack.enter_context(wrapped(inner.layers[depth - 1].mlp, keep(depth)))
        stack.enter_context(features(site, change))
        yield


FAULTS = {
    "depths": depths,
    "order": order,
    "final-norm": final_norm,
    "scaled": scaled,
    "rotated": rotated,
    "overflow": overflow,
    "nan-rows": nan_rows,
    "stale": stale,
    "noise": noise,
    "zero-chunk": zero_chunk,
    "partial-sums": partial_sums,
}
