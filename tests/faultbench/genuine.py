"""The cases that run on genuine SGLang: faults of a running server, launches and configs that go wrong."""

from __future__ import annotations

from . import launches, runtime

CASES = (*runtime.CASES, *launches.CASES)
