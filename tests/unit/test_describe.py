import json

import pytest
from drafters import SGLANG, SPECULATORS, TARGET, edited

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.describe import describe
from eaglelab.errors import BadInput
from eaglelab.launch import Launch, Target

EAGLE = Launch.parse("--speculative-algorithm EAGLE --speculative-num-steps 5 --speculative-eagle-topk 1")


def test_the_incident_side_by_side():
    report = describe(open_checkpoint(SPECULATORS), open_target(TARGET), EAGLE)
    assert json.loads(json.dumps(report)) == report
    assert report["dialect"] == "speculators" and report["architectures"] == ["Eagle3DraftModel"]
    assert report["bytes"] == 958208
    assert report["tensors"]["fc.weight"] == {
        "name_in_file": "fc.weight",
        "shape": [128, 384],
        "dtype": "bfloat16",
    }
    assert report["layer_ids"] == {
        "written": [2, 4, 5],
        "written_as": "speculators",
        "depths": [2, 4, 5],
        "as_sglang": [1, 3, 4],
        "as_speculators": [2, 4, 5],
        "as_vllm": [2, 4, 5],
        "rule": "SGLang on LlamaForCausalLM: id i is depth i + 1; speculators and vLLM: id k is depth k",
        "default": [2, 4, 5],
    }
    assert report["launch"] == {
        "command": EAGLE.command(),
        "engine": "sglang==0.5.23",
        "release": {"caveat": None, "differences": []},
        "assumed": False,
    }
    assert report["trained"]["wiring"]["fc"] == "applied" and report["served"]["wiring"]["fc"] == "bypassed"
    assert report["trained"]["feed"]["width"] == 384 and report["served"]["feed"]["width"] == 128
    counted = [d["field"] for d in report["differences"] if not d["inert"]]
    assert counted == ["depths", "width", "final_norm", "fc", "lm_head", "vocab_map"]
    assert report["loading"]["dropped"] == [] and report["loading"]["replaced"] == ["lm_head.weight"]
    assert report["conversion"] == {"to": "sglang", "warnings": []} and report["refusals"] == []


def test_without_target_or_launch_what_is_assumed_is_said():
    report = describe(open_checkpoint(SGLANG))
    assert report["launch"]["assumed"] is True and report["target"] is None and report["conversion"] is None
    assert report["layer_ids"]["written"] == [1, 3, 4] and report["layer_ids"]["depths"] == [2, 4, 5]
    assert report["layer_ids"]["rule"].startswith("SGLang on most architectures: id i is depth i + 1")
    assert [d["field"] for d in report["differences"]] == []


@pytest.mark.parametrize(
    ("architecture", "written", "depths", "rule"),
    [
        (
            "KimiK25ForConditionalGeneration",
            [1, 3, 4],
            [2, 4, 5],
            "id i is depth i + 1 if the first id is 1, else depth i",
        ),
        (
            "KimiK25ForConditionalGeneration",
            [2, 4, 5],
            [2, 4, 5],
            "id i is depth i + 1 if the first id is 1, else depth i",
        ),
        ("GptOssForCausalLM", [4, 6, 8], [4, 6, 8], "or depth i if the largest id is the number of layers"),
    ],
)
def test_ids_both_ways_by_architecture(tmp_path, architecture, written, depths, rule):
    folder = edited(tmp_path / "d", config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": written}})
    launch = EAGLE.with_target(Target(architecture, 128, 8, 1024))
    ids = describe(open_checkpoint(folder, "sglang"), None, launch)["layer_ids"]
    assert (ids["written"], ids["depths"], ids["as_speculators"]) == (written, depths, depths)
    assert rule in ids["rule"]


def test_what_would_stop_the_engine_is_reported_not_raised(tmp_path):
    folder = edited(tmp_path / "d", config={"num_aux_hidden_states": 4})
    report = describe(open_checkpoint(folder), open_target(TARGET))
    assert report["served"] is None and report["differences"] is None
    assert any("SGLang makes fc 128 x 512" in r for r in report["refusals"])
    assert report["loading"]["dropped"] == []


def test_another_targets_drafter_is_bad_input():
    with pytest.raises(BadInput, match="drafter for another target"):
        describe(open_checkpoint(SGLANG), None, EAGLE.with_target(Target("LlamaForCausalLM", 128, 8, 999)))


def test_statistics_on_demand():
    checkpoint = open_checkpoint(SGLANG)
    report = describe(checkpoint, statistics=True)
    largest = checkpoint.load("fc.weight").abs().max().item()
    assert report["tensors"]["fc.weight"]["absmax"] == largest > 0
    assert report["tensors"]["fc.weight"]["nonfinite"] == 0
