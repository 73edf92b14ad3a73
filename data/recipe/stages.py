"""The stages of the recipe, in order: each reads what earlier ones left in the scratch folder.

The libraries that train are imported within the stages, so that `make.py --help` is quick.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent
PRODUCTS = ("target", "drafter-speculators", "drafter-sglang", "prompts.jsonl", "features", "golden-capture")
Figures = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """Where a run works. `smoke`: a toy of everything in a minute, to try the recipe itself."""

    scratch: Path
    data: Path
    smoke: bool = False

    def blocks(self) -> tuple[list[str], list[str]]:
        """(training, held-out) blocks of text."""
        import corpus

        return corpus.blocks(corpus.fetch(self.scratch))

    def load_target(self) -> tuple[Any, Any]:
        """The target in float32, and its tokenizer."""
        import torch
        from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

        path = self.scratch / "target"
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return model, PreTrainedTokenizerFast.from_pretrained(path)


def fetch_novels(work: Work) -> Figures:
    """Fetch the novels out of Debian's r-cran-janeaustenr."""
    training, held_out = work.blocks()
    return {"training_characters": sum(map(len, training)), "held_out_characters": sum(map(len, held_out))}


def train_target(work: Work) -> Figures:
    """Train tokenizer and target (13 minutes)."""
    import target

    return target.train(*work.blocks(), work.scratch / "target", steps=12 if work.smoke else 1400)


def write_texts(work: Work) -> Figures:
    """Write the drafter's training texts and the target's hidden states on them (3 minutes, 0.6 GB)."""
    import features
    import target

    model, tokenizer = work.load_target()
    amount = {"book": 16, "own": 48} if work.smoke else {}
    made = features.training_texts(model, target.encode(tokenizer, work.blocks()[0]), **amount)
    features.store(model, made, work.scratch / "texts", frequencies=True)
    return {"texts": len(made), "tokens_each": features.LENGTH}


def train_drafter(work: Work) -> Figures:
    """Train the drafter with speculators' own trainer (5 minutes)."""
    import drafter

    return drafter.train(
        work.scratch / "target", work.scratch / "texts", work.scratch / "drafter-speculators"
    )


def convert_drafter(work: Work) -> Figures:
    """Write the drafter as SGLang loads it."""
    from eaglelab.convert import convert

    out = work.scratch / "drafter-sglang"
    shutil.rmtree(out, ignore_errors=True)
    convert(work.scratch / "drafter-speculators", out, to="sglang", target=work.scratch / "target")
    return {}


def write_prompts(work: Work) -> Figures:
    """Write the held-out prompts, and the stored features of the target's greedy text on others."""
    import features
    import prompts

    model, tokenizer = work.load_target()
    held_out = work.blocks()[1]
    lines = prompts.for_server(tokenizer, held_out)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (work.scratch / "prompts.jsonl").write_text(text)
    begun = prompts.for_features(tokenizer, held_out)
    greedy = features.continued(model, begun, 192, do_sample=False)
    made = [(row, prompts.SHORTEST) for row in features.least_repetitive(greedy, 4)]
    features.store(model, made, work.scratch / "features")
    features.describe(model, made, work.scratch / "features")
    return {"prompts": len(lines), "stored_samples": len(made)}


def measure_servers(work: Work) -> Figures:
    """Measure accept lengths on genuine SGLang: EAGLE3, EAGLE, and a tree (3 minutes)."""
    import measure

    return {"servers": {} if work.smoke else measure.measure(work.scratch)}


def capture_golden(work: Work) -> Figures:
    """Capture two requests on genuine SGLang under EAGLE3."""
    import measure

    remove(work.scratch / "golden-capture")
    return {"events": measure.capture(work.scratch, work.scratch / "golden-capture")}


def install(work: Work) -> Figures:
    """Put the products into data/."""
    for name in PRODUCTS:
        source, partial, final = work.scratch / name, work.data / f"{name}.partial", work.data / name
        remove(partial)
        if source.is_dir():
            shutil.copytree(source, partial, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, partial)
        remove(final)
        partial.rename(final)
    figures = {
        name: json.loads((work.scratch / f"done-{name}.json").read_text()) for name in list(STAGES)[:-1]
    }
    (work.data / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    return {"installed": list(PRODUCTS)}


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


STAGES: dict[str, Callable[[Work], Figures]] = {
    "novels": fetch_novels,
    "target": train_target,
    "texts": write_texts,
    "drafter": train_drafter,
    "convert": convert_drafter,
    "prompts": write_prompts,
    "measure": measure_servers,
    "capture": capture_golden,
    "install": install,
}
