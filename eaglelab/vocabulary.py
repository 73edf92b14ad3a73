"""The map of a reduced vocabulary, draft id to target id, in the two forms that files hold it.

Every engine and trainer read takes `d2t` as offsets: target id = draft id + d2t[draft id] (sglang 0.5.23
models/llama_eagle3.py load_weights; vllm models/llama_eagle3.py compute_logits; EAGLE traineagle3/cnets.py).
A file may hold the target ids themselves all the same; it is then read rightly here and wrongly by engines.
"""

from __future__ import annotations

import numpy as np

from eaglelab.tensorfile import TensorInfo, hold


def as_offsets(d2t: TensorInfo, t2d: TensorInfo | None, vocab_size: int) -> tuple[TensorInfo, bool]:
    """-> (d2t as offsets, whether the file holds target ids instead).

    Offsets unless target ids are proven: strictly rising, inside the vocabulary, and either equal to the
    marked ids of `t2d` where the offsets are not, or, without t2d, offsets that would leave the vocabulary.
    """
    values = d2t.array().astype(np.int64)
    index = np.arange(len(values))
    if not len(values) or values.min() < 0 or values.max() >= vocab_size or (np.diff(values) <= 0).any():
        return d2t, False
    moved = values + index
    if t2d is None:
        absolute = bool(moved.max() >= vocab_size)
    else:
        marked = np.flatnonzero(t2d.array())
        absolute = np.array_equal(values, marked) and not np.array_equal(moved, marked)
    if not absolute:
        return d2t, False
    return hold(d2t.name_in_file, d2t, (values - index).astype(d2t.array().dtype)), True
