"""The drafter's parameters as loaded, and the target's embedding, norm and head, from one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaglelab.capture import write_json
from eaglelab.probe import engine
from eaglelab.probe.staging import as_numpy

CHUNK = 32 << 20  # bytes a copy to the host, so that a large drafter needs no large buffer


def _host_chunks(tensor: Any) -> Iterator[Any]:
    flat = tensor.detach().contiguous().reshape(-1)
    step = max(1, CHUNK // flat.element_size())
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu()


def checksum(tensor: Any) -> str:
    """sha256 of the tensor's bytes, in memory order (row major), little endian, in its own dtype."""
    import torch

    digest = hashlib.sha256()
    for chunk in _host_chunks(tensor):
        digest.update(memoryview(chunk.view(torch.uint8).numpy()))
    return digest.hexdigest()


def drafter_parameters(worker: Any) -> list[dict[str, Any]]:
    """name, shape, dtype, checksum of each parameter; whether its storage is the target's, and of which name.

    Two vocabulary maps that are no parameters come last: `hot_token_id` of the drafter's model (d2t +
    index, as loaded) and of the worker (what is applied; absent when the map is dropped).
    """
    storage = {
        (p.data_ptr(), tuple(p.shape)): name for name, p in engine.target_model(worker).named_parameters()
    }
    model = worker.draft_runner.model
    maps = {"model.hot_token_id": model, "worker.hot_token_id": worker}
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= {name: owner.hot_token_id for name, owner in maps.items()
              if getattr(owner, "hot_token_id", None) is not None}  # fmt: skip
    found = []
    for name, tensor in named.items():
        theirs = storage.get((tensor.data_ptr(), tuple(tensor.shape)))
        found.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "checksum": checksum(tensor),
                "shared_with_target": theirs is not None,
                "target_name": theirs,
            }
        )
    return found


def write_parameters(worker: Any, folder: Path) -> None:
    write_json(folder / "parameters.json", drafter_parameters(worker))


def write_target(worker: Any, folder: Path) -> None:
    """This rank's rows of the target's embedding and head, and the final norm, to target.*."""
    from safetensors.numpy import save_file

    model = engine.target_model(worker)
    inner = next((m for m in model.modules() if hasattr(m, "embed_tokens") and hasattr(m, "norm")), None)
    if inner is None:
        raise ValueError(f"{type(model).__name__} has no embed_tokens and norm side by side")
    head = next((m.lm_head for m in model.modules() if hasattr(m, "lm_head")), None)
    tensors, rows, dtypes = {}, {}, {}
    for name, module in (
        ("embed_tokens.weight", inner.embed_tokens),
        ("norm.weight", inner.norm),
        ("lm_head.weight", head),
    ):
        if module is None:
            continue
        weight = module.weight.detach()
        indices = getattr(module, "shard_indices", None)
        if indices is not None:  # a shard of the vocabulary, padded to a multiple
            rows[name] = [indices.org_vocab_start_index, indices.org_vocab_end_index]
            weight = weight[: rows[name][1] - rows[name][0]]
        tensors[name], dtypes[name] = as_numpy(weight.cpu())
    save_file(tensors, folder / "target.safetensors")
    write_json(folder / "target.json", {"rows": rows, "dtypes": dtypes})
