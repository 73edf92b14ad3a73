"""What the probe needs to know of the running engine, read in one place (sglang 0.5.23)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """Which rank this scheduler is. One rank a data-parallel group is `primary`: its attention-TP rank 0."""

    dp: int
    tp: int
    primary: bool

    @property
    def name(self) -> str:
        return f"dp{self.dp}.tp{self.tp}"


def parallel(name: str, default: int) -> int:
    """A field of `runtime_context.get_parallel()`; one that is not set reads as the default."""
    try:
        from sglang.srt.runtime_context import get_parallel

        value = getattr(get_parallel(), name)
        return default if value is None else int(value)
    except Exception:
        return default


def version() -> str:
    import sglang

    return sglang.__version__


def tokenizer_workers() -> int | None:
    """--tokenizer-worker-num of the HTTP server that runs in this process; None where it is not told."""
    try:
        from sglang.srt.runtime_context import get_serving

        return get_serving().tokenizer_worker_num
    except ImportError:  # before 0.5.17
        from sglang.srt.entrypoints.http_server import get_global_state

        return getattr(get_global_state().tokenizer_manager.server_args, "tokenizer_worker_num", None)


def identity(worker: Any) -> Identity:
    tp = parallel("attn_tp_rank", parallel("tp_rank", getattr(worker.target_worker, "tp_rank", 0)))
    dp = max(parallel("attn_dp_rank", 0), parallel("dp_rank", 0))
    return Identity(dp, tp, tp == 0 and parallel("attn_cp_rank", 0) == 0)


def device_type(worker: Any) -> str:
    return str(worker.device).split(":")[0]


def select_device(worker: Any) -> None:
    """Make this thread use the scheduler's own device; a new thread would use the first."""
    if device_type(worker) != "cpu":
        import torch

        torch.get_device_module(device_type(worker)).set_device(worker.gpu_id)


def graph_backend_disabled(phase: str, worker: Any) -> bool:
    if device_type(worker) == "cpu":
        return True
    try:
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

        return check_cuda_graph_backend(getattr(Phase, phase), Backend.DISABLED)
    except Exception:
        return False


def target_model(worker: Any) -> Any:
    return worker.target_worker.model_runner.model


def model_facts(worker: Any) -> dict[str, Any]:
    """Facts of the target that decide how its drafter is served, and of the running speculation."""
    runner = worker.target_worker.model_runner
    config = getattr(runner.model_config, "hf_text_config", runner.model_config.hf_config)
    return {
        "target": {
            "architecture": (getattr(runner.model_config.hf_config, "architectures", None) or ["unknown"])[0],
            "hidden_size": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
            "dtype": str(runner.dtype).removeprefix("torch."),
        },
        "target_config": {
            "rms_norm_eps": getattr(config, "rms_norm_eps", None),
            "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        },
        "drafter": type(worker.draft_runner.model).__name__,
        "algorithm": str(getattr(worker.speculative_algorithm, "name", worker.speculative_algorithm)),
        "steps": worker.speculative_num_steps,
        "topk": worker.topk,
        "draft_tokens": worker.speculative_num_draft_tokens,
        "device": device_type(worker),
        "engine": {"name": "sglang", "version": version()},
        "expected_ranks": parallel("tp_size", 1)
        * (parallel("dp_size", 1) if parallel("attn_dp_size", 1) == 1 else 1),
        "nnodes": parallel("nnodes", 1),
    }
