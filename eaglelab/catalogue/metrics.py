"""Faults of what is measured, and illusions of training."""

from eaglelab.catalogue import Fault

FAULTS = (
    Fault(
        "metric-definition",
        63,
        "two numbers of one name are compared that are defined differently",
        "old SGLang rates count the bonus token and divide by draft tokens or steps; N draft tokens are N-1 "
        "drafts in a chain; pooled against per request",
        ("log", "launch"),
        "recompute both from counters, or translate: `eaglelab explain`",
        None,
        ("command:explain", "check:counters-disagree"),
        symptom="0.20 with 5 draft tokens, and nothing was accepted; rates above 1",
        threads="sglang#13212 sglang#11572 sglang#11144 sglang#11441 sglang#23530 vllm#16035 vllm#42508 "
        "vllm#9565 EAGLE#132 EAGLE#146 Automodel#2959",
    ),
    Fault(
        "exposure-bias",
        64,
        "training accuracy is far above what is served, because every step was given the right token",
        "teacher forcing, shifted labels, or test-time training fed from elsewhere than its own drafts",
        ("stored data", "replay"),
        "train on the drafter's own drafts, and evaluate autoregressively",
        2,
        ("check:exposure-bias", "rung:2"),
        symptom="98 % against 10 %; 90 % against an accept length of 1.2; 1.02",
        threads="SpecForge#533 SpecForge#365 SpecForge#227 SpecForge#455 SpecForge#473 BaldEagle#17 "
        "speculators#818 DeepSpec#84",
    ),
    Fault(
        "accuracy-denominator",
        65,
        "training accuracy leaves out positions whose token has no draft id",
        "out-of-vocabulary positions are masked from the denominator",
        ("stored data", "tensors"),
        "count them as wrong",
        1,
        ("rung:1",),
        "shown, not judged: beside rung 1 the same drafts with those positions counted, left out, and judged "
        "as speculators does (training_accuracy.counted, .left_out, .full)",
        threads="SpecForge#492",
    ),
    Fault(
        "sampling",
        66,
        "acceptance is measured with sampling and compared with greedy",
        "greedy drafts against a sampled verify; the draft's probabilities are not used",
        ("launch", "log"),
        "compare at temperature 0 first",
        None,
        undetected="out of reach: captures are greedy, and on a CPU so is every verify. The accept length of "
        "the same prompts at temperature 0 would show it",
        symptom="2.14 at temperature 0, 1.71 at 1 (EAGLE-1, Qwen2)",
        threads="vllm#20459 sglang#26312 EAGLE#183 EAGLE#329 EAGLE#143 TensorRT-LLM#15775",
    ),
    Fault(
        "optimiser-bug",
        67,
        "the drafter is undertrained by a bug of its trainer",
        "learning rate against world size, a wrong gradient, a mask off by one in test-time training",
        ("replay",),
        "correct it and train again",
        1,
        undetected="by exclusion only: nothing differs between training and serving, and rung 1 is low",
        threads="SpeCo#29 SpecForge#536 TorchSpec#79 Model-Optimizer#2086",
    ),
    Fault(
        "too-little-data",
        69,
        "the drafter is merely weak, or is measured against another set-up",
        "5,000 to 50,000 samples; a chain against a published tree",
        ("replay",),
        "train longer; compare like with like",
        1,
        undetected="by exclusion only: nothing differs, all rungs are equally low. It is not a fault of "
        "serving, and the verdict is healthy",
        symptom="1.94",
        threads="speculators#751 SpecForge#128 dflash#3",
    ),
    Fault(
        "engine-regression",
        70,
        "a new engine version accepts less",
        "unknown",
        ("launch", "replay"),
        "bisect the versions",
        5,
        ("check:runtime-mismatch", "command:report"),
        symptom="below an earlier 3.53",
        threads="vllm#26191 sglang#8228",
    ),
)
