"""The real `speculators train` on a CPU, going on from a drafter with a head of its own: `finetune.py FLAGS`.

speculators freezes the head to the target's rows and fills it from there; the shipped drafter trained its own
(data/README.md), which must stay. The shims for the CPU are the recipe's.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "data" / "recipe"))

import speculators.train.trainer as trainer  # noqa: E402
import speculators_cpu  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


class TrainerOfOwnHead(speculators_cpu.trainer.Trainer):
    """Before the optimizer is made, put the drafter's own head back and let it train."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        start = Path(sys.argv[sys.argv.index("--from-pretrained") + 1])
        model.lm_head.weight.data.copy_(load_file(start / "model.safetensors")["lm_head.weight"])
        model.lm_head.weight.requires_grad_(True)
        super().__init__(model, *args, **kwargs)


if __name__ == "__main__":
    trainer.Trainer = TrainerOfOwnHead  # type: ignore[misc]
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig

    main(TrainConfig.resolve(sys.argv[1:]))
