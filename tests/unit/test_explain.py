"""Pasted figures of acceptance: formats, definitions, readings."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from eaglelab import cli, definitions, explain
from eaglelab.definitions import Shape
from eaglelab.errors import BadInput
from eaglelab.logline import parse

SGLANG = (
    "[2025-11-19 15:25:25] Decode batch, #running-req: 1, #token: 353, token usage: 0.00, accept len: 2.34, "
    "accept rate: 0.78, cuda graph: True, gen throughput (token/s): 41.96, #queue-req: 0, "
)
VLLM = (
    "INFO 09-09 11:51:35 [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 5.44, Accepted "
    "throughput: 4.37 tokens/s, Drafted throughput: 4.92 tokens/s, Accepted: 262 tokens, Drafted: 295 "
    "tokens, Per-position acceptance rate: 0.983, 0.949, 0.915, 0.881, 0.712, Avg Draft acceptance "
    "rate: 88.8%"
)
V0 = (
    "Speculative metrics: Draft acceptance rate: 0.642, System efficiency: 0.598, Number of speculative "
    "tokens: 3, Number of accepted tokens: 8547, Number of draft tokens: 13311, Number of emitted tokens: "
    "10616."
)
RESPONSE = {
    "spec_accept_rate": 0.01, "spec_accept_length": 1.0666666666666667, "spec_num_correct_drafts": 3,
    "spec_num_proposed_drafts": 300, "spec_verify_ct": 60, "completion_tokens": 64,
}  # fmt: skip


def readings(text, **shape):
    """The definitions of the rate, and the drafts accepted, of every reading."""
    found = explain.explain(text, **shape).readings
    return [(r.definitions["rate"].name if "rate" in r.definitions else None, r.correct) for r in found]


def test_the_example_of_the_manual():
    assert readings("accept len: 1.05, accept rate: 0.21", steps=5) == [("rate-oldest", pytest.approx(0.05))]
    both = readings("accept len: 1.05, accept rate: 0.21", draft_tokens=5)
    assert both == [("rate-old", pytest.approx(0.05)), ("rate-older", pytest.approx(0.05))]


def test_a_fifth_with_five_draft_tokens_is_nothing_by_the_old_definition():
    found = dict(readings("accept rate: 0.20", draft_tokens=5))
    assert found == {
        "rate": pytest.approx(0.8),
        "rate-old": pytest.approx(0, abs=1e-9),
        "rate-older": pytest.approx(0, abs=1e-9),
    }


def test_the_published_example_of_the_old_rate():
    """sglang#16274: 2.3377 tokens a verify, 3 draft tokens, rate .779."""
    line = "accept len: 2.3377, accept rate: 0.779"
    assert readings(line, draft_tokens=3)[0] == ("rate-old", pytest.approx(1.3377, abs=1e-3))
    assert "rate" not in dict(readings(line, draft_tokens=3))


def test_a_tree_of_its_own_size():
    """1.3 of 15 nodes accepted; of (1.3 + 1) / 16; the old rate by steps is above 1 in no reading."""
    line = "accept len: 2.30, accept rate: 0.09"
    assert readings(line, steps=3, topk=4, draft_tokens=16) == [("rate", pytest.approx(1.3, abs=0.1))]
    old = readings("accept len: 2.30, accept rate: 0.14", steps=3, topk=4, draft_tokens=16)
    assert old == [("rate-old", pytest.approx(1.3, abs=0.1))]
    assert readings(line, steps=3, topk=4) == []
    assert "without --draft-tokens" in explain.explain(line, steps=3, topk=4).notes[0]


def test_contradicting_figures_have_no_reading():
    assert readings("accept len: 4.00, accept rate: 0.10", steps=5) == []
    line = VLLM.replace("5.44", "4.95").replace("Accepted: 262 tokens, Drafted: 295 tokens, ", "")
    assert readings(line) == []


def test_rates_above_one_have_only_the_oldest_reading():
    assert readings("accept rate: 1.20", steps=5) == [("rate-oldest", pytest.approx(5))]
    assert readings("accept rate: 1.30", steps=5) == []


def test_the_last_line_of_several_counts_and_block_lengths_do_not():
    text = SGLANG + "\n" + SGLANG.replace("2.34", "1.50") + "block accept len: 9.00"
    assert parse(text).figures["length"].value == 1.5


def test_metrics_and_server_info():
    assert parse(
        'sglang:spec_accept_length{model="a b"} 2.5\nsglang:spec_accept_rate{} 0.5'
    ).figures.keys() == {
        "length",
        "rate",
    }
    assert parse('"avg_spec_accept_length": 2.345').figures["length"].slack == pytest.approx(0.0005)
    counters = (
        'vllm:spec_decode_num_drafts_total{e="0"} 59.0\nvllm:spec_decode_num_accepted_tokens_total 262.0'
    )
    (found,) = explain.explain(counters, steps=5).readings
    assert found.correct == pytest.approx(262 / 59)


def test_vllm_pools_and_counts_by_position():
    found = explain.explain(VLLM)
    assert found.shape == Shape(5, 6)
    (reading,) = found.readings
    assert reading.definitions["length"].name == "length"
    assert reading.correct == pytest.approx(4.44, abs=1e-3)  # 262 accepted of 59 drafts of 5
    assert explain.conditional(found.pasted.positions)[1] == pytest.approx(0.949 / 0.983)
    (without,) = explain.explain(VLLM.replace("5.44", "4.44")).readings
    assert without.definitions["length"].name == "length-drafts-only"


def test_vllm_v0_is_read_by_its_efficiency():
    found = explain.explain(V0)
    (reading,) = found.readings
    rounds = 13311 / 3
    assert 1 + reading.correct == pytest.approx(10616 / rounds, abs=2e-3)
    assert found.notes == (explain.V0_RATE,)


def test_a_response_is_read_by_its_counters():
    found = explain.explain(json.dumps({"text": "x", "meta_info": RESPONSE}))
    assert found.shape == Shape(5, 6)
    (reading,) = found.readings
    assert reading.correct == pytest.approx(0.05) and reading.definitions["rate"].name == "rate"
    assert found.notes[0] == "its length 1.07 counts the prefill's token too; 1 + correct / verifies is 1.05"


def test_several_responses_are_pooled_by_their_counters():
    other = RESPONSE | {"spec_num_correct_drafts": 57, "spec_num_proposed_drafts": 100, "spec_verify_ct": 20}
    found = explain.explain(json.dumps([{"meta_info": RESPONSE}, {"meta_info": other}]))
    assert found.shape == Shape(5, 6) and found.pasted.responses == 2
    (reading,) = found.readings
    assert reading.correct == pytest.approx(60 / 80)
    assert found.notes[0].startswith("2 responses, pooled")


def test_vllm_metrics_are_added_over_engines_and_counted_by_position():
    lines = [
        f'vllm:spec_decode_{name}{{engine="{e}"{more}}} {value}'
        for e in (0, 1)
        for name, more, value in (
            ("num_drafts_total", "", 50.0),
            ("num_draft_tokens_total", "", 100.0),
            ("num_accepted_tokens_total", "", 60.0),
            ("num_accepted_tokens_per_pos_total", ',position="0"', 40.0),
            ("num_accepted_tokens_per_pos_total", ',position="1"', 20.0),
        )
    ]
    found = explain.explain("\n".join(lines))
    assert found.pasted.counts == {"correct": 120, "proposed": 200, "verifies": 100}
    assert [p.value for p in found.pasted.positions] == [0.8, 0.4]
    (reading,) = found.readings
    assert found.shape == Shape(2, 3) and reading.correct == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("text", "message"),
    [("hello", "no figure of acceptance"), ("accept rate: 0.20", "give --steps"), ("", "no figure")],
)
def test_what_cannot_be_read_is_asked_for(text, message):
    with pytest.raises(BadInput, match=message):
        explain.explain(text)


counts = st.integers(1, 12).flatmap(
    lambda s: st.tuples(
        st.just(s), st.integers(1, 500).flatmap(lambda v: st.tuples(st.just(v), st.integers(0, v * s)))
    )
)


@given(counts, st.integers(1, 64))
def test_counters_to_each_definition_and_back(counted, extra):
    """The formulas written out once more, by hand, are the values; and each is undone."""
    steps, (verifies, correct) = counted
    shape = Shape(steps, steps + extra, 1 if extra == 1 else 4)
    m, n = correct / verifies, steps + extra
    by_hand = {
        "length": (verifies + correct) / verifies,
        "length-drafts-only": correct / verifies,
        "rate": correct / (verifies * (n - 1)),
        "rate-old": (correct + verifies) / (verifies * n),
        "rate-older": (correct + verifies) / (verifies * (steps + 1)),
        "rate-oldest": (correct + verifies) / (verifies * steps),
    }
    assert {d.name for d in explain.EVERY} == by_hand.keys()
    for definition in explain.EVERY:
        value = definition.value(m, shape)
        assert value == pytest.approx(by_hand[definition.name])
        assert definition.correct(value, shape) == pytest.approx(m, abs=1e-9)


@given(counts, st.sampled_from(definitions.SGLANG["rate"]))
def test_every_printed_pair_has_the_reading_that_made_it(counted, definition):
    """A length and a rate as SGLang prints them (two decimals) are read back, whatever its version."""
    steps, (verifies, correct) = counted
    m, shape = correct / verifies, Shape(steps, steps + 1)
    text = f"accept len: {1 + m:.2f}, accept rate: {definition.value(m, shape):.2f}"
    found = [r for r in explain.explain(text, steps=steps).readings if r.definitions["rate"] is definition]
    assert len(found) == 1
    assert found[0].low - 1e-6 <= m <= found[0].high + 1e-6


@given(counts)
def test_a_response_agrees_with_its_own_counters(counted):
    steps, (verifies, correct) = counted
    assume(correct < verifies * steps)
    said = {"spec_verify_ct": verifies, "spec_num_correct_drafts": correct}
    said |= {"spec_num_proposed_drafts": verifies * steps, "spec_accept_rate": correct / (verifies * steps)}
    found = explain.explain(json.dumps(said))
    assert found.shape == Shape(steps, steps + 1)
    assert any(r.correct == pytest.approx(correct / verifies, abs=1e-6) for r in found.readings)


def run(*words):
    return CliRunner().invoke(cli.app, ["explain", *words])


def test_the_command_speaks_plainly():
    done = run("accept len: 1.05, accept rate: 0.21", "--steps", "5")
    assert done.exit_code == 0
    assert "hardly anything is accepted: 0.05 of 5 drafts are accepted per verify" in done.output
    zero = run("accept rate: 0.20", "--draft-tokens", "5").output
    assert "2 readings fit" in zero
    assert "nothing is accepted: each verify yields the target's own token only" in zero
    assert "no reading fits; these figures contradict each other" in run(
        "accept len: 4.00, accept rate: 0.10", "--steps", "5"
    ).output  # fmt: skip
    assert "give --draft-tokens" in run(
        "accept len: 2.30, accept rate: 0.09", "--steps", "3", "--topk", "4"
    ).output  # fmt: skip


def test_the_command_as_json():
    said = json.loads(run("accept rate: 0.20", "--draft-tokens", "5", "--json").stdout)
    assert [r["definitions"]["rate"] for r in said["readings"]] == ["rate", "rate-old", "rate-older"]
    assert said["readings"][0]["by_definition"]["length"] == pytest.approx(1.8)
    assert run("nothing here", "--json").exit_code == 2
