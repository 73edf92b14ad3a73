"""The errors that end a command, each with the exit code that a scheduler sees.

0 healthy; 1 broken or inconclusive; 2 usage or bad input; 3 could not reach, attach or capture; 4 the
notebook's kernel died; 5 timed out; 6 finished without a summary record.
"""

HEALTHY, NOT_HEALTHY, USAGE, UNREACHABLE, KERNEL_DIED, TIMED_OUT, NO_SUMMARY = range(7)


class EaglelabError(Exception):
    """An error that a user can act on: the message says what is wrong and what to do."""

    exit_code = USAGE


class BadInput(EaglelabError):
    """A file, option or parameter does not fit. The message names file and field."""

    exit_code = USAGE


class AttachError(EaglelabError):
    """The server could not be reached, is not what was asked for, or cannot be captured."""

    exit_code = UNREACHABLE
