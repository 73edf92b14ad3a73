"""Did the weights load? The bytes that each live parameter must hold, against what the probe saw of them.

Expected bytes come from the checkpoint (or the target, where the engine shares its tensors) after the
engine's own steps: cast to the live dtype, fusion (q, k, v; gate, up; the two projections of MLA), and this
rank's shard. Source: sglang 0.5.23 layers/linear.py, layers/vocab_parallel_embedding.py. A checksum is sha256
of the parameter's contiguous bytes, as `probe/parameters.py` takes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eaglelab.checkpoint import Checkpoint, TargetModel
from eaglelab.dialects import Settings
from eaglelab.errors import BadInput
from eaglelab.launch import Launch
from eaglelab.loader import ParamSource, loading
from eaglelab.served import cast

VOCAB_PADDING = 64


@dataclass(frozen=True)
class Expected:
    """One parameter as it must be. `checksum` None: nobody can know it, and `why` says so."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    checksum: str | None
    source: ParamSource
    why: str = ""


@dataclass(frozen=True)
class Match:
    """One live parameter against its source. `equal` None: not comparable, `why` says why."""

    param: str
    equal: bool | None
    sources: tuple[str, ...]  # canonical tensor names, in fusion order; the target's where shared
    kind: str
    why: str


def checksum(tensor: Any) -> str:
    """sha256 of a torch tensor's contiguous bytes in its own dtype, in hexadecimal."""
    import torch

    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(memoryview(flat.numpy())).hexdigest()


def expected_parameters(
    checkpoint: Checkpoint,
    target: TargetModel | None,
    launch: Launch,
    tp_rank: int = 0,
    dtypes: Mapping[str, str] | None = None,
) -> dict[str, Expected]:
    """What each live parameter of this rank must hold. `dtypes`: the live ones, where they are known.

    Two maps that are no parameters come last: `model.hot_token_id` (d2t + index, as loaded) and
    `worker.hot_token_id` (as applied: absent where the map is dropped).
    """
    found = {}
    for name, source in loading(checkpoint, launch).params.items():
        own = source.kind != "target"
        config_dtype = checkpoint.settings.dtype if own else target.facts.dtype if target else "float32"
        dtype = (dtypes or {}).get(name) or cast(launch.dtype, config_dtype)
        found[name] = _expect(name, source, dtype, checkpoint, target, launch, tp_rank)
    if checkpoint.settings.tied:
        found["lm_head.weight"] = replace(found["model.embed_tokens.weight"], name="lm_head.weight")
    if checkpoint.d2t is not None:
        import torch

        ids = torch.from_numpy(checkpoint.d2t + np.arange(len(checkpoint.d2t)))
        for owner in ("model", "worker") if launch.algorithm == "EAGLE3" else ("model",):
            name = f"{owner}.hot_token_id"
            source = ParamSource("own", ("d2t",))
            found[name] = Expected(name, "int64", tuple(ids.shape), checksum(ids), source)
    return found


def _expect(
    name: str,
    source: ParamSource,
    dtype: str,
    checkpoint: Checkpoint,
    target: TargetModel | None,
    launch: Launch,
    tp_rank: int,
) -> Expected:
    def unknown(why: str) -> Expected:
        return Expected(name, dtype, None, None, source, why)

    if launch.flag("--enable-dp-attention") is not None or launch.flag("--pp-size") not in (None, "1"):
        return unknown("sharding under data-parallel attention or pipeline parallelism is not modelled")
    if launch.flag("--quantization") and launch.flag("--speculative-draft-model-quantization") != "unquant":
        return unknown("parameters under quantisation are not modelled")
    if source.kind in ("initial", "partial"):
        return unknown(f"the file has no {', '.join(source.missing)}: nothing filled it")
    holder: Checkpoint | TargetModel | None = target if source.kind == "target" else checkpoint
    if holder is None or not all(t in holder.tensors for t in source.tensors):
        return unknown(f"the target's {source.tensors[0]} is not at hand: give --target")
    parts = [holder.load(t, dtype) for t in source.tensors]
    tensor = shard(name, parts, source.rule, Layout.of(checkpoint.settings, launch), tp_rank)
    return Expected(name, dtype, tuple(tensor.shape), checksum(tensor), source)


@dataclass(frozen=True)
class Layout:
    """How tensor parallelism cuts a drafter: the counts that are divided among the ranks."""

    tp_size: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    @classmethod
    def of(cls, settings: Settings, launch: Launch) -> Layout:
        """On a CPU, zeros first pad heads and MLP until they divide (configs/update_config.py)."""
        heads, kv_heads, inner, tp = (
            settings.heads,
            settings.kv_heads,
            settings.intermediate_size,
            launch.tp_size,
        )
        if launch.flag("--device") == "cpu":
            inner = _round_up(inner, 32 * tp)
            if heads % tp or kv_heads % tp:
                group = heads // kv_heads
                kv_heads = _round_up(kv_heads, tp)
                heads = kv_heads * group
        head_dim = settings.latent.v_head_dim if settings.latent else settings.head_dim  # what o_proj takes
        return cls(tp, heads, kv_heads, head_dim, inner)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def shard(name: str, parts: list[Any], rule: str, layout: Layout, tp_rank: int) -> Any:
    """This rank's part of a parameter, fused from `parts` (torch tensors in fusion order)."""
    import torch

    tp = layout.tp_size
    if not 0 <= tp_rank < tp:
        raise BadInput(f"rank {tp_rank} of tensor parallelism {tp}")
    if rule == "replicated":
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    if rule == "even":
        return _cut(parts[0], len(parts[0]) // tp, tp_rank)
    if rule == "row":
        whole = layout.heads * layout.head_dim if "o_proj" in name else layout.inner
        return _cut(parts[0].T, whole // tp, tp_rank).T.contiguous()
    if rule == "column":
        return torch.cat([_cut(p, layout.inner // tp, tp_rank) for p in parts])
    if rule == "qkv":
        replicas = max(1, tp // layout.kv_heads)  # ranks that hold the same key and value head
        q_rows = layout.heads // tp * layout.head_dim
        kv_rows = max(1, layout.kv_heads // tp) * layout.head_dim
        kv = [_cut(p, kv_rows, tp_rank // replicas) for p in parts[1:]]
        return torch.cat([_cut(parts[0], q_rows, tp_rank), *kv])
    return _vocab_shard(parts[0], tp, tp_rank)


def _cut(whole: Any, rows: int, index: int) -> Any:
    """The `index`-th group of `rows` rows, filled up with zeros."""
    import torch

    mine = whole[index * rows : (index + 1) * rows]
    if len(mine) == rows:
        return mine.contiguous()
    return torch.cat([mine, mine.new_zeros(rows - len(mine), *whole.shape[1:])])


def _vocab_shard(whole: Any, tp_size: int, tp_rank: int) -> Any:
    """Rows of a vocabulary-parallel table, padded with zeros to a multiple of 64 (x ranks if need be)."""
    rows = _round_up(len(whole), VOCAB_PADDING)
    if rows % tp_size:
        rows = _round_up(len(whole), VOCAB_PADDING * tp_size)
    return _cut(whole, rows // tp_size, tp_rank)


def compare(
    live_parameters: Iterable[Mapping[str, Any]],
    checkpoint: Checkpoint,
    target: TargetModel | None,
    launch: Launch,
    tp_rank: int = 0,
) -> list[Match]:
    """Every live parameter of one rank, and every expected one that is not there.

    live_parameters: a capture's records {name, shape, dtype, checksum, shared_with_target}. All `equal`
    strikes out "the weights did not load".
    """
    live = {p["name"]: p for p in live_parameters}
    dtypes = {name: str(p["dtype"]).removeprefix("torch.") for name, p in live.items()}
    expected = expected_parameters(checkpoint, target, launch, tp_rank, dtypes)
    matches = [_match(live[name], expected.get(name)) for name in live]
    aliases = {"lm_head.weight"} if checkpoint.settings.tied else set()
    for name in sorted(expected.keys() - live.keys() - aliases):
        source = expected[name].source
        matches.append(Match(name, False, source.tensors, source.kind, "the server has no such parameter"))
    return matches


def _match(seen: Mapping[str, Any], wanted: Expected | None) -> Match:
    name = seen["name"]
    if wanted is None:
        return Match(name, None, (), "unknown", "this engine's class is not known to have it")
    source = wanted.source
    if source.kind == "target" and seen.get("shared_with_target") is False:
        return Match(
            name, False, source.tensors, source.kind, "should be the target's own tensor, is another"
        )
    if wanted.checksum is None:
        equal = False if source.kind in ("initial", "partial") else None
        return Match(name, equal, source.tensors, source.kind, wanted.why)
    if tuple(seen["shape"]) != wanted.shape:
        why = f"has shape {list(seen['shape'])}, expected {list(wanted.shape or ())}"
        return Match(name, False, source.tensors, source.kind, why)
    equal = seen["checksum"] == wanted.checksum
    origin = "the target's" if source.kind == "target" else "the file's"
    why = f"{'equals' if equal else 'differs from'} {origin} {', '.join(source.tensors)} in {wanted.dtype}"
    return Match(name, equal, source.tensors, source.kind, why)
