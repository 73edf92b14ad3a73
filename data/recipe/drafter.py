"""The drafter: trained by speculators' own trainer, in its own process, as its users train theirs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from features import LAYERS

STEPS = 5  # of drafting that are trained ("training-time test"), and that the server drafts
DRAFT_VOCAB = 640
FLAGS = f"""
    --speculator-type eagle3 --draft-arch llama --num-layers 1 --full-attention-indices 0
    --target-layer-ids {" ".join(map(str, LAYERS))} --draft-vocab-size {DRAFT_VOCAB}
    --no-norm-before-residual --norm-before-fc --norm-output --ttt-steps {STEPS}
    --draft-attn-impl eager --loss-implementation eager --loss-fn kl_div --hidden-states-dtype float32
    --epochs 1 --total-seq-len 512 --train-data-ratio 0.95 --num-workers 0 --on-missing raise
    --optimizer muon --lr 4e-3 --muon-lr 5e-3 --scheduler-type linear
    --log-freq 50 --no-resume-from-checkpoint
""".split()


def train(target: Path, texts: Path, out: Path) -> dict[str, float]:
    """Train on the stored texts (about 5 minutes) and leave config, weights and val_metrics.json in out."""
    work = out.resolve().with_name(out.name + ".work")
    shutil.rmtree(work, ignore_errors=True)
    script = Path(__file__).with_name("speculators_cpu.py")
    paths = {
        "--verifier-name-or-path": target,
        "--data-path": texts,
        "--save-path": work,
        "--log-dir": work / "logs",
    }
    where = [text for flag, path in paths.items() for text in (flag, str(path.resolve()))]
    subprocess.run([sys.executable, script, *where, *FLAGS], check=True)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for name in ("config.json", "model.safetensors", "val_metrics.json"):
        shutil.copy(work / "0" / name, out / name)
    # The trainer writes the absolute path of the target; in data/ it lies beside the drafter.
    config = json.loads((out / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "../target"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    metrics = json.loads((out / "val_metrics.json").read_text())
    accuracies = {name: value for name, value in metrics.items() if "acc" in name}
    return {name.removesuffix("_epoch"): round(value, 4) for name, value in accuracies.items()}
