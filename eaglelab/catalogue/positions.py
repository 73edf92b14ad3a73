"""Faults of positions: rope, windows, lengths, offsets."""

from eaglelab.catalogue import Fault

WEAK = "where a wrong config is both given and served, only a drafter that drafts well tells, by likelihoods"

FAULTS = (
    Fault(
        "rope-theta",
        49,
        "the drafter is served with another rope theta than it was trained with",
        "the key is missing, or spelled as transformers 5 does (rope_parameters) and not read: 1e4 is taken",
        ("config", "replay"),
        "write rope_theta and rope_parameters",
        5,
        ("replay:rope-theta", "check:runtime-mismatch"),
        WEAK,
        symptom="3.556 against 3.612; 2.387 at 1e6 against 2.497 at 1e4",
        threads="SpecForge#265 SpecForge#742 Automodel#2920 speculators#555 speculators#574 speculators#649 "
        "sfllm#32",
        source="SpecForge commit 1712b656",
    ),
    Fault(
        "rope-scaling",
        50,
        "rope scaling (YaRN, llama3) is on in training or in serving only",
        "a null falls back to another type, buffers are lost, or an exporter adds yarn",
        ("config", "replay"),
        "the same rope on both sides",
        5,
        ("replay:rope-scaling", "check:runtime-mismatch"),
        WEAK,
        symptom="worse with length",
        threads="TorchSpec#54 SpecForge#219 SpecForge#703 Automodel#2399 Automodel#3267 Automodel#2859 "
        "Model-Optimizer#1238",
    ),
    Fault(
        "mrope-or-partial-rotary",
        53,
        "multimodal or partial rotary parameters reach one side only",
        "mrope parameters are kept while positions have one dimension",
        ("config",),
        "remove them, or an engine that knows them",
        4,
        ("diff:rope", "replay:mrope-or-partial-rotary"),
        threads="speculators#598 speculators#733 sglang#19730",
        inferred="no report of plain partial rotary was found",
    ),
    Fault(
        "draft-context-too-short",
        54,
        "texts are longer than the drafter was trained or configured for",
        "max_position_embeddings of 2048, or short training; a table of cosines read out of bounds",
        ("config", "capture"),
        "longer training, or a window for the drafter",
        2,
        ("check:draft-context-too-short",),
        "needs requests on both sides of the drafter's longest text: the default prompts are short",
        symptom="2.295 at 2k -> 1.090 at 16k",
        threads="vllm#48894 vllm#23072 vllm#21986 sglang#6783 sglang#3574 EAGLE#311 speculators#684",
    ),
    Fault(
        "sliding-window-ignored",
        55,
        "the drafter's sliding window is not served",
        "the engine does not read it from the drafter's config; SGLang's MLA drafter ignores the flag too",
        ("config", "launch"),
        "--speculative-draft-window-size",
        4,
        ("diff:window", "replay:sliding-window-ignored"),
        symptom="1.336 -> 1.881 on LongBench once read",
        threads="vllm#47568 vllm#53827 sglang#24664 vllm-ascend#10023 TensorRT-LLM#14200",
        source="sglang 0.5.23 models/kimi_k25_eagle3.py",
    ),
    Fault(
        "position-offset",
        56,
        "draft steps stand at other positions than in training",
        "ids of test-time training are off, or the engine is SGLang before 0.5.12, whose draft steps stand "
        "one position further on. The same shift of all positions does no harm under rope (speculators "
        "starts at 1)",
        ("replay", "launch"),
        "correct the ids in training; SGLang 0.5.12 or newer",
        2,
        ("diff:step_offset", "replay:position-offset", "check:exposure-bias"),
        "an offset inside the trainer's code is placed, not named: it shows in no file",
        threads="SpecForge#424 sglang#25015",
        source="SpecForge commit bcb2ec2a",
    ),
)
