"""Calling a reader's function and saying in words what is not right yet."""

from __future__ import annotations

import contextlib
import copy
import math
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eaglelab.html import Html, verdict_box

LONGEST = 160  # characters of a value in a message
PATIENCE = 60  # seconds for one call of a reader's function; the slowest answer takes three
PLAIN = (list, dict, set, tuple, str)


class NotYet(AssertionError):
    """A check that does not pass yet. A notebook shows its words alone, without the check's own lines."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet. {self}"]


class Case(NamedTuple):
    """One call with its right result. `about`: what this case is there for, said when it fails."""

    arguments: tuple[Any, ...]
    wanted: Any
    about: str = ""


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """The reader's function on copies of the arguments. NotYet if it is not written, stops or gives None."""
    name = getattr(function, "__name__", "the function")
    if not callable(function):
        raise NotYet(f"{name} is no function: write it in the cell above and run that cell.")
    try:
        with _patience(name):
            got = function(*map(_copied, arguments))
            got = list(got) if isinstance(got, Iterator) else got
    except NotImplementedError:
        raise NotYet(f"{name} is not written yet: replace its `raise NotImplementedError`.") from None
    except NotYet:  # what it was given to call has something to say
        raise
    except Exception as error:
        said = f"{_call(name, arguments)} stops with {type(error).__name__}: {error}"
        raise NotYet(said + _line(error)) from error
    if got is None:
        raise NotYet(f"{_call(name, arguments)} returns None: is a `return` missing?")
    return got


def solved(function: Callable[..., Any], exercise: int) -> Callable[..., Any]:
    """The reader's function for a later cell: what is not right yet also says which exercise comes first."""

    def asked(*arguments: Any) -> Any:
        with needs(exercise):
            return ask(function, *arguments)

    return asked


@contextlib.contextmanager
def needs(exercise: int) -> Iterator[None]:
    """What is NotYet in here says which exercise comes first."""
    try:
        yield
    except NotYet as said:
        raise NotYet(f"This cell needs exercise {exercise}. {said}") from None


def two(got: Any, name: str, what: str) -> tuple[Any, Any]:
    """A result that is to be a pair; `what` names the two."""
    if not isinstance(got, list | tuple) or len(got) != 2:
        raise NotYet(f"{name} returns two things, {what}; yours returns {_short(got)}.")
    return got[0], got[1]


def given(value: Any, name: str) -> Any:
    """A value that the reader was to fill in. NotYet while it is still `...`."""
    if value is ...:
        raise NotYet(f"{name} is still `...`: put your answer there.")
    return value


def compare(
    function: Callable[..., Any], cases: Iterable[Case], hints: Sequence[tuple[Any, str]] = ()
) -> int:
    """Every case; the first that differs is NotYet. Returns how many there were.

    hints: (another function, words): the typical mistakes; if one of them returns what the reader's function
    does, its words are added.
    """
    cases = list(cases)
    for case in cases:
        got = plain(ask(function, *case.arguments))
        if alike(got, case.wanted):
            continue
        name = getattr(function, "__name__", "the function")
        words = [f"{_call(name, case.arguments)} should be {_short(case.wanted)}, yours is {_short(got)}."]
        words += [case.about] if case.about else []
        words += [said for wrong, said in hints if _does(wrong, case.arguments, got)][:1]
        raise NotYet(" ".join(words))
    return len(cases)


def plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists; their numbers as Python's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(v) for v in value]
    return value


def alike(a: Any, b: Any) -> bool:
    """Equal, with numbers equal up to the rounding of float32, in lists and dicts too. a: a `plain` value.

    A dict may hold more than it should, and a set may be a list.
    """
    if isinstance(b, dict):
        return isinstance(a, dict) and all(k in a and alike(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        return isinstance(a, list) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(b, set):
        return isinstance(a, list | set | frozenset) and set(a) == b
    if isinstance(b, float):
        try:
            return math.isclose(float(a), b, rel_tol=1e-5, abs_tol=1e-6)
        except (TypeError, ValueError):
            return False
    return bool(a == b)


def passed(words: str, *details: object) -> Html:
    """What a check shows when all is right."""
    return verdict_box("passed", None, words, details)


def _does(wrong: Callable[..., Any], arguments: tuple[Any, ...], got: Any) -> bool:
    try:
        return alike(got, plain(wrong(*map(_copied, arguments))))
    except Exception:  # a mistake need not work on every case
        return False


@contextlib.contextmanager
def _patience(name: str) -> Iterator[None]:
    """NotYet after PATIENCE seconds, in the main thread, where a kernel runs its cells."""

    def ring(*_: object) -> None:
        raise NotYet(f"{name} has not come back after {PATIENCE} s: is there a loop that never ends?")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    rang = signal.signal(signal.SIGALRM, ring)
    left = signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, rang)


def _line(error: Exception) -> str:
    """The last line of the reader's own code that the error went through."""
    ours = (str(Path(__file__).parent), sys.prefix, sys.base_prefix + "/lib")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames and frames[-1].line else ""


def _call(name: str, arguments: Iterable[Any]) -> str:
    return f"{name}({', '.join(_short(a) for a in arguments)})"


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return f"<{type(value).__name__} {list(shape)}>"
    text = getattr(value, "__name__", None) or repr(_rounded(value))
    if "\n" in text and isinstance(value, PLAIN):  # tensors in a dict
        return f"<{type(value).__name__} of {len(value)}>"
    if len(text) <= LONGEST:
        return text
    return text[:LONGEST] + "…" if isinstance(value, PLAIN) else f"<{type(value).__name__}>"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def _copied(value: Any) -> Any:
    """A copy of what a reader's function might change; evidence, open files and functions as they are."""
    return copy.deepcopy(value) if isinstance(value, PLAIN) or hasattr(value, "clone") else value
