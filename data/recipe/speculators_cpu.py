"""The real `speculators train` (0.9.0) on a machine without accelerator: `python speculators_cpu.py FLAGS`.

Two shims for the CPU, and one deliberate change: the drafter trains an lm_head of its own from a fresh
initialisation, where speculators freezes it to the target's (data/README.md says why).
"""

import os
import sys
import warnings
from typing import Any

import speculators.train.trainer as trainer
import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
warnings.filterwarnings("ignore", message=".*pin_memory.*|.*CUDA is not available.*")
# The trainer moves the model to get_local_rank(), where 0 means "accelerator 0"; its timer synchronises one.
trainer.get_local_rank = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.accelerator.synchronize = lambda *_, **__: None  # type: ignore[assignment]


class TrainerOfOwnHead(trainer.Trainer):
    """Before the optimizer is made, give the drafter an lm_head of its own to train."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.init.normal_(model.lm_head.weight, std=0.02, generator=torch.Generator().manual_seed(7))
        model.lm_head.weight.requires_grad_(True)
        super().__init__(model, *args, **kwargs)


if __name__ == "__main__":
    trainer.Trainer = TrainerOfOwnHead  # type: ignore[misc]
    from speculators.train.cli import main  # only now: it imports the trainer's class by name
    from speculators.train.config import TrainConfig

    main(TrainConfig.resolve(sys.argv[1:]))
