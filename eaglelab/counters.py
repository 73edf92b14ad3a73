"""What SGLang counts of our own requests, and every figure that is made of it, each with its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eaglelab import definitions as d

if TYPE_CHECKING:
    from eaglelab.records import Measurement


@dataclass(frozen=True)
class Answer:
    """One generation. `output_ids` is None where the server does not say them."""

    rid: str
    output_ids: list[int] | None
    text: str | None
    meta_info: dict[str, Any]

    @property
    def aborted(self) -> str | None:
        """The server's words where it gave the request up; None where it answered."""
        return abortion(self.meta_info)


def abortion(meta: dict[str, Any]) -> str | None:
    """What a `finish_reason` of type "abort" says; None for any other."""
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return None
    return str(reason.get("message"))[:300]


# Measurement -> unit, definition. Old servers print the rates of another day; a reader should find the number
# that he knows.
FIGURES = {
    "accept_length.server": ("tokens per verify", d.WITH_BONUS),
    "acceptance_rate.server": ("ratio", d.DRAFTS),
    "accept_length.sglang": ("tokens per verify", d.PER_REQUEST),
    "accept_rate.old_style": ("ratio", d.PER_DRAFT_TOKENS),
    "accept_rate.older_style": ("ratio", d.PER_STEPS_PLUS_ONE),
    "accept_rate.oldest_style": ("ratio", d.PER_STEPS),
    "acceptance_rate.pooled": ("ratio", d.POOLED),
}
COUNTS = {
    "accept_length.server": "1 + sum of correct drafts / sum of verifies",
    "acceptance_rate.server": "sum of correct drafts / sum of proposed drafts",
    "accept_length.sglang": "sum of completion tokens / sum of verifies",
    "accept_rate.old_style": "(sum of correct drafts + verifies) / (verifies * N)",
    "accept_rate.older_style": "(sum of correct drafts + verifies) / (verifies * (S + 1))",
    "accept_rate.oldest_style": "(sum of correct drafts + verifies) / (verifies * S)",
    "acceptance_rate.pooled": "sum of correct drafts / (verifies * S)",
}
LIFETIME = "avg_spec_accept_length of /server_info: since the server started, all traffic"
POSITION = (
    "share of our verifies in which the first j drafts all were accepted, j = {}; from "
    "spec_correct_drafts_histogram; vLLM prints it per position"
)


@dataclass(frozen=True)
class Counters:
    """Sums of SGLang's own counters over our requests; None: this server does not count that."""

    correct: int | None  # draft tokens that the target accepted, without the bonus
    proposed: int | None
    verifies: int | None
    completion_tokens: int | None
    draft_tokens: int  # N of the launch: the drafts and the root
    lifetime_accept_length: float | None = None
    steps: int = 0  # S of the launch; 0: not told, a chain has N - 1
    topk: int = 1
    histogram: tuple[int, ...] = ()  # verifies in which 0, 1, 2, ... drafts were accepted

    @property
    def shape(self) -> d.Shape:
        return d.Shape(self.steps or max(self.draft_tokens - 1, 0), self.draft_tokens or None, self.topk)

    def measurements(self) -> list[Measurement]:
        """accept_length.server and what else follows from the counters, each with its definition."""
        from eaglelab.records import Measurement

        rows = [(name, self.value(name), unit, self.definition(name)) for name, (unit, _) in FIGURES.items()]
        rows.append(("accept_length.lifetime", self.lifetime_accept_length, "tokens per verify", LIFETIME))
        if self.verifies and self.histogram:
            for j in range(1, max(self.shape.steps + 1, len(self.histogram))):
                share = sum(self.histogram[j:]) / self.verifies
                rows.append((f"acceptance.server.draft{j}", share, "share", POSITION.format(j)))
        told = (("correct drafts", self.correct), ("verifies", self.verifies))
        missing = [name for name, value in told if value is None]
        reason = "the server has counted no verify"
        if missing:
            reason = f"the server's answers do not count {' and '.join(missing)}"
        found = []
        for name, value, unit, words in rows:
            why, count = (reason, None) if value is None else (None, self.verifies)
            count = None if name.endswith(".lifetime") else count  # of every request, not of ours
            found.append(
                Measurement(name=name, value=value, unit=unit, count=count, definition=words, reason=why)
            )
        return found

    def value(self, name: str) -> float | None:
        """A figure by its definition; None where a counter that it needs is not told."""
        v = self.verifies
        if not v:
            return None
        if name == "accept_length.sglang":
            return None if self.completion_tokens is None else self.completion_tokens / v
        if self.correct is None:
            return None
        if name == "acceptance_rate.server" and self.proposed is not None:
            return self.correct / self.proposed if self.proposed else None
        return FIGURES[name][1].value(self.correct / v, self.shape)

    def definition(self, name: str) -> str:
        """The definition in words and in counters; what nothing accepted reads; what a tree's rate counts."""
        known, shape = FIGURES[name][1], self.shape
        words = f"{known.words} ({known.source}); here {COUNTS[name]}, over our requests"
        if name.startswith("accept_rate."):
            zero = known.value(0.0, shape)
            words += "" if zero is None else f"; nothing accepted reads {zero:.2f}"
        if "rate" in name and shape.topk > 1:
            words += "; a tree's rate counts all its nodes: not to be compared with a chain's"
        return words


def total(answers: Sequence[dict[str, Any]], what: str) -> int | None:
    """A counter's sum over responses; None where none of them tells it."""
    told = [d.counted(meta, what) for meta in answers]
    if answers and all(n is None for n in told):
        return None
    return sum(int(n or 0) for n in told)


def histogram(answers: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Verifies by how many drafts were accepted, summed over responses; () unless each of them tells it."""
    told = [d.counted(meta, "histogram") for meta in answers]
    if not told or not all(isinstance(counts, list) for counts in told):
        return ()
    longest = max(map(len, told), default=0)
    return tuple(sum(int(counts[j]) for counts in told if j < len(counts)) for j in range(longest))
