"""Every definition of an accept length or rate in use, and the counters that they are computed from.

A server's figures are all functions of one number, the drafts accepted per verify (m), and of the shape of a
draft: S steps, N draft tokens (the root included), topk. Every definition is (m + bonus) / per. Counters of
requests (`counters`), pasted text (`explain`) and captures (`checks.counters`) use these and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# What SGLang calls its counters in a response's meta_info (managers/tokenizer_manager.py): from 0.5.12 on, in
# 0.5.11, before. All count drafts without the bonus. `make compat` checks the names.
FIELDS = {
    "correct": ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
    "proposed": ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
    "verifies": ("spec_verify_ct",),
    "completion": ("completion_tokens",),
    "histogram": ("spec_correct_drafts_histogram", "spec_accept_histogram"),
}


def counted(meta: Mapping[str, Any], what: str) -> Any:
    """One of SGLang's counters of a response, whatever this release calls it; None where it is not told."""
    return next((meta[name] for name in FIELDS[what] if meta.get(name) is not None), None)


@dataclass(frozen=True)
class Shape:
    """A draft: `steps` drafts deep (vLLM: num_speculative_tokens), `draft_tokens` a verify, root included.

    `draft_tokens` None: a tree whose size was not said.
    """

    steps: int
    draft_tokens: int | None
    topk: int = 1


@dataclass(frozen=True)
class Definition:
    """value = (m + bonus) / per(shape), with m the drafts accepted per verify. `per` None: not known."""

    name: str
    words: str
    source: str
    bonus: int
    per: Callable[[Shape], int | None] = lambda shape: 1

    def value(self, m: float, shape: Shape) -> float | None:
        """The figure that a server prints under this definition."""
        per = self.per(shape)
        return (m + self.bonus) / per if per else None

    def correct(self, value: float, shape: Shape) -> float | None:
        """m, from the figure: the inverse of `value`."""
        per = self.per(shape)
        return value * per - self.bonus if per else None


WITH_BONUS = Definition(
    "length", "tokens committed per verify, the target's own included: 1.00 means nothing accepted",
    "sglang 0.5.23 metrics_reporter.py; vLLM V1 (vllm#24127)", 1,
)  # fmt: skip
WITHOUT_BONUS = Definition(
    "length-drafts-only", "accepted drafts per verify, without the target's own token: 0.00 means nothing",
    "proposed in vllm#11552; found in papers and scripts", 0,
)  # fmt: skip
PER_REQUEST = Definition(
    "length-per-request",
    "completion tokens / verifies: the prefill's token counts too, so a short answer reads above 1",
    "sglang 0.5.23 tokenizer_manager.py", 1,
)  # fmt: skip
DRAFTS = Definition(
    "rate", "accepted drafts / proposed drafts, no bonus: (N - 1) drafts a verify, in a tree all its nodes",
    "sglang metrics_reporter.py, 0.5.11 and later (sglang#23530)", 0,
    lambda s: s.draft_tokens - 1 if s.draft_tokens else None,
)  # fmt: skip
PER_DRAFT_TOKENS = Definition(
    "rate-old", "(accepted drafts + bonus) / N draft tokens: nothing accepted reads 1/N",
    "SGLang from sglang#13212 (November 2025) to 0.5.10", 1, lambda s: s.draft_tokens,
)  # fmt: skip
PER_STEPS_PLUS_ONE = Definition(
    "rate-older", "(accepted drafts + bonus) / (S + 1): in a chain the same as by N draft tokens",
    "SGLang from sglang#11572 (October 2025) to sglang#13212", 1, lambda s: s.steps + 1,
)  # fmt: skip
PER_STEPS = Definition(
    "rate-oldest", "(accepted drafts + bonus) / S steps: nothing accepted reads 1/S, and 1 can be passed",
    "SGLang before sglang#11572", 1, lambda s: s.steps,
)  # fmt: skip
POOLED = Definition(
    "rate-pooled", "accepted / drafted tokens, pooled over all positions and requests",
    "vLLM V1 v1/spec_decode/metrics.py", 0, lambda s: s.steps,
)  # fmt: skip
POSITIONS = Definition(
    "positions", "sum over positions of the share of drafts accepted up to there (not conditional)",
    "vLLM V1 v1/spec_decode/metrics.py", 0,
)  # fmt: skip
EFFICIENCY = Definition(
    "efficiency", "emitted tokens / most that could be emitted, (k + 1) a verify",
    "vLLM V0 spec_decode/metrics.py, checked on the figures of vllm#9539", 1, lambda s: s.steps + 1,
)  # fmt: skip
COUNTED = Definition("counters", "correct drafts / verifies, from the counters themselves", "counters", 0)

SGLANG: dict[str, tuple[Definition, ...]] = {
    "length": (WITH_BONUS,),
    "rate": (DRAFTS, PER_DRAFT_TOKENS, PER_STEPS_PLUS_ONE, PER_STEPS),
}
KINDS: dict[str, dict[str, tuple[Definition, ...]]] = {
    "SGLang's log or metrics": SGLANG,
    "SGLang's response": {"length": (PER_REQUEST,), "rate": SGLANG["rate"]},
    "vLLM's log or metrics": {"length": (WITH_BONUS, WITHOUT_BONUS), "rate": (POOLED,)},
    "vLLM V0's log": {"efficiency": (EFFICIENCY,)},
}
EVERY = (WITH_BONUS, WITHOUT_BONUS, DRAFTS, PER_DRAFT_TOKENS, PER_STEPS_PLUS_ONE, PER_STEPS)
