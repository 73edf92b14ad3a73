"""The catalogue: what goes wrong between an EAGLE-3 trainer and an inference server, fault by fault.

Collected from public issues and pull requests of trainers and engines, and from reading their sources. It is
data, kept as Python: prose stays editable, the type checker and a test hold it together, and it needs no
reader (YAML's is no base dependency, TOML's is not in Python 3.10). One module a section, with one tuple
`FAULTS`.

Provenance: what was read in a public thread is in `threads`, what was read in source code in `source`, and
what is only inferred is said in `inferred`. Numbers in `symptom` are those that the threads report.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from eaglelab.errors import BadInput

Signal = Literal["config", "tensors", "launch", "capture", "stored data", "replay", "log"]
SECTIONS = {  # module -> what its faults have in common
    "launch": "launch and algorithm choice",
    "weights": "weights, names and the vocabulary map",
    "layers": "which layers of the target",
    "norms": "norms, residual and feedback",
    "runtime": "capture and runtime state",
    "positions": "positions",
    "tokens": "tokens, template and data",
    "metrics": "metrics, and illusions of training",
    "mechanisms": "findings of a general mechanism, which stand for any fault that has no name here",
}
OWNERS = {  # project -> owner, where it is certain
    "sglang": "sgl-project", "SpecForge": "sgl-project", "vllm": "vllm-project",
    "speculators": "vllm-project", "vllm-ascend": "vllm-project", "llm-compressor": "vllm-project",
    "EAGLE": "SafeAILab", "Model-Optimizer": "NVIDIA", "TensorRT-LLM": "NVIDIA", "llama.cpp": "ggml-org",
    "mlc-llm": "mlc-ai", "dynamo": "ai-dynamo", "ik_llama.cpp": "ikawrakow",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One way to lose acceptance. `number`: its stable number in the collection; 0 for our own mechanisms.

    `detected_by`: what finds it today, as kind:name - cause:SLUG, check:SLUG, diff:FIELD (of Feed or Wiring),
    rung:N, command:NAME. Empty: `undetected` says why, and what would show it. `rung`: where the ladder puts
    it.
    """

    slug: str
    number: int
    title: str
    cause: str
    signals: tuple[Signal, ...]
    fix: str
    rung: int | None
    detected_by: tuple[str, ...] = ()
    undetected: str = ""
    symptom: str = ""
    threads: str = ""  # "sglang#21272 vllm#18909": issues and pull requests, read there
    source: str = ""
    inferred: str = ""

    @property
    def detected(self) -> Literal["yes", "partly", "no"]:
        """Whether something finds it today."""
        return "no" if not self.detected_by else "partly" if self.undetected else "yes"

    @property
    def references(self) -> list[str]:
        """Each thread as an address where its project's owner is known, else as project#number."""
        return [_address(name) for name in self.threads.split()]


def _address(reference: str) -> str:
    project, _, number = reference.partition("#")
    if project not in OWNERS or not number:
        return reference
    return f"https://github.com/{OWNERS[project]}/{project}/issues/{number}"


def sections() -> dict[str, tuple[Fault, ...]]:
    """Every section's faults, by the section's module name."""
    return {name: import_module(f"{__name__}.{name}").FAULTS for name in SECTIONS}


def faults() -> dict[str, Fault]:
    """Every fault by its slug."""
    return {fault.slug: fault for section in sections().values() for fault in section}


def find(slug: str) -> Fault:
    """One fault. BadInput with the nearest slugs if there is none of this name."""
    known = faults()
    if slug in known:
        return known[slug]
    close = difflib.get_close_matches(slug, known, n=3, cutoff=0.4)
    close += [s for s in known if slug.lower() in s and s not in close][:3]
    hint = f"did you mean {', '.join(close)}?" if close else "`eaglelab faults` lists them"
    raise BadInput(f"fault {slug!r}: there is none of this name; {hint}")
