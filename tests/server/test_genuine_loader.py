"""`Launch`, `served` and `loading` against SGLang's own argument resolution, classes, loader and worker.

No server is started: one process of the server's environment (20 s) runs the genuine code on all cases
(`genuine.py`).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from drafters import SGLANG, TARGET, edited

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.errors import BadInput
from eaglelab.launch import Launch
from eaglelab.layer_ids import default_depths, sglang_depths
from eaglelab.live import expected_parameters
from eaglelab.loader import nested_ids
from eaglelab.served import loading, refusals, served

pytestmark = pytest.mark.server

BASE = ["--model-path", str(TARGET), "--speculative-draft-model-path", str(SGLANG)]
LAUNCHES = {
    "all left out": "--speculative-algorithm EAGLE3",
    "alias and abbreviations": "--speculative-algo NEXTN --speculative-num-s 5 --speculative-ea=1 "
    "--speculative-num-d 9",
    "dtype": "--speculative-algorithm EAGLE3 --dt float32 --tensor-parallel-size 1",
    "half": "--dtype half",
    "no speculation": "--tp 1",
    "chain": "--speculative-algorithm eagle3 --speculative-num-steps 5 --speculative-eagle-topk 1",
    "tree and window": "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 8 --speculative-draft-window-size 16",
    "adaptive": "--speculative-algorithm EAGLE3 --speculative-adaptive",
    "steps without topk": "--speculative-algorithm EAGLE3 --speculative-num-steps 5",
    "topk without steps": "--speculative-algorithm EAGLE3 --speculative-eagle-topk 4",
    "no window": "--speculative-algorithm EAGLE3 --speculative-draft-window-size 0",
}
MODULES = {
    "LlamaForCausalLM": "llama",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v2",
    "MistralLarge3ForCausalLM": "mistral_large_3",
    "GlmMoeDsaForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Glm4MoeForCausalLM": "glm4_moe",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3_causal",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl",
    "ApertusForCausalLM": "apertus",
    "Phi3ForCausalLM": "llama",
}
IDS = ([1, 17, 33], [2, 18, 33], [24, 30, 36], None)
BLOCK = "midlayer.self_attn."
WHOLE = {"config": {"draft_vocab_size": None}, "drop": ["d2t", "t2d", "lm_head"]}
DRAFTERS = {
    "as shipped": {},
    "layers.0": {"rename": {"midlayer.": "layers.0."}},
    "model.layers.0": {"rename": {"midlayer.": "model.layers.0."}},
    "no head": {"drop": ["lm_head"]},
    "no map": {"drop": ["d2t", "t2d"]},
    "no k": {"drop": ["k_proj"]},
    "no block": {"rename": {"midlayer.": "decoder.0."}},
    "biases and q norm": {
        "add": {BLOCK + "q_proj.bias": torch.ones(128), BLOCK + "q_norm.weight": torch.ones(16)}
    },
    "output bias": {"config": {"attention_bias": True}, "add": {BLOCK + "o_proj.bias": torch.ones(128)}},
    "fc bias": {"config": {"bias": True}, "add": {"fc.bias": torch.ones(128)}},
    "unknown names": {"rename": {"input_norm": "input_norms"}},
    "norm switched off": {"config": {"eagle_config": {"norm_before_fc": False}}},
    "norm at top level": {
        "config": {"eagle_config": {"norm_before_fc": None}, "norm_before_fc": True},
    },
    "norms per chunk": {
        "config": {"use_aux_norm": True},
        "add": {f"aux_norm_{n}.weight": torch.full((128,), 2.0) for n in ("low", "mid", "high")},
    },
    "own embedding": {"add": {"embed_tokens.weight": torch.zeros(1024, 128)}},
    "whole vocabulary": WHOLE,
    "tied": {"config": {"tie_word_embeddings": True}},
    "tied without map": {"config": {"tie_word_embeddings": True}, "drop": ["d2t", "t2d"]},
    "aux off": {"config": {"eagle_config": {"use_aux_hidden_state": False}}},
    "aux off, no ids": {
        "config": {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": None}}
    },
    "no eagle_config": {"remove": ["eagle_config"], "config": {"norm_before_fc": True}},
    "ids at top level": {
        "remove": ["eagle_config"],
        "config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
    "norm_output off": {"config": {"norm_output": False}},
    "rope both": {
        "config": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 7.0}
    },
    "rope partial": {"config": {"partial_rotary_factor": 0.5, "rope_is_neox_style": False}},
    "eps left out": {"remove": ["rms_norm_eps"]},
    "two layers": {"config": {"num_hidden_layers": 2}},
    "no draft_vocab_size": {"remove": ["draft_vocab_size"], "drop": ["d2t", "t2d", "lm_head"]},
    "null target_hidden_size": {"config": {"target_hidden_size": None}},
    "too few ids": {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}},
    "num_aux": {"config": {"num_aux_hidden_states": 4}},
    "tied, null vocabulary": {
        "config": {"tie_word_embeddings": True, "draft_vocab_size": None},
        "drop": ["d2t", "t2d"],
    },
}
ALGORITHMS = ("EAGLE3", "EAGLE")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    return {
        name: edited(root / name.replace(" ", "-").replace(",", ""), **change)
        for name, change in DRAFTERS.items()
    }


@pytest.fixture(scope="module")
def genuine(folders, server_python, tmp_path_factory):
    """Every answer of SGLang itself, by the names used here."""
    from eaglelab.serve import CPU_ENVIRONMENT

    root = tmp_path_factory.mktemp("genuine")
    pairs = [(name, algorithm) for name in folders for algorithm in ALGORITHMS]
    captures = [(architecture, ids) for architecture in MODULES for ids in IDS]
    job = {
        "launches": [[*BASE, *text.split()] for text in LAUNCHES.values()],
        "depths": [(architecture, MODULES[architecture], ids, 36) for architecture, ids in captures],
        "target": str(TARGET),
        "drafter": str(SGLANG),
        "drafters": [(str(folders[name]), algorithm) for name, algorithm in pairs],
    }
    (root / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("genuine.py")
    run = subprocess.run(
        [server_python, script, root / "job.json", root / "answer.json"],
        env=os.environ | CPU_ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads((root / "answer.json").read_text())
    return {
        "launches": dict(zip(LAUNCHES, answer["launches"], strict=True)),
        "depths": dict(zip([(a, str(i)) for a, i in captures], answer["depths"], strict=True)),
        "drafters": dict(zip(pairs, answer["drafters"], strict=True)),
    }


@pytest.mark.parametrize("name", LAUNCHES)
def test_launch_is_resolved_as_sglang_resolves_it(genuine, name):
    theirs = genuine["launches"][name]
    try:
        ours = Launch.parse([*BASE, *LAUNCHES[name].split()], open_target(TARGET).facts)
    except BadInput:
        assert "error" in theirs
        return
    assert "error" not in theirs, theirs
    theirs["dtype"] = {"auto": None, "half": "float16"}.get(theirs["dtype"], theirs["dtype"])
    for key in ("steps", "topk", "draft_tokens"):
        theirs[key] = theirs[key] or 0
    assert {key: getattr(ours, key) for key in theirs} == theirs


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("architecture", MODULES)
def test_layer_ids_mean_what_sglang_makes_of_them(genuine, architecture, ids):
    ours = sglang_depths(tuple(ids), architecture, 36) if ids else default_depths(architecture, 36)
    assert list(ours) == genuine["depths"][architecture, str(ids)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_is_loaded_and_wired_as_sglang_does_it(genuine, folders, name, algorithm):
    theirs = genuine["drafters"][name, algorithm]
    drafter, target = open_checkpoint(folders[name]), open_target(TARGET)
    launch = Launch(algorithm=algorithm, target=target.facts, dtype="float32")
    problems = refusals(drafter, launch)
    if "error" in theirs:
        assert problems, theirs["error"]
        return
    assert not problems, problems
    takes = loading(drafter, launch)
    maps = {"d2t", "t2d"} & set(drafter.file_names)
    assert set(takes.dropped) == set(drafter.file_names) - set(theirs["taken"]) - maps
    shared = {n for n, source in takes.params.items() if source.kind == "target"}
    tied = {"lm_head.weight"} if drafter.settings.tied else set()
    assert set(theirs["shared"]) == shared | tied
    assert set(takes.initial) == set(theirs["initial"]) - set(theirs["shared"])
    expected = expected_parameters(drafter, target, launch)
    for parameter, checksum in theirs["checksums"].items():
        if expected[parameter].checksum is None:
            assert parameter in takes.initial
        else:
            assert expected[parameter].checksum == checksum, parameter
            assert list(expected[parameter].shape) == theirs["shapes"][parameter]
    assert set(expected) - {"model.hot_token_id", "worker.hot_token_id"} == set(theirs["checksums"])
    feed, wiring = served(drafter, launch)
    assert wiring.logits_width == theirs["logits_width"]
    assert (wiring.vocab_map == "d2t") == theirs["map_applied"]
    assert (wiring.feedback == "post-norm") == theirs["norm_output"]
    assert (wiring.head_dim, wiring.eps) == (theirs["head_dim"], theirs["eps"])
    kind, theta, rotary, half = theirs["rope"]
    assert (wiring.rope.theta, wiring.rope.rotary_dim or 16, wiring.rope.layout == "half") == (
        theta,
        rotary,
        half,
    )
    assert feed.width == theirs["width"]
    assert (feed.width != 128) == theirs["aux"]
    if theirs["aux"]:
        ids = nested_ids(drafter)
        assert (list(ids) if ids else None) == theirs["ids"]
        assert theirs["fc_in"] == feed.width


def test_some_of_each_kind_were_seen(genuine):
    """The cases above do cover refusals, drops and initial values."""
    found = genuine["drafters"]
    assert sum("error" in f for f in found.values()) >= 8
    assert any(f.get("initial") == ["model.embed_tokens.weight", "lm_head.weight"] for f in found.values())
