"""The served wiring against SGLang's own drafter classes: draft-extends and draft steps on random features.

One process of the server's environment (`forwards.py`) runs every case; no server is started. Compared is all
that leaves the model: logits and fed-back states of each row and step, and the draft tokens.
"""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from random_drafters import CONFIG, LATENT, VOCAB, H, drafter, target
from safetensors.torch import load_file, save_file

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.launch import Launch
from eaglelab.live import expected_parameters
from eaglelab.loader import loading
from eaglelab.served import refusals, served

pytestmark = pytest.mark.server

LENGTHS, VERIFIED, STEPS, WIDE = [7, 15, 30], 4, 5, 96


@dataclass
class Case:
    base: dict
    config: dict = field(default_factory=dict)
    nested: dict = field(default_factory=dict)
    add: tuple = ()
    drop: tuple = ()
    ids: tuple = (2, 18, 33)
    algorithm: str = "EAGLE3"
    window: int | None = None


def llama(**config):
    given = {k: config.pop(k) for k in list(config) if k in Case.__dataclass_fields__ and k != "base"}
    return Case(CONFIG, config=config, **given)


def mla(**config):
    given = {k: config.pop(k) for k in list(config) if k in Case.__dataclass_fields__ and k != "base"}
    return Case(LATENT, config=config, **given)


def scaled(kind, factor=4.0, **more):
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **more}, "rope_theta": 500.0}


ORIGINAL = {"original_max_position_embeddings": 32}
BAND = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
CASES = {
    "plain": llama(),
    "norm before fc": llama(nested={"norm_before_fc": True}, add=("input_norm.",)),
    "norms per chunk": llama(fc_norm=True, add=("fc_norm.",)),
    "both norms": llama(fc_norm=True, nested={"norm_before_fc": True}, add=("fc_norm.", "input_norm.")),
    "norm_output": llama(norm_output=True),
    "norm_before_residual is ignored": llama(norm_before_residual=True),
    "1 chunk, bypassed": llama(ids=(18,)),
    "1 chunk of a wider target": llama(ids=(18,), target_hidden_size=WIDE, add=("embed_tokens.",)),
    "2 chunks": llama(ids=(2, 18)),
    "4 chunks": llama(ids=(2, 9, 18, 33), fc_norm=True, add=("fc_norm.",)),
    "5 chunks": llama(ids=(2, 9, 18, 30, 33), nested={"norm_before_fc": True}, add=("input_norm.",)),
    "wider target": llama(
        target_hidden_size=WIDE, fc_norm=True, add=("embed_tokens.", "fc_norm.")
    ),
    "2 layers": llama(num_hidden_layers=2, norm_output=True),
    "3 layers": llama(num_hidden_layers=3),
    "later hidden_norm left out": llama(num_hidden_layers=2, drop=("layers.1.hidden_norm.weight",)),
    "biases of q, k, v are dropped": llama(attention_bias=True, add=("_proj.bias",)),
    "bias of fc": llama(bias=True, add=("fc.bias", "o_proj.bias")),
    "q and k norms are dropped": llama(add=("q_norm.", "k_norm.")),
    "one kv head": llama(num_key_value_heads=1),
    "whole vocabulary, the target's head": llama(draft_vocab_size=None, drop=("lm_head.weight",)),
    "whole vocabulary, own head": llama(draft_vocab_size=VOCAB),
    "tied head": llama(tie_word_embeddings=True, draft_vocab_size=VOCAB, drop=("lm_head.weight",)),
    "no map": llama(drop=("d2t",)),
    "under EAGLE": llama(algorithm="EAGLE"),
    "theta": llama(rope_theta=7.0),
    "rope linear": llama(**scaled("linear")),
    "rope linear, an integer": llama(**scaled("linear", 4)),
    "rope llama3": llama(**scaled("llama3", **BAND)),
    "rope yarn": llama(**scaled("yarn", **ORIGINAL)),
    "rope yarn, mscale": llama(**scaled("yarn", mscale=0.7, mscale_all_dim=0.4, **ORIGINAL)),
    "rope yarn, mscale of 0": llama(**scaled("yarn", mscale=0.7, mscale_all_dim=0.0, **ORIGINAL)),
    "rope yarn, attention_factor is ignored": llama(**scaled("yarn", attention_factor=1.5, **ORIGINAL)),
    "rope yarn, attn_factor": llama(**scaled("yarn", attn_factor=1.5, **ORIGINAL)),
    "rope yarn, not truncated": llama(**scaled("yarn", truncate=False, beta_fast=4, **ORIGINAL)),
    "rope partial": llama(partial_rotary_factor=0.5),
    "rope interleaved": llama(rope_is_neox_style=False),
    "rope partial and interleaved, yarn": llama(
        partial_rotary_factor=0.5, rope_is_neox_style=False, **scaled("yarn", **ORIGINAL)
    ),
    "rope as convert writes it": llama(
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "attn_factor": 1.3172,
            "rope_theta": 500.0, **ORIGINAL,
        },
        partial_rotary_factor=0.5, **scaled("yarn", attention_factor=1.5, attn_factor=1.3172, **ORIGINAL),
    ),
    "window": llama(window=6),
    "window, 2 layers": llama(window=3, num_hidden_layers=2),
    "everything": llama(
        num_hidden_layers=2, norm_output=True, fc_norm=True, target_hidden_size=WIDE, window=9, bias=True,
        add=("fc_norm.", "embed_tokens.", "fc.bias", "o_proj.bias"), ids=(2, 9, 18, 30, 33),
        rope_is_neox_style=False, **scaled("llama3", **BAND),
    ),
    "MLA": mla(),
    "MLA, norm_output and norms per chunk": mla(norm_output=True, fc_norm=True, add=("fc_norm.",)),
    "MLA, norm before fc is ignored": mla(nested={"norm_before_fc": True}, add=("input_norm.",)),
    "MLA, 5 chunks": mla(ids=(2, 9, 18, 30, 33)),
    "MLA, signed as Kimi": mla(model_type="kimi_k2"),
    "MLA, wider target": mla(target_hidden_size=WIDE, add=("embed_tokens.",)),
    "MLA, the target's head": mla(draft_vocab_size=None, drop=("lm_head.weight",)),
    "MLA, own head over all": mla(draft_vocab_size=VOCAB),
    "MLA, tied": mla(tie_word_embeddings=True, draft_vocab_size=VOCAB, drop=("lm_head.weight",)),
    "MLA, mscale": mla(**scaled("yarn", mscale=0.7, mscale_all_dim=0.4, **ORIGINAL)),
    "MLA, no mscale": mla(**scaled("yarn", **ORIGINAL)),
    "MLA, llama3 is taken for yarn": mla(**scaled("llama3", **BAND)),
    "MLA, linear is taken for yarn": mla(**scaled("linear")),
    "MLA, bias of fc": mla(bias=True, add=("fc.bias",)),
    "MLA, the window is ignored": mla(window=4),
    "MLA under EAGLE": mla(algorithm="EAGLE"),
}  # fmt: skip
LACKING = {  # these are compared by what was loaded alone
    "MLA, half of a fused projection": mla(drop=("layers.0.self_attn.q_a_proj.weight",)),
    "MLA, no gate": mla(drop=("layers.0.mlp.gate_proj.weight",)),
    "MLA, no norm of the latent": mla(drop=("layers.0.self_attn.kv_a_layernorm.weight",)),
    "no k": llama(drop=("layers.0.self_attn.k_proj.weight",)),
    "no head": llama(drop=("lm_head.weight",)),
}
REFUSED = {
    "unknown rope": llama(**scaled("ntk")),
    "MLA of 2 layers": mla(num_hidden_layers=2),
    "tied under EAGLE": llama(tie_word_embeddings=True, draft_vocab_size=VOCAB, algorithm="EAGLE"),
    "tied without a size": llama(tie_word_embeddings=True, draft_vocab_size=None),
    "MLA tied under EAGLE": mla(tie_word_embeddings=True, draft_vocab_size=VOCAB, algorithm="EAGLE"),
}
ALL = CASES | LACKING | REFUSED


@dataclass
class Runs:
    folders: dict[str, Path]
    target: Path
    wide: Path
    given: dict[str, dict[str, torch.Tensor]]
    answers: Path
    errors: dict[str, str]
    loaded: dict[str, dict]


def launch_of(name: str, folder: Path) -> Launch:
    case, target = ALL[name], open_target(folder).facts
    return Launch(algorithm=case.algorithm, target=target, dtype="float32", draft_window=case.window)


@pytest.fixture(scope="module")
def runs(server_python, tmp_path_factory) -> Runs:
    """Every case through SGLang's own classes, in one process."""
    from eaglelab.serve import CPU_ENVIRONMENT

    root = tmp_path_factory.mktemp("class forward")
    (root / "answers").mkdir()
    narrow, wide = target(root / "target"), target(root / "wide", WIDE)
    folders, given, job = {}, {}, {}
    for number, (name, case) in enumerate(ALL.items()):
        folder = folders[name] = drafter(
            root / f"drafter {number}", case.base, ids=case.ids, config=case.config, nested=case.nested,
            add=case.add, drop=case.drop, seed=number,
        )  # fmt: skip
        own = wide if "target_hidden_size" in case.config else narrow
        width = 3 * H if name in REFUSED else served(open_checkpoint(folder), launch_of(name, own))[0].width
        ids, features = torch.randint(VOCAB, (sum(LENGTHS),)), torch.randn(sum(LENGTHS), width)
        given[name] = {"ids": ids, "features": features}
        save_file(given[name], root / f"{number}.safetensors")
        job[name] = {
            "folder": str(folder), "algorithm": case.algorithm, "window": case.window, "lengths": LENGTHS,
            "verified": VERIFIED, "steps": STEPS, "given": str(root / f"{number}.safetensors"),
            "dropped": loading(open_checkpoint(folder), launch_of(name, own)).dropped,
        }  # fmt: skip
    everything = {"target": str(narrow), "drafter": str(folders["plain"]), "cases": job}
    (root / "job.json").write_text(json.dumps(everything))
    script = Path(__file__).with_name("forwards.py")
    run = subprocess.run(
        [server_python, script, root / "job.json", root / "answers"],
        env=os.environ | CPU_ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads((root / "answers/answer.json").read_text())
    return Runs(folders, narrow, wide, given, root / "answers", said["errors"], said["loaded"])


@pytest.mark.parametrize("name", CASES)
def test_served_wiring_is_sglangs_own_class(runs, name):
    assert name not in runs.errors, runs.errors[name]
    theirs = load_file(runs.answers / f"{name}.safetensors")
    model, texts = ours(runs, name)
    last = torch.tensor(VERIFIED)
    for kind, cut in (("prefill", slice(None, -VERIFIED)), ("verify", slice(-VERIFIED, None))):
        states = torch.cat([text.feedback[cut] for text in texts])
        torch.testing.assert_close(states, theirs[f"{kind}.states"], atol=1e-4, rtol=1e-4)
    states = torch.cat([text.normed[-last:] for text in texts])
    torch.testing.assert_close(model.logits(states), theirs["verify.logits"], atol=1e-4, rtol=1e-4)
    for i, (text, n) in enumerate(zip(texts, LENGTHS, strict=True)):
        logits, states = [], []
        kept = {"logits": logits, "feedback": states}
        chain = text.chain([n], STEPS, tap=lambda stage, x, kept=kept: kept.get(stage, []).append(x[0]))
        for step in range(STEPS):
            expected = theirs[f"step{step}.logits"][i]
            torch.testing.assert_close(logits[step], expected, atol=1e-4, rtol=1e-4)
            assert int(chain.tokens[0, step]) == int(theirs[f"step{step}.tokens"][i]), step
        for step in range(STEPS - 1):
            torch.testing.assert_close(states[step], theirs[f"step{step}.states"][i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES | LACKING)
def test_loading_leaves_in_every_parameter_what_sglang_does(runs, name):
    assert name not in runs.errors, runs.errors[name]
    theirs, opened = runs.loaded[name], open_checkpoint(runs.folders[name])
    target = open_target(runs.wide if "target_hidden_size" in ALL[name].config else runs.target)
    takes = loading(opened, launch := launch_of(name, target.path))
    assert theirs["dropped have no effect"]
    assert set(takes.initial) == set(theirs["initial"]) - set(theirs["shared"])
    expected = expected_parameters(opened, target, launch)
    assert set(expected) - {"model.hot_token_id", "worker.hot_token_id"} == set(theirs["parameters"])
    for parameter, (checksum, shape) in theirs["parameters"].items():
        if expected[parameter].checksum is None:
            assert parameter in takes.initial
        else:
            assert (expected[parameter].checksum, list(expected[parameter].shape)) == (checksum, shape)


@pytest.mark.parametrize("name", REFUSED)
def test_where_sglang_stops_served_says_so(runs, name):
    assert name in runs.errors
    assert refusals(open_checkpoint(runs.folders[name]), launch_of(name, runs.target)), runs.errors[name]


def ours(runs: Runs, name: str) -> tuple[Drafter, list[Drafting]]:
    """The same drafter under the served wiring, after the rows of each text."""
    wide = "target_hidden_size" in CASES[name].config
    folder = runs.wide if wide else runs.target
    opened, given = open_checkpoint(runs.folders[name]), runs.given[name]
    _, wiring = served(opened, launch_of(name, folder))
    model = Drafter(opened, wiring, open_target(folder))
    assert model.guessed == ()
    pieces = zip(given["ids"].split(LENGTHS), given["features"].split(LENGTHS), strict=True)
    texts = []
    for ids, features in pieces:
        texts.append(Drafting(model))
        texts[-1].extend(ids, features)
    return model, texts
