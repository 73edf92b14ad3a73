"""Drafters that were really trained otherwise: the shipped one, fine-tuned by speculators' own trainer.

Each is made once, in a minute or two, into .cache/faultbench (ignored by git), on texts that the target
writes itself, each from one token of its vocabulary, so that no held-out prompt is among them. `python -m
faultbench.variants` in tests/ makes them all, with progress.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafters import merge

from .cases import DATA, ROOT, SPECULATORS, TARGET

RECIPE = DATA / "recipe"
CACHE = ROOT / ".cache" / "faultbench"
TEXTS, LENGTH, START = 256, 256, 1  # texts, tokens of each, of which given
STEPS = 5  # of drafting that are trained
FLAGS = f"""
    --speculator-type eagle3 --ttt-steps {STEPS} --draft-attn-impl eager --loss-implementation eager
    --loss-fn kl_div --hidden-states-dtype float32 --total-seq-len 512 --train-data-ratio 0.97
    --num-workers 0 --on-missing raise --optimizer muon --lr 2e-3 --muon-lr 3e-3 --scheduler-type linear
    --log-freq 20 --no-resume-from-checkpoint
""".split()
# Large buffers go back to the system at every step otherwise: half of the time.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
Say = Callable[[str], None]
# Of the trainer's config (nested as there): what each was trained with.
EPOCHS = {"theta": 3}  # of the texts; 1 else. A drafter that still remembers its old rope is a weak one
VARIANTS: dict[str, dict[str, Any]] = {
    "residual-normed": {"norm_before_residual": True},
    "feedback-raw": {"norm_output": False},
    "norm-per-chunk": {"norm_before_fc": False, "fc_norm": True},
    "theta": {"transformer_layer_config": {"rope_parameters": {"rope_theta": 30.0, "rope_type": "default"}}},
    "qk-norms": {"transformer_layer_config": {"model_type": "qwen3"}},
}


def variant(name: str, say: Say = print) -> Path:
    """The folder of one, in the trainer's form; made if it is not there."""
    out = CACHE / f"{name}-{_key([VARIANTS[name], _flags(name)])}"
    if not (out / "config.json").exists():
        began = time.monotonic()
        say(f"training the variant {name} ({EPOCHS.get(name, 1)} x {TEXTS} texts)")
        _train(out, name, texts(say))
        say(f"trained {name} in {time.monotonic() - began:.0f} s: {accuracy(out)}")
    return out


def accuracy(folder: Path) -> str:
    """The trainer's own validation: right among all, step by step."""
    metrics = json.loads((folder / "val_metrics.json").read_text())
    found = {n: v for n, v in metrics.items() if n.startswith("full_acc")}
    return ", ".join(f"{value:.3f}" for _, value in sorted(found.items()))


def _flags(name: str) -> list[str]:
    return [*FLAGS, "--epochs", str(EPOCHS.get(name, 1))]


def _key(what: Any) -> str:
    files = [SPECULATORS / "model.safetensors", TARGET / "model.safetensors"]
    seen = [what, TEXTS, LENGTH, *(hashlib.sha256(f.read_bytes()).hexdigest() for f in files)]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:10]


def texts(say: Say = print) -> Path:
    """Stored texts and states to train on, in the trainer's own format."""
    out = CACHE / f"texts-{_key('texts')}"
    if (out / "dataset_info.json").exists():
        return out
    import torch
    from transformers import LlamaForCausalLM

    sys.path.insert(0, str(RECIPE))
    import features

    say(f"writing {TEXTS} texts of the target to train variants on")
    model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    torch.manual_seed(1)
    first = torch.randint(10, 1024, (TEXTS, START))
    ways: list[dict[str, Any]] = [
        {"do_sample": True, "temperature": 0.8, "top_k": 0},
        {"do_sample": False},
    ]
    with torch.no_grad():
        halves = [
            features.continued(model, some, LENGTH, **way)
            for some, way in zip(first.chunk(2), ways, strict=True)
        ]
    made = torch.cat(halves)[torch.randperm(TEXTS)]
    partial = out.with_suffix(".partial")
    features.store(model, [(row, START) for row in made], partial)
    partial.rename(out)
    return out


def _train(out: Path, name: str, data: Path) -> None:
    work = out.with_suffix(".partial")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(SPECULATORS, work / "from")
    values = json.loads((work / "from" / "config.json").read_text())
    values["speculators_config"]["verifier"]["name_or_path"] = str(TARGET)
    values["dtype"] = "float32"  # the trainer multiplies float32 states with the weights as they are
    merge(values, VARIANTS[name])
    (work / "from" / "config.json").write_text(json.dumps(values))
    where = {
        "--verifier-name-or-path": TARGET,
        "--from-pretrained": work / "from",
        "--data-path": data,
        "--save-path": work / "saved",
        "--log-dir": work / "logs",
    }
    command = [sys.executable, str(Path(__file__).with_name("finetune.py"))]
    command += [text for flag, path in where.items() for text in (flag, str(path))] + _flags(name)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | MALLOC
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the trainer failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    saved = work / "saved" / str(EPOCHS.get(name, 1) - 1)
    for path in saved.iterdir():
        if path.name not in ("config.json", "model.safetensors", "val_metrics.json"):
            path.unlink()
    shutil.rmtree(out, ignore_errors=True)
    saved.rename(out)
    shutil.rmtree(work)


if __name__ == "__main__":
    for one in sys.argv[1:] or VARIANTS:
        variant(one, lambda line: print(line, flush=True))
