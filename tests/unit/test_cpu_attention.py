"""eaglelab_cpu's attention against a brute-force reference: one query, one head, one visible position at a
time."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")
from eaglelab_cpu import attention  # noqa: E402 - needs torch

SLOTS, WIDTH, D = 64, 24, 4


class Pool:
    """A KV pool with requests whose positions lie in random slots."""

    def __init__(self, seed: int, heads: int, kv_heads: int, totals: list[int], dtype=torch.float32):
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.totals = heads, kv_heads, totals
        self.k, self.v = (self.random(SLOTS, kv_heads, D).to(dtype) for _ in range(2))
        free = torch.randperm(SLOTS, generator=self.generator).tolist()
        self.req_to_token = torch.full((len(totals) + 3, WIDTH), 7, dtype=torch.int32)
        self.rows = torch.randperm(len(totals) + 3, generator=self.generator)[: len(totals)]
        for row, total in zip(self.rows.tolist(), totals, strict=True):
            self.req_to_token[row, :total] = torch.tensor([free.pop() for _ in range(total)])

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)


def reference(pool: Pool, request: int, query, visible: list[int], scale, cap=0.0, sinks=None):
    """query [heads, D], `visible` positions -> [heads, D], in Python floats."""
    out = torch.zeros(pool.heads, D)
    slots = pool.req_to_token[pool.rows[request]].tolist()
    for head in range(pool.heads):
        kv_head = head // (pool.heads // pool.kv_heads)
        logits = []
        for position in visible:
            key = pool.k[slots[position], kv_head].float().tolist()
            logit = scale * sum(a * b for a, b in zip(query[head].float().tolist(), key, strict=True))
            logits.append(cap * math.tanh(logit / cap) if cap else logit)
        total = sum(math.exp(logit) for logit in logits) + (math.exp(sinks[head]) if sinks is not None else 0)
        for position, logit in zip(visible, logits, strict=True):
            out[head] += math.exp(logit) / total * pool.v[slots[position], kv_head].float()
    return out


def extend(pool: Pool, q, news: list[int], tree_mask=None, causal=True, scale=0.5, cap=0.0, sinks=None):
    o = torch.full_like(q, float("nan"))
    starts = [sum(news[:i]) for i in range(len(news))]
    attention.extend_attention(
        q, None, None, o, pool.k, pool.v, 1.0, 1.0, pool.req_to_token, pool.rows, torch.tensor(pool.totals),
        torch.tensor(news, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32), max(news), scale, cap,
        False, 0, None, sinks, tree_mask, causal,
    )  # fmt: skip
    return o


def decode(pool: Pool, q, k=None, v=None, loc=None, scale=0.5, cap=0.0, sinks=None):
    o = torch.full_like(q, float("nan"))
    loc = torch.zeros(len(q), dtype=torch.int64) if loc is None else loc
    attention.decode_attention(
        q, pool.k, pool.v, 1.0, 1.0, o, k, v, loc, torch.empty(0), pool.req_to_token, pool.rows,
        torch.tensor(pool.totals), scale, cap, False, 0, None, sinks,
    )  # fmt: skip
    return o


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("news", [[5, 1, 9], [3, 3, 3]], ids=["ragged", "even"])
def test_extend_is_causal_after_the_whole_prefix(heads, kv_heads, news):
    """Prefill without a prefix (request 0), chunks and verifies with one (requests 1 and 2)."""
    totals = [news[0], news[1] + 6, news[2] + 2]
    pool = Pool(1, heads, kv_heads, totals)
    q = pool.random(sum(news), heads, D)
    o = extend(pool, q, news)
    row = 0
    for request, (new, total) in enumerate(zip(news, totals, strict=True)):
        for i in range(new):
            want = reference(pool, request, q[row], list(range(total - new + i + 1)), 0.5)
            torch.testing.assert_close(o[row], want)
            row += 1


@pytest.mark.parametrize("seed", range(3))
def test_extend_with_tree_masks(seed):
    """Each node sees the prefix and its ancestors, by masks that differ from request to request."""
    rng = random.Random(seed)
    n, prefixes = 6, [0, 7, 3]
    pool = Pool(seed, 8, 2, [p + n for p in prefixes])
    parents = [[0] + [rng.randrange(i) for i in range(1, n)] for _ in prefixes]
    masks, seen = [], []
    for tree in parents:
        paths = [{0}]
        for node in range(1, n):
            paths.append(paths[tree[node]] | {node})
        seen.append(paths)
        masks.append(torch.tensor([[other in path for other in range(n)] for path in paths]))
    q = pool.random(3 * n, 8, D)
    o = extend(pool, q, [n] * 3, tree_mask=torch.cat([m.flatten() for m in masks]))
    for request, prefix in enumerate(prefixes):
        for node in range(n):
            visible = list(range(prefix)) + [prefix + other for other in sorted(seen[request][node])]
            want = reference(pool, request, q[request * n + node], visible, 0.5)
            torch.testing.assert_close(o[request * n + node], want)


def test_extend_without_an_order():
    pool = Pool(2, 2, 1, [5])
    q = pool.random(3, 2, D)
    o = extend(pool, q, [3], causal=False)
    for i in range(3):
        torch.testing.assert_close(o[i], reference(pool, 0, q[i], [0, 1, 2, 3, 4], 0.5))


def test_decode_stores_the_new_token_first_and_ignores_padding():
    """Lengths differ widely, so most of the padded batch is padding; slot 0 holds rubbish that must not
    leak."""
    totals = [1, 9, 20]
    pool = Pool(3, 8, 2, totals)
    pool.k[0], pool.v[0] = 1e4, 1e4
    loc = torch.tensor([int(pool.req_to_token[row, n - 1]) for row, n in zip(pool.rows, totals, strict=True)])
    before = pool.k.clone()
    q, k, v = pool.random(3, 8, D), pool.random(3, 2 * D), pool.random(3, 2 * D)
    o = decode(pool, q, k, v, loc)
    torch.testing.assert_close(pool.k[loc], k.view(3, 2, D), rtol=0, atol=0)
    torch.testing.assert_close(pool.v[loc], v.view(3, 2, D), rtol=0, atol=0)
    others = [slot for slot in range(SLOTS) if slot not in loc.tolist()]
    assert torch.equal(pool.k[others], before[others])
    for request, total in enumerate(totals):
        torch.testing.assert_close(o[request], reference(pool, request, q[request], list(range(total)), 0.5))


def test_logit_cap_and_sinks():
    pool = Pool(4, 4, 2, [6, 4])
    q, sinks = 3 * pool.random(2, 4, D), torch.tensor([0.5, -1.0, 2.0, 0.0])
    for o in (
        decode(pool, q, cap=1.5, sinks=sinks),
        extend(pool, q, [1, 1], cap=1.5, sinks=sinks),
    ):
        for request, total in enumerate([6, 4]):
            want = reference(pool, request, q[request], list(range(total)), 0.5, 1.5, sinks.tolist())
            torch.testing.assert_close(o[request], want)


def test_bfloat16_is_computed_in_float32():
    pool = Pool(5, 8, 2, [9], dtype=torch.bfloat16)
    q = pool.random(1, 8, D).bfloat16()
    o = decode(pool, q)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o[0], reference(pool, 0, q[0], list(range(9)), 0.5).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "change", [{"is_cross": True}, {"window": 8}, {"encoder_lens": [1]}, {"dtype": torch.int8}]
)
def test_what_is_not_built_is_refused_not_approximated(change):
    buffer = torch.zeros(1, dtype=change.get("dtype", torch.float32))
    plain = {"is_cross": False, "window": 0, "encoder_lens": None}
    with pytest.raises(NotImplementedError, match="eaglelab_cpu"):
        attention._only_plain(buffer, **{name: change.get(name, plain[name]) for name in plain})
    attention._only_plain(torch.zeros(1), **plain)
