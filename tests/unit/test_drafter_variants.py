"""Every variant of a drafter, from the trainer's own files: `trained` means what the trainer computed.

speculators' Eagle3DraftModel with random weights is saved by itself, opened here, and both are run on random
features. The served side is proven in tests/server/test_class_forward.py, against SGLang's own classes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer import ROWS, STEPS, VOCAB, trainer_model

from eaglelab.checkpoint import open_checkpoint
from eaglelab.convert import convert
from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.launch import Launch
from eaglelab.rope import frequencies
from eaglelab.served import served
from eaglelab.trained import trained


def scaled(kind: str, factor: float = 4.0, **more) -> dict:
    return {"rope_parameters": {"rope_theta": 700.0, "rope_type": kind, "factor": factor, **more}}


ORIGINAL = {"original_max_position_embeddings": 32}
BAND = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
SLIDING = {"sliding_window": 5, "use_sliding_window": True}
FLAGS = {
    "plain": {},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "1 chunk": {"chunks": 1},
    "2 chunks": {"chunks": 2, "fc_norm": True},
    "4 chunks": {"chunks": 4, "norm_before_residual": True, "norm_output": True},
    "5 chunks": {"chunks": 5, "norm_before_fc": True},
    "2 layers": {"layers": 2},
    "3 layers": {"layers": 3, "norm_output": True, "qk_norm": True, "bias": True},
    "q and k norms": {"qk_norm": True},
    "biases": {"bias": True},
    "whole vocabulary": {"draft_vocab": VOCAB},
    "theta": {"layer": {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}},
    "rope linear": {"layer": scaled("linear")},
    "rope llama3": {"layer": scaled("llama3", **BAND)},
    "rope yarn": {"layer": scaled("yarn", **ORIGINAL), "qk_norm": True},
    "rope yarn, mscale": {"layer": scaled("yarn", mscale=0.7, mscale_all_dim=0.4, **ORIGINAL)},
    "rope yarn, attention_factor": {"layer": scaled("yarn", attention_factor=1.5, **ORIGINAL)},
    "rope yarn, not truncated": {"layer": scaled("yarn", truncate=False, beta_fast=4.0, **ORIGINAL)},
    "one kv head": {"layer": {"num_key_value_heads": 1}},
    "wide heads": {"layer": {"head_dim": 24}},
    "eps": {"layer": {"rms_norm_eps": 0.01}},
}


@pytest.fixture
def opened(tmp_path):
    def save(model) -> Drafter:
        model.save_pretrained(tmp_path / "saved")
        checkpoint = open_checkpoint(tmp_path / "saved")
        return Drafter(checkpoint, trained(checkpoint)[1])

    return save


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_trained_is_what_the_trainer_computed(opened, flags):
    """Logits and fed-back states of every teacher-forced step, and the tokens drafted."""
    model = trainer_model(**flags)
    assert difference(model, opened(model), STEPS) < 1e-4


@pytest.mark.parametrize("kinds", [["sliding"], ["sliding"] * 2, ["full", "sliding"]], ids=str)
def test_sliding_window(opened, kinds):
    """Draft steps keep the window of the row that they start from in training; every engine moves it on."""
    types = {"layer_types": [f"{kind}_attention" for kind in kinds], **SLIDING}
    model = trainer_model(layers=len(kinds), qk_norm=True, layer=types)
    assert model.sliding_window == 5
    drafter = opened(model)
    assert difference(model, drafter, STEPS) < 1e-4
    drafter.wiring = replace(drafter.wiring, window_moves=True)
    assert difference(model, drafter, STEPS) > 1e-2


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_partial_rope_as_the_trainer_patches_it(opened, kind):
    from speculators.models.eagle3 import rotary_partial

    rotary_partial.install_partial_neox_rotary()
    try:
        more = ORIGINAL if kind == "yarn" else {}
        model = trainer_model(layer=scaled(kind, partial_rotary_factor=0.5, **more))
        assert difference(model, opened(model), STEPS) < 1e-4
    finally:
        rotary_partial.uninstall_partial_neox_rotary()


CONVERTED = {
    "attention_factor": scaled("yarn", attention_factor=1.5, **ORIGINAL),
    "an mscale that transformers leaves out": scaled("yarn", mscale=0.7, mscale_all_dim=0.0, **ORIGINAL),
    "mscale": scaled("yarn", mscale=0.7, mscale_all_dim=0.4, **ORIGINAL),
    "partial": scaled("yarn", partial_rotary_factor=0.5, **ORIGINAL),
    "partial, linear": scaled("linear", partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("layer", CONVERTED.values(), ids=CONVERTED)
def test_rope_comes_through_a_conversion_to_sglang(tmp_path, layer):
    """In SGLang's own words: an `attn_factor`, a `partial_rotary_factor` at the top."""
    trainer_model(layer=layer).save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "converted", "sglang")
    before = trained(open_checkpoint(tmp_path / "saved"))[1].rope
    _, wiring = served(open_checkpoint(tmp_path / "converted"), Launch(dtype="float32"))
    one, two = (frequencies(rope, 16, 128) for rope in (before, wiring.rope))
    assert torch.equal(one[0], two[0]) and one[1] == pytest.approx(two[1])
    assert wiring.rope == before


def difference(model, drafter: Drafter, steps: int) -> float:
    """The largest difference of a logit or a normed state over all rows and steps; tokens must be equal."""
    torch.manual_seed(1)
    tokens, features = torch.randint(VOCAB, (ROWS + 1,)), torch.randn(ROWS, model.fc.in_features)
    seen: list[tuple] = []
    model.lm_head.register_forward_hook(lambda _, given, out: seen.append((given[0][0], out[0])))
    with torch.no_grad():
        zeros = torch.zeros(1, ROWS, dtype=torch.long)
        drafts = model(features[None], tokens[None, 1:], zeros, ttt_steps=steps)
    text = Drafting.over(drafter, tokens, features)
    kept: dict[str, list] = {"logits": [], "norm": [text.normed]}
    forced = torch.stack([torch.cat([tokens[2 + j :], tokens.new_zeros(1 + j)]) for j in range(steps)], dim=1)
    chains = text.chain(
        torch.arange(1, ROWS + 1), steps, forced, tap=lambda stage, x: kept.get(stage, []).append(x)
    )
    assert len(seen) == len(kept["logits"]) == len(kept["norm"]) == steps
    worst = 0.0
    for step, (state, logits) in enumerate(seen):
        worst = max(worst, float((kept["norm"][step] - state).abs().max()))
        worst = max(worst, float((kept["logits"][step] - logits).abs().max()))
        own = drafts[step][0] + (model.d2t[drafts[step][0]] if model.use_draft_vocab else 0)
        assert worst > 1e-4 or chains.tokens[:, step].tolist() == own.tolist()
    return worst
