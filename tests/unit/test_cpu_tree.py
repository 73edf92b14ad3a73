"""eaglelab_cpu's tree operators against an independent reference: explicit paths of nodes, no links."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
from eaglelab_cpu import tree  # noqa: E402 - needs torch


def random_tree(rng: random.Random, topk: int, steps: int, n: int):
    """What EAGLE drafting hands over: parent_list, selected_index, and each node's path of candidates.

    Candidates are numbered over steps: topk of step 0, then topk * topk a step. A step expands topk of the
    step's candidates before; parent_list names the expanded ones (-1: the root). Chosen nodes always
    include their ancestors.
    """
    parent_list, path_of = [-1], {c: (c,) for c in range(topk)}
    last = list(range(topk))
    for step in range(1, steps):
        expanded = sorted(rng.sample(last, topk))
        first = topk + (step - 1) * topk * topk
        last = []
        for i, parent in enumerate(expanded):
            parent_list.append(parent)
            for child in range(first + i * topk, first + (i + 1) * topk):
                path_of[child] = path_of[parent] + (child,)
                last.append(child)
    chosen: set[int] = set()
    candidates = list(path_of)
    while len(chosen) < n - 1:
        missing = [c for c in path_of[rng.choice(candidates)] if c not in chosen]
        chosen |= set(missing[:1])  # ancestors first
    selected = sorted(chosen)
    return parent_list, selected, [()] + [path_of[c] for c in selected]


CASES = [(1, 5, 6), (2, 3, 7), (4, 3, 16), (3, 2, 4)]


def build(batch, lens, topk, steps, n, mode):
    prefix = sum(lens) * n if mode == tree.FULL_MASK else 0
    out = {
        "mask": torch.ones(prefix + len(lens) * n * n, dtype=torch.bool),
        "positions": torch.empty(len(lens) * n, dtype=torch.long),
        "links": torch.full((3, len(lens), n), -1, dtype=torch.long),
    }
    tree.build_tree(
        torch.tensor([b[0] for b in batch]), torch.tensor([b[1] for b in batch]), torch.tensor(lens),
        out["mask"], out["positions"], *out["links"], topk, steps, n, mode,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("topk,steps,n", CASES)
@pytest.mark.parametrize("mode", [tree.FULL_MASK, tree.QLEN_ONLY])
def test_build(topk, steps, n, mode):
    rng = random.Random(topk * 100 + steps)
    for _ in range(5):
        lens = [rng.randint(1, 9) for _ in range(3)]
        batch = [random_tree(rng, topk, steps, n) for _ in lens]
        out = build(batch, lens, topk, steps, n, mode)
        mask_rows = iter(out["mask"].tolist())
        for request, (_, _, paths) in enumerate(batch):
            seq_len, index, child, sibling = lens[request], *(out["links"][:, request].tolist())
            assert index == list(range(request * n, (request + 1) * n))
            assert out["positions"].view(-1, n)[request].tolist() == [seq_len + len(path) for path in paths]
            for path in paths:
                prefix = [next(mask_rows) for _ in range(seq_len)] if mode == tree.FULL_MASK else []
                assert all(prefix)
                own = [next(mask_rows) for _ in range(n)]
                assert own == [path[: len(other)] == other for other in paths]
            for node, path in enumerate(paths):
                children = []
                link = child[node]
                while link != -1:
                    children.append(link)
                    link = sibling[link]
                assert children == [i for i, p in enumerate(paths) if i and p[:-1] == path]
        assert next(mask_rows, None) is None


def test_a_node_without_its_parent_hangs_in_the_air():
    """Scores fall along a path, so it should not happen; SGLang's kernel then gives it depth 1 and no
    link."""
    out = build([([-1, 0, 1], [1, 2])], [10], 2, 2, 3, tree.QLEN_ONLY)  # candidate 2: a child of candidate 0
    assert out["positions"].tolist() == [10, 11, 11]
    assert out["links"][1].tolist() == [[1, -1, -1]]
    assert out["mask"].view(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("topk,steps,n", CASES)
def test_verify_follows_the_longest_agreeing_path(topk, steps, n):
    rng = random.Random(topk)
    lengths = set()
    for _ in range(40):
        batch = [random_tree(rng, topk, steps, n) for _ in range(2)]
        links = build(batch, [3, 5], topk, steps, n, tree.QLEN_ONLY)["links"]
        longest = steps + 1
        candidates, wanted, want_paths = [], [], []
        for _, _, paths in batch:
            tokens, target = [rng.randrange(3) for _ in paths], [rng.randrange(3) for _ in paths]
            for node, path in enumerate(paths):  # siblings are distinct tokens, as topk gives them
                tokens[node] = (path[-1] if path else 0) % max(topk, 3)
            # A node is accepted if, all along its path, the target predicts the token at its parent.
            good = [
                node
                for node, path in enumerate(paths)
                if all(
                    target[paths.index(path[:i])] == tokens[paths.index(path[: i + 1])]
                    for i in range(len(path))
                )
            ]
            best = paths[max(good, key=lambda node: len(paths[node]))]
            want_paths.append([paths.index(best[:i]) for i in range(len(best) + 1)])
            candidates.append(tokens)
            wanted.append(target)
        predicts = torch.full((2 * n,), -9, dtype=torch.int32)
        accept_index = torch.full((2, longest), -1, dtype=torch.int32)
        correct = torch.empty(2, dtype=torch.int32)
        tree.verify_greedy(
            predicts, accept_index, correct, torch.tensor(candidates), *links, torch.tensor(wanted)
        )
        expected = [-9] * (2 * n)
        for request, path in enumerate(want_paths):
            nodes = [request * n + node for node in path]
            assert accept_index[request].tolist() == nodes + [-1] * (longest - len(nodes))
            assert correct[request] == len(path) - 1
            for node, flat in zip(path, nodes, strict=True):
                expected[flat] = wanted[request][node]
            lengths.add(len(path))
        assert predicts.tolist() == expected
    assert {1, 2} < lengths  # nothing accepted, one, and more


def test_verify_stops_where_the_output_ends():
    """A chain that agrees throughout, but accept_index has room for the root and two drafts only."""
    predicts, accept_index = torch.zeros(4, dtype=torch.int32), torch.full((1, 3), -1, dtype=torch.int32)
    correct = torch.zeros(1, dtype=torch.int32)
    tree.verify_greedy(
        predicts, accept_index, correct, torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 3]]),
        torch.tensor([[1, 2, 3, -1]]), torch.tensor([[-1, -1, -1, -1]]), torch.tensor([[6, 7, 8, 9]]),
    )  # fmt: skip
    assert accept_index.tolist() == [[0, 1, 2]]
    assert (correct.tolist(), predicts.tolist()) == ([2], [6, 7, 8, 0])
