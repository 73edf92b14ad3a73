"""Differences by their names: what a served copy lost, changed or renamed is told, what it may do is not."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drafters import SGLANG, SPECULATORS, TARGET, edited
from typer.testing import CliRunner

from eaglelab import cli, diagnose
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.checks.static import findings
from eaglelab.convert import convert
from eaglelab.errors import BadInput
from eaglelab.gather import served_copy, static_evidence
from eaglelab.launch import Launch
from eaglelab.params import ReportParams

EAGLE3 = "--speculative-algorithm EAGLE3 --dtype float32"
IDS = "eagle_aux_hidden_state_layer_ids"


def nested(**values):
    return {"config": {"eagle_config": values}}


def change(name, how):
    from safetensors.torch import load_file

    return {"add": {name: how(load_file(SGLANG / "model.safetensors")[name]).contiguous()}}


def evidence_of(copy, drafter=SPECULATORS, launch=EAGLE3):
    """The trainer's drafter, served as `copy`."""
    target = open_target(TARGET)
    how = Launch.parse(launch, target=target.facts)
    return static_evidence(open_checkpoint(drafter), how, target, served_copy(copy, Path(drafter), how))


def failed(*args, **more):
    return [f for f in findings(evidence_of(*args, **more)) if f.verdict == "failed"]


def names_of(*args, **more):
    return [f.fault for f in failed(*args, **more)]


def of_shipped(how):
    """Every tensor of the shipped drafter, changed by how(name, tensor) -> (name, tensor)."""
    from safetensors.torch import load_file

    changed = dict(how(n, t) for n, t in load_file(SGLANG / "model.safetensors").items())
    return {"drop": [""], "add": {n: t.contiguous() for n, t in changed.items()}}


# What a conversion of data/drafter-speculators may get wrong -> what it is called.
CONVERSIONS = {
    "ids copied": (nested(**{IDS: [2, 4, 5]}), ["ids-copied-in-conversion"]),
    "ids one early": (nested(**{IDS: [0, 2, 3]}), ["ids-off-by-one"]),
    "no ids, and the default is other": ({"base": "wide", **nested(**{IDS: None})}, ["ids-missing"]),
    "no ids, and the default is theirs": (nested(**{IDS: None}), []),
    "theta": ({"config": {"rope_theta": 1e6}}, ["rope-theta"]),
    "scaling": ({"config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}, ["rope-scaling"]),
    "both": (
        {"config": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
        ["rope-theta", "rope-scaling"],
    ),
    "partial": ({"config": {"partial_rotary_factor": 0.5}}, ["mrope-or-partial-rotary"]),
    "feedback": ({"config": {"norm_output": False}}, ["norm-output"]),
    "no norm": ({**nested(norm_before_fc=False), "drop": ["input_norm"]}, ["norm-before-fc-not-applied"]),
    "tied": ({"config": {"tie_word_embeddings": True}}, ["tied-head-reduced-vocab"]),
    "no head": ({"drop": ["lm_head"]}, ["lm-head-missing"]),
    "no map": ({"drop": ["d2t", "t2d"]}, ["d2t-not-exported"]),
    "zero map": (change("d2t", torch.zeros_like), ["d2t-not-exported"]),
    "renamed": ({"rename": {"midlayer": "block"}}, ["midlayer-name"]),
    "wrapped": (of_shipped(lambda n, t: (f"module.{n}", t)), ["midlayer-name"]),
    "other numbers": (change("norm.weight", lambda t: t + 1), ["conversion-changed-tensors"]),
    "another dtype": (change("fc.weight", lambda t: t.float()), []),
    "a buffer more": ({"add": {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}}, []),
    # the target's is served in its place: whatever it holds has no effect
    "an unused table": ({"add": {"embed_tokens.weight": torch.zeros(1024, 128)}}, []),
    "nothing": ({}, []),
}


@pytest.mark.parametrize("case", CONVERSIONS)
def test_what_a_conversion_did_is_told(case, tmp_path):
    changes, wanted = CONVERSIONS[case]
    trained = SPECULATORS
    if changes.get("base") == "wide":  # a drafter of depths 1, 4, 6, which are nobody's default
        changes = {k: v for k, v in changes.items() if k != "base"}
        trained = edited(tmp_path / "trained", SPECULATORS, config={IDS: [1, 4, 6]})
    assert names_of(edited(tmp_path / "d", SGLANG, **changes), trained) == wanted


UP, O_PROJ = "midlayer.mlp.up_proj.weight", "midlayer.self_attn.o_proj.weight"
NUMBERS = {
    "it holds the trainer's layers.0.mlp.gate_proj.weight": of_shipped(
        lambda n, t: (n.replace("gate", "_").replace("up_", "gate_").replace("mlp.__", "mlp.up_"), t)
    ),
    "it is the trainer's, transposed": change(O_PROJ, lambda t: t.T),
    "it is the trainer's, its rows in another order": change(UP, lambda t: t.flip(0)),
    "it is the trainer's, its columns in another order": change(UP, lambda t: t.flip(1)),
    "off by 0.50%, as rounding to a few bits is": change(UP, lambda t: t.float() * 1.005),
    "off by 50.00%": change(UP, lambda t: t * 1.5),
}


@pytest.mark.parametrize("says", NUMBERS)
def test_how_the_served_numbers_depart_is_told(says, tmp_path):
    (found,) = failed(edited(tmp_path / "d", SGLANG, **NUMBERS[says]))
    assert any(line.endswith(f": {says}") for line in found.evidence), found.evidence
    assert found.fix.startswith("convert again")


def test_another_step_of_training_is_no_slip_of_a_conversion(tmp_path):
    later = of_shipped(lambda n, t: (n, t * 1.5 if t.is_floating_point() else t))
    (found,) = failed(edited(tmp_path / "d", SGLANG, **later))
    assert found.evidence[-1].startswith("14 of 14 tensors differ: this is another checkpoint")
    assert found.fix.startswith("convert the checkpoint that is meant")


@pytest.mark.parametrize(
    ("flags", "slug", "fix"),
    [
        (
            "--json-model-override-args '{\"rope_theta\": 100.0}'",
            "override-args-reach-drafter",
            "take --json",
        ),
        (
            "--speculative-draft-window-size 64",
            "sliding-window-ignored",
            "take --speculative-draft-window-size out",
        ),
    ],
)
def test_a_flag_that_does_it_is_what_the_fix_takes_away(flags, slug, fix):
    (found,) = failed(None, launch=f"{EAGLE3} {flags}")
    assert found.fault == slug and found.fix.startswith(fix)


@pytest.mark.parametrize(("bring", "right"), [(1.4, True), (4.4, False)])
def test_a_fix_that_would_be_a_loss_is_none(tmp_path, bring, right):
    """The server commits 4.5 tokens: were it 1.4 with what the trainer's file says, the file is wrong."""
    evidence = evidence_of(edited(tmp_path / "d", SGLANG, config={"norm_output": False}))
    evidence.ladder = SimpleNamespace(rungs={"5": SimpleNamespace(accept_length=4.5)})
    (found,) = [f for f in findings(evidence, lambda *_: (bring, "")) if f.verdict == "failed"]
    assert found.fault == "norm-output" and found.fix.startswith("leave the server") == right
    assert found.predicted_accept_length == (None if right else bring)


def test_an_engine_that_cannot_read_the_copy_says_so_by_name(tmp_path):
    wrong = edited(tmp_path / "d", SGLANG, config={"head_dim": 32})
    assert names_of(wrong) == ["head-dim-wrong", "engine-refuses-drafter"]
    with pytest.raises(BadInput, match="head_dim") as error:
        open_checkpoint(wrong)
    assert error.value.faults == ("head-dim-wrong",)
    with pytest.raises(BadInput, match="--served-drafter .*not a folder"):
        served_copy(tmp_path / "none", SGLANG, Launch())


def test_the_copy_is_the_launchs_own_path_where_it_can_be_read(tmp_path):
    target, copy = open_target(TARGET), edited(tmp_path / "d", SGLANG)
    how = Launch.parse(EAGLE3, target=target.facts)
    assert served_copy(None, SPECULATORS, how.edit(draft_path=str(copy))).path == copy
    assert served_copy(None, SPECULATORS, how.edit(draft_path="data/drafter-sglang")) is None, "not absolute"
    assert served_copy(None, SGLANG, how.edit(draft_path=str(SGLANG))) is None, "the drafter itself"
    same = how.edit(draft_path=str(TARGET), target_path=str(TARGET))
    assert served_copy(None, SPECULATORS, same) is None, "the target is no drafter"
    assert served_copy(None, SPECULATORS, how.edit(draft_path=str(tmp_path / "gone"))) is None


def test_the_target_as_its_own_drafter():
    for own in ("", f"--speculative-draft-model-path {TARGET} "):
        found = diagnose.run(drafter=SGLANG, target=TARGET, launch=f"--model-path {TARGET} {own}{EAGLE3}")
        assert found.fault == "draft-path-omitted"
    found = diagnose.run(drafter=SGLANG, target=TARGET, launch=EAGLE3)
    assert found.failed == [], "a launch that does not name its target says nothing of it"


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--attention-backend trtllm_mla", "draft-attention-backend-inherited"),
        ("--attention-backend trtllm_mla --speculative-draft-attention-backend fa3", None),
        ("--attention-backend fa3", None),
        ("--quantization awq", "draft-quantization-inherited"),
        ("--quantization awq --speculative-draft-model-quantization unquant", None),
    ],
)
def test_what_the_drafter_inherits(flags, fault):
    found = diagnose.run(drafter=SGLANG, target=TARGET, launch=f"{EAGLE3} {flags}")
    assert found.fault == fault


def test_a_chunk_order_that_the_columns_follow_is_no_difference(tmp_path):
    """Trained on depths 5, 2, 4 in this order: a conversion must move the columns of fc with the ids."""
    listed = {"eagle_config": {IDS: [4, 1, 3]}, "eaglelab_dialect": "specforge"}
    turned = edited(tmp_path / "trained", SGLANG, config=listed)
    right = tmp_path / "right"
    convert(turned, right, "sglang", TARGET)
    assert names_of(right, turned) == []
    assert names_of(None, turned) == ["chunk-order"]  # SGLang loads the trainer's own file as it is
    kept = edited(tmp_path / "served", SGLANG)  # fc as the trainer wrote it, ids sorted all the same
    assert names_of(kept, turned) == ["chunk-order"]


def test_ids_that_speculators_lists_in_another_order_are_no_difference(tmp_path):
    """vLLM, which stores its rows, collects in the order of the layers, as SGLang does."""
    assert names_of(None, edited(tmp_path / "trained", SPECULATORS, config={IDS: [5, 2, 4]})) == []


def test_later_norms_that_the_served_file_renames_are_no_difference(tmp_path):
    from safetensors.torch import load_file

    first = {n: t for n, t in load_file(SPECULATORS / "model.safetensors").items() if "layers.0" in n}
    later = {n.replace("layers.0", "layers.1"): t for n, t in first.items() if "hidden_norm" not in n}
    narrow = {n: t[:, :128].contiguous() for n, t in later.items() if any(f".{p}_proj" in n for p in "qkv")}
    norm = {"layers.1.input_layernorm.weight": torch.full((128,), 0.5).bfloat16()}
    config = {"transformer_layer_config": {"num_hidden_layers": 2}}
    two = edited(tmp_path / "two", SPECULATORS, config=config, add=later | narrow | norm)
    assert names_of(None, two) == []


def test_pairs_are_two_findings_each_priced_alone_and_together(tmp_path):
    copy = edited(tmp_path / "d", SGLANG, config={"rope_theta": 100.0, "norm_output": False})
    found = diagnose.run(
        drafter=SPECULATORS, served_drafter=copy, target=TARGET, capture=TARGET.parent / "golden-capture"
    )
    named = {f.fault: f for f in found.failed}
    assert [f.fault for f in found.failed][:2] == ["norm-output", "rope-theta"] or [
        f.fault for f in found.failed
    ][:2] == ["rope-theta", "norm-output"]
    for fault in ("norm-output", "rope-theta"):
        alone = named[fault].predicted_accept_length
        (line,) = [e for e in named[fault].evidence if e.startswith("all 2 causes undone together")]
        together = float(line.split("after this fix: ")[1].split()[0])
        assert 1 < alone < together
        rung3 = found.ladder.rungs["3"].accept_length
        assert together == pytest.approx(rung3, abs=0.006)


def test_a_finding_of_two_mechanisms_is_one(tmp_path):
    """The trainer's config denies what both the served copy and the capture say."""
    drafter = edited(tmp_path / "d", SPECULATORS, config={"norm_output": False})
    found = diagnose.run(
        drafter=drafter, served_drafter=SGLANG, target=TARGET, capture=TARGET.parent / "golden-capture"
    )
    assert [f.fault for f in found.failed].count("norm-output") == 1
    assert found.fault == "norm-output"
    assert json.loads((SGLANG / "config.json").read_text())["norm_output"] is True


def test_the_served_folder_is_an_option_a_parameter_and_part_of_the_command(tmp_path):
    copy = edited(tmp_path / "a copy", SGLANG, config={"norm_output": False})
    words = ["--drafter", str(SPECULATORS), "--served-drafter", str(copy), "--target", str(TARGET)]
    said = CliRunner().invoke(cli.app, ["diagnose", *words, "--launch", EAGLE3, "--json"])
    assert said.exit_code == 1 and json.loads(said.stdout)["fault"] == "norm-output"
    given = {"drafter": str(SPECULATORS), "served_drafter": str(copy), "capture": str(SGLANG)}
    params = ReportParams.checked(given)
    assert f"--served-drafter '{copy}'" in params.command()
    with pytest.raises(BadInput, match="'served_drafter'.*does not exist"):
        ReportParams.checked({**given, "served_drafter": str(tmp_path / "gone")})
