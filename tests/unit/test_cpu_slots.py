"""eaglelab_cpu's slot bookkeeping against plain loops over cells, on random ragged requests."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
from eaglelab_cpu import operators, platform, slots  # noqa: E402 - needs torch

WIDTH = 30


def requests(seed: int):
    """Random rows, ranges [start, end) (some empty) and a table of distinct slots."""
    rng = random.Random(seed)
    n = rng.randint(1, 4)
    rows = rng.sample(range(6), n)
    starts = [rng.randint(0, 10) for _ in rows]
    ends = [start + rng.choice([0, 1, 3, 8]) for start in starts]
    table = torch.randperm(6 * WIDTH, generator=torch.Generator().manual_seed(seed)).view(6, WIDTH).int()
    return rows, starts, ends, table


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ranges_are_written_and_read_in_order(seed, dtype):
    rows, starts, ends, table = requests(seed)
    arguments = torch.tensor(rows), torch.tensor(starts, dtype=dtype), torch.tensor(ends, dtype=dtype)
    total = sum(end - start for start, end in zip(starts, ends, strict=True))
    new = torch.arange(1000, 1000 + total)

    want, taken = table.clone(), iter(new.tolist())
    for row, start, end in zip(rows, starts, ends, strict=True):
        for column in range(start, end):
            want[row, column] = next(taken)
    got = table.clone()
    slots.assign_req_to_token_pool(arguments[0], got, *arguments[1:], new, WIDTH)
    assert torch.equal(got, want)

    out = torch.full((total + 2,), -5, dtype=torch.int64)  # longer than needed: the rest stays
    slots.assign_extend_cache_locs(arguments[0], table, *arguments[1:], out, WIDTH)
    cells = [int(table[r, c]) for r, s, e in zip(rows, starts, ends, strict=True) for c in range(s, e)]
    assert out.tolist() == cells + [-5, -5]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("topk,steps", [(1, 5), (4, 3)])
def test_draft_slots_and_the_branches_page_table(seed, topk, steps):
    rows, lens, _, table = requests(seed)
    before = table.clone()
    out = torch.empty(len(rows) * topk * steps, dtype=torch.int64)
    slots.assign_draft_cache_locs_contiguous(
        torch.tensor(rows), table, torch.tensor(lens), out, WIDTH, topk, steps
    )
    want = [int(table[r, n + i]) for r, n in zip(rows, lens, strict=True) for i in range(topk * steps)]
    assert out.tolist() == want

    where = torch.tensor(rows), torch.tensor(lens)
    pages = slots.build_draft_decode_metadata(table, *where, topk, steps, WIDTH)
    assert pages.shape == (len(rows) * topk, WIDTH)
    for i, (row, n) in enumerate(zip(rows, lens, strict=True)):
        for branch in range(topk):
            own = [int(table[row, n + branch * steps + step]) for step in range(steps)]
            assert pages[i * topk + branch, : n + steps].tolist() == table[row, :n].tolist() + own
    assert torch.equal(table, before)


def test_bonus_is_the_last_committed_token():
    tokens = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]], dtype=torch.int32)
    bonus = torch.zeros(3, dtype=torch.int32)
    slots.fill_bonus_tokens(tokens, torch.tensor([1, 3, 2], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [11, 23, 32]


def test_slots_of_accepted_nodes_are_packed():
    index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]], dtype=torch.int32)
    cache, out = torch.arange(100, 109), torch.zeros(9, dtype=torch.int64)
    slots.fill_accept_out_cache_loc(index, cache, out)
    assert out.tolist() == [100, 102, 103, 106, 107, 108, 0, 0, 0]


def test_rows_move_in_every_layer_at_once():
    """Overlapping moves (1 -> 0, 2 -> 1) read everything before they write."""
    layers = [torch.arange(12.0).view(4, 3), torch.arange(8, dtype=torch.bfloat16).view(4, 2)]
    want = [layer.clone() for layer in layers]
    for layer in want:
        layer[0], layer[1] = layer[1].clone(), layer[2].clone()
    slots.copy_all_layer_kv_cache(
        torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        torch.tensor([3 * 4, 2 * 2]),
        torch.tensor([0, 1]),
        torch.tensor([1, 2]),
    )
    assert all(torch.equal(a, b) for a, b in zip(layers, want, strict=True))
    slots.copy_all_layer_kv_cache(
        torch.tensor([0], dtype=torch.uint64), torch.tensor([4]), *[torch.empty(0)] * 2
    )


def test_the_stand_in_offers_what_sglang_imports():
    module = operators.sgl_kernel()
    assert module.fill_bonus_tokens_cpu is slots.fill_bonus_tokens
    assert len([name for name in vars(module) if name.endswith("_cpu")]) == 10
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")  # else SGLang would take its AMX path
    out = torch.empty(1, 2, 4)
    torch.ops.sgl_kernel.decode_attention_cpu(
        torch.ones(1, 2, 4), torch.ones(3, 1, 4), torch.full((3, 1, 4), 2.5), 1.0, 1.0, out, None, None,
        torch.tensor([0]), torch.empty(0), torch.tensor([[1, 2]]), torch.tensor([0]), torch.tensor([2]),
        1.0, 0.0, False, 0, None, None,
    )  # fmt: skip
    assert out.flatten().tolist() == [2.5] * 8
    operators.sgl_kernel()  # a second call must not register the operators again


def test_the_platform_sleeps_unless_asked_for(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert platform.activate() is None
