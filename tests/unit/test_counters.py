"""Figures from counters: each by the definition that `explain` reads pasted figures by."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglelab import definitions as d
from eaglelab.counters import FIGURES, Counters, histogram, total
from eaglelab.explain import explain

# Five verifies of a chain of 3 steps (N = 4): 2, 0, 3, 1 and 0 drafts accepted; 12 tokens with the prefill's.
CHAIN = Counters(6, 15, 5, 12, 4, steps=3, histogram=(2, 1, 1, 1))
BY_HAND = {
    "accept_length.server": 2.2,  # 1 + 6 / 5
    "acceptance_rate.server": 0.4,  # 6 / 15
    "accept_length.sglang": 2.4,  # 12 / 5: the prefill's token too
    "accept_rate.old_style": 0.55,  # (6 + 5) / (5 * 4)
    "accept_rate.older_style": 0.55,  # (6 + 5) / (5 * (3 + 1))
    "accept_rate.oldest_style": 11 / 15,  # (6 + 5) / (5 * 3)
    "acceptance_rate.pooled": 0.4,  # 6 / (5 * 3)
    "acceptance.server.draft1": 0.6,
    "acceptance.server.draft2": 0.4,
    "acceptance.server.draft3": 0.2,
}


def rows(counters: Counters):
    return {m.name: m for m in counters.measurements()}


def test_every_figure_by_hand_with_its_definition():
    found = rows(CHAIN)
    for name, value in BY_HAND.items():
        assert found[name].value == pytest.approx(value), name
        assert len(found[name].definition) > 30, name
    for name, (_, definition) in FIGURES.items():
        assert definition.words in found[name].definition and definition.source in found[name].definition
    assert "nothing accepted reads 0.25" in found["accept_rate.old_style"].definition
    assert "nothing accepted reads 0.33" in found["accept_rate.oldest_style"].definition


def test_positions_sum_to_the_drafts_accepted_per_verify():
    positions = [m.value for name, m in rows(CHAIN).items() if name.startswith("acceptance.server.draft")]
    assert sum(positions) == pytest.approx(6 / 5)
    short = rows(Counters(1, 15, 5, 6, 4, steps=3, histogram=(4, 1)))  # SGLang stops at the longest it saw
    assert [short[f"acceptance.server.draft{j}"].value for j in (1, 2, 3)] == [0.2, 0.0, 0.0]


def test_a_tree_says_that_its_rate_is_another():
    tree = rows(Counters(6, 35, 5, 12, 8, steps=3, topk=4))
    assert tree["accept_rate.old_style"].value == pytest.approx(11 / 40)
    assert tree["accept_rate.older_style"].value == pytest.approx(11 / 20)  # S + 1: no tree's nodes
    for name, row in tree.items():
        assert ("not to be compared with a chain's" in row.definition) is ("rate" in name), name
    assert "compared with a chain's" not in rows(CHAIN)["acceptance_rate.server"].definition


@pytest.mark.parametrize(
    "names",
    [
        ("spec_num_correct_drafts", "spec_num_proposed_drafts"),  # 0.5.12 and later
        ("spec_accepted_drafts", "spec_proposed_drafts"),  # 0.5.11
        ("spec_accept_token_num", "spec_draft_token_num"),  # before
    ],
)
def test_counters_of_every_release_are_read(names):
    correct, proposed = names
    told = [{correct: 2, proposed: 10, "spec_verify_ct": 2}, {correct: 4, proposed: 5, "spec_verify_ct": 1}]
    assert (total(told, "correct"), total(told, "proposed"), total(told, "verifies")) == (6, 15, 3)
    (reading,) = explain(json.dumps(told[0]), steps=5).readings
    assert reading.correct == pytest.approx(1.0)


def test_a_counter_that_no_response_tells_is_not_zero():
    assert total([{"completion_tokens": 3}], "correct") is None and total([], "correct") == 0
    assert histogram([]) == () and histogram([{}]) == ()
    assert histogram([{"spec_correct_drafts_histogram": [2, 1]}, {"spec_accept_histogram": [1, 0, 4]}]) == (
        3,
        1,
        4,
    )
    assert histogram([{"spec_correct_drafts_histogram": [2, 1]}, {}]) == ()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_what_a_server_prints_of_our_counters_explains_back_to_them(accepted):
    """Counters -> every figure by its definition -> explain: the same drafts per verify."""
    verifies, correct, shape = len(accepted), sum(accepted), d.Shape(4, 5)
    counted = Counters(correct, verifies * 4, verifies, correct + verifies + 1, 5, steps=4)
    for name in ("acceptance_rate.server", "accept_rate.old_style", "accept_rate.oldest_style"):
        value, definition = counted.value(name), FIGURES[name][1]
        assert definition.correct(value, shape) == pytest.approx(correct / verifies)
    line = f"accept len: {counted.value('accept_length.server'):.6f}, " + (
        f"accept rate: {counted.value('accept_rate.old_style'):.6f}"
    )
    readings = explain(line, steps=4).readings
    assert any(
        r.definitions["rate"] is d.PER_DRAFT_TOKENS and abs(r.correct - correct / verifies) < 1e-5
        for r in readings
    )
