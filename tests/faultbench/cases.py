"""What a case of the fault bench is, and where the cases are.

A case is blind: `inject` returns what a user would give to `eaglelab.diagnose.run`, in folders whose names
say nothing, and nothing of the case's other fields reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

# Each has a tuple CASES. Modules that need the genuine server come last.
MODULES = ("conversion", "trainers", "stored", "healthy", "pairs", "genuine")
ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "data"
SPECULATORS, SGLANG, TARGET = DATA / "drafter-speculators", DATA / "drafter-sglang", DATA / "target"
FEATURES, GOLDEN = DATA / "features", DATA / "golden-capture"

Kind = Literal["fault", "healthy", "pair", "out-of-sight"]
Source = Literal["server", "simulated"]
T = TypeVar("T")


@dataclass(frozen=True)
class Length:
    """An accept length (tokens per verify, bonus included), and whether a genuine server gave it."""

    value: float
    source: Source


@dataclass
class Injected:
    """Arguments of `eaglelab.diagnose.run`, and what the fault costs.

    inputs: drafter, served_drafter, target, features, launch, capture (`server` too); what is left out is not
    given. before: rightly served, after: with the fault. None where it has no meaning (a server that does not
    start), or, without a capture, where `lengths` of the runner cannot simulate it.
    """

    inputs: dict[str, Any]
    before: Length | None = None
    after: Length | None = None


@dataclass(frozen=True)
class Case:
    """One case. `slugs`: the true causes, one for a fault, two for a pair, none for the others.

    "a|b" is one cause for which both names are true (two slugs of the catalogue that no evidence can tell
    apart); say why in `note`. rung: where the acceptance is lost; for kind "out-of-sight" it is what is
    judged. untouched: checkpoint, config and launch are right, so that nothing can be read off them. server:
    name of the genuine server's set-up, "" for none; cases of one name run one after the other. fast: part of
    FAST=1. sweep: cases with the same word are one fault with other parameters and count once. relaunch: the
    fault can be undone by a flag or a line of the config, and `Injected.before` is what that gives, so that
    the predicted accept length is compared with it.
    """

    name: str
    kind: Kind
    inject: Callable[[Bench], Injected]
    slugs: tuple[str, ...] = ()
    rung: int | None = None
    untouched: bool = False
    server: str = ""
    fast: bool = False
    sweep: str = ""
    relaunch: bool = False
    note: str = ""


@dataclass
class Bench:
    """What injections use: new folders with neutral names, and things made once for several cases."""

    root: Path
    python: str = ""  # of the genuine server; "" without one
    keep: bool = False  # `root` stays, and its cases are not injected again
    _made: dict[str, Any] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)
    _count: int = 0

    def folder(self) -> Path:
        """A new, empty folder whose name says nothing."""
        self._count += 1
        while (path := self.root / f"{self._count:03d}").exists():
            self._count += 1
        path.mkdir(parents=True)
        return path

    def path(self) -> Path:
        """A path in a new folder, which does not exist yet: where to write a copy of a drafter or capture."""
        return self.folder() / "model"

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What `make` returned the first time that `key` was asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def enter(self, key: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        """As `once`, for what must be closed: it is when the bench ends (or by `close`)."""
        return self.once(key, lambda: self._open.enter_context(make()))

    def close(self) -> None:
        """Close what `enter` opened, the last first."""
        self._open.close()
        self._made.clear()


def all_cases() -> list[Case]:
    """Every case of every module, those of one server beside each other and after those that need none."""
    modules = [import_module(f"{__package__}.{name}") for name in MODULES]
    found = [case for module in modules for case in module.CASES]
    names = [case.name for case in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases share a name: {sorted({n for n in names if names.count(n) > 1})}")
    order = list(dict.fromkeys(case.server for case in found))
    return sorted(found, key=lambda case: (case.server != "", order.index(case.server)))
