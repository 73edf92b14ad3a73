"""The bench's plugin without a server: faults switch on and off, and leave nothing behind."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from faultbench.live import PLUGIN
from torch import nn

sys.path.insert(0, str(PLUGIN))

import faultbench_plugin as plugin  # noqa: E402
from faultbench_plugin import feed, tensors, wiring  # noqa: E402

H, K = 8, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_norm = nn.RMSNorm(H)
        self.mlp = nn.Linear(H, H)


class Drafter(nn.Module):
    """The shape of what the faults take hold of; forward says what it was fed."""

    def __init__(self):
        super().__init__()
        self.fc, self.input_norm, self.norm = nn.Linear(K * H, H), nn.RMSNorm(K * H), nn.RMSNorm(H)
        self.layers = nn.ModuleList([Layer()])
        self.num_aux_hidden_states, self.hidden_size_in, self.norm_output = K, H, True

    def forward(self, ids, positions, batch):
        return ids, positions, batch.spec_info.hidden_states


@pytest.fixture
def site():
    drafter = nn.Module()
    drafter.model, drafter.hot_token_id = Drafter(), torch.arange(5)
    target = nn.Module()
    target.model = SimpleNamespace(layers_to_capture=[2, 4, 5], norm=nn.RMSNorm(H))
    runner = SimpleNamespace(model=drafter, token_to_kv_pool=None)
    worker = SimpleNamespace(
        draft_runner=runner,
        hot_token_id=torch.tensor([3, 5, 9]),
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
    )
    return plugin.Site(worker)


def batch(mode: str, lengths: list[int], rows: torch.Tensor, accepted=None):
    """A ForwardBatch as far as the faults look at it."""
    names = {"decode": "is_decode", "verify": "is_target_verify", "extend": "is_draft_extend_v2"}
    modes = {name: (lambda wanted=wanted: wanted == mode) for wanted, name in names.items()}
    info = SimpleNamespace(hidden_states=rows)
    if accepted is not None:
        info.num_accept_tokens = torch.tensor(accepted)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(**modes),
        spec_info=info,
        extend_seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.arange(len(lengths)),
    )


def run(site, mode="prefill", ids=None, lengths=(4,), accepted=None, start=0):
    n = sum(lengths)
    rows = torch.randn(n, K * H, generator=torch.Generator().manual_seed(n + start))
    ids = torch.arange(start, start + n) if ids is None else ids
    found = batch(mode, list(lengths), rows, accepted)
    return (*site.drafter.model(ids, torch.arange(start, start + n), found), rows)


def test_a_method_of_the_class_and_a_submodule_come_back(site):
    layer, norm = site.layer, site.layer.hidden_norm
    with plugin.wrapped(norm, lambda original, rows: original(rows) + 1):
        assert torch.equal(norm(torch.zeros(H)), torch.ones(H))
    assert "forward" not in vars(norm) and torch.equal(norm(torch.zeros(H)), torch.zeros(H))
    with plugin.assigned(layer, "mlp", nn.Identity()):
        assert isinstance(layer.mlp, nn.Identity)
    assert isinstance(layer.mlp, nn.Linear) and "mlp" in dict(layer.named_children())


def test_the_switch_undoes_one_order_before_it_obeys_the_next(site, tmp_path):
    switch = plugin.Switch(site, 0, tmp_path)
    inner = site.target.model

    def order(number, *faults):
        switch.obey({"id": number, "faults": faults})
        return json.loads((tmp_path / "rank-0.json").read_text())

    assert order(1, ("depths", {"by": 1})) == {"id": 1, "error": None}
    assert inner.layers_to_capture == [3, 5, 6]
    assert order(2, ("feedback", {}))["error"] is None
    assert inner.layers_to_capture == [2, 4, 5] and not site.drafter.model.norm_output
    assert "KeyError" in order(3, ("no such fault", {}))["error"]
    assert order(4)["error"] is None and site.drafter.model.norm_output


def test_tensors_hold_their_numbers_again(site):
    before = {n: t.clone() for n, t in site.drafter.named_parameters()}
    with tensors.norms_at_ones(site, only=("input_norm", "layers.0.hidden_norm")):
        pass
    with tensors.initial(site, name="model.fc.weight"):
        assert not torch.equal(site.drafter.model.fc.weight, before["model.fc.weight"])
    assert all(torch.equal(t, before[n]) for n, t in site.drafter.named_parameters())


def test_late_changes_of_features_are_seen_by_the_drafter_alone(site):
    with feed.order(site, late=True):
        *_, fed, rows = run(site)
    low, mid, high = rows.chunk(K, dim=-1)
    assert torch.equal(fed, torch.cat([high, mid, low], -1))
    *_, fed, rows = run(site)
    assert torch.equal(fed, rows)


def test_stale_rows_are_those_of_the_verify_before(site):
    with feed.stale(site, late=True):
        *_, prompt, rows = run(site, "prefill")
        assert torch.equal(prompt, rows)
        *_, first, rows1 = run(site, "extend", start=4)
        *_, second, rows2 = run(site, "extend", start=8)
        *_, third, _ = run(site, "extend", start=12)
    assert torch.equal(first, rows1) and torch.equal(second, rows1) and torch.equal(third, rows2)


def test_token_shift_pairs_every_row_with_the_token_before(site):
    text = torch.tensor([7, 8, 9, 10, 11, 12, 13, 14])  # fed from position 0 on: text[1:]
    with wiring.token_shift(site):
        ids, *_ = run(site, "prefill", text[1:4], (3,))
        assert ids.tolist() == [8, 8, 9]  # text[0] is not known any more
        ids, *_ = run(site, "extend", text[4:8], (4,), accepted=[2], start=3)
        assert ids[:2].tolist() == text[3:5].tolist()
        ids, *_ = run(site, "extend", text[6:8], (2,), accepted=[2], start=5)
        assert ids.tolist() == text[5:7].tolist()
        ids, *_ = run(site, "decode", text[:1], (1,), start=7)
        assert ids.tolist() == [7], "draft steps are not shifted"


def test_the_map_is_dropped_for_the_length_of_a_draft(site):
    seen = []
    site.worker.draft_forward = lambda: seen.append(site.worker.hot_token_id)
    with wiring.no_map_unseen(site):
        assert site.worker.hot_token_id is not None
        site.worker.draft_forward()
    assert seen == [None]
