"""Figures of acceptance in pasted text: log lines, metrics and responses of SGLang and vLLM, old and new.

Formats: sglang 0.5.23 managers/scheduler_components/metrics_reporter.py (log), observability/
metrics_collector.py (Prometheus), managers/tokenizer_manager.py (meta_info; its counters have had several
names, see `definitions`). vLLM's V1 line as in vllm#24127, its V0 line as in vllm#9539.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from eaglelab.definitions import FIELDS
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


def _fields(what: str) -> tuple[str, ...]:
    """Patterns of a counter of a response, by each name that a release has for it."""
    return tuple(rf"\b{name}['\"]?\s*[=:]\s*(\d+)" for name in FIELDS[what])


COUNTS = {
    "correct": (
        *_fields("correct"),
        r"\bAccepted: (\d+) tokens",
        rf"\bvllm:spec_decode_num_accepted_tokens(?:_total)?(?P<labels>{LABELS})\s+{NUMBER}",
    ),
    "proposed": (
        *_fields("proposed"),
        r"\bDrafted: (\d+) tokens",
        rf"\bvllm:spec_decode_num_draft_tokens(?:_total)?(?P<labels>{LABELS})\s+{NUMBER}",
    ),
    "verifies": (
        *_fields("verifies"),
        rf"\bvllm:spec_decode_num_drafts(?:_total)?(?P<labels>{LABELS})\s+{NUMBER}",
    ),
    "completion": _fields("completion"),
    "steps": (r"\bNumber of speculative tokens: (\d+)",),
}
BY_POSITION = rf"\bvllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?(?P<labels>{LABELS})\s+{NUMBER}"
POSITIONS = r"Per-position acceptance rate: ((?:\d+\.\d+(?:, )?)+)"


@dataclass(frozen=True)
class Figure:
    """A number as printed. `slack`: half a unit of its last digit, which rounding may have taken or given."""

    value: float
    slack: float


@dataclass(frozen=True)
class Pasted:
    """What a text says of acceptance.

    `figures`: length, rate (a share, also where printed in %), efficiency. `positions`: share of rounds in
    which draft 1, 2, ... was accepted. `counts`: correct, proposed, ..., added up over `responses` and over
    the engines of one scrape.
    """

    kind: Kind
    figures: dict[str, Figure] = field(default_factory=dict)
    positions: tuple[Figure, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    responses: int = 1


def parse(text: str) -> Pasted:
    """The figures in a text; of several log lines, the last; of several responses, their counters' sums.

    BadInput if it holds none.
    """
    figures: dict[str, Figure] = {}
    counts: dict[str, int] = {}
    responses = max(1, len(re.findall(COUNTS["verifies"][0], text)))
    for name, patterns in FIGURES.items():
        if match := _last(patterns, text):
            percent = text[match.end() : match.end() + 1] == "%"
            figures[name] = _figure(match[1], percent)
    for name, patterns in COUNTS.items():
        if (total := _count(patterns, text, responses)) is not None:
            counts[name] = total
    if responses > 1:  # each has its own length and rate: only what they counted can be put together
        figures.clear()
    positions = _positions(text, counts.get("verifies"))
    if not (figures or positions or {"correct", "verifies"} <= counts.keys()):
        raise BadInput(
            f"no figure of acceptance in {text[:60]!r}: paste a line with 'accept len: ...', 'accept rate: "
            "...', the meta_info of a response, or vLLM's 'SpecDecoding metrics: ...'"
        )
    return Pasted(_kind(text), figures, positions, counts, responses)


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


def _count(patterns: tuple[str, ...], text: str, responses: int) -> int | None:
    """Added up over responses, and over the label sets of a metric (engines); else the last."""
    for pattern in patterns:
        found = list(re.finditer(pattern, text))
        if found and "labels" in found[0].groupdict():
            return round(sum(float(n) for n in {m["labels"]: m[2] for m in found}.values()))
        if found:
            return sum(int(m[1]) for m in found) if responses > 1 else int(found[-1][1])
    return None


def _positions(text: str, verifies: int | None) -> tuple[Figure, ...]:
    if listed := list(re.finditer(POSITIONS, text)):
        return tuple(_figure(p) for p in listed[-1][1].strip(", ").split(", "))
    counted: dict[int, float] = {}
    for labels, n in {m["labels"]: m[2] for m in re.finditer(BY_POSITION, text)}.items():
        if where := re.search(r'position="(\d+)"', labels):
            counted[int(where[1])] = counted.get(int(where[1]), 0.0) + float(n)
    if not verifies or sorted(counted) != list(range(len(counted))):
        return ()
    return tuple(Figure(counted[i] / verifies, 1e-9) for i in range(len(counted)))


def _figure(text: str, percent: bool = False) -> Figure:
    unit = 0.01 if percent else 1.0
    decimals = len(text.partition(".")[2]) if "e" not in text.lower() else 12
    return Figure(float(text) * unit, 0.5 * 10.0**-decimals * unit)
