"""What a trainer stored: the token ids and hidden states that the drafter was trained on, read lazily.

    speculators >= 0.5   FOLDER/                                    arrow dataset: input_ids, loss_mask
                         FOLDER/hidden_states/hs_<row>.safetensors  token_ids [S], hidden_states [S, k + 1, H]
    vLLM's connector     FOLDER/<request>.safetensors               the same two tensors, any file name
    four that pickle     see `pickled`; read only where that is allowed

Sources: speculators 0.9.0 train/data.py; vllm 0.21.0
kv_connector/v1/example_hidden_states_connector.py, which stores the layers that were asked for and no other,
ascending. The dataset is read if pyarrow is there. The last of the k + 1 layers is the verifier's state
(`StoredFeatures.last_is`: before its final norm or after it, as the format has it); the others are the chunks
that the drafter is fed, in feed order. The files do not say which depths these are: the
drafter's config does. Opening reads headers only, of pickled files those of the first few hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.errors import BadInput
from eaglelab.tensorfile import TensorInfo, read_header, read_json

STATE_DTYPES = ("bfloat16", "float16", "float32")
EXPONENT = {
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float32": (np.uint32, 0x7F800000),
}


@dataclass(frozen=True)
class Sample:
    """One stored text of S tokens: row i of the states is the target's, at the position of token i.

    A subclass a way of storing: it has `_ids` [S], `states` and `row`.
    """

    index: int  # row of the dataset
    path: Path
    dtype: str
    shape: tuple[int, ...]  # S, k + 1, H
    _of: StoredFeatures = field(repr=False, compare=False)

    @property
    def length(self) -> int:
        return self.shape[0]

    @property
    def _ids(self) -> Array:
        raise NotImplementedError

    @property
    def token_ids(self) -> Array:
        """[S] int64."""
        ids = self._ids.astype(np.int64)
        top = self._of.vocab_size
        if ids.min() < 0 or (top is not None and ids.max() >= top):
            spread = f"token_ids go from {ids.min()} to {ids.max()}, the vocabulary has {top}"
            raise BadInput(f"{self.path}: {spread}; stored with another tokenizer?")
        return ids

    @property
    def states(self) -> Array:
        """[S, k + 1, H] as stored (uint16 is bf16 bits), whatever it holds."""
        raise NotImplementedError

    @property
    def hidden(self) -> Array:
        """[S, k, H]: what the drafter is fed. BadInput unless finite."""
        return self._finite[:, :-1]

    @property
    def features(self) -> Array:
        """[S, k * H], a copy: the rows as a server hands them to the drafter."""
        return np.asarray(self.hidden).reshape(self.length, -1)

    @property
    def last(self) -> Array:
        """[S, H]: the verifier's last state, before the final norm. BadInput unless finite."""
        return self._finite[:, -1]

    @property
    def loss_mask(self) -> Array | None:
        """[S] bool: tokens that were trained on. None without the dataset (`StoredFeatures.no_loss_mask`)."""
        row = self.row
        if row is None:
            return None
        if not np.array_equal(row["input_ids"], self.token_ids):
            raise BadInput(
                f"{self.path}: token_ids are not input_ids of row {self.index} of the dataset in "
                f"{self._of.path}; speculators skips such a sample: store it again"
            )
        if len(row["loss_mask"]) != self.length:
            raise BadInput(f"{self._of.path}: row {self.index}: loss_mask is not as long as input_ids")
        return np.asarray(row["loss_mask"]).astype(bool)

    @property
    def row(self) -> dict[str, Array] | None:
        """input_ids and loss_mask as the trainer has them; None where no mask was stored."""
        raise NotImplementedError

    @property
    def _finite(self) -> Array:
        states = self.states
        if self.index not in self._of.known_finite:
            for top in range(0, self.length, 256):
                if bad := count_nonfinite(states[top : top + 256], self.dtype):
                    where = f"{bad} non-finite values from row {top} on"
                    raise BadInput(f"{self.path}: hidden_states: {where}; drop this sample or store it again")
            self._of.known_finite.add(self.index)
        return states


@dataclass(frozen=True)
class TensorSample(Sample):
    """Of a safetensors file, whose numbers are mapped and never all read at once."""

    _tokens: TensorInfo = field(repr=False)
    _states: TensorInfo = field(repr=False)

    @property
    def _ids(self) -> Array:
        return self._tokens.array()

    @property
    def states(self) -> Array:
        kind = EXPONENT[self.dtype][0] if self.dtype == "bfloat16" else self.dtype
        return np.memmap(self.path, kind, "r", self._states.offsets[0], self.shape)

    @property
    def row(self) -> dict[str, Array] | None:
        return None if self._of.rows is None else self._of.rows.read(self.index)


LastIs = Literal["before the final norm", "after the final norm", "unknown"]  # what a format says of it


class Truncated(BadInput):
    """A sample has more or fewer rows of hidden states than token ids."""


class StoredFeatures:
    """The samples of one folder, all of one shape and dtype. `depths`: of the k chunks, if known."""

    def __init__(self, path: Path, depths: tuple[int, ...] | None, vocab_size: int | None) -> None:
        self.path, self.depths, self.vocab_size = path, depths, vocab_size
        self.layout = ""
        self.allow_pickle = False
        self.last_is: LastIs = "before the final norm"
        self.samples: list[Sample] = []
        self.ignored: list[str] = []  # file names that the trainer would not read either
        self.truncated: list[str] = []  # samples left out: their rows are not as many as their token ids
        self.rows: _Rows | None = None
        self.no_loss_mask: str | None = None  # why there is none
        self.known_finite: set[int] = set()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        depths: Sequence[int] | None = None,
        hidden_size: int | None = None,
        vocab_size: int | None = None,
        strict: bool = True,
        allow_pickle: bool = False,
    ) -> StoredFeatures:
        """Open a folder and check every header. `depths` and the rest: what the drafter's config says.

        strict: BadInput on a sample whose rows are not as many as its token ids; else it is left out and said
        in `truncated`, as a finding needs it. allow_pickle: read files of torch.save, tensors only.
        """
        stored = cls(Path(path), None if depths is None else tuple(depths), vocab_size)
        stored.allow_pickle = allow_pickle
        if not stored.path.is_dir():
            what = "a file" if stored.path.exists() else "no such folder"
            raise BadInput(f"{path}: {what}; give the folder that the trainer's data was written to")
        for name, find, read in FORMATS:
            if files := find(stored.path):
                stored.layout = name
                read(stored, files)
                if stored.truncated and strict:
                    raise BadInput(stored.truncated[0])
                if stored.samples:
                    stored._check(hidden_size)
                return stored
        raise BadInput(
            f"{path}: holds no stored features; expected hidden_states/hs_<row>.safetensors in it, files of "
            "vLLM's hidden-state connector, or data_<i>.pt, rows_*/data_<i>.ckpt(.gz), <conversation>.pt"
        )

    def _check(self, hidden_size: int | None) -> None:
        first = self.samples[0]
        for s in self.samples:
            if s.shape[1:] != first.shape[1:] or s.dtype != first.dtype:
                here, there = (f"{x.dtype} [S, {x.shape[1]}, {x.shape[2]}]" for x in (s, first))
                raise BadInput(f"{s.path}: hidden_states is {here}, but {there} in {first.path.name}")
        if self.depths is not None and self.chunks != len(self.depths):
            raise BadInput(
                f"{first.path}: hidden_states holds {self.chunks + 1} layers; a drafter trained on depths "
                f"{list(self.depths)} needs {len(self.depths) + 1} (the last is the verifier's: give vLLM "
                "its number of layers as one more of eagle_aux_hidden_state_layer_ids)"
            )
        if hidden_size is not None and self.hidden_size != hidden_size:
            raise BadInput(
                f"{first.path}: hidden_states is {self.hidden_size} wide, the target's hidden size is "
                f"{hidden_size}: stored from another target?"
            )

    @property
    def dtype(self) -> str:
        return self.samples[0].dtype

    @property
    def chunks(self) -> int:
        """k: the layers that are fed, the verifier's last not counted."""
        return self.samples[0].shape[1] - 1

    @property
    def hidden_size(self) -> int:
        return self.samples[0].shape[2]

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.samples)

    @property
    def names(self) -> list[str]:
        """One name for each of the k + 1 layers."""
        known = (
            [f"depth {d}" for d in self.depths] if self.depths else [f"chunk {i}" for i in range(self.chunks)]
        )
        return [*known, "last" if self.last_is == "unknown" else f"last, {self.last_is}"]

    def problems(self) -> Iterator[str]:
        """Read every sample whole and tell what is wrong with it; nothing when all is well."""
        for s in self.samples:
            try:
                _ = s.token_ids, s.last, s.loss_mask
            except BadInput as error:
                yield str(error)


def count_nonfinite(states: Array, dtype: str) -> int:
    """How many values are NaN or infinite: their exponent bits are all ones."""
    kind, mask = EXPONENT[dtype]
    return int(np.count_nonzero((np.ascontiguousarray(states).view(kind) & mask) == mask))


def _find_speculators(folder: Path) -> list[Path]:
    return [*(folder / "hidden_states").glob("hs_*.safetensors")] or [*folder.glob("hs_*.safetensors")]


def _read_speculators(stored: StoredFeatures, files: list[Path]) -> None:
    numbered = {int(p.stem[3:]): p for p in files if p.stem[3:].isdecimal()}
    stored.ignored = sorted(p.name for p in files if not p.stem[3:].isdecimal())
    if not numbered:
        raise BadInput(f"{stored.path}: no file is named hs_<row>.safetensors; found {stored.ignored[0]}")
    for i, path in sorted(numbered.items()):
        try:
            stored.samples.append(_open_sample(stored, i, path))
        except Truncated as error:
            stored.truncated.append(str(error))
    folder = stored.path if (stored.path / "state.json").exists() else stored.path.parent
    try:
        stored.rows = _Rows(folder)
    except (ImportError, FileNotFoundError) as error:
        stored.no_loss_mask = str(error)


def _open_sample(stored: StoredFeatures, index: int, path: Path) -> Sample:
    tensors = {t.name_in_file: t for t in read_header(path)}
    if "hidden_states_scales" in tensors:
        raise BadInput(f"{path}: hidden_states is quantised to FP8, which is not read; store it unquantised")
    for name in ("token_ids", "hidden_states"):
        if name not in tensors:
            raise BadInput(f"{path}: field {name!r} is missing; it holds {sorted(tensors)}")
    tokens, states = tensors["token_ids"], tensors["hidden_states"]
    if len(tokens.shape) != 1 or tokens.dtype not in ("int64", "int32"):
        raise BadInput(f"{path}: token_ids is {tokens.dtype} {list(tokens.shape)}, expected int64 [S]")
    if len(states.shape) != 3 or states.shape[1] < 2:
        raise BadInput(f"{path}: hidden_states has shape {list(states.shape)}, expected [S, k + 1, H]")
    if states.dtype not in STATE_DTYPES:
        raise BadInput(f"{path}: hidden_states is {states.dtype}; read are {', '.join(STATE_DTYPES)}")
    if states.shape[0] != tokens.shape[0] or not states.shape[0]:
        raise Truncated(f"{path}: hidden_states has {states.shape[0]} rows for {tokens.shape[0]} token_ids")
    return TensorSample(index, path, states.dtype, states.shape, stored, tokens, states)


class _Rows:
    """The arrow dataset beside the states, as `datasets.save_to_disk` writes it, through pyarrow alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "state.json").exists():
            raise FileNotFoundError("no arrow dataset lies beside the hidden states")
        try:
            import pyarrow as pa
        except ImportError as error:
            raise ImportError("pyarrow is not installed, so the dataset's loss_mask is not read") from error
        entries: Any = read_json(folder / "state.json").get("_data_files")
        try:
            names = [entry["filename"] for entry in entries]
            parts = [pa.ipc.open_stream(pa.memory_map(str(folder / Path(n).name))).read_all() for n in names]
            self._table = pa.concat_tables(parts).select(["input_ids", "loss_mask"])
        except (TypeError, KeyError, OSError, pa.ArrowInvalid) as error:
            raise BadInput(f"{folder}: its arrow dataset cannot be read: {error}") from error

    def read(self, index: int) -> dict[str, Array]:
        if index >= len(self._table):
            raise BadInput(
                f"{self.folder}: the dataset has {len(self._table)} rows, but there is a hs_{index}"
            )
        return {
            n: self._table.column(n)[index].values.to_numpy(zero_copy_only=False)
            for n in ("input_ids", "loss_mask")
        }


def _find_connector(folder: Path) -> list[Path]:
    """Files named by request, told from a model's by what they hold."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or (folder / "config.json").exists():
        return []
    return files if {"token_ids", "hidden_states"} <= {t.name_in_file for t in read_header(files[0])} else []


def _read_connector(stored: StoredFeatures, files: list[Path]) -> None:
    stored.last_is = "unknown"  # a residual stream, of the deepest layer that was asked for
    stored.no_loss_mask = "vLLM's connector stores no loss mask"
    for i, path in enumerate(files):
        try:
            stored.samples.append(_open_sample(stored, i, path))
        except Truncated as error:
            stored.truncated.append(str(error))


def _find_pickled(folder: Path) -> list[Path]:
    from eaglelab.pickled import find_files

    return find_files(folder)


def _read_pickled(stored: StoredFeatures, files: list[Path]) -> None:
    from eaglelab.pickled import open_samples, refusal

    if not stored.allow_pickle:
        raise refusal(files[0])
    open_samples(stored, files)


# (name, what finds its files in a folder, what reads them); the first that finds any is taken
FORMATS: list[tuple[str, Callable[[Path], list[Path]], Callable[[StoredFeatures, list[Path]], Any]]] = [
    ("speculators >= 0.5", _find_speculators, _read_speculators),
    ("vLLM hidden-state connector", _find_connector, _read_connector),
    ("pickled", _find_pickled, _read_pickled),
]
