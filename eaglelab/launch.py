"""Launch: how a server was started, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Facts of the target model that decide how its drafter is served."""

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Launch:
    """Speculation is written as SGLang's flags say it: steps S, topk K, draft tokens N (a chain has N = S + 1)."""

    algorithm: str | None = "EAGLE3"  # NEXTN is resolved to EAGLE; None: no speculation
    steps: int = 5
    topk: int = 1
    draft_tokens: int = 6
    engine: str = "sglang"
    version: str = "0.5.23"
    dtype: str | None = None  # --dtype; None: the checkpoint's own
    tp_size: int = 1
    draft_window: int | None = None  # --speculative-draft-window-size
    target_path: str | None = None
    draft_path: str | None = None
    target: Target | None = None
    flags: tuple[tuple[str, str], ...] = ()  # every other flag, as written
