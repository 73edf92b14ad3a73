"""Faults of norms, of the residual, and of what a draft step is fed back."""

from eaglelab.catalogue import Fault

FAULTS = (
    Fault(
        "norm-before-residual",
        33,
        "the drafter's first residual was trained normed, and is served raw",
        "SGLang does not read norm_before_residual; speculators' command line sets it, and defaults differ "
        "from tool to tool",
        ("config", "replay"),
        "train with norm_before_residual false, or patch the engine",
        4,
        ("diff:residual", "check:wiring-mismatch", "replay:norm-before-residual"),
        threads="speculators#297 vllm#21345",
        source="sglang 0.5.23 models/llama_eagle3.py: never read",
        inferred="the loss in SGLang",
    ),
    Fault(
        "norm-before-fc-not-applied",
        34,
        "a norm before fc was trained and is not applied, or the other way round",
        "norm_before_fc or fc_norm is not carried over, or the engine's module came later (SGLang: fc_norm "
        "in 0.5.12, norm_before_fc in 0.5.17)",
        ("config", "tensors"),
        "set the flag beside its tensors, or upgrade the engine",
        4,
        ("diff:norm_before_fc", "diff:dropped", "replay:norm-before-fc-not-applied"),
        symptom="worse; also in the gpt-oss v3 case of ids-hard-coded",
        threads="vllm#38111 vllm#46488 vllm#42764 vllm#36545 vllm#43482 speculators#337 speculators#347 "
        "speculators#670 Automodel#2897 TensorRT-LLM#14988",
    ),
    Fault(
        "norm-output",
        35,
        "draft steps are fed the state before the final norm where training fed it after, or the reverse",
        "norm_output changed its meaning in SpecForge in July 2026; it defaults to true there, not in SGLang",
        ("config", "replay"),
        "set norm_output to what replay shows was trained",
        2,
        ("replay:norm-output", "check:exposure-bias", "check:runtime-mismatch"),
        inferred="that positions from the second on suffer: no number was published",
        threads="vllm#46488",
        source="SpecForge#879, commit b7ce50cd",
    ),
    Fault(
        "teacher-norm",
        36,
        "the teacher's final norm is missing or applied twice in training",
        "vLLM's last state is before the norm, transformers' after it",
        ("stored data",),
        "apply the norm once",
        1,
        ("check:teacher-norm",),
        symptom="25 % -> 40 % on gpt-oss-20b math",
        threads="speculators#313 Model-Optimizer#1846",
    ),
    Fault(
        "engine-residual-or-extra-norm",
        37,
        "the engine's drafter has another residual, an extra norm, no KV of its own, or other positions",
        "a port of the drafter's forward with one step wrong",
        ("replay",),
        "patch the engine",
        5,
        ("replay:engine-residual-or-extra-norm", "check:runtime-mismatch", "rung:5"),
        symptom="greedy .308 -> .619; 1.4 -> 1.8; 1.3 % -> 20 %; 2 to 5 %",
        threads="vllm#11672 vllm#14464 ik_llama.cpp#2322",
    ),
)
