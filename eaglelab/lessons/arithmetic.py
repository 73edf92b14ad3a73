"""Lesson 1: speculative decoding and its arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from eaglelab import explain as definitions
from eaglelab.html import Html
from eaglelab.lessons import material
from eaglelab.lessons.chains import (
    Tokens,
    committed,
    positions_figure,
    readings,
    rounds,
    server_correct,
    show_rounds,
    speed_figure,
)
from eaglelab.lessons.checking import Case, NotYet, alike, ask, compare, given, passed, plain

__all__ = ["positions_figure", "readings", "show_rounds", "speed_figure"]


def check_verify(verify: Callable[[Tokens, Tokens], Tokens]) -> Html:
    """Greedy verification, on made-up rounds and then on the server's."""
    dice = random.Random(1)
    cases = [
        Case(([5, 6, 7], [5, 6, 9, 4]), [5, 6, 9], "The third is wrong; the target's 9 is added."),
        Case(([5, 6, 7], [5, 6, 7, 8]), [5, 6, 7, 8], "All right: the target's next token comes for free."),
        Case(([5, 6, 7], [4, 6, 7, 8]), [4], "The first is wrong: later ones never count."),
        Case(([], [3]), [3], "Nothing drafted: plain decoding."),
    ]  # fmt: skip
    for _ in range(50):
        choices = [dice.randrange(3) for _ in range(6)]
        drafts = [t if dice.random() < 0.7 else 9 for t in choices[:5]]
        cases.append(Case((drafts, choices), choices[: (drafts + [9]).index(9) + 1 if 9 in drafts else 6]))
    hints = [
        (lambda d, t: [x for x, y in zip(d, t, strict=False) if x == y] + t[-1:], "Stop at the first miss."),
        (_kept, "The target's own token is missing: a verify always commits one."),
        (lambda d, t: _kept(d, t) + t[-1:], "Add the target's choice right after the last kept draft."),
    ]  # fmt: skip
    count = compare(verify, cases, hints)
    for (drafts, choices), took in zip(rounds(), committed(), strict=True):
        if plain(ask(verify, drafts, choices)) != took:
            raise NotYet(f"On the server's round {drafts} against {choices}: it committed {took}.")
    return passed(
        f"{count} cases, and every one of the genuine server's {len(rounds())} rounds comes out as it ran."
    )


def _kept(drafts: Tokens, choices: Tokens) -> Tokens:
    kept = 0
    while kept < len(drafts) and drafts[kept] == choices[kept]:
        kept += 1
    return drafts[:kept]


def check_figures(accept_length: Any, acceptance_rate: Any) -> Html:
    """Accept length and acceptance rate of rounds with so many accepted drafts."""
    dice = random.Random(2)
    some = [[dice.randrange(5) for _ in range(dice.randrange(1, 30))] for _ in range(20)]
    length = [Case(([0, 0, 0],), 1.0, "Nothing accepted: each verify still commits the target's token.")]
    length += [Case((c,), 1 + sum(c) / len(c)) for c in [[4, 4], *some]]
    compare(
        accept_length, length,
        [(lambda c: sum(c) / len(c), "Accept length counts the target's own token, one a verify.")],
    )  # fmt: skip
    rate = [Case(([0, 0, 0], 4), 0.0, "Nothing accepted is a rate of 0: the target's own token is no draft.")]
    rate += [Case((c, 5), sum(c) / len(c) / 5) for c in [[4, 4], *some]]
    compare(
        acceptance_rate, rate,
        [
            (lambda c, s: (sum(c) / len(c) + 1) / (s + 1), "That is an old SGLang's rate: no bonus, please."),
            (lambda c, s: sum(c) / len(c), "Divide by the drafts that were proposed, S a verify."),
        ],
    )  # fmt: skip
    return passed("Both are right, on 21 cases each.", against_counters(accept_length))


def against_counters(accept_length: Callable[[list[int]], float]) -> str:
    """The reader's figure beside the server's own counters of one request."""
    capture = material.golden()
    rid, trace = next(iter(capture.requests.items()))
    counters = capture.sent[rid]["counters"]
    own = float(accept_length([r.accept_len - 1 for r in trace.rounds]))
    exact = 1 + counters["spec_num_correct_drafts"] / counters["spec_verify_ct"]
    return (
        f"The shipped capture's first request: yours {own:.4f}; the server's counters say 1 + "
        f"{counters['spec_num_correct_drafts']} / {counters['spec_verify_ct']} = {exact:.4f}; its response "
        f"prints {counters['spec_accept_length']:.4f}: completion tokens / verifies, which counts the "
        "prefill's token too, and leaves out what the last verify committed past the limit."
    )


def check_positions(by_position: Callable[[list[int], int], list[float]]) -> Html:
    """Share of rounds in which the first j drafts were all accepted."""
    dice = random.Random(3)
    cases = [
        Case(([2, 0, 3], 3), [2 / 3, 2 / 3, 1 / 3], "Two of three rounds got past position 1, and past 2."),
        Case(([0, 0], 2), [0.0, 0.0]),
    ]
    for _ in range(30):
        steps = dice.randrange(1, 7)
        correct = [dice.randrange(steps + 1) for _ in range(dice.randrange(1, 20))]
        cases.append(
            Case((correct, steps), [sum(c >= j for c in correct) / len(correct) for j in range(1, steps + 1)])
        )
    count = compare(
        by_position, cases,
        [
            (lambda c, s: [sum(x == j for x in c) / len(c) for j in range(1, s + 1)],
             "A round with 3 accepted drafts also accepted the first two."),
            (lambda c, s: [sum(x >= j for x in c) / len(c) for j in range(s)], "Positions count from 1."),
            (lambda c, s: [sum(x > j for x in c) / len(c) for j in range(1, s + 1)],
             "Position j is reached by j accepted drafts."),
        ],
    )  # fmt: skip
    correct = server_correct()
    total = float(sum(by_position(correct, 5)))
    return passed(
        f"{count} cases.",
        f"On the shipped capture they add up to {total:.4f}; 1 + that is {1 + total:.4f}, the accept length "
        f"({1 + sum(correct) / len(correct):.4f}). They always do.",
    )


def check_printed(printed: Callable[[float, int, int], dict[str, float]]) -> Html:
    """What four definitions print for the same server."""
    known = {d.name: d for d in (definitions.WITH_BONUS, definitions.DRAFTS, definitions.PER_DRAFT_TOKENS)}
    known["rate-oldest"] = definitions.PER_STEPS
    cases = []
    for m, steps, nodes in ((0.0, 4, 5), (0.0, 5, 6), (1.5, 4, 5), (3.0, 3, 4), (2.25, 5, 6), (2.4, 5, 16)):
        wanted = {name: d.value(m, definitions.Shape(steps, nodes)) for name, d in known.items()}
        about = "" if m else "Nothing was accepted here."
        if nodes > steps + 1:
            about = "A tree (lesson 5) drafts more tokens than it has steps: mind which of the two divides."
        cases.append(Case((m, steps, nodes), wanted, about))
    compare(printed, cases)
    zero = printed(0.0, 4, 5)
    said = ", ".join(f"{name} {float(zero[name]):.2f}" for name in known)
    return passed(f"{len(cases)} servers.", f"A server with 4 steps that accepts nothing prints: {said}.")


def check_zero(answers: dict[str, Any]) -> Html:
    """Which printed lines mean that nothing was accepted."""
    if not isinstance(answers, dict):
        raise NotYet(
            f"answers is a dictionary, a line and True or False; yours is a {type(answers).__name__}."
        )
    wrong = []
    for line, shape, truth in ZERO:
        said = plain(given(answers.get(line, ...), f"the answer to {line!r}"))
        if said not in (True, False):
            raise NotYet(f"The answer to {line!r} is True or False; yours is {said!r}.")
        if said != truth:
            found = definitions.explain(line, shape[0], shape[1])
            say = "; ".join(
                f"read as {', '.join(d.name for d in r.definitions.values())}: {r.correct:.2f} a verify"
                for r in found.readings
            )
            wrong.append(f"{line!r} with {shape[0]} steps, {shape[1]} draft tokens: {say}.")
    if wrong:
        raise NotYet("Look again: " + " ".join(wrong))
    return passed("All right. Nothing but the definition tells a dead drafter from one that is merely poor.")


ZERO = (  # a line as printed, (steps, draft tokens), whether it must mean that nothing was accepted
    ("accept len: 1.00, accept rate: 0.20", (4, 5), True),
    ("accept len: 1.00, accept rate: 0.00", (4, 5), True),
    ("accept len: 1.80, accept rate: 0.20", (4, 5), False),
    ("accept len: 1.20, accept rate: 0.30", (3, 4), False),
)


def check_sampling(accept: Any, leftover: Any) -> Html:
    """Lossless sampling: whatever the drafter's distribution, the target's comes out."""
    dice = random.Random(4)
    for _ in range(20):
        p, q = (_distribution(dice, 6) for _ in range(2))
        taken = plain([plain(ask(accept, p, q, x)) for x in range(6)])
        wanted = [min(1.0, a / b) for a, b in zip(p, q, strict=True)]
        if not alike(taken, wanted):
            x = next(i for i in range(6) if not alike(taken[i], wanted[i]))
            raise NotYet(
                f"A token with target probability {p[x]:.3f}, drafted with {q[x]:.3f}, is kept with "
                f"probability {wanted[x]:.3f}; yours is {taken[x]:.3f}. It is min(1, p / q)."
            )
        rest = plain(ask(leftover, p, q))
        if not isinstance(rest, list) or len(rest) != len(p):
            raise NotYet(f"leftover gives a probability for each of the {len(p)} tokens; yours is {rest}.")
        positive = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        if not alike(rest, [v / sum(positive) for v in positive]):
            more = (
                f"its sum is {sum(rest):.3f}, not 1" if abs(sum(rest) - 1) > 1e-6 else "look at where q > p"
            )
            raise NotYet(
                f"leftover is what the target has more of, max(0, p - q), made to add up to 1: {more}."
            )
        rejected = sum(b * (1 - t) for b, t in zip(q, taken, strict=True))
        out = [b * t + rejected * r for b, t, r in zip(q, taken, rest, strict=True)]
        if not alike(out, p):
            raise NotYet(f"What comes out is {out}, not the target's {p}.")
    same = sum(min(a, b) for a, b in zip(p, q, strict=True))
    return passed(
        "20 pairs of distributions: what comes out is the target's, up to rounding.",
        f"For the last pair a draft is kept with probability {same:.3f}, the sum of min(p, q).",
    )


def _distribution(dice: random.Random, size: int) -> list[float]:
    raw = [dice.random() ** 3 + 1e-3 for _ in range(size)]
    return [x / sum(raw) for x in raw]


def check_speedup(speedup: Callable[[float, int, float], float]) -> Html:
    """Tokens a unit of time against plain decoding."""
    cases = [
        Case(
            (1.0, 5, 0.1), 1 / 1.5, "Nothing accepted: the drafting was for nothing, and this is a slow-down."
        ),
        Case((4.0, 5, 0.0), 4.0, "Free drafts: as many times faster as tokens are committed a verify."),
        Case((4.5, 5, 0.2), 2.25),
        Case((2.0, 3, 0.05), 2 / 1.15),
    ]
    count = compare(
        speedup, cases,
        [(lambda a, s, c: a * (1 + s * c), "The time of a round goes below the line."),
         (lambda a, s, c: a / (s * c) if s * c else a, "One verify (1) and S draft steps (c each).")],
    )  # fmt: skip
    return passed(f"{count} cases.")
