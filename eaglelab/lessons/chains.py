"""Lesson 1's material: the rounds of the shipped capture, and pictures of what they amount to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eaglelab import explain as definitions
from eaglelab.html import Html
from eaglelab.lessons import material
from eaglelab.lessons.checking import plain, solved

Tokens = list[int]


def rounds() -> list[tuple[Tokens, Tokens]]:
    """Every round of the shipped capture: the drafts, and the target's choices along its own text.

    drafts [S]; choices [S + 1]. After the first wrong draft the target would really have judged a text that
    it never wrote; what it would have said there does not matter, and its own text stands in.
    """
    found = []
    for text, trace in zip(material.texts(), material.golden().requests.values(), strict=True):
        for r in trace.rounds:
            choices = text.tokens[r.n + 1 : r.n + 2 + len(r.draft_tokens)]
            if len(choices) == len(r.draft_tokens) + 1:
                found.append((r.draft_tokens, choices))
    return found


def committed() -> list[Tokens]:
    """What the genuine server committed in these rounds."""
    return [
        r.committed
        for text, trace in zip(material.texts(), material.golden().requests.values(), strict=True)
        for r in trace.rounds
        if len(text.tokens) > r.n + 1 + len(r.draft_tokens)
    ]


def show_rounds(count: int = 4) -> Html:
    """The first rounds of the capture as words."""
    rows = []
    for i, ((drafts, _), took) in enumerate(zip(rounds()[:count], committed(), strict=False), 1):
        rows.append((i, material.spelled(drafts), material.spelled(took), len(took)))
    header = ("round", "drafted", "committed", "tokens")
    return material.shown(
        header, rows, "The last one committed is the target's own. Bars part tokens, ␣ is a space"
    )


def server_correct() -> list[int]:
    """Accepted drafts of each round of the shipped capture."""
    return [r.accept_len - 1 for trace in material.golden().requests.values() for r in trace.rounds]


def trainer_positions() -> list[float]:
    """What speculators 0.9.0 measured when it validated this drafter: right among all, step 1 to 5."""
    drafter = material.figures()["drafter"]
    return [drafter[f"full_acc_{step}"] for step in range(5)]


def positions_figure(by_position: Callable[[list[int], int], list[float]]) -> Any:
    """The reader's shares for the shipped capture, beside the trainer's validation."""
    from eaglelab import plots
    from eaglelab.html import BLUE, INK, ORANGE

    correct, trainer = server_correct(), trainer_positions()
    mine = plain(solved(by_position, 3)(correct, 5))
    figure, (axes,) = plots.blank(1, 3.4)
    place = range(1, 6)
    rows = (
        (mine, f"server, n = {len(correct)} verifies", BLUE, "o-", -16),
        (trainer, "trainer's validation", ORANGE, "s--", 8),
    )
    for shares, label, colour, style, above in rows:
        axes.plot(place, shares, style, color=colour, label=f"{label}: 1 + sum = {1 + sum(shares):.2f}")
        for x, y in zip(place, shares, strict=True):
            axes.annotate(
                f"{y:.2f}", (x, y), textcoords="offset points", xytext=(0, above), ha="center", color=INK
            )
    axes.set_xticks(list(place))
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of rounds accepted\nup to this position")
    axes.legend(frameon=False, loc="upper right")
    return material.picture(figure, "share of rounds accepted up to each draft position")


def readings(line: str, steps: int, draft_tokens: int) -> Html:
    """Every reading of a printed line, by the package (`eaglelab explain`)."""
    found = definitions.explain(line, steps, draft_tokens)
    rows = []
    for r in found.readings:
        words = "; ".join(f"{n}: {d.words} [{d.source}]" for n, d in r.definitions.items())
        rows.append((words, round(r.correct, 3), round(1 + r.correct, 3)))
    header = ("if it is defined so", "drafts accepted a verify", "accept length")
    return material.shown(header, rows, f"{line!r}, {steps} steps, {draft_tokens} draft tokens")


def speed_figure(speedup: Callable[[float, int, float], float]) -> Any:
    """Speed-up against accept length for three costs of a draft step, the measured servers marked."""
    from eaglelab import plots
    from eaglelab.html import INK

    servers, speed = material.figures()["measure"]["servers"], solved(speedup, 7)
    figure, (axes,) = plots.blank(1, 3.6)
    lengths: Sequence[float] = [1 + 0.05 * i for i in range(101)]
    for cost, colour, style in zip((0.02, 0.1, 0.3), plots.SERIES, plots.STYLES, strict=False):
        axes.plot(
            lengths,
            [speed(x, 5, cost) for x in lengths],
            style,
            color=colour,
            label=f"a draft step costs {cost:g} of a verify",
        )
        for name in ("EAGLE", "EAGLE3"):
            x = servers[name]["accept_length"]
            axes.plot(x, speed(x, 5, cost), "o", color=colour, markersize=7)
    for name in ("EAGLE", "EAGLE3"):
        x = servers[name]["accept_length"]
        axes.axvline(x, color="#b0b0b0", linewidth=1, zorder=0)
        count = servers[name]["verifies"]
        axes.text(x, 5.6, f" {name}: {x:.2f} (n = {count:,} verifies)", color=INK, va="center")
    axes.axhline(1, color=INK, linewidth=1)
    axes.text(6, 1.06, "plain decoding", color=INK, ha="right", va="bottom")
    axes.set_xlim(1, 6.2)
    axes.set_ylim(0, 6)
    axes.set_xlabel("accept length: tokens committed per verify (5 steps)")
    axes.set_ylabel("times the speed of\nplain decoding (model)")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.03, 0.9))
    return material.picture(figure, "speed-up against accept length")
