"""Faults of the launch and of the choice of algorithm."""

from eaglelab.catalogue import Fault

FAULTS = (
    Fault(
        "eagle-flag-on-eagle3-drafter",
        1,
        "an EAGLE-3 drafter is launched as EAGLE: its fc never runs",
        "under EAGLE (alias NEXTN) the target hands over its final state only, as wide as the drafter; the "
        "drafter's shape check then skips fc. The target's head replaces its own, and d2t is not applied",
        ("launch", "config", "tensors", "capture"),
        "--speculative-algorithm EAGLE3",
        4,
        ("cause:eagle-flag-on-eagle3-drafter", "diff:fc", "diff:width", "check:feed-width"),
        symptom="accept length exactly 1.00 (Kimi-K2.5)",
        threads="sglang#21272 sglang#25673 vllm#21737 vllm#16636",
        source="sglang 0.5.23 speculative/eagle_worker_v2.py, models/llama_eagle3.py",
    ),
    Fault(
        "draft-path-omitted",
        2,
        "no draft path is given, and the target is loaded as its own drafter",
        "the path of the draft model defaults to the target's",
        ("launch",),
        "give --speculative-draft-model-path",
        4,
        ("check:draft-path-omitted", "check:weights-not-loaded"),
        "a launch that does not say its --model-path tells nothing of it",
        threads="sglang#36528 sglang#36593",
    ),
    Fault(
        "draft-attention-backend-inherited",
        3,
        "the drafter runs on the target's attention backend",
        "without a flag of its own the drafter inherits the backend; one made for MLA serves an MHA drafter",
        ("launch", "config"),
        "--speculative-draft-attention-backend, with a backend for the drafter's own attention",
        5,
        ("check:draft-attention-backend-inherited", "check:runtime-mismatch", "rung:5"),
        symptom="reported without a number",
        threads="sglang#23490 sglang#23563 vllm-ascend#8678 vllm-ascend#8820",
    ),
    Fault(
        "draft-quantization-inherited",
        4,
        "the target's quantisation is applied to the drafter's unquantised tensors",
        "the drafter is loaded with the target's quantisation config; only some architectures clear it",
        ("launch", "config", "tensors"),
        "--speculative-draft-model-quantization unquant",
        5,
        ("check:draft-quantization-inherited", "check:weights-not-loaded", "check:runtime-mismatch"),
        symptom="0 % accepted for a quantised multi-token-prediction drafter",
        threads="sglang#28196 sglang#22588 llm-compressor#1843",
        source="sglang 0.5.23: modelopt_fp4 is cleared for the MLA drafter only",
    ),
    Fault(
        "aux-hidden-state-off",
        0,
        "the drafter's config turns the intermediate hidden states off",
        "eagle_config.use_aux_hidden_state is false, so that EAGLE3 too hands over the final state only and "
        "fc is skipped; head and d2t stay the drafter's",
        ("config", "capture"),
        'set "use_aux_hidden_state": true in eagle_config',
        4,
        ("cause:aux-hidden-state-off", "diff:fc", "diff:width", "check:feed-width"),
        source="sglang 0.5.23 models/llama_eagle3.py; run on a CPU",
    ),
)
