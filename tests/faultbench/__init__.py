"""The fault bench: faults injected into the tiny models, and `diagnose` as users run it, blind to them.

    python tests/faultbench --help

A module a kind of case, each with a tuple CASES (`cases.MODULES`); `run` runs them, `judge` says what counts
as found, `table` shows it. docs/faultbench.md says how to add a case.
"""
