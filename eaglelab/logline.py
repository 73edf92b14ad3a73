"""Figures of acceptance in pasted text: log lines, metrics and responses of SGLang and vLLM, old and new.

Formats: sglang 0.5.23 managers/scheduler_components/metrics_reporter.py (log), observability/
metrics_collector.py (Prometheus), managers/tokenizer_manager.py (meta_info; before sglang#23530 its counters
were called spec_accept_token_num and spec_draft_token_num). vLLM's V1 line as in vllm#24127, its V0 line as
in vllm#9539.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from eaglelab.errors import BadInput

Kind = Literal["SGLang's log or metrics", "SGLang's response", "vLLM's log or metrics", "vLLM V0's log"]
NUMBER = r"(\d+(?:\.\d+)?(?:[eE]-?\d+)?)"
LABELS = r"(?:\{[^}]*\})?"
FIGURES = {  # name -> where it stands; the last match of a text counts
    "length": (
        rf"(?<!block )\baccept len: {NUMBER}",
        rf"\bsglang:spec_accept_length{LABELS}\s+{NUMBER}",
        rf"\bavg_spec_accept_length['\"]?\s*[=:]\s*{NUMBER}",
        rf"\bspec_accept_length['\"]?\s*[=:]\s*{NUMBER}",
        rf"\b[Mm]ean acceptance length: {NUMBER}",
    ),
    "rate": (
        rf"\baccept rate: {NUMBER}",
        rf"\bsglang:spec_accept_rate{LABELS}\s+{NUMBER}",
        rf"\bspec_accept_rate['\"]?\s*[=:]\s*{NUMBER}",
        rf"\b[Dd]raft acceptance rate: {NUMBER}",
    ),
    "efficiency": (rf"System efficiency: {NUMBER}",),
}
COUNTS = {
    "correct": (
        r"\bspec_num_correct_drafts['\"]?\s*[=:]\s*(\d+)",
        r"\bspec_accept_token_num['\"]?\s*[=:]\s*(\d+)",
        r"\bAccepted: (\d+) tokens",
        rf"\bvllm:spec_decode_num_accepted_tokens(?:_total)?{LABELS}\s+{NUMBER}",
    ),
    "proposed": (
        r"\bspec_num_proposed_drafts['\"]?\s*[=:]\s*(\d+)",
        r"\bspec_draft_token_num['\"]?\s*[=:]\s*(\d+)",
        r"\bDrafted: (\d+) tokens",
        rf"\bvllm:spec_decode_num_draft_tokens(?:_total)?{LABELS}\s+{NUMBER}",
    ),
    "verifies": (
        r"\bspec_verify_ct['\"]?\s*[=:]\s*(\d+)",
        rf"\bvllm:spec_decode_num_drafts(?:_total)?{LABELS}\s+{NUMBER}",
    ),
    "completion": (r"\bcompletion_tokens['\"]?\s*[=:]\s*(\d+)",),
    "steps": (r"\bNumber of speculative tokens: (\d+)",),
}
POSITIONS = r"Per-position acceptance rate: ((?:\d+\.\d+(?:, )?)+)"


@dataclass(frozen=True)
class Figure:
    """A number as printed. `slack`: half a unit of its last digit, which rounding may have taken or given."""

    value: float
    slack: float


@dataclass(frozen=True)
class Pasted:
    """What a text says of acceptance. `figures`: length, rate (a share, also where printed in %), efficiency;
    `positions`: share of rounds in which draft 1, 2, ... was accepted; `counts`: correct, proposed, ...
    """

    kind: Kind
    figures: dict[str, Figure] = field(default_factory=dict)
    positions: tuple[Figure, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Pasted:
    """The figures in a text; of several lines, the last. BadInput if it holds none."""
    figures, counts = {}, {}
    for name, patterns in FIGURES.items():
        if match := _last(patterns, text):
            percent = text[match.end() : match.end() + 1] == "%"
            figures[name] = _figure(match[1], percent)
    for name, patterns in COUNTS.items():
        if match := _last(patterns, text):
            counts[name] = int(float(match[1]))
    listed = list(re.finditer(POSITIONS, text))
    positions = tuple(_figure(p) for p in listed[-1][1].strip(", ").split(", ")) if listed else ()
    if not (figures or positions or {"correct", "verifies"} <= counts.keys()):
        raise BadInput(
            f"no figure of acceptance in {text[:60]!r}: paste a line with 'accept len: ...', 'accept rate: "
            "...', the meta_info of a response, or vLLM's 'SpecDecoding metrics: ...'"
        )
    return Pasted(_kind(text), figures, positions, counts)


def _kind(text: str) -> Kind:
    if "System efficiency" in text:
        return "vLLM V0's log"
    if "vllm:" in text or "cceptance length: " in text or "cceptance rate: " in text:
        return "vLLM's log or metrics"
    per_request = "spec_verify_ct" in text or re.search(r"(?<!sglang:)(?<!avg_)\bspec_accept_", text)
    return "SGLang's response" if per_request else "SGLang's log or metrics"


def _last(patterns: tuple[str, ...], text: str) -> re.Match[str] | None:
    found = [match for pattern in patterns for match in re.finditer(pattern, text)]
    return max(found, key=lambda match: match.start(), default=None)


def _figure(text: str, percent: bool = False) -> Figure:
    unit = 0.01 if percent else 1.0
    decimals = len(text.partition(".")[2]) if "e" not in text.lower() else 12
    return Figure(float(text) * unit, 0.5 * 10.0**-decimals * unit)
