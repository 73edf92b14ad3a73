"""What SGLang counts of our own requests, each number with its definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class Counters:
    """Sums of SGLang's own counters over our requests; None: this server does not count that."""

    correct: int | None  # draft tokens that the target accepted, without the bonus
    proposed: int | None
    verifies: int | None
    completion_tokens: int | None
    draft_tokens: int  # N of the launch: the drafts and the root
    lifetime_accept_length: float | None = None

    def measurements(self) -> list[Measurement]:
        """accept_length.server and what else SGLang counts, each with its definition."""
        from eaglelab.records import Measurement

        v, n, correct = self.verifies, self.draft_tokens, self.correct
        with_bonus = None if correct is None or v is None else v + correct
        rows = [
            ("accept_length.server", _share(correct, v, plus=1), "tokens per verify",
             "1 + sum of spec_num_correct_drafts / sum of spec_verify_ct over our requests; bonus included"),
            ("acceptance_rate.server", _share(correct, self.proposed), "ratio",
             "sum of spec_num_correct_drafts / sum of spec_num_proposed_drafts over our requests; no bonus"),
            ("accept_length.sglang", _share(self.completion_tokens, v), "tokens per verify",
             "completion tokens / spec_verify_ct over our requests: SGLang's own; counts the prefill's too"),
            ("accept_rate.old_style", _share(with_bonus, (v or 0) * n), "ratio",
             "(correct drafts + bonus) / draft tokens per verify, an older server's \"rate\":"
             f" nothing accepted reads {1 / n if n else 0:.2f}"),
            ("accept_length.lifetime", self.lifetime_accept_length, "tokens per verify",
             "avg_spec_accept_length of /server_info: since the server started, all traffic"),
        ]  # fmt: skip
        missing = [name for name, value in (("correct drafts", correct), ("verifies", v)) if value is None]
        reason = "the server has counted no verify"
        if missing:
            reason = f"the server's answers do not count {' and '.join(missing)}"
        return [
            Measurement(name=a, value=b, unit=c, definition=d, reason=reason if b is None else None)
            for a, b, c, d in rows
        ]


def _share(part: int | None, whole: int | None, plus: int = 0) -> float | None:
    return plus + part / whole if whole and part is not None else None
