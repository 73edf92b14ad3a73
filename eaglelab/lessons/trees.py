"""Lesson 5: trees of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable

from eaglelab.drafting import Drafting
from eaglelab.html import Html
from eaglelab.lessons import material
from eaglelab.lessons.branches import (
    NODES,
    STEPS,
    TOPK,
    Children,
    Path,
    as_set,
    children,
    ideal,
    lengths_figure,
    measured,
    tree_figure,
)
from eaglelab.lessons.checking import Case, NotYet, ask, compare, passed
from eaglelab.replay import paths as package_paths

__all__ = ["NODES", "STEPS", "TOPK", "children", "lengths_figure", "measured", "tree_figure"]
EXAMPLE = ([7, 8, 9, 5, 6], [0, 0, 1, 1, 3])  # the tree of the lesson's first figure


def _random_tree(dice: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents; siblings never share a token."""
    tokens: list[int] = []
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    for node in range(size):
        parent, token = dice.randrange(node + 1), dice.randrange(4)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent if parent <= len(tokens) - 1 else 0)
    return tokens, parents


def check_paths(paths: Callable[[list[int], list[int]], list[list[int]]]) -> Html:
    """The tokens from the root to each node."""
    dice = random.Random(5)
    cases = [
        Case(([7, 8, 9], [0, 1, 2]), [[7], [7, 8], [7, 8, 9]], "A chain."),
        Case(([7, 8, 9], [0, 0, 0]), [[7], [8], [9]], "Three guesses for the same place."),
        Case(EXAMPLE, [[7], [8], [7, 9], [7, 5], [7, 9, 6]], "Node 3 is token 9, below 7."),
    ]  # fmt: skip
    for _ in range(30):
        tree = _random_tree(dice, dice.randrange(1, 12))
        cases.append(Case(tree, [list(p) for p in package_paths(*tree)]))
    hints = [
        (
            lambda t, p: [[t[j - 1]] * (j > 0) + [x] for x, j in zip(t, p, strict=True)],
            "A parent has a parent too.",
        ),
        (lambda t, p: [x[::-1] for x in map(list, package_paths(t, p))], "From the root outwards."),
    ]
    return passed(f"{compare(paths, cases, hints)} trees.")


def check_mask(mask: Callable[[list[int]], list[list[int]]]) -> Html:
    """Which node may see which."""
    literal = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    cases = [
        Case(
            (EXAMPLE[1],), literal, "Nodes 0 (the root) to 5: a row sees the root, its ancestors and itself."
        )
    ]
    chain = [[int(j <= i) for j in range(4)] for i in range(4)]
    cases.append(Case(([0, 1, 2],), chain, "In a chain it is the causal mask."))
    dice = random.Random(6)
    for _ in range(20):
        tokens, parents = _random_tree(dice, 10)
        cases.append(Case((parents,), _mask(parents)))

    def causal(parents: list[int]) -> list[list[int]]:
        return _mask(list(range(len(parents))))

    def parent_only(parents: list[int]) -> list[list[int]]:
        above = [0, *parents]
        return [[int(j in (i, above[i])) for j in range(len(above))] for i in range(len(above))]

    hints = [
        (causal, "A node must not see its siblings."),
        (parent_only, "Not only the parent: all the way to the root."),
    ]
    return passed(f"{compare(mask, cases, hints)} trees, one of them written out by hand.")


def _mask(parents: list[int]) -> list[list[int]]:
    rows = [[1] + [0] * len(parents)]
    for node, parent in enumerate(parents, 1):
        rows.append([int(seen or j == node) for j, seen in enumerate(rows[parent])])
    return rows


def check_verify(verify: Callable[[list[int], list[int], list[int]], list[int]]) -> Html:
    """The path that the target would have written, and its own next token."""
    tokens, parents = EXAMPLE
    cases = [
        Case(
            (tokens, parents, [7, 9, 0, 6, 0, 3]),
            [7, 9, 6, 3],
            "7, then 9, then 6, all there; then the target's 3.",
        ),
        Case((tokens, parents, [7, 5, 0, 0, 1, 0]), [7, 5, 1], "After 7 it wants 5: node 4."),
        Case((tokens, parents, [8, 9, 9, 9, 9, 9]), [8, 9], "8 is there, but nothing below it."),
        Case((tokens, parents, [4, 7, 7, 7, 7, 7]), [4], "Nothing matches: the bonus alone."),
        Case(([1, 2, 3], [0, 1, 2], [1, 2, 9, 9]), [1, 2, 9], "A chain, as in lesson 1."),
    ]
    dice = random.Random(7)
    for _ in range(40):
        tokens, parents = _random_tree(dice, 12)
        choices = [dice.randrange(4) for _ in range(len(tokens) + 1)]
        cases.append(Case((tokens, parents, choices), _verify(tokens, parents, choices)))
    hints = [
        (lambda t, p, c: _verify(t, p, c)[:-1], "The target's own next token is missing."),
        (lambda t, p, c: c[: len(_verify(t, p, c))], "choices[node] belongs to a node: follow them."),
    ]  # fmt: skip
    return passed(f"{compare(verify, cases, hints)} trees.")


def _verify(tokens: list[int], parents: list[int], choices: list[int]) -> list[int]:
    node, out = 0, [choices[0]]
    children = {(p, t): i for i, (t, p) in reversed(list(enumerate(zip(tokens, parents, strict=True), 1)))}
    while (node, out[-1]) in children:
        node = children[node, out[-1]]
        out.append(choices[node])
    return out


def check_grow(grow: Callable[[Children, int, int, int], list[Path]]) -> Html:
    """The tree that the drafter's probabilities ask for."""
    toy = {
        (): [(1, 0.6), (2, 0.3), (3, 0.1)],
        (1,): [(4, 0.5), (5, 0.4), (6, 0.1)],
        (2,): [(7, 0.9), (8, 0.1), (9, 0.0)],
        (1, 4): [(3, 0.9), (1, 0.1)],
        (2, 7): [(2, 0.5), (1, 0.5)],
    }

    def ask_toy(path: Path) -> list[tuple[int, float]]:
        if tuple(path) not in toy:
            raise NotYet(
                f"grow asks for what follows {tuple(path)}, which is not among the topk best of its step."
            )
        return toy[tuple(path)]

    got = as_set(ask(grow, ask_toy, 2, 2, 5))
    wanted = {(1,), (2,), (1, 4), (2, 7)}  # 0.6, 0.3, 0.30, 0.27; (1, 5) has 0.24
    if got != wanted:
        more = "The scores along a path are multiplied: (2, 7) has 0.3 · 0.9 = 0.27, (1, 5) 0.6 · 0.4 = 0.24."
        raise NotYet(f"The worked example should give {sorted(wanted)}; yours is {sorted(got)}. {more}")
    got = as_set(ask(grow, ask_toy, 3, 2, 6))
    if got != wanted | {(1, 4, 3)}:
        raise NotYet(
            f"With 3 steps and 6 nodes, (1, 4, 3) is kept too: 0.30 · 0.9 = 0.27; yours is {sorted(got)}."
        )
    count = 0
    for start, steps, topk, nodes in (
        (48, 5, 4, 16),
        (60, 4, 2, 8),
        (77, 5, 4, 32),
        (90, 3, 8, 20),
        (52, 5, 1, 6),
    ):
        state = Drafting.over(ideal(), material.texts()[0].tokens, material.texts()[0].features)
        tree = state.tree([start], steps, topk, nodes)
        wanted = set(package_paths(tree.tokens[0].tolist(), tree.parents[0].tolist()))
        got = as_set(ask(grow, children(start), steps, topk, nodes))
        if got != wanted:
            gone, new = sorted(wanted - got)[:1], sorted(got - wanted)[:1]
            raise NotYet(
                f"{start} rows, {steps} steps, topk {topk}, {nodes} nodes: {len(got & wanted)} of"
                f" {len(wanted)} paths are right. Missing, for one: {gone}; too many: {new}."
            )
        count += len(wanted)
    return passed(f"The worked example, and {count} nodes of 5 trees of the real drafter, as in the package.")


def check_rates(rate: Callable[[float, int], float]) -> Html:
    """SGLang's acceptance rate for a chain and for a tree."""
    cases = [
        Case((4.0, 6), 3.0 / 5, "A chain of 5 drafts: 3 of them accepted."),
        Case((4.0, 16), 3.0 / 15, "The same accept length with a tree of 15 drafts."),
        Case((1.0, 16), 0.0),
        Case((6.0, 16), 5.0 / 15, "The best that a tree of 5 steps can do."),
    ]
    hints = [
        (lambda a, n: a / n, "That counts the bonus, as old servers did."),
        (lambda a, n: (a - 1) / n, "N counts the root, which is not a draft."),
        (
            lambda a, n: (a - 1) / STEPS,
            "The denominator is every draft that was proposed: in a tree all its nodes.",
        ),
    ]
    compare(rate, cases, hints)
    servers = material.figures()["measure"]["servers"]
    chain, tree = servers["EAGLE3"]["accept_length"], servers["EAGLE3 topk 4"]["accept_length"]
    return passed(
        f"The two servers: {float(rate(chain, 6)):.2f} for the chain (accept length {chain:.2f}), "
        f"{float(rate(tree, NODES)):.2f} for the tree ({tree:.2f}).",
        f"No tree of 5 steps and 16 draft tokens can have a rate above {float(rate(6.0, NODES)):.2f}.",
    )
