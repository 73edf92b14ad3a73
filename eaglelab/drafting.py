"""Drafting along one known text: draft-extend over its rows, then chains or trees from any position, at once.

Row i pairs the target's feature at position i with token i + 1. After every verify the engine writes the
committed rows' draft KV anew from the target's features, so a draft that starts with n committed rows depends
on those n rows and on nothing drafted before: every round of a request can be drafted in one batch. Facts:
sglang 0.5.23 `speculative/eagle_worker_v2.py` (`draft_forward`), `spec_utils.py` (`select_top_k_tokens`),
`eagle_utils.py` (`organize_draft_results`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eaglelab.drafter import Drafter, Tap

_CHUNK = 512  # rows of one draft-extend pass: bounds the memory of attention scores


@dataclass
class Chains:
    """Drafts of B starts.

    tokens [B, S]: target ids; probability [B, S]: the drafter's own, of its choice; gap [B, S]: how far the
    runner-up's logit lies below the best one (free), or the fed-back token's (forced; inf for one outside the
    draft vocabulary).
    """

    tokens: torch.Tensor
    probability: torch.Tensor
    gap: torch.Tensor


@dataclass
class Trees:
    """Drafts of B starts.

    tokens [B, N-1]: target ids in the server's order; parents [B, N-1]: node index of each one's parent (0 is
    the root, node i + 1 is tokens[i]); score [B, N-1]: products of probabilities; gap [B]: how far the best
    score left out lies below the last one taken.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    score: torch.Tensor
    gap: torch.Tensor


class Drafting:
    """The drafter's state along one text. `extend` may be called in pieces, as a chunked prefill does."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.keys = [torch.empty(0)] * drafter.wiring.layers  # per layer [rows, kv heads, width]
        self.values = list(self.keys)
        self.normed = torch.empty(0)  # [rows, H] after the final norm
        self.feedback = torch.empty(0)  # [rows, H] what the first draft step would be fed

    @classmethod
    def over(cls, drafter: Drafter, tokens, features, tap: Tap | None = None) -> Drafting:
        """tokens [rows + 1 or more] from position 0; features [rows, width]."""
        state = cls(drafter)
        shift = drafter.wiring.token_shift
        tokens = torch.as_tensor(tokens, dtype=torch.long)[shift : shift + len(features)]
        state.extend(tokens, torch.as_tensor(features)[: len(tokens)], tap)
        return state

    @property
    def rows(self) -> int:
        return len(self.normed)

    @torch.no_grad()
    def extend(self, tokens: torch.Tensor, features: torch.Tensor, tap: Tap | None = None) -> None:
        """Draft-extend: n rows after those so far. tokens [n], already shifted; features [n, width]."""
        for some, rows in zip(tokens.split(_CHUNK), features.split(_CHUNK), strict=True):
            start, n = self.rows, len(some)
            row = torch.arange(start, start + n, device=self.drafter.device)
            positions = row + self.drafter.wiring.position_start
            layers = range(self.drafter.wiring.layers)
            seen = [self.visible(row, row + 1, start + n, layer) for layer in layers]

            def attend(layer, q, k, v, seen=seen):
                self.keys[layer] = k if not len(self.keys[layer]) else torch.cat([self.keys[layer], k])
                self.values[layer] = v if not len(self.values[layer]) else torch.cat([self.values[layer], v])
                return mix(q, self.keys[layer], self.values[layer], seen[layer], scale=self.drafter.scale)

            hidden = self.drafter.project(rows, tap)
            normed, feedback = self.drafter.forward(
                some.to(self.drafter.device), hidden, positions, attend, tap
            )
            self.normed = torch.cat([self.normed, normed]) if start else normed
            self.feedback = torch.cat([self.feedback, feedback]) if start else feedback

    def visible(self, at: torch.Tensor, rows: torch.Tensor, count: int, layer: int = 0) -> torch.Tensor:
        """[queries, count] bool: the first `rows` rows of each query, within the window of its row `at`."""
        row = torch.arange(count, device=at.device)
        seen, window = row < rows[:, None], self.drafter.wiring.window_of(layer)
        return seen if window is None else seen & (row > at[:, None] - window)

    @torch.no_grad()
    def chain(self, starts, steps: int, forced=None, tap: Tap | None = None) -> Chains:
        """Draft S tokens from each start (its committed rows); forced [B, S] are fed back for our own."""
        drafter, starts = self.drafter, self._starts(starts)
        fed = None if forced is None else torch.as_tensor(forced, device=self.drafter.device)
        branches = _Branches(self, starts, 1, steps)
        normed, feedback = self.normed[starts - 1], self.feedback[starts - 1]
        out: list[tuple] = []
        for step in range(steps):
            logits = drafter.logits(normed, tap)
            best, choice = logits.max(dim=-1)
            tokens = drafter.to_target(choice, tap)
            probability = (best - logits.logsumexp(-1)).exp()
            if fed is None:
                second = logits.topk(min(2, logits.shape[-1])).values[:, -1]
                out.append((tokens, probability, best - second))
            else:
                out.append((tokens, probability, best - self._logit(logits, fed[:, step])))
                tokens = fed[:, step]
            if step < steps - 1:
                normed, feedback = branches.step(tokens, feedback, tap)
        return Chains(*(torch.stack(column, dim=1) for column in zip(*out, strict=True)))

    def _starts(self, starts) -> torch.Tensor:
        starts = torch.as_tensor(starts, dtype=torch.long, device=self.drafter.device)
        if len(starts) and not 1 <= int(starts.min()) <= int(starts.max()) <= self.rows:
            raise ValueError(f"starts go from 1 to {self.rows}, the rows of this text")
        return starts

    def _logit(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logit of each target id [B]; -inf outside the draft vocabulary."""
        wide = logits.new_full(
            (len(logits), int(max(tokens.max(), self.drafter.vocabulary.max())) + 1), -torch.inf
        )
        wide[:, self.drafter.vocabulary] = logits
        return wide.gather(1, tokens[:, None])[:, 0]

    @torch.no_grad()
    def tree(self, starts, steps: int, topk: int, nodes: int, tap: Tap | None = None) -> Trees:
        """Draft a tree of `nodes` nodes (root included) from each start."""
        drafter, starts = self.drafter, self._starts(starts)
        count = len(starts)
        branches = _Branches(self, starts, topk, steps)
        chances, ids = drafter.logits(self.normed[starts - 1], tap).softmax(-1).topk(topk)
        ids = drafter.to_target(ids, tap)
        score, tokens = chances, ids  # [B, topk]: of the rows that go on
        feedback = self.feedback[starts - 1].repeat_interleave(topk, dim=0)
        scores, candidates = [score], [tokens]
        parents = [torch.arange(-1, topk, device=drafter.device).expand(count, -1)]
        for step in range(1, steps):
            normed, feedback = branches.step(tokens.flatten(), feedback, tap)
            chances, ids = drafter.logits(normed, tap).softmax(-1).topk(topk)
            ids = drafter.to_target(ids, tap).view(count, topk * topk)
            expanded = (score[:, :, None] * chances.view(count, topk, topk)).flatten(1)
            scores.append(expanded)
            candidates.append(ids)
            score, chosen = expanded.topk(topk)
            tokens = ids.gather(1, chosen)
            parents.append(chosen + topk * topk * (step - 1) + topk)
            # hidden states follow the parent; the draft KV stays with the branch row (wiring.tree_kv)
            source = (
                chosen // topk + torch.arange(0, count * topk, topk, device=drafter.device)[:, None]
            ).flatten()
            feedback = feedback[source]
            if drafter.wiring.tree_kv == "parent":
                branches.follow(source)
        return _organise(torch.cat(scores, 1), torch.cat(candidates, 1), torch.cat(parents, 1), topk, nodes)


class _Branches:
    """Draft KV of `width` branches of every start, apart from the committed rows."""

    def __init__(self, text: Drafting, starts: torch.Tensor, width: int, steps: int):
        self.text, self.taken = text, 0
        self.rows = starts.repeat_interleave(width)
        shape = (len(self.rows), max(steps - 1, 0))
        self.keys = [k.new_zeros(*shape, *k.shape[1:]) for k in text.keys]
        self.values = [v.new_zeros(*shape, *v.shape[1:]) for v in text.values]

    def step(self, tokens: torch.Tensor, hidden: torch.Tensor, tap: Tap | None):
        """One draft step of all branches: tokens [B * width], hidden [B * width, H] -> (normed, feedback)."""
        drafter, now = self.text.drafter, self.taken
        positions = self.rows + now + drafter.wiring.position_start + drafter.wiring.step_offset
        layers, text = range(drafter.wiring.layers), self.text
        at = self.rows + now if drafter.wiring.window_moves else self.rows - 1
        seen = [text.visible(at, self.rows, text.rows, layer) for layer in layers]

        def attend(layer, q, k, v):
            self.keys[layer][:, now], self.values[layer][:, now] = k, v
            own = self.keys[layer][:, : now + 1], self.values[layer][:, : now + 1]
            window = drafter.wiring.window_of(layer) if drafter.wiring.window_moves else None
            own = own if window is None else tuple(x[:, -window:] for x in own)
            return mix(q, text.keys[layer], text.values[layer], seen[layer], *own, scale=drafter.scale)

        self.taken += 1
        return drafter.forward(tokens, hidden, positions, attend, tap)

    def follow(self, source: torch.Tensor) -> None:
        self.keys = [k[source] for k in self.keys]
        self.values = [v[source] for v in self.values]


def mix(q, keys, values, visible, own_keys=None, own_values=None, scale=None) -> torch.Tensor:
    """Attention in float32 -> [rows, heads, width of values] in q's dtype.

    q [rows, heads, d]; keys, values [n, kv heads, d] shared by all rows, each seeing its `visible` [rows, n];
    own_keys, own_values [rows, m, kv heads, d] seen by their row only; scale of the scores: d ** -0.5.
    """
    rows, heads, d = q.shape
    out = (rows, heads, values.shape[-1])
    grouped = q.float().view(rows, keys.shape[1], heads // keys.shape[1], d) * (
        scale or d**-0.5
    )  # query heads that share a kv head
    scores = torch.einsum("rkgd,nkd->rkgn", grouped, keys.float())
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if own_keys is None:
        return torch.einsum("rkgn,nkd->rkgd", scores.softmax(-1), values.float()).reshape(out).to(q.dtype)
    own = torch.einsum("rkgd,rmkd->rkgm", grouped, own_keys.float())
    weights = torch.cat([scores, own], dim=-1).softmax(-1)
    shared, own = weights[..., : len(keys)], weights[..., len(keys) :]
    mixed = torch.einsum("rkgn,nkd->rkgd", shared, values.float())
    return (mixed + torch.einsum("rkgm,rmkd->rkgd", own, own_values.float())).reshape(out).to(q.dtype)


def _organise(scores, candidates, parents, topk: int, nodes: int) -> Trees:
    """Keep the nodes - 1 best candidates of each start, in the order in which they were drafted."""
    ordered = scores.sort(dim=-1, descending=True).values
    left_out = ordered[:, nodes - 1] if scores.shape[1] >= nodes else torch.zeros_like(ordered[:, 0])
    picked = scores.topk(nodes - 1).indices.sort().values
    above = parents.gather(1, picked // topk)  # flat index of the parent candidate, -1 for the root
    parent = (picked[:, None, :] == above[:, :, None]).int().argmax(-1) + 1
    return Trees(
        tokens=candidates.gather(1, picked),
        parents=torch.where(picked < topk, torch.zeros_like(parent), parent),
        score=scores.gather(1, picked),
        gap=ordered[:, nodes - 2] - left_out,
    )
