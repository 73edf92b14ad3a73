import json
import os

import pytest
import torch
from drafters import SGLANG, SPECULATORS, TARGET, edited
from safetensors.torch import load_file

from eaglelab import convert as module
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.convert import convert, plan, view
from eaglelab.diff import diff
from eaglelab.errors import BadInput
from eaglelab.launch import Launch
from eaglelab.served import served
from eaglelab.trained import trained


def same_tensors(folder, expected):
    ours, theirs = load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_to_sglang_is_bitwise_the_shipped_drafter(tmp_path):
    done = convert(SPECULATORS, tmp_path / "s", "sglang", TARGET)
    same_tensors(tmp_path / "s", SGLANG)
    ours, shipped = config_of(tmp_path / "s"), config_of(SGLANG)
    assert ours["eagle_config"] == shipped["eagle_config"]
    special = ("bos_token_id", "eos_token_id", "pad_token_id", "fc_norm", "eaglelab_dialect")
    assert ours["eaglelab_dialect"] == "sglang"
    assert {k: v for k, v in ours.items() if k not in special} == {
        k: v for k, v in shipped.items() if k not in special
    }
    assert done.ids == ((2, 4, 5), (1, 3, 4), (2, 4, 5))
    assert done.dropped == ("embed_tokens.weight",) and done.warnings == () and done.added == ()
    assert done.renamed["layers.0.mlp.up_proj.weight"] == "midlayer.mlp.up_proj.weight"
    assert os.listdir(tmp_path) == ["s"]


def test_back_to_speculators_is_bitwise_the_trained_drafter(tmp_path):
    done = convert(SGLANG, tmp_path / "s", "speculators", TARGET)
    same_tensors(tmp_path / "s", SPECULATORS)
    assert done.added == ("model.embed_tokens.weight",) and done.ids == ((1, 3, 4), (2, 4, 5), (2, 4, 5))
    ours, theirs = config_of(tmp_path / "s"), config_of(SPECULATORS)
    for key in (
        "architectures",
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "norm_before_fc",
        "norm_output",
    ):
        assert ours[key] == theirs[key]
    inner = theirs["transformer_layer_config"]
    for key in (
        "hidden_size",
        "head_dim",
        "rope_parameters",
        "rms_norm_eps",
        "num_hidden_layers",
        "model_type",
    ):
        assert ours["transformer_layer_config"][key] == inner[key]
    here, there = (trained(open_checkpoint(f)) for f in (tmp_path / "s", SPECULATORS))
    assert here == there


def test_back_conversion_loads_in_the_real_class(tmp_path):
    eagle3 = pytest.importorskip("speculators.models.eagle3")
    convert(SGLANG, tmp_path / "s", "speculators", TARGET)
    config = {"speculators_config": {"verifier": {"name_or_path": str(TARGET)}}}
    original = edited(tmp_path / "o", SPECULATORS, config=config)
    model, shipped = (eagle3.Eagle3DraftModel.from_pretrained(f) for f in (tmp_path / "s", original))
    assert model.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5] and model.input_norm is not None
    ours, theirs = model.state_dict(), shipped.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]) and torch.isfinite(ours[name].float()).all(), name


def test_a_view_serves_as_the_written_conversion_does(tmp_path):
    launch = Launch(target=open_target(TARGET).facts)
    seen = view(open_checkpoint(SPECULATORS), "sglang", open_target(TARGET))
    convert(SPECULATORS, tmp_path / "s", "sglang", TARGET)
    assert served(seen, launch) == served(open_checkpoint(tmp_path / "s"), launch)
    assert torch.equal(seen.load("fc.weight"), open_checkpoint(SGLANG).load("fc.weight"))
    shipped = open_checkpoint(SGLANG)
    assert view(shipped, "sglang") is shipped


@pytest.mark.parametrize(
    ("architecture", "ids"),
    [("LlamaForCausalLM", [1, 3, 4]), ("DeepseekV3ForCausalLM", [2, 4, 5]), ("GptOssForCausalLM", [1, 3, 4])],
)
def test_ids_follow_the_verifier_named_in_the_config(tmp_path, architecture, ids):
    """deepseek_v2 adds nothing to ids whose first is not 1: [1, 3, 4] would do too, and is tried first."""
    config = {"speculators_config": {"verifier": {"architectures": [architecture]}}}
    folder = edited(tmp_path / "d", SPECULATORS, config=config)
    found = plan(open_checkpoint(folder), "sglang").config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert found == ([1, 3, 4] if architecture == "DeepseekV3ForCausalLM" else ids)
    folder = edited(
        tmp_path / "e", SPECULATORS, config=config | {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}
    )
    found = plan(open_checkpoint(folder), "sglang").config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert found == ([3, 4, 5] if architecture == "DeepseekV3ForCausalLM" else [2, 3, 4])


def test_a_target_that_is_not_known_is_said(tmp_path):
    config = {"speculators_config": {"verifier": {"architectures": []}}}
    folder = edited(tmp_path / "d", SPECULATORS, config=config)
    assert (
        "layer ids by the rule of most architectures" in plan(open_checkpoint(folder), "sglang").warnings[0]
    )


LISTED = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 1, 3]}, "eaglelab_dialect": "specforge"}


@pytest.mark.parametrize("to", ["sglang", "vllm", "speculators"])
def test_unsorted_depths_move_the_columns_of_fc(tmp_path, to):
    """SpecForge concatenates in the order of its ids; in every other form rows ascend."""
    folder = edited(tmp_path / "d", SGLANG, config=LISTED)
    done = convert(folder, tmp_path / "s", to, TARGET)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "s" / "model.safetensors")
    a, b, c = before["fc.weight"].split(128, dim=1)
    assert torch.equal(after["fc.weight"], torch.cat([b, c, a], dim=1))
    a, b, c = before["input_norm.weight"].split(128)
    assert torch.equal(after["input_norm.weight"], torch.cat([b, c, a]))
    assert done.ids[2] == (2, 4, 5) and "reordered from [5, 2, 4]" in done.warnings[0]
    rows = torch.randn(7, 384, dtype=torch.float32)  # the same function of the same three hidden states
    low, mid, high = rows.split(128, dim=1)
    served_rows, trained_rows = torch.cat([low, mid, high], 1), torch.cat([high, low, mid], 1)
    assert torch.allclose(
        served_rows @ after["fc.weight"].float().T, trained_rows @ before["fc.weight"].float().T, atol=1e-5
    )


@pytest.mark.parametrize("to", ["sglang", "vllm"])
def test_unsorted_ids_of_speculators_move_nothing(tmp_path, to):
    """Its rows come from vLLM, which collects in the order of the layers, whatever that of the ids."""
    folder = edited(tmp_path / "d", SPECULATORS, config={"eagle_aux_hidden_state_layer_ids": [5, 2, 4]})
    done = convert(folder, tmp_path / "s", to, TARGET)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "s" / "model.safetensors")
    assert torch.equal(after["fc.weight"], before["fc.weight"])
    assert done.ids[2] == (2, 4, 5) and not any("reordered" in w for w in done.warnings)


def test_norms_per_chunk_move_too(tmp_path):
    norms = {f"fc_norm.{i}.weight": torch.full((128,), float(i), dtype=torch.bfloat16) for i in range(3)}
    config = LISTED | {"fc_norm": True}
    folder = edited(tmp_path / "d", SGLANG, config=config, drop=["input_norm"], add=norms)
    convert(folder, tmp_path / "s", "sglang", TARGET)
    after = load_file(tmp_path / "s" / "model.safetensors")
    assert [after[f"fc_norm.{i}.weight"][0].item() for i in range(3)] == [1.0, 2.0, 0.0]
    assert config_of(tmp_path / "s")["fc_norm"] is True


@pytest.mark.parametrize(
    ("config", "add", "says"),
    [
        ({"norm_before_residual": True}, {}, "norm_before_residual: SGLang has no such switch"),
        (
            {"embed_requires_grad": True},
            {},
            "embed_tokens.weight was trained: SGLang puts the target's in its place",
        ),
        (
            {},
            {"layers.0.self_attn.q_norm.weight": torch.ones(16)},
            "layers.0.self_attn.q_norm.weight: SGLang's drafter has no",
        ),
        (
            {},
            {"layers.0.self_attn.k_proj.bias": torch.ones(32)},
            "layers.0.self_attn.k_proj.bias: SGLang's drafter has no",
        ),
        (
            {},
            {"rotary.inv_freq": torch.ones(8)},
            "rotary.inv_freq: not known in the speculators dialect, left out",
        ),
        ({}, {"t2d": torch.zeros(1024, dtype=torch.bool)}, "t2d and d2t disagree"),
        ({}, {"embed_tokens.weight": torch.zeros(1024, 128)}, "embed_tokens.weight is not the target's"),
        (
            {"transformer_layer_config": {"layer_types": ["sliding_attention"], "sliding_window": 257}},
            {},
            "launch with --speculative-draft-window-size 256",
        ),
    ],
)
def test_what_sglang_cannot_express_is_warned_of(tmp_path, config, add, says):
    folder = edited(tmp_path / "d", SPECULATORS, config=config, add=add, drop=list(add))
    done = convert(folder, tmp_path / "s", "sglang", TARGET)
    assert says in "; ".join(done.warnings)
    assert not [
        n
        for n in load_file(tmp_path / "s" / "model.safetensors")
        if n.endswith(("q_norm.weight", "k_proj.bias"))
    ]


def test_the_launch_that_a_windowed_drafter_needs_makes_both_sides_equal(tmp_path):
    config = {"transformer_layer_config": {"layer_types": ["sliding_attention"], "sliding_window": 257}}
    drafter = open_checkpoint(edited(tmp_path / "d", SPECULATORS, config=config))
    target = open_target(TARGET)
    launch = Launch(target=target.facts, draft_window=256)
    found = diff(
        trained(drafter, target.facts), served(view(drafter, "sglang", target), launch), drafter, target
    )
    assert not [d for d in found if not d.inert]


def test_a_second_layer_is_renamed_and_back(tmp_path):
    first = {
        n.replace("layers.0", "layers.1"): t
        for n, t in load_file(SPECULATORS / "model.safetensors").items()
        if "layers.0" in n
    }
    second = {
        n: t[:, :128].contiguous() if n[-13:] in ("q_proj.weight", "k_proj.weight", "v_proj.weight") else t
        for n, t in first.items()
    }
    second.pop("layers.1.hidden_norm.weight")
    config = {"transformer_layer_config": {"num_hidden_layers": 2}}
    folder = edited(tmp_path / "d", SPECULATORS, config=config, add=second)
    convert(folder, tmp_path / "s", "sglang", TARGET)
    names = set(load_file(tmp_path / "s" / "model.safetensors"))
    assert "layers.1.hidden_norm.weight" in names and "layers.1.input_layernorm.weight" not in names
    drafter, target = open_checkpoint(tmp_path / "s"), open_target(TARGET)
    assert (
        diff(trained(drafter, target.facts), served(drafter, Launch(target=target.facts)), drafter, target)
        == []
    )
    convert(tmp_path / "s", tmp_path / "b", "speculators", TARGET)
    same_tensors(tmp_path / "b", folder)


def test_yarn_is_written_in_both_forms(tmp_path):
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
    }
    folder = edited(
        tmp_path / "d", SPECULATORS, config={"transformer_layer_config": {"rope_parameters": yarn}}
    )
    convert(folder, tmp_path / "s", "sglang")
    config = config_of(tmp_path / "s")
    assert config["rope_theta"] == 5e4 and config["rope_parameters"] == yarn
    assert config["rope_scaling"] == {k: v for k, v in yarn.items() if k != "rope_theta"}
    launch = Launch(target=open_target(TARGET).facts)
    assert served(open_checkpoint(tmp_path / "s"), launch)[1].rope == trained(open_checkpoint(folder))[1].rope


def test_a_missing_head_is_the_targets_at_the_drafters_ids(tmp_path):
    folder = edited(tmp_path / "d", SPECULATORS, drop=["lm_head", "t2d"])
    with pytest.raises(BadInput, match="has no lm_head.weight: it shares the target's head; give --target"):
        convert(folder, tmp_path / "s", "sglang")
    assert not (tmp_path / "s").exists()
    done = convert(folder, tmp_path / "s", "sglang", TARGET)
    after, theirs = (
        load_file(tmp_path / "s" / "model.safetensors"),
        load_file(TARGET / "model.safetensors")["lm_head.weight"],
    )
    ids = after["d2t"] + torch.arange(640)
    assert torch.equal(after["lm_head.weight"], theirs[ids]) and torch.equal(
        after["t2d"].nonzero()[:, 0], ids
    )
    assert done.added == ("lm_head.weight", "t2d")


@pytest.mark.parametrize(
    ("base", "change", "to", "says"),
    [
        (SGLANG, {}, "sglang", "is in the sglang dialect already"),
        (SGLANG, {}, "trtllm", "this converts to sglang, to speculators or to vllm"),
        (SGLANG, {"add": {"fc.bias": torch.ones(128)}}, "vllm", "tensor 'fc.bias': vLLM has no such"),
        (SGLANG, {"config": {"hidden_act": "gelu"}}, "speculators", "'hidden_act' is 'gelu'"),
        (SGLANG, {"remove": ["eagle_config"]}, "speculators", "has no layer ids; give --target"),
        (
            SPECULATORS,
            {"config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}},
            "sglang",
            "depths [2, 2, 4] repeat",
        ),
        (
            SPECULATORS,
            {"drop": ["d2t"], "add": {"d2t": torch.full((640,), 9999)}},
            "sglang",
            "'d2t' points outside",
        ),
        (SGLANG, {"add": {"fc.bias": torch.ones(128)}}, "speculators", "tensor 'fc.bias'"),
        (SGLANG, {"add": {"fc_norm.0.weight": torch.ones(128)}}, "speculators", "has input_norm and fc_norm"),
        (
            SGLANG,
            {"config": {"tie_word_embeddings": True}, "drop": ["lm_head"]},
            "speculators",
            "'tie_word_embeddings' is true",
        ),
    ],
)
def test_what_cannot_be_converted(tmp_path, base, change, to, says):
    folder = edited(tmp_path / "d", base, **change)
    with pytest.raises(BadInput) as error:
        convert(folder, tmp_path / "s", to)
    assert says in str(error.value) and not (tmp_path / "s").exists()


def test_a_drafter_for_another_target_is_refused(tmp_path):
    config = json.loads((TARGET / "config.json").read_text()) | {"hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="it is a drafter for another target"):
        convert(SPECULATORS, tmp_path / "s", "sglang", tmp_path / "config.json")


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "precious").write_text("x")
    with pytest.raises(BadInput, match="exists already; give a new folder"):
        convert(SPECULATORS, tmp_path / "s", "sglang")
    assert os.listdir(tmp_path / "s") == ["precious"] and os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_is_left(tmp_path, monkeypatch, failure):
    def full(path, tensors, progress):
        path.write_bytes(b"half")
        raise failure

    monkeypatch.setattr(module, "write_safetensors", full)
    with pytest.raises((BadInput, KeyboardInterrupt)) as error:
        convert(SPECULATORS, tmp_path / "s", "sglang")
    assert os.listdir(tmp_path) == []
    if isinstance(failure, OSError):
        assert "could not be written (No space left on device); nothing was left behind" in str(error.value)


def test_progress_reaches_the_whole(tmp_path):
    seen = []
    convert(SPECULATORS, tmp_path / "s", "sglang", progress=lambda done, whole: seen.append((done, whole)))
    total = sum(t.nbytes for t in load_file(tmp_path / "s" / "model.safetensors").values())
    assert seen[-1] == (total, total) and [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_files_are_readable_by_others(tmp_path):
    convert(SPECULATORS, tmp_path / "s", "sglang")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "s").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_names_under_a_wrapper_are_converted_to_the_same_form(tmp_path):
    """What `module.` hides from an engine is the one thing that such a conversion changes."""
    held = load_file(SGLANG / "model.safetensors")
    wrapped = edited(tmp_path / "w", SGLANG, drop=[""], add={f"module.{n}": t for n, t in held.items()})
    convert(wrapped, tmp_path / "out", "sglang")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == held.keys() and all(torch.equal(again[n], held[n]) for n in held)
