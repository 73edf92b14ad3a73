"""Counterfactuals: an edit of a cause, feed and wiring derived anew, features that hold what they need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trainer import DRAFTS, VOCAB, Checkpoint, H, generation

from eaglelab import counterfactual as module
from eaglelab.counterfactual import counterfactual
from eaglelab.errors import BadInput
from eaglelab.wiring import Feed

FEED = Feed((1, 2, 3), 3 * H, dtype="float32")
NARROW = Feed((4,), H, final_norm=True, dtype="float32")


class Launch(SimpleNamespace):
    steps, topk, draft_tokens = DRAFTS, 1, DRAFTS + 1

    def with_target(self, target):
        return Launch(**vars(self) | {"target": target})

    def with_flags(self, text):
        return Launch(**vars(self) | {"algorithm": text.split()[-1]})


class Editable(Checkpoint):
    def with_config(self, changes):
        return Editable(self.tensors, {**self.config, **changes})


@pytest.fixture
def wrongly_served(monkeypatch):
    """A server launched as EAGLE: it feeds narrow rows; its re-prefill has the depths that were trained."""
    healthy = generation()
    right = healthy.drafter.wiring
    wrong = replace(right, fc="bypassed", lm_head="target", vocab_map="dropped", logits_width=40)

    def served(checkpoint, launch):
        if launch.algorithm not in ("EAGLE", "EAGLE3"):
            raise BadInput(f"--speculative-algorithm {launch.algorithm}: no EAGLE drafter is served")
        if launch.algorithm == "EAGLE3" and checkpoint.config.get("aux", True):
            feed = replace(FEED, depths=tuple(checkpoint.config.get("depths", FEED.depths)))
            return feed, replace(right, feedback=checkpoint.config.get("feedback", right.feedback))
        return NARROW, wrong

    monkeypatch.setattr(module, "served", served)
    trace = healthy.requests["a"]
    wide, further = trace.features, healthy.tokens[60:64].tolist()
    narrow = np.random.default_rng(0).normal(size=(len(wide), H)).astype(np.float32)
    streams = {d: wide[:60, (d - 1) * H : d * H] for d in (1, 2, 3)} | {4: narrow[:60]}
    again = SimpleNamespace(rid="a", token_ids=trace.tokens[:60], further=further, depths=[1, 2, 3, 4],
                            dtype="float32", stream=streams.__getitem__, final=narrow[:60])  # fmt: skip
    trace.features = narrow
    target = Checkpoint({"lm_head.weight": torch.randn(VOCAB, H)})
    target.facts = None
    capture = SimpleNamespace(requests={"a": trace}, reprefill={"a": again}, launch=Launch(algorithm="EAGLE"))
    checkpoint = Editable(
        {n: w for n, w in healthy.drafter.weights.items()} | {"d2t": healthy.drafter.weights["d2t"]}
    )
    return SimpleNamespace(capture=capture, checkpoint=checkpoint, target=target, trace=trace)


def predict(world, *args, **kwargs):
    return counterfactual(world.capture, world.checkpoint, world.target, *args, **kwargs)


def test_the_right_flag_predicts_what_the_right_server_measured(wrongly_served):
    found = predict(wrongly_served, "--speculative-algorithm EAGLE3")
    rounds = wrongly_served.trace.rounds  # as a rightly launched server ran them
    assert found.reason is None and found.source == "re-prefilled"
    assert found.rounds.lengths.tolist() == [r.accept_len for r in rounds]
    assert found.accept_length == sum(r.accept_len for r in rounds) / len(rounds)
    assert found.edit == "--speculative-algorithm EAGLE3"
    assert (found.feed, found.wiring.fc) == (FEED, "applied")


def test_without_an_edit_the_captured_rows_are_used(wrongly_served):
    found = predict(wrongly_served)
    assert found.source == "rows as captured" and found.edit == "as it is"
    assert found.accept_length < 1.3


def test_an_edit_of_the_config(wrongly_served):
    launch = wrongly_served.capture.launch.with_flags("EAGLE3")
    found = predict(wrongly_served, config={"feedback": "pre-norm"}, launch=launch)
    assert found.edit == "config.json: feedback = 'pre-norm'"
    assert found.wiring.feedback == "pre-norm"
    assert found.source == "re-prefilled"  # served says wide rows, but narrow ones were captured
    assert 1 <= found.accept_length < predict(wrongly_served, launch=launch).accept_length
    still = predict(wrongly_served, "--speculative-algorithm EAGLE3", config={"aux": False})
    assert still.source == "rows as captured"  # the flag alone does not change the feed back
    assert "aux = False" in still.edit and "EAGLE3" in still.edit


def test_other_depths_of_the_same_width_come_from_the_re_prefill(wrongly_served):
    """Rows as captured would do if only their width counted; their depths count."""
    wide = np.concatenate([wrongly_served.capture.reprefill["a"].stream(d) for d in (1, 2, 3)], axis=1)
    wrongly_served.trace.features = wide
    launch = wrongly_served.capture.launch.with_flags("EAGLE3")
    assert predict(wrongly_served, launch=launch).source == "rows as captured"
    found = predict(wrongly_served, config={"depths": [3, 2, 1]}, launch=launch)
    assert found.source == "re-prefilled" and found.feed.depths == (3, 2, 1)
    assert found.accept_length < predict(wrongly_served, launch=launch).accept_length


def test_what_cannot_be_predicted_says_why(wrongly_served):
    found = predict(wrongly_served, "--speculative-algorithm NGRAM")
    assert found.rounds is None and found.accept_length is None and found.interval is None
    assert found.reason == "--speculative-algorithm NGRAM: no EAGLE drafter is served"
    wrongly_served.capture.reprefill["a"].depths = [1, 3]
    found = predict(wrongly_served, "--speculative-algorithm EAGLE3")
    assert "depths [2] were not recorded" in found.reason and "capture with re-prefill" in found.reason
    wrongly_served.capture.reprefill.clear()
    found = predict(wrongly_served, "--speculative-algorithm EAGLE3")
    assert found.reason == (
        "no features for depths [1, 2, 3]: it was not re-prefilled; capture with re-prefill"
    )
