"""Evidence: everything a check may look at. What could not be gathered is None; `missing` says why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eaglelab.checkpoint import Checkpoint, TargetModel
from eaglelab.diff import Difference
from eaglelab.launch import Launch
from eaglelab.wiring import Feed, Wiring

if TYPE_CHECKING:
    from eaglelab.audit import Audit
    from eaglelab.capture import Capture
    from eaglelab.depths import DepthNames
    from eaglelab.features import StoredFeatures
    from eaglelab.hypotheses import Search
    from eaglelab.ladder import Ladder
    from eaglelab.live import Match
    from eaglelab.loader import Loading
    from eaglelab.records import Measurement
    from eaglelab.stats import FeatureStats
    from eaglelab.training import Doubt


@dataclass
class Evidence:
    """`trained`, `served` and their `differences` are the static side; the rest comes from a capture.

    `original` is the drafter as given, `checkpoint` the same as the engine loads it: the file that is served
    (`copied`), else our own conversion, which is `right` in any case. `served` is None when this engine would
    refuse it; `refused` are the names of the reasons then.
    """

    original: Checkpoint
    checkpoint: Checkpoint
    launch: Launch
    trained: tuple[Feed, Wiring]
    served: tuple[Feed, Wiring] | None = None
    differences: list[Difference] = field(default_factory=list)
    loading: Loading | None = None
    target: TargetModel | None = None
    capture: Capture | None = None
    ladder: Ladder | None = None
    depths: DepthNames | None = None
    stats: FeatureStats | None = None
    live: dict[str, list[Match]] | None = None  # by rank
    counters: list[Measurement] | None = None
    missing: dict[str, str] = field(default_factory=dict)
    copied: bool = False
    right: Checkpoint | None = None
    refused: tuple[str, ...] = ()
    stored: StoredFeatures | None = None
    data: Audit | None = None  # what the stored features are
    runtime: Search | None = None  # what the server was found to do otherwise
    doubt: Doubt | None = None  # whether the config says what was trained

    def why_not(self, part: str) -> str:
        """Why a part of the evidence is missing."""
        return self.missing.get(part, f"no {part} in the evidence")
