"""Lesson 4: layers, offsets and conventions. Ids of each tool, and depths named by their vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from eaglelab import charts
from eaglelab.capture import to_float32
from eaglelab.depths import name_depths
from eaglelab.dialects import BY_NAME
from eaglelab.html import Html
from eaglelab.layer_ids import default_depths, sglang_depths, sglang_ids
from eaglelab.lessons import material
from eaglelab.lessons.checking import Case, NotYet, ask, compare, passed, plain

Tensor = torch.Tensor
LAYERS, HIDDEN = 8, 128  # of the target in data/
LLAMA, KIMI, GPT_OSS = "LlamaForCausalLM", "KimiK25ForConditionalGeneration", "GptOssForCausalLM"


def check_hf(hf: Callable[[int, int], tuple[int, bool]]) -> Html:
    """Where on the residual stream hidden_states[index] of transformers lies."""
    cases = [
        Case((0, 8), (0, False), "The embedding's output: no layer done."),
        Case((1, 8), (1, False), "What layer 0 gave: one layer done."),
        Case((5, 8), (5, False)),
        Case((7, 8), (7, False), "What goes into the last layer."),
        Case((8, 8), (8, True), "The last entry has gone through the final norm."),
        Case((-1, 8), (8, True), "-1 is the last of n + 1 entries."),
        Case((-2, 61), (60, False), "Counted from the end of n + 1 entries."),
        Case((61, 61), (61, True)),
    ]
    hints = [
        (lambda i, n: (i % (n + 1), False), "One entry is special: the last has been normed."),
        (lambda i, n: (i % n, i % n == n - 1), "A model of n layers returns n + 1 hidden states."),
        (lambda i, n: (i % (n + 1) + 1, i == n), "Index 0 is the embedding: nothing is to be added."),
    ]
    return passed(f"{compare(hf, cases, hints)} cases.")


TOOLS = ("speculators", "vllm", "sglang", "specforge")


def check_depths(to_depths: Callable[[str, list[int]], list[int]]) -> Html:
    """Ids as four tools mean them, for a Llama target."""
    cases = []
    for tool in TOOLS:
        for ids in ((2, 4, 5), (1, 3, 4), (0, 15, 30)):
            wanted = list(BY_NAME[tool].to_depth(ids, LLAMA, 32))
            cases.append(Case((tool, list(ids)), wanted))
    hints = [
        (lambda tool, ids: list(ids), "To sglang and specforge id i is what layer i gave: one layer more."),
        (lambda tool, ids: [i + 1 for i in ids], "To speculators and vllm an id is the depth itself."),
    ]
    return passed(f"{compare(to_depths, cases, hints)} cases: {', '.join(TOOLS)}.")


def check_sglang(rule: Callable[[list[int], str, int], list[int]]) -> Html:
    """SGLang's rule, with the architectures that are different."""
    cases = [
        Case(([1, 3, 4], LLAMA, 8), [2, 4, 5]),
        Case(([2, 30, 58], KIMI, 61), [2, 30, 58], "The first id is not 1: nothing is added."),
        Case(([1, 29, 57], KIMI, 61), [2, 30, 58], "The first id is 1: 1 is added to all."),
        Case(([2, 30, 58], LLAMA, 61), [3, 31, 59], "The same ids on a Llama mean something else."),
        Case(([1, 17, 33], GPT_OSS, 36), [2, 18, 34]),
        Case(([2, 18, 36], GPT_OSS, 36), [2, 18, 36], "The largest id is n: nothing is added."),
        Case(([2, 36, 18], GPT_OSS, 36), [2, 36, 18], "The largest id is n, wherever it stands."),
        Case(([1, 17, 35], GPT_OSS, 36), [2, 18, 36], "The largest id is n - 1: 1 is added."),
        Case(([58, 30, 1], KIMI, 61), [58, 30, 1], "Only the *first* id is looked at."),
        Case(([0, 29, 57], KIMI, 61), [0, 29, 57], "The first id is 0, and not 1."),
    ]  # fmt: skip
    for case in cases:
        said = list(sglang_depths(tuple(case.arguments[0]), *case.arguments[1:]))
        assert said == case.wanted  # the package's table, read from SGLang's sources
    hints = [
        (lambda ids, a, n: [i + 1 for i in ids], "Two architectures have rules of their own."),
        (lambda ids, a, n: [i + (1 in ids) for i in ids] if a == KIMI else None, "Only the first id counts."),
    ]
    return passed(f"{compare(rule, cases, hints)} cases, as in the package's table of SGLang 0.5.23.")


def check_write(write: Callable[[list[int], str], list[int]], default: Callable[[int], list[int]]) -> Html:
    """Ids that make a tool mean these depths; and the depths that are taken without any ids."""
    cases = []
    for depths in ([2, 4, 5], [2, 30, 58]):
        for tool in TOOLS:
            same = tool in ("speculators", "vllm")
            wanted = depths if same else list(sglang_ids(tuple(depths), LLAMA, 61))
            cases.append(Case((depths, tool), wanted, "Reading them back must give the depths again."))
    count = compare(write, cases, [(lambda d, t: [x + 1 for x in d], "From depth to id it is minus one.")])
    layers = [Case((n,), list(default_depths(LLAMA, n))) for n in (8, 27, 32, 61)]
    count += compare(default, layers)
    return passed(
        f"{count} cases.", "For 61 layers the default is [2, 30, 58]: Kimi's, as everybody writes it."
    )


def show_ids() -> Html:
    """The two config files of the drafter in data/."""
    from eaglelab.checkpoint import open_checkpoint
    from eaglelab.serve import data_dir

    rows = []
    for form in ("speculators", "sglang"):
        found = open_checkpoint(data_dir() / f"drafter-{form}")
        facts = material.target().facts
        rows.append(
            (f"data/drafter-{form}", str(list(found.aux_layer_ids or ())), str(list(found.depths_in(facts))))
        )
    return material.shown(("drafter", "ids in its config.json", "depths that they mean"), rows)


@cache
def streams() -> dict[int, Tensor]:
    """Depth -> the target's residual stream, rows of both captured texts, [n, H]."""
    found: dict[int, list[Tensor]] = {}
    for again in material.golden().reprefill.values():
        for depth, rows in again.streams.items():
            found.setdefault(depth, []).append(torch.from_numpy(to_float32(rows, again.dtype)))
    return {depth: torch.cat(parts) for depth, parts in found.items()}


@cache
def fed() -> Tensor:
    """What the server fed its drafter along the same rows, [n, 3 H]."""
    capture = material.golden()
    parts = []
    for text in material.texts():
        parts.append(text.features[: len(capture.reprefill[text.rid].token_ids)])
    return torch.cat(parts)


def mystery(number: int) -> Tensor:
    """Rows of features that somebody stored in a hurry, [n, 3 H]."""
    noise = torch.randn(fed().shape, generator=torch.Generator().manual_seed(number)) * 1e-3
    return torch.cat([streams()[d] for d in MYSTERIES[number]], dim=-1) + noise


MYSTERIES = {1: (3, 5, 6), 2: (5, 4, 2), 3: (2, 2, 5)}


def check_name(name: Callable[[Tensor, dict[int, Tensor]], list[int]]) -> Html:
    """Depths named by vectors."""
    draw = torch.Generator().manual_seed(9)
    flat = {d: torch.randn(20, 16, generator=draw) * (1 + d) for d in range(6)}
    flat[4][:4] *= 1e-3
    flat[1][:4] *= 100
    flat[0] = 4 * flat[4]  # the same direction, another length
    stale = flat[4] + 1e-3 * torch.randn(20, 16, generator=draw)
    stale[:4] = flat[1][:4]  # rows of another depth, where those of the right one are all but empty
    tests = [
        (torch.cat([flat[1], flat[3]], -1), flat, [1, 3], "Two chunks: cut the rows by the streams' width."),
        (torch.cat([stale, flat[2]], -1), flat, [4, 2], "Four odd rows must not decide: take a median."),
        (fed(), streams(), [2, 4, 5], "The server's own rows."),
    ]  # fmt: skip
    for rows, known, wanted, about in tests:
        got = plain(ask(name, rows, known))
        if got != wanted:
            raise NotYet(f"Rows of depths {wanted}: yours says {got}. {about}")
    said = [plain(ask(name, mystery(number), streams())) for number in MYSTERIES]
    package = [
        name_depths(mystery(n).numpy(), {d: s.numpy() for d, s in streams().items()}).depths
        for n in MYSTERIES
    ]
    assert package == [list(m) for m in MYSTERIES.values()]
    for number, (got, true) in enumerate(zip(said, MYSTERIES.values(), strict=True), 1):
        if got != list(true):
            raise NotYet(f"mystery({number}): yours says {got}, the package {list(true)}.")
    return passed(
        "The server's rows are depths 2, 4 and 5. Three files of features, stored in a hurry: "
        + "; ".join(f"mystery({n}): {list(d)}" for n, d in MYSTERIES.items()) + ".",
        "Off by one, in another order, one depth twice; all of them 384 wide.",
    )  # fmt: skip


def errors_figure() -> Any:
    """How far each chunk of the server's rows lies from every depth."""
    found = name_depths(fed().numpy(), {d: s.numpy() for d, s in streams().items()}, layers=LAYERS)
    return material.picture(charts.depth_errors(found.chunks), "error of each chunk at each depth")


FEEDS = ((2, 4, 5), (1, 3, 4), (3, 5, 6), (2, 4, 6), (5, 4, 2), (8, 8, 8))


@cache
def priced() -> list[tuple[tuple[int, ...], float, int]]:
    """(depths, accept length, rounds): the drafter fed other depths along the captured texts, simulated."""
    from eaglelab.simulate import Rounds, Speculation, reprefilled_text, simulate
    from eaglelab.wiring import Feed

    capture, drafter = material.golden(), material.drafter()
    rows: list[tuple[tuple[int, ...], float, int]] = []
    speculation = Speculation.of(capture.launch)
    for depths in FEEDS:
        feed = Feed(depths, len(depths) * HIDDEN)
        parts = [
            simulate(drafter, reprefilled_text(capture.reprefill[rid], feed, trace), speculation)
            for rid, trace in capture.requests.items()
        ]
        found = Rounds.join(parts, speculation.steps)
        rows.append((depths, found.accept_length, len(found.lengths)))
    return rows


def price_figure() -> Any:
    """Accept length under other depths."""
    from eaglelab import plots
    from eaglelab.html import BLUE, GREY, INK

    rows = priced()
    figure, (axes,) = plots.blank(1, 3.2)
    for y, (depths, length, count) in enumerate(reversed(rows)):
        right = depths == FEEDS[0]
        axes.barh(y, length, color=BLUE if right else GREY, hatch="//" if right else "", edgecolor="#ffffff")
        axes.text(length + 0.05, y, f"{length:.2f}  (n = {count} rounds)", va="center", color=INK)
    names = [
        ", ".join(map(str, depths)) + (" (trained)" if depths == FEEDS[0] else "") for depths, *_ in rows
    ]
    axes.set_yticks(range(len(rows)), names[::-1])
    axes.set_xlim(1, 6)
    axes.set_xlabel("accept length, simulated on the captured texts (1 = nothing accepted, 6 = everything)")
    axes.set_ylabel("depths fed")
    return material.picture(figure, "accept length under other depths")


def check_inert(inert: Callable[[int, int], bool]) -> Html:
    """Which shifts of positions change an attention score?"""
    from eaglelab.rope import rotate

    drafter = material.drafter()
    draw = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, drafter.head_dim, generator=draw) for _ in range(2))

    def score(query: int, key: int) -> float:
        a, b = (rotate(x, torch.tensor([p]), drafter.rope, drafter.wiring.rope.layout)
                for x, p in ((q, query), (k, key)))  # fmt: skip
        return float((a * b).sum())

    cases = []
    for committed in (0, 1, 7):
        for drafts in (0, 1, 7, -1):
            moved = abs(score(20 + drafts, 11 + committed) - score(20, 11)) > 1e-3
            words = f"Rows moved by {committed}, draft steps by {drafts}."
            cases.append(Case((committed, drafts), not moved, words))
    why = "Rope turns q and k by their positions, and only the angle *between* them counts."
    hints = [(lambda a, b: a == 0 and b == 0, why)]
    return passed(f"{compare(inert, cases, hints)} cases, each computed with the drafter's own rope.")
