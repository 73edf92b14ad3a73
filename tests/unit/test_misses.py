"""Losses by prompt, token and place, on rounds small enough to count by hand."""

from types import SimpleNamespace

import numpy as np

from eaglelab.misses import along_text, generations, per_prompt, per_token, reach
from eaglelab.simulate import Rounds
from eaglelab.traces import Round, Trace

#             n   drafted       parents        committed
ROUNDS = [
    Round(10, [1, 2, 3], None, 2, [1, 9]),  # 1 found, 9 missed where 2 was drafted
    Round(12, [4, 5, 6], None, 4, [4, 5, 6, 7]),  # all found; 7 is the bonus, nobody's miss
    Round(45, [8, 9, 9], None, 1, [9]),  # 9 missed
    Round(46, [], None, 1, [3]),  # the server did not draft: nothing was due
]


def capture(*traces):
    return SimpleNamespace(requests={t.rid: t for t in traces})


A = Trace("a", "dp0.tp0", list(range(10)), rounds=ROUNDS)
B = Trace("b", "dp0.tp0", list(range(5)), rounds=[Round(5, [1], None, 2, [1, 2])])
STORED = Trace("x-stored-0", "dp0.tp0", [1], rounds=ROUNDS)
IDLE = Trace("idle", "dp0.tp0", [1])


def test_generations_leave_out_stored_texts_and_requests_without_rounds():
    assert [t.rid for t in generations(capture(A, STORED, IDLE, B))] == ["a", "b"]


def test_per_token_counts_what_was_due():
    found = {t.token: (t.missed, t.found) for t in per_token(capture(A))}
    assert found == {9: (2, 0), 1: (0, 1), 4: (0, 1), 5: (0, 1), 6: (0, 1)}


def test_per_token_worst_first_and_outside_the_draft_vocabulary():
    worst = per_token(capture(A, B), vocabulary=[1, 2])[0]
    assert (worst.token, worst.share, worst.draftable) == (9, 1.0, False)
    assert per_token(capture(A))[0].draftable is None


def test_per_prompt_worst_first_with_its_rungs():
    rounds = Rounds(["a", "a", "c"], np.array([10, 12, 0]), np.array([3, 4, 1]), 3)
    first, second = per_prompt(capture(A, B), {"3": rounds, "4": None})
    assert (first.rid, first.accept_length, first.rounds) == ("a", 2.0, 4)  # (2 + 4 + 1 + 1) / 4; B: 2.0 too
    assert dict(first.others) == {"3": 3.5} and dict(second.others) == {}


def test_along_text_in_stretches_of_32():
    found = [(s.start, s.rounds, s.accept_length) for s in along_text(capture(A))]
    assert found == [(0, 2, 3.0), (32, 2, 1.0)]


def test_reach_is_the_depth_of_a_tree():
    assert reach(Round(0, [1, 2, 3, 4], [0, 0, 1, 3], 1, [9])) == 3
    assert reach(Round(0, [], None, 1, [9])) == 0
