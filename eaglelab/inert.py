"""Which differences between two wirings change nothing: proven by tensors, or else not claimed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eaglelab.checkpoint import Checkpoint, TargetModel
from eaglelab.tensorfile import TensorInfo, some_rows, to_float32
from eaglelab.wiring import Wiring

MANTISSA = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
EXPONENT = {"float16": 5, "bfloat16": 8, "float32": 8, "float64": 11}
RANGE = {"float16": (65504.0, 2.0**-14), "bfloat16": (3.38e38, 2.0**-126), "float32": (3.4e38, 2.0**-126)}
ROWS = 1 << 22  # numbers compared in one step

# What a difference means, where no tensor could make it harmless.
MEANING = {
    "depths": "the rows come from other layers of the target than the trainer's, or in another order",
    "width": "a row has another width than `fc` was trained on",
    "final_norm": "rows that went through the target's final norm, or should have",
    "basis": "the target's hidden states are in another basis",
    "fc": "without fc the target's rows stand in the drafter's place as they are",
    "residual": "the first residual is taken before or after hidden_norm",
    "feedback": "later steps are fed the hidden state before or after the final norm",
    "rope": "positions are rotated by other angles",
    "qk_norm": "queries and keys are normed on one side only",
    "layers": "another number of layers",
    "eps": "another epsilon in every norm",
    "max_positions": "texts beyond the smaller maximum are treated differently",
    "logits_width": "another number of tokens can be drafted",
    "token_shift": "rows are paired with other tokens",
    "step_offset": "draft steps stand at other positions than the text goes on at",
    "full_layers": "the window spares other layers",
    "tree_kv": "branches of a tree see other keys",
}


@dataclass(frozen=True)
class Evidence:
    """What can prove a difference harmless. `copy`: the drafter as the engine loads it."""

    trained: Wiring
    served: Wiring
    checkpoint: Checkpoint | None
    target: TargetModel | None
    copy: Checkpoint | None = None

    def weigh(self, name: str, a: Any, b: Any) -> tuple[bool, str]:
        """Whether `name`, `a` in training and `b` in serving, changes nothing; and why, or what it means."""
        rule = getattr(self, f"_{name}", None)
        return rule(a, b) if rule else (False, MEANING.get(name, "not the same"))

    def _depths(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[bool, str]:
        """The same depths in another order are harmless where the columns of fc were put in that order."""
        mine, theirs = (c.tensors.get("fc.weight") if c else None for c in (self.checkpoint, self.copy))
        if sorted(a) != sorted(b) or len(set(a)) < len(a) or None in (mine, theirs):
            return False, MEANING["depths"]
        before, after = (i.mapped().reshape(i.shape[0], len(a), -1) for i in (mine, theirs) if i)
        if before.shape != after.shape:
            return False, MEANING["depths"]
        moved = all(np.array_equal(after[:, i], before[:, a.index(depth)]) for i, depth in enumerate(b))
        return moved, "the columns of fc stand in that order too" if moved else MEANING["depths"]

    def _position_start(self, a: int, b: int) -> tuple[bool, str]:
        plain = dict(self.trained.rope.scaling).get("rope_type") != "dynamic"
        return plain, "rope is relative: the same shift of every position changes no attention score"

    def _dtype(self, a: str, b: str) -> tuple[bool, str]:
        """Fewer digits are rounding, which moves near-ties alone; a smaller range may lose whole numbers."""
        if EXPONENT.get(b, 0) < EXPONENT.get(a, 99):
            lost = self._lost(a, b)
            return not lost, lost or f"no number of the file leaves {b}'s range"
        if MANTISSA.get(b, 0) >= MANTISSA.get(a, 99):
            return True, f"every {a} number is exact in {b}"
        return True, f"rounded to {b}, which moves near-ties only"

    def _lost(self, a: str, b: str) -> str:
        """Tensors with numbers that are infinite in `b`, or vanish: more than one in a hundred."""
        for name, info in self.copy.tensors.items() if self.copy else ():
            if info.dtype != a:
                continue
            some = np.abs(to_float32(some_rows(info), a))
            some = some[some > 0]
            most, least = RANGE[b]
            if (some > most).any() or (some < least).mean() > 0.01:
                return f"numbers of {name} leave {b}'s range"
        return ""

    def _norm_before_fc(self, a: str, b: str) -> tuple[bool, str]:
        bypassed = self.trained.fc == self.served.fc == "bypassed"
        return (
            bypassed,
            "fc is bypassed" if bypassed else "even with weights of one it divides by the root mean square",
        )

    def _vocab_map(self, a: str, b: str) -> tuple[bool, str]:
        offsets = self.checkpoint.d2t if self.checkpoint else None
        zero = b != "misread" and offsets is not None and not offsets.any()
        return zero, "every offset in d2t is 0" if zero else "draft ids become other target ids"

    def _window(self, a: int | None, b: int | None) -> tuple[bool, str]:
        longest = max(self.trained.max_positions, self.served.max_positions)
        inside = longest > 0 and all(w is None or w >= longest for w in (a, b))
        return (
            inside,
            f"no text is longer than {longest}" if inside else "keys further back are seen on one side only",
        )

    def _window_moves(self, a: bool, b: bool) -> tuple[bool, str]:
        return True, "every engine moves the window on with its drafts: step j sees at most j keys fewer"

    def _embedding(self, a: str, b: str) -> tuple[bool, str]:
        mine, theirs = self._pair("embed_tokens.weight")
        if mine is None:
            return False, "the file has no embedding, and the target's is not used"
        if theirs is None:
            frozen = self.checkpoint is not None and self.checkpoint.settings.embedding_trained is False
            if frozen:
                return True, "by its config it was frozen to the target's (give --target to prove it)"
            return False, "not proven equal to the target's: give --target"
        same = equal_numbers(mine, theirs)
        return (
            same,
            f"the drafter's embedding {'equals' if same else 'is not'} the target's, number by number",
        )

    def _lm_head(self, a: str, b: str) -> tuple[bool, str]:
        if (a, b) == ("target", "own"):
            return self._shared_head(self.copy.tensors.get("lm_head.weight") if self.copy else None, "served")
        if b != "target":
            return (
                False,
                "nothing filled the head" if b == "initial" else f"the {b} head serves, not the trained one",
            )
        return self._shared_head(self._pair("lm_head.weight")[0], "drafter's")

    def _shared_head(self, mine: TensorInfo | None, whose: str) -> tuple[bool, str]:
        """Whether a head holds the target's rows at the ids that it stands for."""
        theirs = self._pair("lm_head.weight")[1]
        if mine is None or theirs is None:
            return False, "not proven equal to the target's: give --target"
        rows = None
        if self.served.vocab_map == "d2t" and self.checkpoint and self.checkpoint.d2t is not None:
            rows = np.arange(len(self.checkpoint.d2t)) + self.checkpoint.d2t
        same = equal_numbers(mine, theirs, np.arange(mine.shape[0]) if rows is None else rows)
        return same, f"the {whose} head {'equals' if same else 'is not'} the target's rows, number by number"

    def _pair(self, name: str) -> tuple[TensorInfo | None, TensorInfo | None]:
        mine = self.checkpoint.tensors.get(name) if self.checkpoint else None
        return mine, self.target.tensors.get(name) if self.target else None

    def _later_norm(self, a: str, b: str) -> tuple[bool, str]:
        later = range(1, self.trained.layers)
        if self.copy and all(
            self._renamed(f"layers.{n}.{a}.weight", f"layers.{n}.{b}.weight") for n in later
        ):
            return True, f"the file that is served holds its {a} as {b}"
        names = [f"layers.{n}.{kind}.weight" for n in later for kind in (a, b)]
        ones = self.checkpoint is not None and all(self._ones(name) for name in names)
        return ones, "both norms are ones" if ones else f"{b} is applied where {a} was trained"

    def _renamed(self, before: str, after: str) -> bool:
        """Whether the served file holds one tensor's numbers under another name."""
        mine = self.checkpoint.tensors.get(before) if self.checkpoint else None
        theirs = self.copy.tensors.get(after) if self.copy else None
        return mine is not None and theirs is not None and equal_numbers(mine, theirs)

    def _ones(self, name: str) -> bool:
        """Whether a norm's weight is all ones: in the file, or because nothing fills it."""
        info = self.checkpoint.tensors.get(name) if self.checkpoint else None
        return (
            bool((to_float32(info.array(), info.dtype) == 1).all()) if info else name in self.served.unloaded
        )

    def _unloaded(self, a: tuple[str, ...], b: tuple[str, ...]) -> tuple[bool, str]:
        """A norm that stays at ones is harmless only where the trainer's own norm there is ones too."""
        new = sorted(set(b) - set(a))
        for name in new:
            place = name.replace(self.served.later_norm, self.trained.later_norm)
            if place == name or name.startswith("layers.0.") or not self._ones(place):
                return False, f"nothing fills {name}: it keeps its initial value"
        return True, "every one is a norm that was trained to ones" if new else "all are filled"

    def _dropped(self, a: tuple[str, ...], b: tuple[str, ...]) -> tuple[bool, str]:
        """`b`: names in the file that is served."""
        for name in sorted(set(b) - set(a)):
            if name.endswith("inv_freq"):
                continue  # a buffer of rope, which older libraries saved: computed, not trained
            info = self.copy.tensors.get(name) if self.copy else None
            if info is None or not name.endswith(".bias") or info.array().any():
                return False, f"{name} was trained and has no effect"
        return True, "every one is a bias of zeros, or a buffer" if set(b) - set(a) else "all are used"

    def _attention_bias(self, a: bool, b: bool) -> tuple[bool, str]:
        return self._zero_biases("q_proj.bias", "k_proj.bias", "v_proj.bias")

    def _output_bias(self, a: bool, b: bool) -> tuple[bool, str]:
        return self._zero_biases("o_proj.bias")

    def _zero_biases(self, *ends: str) -> tuple[bool, str]:
        tensors = self.checkpoint.tensors if self.checkpoint else {}
        found = [info for name, info in tensors.items() if name.endswith(ends)]
        zero = bool(found) and not any(info.array().any() for info in found)
        return zero, "they are zeros" if zero else "they are added on one side only"


def equal_numbers(mine: TensorInfo, theirs: TensorInfo, rows: np.ndarray | None = None) -> bool:
    """Equal numbers, whatever the two dtypes; against those `rows` of `theirs` if given."""
    count = theirs.shape[0] if rows is None else len(rows)
    if mine.shape[1:] != theirs.shape[1:] or mine.shape[0] != count:
        return False
    if rows is not None and not (rows.min(initial=0) >= 0 and rows.max(initial=0) < theirs.shape[0]):
        return False
    a, b = mine.mapped(), theirs.mapped()
    step = max(1, ROWS // max(1, a[:1].size))
    for i in range(0, count, step):
        some, part = a[i : i + step], b[i : i + step] if rows is None else b[rows[i : i + step]]
        if mine.dtype == theirs.dtype and np.array_equal(some, part):
            continue  # the same bits, several times quicker than their numbers
        if not np.array_equal(to_float32(some, mine.dtype), to_float32(part, theirs.dtype)):
            return False
    return True
