"""Replay and simulation: bookkeeping against literal answers, drafts against the trainer's own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from trainer import DRAFTS as STEPS
from trainer import VOCAB, Checkpoint, generation, trainer_model

from eaglelab.capture import open_capture
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.replay import Replay, ReplayedRound, replay, replay_text
from eaglelab.served import served as wirings_of
from eaglelab.simulate import (
    Speculation,
    Text,
    accept_lengths,
    captured_text,
    matched,
    reprefilled_text,
    simulate,
    texts,
)
from eaglelab.steps import view
from eaglelab.traces import Reprefill, Round, stored_index
from eaglelab.wiring import Feed

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="module")
def served():
    return generation()


def test_replay_gives_the_servers_draft_tokens(served):
    found = replay(served, served.drafter)
    rounds = served.requests["a"].rounds
    assert [r.own for r in found.rounds] == [r.draft_tokens for r in rounds]
    assert found.exact and found.agreement == 1.0 and found.tokens == STEPS * len(rounds)
    assert found.captured.lengths.tolist() == [r.accept_len for r in rounds]


def test_shuffled_features_break_the_agreement(served):
    """Negative control: the agreement comes from the features, not from what the server drafted."""
    shuffled = SimpleNamespace(**vars(served.requests["a"]) | {"prompt_len": 10})
    order = np.random.default_rng(0).permutation(len(shuffled.features))
    shuffled.features = shuffled.features[order]
    capture = SimpleNamespace(requests={"a": shuffled}, reprefill={}, launch=served.launch)
    assert replay(capture, served.drafter).agreement < 0.3


def test_a_wrong_draft_token_of_the_server_is_seen(served):
    kept = served.requests["a"].rounds
    rounds = [Round(r.n, list(r.draft_tokens), None, r.accept_len, r.committed) for r in kept]
    true = rounds[4].draft_tokens[1]
    rounds[4].draft_tokens[1] = other = (true + 1) % VOCAB
    trace = SimpleNamespace(**vars(served.requests["a"]) | {"rounds": rounds, "prompt_len": 10})
    capture = SimpleNamespace(requests={"a": trace}, reprefill={}, launch=served.launch)
    free = replay(capture, served.drafter)
    assert (free.equal, free.tokens) == (STEPS * len(rounds) - 1, STEPS * len(rounds))
    ((seen, step, gap),) = free.disagreements
    assert (seen.n, step, seen.own[1], seen.server[1]) == (rounds[4].n, 1, true, other)
    assert gap == seen.gap[1] > 0
    forced = replay(
        capture, served.drafter, forced=True
    )  # the wrong token is fed back: step 3 may differ too
    assert forced.rounds[4].own[:2] == [rounds[4].draft_tokens[0], true]
    assert forced.rounds[3].gap == [0.0] * STEPS and forced.rounds[4].gap[1] >= gap


def test_partial_requests_are_skipped_with_their_reason(served):
    trace = SimpleNamespace(rid="a", state="partial", why="the capture ended during its prefill")
    capture = SimpleNamespace(requests={"a": trace}, reprefill={}, launch=served.launch)
    found = replay(capture, served.drafter)
    assert found.skipped == {"a": "request a is partial: the capture ended during its prefill"}
    assert not found.exact
    by_name = {m.name: m for m in found.measurements()}
    assert by_name["replay.agreement"].value is None
    assert by_name["replay.agreement"].reason == "no round of this capture can be replayed"


def test_measurements_carry_definitions(served):
    by_name = {m.name: m for m in replay(served, served.drafter).measurements()}
    agreement = by_name["replay.agreement"]
    assert (agreement.value, agreement.unit) == (1.0, "share")
    assert "its own draft tokens fed back" in agreement.definition and "float32" in agreement.definition


def test_fed_error_is_relative(served):
    """The drafter's own state, as captured, is only compared with: |own - server| / |server|."""
    text = captured_text(served.requests["a"])
    n = served.requests["a"].rounds[0].n
    own = Drafting.over(served.drafter, text.tokens, text.features).feedback[n - 1].numpy()
    half = SimpleNamespace(
        n=n, draft_tokens=served.requests["a"].rounds[0].draft_tokens, parents=None, accept_len=1, fed=own / 2
    )
    trace = SimpleNamespace(**vars(served.requests["a"]) | {"rounds": [half], "prompt_len": 10})
    capture = SimpleNamespace(requests={"a": trace}, reprefill={}, launch=served.launch)
    assert replay(capture, served.drafter).rounds[0].fed_error == pytest.approx(1.0)


def test_simulation_walks_the_servers_own_rounds(served):
    trace = served.requests["a"]
    walked = simulate(served.drafter, captured_text(trace), Speculation(STEPS, 1, STEPS + 1))
    assert walked.starts.tolist() == [r.n for r in trace.rounds]
    assert walked.lengths.tolist() == [r.accept_len for r in trace.rounds]
    assert walked.censored == 0
    taken = np.array([r.accept_len for r in trace.rounds])
    assert walked.acceptance == [float((taken >= j).mean()) for j in (2, 3, 4)]


def test_a_round_that_the_text_cannot_finish_is_censored(served):
    """Cut the text after the first draft of a round in which more are accepted: its length is not known."""
    rounds = served.requests["a"].rounds
    whole = next(r for r in rounds[2:] if r.accept_len == STEPS + 1)
    tokens = served.tokens[: whole.n + 2].tolist()
    text = Text("a", tokens, served.features, 10, len(tokens))
    walked = simulate(served.drafter, text, Speculation(STEPS))
    assert walked.censored == 1
    assert walked.starts.tolist() == [r.n for r in rounds if r.n < whole.n]
    state = Drafting.over(served.drafter, served.tokens, served.features)
    lengths, known = accept_lengths(state, [whole.n], tokens, Speculation(STEPS))
    assert (lengths.tolist(), known.tolist()) == ([2], [False])
    lengths, known = accept_lengths(state, [whole.n], served.tokens.tolist(), Speculation(STEPS))
    assert (lengths.tolist(), known.tolist()) == ([STEPS + 1], [True])


def test_tokens_past_the_end_come_from_the_re_prefill(served):
    trace = served.requests["a"]
    whole = trace.prompt_ids + trace.output_ids
    again = Reprefill("a", whole, further=served.tokens[60:66].tolist())
    assert captured_text(trace, again).tokens == served.tokens[:66].tolist()
    again.token_ids[30] += 1  # another text (a near-tie in bfloat16): what was captured stands
    assert captured_text(trace, again).tokens == trace.tokens


def test_matched_follows_one_path_from_the_root():
    #   root - 5 - 7 - 9          nodes 1..5: 5, 6, 7, 8, 9
    #        \ 6 - 8
    tokens, parents = [5, 6, 7, 8, 9], [0, 0, 1, 2, 3]
    assert matched(tokens, parents, [5, 7, 9]) == 3
    assert matched(tokens, parents, [6, 8, 9]) == 2
    assert matched(tokens, parents, [5, 8, 9]) == 1
    assert matched(tokens, parents, [7, 9, 9]) == 0


def test_tree_walk_takes_the_branch_that_comes_true(served):
    """A tree that is wide enough holds the chain; with its own text it accepts at least as much."""
    text = captured_text(served.requests["a"])
    chain = simulate(served.drafter, text, Speculation(STEPS, 1, STEPS + 1))
    state = Drafting.over(served.drafter, text.tokens, text.features)
    tree, _ = accept_lengths(state, chain.starts, text.tokens, Speculation(STEPS, 4, 1 + 4 + 16 + 16))
    assert (tree >= chain.lengths).all()


def test_features_of_a_feed_are_its_depths_side_by_side():
    streams = {0: np.full((4, 2), 0.0), 2: np.full((4, 2), 2.0), 5: np.full((4, 2), 5.0)}
    again = SimpleNamespace(rid="a", token_ids=[1, 2, 3, 4], further=[5], depths=[0, 2, 5], dtype="float32",
                            stream=lambda depth: streams[depth], final=np.full((4, 2), 9.0))  # fmt: skip
    text = reprefilled_text(again, Feed((5, 2), 4))
    assert text.features.tolist() == [[5.0, 5.0, 2.0, 2.0]] * 4
    assert (text.tokens, text.end) == ([1, 2, 3, 4, 5], 4)
    assert reprefilled_text(again, Feed((5,), 2, final_norm=True)).features.tolist() == [[9.0, 9.0]] * 4
    with pytest.raises(
        BadInput, match=r"re-prefill of a: depths \[3\] were not recorded \(\[0, 2, 5\] were\)"
    ):
        reprefilled_text(again, Feed((2, 3), 4))


def test_stored_ids():
    assert stored_index("eaglelab-61f1dd82-stored-0012") == 12
    assert stored_index("stored-3") == 3
    assert stored_index("eaglelab-61f1dd82-0012") is None
    assert stored_index("restored-3") is None


def test_view_reads_a_round_step_by_step(served):
    trace = served.requests["a"]
    number = next(i for i, r in enumerate(trace.rounds) if r.accept_len == 2)
    happened = trace.rounds[number]
    seen = view(served, served.drafter, "a", number)
    assert seen.before == trace.tokens[: happened.n + 1] and not seen.tree
    assert [s.own for s in seen.steps] == [s.server for s in seen.steps] == happened.draft_tokens
    assert [s.accepted for s in seen.steps] == [True, False, False]
    assert [s.target for s in seen.steps] == [*happened.committed, None]
    assert [s.fed for s in seen.steps] == [trace.tokens[happened.n], *happened.draft_tokens[:2]]
    assert seen.bonus == happened.committed[1]
    for step in seen.steps:
        token, probability = step.choices[0]
        assert (token, probability) == (step.own, pytest.approx(step.probability))
        assert step.norms["layers.0.attention"] > 0
    assert {"features", "input_norm", "fc"} < set(seen.steps[0].norms)
    assert "fc" not in seen.steps[1].norms and "embed" in seen.steps[1].norms
    with pytest.raises(BadInput, match="request a, round 99: it has"):
        view(served, served.drafter, "a", 99)


def test_golden_capture_of_a_genuine_server():
    """The repository's own capture of genuine SGLang in float32: every draft token of every round."""
    capture = open_capture(DATA / "golden-capture")
    checkpoint, target = open_checkpoint(DATA / "drafter-sglang"), open_target(DATA / "target")
    _, wiring = wirings_of(checkpoint, capture.launch.with_target(target.facts))
    found = replay(capture, Drafter(checkpoint, wiring, target))
    assert found.exact and len(found.rounds) == sum(len(t.rounds) for t in capture.requests.values()) > 20
    assert found.fed_errors.max() < 1e-5 and len(found.fed_errors) == len(found.rounds)
    walks = [simulate(Drafter(checkpoint, wiring, target), t, Speculation(5)) for t in texts(capture)[0]]
    assert sorted(n for walk in walks for n in walk.lengths) == sorted(found.captured.lengths)
    wrong = Drafter(checkpoint, replace(wiring, feedback="pre-norm"), target)
    assert replay(capture, wrong).agreement < 0.8


def test_a_tree_with_other_links_does_not_agree(served):
    text = captured_text(served.requests["a"])
    tree = Drafting.over(served.drafter, text.tokens, text.features).tree([12, 30], STEPS, 3, 8)
    rounds = [
        Round(n, tree.tokens[i].tolist(), tree.parents[i].tolist(), 1, []) for i, n in enumerate([12, 30])
    ]
    shape = Speculation(STEPS, 3, 8)
    assert [all(r.equal) for r in replay_text(served.drafter, text, rounds, shape)] == [True, True]
    rounds[1].parents[-1] = 0
    found = replay_text(served.drafter, text, rounds, shape)
    assert all(found[0].equal) and found[1].equal == [True] * 6 + [False]


def test_trees_agree_by_path_not_by_number():
    """The same tree with its branches numbered otherwise; then one leaf less and another more."""
    a = ReplayedRound("a", 5, [5, 6, 7, 8], [6, 5, 8, 7], [0.1], 1, None, [0, 0, 1, 2], [0, 0, 1, 2])
    assert a.equal == [True] * 4  # 5, 6, 5-7 and 6-8 in both
    b = ReplayedRound("a", 5, [5, 6, 7, 8], [5, 6, 7, 7], [0.1], 1, None, [0, 0, 1, 2], [0, 0, 1, 2])
    assert b.equal == [True, True, True, False]
    c = ReplayedRound("a", 5, [5, 6, 7, 8], [5, 6, 7, 8], [0.1], 1, None, [0, 0, 1, 2], [0, 0, 2, 2])
    assert c.equal == [True, True, False, True]  # 5-7 is not 6-7


def test_disagreements_come_widest_first():
    def one(n, own, gap):
        return ReplayedRound("a", n, [1, 2, 3], own, gap, 1)

    rounds = [one(5, [1, 2, 3], [0.1, 9, 9]), one(8, [1, 7, 7], [5, 0.3, 0.2])]
    rounds.append(one(9, [4, 2, 3], [0.7, 5, 5]))
    found = Replay(rounds, {}, False, "float32", 3)
    assert [(r.n, step, gap) for r, step, gap in found.disagreements] == [(9, 0, 0.7), (8, 1, 0.3)]
    assert (found.equal, found.tokens) == (6, 9)


def test_replay_is_forced_by_default_outside_float32(served):
    model = trainer_model(norm_output=True, norm_before_fc=True)
    narrow = Drafter(Checkpoint(dict(model.state_dict())), replace(served.drafter.wiring, dtype="bfloat16"))
    found = replay(served, narrow)
    assert found.forced and found.dtype == "bfloat16" and found.agreement > 0.9
    assert not replay(served, narrow, forced=False).forced
    by_name = {m.name: m for m in found.measurements()}
    assert "the server's draft tokens fed back" in by_name["replay.agreement"].definition
