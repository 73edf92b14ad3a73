"""What every check of a lesson rests on: calling the reader's function, comparing, saying what is wrong."""

import numpy as np
import pytest
import torch

from eaglelab.lessons.checking import Case, NotYet, alike, ask, compare, given, plain


def test_a_readers_function_cannot_change_the_case():
    def greedy(items):
        items.clear()
        return 1

    case = [1, 2]
    assert ask(greedy, case) == 1 and case == [1, 2]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise NotImplementedError", r"f is not written yet"),
        ("return None", r"f\(3\) returns None"),
        ("return x / 0", r"f\(3\) stops with ZeroDivisionError: division by zero"),
    ],
)
def test_what_goes_wrong_is_said_in_words(body, words):
    names = {}
    exec(f"def f(x):\n    {body}", names)
    with pytest.raises(NotYet, match=words):
        ask(names["f"], 3)


def test_what_is_no_function_or_still_dots():
    with pytest.raises(NotYet, match="no function"):
        ask(...)
    with pytest.raises(NotYet, match="`fix` is still|fix is still"):
        given(..., "fix")
    assert given(0, "fix") == 0


def test_equal_means_equal_up_to_rounding_and_whatever_holds_it():
    assert alike(0.1 + 0.2, 0.3) and alike({"a": 1.0}, {"a": 1.0 + 1e-12}) and alike(1, True)
    for held in (torch.tensor([1, 2]), np.array([1, 2]), (1, 2), range(1, 3)):
        assert alike(plain(held), [1, 2])
    assert not alike([1, 2, 3], [1, 2]) and not alike(None, 1.0)
    assert not alike({"a": 1}, {"b": 1}) and not alike(0.31, 0.3)


def test_a_typical_mistake_is_named_and_only_that_one():
    cases = [Case((2,), 4.0), Case((3,), 9.0, "Three squared.")]
    hints = [(lambda x: 2.0 * x, "That doubles."), (lambda x: x**3, "That cubes.")]
    assert compare(lambda x: float(x * x), cases, hints) == 2
    with pytest.raises(NotYet, match=r"should be 9.0, yours is 6.0. Three squared. That doubles.$"):
        compare(lambda x: 2.0 * x, cases, hints)
    with pytest.raises(NotYet, match=r"should be 4.0, yours is 5.$"):
        compare(lambda x: 5, cases, hints)
