"""The draft tree: build its mask and links, and verify it greedily.

Node 0 of a request's tree is the root, the last committed token; nodes 1..n-1 are the chosen draft tokens.
Signatures follow sglang 0.5.23 `kernels/ops/speculative/spec_tree.py`, whose Triton kernels do the same on
a GPU (tests compare them). Trees are small (16 nodes), so plain Python lists are quicker than tensor
operations.
"""

from __future__ import annotations

import torch

FULL_MASK, QLEN_ONLY = 0, 1  # sglang's TreeMaskMode: rows over [prefix | tree], or over the tree alone
NO_NODE = -1


def node_parents(selected: list[int], parent_list: list[int], topk: int) -> list[int]:
    """Parent node of every node; -1 for the root, and for a node whose parent was not chosen.

    `selected` holds, for nodes 1.., the candidate's index over all steps, topk candidates to an expanded
    node. The first topk candidates hang below the root; the others below the candidate that parent_list
    names.
    """
    node_of: dict[int, int] = {}
    for node, candidate in enumerate(selected, start=1):
        node_of.setdefault(candidate, node)
    parents = [NO_NODE]
    for candidate in selected:
        expanded = candidate // topk
        parents.append(0 if expanded == 0 else node_of.get(parent_list[expanded], NO_NODE))
    return parents


def build_tree(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrieve_index,
    retrieve_next_token, retrieve_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
) -> None:  # fmt: skip
    """Fill mask, positions and links of each request's tree (all outputs are the caller's buffers).

    parent_list [requests, ...], selected_index [requests, n-1]; positions [requests * n]; retrieve_*
    [requests, n], links preset to -1: first child and next sibling, in rising order; retrieve_index numbers
    nodes over the batch.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"eaglelab_cpu: no tree mask mode {tree_mask_mode}")
    n = draft_token_num
    mask_start = 0
    for request, seq_len in enumerate(verified_seq_len.tolist()):
        parents = node_parents(selected_index[request].tolist(), parent_list[request].tolist(), topk)
        node_depths, seen = (
            [0],
            [[True] + [False] * (n - 1)],
        )  # a node sees the root, its ancestors and itself
        for node in range(1, n):
            parent = parents[node]
            node_depths.append(1 + node_depths[max(parent, 0)])
            seen.append(seen[max(parent, 0)].copy())
            seen[node][node] = True
        first_child, next_sibling = [NO_NODE] * n, [NO_NODE] * n
        for node in range(n - 1, 0, -1):  # pushed in front, so children end up in rising order
            if parents[node] != NO_NODE:
                next_sibling[node] = first_child[parents[node]]
                first_child[parents[node]] = node
        retrieve_index[request] = torch.arange(request * n, (request + 1) * n)
        retrieve_next_token[request] = torch.tensor(first_child)
        retrieve_next_sibling[request] = torch.tensor(next_sibling)
        positions[request * n : (request + 1) * n] = torch.tensor(node_depths) + seq_len
        prefix = seq_len if tree_mask_mode == FULL_MASK else 0  # the caller has set the prefix columns
        size = n * (prefix + n)
        tree_mask[mask_start : mask_start + size].view(n, prefix + n)[:, prefix:] = torch.tensor(seen)
        mask_start += size


def verify_greedy(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
    retrive_next_sibling, target_predict,
) -> None:  # fmt: skip
    """Walk down each tree as long as a child holds the token that the target predicts at its parent.

    candidates, target_predict, retrive_* [requests, n]. Outputs, in the caller's buffers: accept_index
    [requests, longest] the accepted nodes, root first; accept_token_num [requests] correct drafts (no bonus);
    predicts [requests * n] the target's token at each accepted node, the bonus at the last.
    """
    longest = accept_index.shape[1]
    # the spelling `retrive` is the caller's, who names these arguments
    rows = (candidates, target_predict, retrive_index, retrive_next_token, retrive_next_sibling)
    for request, (tokens, wanted, index, child, sibling) in enumerate(
        zip(*(t.tolist() for t in rows), strict=True)
    ):
        path = [0]
        while len(path) < longest:
            node = child[path[-1]]
            while node != NO_NODE and tokens[node] != wanted[path[-1]]:
                node = sibling[node]
            if node == NO_NODE:
                break
            path.append(node)
        accepted = torch.tensor([index[node] for node in path])
        accept_index[request, : len(path)] = accepted.to(accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        predicts[accepted] = torch.tensor([wanted[node] for node in path], dtype=predicts.dtype)
