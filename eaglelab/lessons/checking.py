"""Calling a reader's function and saying in words what is not right yet."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from eaglelab.html import Html, verdict_box

LONGEST = 160  # characters of a value in a message
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
        got = function(*map(_copied, arguments))
    except NotImplementedError:
        raise NotYet(f"{name} is not written yet: replace its `raise NotImplementedError`.") from None
    except NotYet:  # what it was given to call has something to say
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f" (line {where.lineno}: {where.line})" if where.line else ""
        raise NotYet(f"{_call(name, arguments)} stops with {type(error).__name__}: {error}{line}") from error
    if got is None:
        raise NotYet(f"{_call(name, arguments)} returns None: is a `return` missing?")
    return got


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
        got = ask(function, *case.arguments)
        if alike(got, case.wanted):
            continue
        name = getattr(function, "__name__", "the function")
        words = [f"{_call(name, case.arguments)} should be {_short(case.wanted)}, yours is {_short(got)}."]
        words += [case.about] if case.about else []
        words += [said for wrong, said in hints if _does(wrong, case.arguments, got)][:1]
        raise NotYet(" ".join(words))
    return len(cases)


def alike(a: Any, b: Any) -> bool:
    """Equal, with numbers equal up to rounding, in lists, tuples and dicts too."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        listed = a.tolist() if hasattr(a, "tolist") else a
        if not isinstance(listed, list | tuple) or len(listed) != len(b):
            return False
        return all(alike(x, y) for x, y in zip(listed, b, strict=True))
    if isinstance(b, float) and not isinstance(b, bool):
        try:
            return math.isclose(float(a), b, rel_tol=1e-6, abs_tol=1e-9)
        except (TypeError, ValueError):
            return False
    return type(a) is type(b) and a == b if isinstance(b, bool) else bool(a == b)


def passed(words: str, *details: object) -> Html:
    """What a check shows when all is right."""
    return verdict_box("passed", None, words, details)


def _does(wrong: Callable[..., Any], arguments: tuple[Any, ...], got: Any) -> bool:
    try:
        return alike(got, wrong(*map(_copied, arguments)))
    except Exception:  # a mistake need not work on every case
        return False


def _call(name: str, arguments: Iterable[Any]) -> str:
    return f"{name}({', '.join(_short(a) for a in arguments)})"


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return f"<{type(value).__name__} {list(shape)}>"
    text = repr(round(value, 6)) if isinstance(value, float) else repr(value)
    if len(text) <= LONGEST:
        return text
    return text[:LONGEST] + "…" if isinstance(value, PLAIN) else f"<{type(value).__name__}>"


def _copied(value: Any) -> Any:
    """A copy of what a reader's function might change; evidence, open files and functions as they are."""
    return copy.deepcopy(value) if isinstance(value, PLAIN) or hasattr(value, "clone") else value
