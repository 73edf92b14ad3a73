"""Drafters with multi-head latent attention against transformers' DeepseekV3Attention, on random tensors."""

from __future__ import annotations

import json

import pytest
import torch
from random_drafters import LATENT, VOCAB, H, drafter

from eaglelab.checkpoint import open_checkpoint
from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.latent import scale
from eaglelab.launch import Launch, Target
from eaglelab.live import checksum, expected_parameters
from eaglelab.loader import loading
from eaglelab.served import refusals, served
from eaglelab.trained import trained
from eaglelab.yarn import as_sglang

ROWS, STEPS = 19, 4
ORIGINAL = {"original_max_position_embeddings": 32}
EXACT = {
    "rms_norm_eps": 1e-6
}  # transformers keeps 1e-6 in the norms of the latents, whatever the config says
TARGET = Target("DeepseekV3ForCausalLM", H, 36, VOCAB, "float32")


def scaled(kind, **more):
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0, **more}}


CASES = {
    "as Kimi's": {},
    "default rope": {"rope_scaling": None},
    "theta": {"rope_scaling": None, "rope_theta": 7.0},
    "yarn, mscale": scaled("yarn", mscale=0.7, mscale_all_dim=0.4, **ORIGINAL),
    "yarn, no mscale": scaled("yarn", **ORIGINAL),
    "linear": scaled("linear"),
    "llama3": scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL),
    "half-split": {"rope_interleave": False},
    "norm_output": {"norm_output": True},
    "norms per chunk": {"fc_norm": True},
    "whole vocabulary": {"draft_vocab_size": VOCAB},
}


class Reference:
    """The drafter put together from transformers' modules: attention, MLP and norms of DeepSeek-V3."""

    def __init__(self, folder):
        from safetensors.torch import load_file
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        config = json.loads((folder / "config.json").read_text())
        self.config = DeepseekV3Config(**{k: v for k, v in config.items() if k != "architectures"})
        self.config._attn_implementation = "eager"
        self.tensors, self.given = load_file(folder / "model.safetensors"), config
        attention = deepseek.DeepseekV3Attention(self.config, 0)
        attention.q_a_proj = torch.nn.Linear(2 * H, self.config.q_lora_rank, bias=False)
        width = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        attention.kv_a_proj_with_mqa = torch.nn.Linear(2 * H, width, bias=False)
        self.attention = self._filled(attention, "layers.0.self_attn.")
        self.mlp = self._filled(deepseek.DeepseekV3MLP(self.config), "layers.0.mlp.")
        self.rotary, self.norms = deepseek.DeepseekV3RotaryEmbedding(self.config), deepseek.DeepseekV3RMSNorm

    def _filled(self, module, prefix):
        names = [n for n in self.tensors if n.startswith(prefix)]
        module.load_state_dict({n.removeprefix(prefix): self.tensors[n] for n in names}, strict=True)
        return module.eval()

    def norm(self, name, x):
        module = self.norms(x.shape[-1], eps=self.config.rms_norm_eps)
        module.weight.data = self.tensors[name + ".weight"]
        return module(x)

    def project(self, features):
        if self.given.get("fc_norm"):
            chunks = features.chunk(3, dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{i}", c) for i, c in enumerate(chunks)], -1)
        return features @ self.tensors["fc.weight"].T

    def layer(self, tokens, hidden):
        """All rows at once, causally: tokens [n], hidden [n, H] -> (normed, feedback)."""
        n = len(tokens)
        embed = self.norm("layers.0.input_layernorm", self.tensors["embed_tokens.weight"][tokens])
        x = torch.cat([embed, self.norm("layers.0.hidden_norm", hidden)], -1)
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        table = self.rotary(x, torch.arange(n)[None])
        out = hidden + self.attention(x[None], table, mask)[0][0]
        out = out + self.mlp(self.norm("layers.0.post_attention_layernorm", out))
        normed = self.norm("norm", out)
        return normed, normed if self.given.get("norm_output") else out

    @torch.no_grad()
    def drafts(self, tokens, features, steps):
        """Draft-extend over all rows, then draft steps, each by a forward over everything so far."""
        tokens, hidden = tokens[1:], self.project(features)
        normed, feedback = self.layer(tokens, hidden)
        states, logits, drafted = feedback, [], []
        for _ in range(steps):
            logits.append(normed[-1] @ self.tensors["lm_head.weight"].T)
            choice = int(logits[-1].argmax())
            drafted.append(choice + int(self.tensors["d2t"][choice]) if "d2t" in self.tensors else choice)
            tokens, hidden = (
                torch.cat([tokens, torch.tensor(drafted[-1:])]),
                torch.cat([hidden, feedback[-1:]]),
            )
            normed, feedback = self.layer(tokens, hidden)
        return states, torch.stack(logits), drafted


def written(folder, config, add=()):
    extra = ("embed_tokens.", *add, *(("fc_norm.",) if config.get("fc_norm") else ()))
    return drafter(folder, LATENT, config={**EXACT, **config}, add=extra)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_latent_attention_is_transformers_own(tmp_path, config):
    folder = written(tmp_path / "d", config)
    torch.manual_seed(2)
    tokens, features = torch.randint(VOCAB, (ROWS + 1,)), torch.randn(ROWS, 3 * H)
    states, logits, drafted = Reference(folder).drafts(tokens, features, STEPS)
    checkpoint = open_checkpoint(folder)
    _, wiring = trained(checkpoint)
    text = Drafting.over(Drafter(checkpoint, wiring), tokens, features)
    torch.testing.assert_close(text.feedback, states, atol=1e-4, rtol=1e-4)
    kept: list[torch.Tensor] = []
    chain = text.chain([ROWS], STEPS, tap=lambda stage, x: kept.append(x[0]) if stage == "logits" else None)
    torch.testing.assert_close(torch.stack(kept), logits, atol=1e-4, rtol=1e-4)
    assert chain.tokens[0].tolist() == drafted


def test_trees_are_drafted_from_latent_attention_too(tmp_path):
    checkpoint = open_checkpoint(written(tmp_path / "d", {}))
    torch.manual_seed(3)
    tokens, features = torch.randint(VOCAB, (ROWS + 1,)), torch.randn(ROWS, 3 * H)
    text = Drafting.over(Drafter(checkpoint, trained(checkpoint)[1]), tokens, features)
    line = text.tree([5, ROWS], steps=STEPS, topk=1, nodes=STEPS + 1)
    assert line.tokens.tolist() == text.chain([5, ROWS], STEPS).tokens.tolist()
    wide = text.tree([5, ROWS], steps=STEPS, topk=3, nodes=12)
    for row, start in enumerate([5, ROWS]):
        assert wide.tokens[row].tolist() == text.tree([start], STEPS, 3, 12).tokens[0].tolist()


def test_training_and_serving_agree_on_kimis_rope_but_not_on_every_scaling(tmp_path):
    launch = Launch(target=TARGET, dtype="float32")
    for number, (kind, same) in enumerate({"yarn": True, "linear": False, "llama3": False}.items()):
        config = {} if kind == "yarn" else scaled(kind, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL)
        checkpoint = open_checkpoint(written(tmp_path / str(number), config))
        assert (trained(checkpoint)[1].rope == served(checkpoint, launch)[1].rope) is same


def test_yarn_in_sglangs_words_changes_only_what_is_read_otherwise():
    plain = {"rope_type": "yarn", "factor": 8.0, **ORIGINAL}
    assert as_sglang(plain, False, 256) == plain
    assert as_sglang(plain | {"attn_factor": 1.0}, False, 256) == plain
    dropped = as_sglang(plain | {"attention_factor": 3.0}, False, 256)
    assert dropped["attention_factor"] == pytest.approx(
        0.1 * 2.0794415 + 1
    )  # 0.1 ln 8 + 1: SGLang knows none
    assert as_sglang({"rope_type": "linear", "factor": 2.0}, False, 256) == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert as_sglang({"rope_type": "linear", "factor": 2.0}, True, 256) == {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256
    }  # fmt: skip


def test_the_scale_of_the_scores(tmp_path):
    _, wiring = trained(open_checkpoint(written(tmp_path / "d", {})))
    assert scale(wiring) == pytest.approx(24**-0.5 * (0.1 * 2.0794415 + 1) ** 2)


def test_what_the_loader_of_sglangs_mla_class_leaves(tmp_path):
    """Half of the fused projection is forgotten, the norm over the whole feed has no place."""
    folder = drafter(
        tmp_path / "d", LATENT, add=("input_norm.",), nested={"norm_before_fc": True},
        drop=("layers.0.self_attn.q_a_proj.weight",),
    )  # fmt: skip
    takes = loading(open_checkpoint(folder), Launch(target=TARGET))
    assert sorted(takes.dropped) == ["input_norm.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert takes.initial == ("model.midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight",)
    _, wiring = served(open_checkpoint(folder), Launch(target=TARGET, draft_window=4))
    assert (wiring.norm_before_fc, wiring.window) == ("none", None)
    left = ("layers.0.self_attn.q_a_proj.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight")
    assert wiring.unloaded == left
    lacking = Drafter(open_checkpoint(folder), wiring, _Target())
    assert lacking.guessed == left
    assert lacking.weights[left[1]].shape == (40, 2 * H)


def test_where_the_mla_class_stops(tmp_path):
    two = open_checkpoint(drafter(tmp_path / "d", LATENT, config={"num_hidden_layers": 2}))
    assert "one layer" in refusals(two, Launch(target=TARGET))[0]
    cpu = Launch.parse(["--speculative-algorithm", "EAGLE3", "--device", "cpu"], TARGET)
    assert any("no CPU" in text for text in refusals(two, cpu))


def test_each_rank_of_a_server_holds_its_part(tmp_path):
    """By heads where projections unfold, whole where they squeeze (the latents are every rank's)."""
    checkpoint = open_checkpoint(drafter(tmp_path / "d", LATENT))
    launch = Launch(target=TARGET, dtype="float32", tp_size=2)
    ranks = [expected_parameters(checkpoint, None, launch, rank) for rank in (0, 1)]
    at = "model.midlayer.self_attn."

    def parts(name):
        return [r[name].checksum for r in ranks]

    q, out = (checkpoint.load(f"layers.0.self_attn.{n}.weight") for n in ("q_b_proj", "o_proj"))
    assert parts(at + "q_b_proj.weight") == [checksum(q[:48]), checksum(q[48:])]  # 2 heads, 24 wide
    assert parts(at + "o_proj.weight") == [checksum(out[:, :40]), checksum(out[:, 40:])]  # 2 heads of v, 20
    fc = checkpoint.load("fc.weight")
    assert parts("model.fc.weight") == [checksum(fc[:32]), checksum(fc[32:])]
    squeezing = ("q_a_proj", "kv_a_proj_with_mqa")
    fused = torch.cat([checkpoint.load(f"layers.0.self_attn.{n}.weight") for n in squeezing])
    assert parts(at + "fused_qkv_a_proj_with_mqa.weight") == [checksum(fused)] * 2


class _Target:
    tensors = {"embed_tokens.weight": None}
    path = "memory"

    def load(self, name, dtype=None):
        return torch.zeros(VOCAB, H)
