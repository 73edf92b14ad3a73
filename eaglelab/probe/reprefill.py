"""Re-prefill: record the residual stream of a text at chosen depths, through SGLang's own collector.

Which requests: those whose id starts with the nonce that the main process put in the environment before it
started the schedulers: `NONCE.DEPTHS.ORIGINAL`, DEPTHS "all" or "0-4-8". To decide, a rank looks only at
the batch, the environment and the launch, never at whether it is armed: capturing on some ranks and not on
others could change the collectives that they share, and hang the server.

How: for one target prefill, `layers_to_capture` of the inner model (the one with the layers) lists every
wanted depth, and what its forward returns is cut back to what the drafter always gets. A depth k below n
comes through the `capture` argument that layer k takes, where a deferred addition is complete; depth n is
what the final norm read, and `final` what it returned (sglang 0.5.23 models/llama.py,
layers/layer_boundary).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from eaglelab.probe import engine, spool
from eaglelab.probe.session import Arrays

BUDGET = "EAGLELAB_REPREFILL_BYTES"


def budget() -> int:
    return int(os.environ.get(BUDGET, 4 << 30))


def inner_model(worker: Any) -> Any:
    """The module that holds the layers and collects from them; None where the architecture has none."""
    for module in engine.target_model(worker).modules():
        if hasattr(module, "layers_to_capture") and hasattr(module, "layers") and hasattr(module, "norm"):
            return module
    return None


def off(worker: Any) -> str | None:
    """Why a re-prefill cannot run on this server; None when it can. The same on every rank."""
    if engine.parallel("nnodes", 1) > 1:
        return "the server spans several nodes"
    if engine.parallel("pp_size", 1) > 1:
        return "the server is pipeline parallel"
    if not engine.graph_backend_disabled("PREFILL", worker):
        return "prefill replays CUDA graphs (by reading); relaunch with --cuda-graph-backend-prefill disabled"
    if inner_model(worker) is None:
        return f"{type(engine.target_model(worker)).__name__} does not collect hidden states by layer"
    return None


def _depths(rid: str, nonce: str, layers: int) -> list[int] | None:
    """The depths that this request id asks for; None when it is no request for a re-prefill."""
    if not nonce or not rid.startswith(nonce + "."):
        return None
    wanted = rid[len(nonce) + 1 :].partition(".")[0]
    if wanted == "all":
        return list(range(layers + 1))
    depths = sorted({int(d) for d in wanted.split("-")})
    if not all(0 <= d <= layers for d in depths):
        raise ValueError(f"depths {wanted}: the target has {layers} layers")
    return depths


def plan(worker: Any, batch: Any) -> list[int] | None:
    """Depths to record in this batch: a function of batch, environment and launch alone."""
    nonce = os.environ.get(spool.NONCE, "")
    if not any(nonce and r.rid.startswith(nonce) for r in batch.reqs):
        return None
    if not batch.forward_mode.is_extend() or off(worker):  # an older release decodes in the same method
        return None
    inner = inner_model(worker)
    layers = len(inner.layers)
    wanted = [_depths(r.rid, nonce, layers) for r in batch.reqs]
    depths = sorted({d for one in wanted if one for d in one})
    tokens = sum(map(int, batch.extend_lens))
    row = inner.norm.weight.numel() * inner.norm.weight.element_size()
    return depths if tokens * row * len(depths) <= budget() else None


@contextlib.contextmanager
def collecting(
    inner: Any, depths: list[int], failed: Callable[[Exception], None]
) -> Iterator[dict[str, Any]]:
    """While open, a forward of `inner` leaves its streams in the yielded dict and returns the usual output.

    What goes wrong while more than usual is collected goes to `failed`; then the forward runs once more as
    if we were not there, and there are no streams. It reads its inputs and writes the same cache rows, so
    that a second run changes nothing.
    """
    streams: dict[str, Any] = {}
    before, n = inner.layers_to_capture, len(inner.layers)
    usual, original = list(before), inner.forward
    wanted = sorted({d for d in depths if d < n} | set(usual))

    def forward(*args: Any, **kwargs: Any) -> Any:
        inner.layers_to_capture = wanted
        try:
            out = original(*args, **kwargs)
            chunks = _chunks(out, len(wanted)) if wanted else []
            final, aux = out if wanted else (out, None)
            given = (final, _cut(aux, chunks, [wanted.index(d) for d in usual])) if usual else final
            streams.update({f"depth{d}": chunks[i] for i, d in enumerate(wanted) if d in depths})
            streams["final"] = final
            return given
        except Exception as error:
            if _of_this_rank_alone(error):
                raise  # the other ranks went on: a second run here would meet them in the wrong collective
            streams.clear()
            failed(error)
        finally:
            inner.layers_to_capture = before
        return original(*args, **kwargs)

    def after_norm(_module: Any, args: tuple, out: Any) -> None:
        try:
            streams[f"depth{n}"] = out[1].clone() if isinstance(out, tuple) else args[0].clone()
        except Exception as error:
            failed(error)

    hook = inner.norm.register_forward_hook(after_norm) if n in depths else None
    inner.forward = forward
    try:
        yield streams
    finally:
        vars(inner).pop("forward", None)  # the class's own comes back
        inner.layers_to_capture = before
        if hook is not None:
            hook.remove()


def _of_this_rank_alone(error: Exception) -> bool:
    """Out of memory on one of several ranks. Any other error of form is the same on all of them."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) and engine.parallel("tp_size", 1) > 1


def _chunks(out: Any, count: int) -> list[Any]:
    """The captured chunks, from a list or from one packed tensor. ValueError for anything else."""
    if isinstance(out, tuple) and len(out) == 2:
        aux = out[1]
        if isinstance(aux, list):
            if len(aux) == count:
                return list(aux)
        elif aux.shape[-1] == count * out[0].shape[-1]:
            return list(aux.chunk(count, dim=-1))
    raise ValueError(f"the model returned something else than its output and {count} collected states")


def _cut(aux: Any, chunks: list[Any], keep: list[int]) -> Any:
    """`aux` with the usual chunks only, in the form in which the model returned it."""
    if isinstance(aux, list):
        kept = type(aux)()
        kept.extend(chunks[i] for i in keep)
        return kept
    import torch

    return torch.cat([chunks[i] for i in keep], dim=-1)


def around(recorder: Any, original: Callable, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of EAGLEWorkerV2._forward_prefill_batch, before 0.5.21 of forward_batch_generation."""

    def failed(error: Exception) -> None:
        with contextlib.suppress(Exception):
            (recorder.session or recorder).failed("reprefill", error)

    streams: dict[str, Any] = {}
    ids, layers = None, 0
    with contextlib.ExitStack() as stack:
        try:
            if depths := plan(worker, batch):
                inner = inner_model(worker)
                layers = len(inner.layers)
                streams = stack.enter_context(collecting(inner, depths, failed))
                ids = batch.input_ids.clone()  # the draft extend replaces them
        except Exception as error:
            recorder.failed("reprefill", error)
        out = original(worker, batch, *args, **kwargs)
    session = recorder.session
    if session is not None and streams:
        try:
            _record(session, batch, ids, streams, layers)
        except Exception as error:
            failed(error)
    return out


def _record(session: Any, batch: Any, ids: Any, streams: dict[str, Any], layers: int) -> None:
    nonce, start = os.environ[spool.NONCE], 0
    for request, length, prefix in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
        end = start + int(length)
        depths = _depths(request.rid, nonce, layers)
        of = request.rid[len(nonce) + 1 :].partition(".")[2]
        if depths and of.startswith(session.arm.rid_prefix):
            names = [f"depth{d}" for d in depths] + ["final"]
            tensors = {name: streams[name][start:end].clone() for name in names}
            tensors["ids"] = ids[start:end].clone()
            meta = {
                "mode": batch.forward_mode.name,
                "graph": "eager",
                "rids": [of],
                "of": of,
                "seq_lens": [int(prefix)],
                "lengths": [int(length)],
            }
            session.record("reprefill", [f"re-prefill of {of}"], tensors, _finish(meta))
        start = end


def _finish(meta: dict[str, Any]) -> Callable:
    def finish(arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        return {**meta, "token_ids": [arrays.pop("ids")[0].tolist()]}, arrays

    return finish
