"""Causes: edits of a launch or a checkpoint that would make serving agree with training.

A fault is named by the edit that removes its differences, never by one flag or field alone: the same widths
H / H / H come from `--speculative-algorithm EAGLE` and from `use_aux_hidden_state: false`, and only deriving
`served` anew under each edit tells them apart. The same edit, simulated, prices the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from eaglelab.checkpoint import Checkpoint
from eaglelab.diff import Difference, diff
from eaglelab.errors import BadInput
from eaglelab.evidence import Evidence
from eaglelab.launch import Launch
from eaglelab.served import served


@dataclass(frozen=True)
class Cause:
    """One way in which serving departs from training.

    `flags` and `config` undo it; `fix` says how a person does.
    """

    slug: str
    title: str
    fix: str
    present: Callable[[Checkpoint, Launch], bool]
    flags: str = ""  # launch flags given in place of the old ones
    config: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields of the drafter's config.json, nested as there


@dataclass(frozen=True)
class Implicated:
    """A cause, or several at once, whose undoing removes `explains` and leaves `remaining`.

    refusal: why the engine would not start then, under the names `faults`; "" if it would.
    """

    causes: tuple[Cause, ...]
    explains: tuple[Difference, ...]
    remaining: tuple[Difference, ...]
    refusal: str = ""
    faults: tuple[str, ...] = ()

    @property
    def flags(self) -> str:
        return " ".join(c.flags for c in self.causes if c.flags)

    @property
    def config(self) -> dict[str, Any]:
        return {name: value for c in self.causes for name, value in c.config.items()}


def _eagle_flag(checkpoint: Checkpoint, launch: Launch) -> bool:
    """EAGLE (alias NEXTN) hands over one state; a drafter whose fc takes several is an EAGLE-3 drafter."""
    return launch.algorithm == "EAGLE" and checkpoint.feature_count > 1


def _aux_hidden_state_off(checkpoint: Checkpoint, launch: Launch) -> bool:
    nested = checkpoint.config.get("eagle_config") or {}
    return not nested.get("use_aux_hidden_state", True) and checkpoint.feature_count > 1


def _overridden(checkpoint: Checkpoint, launch: Launch) -> bool:
    return (launch.flag("--json-model-override-args") or "{}") != "{}"


CAUSES = (
    Cause(
        "eagle-flag-on-eagle3-drafter",
        "an EAGLE-3 drafter was launched as EAGLE",
        "--speculative-algorithm EAGLE3",
        _eagle_flag,
        flags="--speculative-algorithm EAGLE3",
    ),
    Cause(
        "aux-hidden-state-off",
        "the drafter's config turns the target's intermediate hidden states off",
        'set "use_aux_hidden_state": true in the eagle_config of the drafter\'s config.json, then restart',
        _aux_hidden_state_off,
        config={"eagle_config": {"use_aux_hidden_state": True}},
    ),
    Cause(
        "override-args-reach-drafter",
        "--json-model-override-args changes the drafter's config too",
        "take --json-model-override-args out of the launch; write what the target needs into its config.json",
        _overridden,
        flags="--json-model-override-args {}",
    ),
)


def implicated(evidence: Evidence) -> list[Implicated]:
    """Causes that explain at least one difference that counts, best explanation first.

    When two causes are present at once, undoing one alone may leave differences, or remove none; then the
    smallest set that explains the most is the entry, and its parts alone are not. A cause whose undoing would
    let the engine see, and refuse, another fault is named all the same if no better explanation is left.
    """
    open_differences = tuple(d for d in evidence.differences if not d.inert)
    present = [c for c in CAUSES if c.present(evidence.checkpoint, evidence.launch)]
    found: list[Implicated] = []
    refused: list[Implicated] = []
    for size in range(1, len(present) + 1):
        for causes in combinations(present, size):
            parts = [f for f in found if all(c in causes for c in f.causes)]
            item = _undo(evidence, causes, open_differences)
            if item and item.refusal:
                refused.append(item)
            elif item and all(len(item.remaining) < len(f.remaining) for f in parts):
                found = [f for f in found if f not in parts] + [item]
    return sorted(found, key=lambda f: len(f.remaining)) or refused[:1]


def _of_tensors(evidence: Evidence) -> list[Difference]:
    """Numbers that differ between two files do so under any launch."""
    return [d for d in evidence.differences if d.part == "tensors"]


def _undo(evidence: Evidence, causes: tuple[Cause, ...], before: tuple[Difference, ...]) -> Implicated | None:
    item = Implicated(causes, (), ())
    try:
        launch = evidence.launch.with_flags(item.flags) if item.flags else evidence.launch
        checkpoint = evidence.checkpoint.with_config(item.config)
        after = diff(
            evidence.trained, served(checkpoint, launch), evidence.original, evidence.target, checkpoint
        )
    except BadInput as error:
        if not error.faults:
            return None  # the edited launch would not start: no fix
        return replace(item, explains=before, refusal=str(error), faults=error.faults)
    remaining = tuple(d for d in (*after, *_of_tensors(evidence)) if not d.inert)
    left = {d.field for d in remaining}
    explains = tuple(d for d in before if d.field not in left)
    return replace(item, explains=explains, remaining=remaining) if explains else None
