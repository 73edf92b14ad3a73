"""What no file shows: a server that drafts as an edited drafter would is found out, by the edit's name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from drafters import DATA, SGLANG, SPECULATORS, TARGET, edited

from eaglelab import diagnose, edits, gather
from eaglelab.capture import open_capture
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.drafting import Drafting
from eaglelab.edits import KEPT, Edit, Kept, build
from eaglelab.hypotheses import beyond_rounding, sample, search
from eaglelab.overlay import Overlay
from eaglelab.paired import Drop
from eaglelab.progress import quiet
from eaglelab.served import served
from eaglelab.simulate import Text, captured_text
from eaglelab.training import _counts, _well

INNER = "transformer_layer_config"


class Server:
    """The golden capture, as if its server had drafted under an edit of its own setting."""

    def __init__(self):
        self.capture, self.target = open_capture(DATA / "golden-capture"), open_target(TARGET)
        self.launch = self.capture.launch.with_target(self.target.facts)
        self.checkpoint = open_checkpoint(SGLANG)
        self.wiring = served(self.checkpoint, self.launch)[1]
        self.source = Overlay(self.checkpoint)

    def edits(self):
        yield from edits.of_setting(self.wiring, self.source, self.target, engine=True)
        yield from edits.of_rows(self.wiring, 3, 128, self.target, engine=True)
        yield from edits.of_engine(self.wiring, self.source, self.target)

    def edit(self, words):
        return next(e for e in self.edits() if words in e.words)

    def draft(self, edit):
        drafter = build(edit, self.source, self.target, "cpu", torch.float32)
        for trace in self.capture.requests.values():
            text, blocks = captured_text(trace), [(r.n, r.accept_len) for r in trace.rounds]
            rounds = [r for r in trace.rounds if r.draft_tokens]
            if edit.twist == KEPT:  # it is given the tokens of before: again, until nothing moves any more
                found, before = Kept(drafter).walk(text, rounds), []
                while found != before:
                    before = found
                    for r, own in zip(rounds, found, strict=True):
                        r.draft_tokens = own
                    found = Kept(drafter).walk(text, rounds)
            else:
                rows = edit.rows(text.features, blocks) if edit.rows else text.features
                tokens = edit.tokens(text.tokens, text.prompt_len) if edit.tokens else text.tokens
                state = Drafting.over(drafter, tokens, rows)
                found = state.chain([min(r.n, state.rows) for r in rounds], 5).tokens.tolist()
            for r, own in zip(rounds, found, strict=True):
                r.draft_tokens = own

    def evidence(self):
        found = gather.static_evidence(self.checkpoint, self.launch, self.target)
        found.capture = self.capture
        gather.climb_ladder(found, None, "cpu", quiet)
        return found

    def diagnosis(self):
        evidence = self.evidence()
        return diagnose.conclude(evidence)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("rope theta 100 in", "rope-theta"),
        ("scaled linearly by 8", "rope-scaling"),
        ("interleaved pairs", "mrope-or-partial-rotary"),
        ("are fed the pre-norm state", "norm-output"),
        ("first residual is normed", "norm-before-residual"),
        ("no norm before fc", "norm-before-fc-not-applied"),
        ("d2t is not applied", "d2t-dropped"),
        ("offsets in d2t are taken", "d2t-absolute"),
        ("tokens -1 beside", "token-shift"),
        ("prompt are paired with the token before", "token-shift"),
        ("draft steps stand +8", "position-offset"),
        ("the target's head, at the rows", "trained-head-replaced"),
        ("order [2, 1, 0]", "chunk-order"),
        ("state that the first one was", "stale-rows"),
        ("hidden_norm is left out", "engine-residual-or-extra-norm"),
        ("leaves what draft steps wrote", "engine-residual-or-extra-norm"),
        ("q_proj.weight is zero", "weights-not-loaded"),
        ("computes in bfloat16", "checkpoint-dtype"),
    ],
)
def test_a_server_that_does_otherwise_is_found_out(words, fault):
    server = Server()
    server.draft(server.edit(words))
    found = server.diagnosis()
    assert found.fault == fault
    first = found.failed[0]
    assert "the server drafts as if" in first.evidence[0] and first.rung == 5
    assert first.predicted_accept_length == found.ladder.rungs["4"].accept_length
    assert found.failed[-1].fault == "runtime-mismatch", "the symptom stays, behind its cause"


def test_every_edit_has_a_name_that_the_catalogue_knows():
    server = Server()
    slugs = {e.slug for e in server.edits()} - {None}
    assert slugs <= edits.NAMED
    words = [e.words for e in server.edits()]
    assert len(words) == len(set(words))
    assert not any("every position" in w for w in words), "a shift of all positions is inert under rope"


def test_two_at_once_are_both_told():
    server = Server()
    both = server.edit("are fed the pre-norm state").then(server.edit("rope theta 100 in"), server.wiring)
    server.draft(both)
    found = server.diagnosis()
    assert {f.fault for f in found.failed[:2]} == {"norm-output", "rope-theta"}


def test_what_no_edit_explains_keeps_its_rung_and_says_how_near_the_best_came():
    """Every draft is some token: nothing draws so."""
    server, draw = Server(), np.random.default_rng(0)
    for trace in server.capture.requests.values():
        for r in trace.rounds:
            r.draft_tokens = draw.integers(0, 1024, len(r.draft_tokens)).tolist()
    found = server.diagnosis()
    assert [f.fault for f in found.failed] == ["runtime-mismatch"]
    told = "\n".join(found.failed[0].evidence)
    assert "edits of the served setting explains it" in told and "agreement by draft step" in told


def test_a_server_that_does_as_it_says_is_not_searched():
    server = Server()
    evidence = server.evidence()
    assert evidence.runtime is None and not beyond_rounding(evidence.ladder.replay)
    assert search(evidence) is None


def test_the_sample_holds_first_and_last_rounds():
    capture = open_capture(DATA / "golden-capture")
    few = sample(capture, 8)
    for text, rounds in few:
        drafted = [r.n for r in capture.requests[text.rid].rounds if r.draft_tokens]
        assert rounds[0].n == drafted[0] and rounds[-1].n == drafted[-1]
    assert sum(len(rounds) for _, rounds in few) <= 8


def test_edits_of_rows_and_tokens():
    x = torch.arange(6.0)[:, None].repeat(1, 2)
    assert edits._moved(x, 1)[:, 0].tolist() == [0, 0, 1, 2, 3, 4]
    assert edits._moved(x, -1)[:, 0].tolist() == [1, 2, 3, 4, 5, 5]
    assert edits._reordered((1, 0), 1)(torch.tensor([[1.0, 2.0]]), ()).tolist() == [[2.0, 1.0]]
    # blocks of 2, 1 and 2 rows after a prompt of 1: each gets the rows of the block before, as far as it has
    assert edits._stale(x, [(1, 2), (3, 1), (4, 2)])[:, 0].tolist() == [0, 1, 2, 1, 3, 5]
    assert edits._prompt_late([10, 11, 12, 13, 14], 3) == [10, 11, 11, 12, 14]
    assert edits._prompt_early([10, 11, 12, 13, 14], 3) == [10, 12, 13, 13, 14]


def test_kept_rounds_without_a_kept_row_are_ordinary_rounds():
    """Where one token is committed a round nothing that a step wrote is accepted."""
    server = Server()
    trace = next(iter(server.capture.requests.values()))
    text = captured_text(trace)
    drafter = build(Edit(None, "", server.wiring, twist=KEPT), server.source, server.target, "cpu", None)
    alone = [replace(r, n=n, accept_len=1) for n, r in enumerate(trace.rounds[:4], text.prompt_len)]
    short = Text(text.rid, text.tokens, text.features, text.prompt_len, text.end)
    walked = Kept(drafter).walk(short, alone)
    state = Drafting.over(drafter, text.tokens, text.features)
    plain = state.chain([r.n for r in alone], 5, [r.draft_tokens for r in alone]).tokens.tolist()
    assert walked == plain


@pytest.mark.parametrize(
    ("config", "fault", "rung"),
    [
        ({"norm_output": False}, "norm-output", 2),
        ({INNER: {"rope_parameters": {"rope_theta": 100.0}}}, "rope-theta", 1),
        ({INNER: {"rope_parameters": {"rope_theta": 1e6}}}, "rope-theta", 1),
        ({INNER: {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}}, "rope-scaling", 1),
        ({}, None, None),
    ],
)
def test_a_config_that_does_not_say_what_was_trained(config, fault, rung, tmp_path):
    """Trainer's file and stored features alone: nothing differs from anything."""
    drafter = edited(tmp_path / "d", SPECULATORS, config=config)
    flags = "--speculative-algorithm EAGLE3 --speculative-num-steps 5 --speculative-eagle-topk 1"
    found = diagnose.run(
        drafter=drafter, target=TARGET, features=DATA / "features", launch=f"{flags} --dtype float32"
    )
    assert found.fault == fault
    if fault:
        assert found.failed[0].rung == rung
        assert "so the config does not say what was trained" in found.failed[0].evidence


def test_a_gain_must_be_large_beyond_noise_and_of_a_drafter_that_works():
    assert _counts(Drop(4.0, 3.0, (0.7, 1.3), 50))
    assert not _counts(Drop(4.0, 3.0, (0.1, 1.9), 50)), "0 lies inside of 99.9 %"
    assert not _counts(Drop(4.18, 4.0, (0.17, 0.19), 50)), "6 % of the drafts that come true"
    assert not _counts(Drop(4.0, 3.0, None, 4))
    from eaglelab.simulate import Rounds

    starts = np.arange(10)
    assert _well(Rounds(["a"] * 10, starts, np.asarray([2] * 7 + [1] * 3), 5))
    assert not _well(Rounds(["a"] * 10, starts, np.asarray([6] * 6 + [1] * 4), 5))
