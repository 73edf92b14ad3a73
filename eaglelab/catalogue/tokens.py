"""Faults of tokens, chat template and data."""

from eaglelab.catalogue import Fault

FAULTS = (
    Fault(
        "token-shift",
        57,
        "features are paired with the wrong tokens",
        "the state at t belongs to token t + 1; or the drafter's KV of committed rows is not written anew",
        ("replay",),
        "align them",
        5,
        ("check:feed-depths", "check:stored-features-shifted", "replay:token-shift"),
        symptom="about 25 %; 8 to 15 %",
        threads="vllm#14647 vllm#14649 mlc-llm#2266",
    ),
    Fault(
        "loss-mask",
        58,
        "the loss mask covers other tokens than it should",
        "not shifted, broadcast over the batch, thinking left out, template trained on",
        ("stored data",),
        "correct the parser, and read the masked text",
        1,
        ("check:loss-mask",),
        "a mask that is off by one shows where the answers are the target's own greedy ones, or where a "
        "template's special tokens begin and end the turns",
        threads="SpecForge#885 SpecForge#870 speculators#346 TorchSpec#37 Model-Optimizer#548",
        source="SpecForge commits d8f97e49, bcb2ec2a",
    ),
    Fault(
        "template-differs",
        59,
        "prompts are served in another template, system prompt or reasoning mode than was trained",
        "the drafter knows one way of writing",
        ("stored data", "capture"),
        "the same template; regenerate the training texts with the target as served",
        3,
        ("check:template-differs",),
        "told by special tokens of a template on one side only; another system prompt or reasoning mode in "
        "the same template is shown as text, not judged",
        symptom="2.42 against 5.88, closed by the system prompt; 1.94 chat against 3.93 raw",
        threads="EAGLE#196 sglang#4716 SpecForge#296 SpecForge#416 tokenspeed#1305",
    ),
    Fault(
        "multimodal-spans",
        61,
        "image tokens reach the drafter as padding or hashes",
        "text-only training, or embeddings of images that are not handed over",
        ("capture",),
        "feed the multimodal embeddings, or train on images",
        2,
        undetected="captures hold text prompts only; acceptance inside and outside image spans would show it",
        symptom="low on images",
        threads="vllm#22872 speculators#606 speculators#290 speculators#626 tokenspeed#265 sglang#19730 "
        "EAGLE#302",
        source="AngelSlim expands image padding again",
    ),
    Fault(
        "target-not-the-trained-one",
        62,
        "the served target is a fine-tune, or has a LoRA, that the drafter was not trained for",
        "the features and the answers are another model's",
        ("launch", "tensors", "capture"),
        "train on the target as served",
        3,
        ("check:stored-features-shifted", "check:feed-mismatch"),
        symptom="2.4 against 2.2",
        threads="EAGLE#98 sglang#34337",
    ),
)
