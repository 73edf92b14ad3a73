"""Stored features that trainers pickle with torch.save: read only when asked to, and then tensors only.

    speculators <= 0.4    data_<i>.pt             input_ids [S], hidden_states: list of k + 1 tensors [S, H],
                                                  loss_mask [S]; the last is before the final norm
    SpecForge             rows_*/data_<i>.ckpt    input_ids [S], loss_mask [S], hidden_state [1, S, H] after
                          (.gz with --compress)   the final norm, aux_hidden_state [1, S, k H]
    Model-Optimizer       <conversation>.pt       input_ids [S], hidden_states [S, H], aux_hidden_states
                                                  [S, k H], loss_mask [S] if asked for; the state counts as
                                                  after the norm unless hidden_states_prenorm says otherwise
    AngelSlim             rows_*/data_<i>.ckpt    input_ids, loss_mask [1, S], hidden_states [1, S, k H],
                                                  target_hiddens [1, S, H] after the final norm

Read in these projects' sources: speculators v0.4.0 scripts/data_generation_offline.py and train/data.py;
SpecForge scripts/prepare_hidden_states.py and algorithms/eagle3/data.py; Model-Optimizer
examples/speculative_decoding/collect_hidden_states and torch/speculative/eagle/utils.py; AngelSlim
tools/generate_hidden_for_draft_model.py and train/data/dataset_builder. None of them says which layers the
chunks are: the drafter's config does.

torch.load(weights_only=True) refuses everything that is not a tensor or a plain container. A file may still
claim a tensor that it does not hold; such a one is refused before it is copied.
"""

from __future__ import annotations

import gzip
import io
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eaglelab.accumulate import Array
from eaglelab.errors import BadInput
from eaglelab.features import STATE_DTYPES, Sample

if TYPE_CHECKING:
    from eaglelab.features import LastIs, StoredFeatures

PATTERNS = (
    "data_*.pt",
    "data_*.ckpt",
    "data_*.ckpt.gz",
    "rows_*/data_*.ckpt",
    "rows_*/data_*.ckpt.gz",
    "*.pt",
)
OTHERS = ("token_freq.pt", "vocab_mapping.pt", "d2t.pt", "t2d.pt")  # what trainers put beside them
MOST = {".gz": 32}  # files that are opened; a compressed one has to be read whole
MOST_FILES = 512
LARGEST = 8 << 30  # bytes that a compressed file may grow to

# layout -> (keys that tell it, key of the chunks, key of the last state, where the last state is)
LAYOUTS: dict[str, tuple[frozenset[str], str, str, LastIs]] = {
    "SpecForge": (
        frozenset({"hidden_state", "aux_hidden_state"}), "aux_hidden_state", "hidden_state",
        "after the final norm",
    ),
    "AngelSlim": (
        frozenset({"hidden_states", "target_hiddens"}), "hidden_states", "target_hiddens",
        "after the final norm",
    ),
    "Model-Optimizer": (
        frozenset({"hidden_states", "aux_hidden_states"}), "aux_hidden_states", "hidden_states",
        "after the final norm",
    ),
    "speculators <= 0.4": (frozenset({"hidden_states"}), "hidden_states", "", "before the final norm"),
}  # fmt: skip


@dataclass(frozen=True)
class Pickled:
    """One file's tensors: ids [S], chunks [S, k, H] and last [S, H] side by side, mask [S] or None."""

    layout: str
    last_is: LastIs
    ids: Any
    parts: list[Any] = field(repr=False)  # k + 1 tensors [S, H], or views of wider ones
    mask: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.parts[0].shape[0], len(self.parts), self.parts[0].shape[1])

    @property
    def dtype(self) -> str:
        return str(self.parts[0].dtype).removeprefix("torch.")

    def states(self) -> Array:
        """[S, k + 1, H], a copy; uint16 is bf16 bits."""
        import torch

        stacked = torch.stack([p.contiguous() for p in self.parts], dim=1)
        if stacked.dtype == torch.bfloat16:
            return stacked.view(torch.int16).numpy().view(np.uint16)
        return stacked.numpy()


def find_files(folder: Path) -> list[Path]:
    """Pickled samples of a folder in the order of their numbers, each once, without what lies beside them."""
    found = {p for pattern in PATTERNS for p in folder.glob(pattern) if p.name not in OTHERS and p.is_file()}
    return sorted(found, key=lambda p: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", p.name)])


def index_of(path: Path, position: int) -> int:
    """The row that a file's name says (data_12.pt), else its place in the folder."""
    match = re.fullmatch(r"data_(\d+)", path.name.split(".")[0])
    return int(match[1]) if match else position


def refusal(path: Path) -> BadInput:
    return BadInput(
        f"{path}: pickled by torch.save, as speculators up to 0.4, SpecForge, Model-Optimizer and AngelSlim "
        "store features; allow it with --allow-pickle, which builds tensors and nothing else "
        "(weights_only=True), or store them again with speculators 0.5 or newer"
    )


@lru_cache(maxsize=2)
def _read(path: Path, stamp: int) -> dict[str, Any]:
    """What the file holds; tensors of a plain file are mapped, not read. `stamp`: its time of change."""
    import torch

    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as packed:
                data = packed.read(LARGEST + 1)
            if len(data) > LARGEST:
                raise BadInput(f"{path}: grows to more than {LARGEST >> 30} GiB")
            held = torch.load(io.BytesIO(data), "cpu", weights_only=True)
        else:
            with open(path, "rb") as file:
                mapped = file.read(4) == b"PK\x03\x04"  # a zip, as torch.save has written since 1.6
            held = torch.load(path, "cpu", weights_only=True, mmap=mapped)
    except BadInput:
        raise
    except Exception as error:  # unpickling raises whatever a damaged file makes of it
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise BadInput(f"{path}: not a file of tensors that torch.save wrote: {first}") from error
    if not isinstance(held, dict):
        raise BadInput(f"{path}: holds a {type(held).__name__}, expected a dict of tensors")
    return held


def read_file(path: Path) -> Pickled:
    """One sample. BadInput names file and field."""
    held = _read(path, path.stat().st_mtime_ns)
    keys = {str(key) for key in held}
    layout = next((name for name, (told, *_) in LAYOUTS.items() if told <= keys), None)
    if layout is None or "input_ids" not in held:
        raise BadInput(
            f"{path}: holds {sorted(keys)}; expected input_ids and the hidden states of one of: "
            + "; ".join(f"{name} ({', '.join(sorted(told))})" for name, (told, *_) in LAYOUTS.items())
        )
    _, chunks, last, last_is = LAYOUTS[layout]
    if layout == "speculators <= 0.4":
        parts = _listed(path, held[chunks])
    else:
        end = _rows(path, last, held[last])
        parts = [*_split(path, chunks, _rows(path, chunks, held[chunks]), end.shape[1]), end]
    if layout == "Model-Optimizer" and bool(held.get("hidden_states_prenorm", False)):
        last_is = "before the final norm"
    if any(p.dtype != parts[0].dtype or p.shape[0] != parts[0].shape[0] for p in parts):
        raise BadInput(
            f"{path}: {[f'{p.dtype} {list(p.shape)}' for p in parts]}: chunks and last state differ"
        )
    mask = held.get("loss_mask")
    return Pickled(layout, last_is, _line(path, "input_ids", held["input_ids"]), parts,
                   None if mask is None else _line(path, "loss_mask", mask))  # fmt: skip


def _tensor(path: Path, name: str, value: Any) -> Any:
    """A dense tensor that the file really holds."""
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
        raise BadInput(f"{path}: field {name!r} is a {type(value).__name__}, expected a dense tensor")
    if value.device.type != "cpu" or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise BadInput(
            f"{path}: field {name!r} claims shape {list(value.shape)}, which the file does not hold"
        )
    return value.detach()


def _line(path: Path, name: str, value: Any) -> Any:
    """[S], also where it was stored as [1, S]."""
    tensor = _tensor(path, name, value)
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1 or tensor.dtype.is_floating_point and name == "input_ids":
        raise BadInput(f"{path}: field {name!r} is {tensor.dtype} {list(tensor.shape)}, expected [S]")
    return tensor


def _rows(path: Path, name: str, value: Any) -> Any:
    """[S, width], also where it was stored as [1, S, width]."""
    tensor = _tensor(path, name, value)
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2 or not tensor.shape[1]:
        raise BadInput(f"{path}: field {name!r} has shape {list(tensor.shape)}, expected [S, width]")
    return tensor


def _split(path: Path, name: str, rows: Any, hidden: int) -> list[Any]:
    if rows.shape[1] % hidden:
        raise BadInput(
            f"{path}: field {name!r} is {rows.shape[1]} wide, no multiple of the last state's {hidden}"
        )
    return list(rows.split(hidden, dim=1))


def _listed(path: Path, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) or len(value) < 2:
        raise BadInput(
            f"{path}: field 'hidden_states' is a {type(value).__name__}, expected a list of 2 or more [S, H]"
        )
    parts = [_rows(path, f"hidden_states[{i}]", v) for i, v in enumerate(value)]
    if len({p.shape[1] for p in parts}) > 1:
        raise BadInput(f"{path}: field 'hidden_states' holds widths {[p.shape[1] for p in parts]}")
    return parts


@dataclass(frozen=True)
class PickledSample(Sample):
    """Of a file that torch.save wrote: opened again whenever its numbers are asked for."""

    @property
    def _file(self) -> Pickled:
        return read_file(self.path)

    @property
    def _ids(self) -> Array:
        return self._file.ids.numpy()

    @property
    def states(self) -> Array:
        return self._file.states()

    @property
    def row(self) -> dict[str, Array] | None:
        held = self._file
        if held.mask is None:
            return None
        return {"input_ids": held.ids.numpy(), "loss_mask": held.mask.numpy()}


def open_samples(stored: StoredFeatures, files: list[Path]) -> None:
    """Fill in the samples of a folder, all of one layout; the first files of a large one."""
    most = min(MOST.get(path.suffix, MOST_FILES) for path in files)
    stored.ignored = [path.name for path in files[most:]]
    for i, path in enumerate(files[:most]):
        held = read_file(path)
        if not stored.layout or stored.layout == "pickled":
            stored.layout, stored.last_is = held.layout, held.last_is
        if (held.layout, held.last_is) != (stored.layout, stored.last_is):
            raise BadInput(
                f"{path}: of {held.layout}, last state {held.last_is}; the first file is of {stored.layout}, "
                f"{stored.last_is}"
            )
        if held.dtype not in STATE_DTYPES:
            raise BadInput(f"{path}: the hidden states are {held.dtype}; read are {', '.join(STATE_DTYPES)}")
        if held.mask is None:
            stored.no_loss_mask = f"{path.name} holds no loss_mask"
        if len(held.ids) != held.shape[0] or not len(held.ids):
            stored.truncated.append(f"{path}: {held.shape[0]} rows of states for {len(held.ids)} input_ids")
        else:
            number = index_of(path, i)
            stored.samples.append(PickledSample(number, path, held.dtype, held.shape, stored))
