"""Masks under a chat template, the draft vocabulary's map and reach, frames and lengths of served texts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eaglelab import diagnose
from eaglelab.capture import open_capture
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.checks import texts, vocabulary
from eaglelab.gather import static_evidence
from eaglelab.launch import Launch
from eaglelab.masks import judge, turns
from eaglelab.simulate import Rounds
from eaglelab.words import Words

DATA = Path(__file__).parents[2] / "data"
START, END, USER, ASSISTANT, NEWLINE = 900, 901, 10, 11, 12  # <|im_start|> <|im_end|> user assistant \n


def chat(rng, rounds=2):
    """-> (token ids, the right mask) of a conversation in ChatML's frame."""
    ids, mask = [], []
    for _ in range(rounds):
        asked, said = (rng.integers(100, 800, rng.integers(6, 12)).tolist() for _ in range(2))
        turn = [START, USER, NEWLINE, *asked, END, NEWLINE, START, ASSISTANT, NEWLINE, *said, END, NEWLINE]
        ids += turn
        mask += [0] * (len(turn) - len(said) - 2) + [1] * (len(said) + 1) + [0]
    return np.array(ids), np.array(mask, dtype=bool)


@pytest.fixture
def chats():
    rng = np.random.default_rng(0)
    return [chat(rng) for _ in range(6)]


def judged(chats, change, special=(START, END)):
    masks = {i: change(mask.copy(), ids) for i, (ids, mask) in enumerate(chats)}
    return judge(masks, [ids for ids, _ in chats], {}, special)[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m, ids: m, None),
        (lambda m, ids: m & (ids != END), None),  # the end mark left out: another convention
        (lambda m, ids: m | True, "every token is trained on in 6 of 6 samples: prompts and template too"),
        (lambda m, ids: np.roll(m, 1), "the mask begins a token late"),
        (lambda m, ids: np.roll(m, -1), "the mask begins a token early"),
        (lambda m, ids: np.maximum.accumulate(m), "6 of 6 masked stretches run over the template's marks"),
        (lambda m, ids: m & False, "6 of 6 samples train on no token at all"),
    ],
)
def test_masks_in_a_chat_template(chats, change, says):
    wrong = judged(chats, change)
    assert (wrong == []) if says is None else (len(wrong) == 1 and wrong[0].startswith(says))


def test_answers_that_all_begin_alike_are_no_shift():
    """A reasoning model's answers begin with <think> and a newline, whatever is asked."""
    rng, found = np.random.default_rng(1), []
    for ids, mask in (chat(rng) for _ in range(6)):
        starts = [t.start for t in turns({0: mask})]
        found.append(
            (
                np.insert(ids, np.repeat(starts, 2), [902, NEWLINE] * 2),
                np.insert(mask, np.repeat(starts, 2), True),
            )
        )
    assert judged(found, lambda m, ids: m, (START, END, 902)) == []


def test_the_last_answer_of_a_reasoning_model_alone_is_a_right_mask():
    """Earlier answers, not trained on, hold the same <think> and the same header as the one that is."""
    rng, found = np.random.default_rng(2), []
    for ids, mask in (chat(rng, rounds=3) for _ in range(6)):
        starts = [t.start for t in turns({0: mask})]
        thought = np.insert(ids, np.repeat(starts, 3), [902, NEWLINE, 903] * 3)
        last = np.arange(len(thought)) >= starts[-1] + 6
        found.append((thought, last & (np.arange(len(thought)) < len(thought) - 1)))
    assert judged(found, lambda m, ids: m, (START, END, 902, 903)) == []


def test_without_special_tokens_nothing_is_said_of_turns(chats):
    assert judged(chats, lambda m, ids: np.roll(m, 1), ()) == []


def test_words_as_text_and_without_a_tokenizer(tmp_path):
    words = Words.of(DATA / "target")
    assert words.special == {0, 1} and words.text([640, 853]).startswith("'")
    assert Words.of(tmp_path).text(range(20)) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": "no"}')
    assert Words.of(tmp_path) == Words()


def drafter(folder, change, base="drafter-speculators"):
    shutil.copytree(DATA / base, folder)
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def given():
    capture, target = DATA / "golden-capture", DATA / "target"
    return diagnose.run(drafter=DATA / "drafter-speculators", target=target, capture=capture).evidence


def of(given, folder, flags=""):
    target = open_target(DATA / "target")
    launch = Launch.parse(f"--speculative-algorithm EAGLE3 {flags}", target.facts)
    evidence = static_evidence(open_checkpoint(folder), launch, target)
    return replace(evidence, capture=given.capture)


def verdicts(found):
    return {f.fault: f.verdict for f in found}


def test_a_map_that_reaches_the_text(given):
    found = vocabulary.findings(given)
    assert verdicts(found) == {"d2t-not-exported": "passed", "draft-vocab-coverage": "passed"}
    assert found[1].evidence[0] == "100.0% of 132 tokens that the server wrote can be drafted"


def test_a_map_that_was_not_exported_never_filled_or_is_none(given, tmp_path):
    def without(held):
        del held["d2t"], held["t2d"]

    def zeros(held):
        held["d2t"] = held["d2t"] * 0

    def twice(held):
        held["d2t"][1] = held["d2t"][0] - 1

    missing = drafter(tmp_path / "a", without)
    found = vocabulary.findings(of(given, missing))
    assert verdicts(found) == {"d2t-not-exported": "failed"}
    assert "640 draft ids for a vocabulary of 1,024" in found[0].evidence[0]
    hot = vocabulary.findings(of(given, missing, "--speculative-token-map hot.pt"))
    assert verdicts(hot) == {"d2t-not-exported": "passed"}
    assert verdicts(vocabulary.findings(of(given, drafter(tmp_path / "b", zeros)))) == {
        "d2t-not-exported": "failed"
    }
    found = vocabulary.findings(of(given, drafter(tmp_path / "c", twice)))
    assert (
        verdicts(found)["weights-not-sane"] == "failed"
        and "map to a token that another" in found[1].evidence[0]
    )


def test_the_first_tokens_as_draft_vocabulary_are_a_map_too(given, tmp_path):
    def first(held):
        held["d2t"] = held["d2t"] * 0
        held["t2d"] = torch.arange(1024) < 640

    assert (
        verdicts(vocabulary.findings(of(given, drafter(tmp_path / "a", first))))["d2t-not-exported"]
        == "passed"
    )


def test_coverage_is_a_fault_only_where_it_caps(given):
    written = {t for trace in given.capture.requests.values() for t in trace.tokens[trace.prompt_len :]}
    known = sorted(written)
    few = np.array(known[: len(known) // 2] + [t for t in range(1024) if t not in written][:500])
    found = vocabulary.covers(given, few)
    assert found.verdict == "failed" and "tokens that the server wrote can be drafted" in found.evidence[0]
    rare = min(written, key=lambda t: sum(trace.tokens.count(t) for trace in given.capture.requests.values()))
    assert vocabulary.covers(given, np.array([t for t in range(1024) if t != rare])).verdict == "passed"


def test_a_few_missing_tokens_behind_most_rejections_are_a_fault(given):
    """The map reaches nine tokens of ten, but it is the tenth that drafts end at."""
    capture = SimpleNamespace(requests={})
    for rid in "ab":
        rounds = [
            SimpleNamespace(draft_tokens=[1] * 5, parents=None, accept_len=5, committed=[1, 1, 1, 1, 7])
        ] * 10
        capture.requests[rid] = SimpleNamespace(
            tokens=[0] + [1, 1, 1, 1, 7, *[2] * 5] * 10, prompt_len=1, rounds=rounds
        )
    evidence = replace(given, capture=capture)
    found = vocabulary.covers(evidence, np.array([t for t in range(1024) if t != 7]))
    assert found.verdict == "failed"
    assert found.evidence == [
        "90.0% of 200 tokens that the server wrote can be drafted",
        "100% of 20 rejected drafts stood where no draft id was right",
    ]
    for trace in capture.requests.values():
        trace.rounds[0].committed[-1] = 1  # all rounds are this one: rejected for another reason
    assert vocabulary.covers(evidence, np.array([t for t in range(1024) if t != 7])).verdict == "passed"


def test_a_template_on_one_side_only(given, tmp_path):
    capture = open_capture(DATA / "golden-capture")
    traces = list(capture.requests.values())
    capture.__dict__["requests"] = {f"r{i}": replace(traces[i % 2], rid=f"r{i}") for i in range(4)}
    sample = SimpleNamespace(token_ids=np.array([3, 34, 900, 5, 901, 7, 8]))
    data = SimpleNamespace(samples=[sample] * 4, masks={i: np.arange(7) > 5 for i in range(4)})
    target = SimpleNamespace(path=tmp_path)
    tokenizer = json.loads((DATA / "target" / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": i, "content": f"<{i}>"} for i in (900, 901)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    evidence = SimpleNamespace(data=data, capture=capture, target=target)
    (found,) = texts.template(evidence)
    assert found.verdict == "skipped", "plain prompts are how it was measured, not how it is served"
    assert found.evidence[0] == "100% of the stored prompts and 0% of those sent hold a template's marks"
    assert found.evidence[-1].startswith("plain text was sent")
    framed = sample.token_ids
    for trace in traces:
        trace.prompt_ids[3] = 1
    assert texts.template(evidence)[0].verdict == "failed", "framed on both sides, and no mark is the same"
    sample.token_ids = np.array([3, 34, 17, 5, 19, 7, 8])
    (found,) = texts.template(evidence)
    assert found.verdict == "failed" and "0% of the stored prompts and 100% of those" in found.evidence[0]
    for trace, right in zip(traces, (900, 901), strict=True):
        trace.prompt_ids[3] = right
    sample.token_ids = framed
    assert texts.template(evidence)[0].verdict == "passed"
    for trace in traces:
        trace.prompt_ids[3] = 17
    sample.token_ids = np.array([3, 34, 17, 5, 19, 7, 8])
    assert texts.template(evidence)[0].verdict == "passed"
    traces[0].prompt_ids[3] = 900
    assert texts.template(evidence)[0].verdict == "passed", "some prompts of another kind are no fault"


def test_acceptance_that_ends_where_the_drafters_training_did(given):
    rng = np.random.default_rng(0)
    starts = np.arange(0, 800, 10)
    kind = rng.integers(3, 7, len(starts))

    def rounds(lengths, limit=512):
        rung = replace(given.ladder.rungs["5"], rounds=Rounds(["a"] * len(starts), starts, lengths, 5))
        climbed = replace(given.ladder, rungs={**given.ladder.rungs, "5": rung})
        feed, wiring = given.trained
        return replace(given, ladder=climbed, trained=(feed, replace(wiring, max_positions=limit)))

    assert given.trained[1].max_positions == 512
    (found,) = texts.length(rounds(np.where(starts < 512, kind, 1)))
    assert (
        found.verdict == "failed" and "up to the drafter's max_position_embeddings (512)" in found.evidence[0]
    )
    assert texts.length(rounds(kind))[0].verdict == "passed"
    few = np.where(starts < 680, np.arange(len(starts)) % 2 * 5 + 1, 1)
    few[-4:] = 6  # 4 of the last 12: less than 3 of 4 before, and likely enough by chance
    assert texts.length(rounds(few, 680))[0].verdict == "passed"
    few[-4:] = 1
    assert texts.length(rounds(few, 680))[0].verdict == "failed"
    (short,) = texts.length(given)
    assert short.verdict == "passed" and "lie beyond it" in short.evidence[0]
