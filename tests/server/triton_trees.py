"""Run by test_cpu_against_triton.py in the server's Python: our tree operators against SGLang's own.

SGLang's Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1), on random trees that SGLang's own
drafting code makes. Prints the number of trees compared and the numbers of accepted drafts that were seen.
"""

import torch
from sglang.kernels.ops.speculative import spec_tree
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens

from eaglelab_cpu import tree

VOCABULARY = 5


def draft(requests: int, topk: int, steps: int, n: int):
    """parent_list, selected_index, draft tokens: EagleDraftWorker.draft_forward with random numbers."""

    def random_step(rows):
        tokens = torch.rand(rows, VOCABULARY).topk(topk).indices  # distinct, as topk gives them
        return torch.rand(rows, topk), tokens, torch.zeros(rows, 1)

    scores, collected = None, ([], [], [])
    probabilities, tokens, hidden = random_step(requests)
    for step in range(steps):
        _, hidden, scores, made = select_top_k_tokens(step, probabilities, tokens, hidden, scores, topk)
        for values, value in zip(collected, made, strict=True):
            values.append(value)
        probabilities, tokens, hidden = random_step(requests * topk)
    return organize_draft_results(*collected, n)


def build(function, draft_result, seq_lens, topk, steps, n, mode):
    parents, selected, _ = draft_result
    requests = len(seq_lens)
    prefix = int(seq_lens.sum()) * n if mode == tree.FULL_MASK else 0
    mask = torch.ones(prefix + requests * n * n, dtype=torch.bool)
    positions = torch.empty(requests * n, dtype=torch.long)
    links = torch.full((3, requests, n), -1, dtype=torch.long)
    mode = spec_tree.TreeMaskMode(mode)
    function(parents, selected, seq_lens, mask, positions, *links, topk, steps, n, mode)
    return mask, positions, links


def verify(function, candidates, links, wanted, longest):
    requests, n = candidates.shape
    predicts = torch.zeros(requests * n, dtype=torch.int32)
    accept_index = torch.full((requests, longest), -1, dtype=torch.int32)
    correct = torch.empty(requests, dtype=torch.int32)
    function(predicts, accept_index, correct, candidates, *links, wanted)
    return predicts, accept_index, correct


def main():
    torch.manual_seed(0)
    trees, accepted = 0, set()
    for trial in range(24):
        topk, steps = 1 + trial % 4, 2 + trial % 3
        n = steps + 1 if topk == 1 else min(1 + topk + (steps - 1) * topk * topk, 4 + trial % 9)
        seq_lens = torch.randint(1, 9, (1 + trial % 3,))
        drafted = draft(len(seq_lens), topk, steps, n)
        for mode in (tree.FULL_MASK, tree.QLEN_ONLY):
            arguments = drafted, seq_lens, topk, steps, n, mode
            ours, theirs = (
                build(function, *arguments)
                for function in (tree.build_tree, spec_tree.sgl_build_tree_kernel_triton)
            )
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a, b), (trial, mode, a, b)
        candidates = torch.cat([torch.randint(VOCABULARY, (len(seq_lens), 1)), drafted[2]], dim=1)
        wanted = torch.randint(VOCABULARY, candidates.shape)
        wanted[0, : n - 1] = candidates[0, 1:]  # a chain is accepted whole
        ours, theirs = (
            verify(function, candidates, ours[2], wanted, steps + 1)
            for function in (tree.verify_greedy, spec_tree.verify_tree_greedy_triton)
        )
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), (trial, a, b)
        accepted |= set(ours[2].tolist())
        trees += len(seq_lens)
    print(trees, *sorted(accepted))


main()
