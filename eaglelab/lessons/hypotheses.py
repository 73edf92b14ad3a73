"""Lesson 3: what each hypothesis of the incident predicts, and the checks of the reader's tests of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eaglelab.errors import BadInput
from eaglelab.html import Html
from eaglelab.lessons.checking import Case as Call
from eaglelab.lessons.checking import NotYet, ask, compare, given, passed, two
from eaglelab.lessons.incident import Case, drafts_per_verify, promised

VERDICTS = ("struck out", "stands")
Names = list[str]


def _verdict(word: Any, name: str, evidence: str) -> str:
    """NotYet unless the hypothesis is struck out: all of these are, and the evidence says why."""
    said = str(given(word, name)).strip(" .").lower()
    if said not in VERDICTS:
        raise NotYet(f'{name} is "struck out" or "stands"; yours is {word!r}.')
    if said == "stands":
        raise NotYet(f"Does it? {evidence}")
    return evidence


def check_symptom(case: Case, function: Callable[[list[dict[str, int]]], float]) -> Html:
    """Drafts accepted per verify, from the server's counters."""
    made = [{"spec_num_correct_drafts": c, "spec_verify_ct": v} for c, v in ((0, 10), (30, 10), (1, 40))]
    calls = [Call((made[:1],), 0.0), Call((made,), 31 / 60, "Pool the counts: add all up, then divide.")]

    def mean(counters: list[dict[str, int]]) -> float:
        return sum(drafts_per_verify([c]) for c in counters) / len(counters)

    def lengths(counters: list[dict[str, int]]) -> float:
        return 1 + drafts_per_verify(counters)

    hints = [
        (mean, "A mean of ratios weighs a short answer as much as a long one."),
        (lengths, "That is the accept length; asked are accepted drafts a verify, without the bonus."),
    ]
    compare(function, calls, hints)
    m = float(function(case.counters))
    verifies = sum(c["spec_verify_ct"] for c in case.counters)
    return passed(
        f"Here: {m:.4f} drafts a verify over {verifies} verifies, accept length {1 + m:.2f}.",
        f"The trainer's validation amounts to {promised():.2f}. Something is very wrong.",
    )


def check_untrained(case: Case, verdict: Any) -> Html:
    """Hypothesis 1: the weights are not trained."""
    found = case.stored["2"].accept_length
    evidence = (
        f"On features that its trainer stored, these weights have an accept length of {found:.2f} when they "
        "are fed their own drafts. Untrained weights would have about 1.00."
    )
    return passed("Struck out.", _verdict(verdict, "weights_untrained", evidence))


def check_lost(case: Case, lost: Callable[[Names, dict[str, Names]], tuple[Names, Names]]) -> Html:
    """Tensors without a parameter, and parameters without all their tensors."""
    engine = {"model.fc": ["fc"], "model.qkv": ["q", "k", "v"], "model.norm": ["norm"]}
    whole = ["fc", "q", "k", "v", "norm"]

    def sorted_lost(names: Names, takes: dict[str, Names]) -> list[Names]:
        dropped, unfilled = two(ask(lost, names, takes), "lost", "what is dropped and what is not filled")
        return [sorted(dropped), sorted(unfilled)]

    sorted_lost.__name__ = "lost"
    calls = [
        Call((whole, engine), [[], []], "Every name finds its place."),
        Call((["fc", "q", "k", "v", "norm", "extra"], engine), [["extra"], []], "Nobody takes `extra`."),
        Call((["decoder.fc", *"qkv", "norm"], engine), [["decoder.fc"], ["model.fc"]],
             "One wrong prefix: the tensor is dropped, its parameter stays unfilled."),
        Call((["fc", "q", "v", "norm"], engine), [[], ["model.qkv"]], "A fused one needs all its parts."),
    ]  # fmt: skip
    compare(sorted_lost, calls)
    dropped, unfilled = lost(case.file_names, case.engine_takes)
    if dropped or unfilled:
        raise NotYet(
            f"On the incident's own file: dropped {dropped}, unfilled {unfilled}. Both should be empty."
        )
    return passed(
        f"4 cases. Of this file: {len(case.file_names)} tensors, {len(case.engine_takes)} parameters; "
        "0 are dropped, 0 stay unfilled."
    )


def check_names(case: Case, verdict: Any, head: Any) -> Html:
    """Hypothesis 2: the keys are misnamed. And whose head is it?"""
    evidence = "Every tensor has a parameter, and every live parameter equals its source, byte by byte."
    said = _verdict(verdict, "keys_misnamed", evidence)
    if given(head, "head_belongs_to") not in ("drafter", "target"):
        raise NotYet(f'head_belongs_to is "drafter" or "target"; yours is {head!r}.')
    if head == "drafter":
        raise NotYet(
            "Look at the row of lm_head.weight in the table of the live parameters: equal to which file?"
        )
    return passed("Struck out. The weights did load.", said, "But keep the head in mind: it is the target's.")


def check_format(case: Case, differing: Callable[[dict, dict], Names], verdict: Any) -> Html:
    """Hypothesis 3: conversion between the formats damaged something."""
    a = {"fc": torch.ones(2, 3), "q": torch.arange(4.0), "norm": torch.ones(3)}
    cases = [
        ({}, [], "Nothing differs."),
        (
            {"q": torch.arange(4.0).flip(0)},
            ["q"],
            "The same numbers in another order are not the same tensor.",
        ),
        ({"fc": torch.ones(3, 2)}, ["fc"], "Another shape."),
        ({"norm": torch.ones(3, dtype=torch.float16)}, ["norm"], "Another dtype has lost digits."),
        (
            {"q": torch.arange(4.0) * (1 + 1e-6)},
            ["q"],
            "Nearly equal is not equal: a conversion copies bytes.",
        ),
        ({"more": torch.ones(1)}, ["more"], "A name that only one side has."),
    ]
    for change, wanted, about in cases:
        for left, right in ((a, a | change), (a | change, a)):
            got = sorted(ask(differing, left, right))
            if got != wanted:
                raise NotYet(f"{about} differing should return {wanted}; yours is {got}.")
    trainer, served = case.tensors("trainer"), case.tensors("served")
    found = sorted(differing(trainer, served))
    if found:
        raise NotYet(f"On the incident's files differing returns {found}; the package finds none.")
    evidence = f"{len(trainer)} tensors, equal in name, shape, dtype and every number."
    return passed("Struck out.", _verdict(verdict, "format_broken", evidence))


def check_widths(case: Case, widths: Callable[[list], dict[str, set[int]]]) -> Html:
    """What the drafter is fed: the last dimension, place by place."""
    made = [("draft", (2, 8)), ("prefill_extend", (9, 24)), ("draft", (1, 8)), ("decode_extend", (2, 3, 24))]
    calls = [
        Call((made,), {"draft": {8}, "prefill_extend": {24}, "decode_extend": {24}}),
        Call(
            ([("draft", (2, 8)), ("draft", (8, 16))],), {"draft": {8, 16}}, "A place may see several widths."
        ),
    ]

    def rows(events: list) -> dict[str, set[int]]:
        return {where: {s[0] for w, s in events if w == where} for where, _ in events}

    compare(widths, calls, [(rows, "That is the number of rows; the width is the last dimension.")])
    found = widths(case.events())
    extends = {w for where in ("prefill_extend", "decode_extend") for w in found[where]}
    seen = ", ".join(f"{where} {sorted(w)}" for where, w in found.items())
    return passed(
        f"What this server fed its drafter: {seen}.",
        f"fc was trained on rows of 384; at the extends it is handed rows of {', '.join(map(str, extends))}. "
        "Nobody complained.",
    )


def check_fc(case: Case, fc_does: Callable[[int, int, int], str]) -> Html:
    """The shape check in front of fc."""
    calls = [
        Call((384, 128, 384), "runs", "The healthy case."),
        Call(
            (128, 128, 384), "skipped", "As wide as the hidden state: taken for the drafter's own feedback."
        ),
        Call((256, 128, 384), "error", "Neither: the matrix product fails, loudly."),
        Call((7168, 7168, 21504), "skipped", "Kimi-K2: the same with its sizes."),
        Call((21504, 7168, 21504), "runs"),
        Call((128, 128, 128), "skipped", "The width alone decides, whatever fc would take."),
    ]
    hints = [(lambda w, h, f: "runs" if w == f else "error", "When is fc not even asked?")]
    count = compare(fc_does, calls, hints)
    fed, fc = case.capture.widths["decode_extend"], case.served.tensors["fc.weight"].shape
    return passed(
        f"{count} cases. In this server, at every extend: fc is {fc_does(fed, fc[0], fc[1])}.",
        "One width is an error and is seen at once; the other is silent.",
    )


def check_wiring(case: Case, wiring: dict[str, Any]) -> Html:
    """Which wiring reproduces the server's draft tokens?"""
    for name, choices in CHOICES.items():
        if given(wiring.get(name, ...), name) not in choices:
            raise NotYet(f"{name} is one of {', '.join(map(repr, choices))}; yours is {wiring[name]!r}.")
    try:
        equal, count = case.agreement(**wiring)
    except BadInput as error:
        raise NotYet(f"The replay stops: {error}.") from error
    if equal < count:
        raise NotYet(
            f"{equal} of the server's {count} draft tokens come out. The live checksums say whose head it "
            "is; and does this launch read a map of draft ids?"
        )
    return passed(
        f"All {count} draft tokens of the server come out, one by one.",
        "No doubt is left about what it does. What remains is to say why.",
    )


CHOICES = {
    "fc": ("applied", "bypassed"),
    "lm_head": ("own", "target"),
    "vocab_map": ("d2t", "dropped"),
}


def check_cause(case: Case, cause: Any, fix: Any) -> Html:
    """Two causes feed H-wide rows; only one explains the rest."""
    from eaglelab.diff import diff
    from eaglelab.served import served
    from eaglelab.trained import trained

    known = ("eagle-flag-on-eagle3-drafter", "aux-hidden-state-off")
    if given(cause, "cause") not in known:
        raise NotYet(f"cause is one of {', '.join(known)}; yours is {cause!r}.")
    if cause == known[1]:
        on = case.served.config["eagle_config"]["use_aux_hidden_state"]
        raise NotYet(
            f"The drafter's config says use_aux_hidden_state: {on}. And with that switched off under EAGLE3 "
            "the drafter would have kept its own head and map; here both are gone."
        )
    try:
        launch = case.launch.with_flags(given(fix, "fix"))
        after = diff(
            trained(case.original, case.target.facts), served(case.served, launch), case.original, case.target
        )
    except BadInput as error:
        raise NotYet(f"SGLang would not start so: {error}") from error
    left = [d.field for d in after if not d.inert]
    if left:
        raise NotYet(f"With {fix!r} training and serving still differ in: {', '.join(left)}.")
    return passed(f"With {fix} no difference between training and serving is left that counts.")
