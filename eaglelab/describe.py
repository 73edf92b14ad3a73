"""What `eaglelab inspect` says of a drafter.

Its dialect, its layer ids both ways, what an engine takes and drops, and how it was trained beside how it
would be served. Headers and config only, unless statistics are asked for.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from eaglelab.checkpoint import Checkpoint, TargetModel
from eaglelab.convert import plan, view
from eaglelab.diff import diff
from eaglelab.errors import BadInput
from eaglelab.launch import Launch, Target
from eaglelab.layer_ids import ADD_ONE_IF_FIRST_IS_ONE, ADD_ONE_UNLESS_LAST, default_depths, sglang_ids
from eaglelab.releases import caveat, differences
from eaglelab.served import loading, refusals, served
from eaglelab.tensorfile import statistics as tensor_statistics
from eaglelab.trained import trained


def describe(
    checkpoint: Checkpoint,
    target: TargetModel | None = None,
    launch: Launch | None = None,
    statistics: bool = False,
) -> dict[str, Any]:
    """Everything about a drafter as one JSON-able dict. Without `launch`, EAGLE3 on SGLang 0.5.23 is assumed.

    A speculators drafter is shown as it would be served after conversion. BadInput if it is not the target's
    drafter.
    """
    facts = target.facts if target else launch.target if launch else None
    if facts:
        checkpoint.check_target(facts)
    here = replace(launch or Launch(), target=facts)
    before = trained(checkpoint, facts)
    report: dict[str, Any] = {
        "kind": "drafter",
        "path": str(checkpoint.path),
        "dialect": checkpoint.dialect,
        "architectures": checkpoint.config.get("architectures"),
        "settings": asdict(checkpoint.settings),
        "bytes": sum(info.offsets[1] - info.offsets[0] for info in checkpoint.tensors.values()),
        "tensors": {
            name: {"name_in_file": info.name_in_file, "shape": list(info.shape), "dtype": info.dtype}
            for name, info in checkpoint.tensors.items()
        },
        "unknown_tensors": list(checkpoint.unknown),
        "target": asdict(facts) if facts else None,
        "layer_ids": _layer_ids(checkpoint, facts),
        "vocabulary_map": checkpoint.map_form,
        "notes": _notes(checkpoint),
        "trained": {"feed": asdict(before[0]), "wiring": asdict(before[1])},
        "launch": {
            "command": here.command(),
            "engine": f"{here.engine}=={here.version}",
            "release": {"caveat": caveat(here.version), "differences": differences(here.version)},
            "assumed": launch is None,
        },
    }
    if statistics:
        for name, info in checkpoint.tensors.items():
            report["tensors"][name] |= tensor_statistics(info)
    return _jsonable(report | _served(checkpoint, target, here))


def _layer_ids(checkpoint: Checkpoint, target: Target | None) -> dict[str, Any]:
    """The ids as written, the depths they mean, and how each convention writes those depths."""
    depths = checkpoint.depths_in(target)
    architecture, layers = (target.architecture, target.num_layers) if target else (None, None)
    try:
        sglang: list[int] | None = list(sglang_ids(depths, architecture, layers)) if depths else None
    except BadInput:
        sglang = None
    return {
        "written": list(checkpoint.aux_layer_ids) if checkpoint.aux_layer_ids is not None else None,
        "written_as": checkpoint.dialect,
        "depths": list(depths) or None,
        "as_sglang": sglang,
        "as_speculators": list(depths) or None,
        "as_vllm": list(depths) or None,
        "rule": f"{_sglang_rule(architecture)}; speculators and vLLM: id k is depth k",
        "default": list(default_depths(architecture, layers)) if architecture and layers else None,
    }


def _notes(checkpoint: Checkpoint) -> list[str]:
    """What a reader of the file should know that changes no field."""
    notes, s = [], checkpoint.settings
    if checkpoint.rivals and (checkpoint.aux_layer_ids or (1,))[0] != 1:  # else all of them read it alike
        names = ", ".join(d.name for d in checkpoint.rivals)
        notes.append(f"read as {checkpoint.dialect}; the file could also be of {names} (--dialect NAME)")
    if checkpoint.map_form == "absolute":
        notes.append(
            "d2t holds target ids, not offsets: engines add the draft id to them and draft other tokens"
        )
    if s.latent:
        m = s.latent
        notes.append(
            f"multi-head latent attention: q rank {m.q_lora_rank:,}, kv rank {m.kv_lora_rank:,}, heads of "
            f"{m.qk_nope_head_dim} + {m.qk_rope_head_dim} wide, values of {m.v_head_dim}"
        )
    if "norm_output" in checkpoint.config and checkpoint.dialect in ("sglang", "specforge"):
        notes.append(
            "norm_output: SpecForge between 2026-07-19 and #879 (2026-09-15) meant another thing by it; pin "
            "it by a replay if it trained this drafter then"
        )
    return notes


def _sglang_rule(architecture: str | None) -> str:
    where = f"SGLang on {architecture}" if architecture else "SGLang on most architectures"
    if architecture in ADD_ONE_IF_FIRST_IS_ONE:
        return f"{where}: id i is depth i + 1 if the first id is 1, else depth i"
    if architecture in ADD_ONE_UNLESS_LAST:
        return f"{where}: id i is depth i + 1, or depth i if the largest id is the number of layers"
    return f"{where}: id i is depth i + 1"


def _served(checkpoint: Checkpoint, target: TargetModel | None, launch: Launch) -> dict[str, Any]:
    report: dict[str, Any] = {
        "served": None,
        "loading": None,
        "differences": None,
        "refusals": [],
        "conversion": None,
    }
    shown = checkpoint
    try:
        if "sglang" not in checkpoint.spelling.engines:
            shown = view(checkpoint, "sglang", target)
            report["conversion"] = {
                "to": "sglang",
                "warnings": list(plan(checkpoint, "sglang", target).warnings),
            }
        takes = loading(shown, launch)
        report["loading"] = {
            "dropped": list(takes.dropped),
            "replaced": list(takes.replaced),
            "initial": list(takes.initial),
            "params": {name: asdict(source) for name, source in takes.params.items()},
        }
        report["refusals"] = refusals(shown, launch)
        feed, wiring = served(shown, launch)
    except BadInput as error:
        report["refusals"] = report["refusals"] or [str(error)]
        return report
    report["served"] = {"feed": asdict(feed), "wiring": asdict(wiring)}
    before = trained(checkpoint, launch.target)
    report["differences"] = [asdict(d) for d in diff(before, (feed, wiring), checkpoint, target, shown)]
    return report


def _jsonable(value: Any) -> Any:
    """Tuples to lists, dataclasses left inside to dicts; sorted pairs of a rope's scaling to a dict."""
    if isinstance(value, dict):
        return {
            str(k): dict(v) if k == "scaling" and isinstance(v, tuple) else _jsonable(v)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
