"""Records: what every run leaves behind, one JSON object a line (`report.jsonl`).

Typed records come first and rendering second: a scheduler, a baseline comparison and the HTML page all read
these. The last line is the one summary, whose totals must add up. Nothing checked is a failure, never a
pass.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

Outcome = Literal["failed", "passed", "skipped", "errored"]
Verdict = Literal["healthy", "broken", "inconclusive"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Provenance(_Record):
    """Where a run came from: versions, launch, parameters, redacted server facts. Never a secret."""

    type: Literal["provenance"] = "provenance"
    facts: dict[str, Any]


class Measurement(_Record):
    """One number with its definition. `value` None: it could not be measured, and `reason` says why."""

    type: Literal["measurement"] = "measurement"
    name: str
    value: float | None
    unit: str
    definition: str
    reason: str | None = None
    interval: tuple[float, float] | None = None
    count: int | None = None

    @model_validator(mode="after")
    def _missing_needs_a_reason(self) -> Measurement:
        if self.value is None and not self.reason:
            raise ValueError(f"measurement {self.name!r} has no value and no reason")
        return self


class Finding(_Record):
    """One check's result. `fault` is a slug of the catalogue, `evidence` what was seen, in plain words."""

    type: Literal["finding"] = "finding"
    fault: str
    verdict: Outcome
    title: str
    rung: int | None = None
    evidence: list[str] = Field(default_factory=list)
    fix: str | None = None
    predicted_accept_length: float | None = None


class Figure(_Record):
    """A picture that the report shows, and the command that makes it again."""

    type: Literal["figure"] = "figure"
    name: str
    path: str
    command: str


class Summary(_Record):
    """The last line of every complete run."""

    type: Literal["summary"] = "summary"
    verdict: Verdict
    fault: str | None
    passed: int
    failed: int
    skipped: int
    errored: int
    total: int

    @model_validator(mode="after")
    def _totals_add_up(self) -> Summary:
        if self.passed + self.failed + self.skipped + self.errored != self.total:
            raise ValueError("summary totals do not add up")
        if self.total == 0 and self.verdict == "healthy":
            raise ValueError("nothing was checked: that is not healthy")
        return self


Record = Annotated[Provenance | Measurement | Finding | Figure | Summary, Field(discriminator="type")]
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def summarise(findings: Iterable[Finding], verdict: Verdict, fault: str | None) -> Summary:
    outcomes = [f.verdict for f in findings]
    return Summary(
        verdict=verdict,
        fault=fault,
        passed=outcomes.count("passed"),
        failed=outcomes.count("failed"),
        skipped=outcomes.count("skipped"),
        errored=outcomes.count("errored"),
        total=len(outcomes),
    )


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records atomically: a reader sees the old file or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as out:
        for record in records:
            out.write(record.model_dump_json() + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


def read(path: Path) -> list[Record]:
    """Read records. Raises ValueError naming the file and line of the first one that does not fit."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(_ADAPTER.validate_python(json.loads(line)))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ValueError(f"{path}, line {number}: not a record: {wrong}") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not a record: {error}") from error
    return records
