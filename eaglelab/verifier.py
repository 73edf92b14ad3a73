"""What the target thought along a captured text: re-prefilled states after the final norm x its head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from eaglelab.capture import to_float32
from eaglelab.errors import BadInput

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.checkpoint import TargetModel


class Verifier:
    """The target's logits at any place of a re-prefilled text, in float32.

    They are those of a prefill; a server's verify may round otherwise, so a near-tie can fall either way.
    """

    def __init__(self, capture: Capture, target: TargetModel):
        self.capture, self.target = capture, target

    @cached_property
    def head(self) -> torch.Tensor:
        """[vocab, hidden]; BadInput where the target's files hold no head."""
        return self.target.load("lm_head.weight", torch.float32)

    def knows(self, rid: str, position: int) -> bool:
        """Whether the target's choice of the token at `position` can be said."""
        again = self.capture.reprefill.get(rid)
        return again is not None and 1 <= position <= len(again.token_ids)

    @torch.no_grad()
    def logits(self, rid: str, positions: Sequence[int]) -> torch.Tensor:
        """[positions, vocab]: for the tokens there, each given the text before it.

        BadInput where one is not known.
        """
        if unknown := [p for p in positions if not self.knows(rid, p)]:
            raise BadInput(f"request {rid}: the text up to position {unknown[0] - 1} was not re-prefilled")
        again = self.capture.reprefill[rid]
        rows = again.final[[p - 1 for p in positions]]
        return _scaled(torch.from_numpy(to_float32(rows, again.dtype)) @ self.head.T, self.target.config)


def _scaled(logits: torch.Tensor, config: dict) -> torch.Tensor:
    """What some architectures do behind the head (Gemma 2 and later, Cohere, Granite)."""
    text = config.get("text_config") or config
    if text.get("logits_scaling"):
        logits = logits / text["logits_scaling"]
    if text.get("logit_scale"):
        logits = logits * text["logit_scale"]
    if cap := text.get("final_logit_softcapping"):
        logits = torch.tanh(logits / cap) * cap
    return logits
