"""Checks: small functions, evidence in, findings out. Each names the fault that it looks for."""

from __future__ import annotations

from dataclasses import dataclass

from eaglelab.records import Finding


@dataclass(frozen=True)
class Check:
    """What one check looks for. `good` and `bad` are the titles of a passed and a failed finding."""

    fault: str
    good: str
    bad: str
    fix: str = ""
    rung: int | None = None

    def passed(self, *evidence: str) -> Finding:
        return self._finding("passed", self.good, evidence)

    def skipped(self, *evidence: str) -> Finding:
        return self._finding("skipped", self.good, evidence)

    def failed(self, *evidence: str) -> Finding:
        return self._finding("failed", self.bad, evidence).model_copy(update={"fix": self.fix or None})

    def _finding(self, verdict, title: str, evidence: tuple[str, ...]) -> Finding:
        return Finding(
            fault=self.fault, verdict=verdict, title=title, rung=self.rung, evidence=list(evidence)
        )
