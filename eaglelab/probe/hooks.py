"""The hooks on SGLang's draft worker (sglang 0.5.23 speculative/eagle_worker_v2.py).

They lie around what calls the graph runners, so that they are reached with or without CUDA graphs (by
reading). Each hands the call through unchanged and lets SGLang's own exceptions pass; ours are swallowed and
counted. Rows are copied before the original runs: under EAGLE without `fc` the drafter adds into its input
in place, and graphs overwrite their buffers (by reading). Only rows of requests that the session wants are
copied off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from eaglelab.probe import engine, reprefill, spool
from eaglelab.probe.recorder import Recorder
from eaglelab.probe.session import Arrays, Finish, Session
from eaglelab.releases import NEWEST, at_least

logger = logging.getLogger("eaglelab.probe")

MODULE = "sglang.srt.speculative.eagle_worker_v2"
GRAPHS = {
    "draft": "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute",
    "decode_extend": "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"
    ".EAGLEDraftExtendCudaGraphRunner.execute",
}

OWN_PREFILL = (0, 5, 21)  # the first release in which a prefill has a method of its own

Spans = list[tuple[int, int]]


def gather(tensor: Any, spans: Spans) -> Any:
    """Rows of `spans` in a new tensor, on the tensor's own device and the current stream."""
    import torch

    if spans[-1][1] > tensor.shape[0]:
        raise ValueError(f"rows to {spans[-1][1]} wanted, the tensor has {tensor.shape[0]}")
    joined = [spans[0]]
    for start, end in spans[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    if len(joined) == 1:
        return tensor[joined[0][0] : joined[0][1]].clone()
    return torch.cat([tensor[start:end] for start, end in joined])


def spans_of(lengths: list[int], wanted: list[int]) -> Spans:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return [(ends[j], ends[j + 1]) for j in wanted]


def split(flat: Any, lengths: list[int]) -> list[list[int]]:
    values, out = flat.tolist(), []
    for length in lengths:
        out.append(values[:length])
        values = values[length:]
    return out


class Hooks:
    def __init__(self, recorder: Recorder, version: str = NEWEST) -> None:
        self.recorder, self.version = recorder, version
        self._graph_ran: dict[str, bool] = {}

    def targets(self) -> dict[str, Callable]:
        worker = f"{MODULE}.EagleDraftWorker"
        whole = at_least(self.version, OWN_PREFILL)
        prefill = "_forward_prefill_batch" if whole else "forward_batch_generation"
        return {
            f"{worker}.alloc_memory_pool": self.attach,
            f"{worker}._draft_extend_for_prefill": self.prefill_extend,
            f"{worker}.draft": self.draft,
            f"{worker}._draft_extend_for_decode": self.decode_extend,
            f"{MODULE}.EAGLEWorkerV2.{prefill}": self.prefill,
            GRAPHS["draft"]: self.draft_graph,
            GRAPHS["decode_extend"]: self.extend_graph,
        }

    # -- hooks

    def attach(self, original: Callable, worker: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(worker, *args, **kwargs)
        try:
            self.recorder.hooks = {name: took(name, hook) for name, hook in self.targets().items()}
            self.recorder.attach(worker)
        except Exception as error:
            self.recorder.failed("attach", error)
        return out

    def prefill_extend(
        self, original: Callable, worker: Any, batch: Any, hidden: Any, *args: Any, **kwargs: Any
    ) -> Any:
        session = self.recorder.session
        if session is None:
            return original(worker, batch, hidden, *args, **kwargs)
        then = self._try(session, batch, "prefill_extend", self._before_prefill, worker, batch, hidden)
        out = original(worker, batch, hidden, *args, **kwargs)
        if then is not None:
            self._try(session, batch, "prefill_extend", then)
        return out

    def draft(self, original: Callable, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.recorder.session
        if session is None:
            return original(worker, batch, *args, **kwargs)
        then = self._try(session, batch, "draft", self._before_draft, worker, batch)
        out = original(worker, batch, *args, **kwargs)
        if then is not None:
            self._try(session, batch, "draft", then, out[0] if isinstance(out, tuple) else out)
        return out

    def decode_extend(
        self, original: Callable, worker: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        session = self.recorder.session
        if session is None:
            return original(worker, batch, result, *args, **kwargs)
        then = self._try(session, batch, "decode_extend", self._before_decode, worker, batch, result)
        out = original(worker, batch, result, *args, **kwargs)
        if then is not None:
            self._try(session, batch, "decode_extend", then)
        return out

    def prefill(self, original: Callable, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return reprefill.around(self.recorder, original, worker, batch, *args, **kwargs)

    def draft_graph(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        self._graph_ran["draft"] = True
        return original(*args, **kwargs)

    def extend_graph(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        self._graph_ran["decode_extend"] = True
        return original(*args, **kwargs)

    # -- what they record

    def _try(self, session: Session, batch: Any, stage: str, step: Callable, *args: Any) -> Any:
        """Run one step of ours. Whatever it raises stays here; the requests it was about are dropped."""
        try:
            return step(session, *args)
        except Exception as error:
            try:
                session.failed(stage, error, [r.rid for r in batch.reqs if session.wants(r.rid)])
            except Exception as worse:
                self.recorder.failed(stage, worse)

    def _before_prefill(self, session: Session, worker: Any, batch: Any, hidden: Any) -> Callable | None:
        if batch.forward_mode.is_idle():
            return None
        lengths, prefix = list(map(int, batch.extend_lens)), list(map(int, batch.prefix_lens))
        reqs = batch.reqs
        wanted = [j for j, r in enumerate(reqs) if session.admit(r.rid, r.origin_input_ids, prefix[j])]
        if not wanted:
            return None
        meta = {
            "mode": batch.forward_mode.name,
            "graph": "eager" if engine.graph_backend_disabled("PREFILL", worker) else "unknown",
            "rids": [reqs[j].rid for j in wanted],
            "seq_lens": [prefix[j] for j in wanted],
            "lengths": [lengths[j] for j in wanted],
            "chunked": [reqs[j] is batch.chunked_req for j in wanted],
            "batch_size": len(reqs),
        }
        spans = spans_of(lengths, wanted)
        features = gather(hidden, spans)

        def after(session: Session) -> None:
            # The original has just replaced batch.input_ids by the shifted ids that it fed.
            tensors = {"features": features, "ids": gather(batch.input_ids, spans)}

            def finish(arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
                ids = arrays.pop("ids")[0]
                return {**meta, "token_ids": split(ids, meta["lengths"])}, arrays  # type: ignore[arg-type]

            session.record("prefill_extend", meta["rids"], tensors, finish)  # type: ignore[arg-type]

        return after

    def _before_draft(self, session: Session, worker: Any, batch: Any) -> Callable | None:
        wanted = [j for j, r in enumerate(batch.reqs) if session.wants(r.rid)]
        if not wanted or batch.forward_mode.is_idle():
            return None
        rows = [(j, j + 1) for j in wanted]
        fed = getattr(batch.spec_info, "hidden_states", None)
        tensors = {"n": gather(batch.seq_lens, rows)}
        if fed is not None:
            tensors["fed"] = gather(fed, rows)
        meta = self._about(worker, batch, wanted, "draft")

        def after(session: Session, verify_input: Any) -> None:
            size = int(verify_input.draft_token_num)
            blocks = [(j * size, j * size + size) for j in wanted]
            tensors["ids"] = gather(verify_input.draft_token.reshape(-1), blocks)
            if meta["topk"] > 1:
                tensors["child"] = gather(verify_input.retrieve_next_token.reshape(-1), blocks)
                tensors["sibling"] = gather(verify_input.retrieve_next_sibling.reshape(-1), blocks)
            meta.update(draft_tokens=size, graph=self._graph("draft", worker.cuda_graph_runner))
            session.record("draft", meta["rids"], tensors, _finish_draft(meta))

        return after

    def _before_decode(self, session: Session, worker: Any, batch: Any, result: Any) -> Callable | None:
        wanted = [j for j, r in enumerate(batch.reqs) if session.wants(r.rid)]
        if not wanted or batch.forward_mode.is_idle():
            return None
        rows = [(j, j + 1) for j in wanted]
        size = int(getattr(result, "speculative_num_draft_tokens", 0) or worker.speculative_num_draft_tokens)
        blocks = [(j * size, j * size + size) for j in wanted]
        tensors = {
            "n": gather(batch.seq_lens, rows),
            "accept": gather(result.accept_lens, rows),
            "ids": gather(result.next_token_ids.reshape(-1), blocks),
            "features": gather(result.logits_output.hidden_states, blocks),
        }
        meta = self._about(worker, batch, wanted, "decode_extend")

        def after(session: Session) -> None:
            meta.update(draft_tokens=size)
            meta["graph"] = self._graph("decode_extend", worker.cuda_graph_runner_for_draft_extend)
            session.record("decode_extend", meta["rids"], tensors, _finish_decode(meta))

        return after

    def _about(self, worker: Any, batch: Any, wanted: list[int], kind: str) -> dict[str, Any]:
        self._graph_ran[kind] = False
        return {
            "mode": batch.forward_mode.name,
            "rids": [batch.reqs[j].rid for j in wanted],
            "steps": int(worker.speculative_num_steps),
            "topk": int(worker.topk),
            "batch_size": len(batch.reqs),
        }

    def _graph(self, kind: str, runner: Any) -> str:
        if self._graph_ran.get(kind):
            return "graph"
        return "eager" if not runner or self.recorder.hooks.get(GRAPHS[kind]) else "unknown"


def _finish_draft(meta: dict[str, Any]) -> Finish:
    def finish(arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        count, size = len(meta["rids"]), meta["draft_tokens"]
        ids = arrays.pop("ids")[0].reshape(count, size)
        event = {**meta, "seq_lens": arrays.pop("n")[0].tolist(), "token_ids": ids[:, 1:].tolist()}
        if "child" in arrays:
            event["next_token"] = arrays.pop("child")[0].reshape(count, size).tolist()
            event["next_sibling"] = arrays.pop("sibling")[0].reshape(count, size).tolist()
        return event, arrays

    return finish


def _finish_decode(meta: dict[str, Any]) -> Finish:
    def finish(arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Only now are the accept lengths known on the host: keep the accepted rows."""
        accept = arrays.pop("accept")[0].tolist()
        size = meta["draft_tokens"]
        keep = [j * size + i for j, length in enumerate(accept) for i in range(length)]
        features, dtype = arrays["features"]
        event = {
            **meta,
            "seq_lens": arrays["n"][0].tolist(),
            "lengths": accept,
            "accept_lens": accept,
            "token_ids": split(arrays["ids"][0][keep], accept),
        }
        return event, {"features": (features[keep], dtype)}

    return finish


def took(target: str, hook: Callable) -> bool:
    """Whether the attribute that SGLang calls leads to our hook (`apply_hooks` only logs a failure)."""
    import pkgutil

    try:
        function = pkgutil.resolve_name(target)
    except Exception:
        return False
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents == hook:
                return True
        function = getattr(function, "__wrapped__", None)
    return False


def register() -> Recorder:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = Recorder(spool.folder())
    for target, hook in Hooks(recorder, engine.version()).targets().items():
        HookRegistry.register(target, hook, HookType.AROUND)
    return recorder
