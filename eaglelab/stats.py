"""FeatureStats: one pass over rows of hidden states, in constant memory, mergeable.

A stored training set is far larger than memory (10,000 samples of 2,000 tokens at width 21,504 are 860 GB),
so nothing here keeps rows. Shards may be read on several machines: `save` each state, `load` and `merge` them
in any order. Quantiles are exact for bf16 rows; float32 and float16 rows are counted by their bf16 rounding,
while their moments and extremes are those of the values themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eaglelab import accumulate
from eaglelab.accumulate import PATTERNS, Array, Moments, quantile, to_bf16
from eaglelab.errors import BadInput
from eaglelab.tensorfile import to_float32

FORMAT = "eaglelab.stats/1"
QUANTILES = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
# A dimension is an outlier of its chunk if
# - its rms is over 6 times the chunk's median rms: it then carries more energy than 36 ordinary dimensions
#   and decides norms, cosines and the rounding of bf16 sums; or
# - its peak is over 1,000 times the chunk's median magnitude: a massive activation (Sun et al. 2024), which
#   sits on a few tokens only (the first one, separators) and so may leave the rms as it was.
OUTLIER_RMS = 6.0
OUTLIER_PEAK = 1000.0

_TILE = 1 << 17  # values worked on at once, so that their float64 copies stay in the processor's cache


@dataclass(frozen=True)
class Outlier:
    """A dimension (index within its chunk) that stands out; the ratios are what the rule compares."""

    dimension: int
    rms: float
    peak: float
    rms_ratio: float
    peak_ratio: float


@dataclass(frozen=True)
class Spread:
    """A distribution in a few numbers; `quantiles` are exact for the bf16 rounding of the values."""

    count: int
    mean: float
    sd: float
    low: float
    high: float
    quantiles: dict[float, float]


@dataclass(frozen=True)
class ChunkStats:
    """One chunk of H dimensions. Values and norms are the finite ones; what was not finite is counted."""

    name: str
    rows: int
    width: int
    values: Spread
    norms: Spread  # euclidean norms of rows without a non-finite value
    nan: int
    inf: int
    nonfinite_share: float
    nonfinite_rows: int
    constant_dimensions: int
    outliers: tuple[Outlier, ...]


class FeatureStats:
    """Statistics of rows [n, width], width = chunks * H.

    Per dimension: `count`, `mean`, `variance`, `low`, `high`, all of the finite values. Per chunk:
    `chunk(i)`, `quantile(i, q)`, `outliers(i)`. The state is five numbers a dimension and 1 MB a chunk.
    """

    def __init__(self, width: int, chunks: int = 1, names: Sequence[str] | None = None) -> None:
        if width < 1 or chunks < 1 or width % chunks:
            raise BadInput(f"width {width} cannot be split into {chunks} equal chunks")
        if names is not None and len(names) != chunks:
            raise BadInput(f"{len(names)} names were given for {chunks} chunks: {list(names)}")
        self.width, self.chunks, self.hidden = width, chunks, width // chunks
        self.names = tuple(names) if names else tuple(f"chunk {i}" for i in range(chunks))
        self.rows = 0
        self.dtypes: set[str] = set()
        self.dimensions = Moments(width)
        self.norms = Moments(chunks)
        self.value_counts = np.zeros((chunks, PATTERNS), np.int64)  # by bf16 bit pattern
        self.norm_counts = np.zeros((chunks, PATTERNS), np.int64)

    count = property(lambda self: self.dimensions.count)
    mean = property(lambda self: self.dimensions.mean)
    variance = property(lambda self: self.dimensions.variance)
    low = property(lambda self: self.dimensions.low)
    high = property(lambda self: self.dimensions.high)

    def update(self, rows: Any, threads: int = 1) -> FeatureStats:
        """Add rows [n, width] or [n, chunks, H].

        numpy uint16 (bits of bf16), float16 or float32, or a torch tensor of bfloat16, float16 or float32
        (brought to the CPU). `threads` share the chunks. Give hundreds of rows at a time: each call has a
        fixed cost."""
        array, dtype = as_array(rows)
        array = array.reshape(len(array), -1) if array.ndim == 3 else array
        if array.ndim != 2 or array.shape[1] != self.width:
            raise BadInput(f"rows have shape {list(array.shape)}; these statistics are of width {self.width}")
        if len(array):
            if threads > 1 and self.chunks > 1:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(lambda c: self._update_chunk(c, array), range(self.chunks)))
            else:
                for c in range(self.chunks):
                    self._update_chunk(c, array)
            self.rows += len(array)
            self.dtypes.add(dtype)
        return self

    @np.errstate(invalid="ignore", over="ignore")  # signalling NaN; norms beyond bf16
    def _update_chunk(self, c: int, array: Array) -> None:
        step = min(self.hidden, 1024)
        tall = min(max(_TILE // step, 1), len(array))
        x64, scratch = np.empty(tall * step), np.empty(tall * step)
        patterns = np.empty(tall * step, np.intp)
        for top in range(0, len(array), tall):
            height = min(tall, len(array) - top)
            squares = np.zeros(height)
            for left in range(c * self.hidden, (c + 1) * self.hidden, step):
                right = min(left + step, (c + 1) * self.hidden)
                tile = array[top : top + height, left:right]
                x, d, p = (b[: tile.size].reshape(tile.shape) for b in (x64, scratch, patterns))
                x[...] = to_float32(tile, "bfloat16") if tile.dtype == np.uint16 else tile
                p[...] = tile if tile.dtype == np.uint16 else to_bf16(tile)
                self.value_counts[c] += accumulate.count_patterns(p)
                squares += np.einsum("ij,ij->i", x, x)
                self.dimensions.add_values(slice(left, right), x, d)
            norms = np.sqrt(squares)[:, None]
            self.norms.add_values(slice(c, c + 1), norms, np.empty_like(norms))
            bits = to_bf16(norms[np.isfinite(norms)].astype(np.float32))
            self.norm_counts[c] += accumulate.count_patterns(bits)

    def merge(self, other: FeatureStats) -> FeatureStats:
        """Add what `other` has seen, as if its rows had been given to this one. Returns self."""
        if (other.width, other.chunks) != (self.width, self.chunks):
            theirs, mine = (f"width {s.width} in {s.chunks} chunks" for s in (other, self))
            raise BadInput(f"statistics of {theirs} cannot be merged into {mine}")
        self.rows, self.dtypes = self.rows + other.rows, self.dtypes | other.dtypes
        self.dimensions.merge(other.dimensions)
        self.norms.merge(other.norms)
        self.value_counts += other.value_counts
        self.norm_counts += other.norm_counts
        return self

    def quantile(self, c: int, q: float) -> float:
        """Of chunk c's values, by `accumulate.quantile`."""
        return quantile(self.value_counts[c], q)

    def outliers(self, c: int) -> list[Outlier]:
        """Dimensions of chunk c that stand out by OUTLIER_RMS or OUTLIER_PEAK, the largest rms first."""
        part = slice(c * self.hidden, (c + 1) * self.hidden)
        m = self.dimensions
        rms = np.nan_to_num(np.sqrt(m.mean[part] ** 2 + m.variance[part]))
        peak = np.where(m.count[part] > 0, np.maximum(np.abs(m.low[part]), np.abs(m.high[part])), 0)
        median = accumulate.median_magnitude(self.value_counts[c])
        with np.errstate(divide="ignore", invalid="ignore"):
            by_rms, by_peak = np.nan_to_num(rms / np.median(rms)), np.nan_to_num(peak / median)
        found = np.flatnonzero((by_rms > OUTLIER_RMS) | (by_peak > OUTLIER_PEAK))
        rank = found[np.argsort(-rms[found], kind="stable")]
        return [Outlier(int(i), *(float(a[i]) for a in (rms, peak, by_rms, by_peak))) for i in rank]

    def chunk(self, c: int) -> ChunkStats:
        part = slice(c * self.hidden, (c + 1) * self.hidden)
        total, seen = self.rows * self.hidden, int(self.dimensions.count[part].sum())
        nan = total - accumulate.without_nan(self.value_counts[c])
        values, norms = (
            Spread(*moments.pooled(where), {q: quantile(counts[c], q) for q in QUANTILES})
            for moments, where, counts in (
                (self.dimensions, part, self.value_counts),
                (self.norms, slice(c, c + 1), self.norm_counts),
            )
        )
        m = self.dimensions
        constant = (m.low[part] == m.high[part]) & (m.count[part] > 1)
        return ChunkStats(
            name=self.names[c],
            rows=self.rows,
            width=self.hidden,
            values=values,
            norms=norms,
            nan=nan,
            inf=total - seen - nan,
            nonfinite_share=(total - seen) / total if total else 0.0,
            nonfinite_rows=self.rows - norms.count,
            constant_dimensions=int(constant.sum()),
            outliers=tuple(self.outliers(c)),
        )

    def summary(self) -> str:
        """One line a chunk: name, shape, dtype, range, mean, sd, row norms, then what deserves a warning."""
        dtype = "+".join(sorted(self.dtypes)) or "no rows"
        return "\n".join(_line(self.chunk(c), dtype) for c in range(self.chunks))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state as safetensors (its facts as JSON in the header), atomically."""
        facts = {"format": FORMAT, "width": self.width, "chunks": self.chunks, "names": self.names}
        facts |= {"rows": self.rows, "dtypes": sorted(self.dtypes)}
        partial = Path(f"{path}.partial")
        try:
            save_file(self._state(), partial, {"stats": json.dumps(facts)})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _state(self) -> dict[str, Array]:
        state = {"value_counts": self.value_counts, "norm_counts": self.norm_counts}
        for prefix, moments in (("dimensions", self.dimensions), ("norms", self.norms)):
            state |= {f"{prefix}.{f}": getattr(moments, f) for f in Moments.FIELDS}
        return state

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureStats:
        """Read a state that `save` wrote. Raises BadInput naming file and field."""
        try:
            with safe_open(path, framework="np") as file:
                facts = json.loads((file.metadata() or {}).get("stats", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise BadInput(f"{path}: not readable as statistics: {error}") from error
        if facts.get("format") != FORMAT:
            raise BadInput(f"{path}: format is {facts.get('format')!r}, expected {FORMAT!r}")
        try:
            stats = cls(facts["width"], facts["chunks"], facts["names"])
            stats.rows, stats.dtypes = int(facts["rows"]), set(facts["dtypes"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{path}: a fact in its header is missing or wrong: {error!r}") from error
        for name, mine in stats._state().items():
            if name not in tensors or tensors[name].shape != mine.shape or tensors[name].dtype != mine.dtype:
                raise BadInput(f"{path}: field {name!r} is missing or does not fit width {stats.width}")
            mine[...] = tensors[name]
        return stats


def merged(parts: Iterable[FeatureStats]) -> FeatureStats:
    """The statistics of several shards as one. The parts are left as they are."""
    total: FeatureStats | None = None
    for part in parts:
        total = total or FeatureStats(part.width, part.chunks, part.names)
        total.merge(part)
    if total is None:
        raise BadInput("no statistics to merge")
    return total


def summary(rows: Any) -> str:
    """One line on an array or tensor [..., width]: `[2000, 7168] bfloat16 | -31.5 .. 300 | mean 0.01 ...`."""
    array, dtype = as_array(rows)
    flat = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    stats = FeatureStats(flat.shape[1], names=[""]).update(flat)
    return _line(stats.chunk(0), dtype, list(array.shape))


def as_array(rows: Any) -> tuple[Array, str]:
    """A numpy view or CPU copy of rows, and the name of their dtype; bf16 as uint16 bits."""
    if type(rows).__module__.startswith("torch"):
        import torch

        tensor = rows.detach().cpu()
        bf16 = tensor.dtype == torch.bfloat16
        rows = tensor.view(torch.int16).numpy().view(np.uint16) if bf16 else tensor.numpy()
    dtype = {"uint16": "bfloat16"}.get(rows.dtype.name, rows.dtype.name)
    if dtype not in ("bfloat16", "float16", "float32"):
        raise BadInput(f"rows are {dtype}; hidden states are uint16 (bits of bfloat16), float16 or float32")
    return rows, dtype


def _line(c: ChunkStats, dtype: str, shape: Sequence[int] | None = None) -> str:
    v = c.values
    parts = [
        f"{c.name} {list(shape or (c.rows, c.width))} {dtype}".strip(),
        f"{v.low:.4g} .. {v.high:.4g}",
        f"mean {v.mean:.4g} sd {v.sd:.4g}",
        f"row norm {c.norms.mean:.4g} sd {c.norms.sd:.3g}",
    ]
    warnings = (
        (c.nan, f"NaN x{c.nan}"),
        (c.inf, f"inf x{c.inf}"),
        (c.constant_dimensions, f"{c.constant_dimensions} constant dims"),
        (c.outliers, f"{len(c.outliers)} outlier dims"),
    )
    return " | ".join(parts + [text for flag, text in warnings if flag])
