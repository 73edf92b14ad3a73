"""Token ids as text, with the target's own tokenizer where its folder has one: `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.errors import BadInput
from eaglelab.tensorfile import read_json

SHOWN = 48  # characters


@dataclass(frozen=True)
class Words:
    """`special`: ids of special tokens; `_tokenizer`: of the tokenizers library, None without it."""

    special: frozenset[int] = frozenset()
    _tokenizer: Any = None

    @classmethod
    def of(cls, folder: Path | None) -> Words:
        """The tokenizer of a folder; an empty one where there is none."""
        path = folder / "tokenizer.json" if folder and folder.is_dir() else None
        if path is None or not path.is_file():
            return cls()
        try:
            added = read_json(path).get("added_tokens") or []
            special = frozenset(int(t["id"]) for t in added if t.get("special"))
            from tokenizers import Tokenizer

            return cls(special, Tokenizer.from_file(str(path)))
        except ImportError:
            return cls(special)
        except (BadInput, TypeError, KeyError, ValueError, AttributeError):
            return cls()
        except Exception:  # what tokenizers raises is its own
            return cls(special)

    def text(self, ids: Sequence[int] | Array) -> str:
        """The text of these tokens, shortened in the middle; the ids themselves without a tokenizer."""
        some = [int(i) for i in ids]
        if self._tokenizer is None:
            return str(some[:12])[:-1] + (", ...]" if len(some) > 12 else "]")
        whole = self._tokenizer.decode(some, skip_special_tokens=False)
        return repr(whole if len(whole) <= 2 * SHOWN else f"{whole[:SHOWN]} ... {whole[-SHOWN:]}")

    def show(self, masks: Mapping[int, Array], ids: Sequence[Array], most: int = 2) -> list[str]:
        """What the first masks leave out and cover, as text."""
        lines = []
        for i, mask in list(masks.items())[:most]:
            on = np.flatnonzero(mask)
            if len(on):
                start = int(on[0])
                end = int(np.flatnonzero(~mask[start:])[0]) + start if not mask[start:].all() else len(mask)
                before, covered = self.text(ids[i][max(0, start - 24) : start]), self.text(ids[i][start:end])
                lines.append(f"sample {i}: trained on from token {start}: {covered}; before it: {before}")
        return lines
