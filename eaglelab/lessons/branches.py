"""Lesson 5's material: the drafter asked path by path, pictures of its trees, and what trees bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from eaglelab.drafter import Drafter
from eaglelab.html import Html
from eaglelab.lessons import material
from eaglelab.lessons.checking import NotYet, solved
from eaglelab.simulate import Rounds, Speculation, simulate

Path = tuple[int, ...]
Children = Callable[[Path], list[tuple[int, float]]]
STEPS, TOPK, NODES = 5, 4, 16  # of the server that was measured with a tree


@cache
def ideal() -> Drafter:
    """The drafter with a KV cache in which every branch sees its own path."""
    drafter = material.drafter()
    return Drafter(material.checkpoint(), replace(drafter.wiring, tree_kv="parent"), material.target())


def children(start: int, text: int = 0) -> Children:
    """What the drafter would put below a path of drafts: all tokens with their probabilities, best first.

    start: committed rows; the empty path asks for the first draft.
    """
    drafter, known = ideal(), material.texts()[text]
    ids = torch.tensor(known.tokens[1 : start + 1])
    seen: dict[Path, tuple[torch.Tensor, torch.Tensor]] = {(): (ids, drafter.project(known.features[:start]))}

    @cache
    def run(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
        rows, hidden = seen[path]
        normed, feedback = drafter.forward(
            rows, hidden, torch.arange(len(rows)), lambda _, q, k, v: _attend(q, k, v)
        )
        return normed[-1:], feedback[-1:]

    def below(path: Path) -> list[tuple[int, float]]:
        path = tuple(int(t) for t in path)
        for i in range(1, len(path) + 1):
            if path[:i] not in seen:
                rows, hidden = seen[path[: i - 1]]
                fed = run(path[: i - 1])[1]
                seen[path[:i]] = torch.cat([rows, torch.tensor(path[i - 1 : i])]), torch.cat([hidden, fed])
        chances, best = drafter.logits(run(path)[0]).softmax(-1)[0].sort(descending=True)
        return list(zip(drafter.to_target(best).tolist(), chances.tolist(), strict=True))

    return below


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def as_set(found: Any) -> set[Path]:
    """Paths as plain tuples, whatever holds them."""
    try:
        return {tuple(int(t) for t in path) for path in found}
    except (TypeError, ValueError):
        raise NotYet("grow returns paths: tuples of tokens, one a kept node.") from None


def tree_figure(grow: Callable[[Children, int, int, int], list[Path]], start: int = 48) -> Any:
    """The reader's tree over one round; what the target wrote is drawn thick."""
    from eaglelab import plots
    from eaglelab.html import BLUE, GREY, INK, TINT

    found = sorted(as_set(solved(grow, 4)(children(start), STEPS, TOPK, NODES)))
    truth = tuple(material.texts()[0].tokens[start + 1 : start + 2 + STEPS])
    leaves = [p for p in found if not any(q[: len(p)] == p and q != p for q in found)]
    place: dict[Path, float] = {p: float(i) for i, p in enumerate(leaves)}
    for p in sorted([(), *found], key=len, reverse=True):
        below = [place[q] for q in found if q[:-1] == p and len(q) == len(p) + 1]
        place.setdefault(p, sum(below) / len(below) if below else 0.0)
    figure, (axes,) = plots.blank(1, 0.5 + 0.42 * len(leaves))
    for p in found:
        kept = truth[: len(p)] == p
        axes.plot(
            [len(p) - 1, len(p)],
            [place[p[:-1]], place[p]],
            color=BLUE if kept else GREY,
            linewidth=3.5 if kept else 1,
        )
    for p in [(), *found]:
        kept = truth[: len(p)] == p
        word = material.word(p[-1]) if p else material.word(material.texts()[0].tokens[start])
        box = {
            "boxstyle": "round,pad=0.25",
            "facecolor": TINT[BLUE] if kept else "#ffffff",
            "edgecolor": BLUE if kept else GREY,
        }
        axes.text(
            len(p),
            place[p],
            word + (" ✓" if kept and p else ""),
            ha="center",
            va="center",
            color=INK,
            bbox=box,
        )
    axes.set_xlim(-0.4, STEPS + 0.4)
    axes.set_ylim(len(leaves) - 0.4, -0.6)
    axes.set_xticks(range(STEPS + 1), ["root", *map(str, range(1, STEPS + 1))])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"position in the draft; {len(found)} drafts; ✓ and thick: what the target wrote")
    return material.picture(figure, "a tree of drafts")


SHAPES = ((1, 6), (2, 8), (2, 16), (4, 8), (4, 16), (4, 32), (4, 64))


@cache
def lengths() -> list[tuple[int, int, float, int]]:
    """(topk, nodes, accept length, rounds) along the captured texts, simulated as SGLang 0.5.23 drafts."""
    rows = []
    for topk, nodes in SHAPES:
        shape = Speculation(STEPS, topk, nodes)
        found = Rounds.join([simulate(material.drafter(), text, shape) for text in material.texts()], STEPS)
        rows.append((topk, nodes, found.accept_length, len(found.lengths)))
    return rows


def lengths_figure() -> Any:
    """Accept length against the number of nodes."""
    from eaglelab import plots
    from eaglelab.html import INK

    figure, (axes,) = plots.blank(1, 3.6)
    for i, topk in enumerate(sorted({t for t, *_ in lengths()})):
        rows = [(n, length) for t, n, length, _ in lengths() if t == topk]
        name = "chain (topk 1)" if topk == 1 else f"tree, topk {topk}"
        axes.plot(
            *zip(*rows, strict=True),
            plots.STYLES[i],
            marker=plots.MARKERS[i],
            color=plots.SERIES[i],
            label=name,
        )
        for n, length in rows:
            axes.annotate(
                f"{length:.2f}",
                (n, length),
                textcoords="offset points",
                xytext=(0, -17 if topk == 4 else 8),
                ha="center",
                color=INK,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([6, 8, 16, 32, 64], ["6", "8", "16", "32", "64"])
    axes.set_ylim(1, 6)
    axes.set_xlabel(f"draft tokens that a verify reads (N, root included); {STEPS} steps")
    counts = [count for *_, count in lengths()]
    axes.set_ylabel(f"accept length, simulated\n(n = {min(counts)} to {max(counts)} rounds)")
    axes.legend(frameon=False, loc="upper left")
    return material.picture(figure, "accept length against the number of draft tokens")


def measured() -> Html:
    """What the genuine server counted when data/ was made."""
    rows = []
    for name, found in material.figures()["measure"]["servers"].items():
        if name.startswith("EAGLE3"):
            shape = f"tree: topk {TOPK}, {NODES} draft tokens" if "topk" in name else "chain: 6 draft tokens"
            rows.append((shape, found["accept_length"], found["verifies"]))
    return material.shown(("genuine server, 10 prompts", "accept length", "verifies"), rows)
