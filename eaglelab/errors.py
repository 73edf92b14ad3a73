"""The errors that end a command, each with the exit code that a scheduler sees.

0 healthy; 1 broken or inconclusive; 2 usage or bad input; 3 could not reach, attach or capture; 4 the
notebook's kernel died; 5 timed out; 6 finished without a summary record.
"""

from __future__ import annotations

HEALTHY, NOT_HEALTHY, USAGE, UNREACHABLE, KERNEL_DIED, TIMED_OUT, NO_SUMMARY = range(7)
INTERRUPTED = 130
_SECTIONS = {  # of docs/errors.md
    USAGE: "2-usage-or-bad-input",
    UNREACHABLE: "3-cannot-reach-attach-or-capture",
    KERNEL_DIED: "4-the-kernel-died",
    TIMED_OUT: "5-timed-out",
    NO_SUMMARY: "6-no-summary-record",
}


def page(exit_code: int) -> str:
    """Where docs/ explains the errors that end with this code; "" where there is nothing to explain."""
    return f"docs/errors.md#{_SECTIONS[exit_code]}" if exit_code in _SECTIONS else ""


class EaglelabError(Exception):
    """An error that a user can act on: the message says what is wrong and what to do."""

    exit_code = USAGE


class BadInput(EaglelabError):
    """A file, option or parameter does not fit. The message names file and field.

    `faults`: slugs of the catalogue that the reason is known by, if it is.
    """

    exit_code = USAGE

    def __init__(self, message: str = "", *faults: str):
        super().__init__(message)
        self.faults = tuple(filter(None, faults))


class Refusal(str):
    """A reason why an engine does not take a drafter. `fault`: its slug in the catalogue, "" for none."""

    fault: str

    def __new__(cls, text: str, fault: str = "") -> Refusal:
        self = super().__new__(cls, text)
        self.fault = fault
        return self


class AttachError(EaglelabError):
    """The server could not be reached, is not what was asked for, or cannot be captured."""

    exit_code = UNREACHABLE
