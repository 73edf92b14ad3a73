"""The ladder's rules, on texts and captures small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trainer import DRAFTS, VOCAB, Checkpoint, H, generation, trainer_model, wired

from eaglelab import ladder as module
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.ladder import climb
from eaglelab.simulate import Rounds, Speculation
from eaglelab.stored import StoredText, Truth, measure_stored, stored_texts, usable_starts
from eaglelab.traces import Trace
from eaglelab.wiring import Feed

STEPS = 3


class Target(Checkpoint):
    facts = SimpleNamespace(hidden_size=4)


def one_hot_target(size=4):
    """Its next token is the largest channel of the last hidden state."""
    return Target(
        {"norm.weight": torch.ones(size), "lm_head.weight": torch.eye(size)}, {"rms_norm_eps": 1e-6}
    )


def test_a_start_counts_only_if_all_next_tokens_are_the_argmax():
    #            position: 0  1  2  3  4  5  6  7
    tokens = [3, 0, 1, 2, 3, 0, 1, 2]
    truth = [0, 1, 2, 3, 0, 3, 2, 0]  # after positions 0-4 the text goes on as the target would; then not
    last = torch.nn.functional.one_hot(torch.tensor(truth), 4).float() * 7
    text = StoredText(0, tokens, torch.zeros(8, 4), last)
    assert Truth(one_hot_target()).argmax(last).tolist() == truth
    # start n drafts tokens n + 1 ... n + S, which must be the argmax at n ... n + S - 1
    assert usable_starts(text, Truth(one_hot_target()), 1).tolist() == [1, 2, 3, 4, 6]
    assert usable_starts(text, Truth(one_hot_target()), 3).tolist() == [1, 2]
    assert usable_starts(text, Truth(one_hot_target()), 4).tolist() == [1]
    assert usable_starts(text, Truth(one_hot_target()), 8).tolist() == []


def test_the_argmax_is_taken_after_the_final_norm_over_the_whole_head(monkeypatch):
    monkeypatch.setattr("eaglelab.stored._ROWS", 7)  # several pieces of the head
    torch.manual_seed(0)
    weight, head, last = torch.rand(16) + 0.5, torch.randn(50, 16), torch.randn(30, 16)
    target = Target({"norm.weight": weight, "lm_head.weight": head}, {"text_config": {"rms_norm_eps": 1e-5}})
    normed = last / last.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt() * weight
    assert Truth(target).argmax(last).tolist() == (normed @ head.T).argmax(-1).tolist()


def expected(drafter, tokens, features, n):
    """What the drafter expects after n rows, nothing after them in sight."""
    state = Drafting.over(drafter, tokens[: n + 1], features[:n])
    return int(drafter.to_target(drafter.logits(state.normed[[n - 1]]).argmax(-1))[0])


def test_rungs_one_and_two_by_their_definitions():
    """Rung 1: each step sees the stored feature and token. Rung 2: only the first one does."""
    drafter = wired(trainer_model(norm_output=True))
    torch.manual_seed(5)
    features = torch.randn(40, 3 * H)
    tokens = torch.randint(VOCAB, (40,))
    for row in range(38):  # make most tokens what the drafter expects, so that lengths vary
        if row % 4:
            tokens[row + 2] = expected(drafter, tokens, features, row + 1)
    text = StoredText(4, tokens.tolist(), features, torch.zeros(40, H), starts=np.arange(1, 36))
    one, two = measure_stored(drafter, text, STEPS)
    assert set(one.rids) == {"stored-4"} and one.starts.tolist() == list(range(1, 36))

    for place, n in enumerate(range(1, 36)):
        forced = 0
        while forced < STEPS and expected(drafter, tokens, features, n + forced) == tokens[n + 1 + forced]:
            forced += 1
        drafts = Drafting.over(drafter, tokens, features).chain([n], STEPS).tokens[0].tolist()
        free = 0
        while free < STEPS and drafts[free] == tokens[n + 1 + free]:
            free += 1
        assert (one.lengths[place], two.lengths[place]) == (1 + forced, 1 + free)
    assert one.accept_length > two.accept_length > 1


def test_stored_texts_stand_in_feed_order_and_have_the_trained_width():
    hidden = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    sample = SimpleNamespace(
        token_ids=np.array([5, 6]), features=hidden.reshape(2, 12), last=np.zeros((2, 4)), dtype="float32"
    )
    stored = SimpleNamespace(samples=[sample], last_is="before the final norm")
    (text,) = stored_texts(stored, Feed((2, 4, 5), 12))
    assert text.features.tolist() == hidden.reshape(2, 12).tolist() and text.tokens == [5, 6]
    with pytest.raises(BadInput, match="stored features are 12 wide, the drafter was trained on 16"):
        list(stored_texts(stored, Feed((2, 4, 5, 6), 16)))


def stored_capture(text, rows, rid="eaglelab-1-stored-0000", width_note="float32"):
    trace = SimpleNamespace(
        rid=rid, state="complete", why="", tokens=text.tokens + [1], features=rows, feature_dtype=width_note,
        prompt_len=len(text.tokens), output_ids=[1], rounds=[], prompt_ids=text.tokens,
    )  # fmt: skip
    return SimpleNamespace(requests={rid: trace}, reprefill={})


def test_stored_text_as_the_server_fed_it():
    text = StoredText(0, [1, 2, 3], torch.zeros(3, 6), torch.zeros(3, 2))
    rows = np.ones((3, 6), np.float32)
    feed = Feed((1, 2, 3), 6)
    fed = text.as_fed(stored_capture(text, rows), feed)
    assert fed.features.tolist() == rows.tolist() and fed.source == "rows as captured"
    assert text.as_fed(stored_capture(text, rows, rid="eaglelab-1-stored-0001"), feed) is None
    assert text.as_fed(stored_capture(text, rows[:, :2]), feed) is None  # served narrow, and no re-prefill
    narrow = stored_capture(text, rows[:, :2])
    streams = {d: np.full((4, 2), d, np.float32) for d in (1, 2, 3)}
    narrow.reprefill["eaglelab-1-stored-0000"] = SimpleNamespace(
        rid="eaglelab-1-stored-0000", token_ids=[1, 2, 3, 1], further=[], depths=[1, 2, 3], dtype="float32",
        stream=streams.__getitem__,
    )  # fmt: skip
    fed = text.as_fed(narrow, feed)
    assert fed.features.tolist() == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 3
    assert fed.source == "re-prefilled at the trained depths"
    other = StoredText(0, [1, 9, 3], torch.zeros(3, 6), torch.zeros(3, 2))
    assert other.as_fed(stored_capture(text, rows), feed) is None  # not the same text


@pytest.fixture
def parts(monkeypatch):
    """climb() on a model in memory: its own head as target, wirings given by the test."""
    model = trainer_model(norm_output=True)
    drafter = wired(model)
    checkpoint = Checkpoint(dict(model.state_dict()))
    torch.manual_seed(9)
    target = Target(
        {"norm.weight": torch.ones(H), "lm_head.weight": torch.randn(VOCAB, H)}, {"rms_norm_eps": 1e-5}
    )
    feed = Feed((1, 2, 3), 3 * H, dtype="float32")
    pairs = {"trained": (feed, drafter.wiring), "served": (feed, drafter.wiring)}
    monkeypatch.setattr(module, "trained", lambda *_: pairs["trained"])
    monkeypatch.setattr(module, "served", lambda *_: pairs["served"])
    return SimpleNamespace(checkpoint=checkpoint, target=target, drafter=drafter, pairs=pairs)


def launched(**flags):
    launch = SimpleNamespace(steps=5, topk=1, draft_tokens=6, flag=flags.get)
    launch.with_target = lambda _: launch
    return launch


def stored_features(parts, texts=8, length=60):
    """Texts that the target would go on with, in which the drafter is often right."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(texts):
        hidden = torch.randn(length, 3 * H, generator=generator)
        tokens = torch.randint(VOCAB, (length,), generator=generator)
        for row in range(length - 2):
            if row % 3:
                state = Drafting.over(parts.drafter, tokens, hidden)
                tokens[row + 2] = parts.drafter.to_target(
                    parts.drafter.logits(state.normed[[row]]).argmax(-1)
                )[0]
        head = parts.target.load("lm_head.weight")
        last = head[tokens.roll(-1)]  # the state whose largest logit is the next token's
        samples.append(SimpleNamespace(token_ids=tokens.numpy(), features=hidden.numpy(), dtype="float32",
                                       last=last.numpy()))  # fmt: skip
    return SimpleNamespace(samples=samples, last_is="before the final norm")


def test_without_evidence_each_rung_says_how_to_get_it(parts):
    found = climb(parts.checkpoint, parts.target)
    reasons = {name: rung.reason for name, rung in found.rungs.items()}
    assert reasons == {
        "1": "no stored features: give the trainer's (--features)",
        "2": "no stored features: give the trainer's (--features)",
        "3.stored": "no stored features: give the trainer's (--features)",
        "3": "no capture: give --server or --capture",
        "4": "no capture: give --server or --capture",
        "5": "no capture: give --server or --capture",
    }
    assert found.drops == {} and found.failed == []
    values = {m.name: (m.value, m.reason) for m in found.measurements()}
    assert values["accept_length.rung1"] == (None, reasons["1"])
    assert set(values) == {f"accept_length.rung{name}" for name in reasons}


def test_stored_rungs_alone(parts):
    found = climb(parts.checkpoint, parts.target, stored=stored_features(parts))
    one, two = found.rungs["1"], found.rungs["2"]
    assert one.rounds.starts.tolist() == two.rounds.starts.tolist() and len(one.rounds.lengths) >= 100
    assert one.accept_length > two.accept_length
    assert found.rungs["3.stored"].reason == "no capture: give --server or --capture"
    assert set(found.drops) == {"training"}
    assert found.drops["training"].value == pytest.approx(one.accept_length - two.accept_length)


def test_too_few_starts_are_skipped_with_their_count(parts):
    found = climb(parts.checkpoint, parts.target, stored=stored_features(parts, texts=1, length=30))
    for name in ("1", "2", "3.stored"):
        assert found.rungs[name].rounds is None
        assert "starts at which the next 5 stored tokens all are the target's argmax; 100 are needed" in (
            found.rungs[name].reason
        )
    assert found.rungs["1"].reason.startswith("only 2")


def test_rungs_1_to_3_share_their_starts(parts):
    """A server that feeds the stored texts wrongly: the loss is the feed's, by start."""
    stored = stored_features(parts)
    capture = SimpleNamespace(requests={}, reprefill={})
    for i, sample in enumerate(stored.samples[:6]):
        text = StoredText(i, sample.token_ids.tolist(), torch.zeros(0), torch.zeros(0))
        rows = sample.features
        rows = np.concatenate([rows[:, H:], rows[:, :H]], axis=1)  # chunks in another order
        capture.requests |= stored_capture(text, rows, rid=f"eaglelab-1-stored-{i:04d}").requests
    found = climb(parts.checkpoint, parts.target, capture, stored, launched())
    assert set(found.rungs["3.stored"].rounds.rids) == {f"stored-{i}" for i in range(6)}
    assert found.rungs["3.stored"].source == "rows as captured"
    assert "feed" in found.failed
    assert found.rungs["5"].reason == "no complete request was captured (no request)"
    assert found.rungs["3"].reason == found.rungs["4"].reason == found.rungs["5"].reason


def test_servers_that_cannot_be_replayed(parts):
    for flags, words in (
        ({"--speculative-use-rejection-sampling": ""}, "rejection sampling"),
        ({"--disaggregation-mode": "prefill"}, "disaggregation"),
    ):
        capture = SimpleNamespace(requests={}, reprefill={})
        found = climb(parts.checkpoint, parts.target, capture, launch=launched(**flags))
        assert all(words in found.rungs[name].reason for name in ("3", "4", "5"))


def test_speculation_is_read_from_the_launch():
    launch = SimpleNamespace(steps=3, topk=4, draft_tokens=9)
    assert Speculation.of(launch) == Speculation(3, 4, 9)


@pytest.fixture
def generated(monkeypatch):
    """A captured generation of 50 tokens, its drafter, and the wirings that climb() is to find."""
    capture = generation()
    feed = Feed((1, 2, 3), 3 * H, dtype="float32")
    world = SimpleNamespace(capture=capture, trained=(feed, capture.drafter.wiring),
                            served=(feed, capture.drafter.wiring))  # fmt: skip
    world.checkpoint = Checkpoint(capture.drafter.weights)
    world.target = Target({"lm_head.weight": torch.randn(VOCAB, H)})
    monkeypatch.setattr(module, "trained", lambda *_: world.trained)
    monkeypatch.setattr(module, "served", lambda *_: world.served)
    launch = launched()
    launch.steps, launch.draft_tokens = DRAFTS, DRAFTS + 1
    world.climb = lambda: climb(world.checkpoint, world.target, capture, launch=launch)
    return world


def test_a_healthy_server_loses_nothing(generated):
    found = generated.climb()
    rounds = generated.capture.requests["a"].rounds
    for name in ("3", "4", "5"):
        assert found.rungs[name].rounds.lengths.tolist() == [r.accept_len for r in rounds]
    assert found.rungs["3"].source == "rows as captured" and found.replay.exact
    assert {name: drop.value for name, drop in found.drops.items()} == {"wiring": 0.0, "runtime": 0.0}


def test_an_answer_of_one_token_has_no_rounds(generated):
    capture = generated.capture
    short = Trace("b", "dp0.tp0", [5, 6, 7], tokens=[5, 6, 7, 8], output_ids=[8], feature_dtype="float32")
    short.features = capture.features[:3].numpy()
    capture.requests["b"] = short
    found = generated.climb()
    assert set(found.rungs["5"].rounds.rids) == set(found.rungs["4"].rounds.rids) == {"a"}
    assert found.replay.exact and found.skipped == {}


def test_a_rung_without_a_round_gives_a_reason_not_a_number(generated, monkeypatch):
    """Answers so short that each ends before it is known what a round would have brought."""
    none = np.zeros(0, dtype=np.int64)
    monkeypatch.setattr(module, "simulate", lambda *_: Rounds([], none, none, DRAFTS, censored=1))
    found = generated.climb()
    assert found.rungs["3"].rounds is found.rungs["4"].rounds is None and found.drops == {}
    rows = {m.name: m for m in found.measurements()}
    assert rows["accept_length.rung4"].value is None
    assert "more new tokens" in rows["accept_length.rung4"].reason
    assert rows["accept_length.rung5"].value > 1


def test_a_wrong_wiring_shows_between_rungs_3_and_4(generated):
    """The server did what was trained, but `served` says otherwise: rung 4 falls, and rung 5 is back up."""
    feed, wiring = generated.served
    generated.served = (feed, replace(wiring, feedback="pre-norm", vocab_map="dropped"))
    found = generated.climb()
    assert found.rungs["3"].accept_length == found.rungs["5"].accept_length
    assert found.rungs["4"].accept_length < found.rungs["5"].accept_length
    assert found.drops["wiring"].value > 0 > found.drops["runtime"].value
    assert not found.replay.exact


def test_narrow_rows_need_a_re_prefill_for_rung_3(generated):
    trace = generated.capture.requests["a"]
    wide = trace.features
    trace.features = np.ascontiguousarray(wide[:, :H])
    feed, wiring = generated.served
    generated.served = (Feed((1,), H), replace(wiring, fc="bypassed"))
    found = generated.climb()
    assert found.rungs["3"].reason == (
        f"served rows are {H} wide, trained ones {3 * H}, and there is no re-prefill at depths [1, 2, 3] "
        "(it was not re-prefilled): capture with re-prefill"
    )
    assert found.rungs["4"].rounds is not None and set(found.drops) == {"runtime"}
    streams = {d: wide[:60, (d - 1) * H : d * H] for d in (1, 2, 3)}
    generated.capture.reprefill["a"] = SimpleNamespace(
        rid="a", token_ids=trace.tokens[:60], further=generated.capture.tokens[60:64].tolist(),
        depths=[1, 2, 3], dtype="float32", stream=streams.__getitem__,
    )  # fmt: skip
    found = generated.climb()
    assert found.rungs["3"].source == f"re-prefilled: served rows are {H} wide, trained ones {3 * H}"
    assert found.rungs["3"].rounds.lengths.tolist() == [r.accept_len for r in trace.rounds]
    assert found.drops["wiring"].value > 0


def test_a_served_wiring_that_does_not_fit_the_rows_is_said_so(generated):
    """`served` expects another width than was captured: it is wrong about this server."""
    feed, wiring = generated.served
    generated.served = (Feed((1,), H), replace(wiring, fc="bypassed"))
    found = generated.climb()
    assert found.rungs["4"].reason == (
        "the served wiring does not fit what was captured: features are 192 wide; the drafter with fc "
        "bypassed takes 64"
    )
    assert found.rungs["3"].accept_length == found.rungs["5"].accept_length and found.drops == {}


def test_a_state_after_the_norm_is_not_normed_again():
    """SpecForge and AngelSlim store it so: the target's choice is the same, the norm's weight counts once."""
    torch.manual_seed(0)
    weight = torch.rand(8) * 4 + 0.1
    tensors = {"norm.weight": weight, "lm_head.weight": torch.randn(50, 8)}
    target = SimpleNamespace(config={"rms_norm_eps": 1e-5}, load=lambda name, dtype=None: tensors[name])
    truth, last = Truth(target), torch.randn(200, 8)
    normed = torch.nn.functional.rms_norm(last, (8,), weight, 1e-5)
    assert (truth.argmax(normed, True) == truth.argmax(last)).all()
    assert (truth.argmax(normed) != truth.argmax(last)).any(), "a second norm is told from one"
    ids = [0, *truth.argmax(last).tolist()]
    before = StoredText(0, ids[: len(last)], torch.zeros(len(last), 4), last)
    after = StoredText(0, before.tokens, before.features, normed, normed=True)
    assert len(usable_starts(before, truth, 5)) > 150
    assert usable_starts(after, truth, 5).tolist() == usable_starts(before, truth, 5).tolist()
    twice = replace(after, normed=False)
    assert len(usable_starts(twice, truth, 5)) < len(usable_starts(before, truth, 5))
