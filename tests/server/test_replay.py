"""Replay against genuine SGLang: the server's own draft tokens, from the target's features alone."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import CONFIGURATIONS, PROMPTS

from eaglelab.capture import open_capture
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.collect import capture_server
from eaglelab.counterfactual import counterfactual
from eaglelab.drafter import Drafter
from eaglelab.features import StoredFeatures
from eaglelab.ladder import climb
from eaglelab.replay import replay
from eaglelab.serve import CHECKOUT
from eaglelab.served import served
from eaglelab.server import Server
from eaglelab.simulate import Rounds, Speculation, simulate, texts
from eaglelab.steps import view
from eaglelab.stored import to_send

DRAFTER, TARGET = CHECKOUT / "data" / "drafter-sglang", CHECKOUT / "data" / "target"
FEATURES = CHECKOUT / "data" / "features"
NEW_TOKENS = 96


STORED = ("eagle3-chain", "eagle-chain")  # configurations that are sent the stored texts too


@pytest.fixture(scope="module")
def captures(servers, tmp_path_factory):
    """One capture a configuration, made when first asked for."""
    made = {}

    def get(name: str, **arguments):
        if name not in made:
            server = servers.get(name, **arguments)
            out = tmp_path_factory.mktemp("captures") / name
            sent = to_send(StoredFeatures.open(FEATURES)) if name in STORED else []
            with Server(server.url) as client:
                made[name] = capture_server(
                    client, PROMPTS, out, NEW_TOKENS, ignore_eos=True, batch=4, texts=sent
                )
        return made[name]

    return get


def drafter_of(capture, **edits) -> Drafter:
    target = open_target(TARGET)
    checkpoint = open_checkpoint(DRAFTER)
    _, wiring = served(checkpoint, capture.launch.with_target(target.facts))
    return Drafter(checkpoint, type(wiring)(**{**vars(wiring), **edits}), target)


def walked(capture, drafter) -> Rounds:
    speculation = Speculation.of(capture.launch)
    return Rounds.join([simulate(drafter, t, speculation) for t in texts(capture)[0]], speculation.steps)


def same_rounds(walk: Rounds, capture) -> bool:
    mine = set(zip(walk.rids, walk.starts.tolist(), walk.lengths.tolist(), strict=True))
    return mine == {(t.rid, r.n, r.accept_len) for t in capture.requests.values() for r in t.rounds}


CASES = ["eagle3-chain", "eagle3-tree", "eagle-chain", "eagle3-chain-chunked"]


@pytest.mark.parametrize("server", CASES, indirect=True)
def test_replay_equals_the_server(server, request, captures):
    """Every draft token, in float32, of batched requests; trees with their links; simulated rounds too."""
    name = request.node.callspec.params["server"]
    capture = captures(name)
    assert {t.state for t in capture.requests.values()} == {"complete"}
    stored = to_send(StoredFeatures.open(FEATURES)) if name in STORED else []
    assert len(capture.requests) == len(PROMPTS) + len(stored)
    if name == "eagle3-chain-chunked":
        assert any(t.chunks > 1 for t in capture.requests.values())
    assert max(len(e.rids) for e in capture.events(kind="draft")) > 1
    drafter = drafter_of(capture)
    found = replay(capture, drafter)
    rounds = sum(len(t.rounds) for t in capture.requests.values())
    per_round = capture.launch.draft_tokens - 1
    assert (len(found.rounds), found.tokens, found.skipped) == (rounds, rounds * per_round, {})
    assert found.exact, found.disagreements[:3]
    assert found.fed_errors.max() < 1e-5 and len(found.fed_errors) == rounds
    if name == "eagle3-tree":
        assert all(r.parents for t in capture.requests.values() for r in t.rounds)
    assert same_rounds(walked(capture, drafter), capture)


@pytest.mark.server("eagle3-chain")
def test_wrong_replays_are_noticed(server, captures):
    """One thing wrong at a time; the figures were measured on this model and are far apart."""
    capture = captures("eagle3-chain")
    agreement = {
        "d2t dropped": replay(capture, drafter_of(capture, vocab_map="dropped")).agreement,
        "pre-norm feedback": replay(capture, drafter_of(capture, feedback="pre-norm")).agreement,
        "input norm skipped": replay(capture, drafter_of(capture, norm_before_fc="none")).agreement,
        "token not shifted": replay(capture, drafter_of(capture, token_shift=0)).agreement,
    }
    assert agreement["d2t dropped"] < 0.05
    assert all(share < 0.8 for share in agreement.values()), agreement
    drafter = drafter_of(capture)
    for trace in capture.requests.values():  # negative control: the same features, in another order
        order = np.random.default_rng(0).permutation(len(trace.features))
        trace.__dict__["features"] = trace.features[order]
    assert replay(capture, drafter).agreement < 0.3
    for trace in capture.requests.values():
        del trace.__dict__["features"]
    assert replay(capture, drafter).exact


@pytest.mark.server("eagle3-tree")
def test_draft_kv_stays_with_the_branch_row(server, captures):
    """When a tree's branches are reshuffled, hidden states follow the parent, draft KV does not: the rule."""
    assert not replay(captures("eagle3-tree"), drafter_of(captures("eagle3-tree"), tree_kv="parent")).exact


@pytest.mark.server("eagle-chain")
def test_the_wrong_head_is_noticed(server, captures):
    """Under EAGLE the target's head is cut to draft_vocab_size columns: without the cut, replay disagrees."""
    capture = captures("eagle-chain")
    assert replay(capture, drafter_of(capture, logits_width=0)).agreement < 0.9
    assert replay(capture, drafter_of(capture, lm_head="own")).agreement < 0.1


@pytest.mark.server("eagle-chain")
def test_counterfactual_of_the_wrong_flag(server, captures):
    """From the broken server alone: what the rightly launched one measures, within 0.1. Chain and tree."""
    capture = captures("eagle-chain")
    checkpoint, target = open_checkpoint(DRAFTER), open_target(TARGET)
    healthy = captures("eagle3-chain")  # made before, in the order of the configurations
    assert walked(capture, drafter_of(capture)).accept_length < 1.1
    found = counterfactual(capture, checkpoint, target, "--speculative-algorithm EAGLE3")
    measured = replay(healthy, drafter_of(healthy)).captured.accept_length
    assert found.reason is None and found.source == "re-prefilled"
    assert abs(found.accept_length - measured) < 0.1
    assert found.interval[0] < measured < found.interval[1]
    assert found.accept_length > 2.5
    flags = "--speculative-algorithm EAGLE3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    tree = captures("eagle3-tree")
    measured = replay(tree, drafter_of(tree)).captured.accept_length
    assert abs(counterfactual(capture, checkpoint, target, flags).accept_length - measured) < 0.1
    again = counterfactual(capture, checkpoint, target)
    assert again.source == "rows as captured" and again.accept_length < 1.1


@pytest.mark.server("eagle-chain")
def test_ladder_of_the_wrong_flag(server, captures):
    stored = StoredFeatures.open(FEATURES)
    found = climb(open_checkpoint(DRAFTER), open_target(TARGET), captures("eagle-chain"), stored)
    assert found.failed == ["wiring"]
    assert found.rungs["3.stored"].source == "re-prefilled at the trained depths"
    assert found.drops["feed"].value == pytest.approx(0, abs=0.02)
    assert found.rungs["3"].source == "re-prefilled: served rows are 128 wide, trained ones 384"
    lengths = [found.rungs[name].accept_length for name in ("3", "4", "5")]
    assert lengths[0] > 2.5 and lengths[1] == lengths[2] < 1.1
    assert found.replay.exact


@pytest.mark.server("eagle3-chain")
def test_ladder_of_a_healthy_server(server, captures):
    stored = StoredFeatures.open(FEATURES)
    found = climb(open_checkpoint(DRAFTER), open_target(TARGET), captures("eagle3-chain"), stored)
    assert found.failed == [] and set(found.drops) == {"training", "feed", "wiring", "runtime"}
    assert found.rungs["3.stored"].source == found.rungs["3"].source == "rows as captured"
    assert len(found.rungs["1"].rounds.lengths) >= 100
    assert found.drops["feed"].value == pytest.approx(0, abs=0.02)  # the trainer stored bfloat16
    lengths = [found.rungs[name].accept_length for name in ("3", "4", "5")]
    assert lengths[0] == lengths[1] == lengths[2] > 2.5
    assert found.drops["runtime"].interval == (0.0, 0.0)


@pytest.mark.server("eagle3-chain")
def test_view_of_a_captured_round(server, captures):
    capture = captures("eagle3-chain")
    rid, trace = next(iter(capture.requests.items()))
    seen = view(capture, drafter_of(capture), rid, 3)
    happened = trace.rounds[3]
    assert [s.own for s in seen.steps] == happened.draft_tokens
    assert sum(s.accepted for s in seen.steps) == happened.accept_len - 1
    assert seen.bonus == trace.tokens[happened.n + happened.accept_len]


@pytest.mark.server("eagle3-tree")
def test_view_of_a_captured_tree(server, captures):
    capture = captures("eagle3-tree")
    rid, trace = next(iter(capture.requests.items()))
    number = max(range(len(trace.rounds)), key=lambda i: trace.rounds[i].accept_len)
    seen, happened = view(capture, drafter_of(capture), rid, number), trace.rounds[number]
    assert [s.own for s in seen.steps] == happened.draft_tokens and seen.tree
    assert [s.parent for s in seen.steps] == happened.parents
    assert sum(s.accepted for s in seen.steps) == happened.accept_len - 1


BF16 = "eagle3-chain-bf16"


@pytest.mark.server(BF16)
def test_forced_replay_of_a_bfloat16_server(servers, captures):
    """bf16 rounds: with the server's tokens fed back, disagreements are near-ties and states stay close."""
    capture = captures(BF16, **CONFIGURATIONS["eagle3-chain"], extra_flags=["--dtype", "bfloat16"])
    drafter = drafter_of(capture)
    found = replay(capture, drafter)
    assert found.forced and found.dtype == "bfloat16"
    assert found.agreement > 0.95
    assert max((gap for *_, gap in found.disagreements), default=0) <= 0.25
    assert found.fed_errors[int(0.99 * len(found.fed_errors))] < 2e-2
    wrong = replay(capture, drafter_of(capture, feedback="pre-norm"))
    assert wrong.agreement < 0.8
    assert replay(capture, drafter, forced=False).agreement <= found.agreement


def test_captures_can_be_opened_again(captures):
    capture = captures("eagle3-chain-chunked")
    assert replay(open_capture(capture.path), drafter_of(capture)).exact
