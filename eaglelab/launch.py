"""Launch: how a server was started, as a value.

`Launch.parse` reads a command line, `Launch.from_server` what a running server says of itself. Both apply
what SGLang 0.5.23 does to flags that are left out or do not agree (arg_groups/speculative_hook.py), so a
Launch is always resolved.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eaglelab.errors import BadInput
from eaglelab.flags import FLAGS, SECRET, read_flags

__all__ = ["EAGLES", "SECRET", "SERVER_FIELDS", "Launch", "Target"]


@dataclass(frozen=True)
class Target:
    """Facts of the target model that decide how its drafter is served."""

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: str = "bfloat16"


def engine_version(text: str) -> str:
    """The version in "sglang==VERSION". BadInput on anything else."""
    name, _, version = text.partition("==")
    if name != "sglang" or not version:
        raise BadInput(f"--engine {text}: write it as sglang==VERSION; other engines are not known")
    return version


# What a server's facts may carry into `flags`: settings that change how a drafter is fed or run, and nothing
# else.
SERVER_FIELDS = (
    "quantization", "speculative_draft_model_quantization", "speculative_draft_load_format", "load_format",
    "speculative_token_map", "speculative_attention_mode", "speculative_draft_attention_backend",
    "attention_backend",
    "prefill_attention_backend", "decode_attention_backend", "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc", "speculative_use_rejection_sampling", "speculative_adaptive",
    "enable_multi_layer_eagle", "kv_cache_dtype", "dp_size", "enable_dp_attention", "enable_dp_lm_head",
    "pp_size",
    "disable_cuda_graph", "cuda_graph_backend_prefill", "disable_radix_cache", "chunked_prefill_size",
    "page_size",
    "disable_overlap_schedule", "context_length", "device", "disaggregation_mode", "json_model_override_args",
)  # fmt: skip
# Architectures for which SGLang chooses a tree when steps, topk and draft tokens are all left out.
TREE_BY_DEFAULT = {"LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM"}
EAGLES = ("EAGLE", "EAGLE3")


@dataclass(frozen=True)
class Launch:
    """Speculation as SGLang's flags say it: steps S, topk K, draft tokens N (a chain has N = S + 1)."""

    algorithm: str | None = "EAGLE3"  # NEXTN is resolved to EAGLE; None: no speculation
    steps: int = 5
    topk: int = 1
    draft_tokens: int = 6
    engine: str = "sglang"
    version: str = "0.5.23"
    dtype: str | None = None  # --dtype; None: the checkpoint's own
    tp_size: int = 1
    draft_window: int | None = None  # --speculative-draft-window-size
    target_path: str | None = None
    draft_path: str | None = None
    target: Target | None = None
    flags: tuple[tuple[str, str], ...] = ()  # every other flag, as written; secrets are left out

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def parse(
        cls, command_line: str | Sequence[str], target: Target | None = None, **defaults: Any
    ) -> Launch:
        """A launch from a command line, `python -m sglang.launch_server ...` or only its flags.

        `defaults` fill fields that the command line leaves out, before SGLang's own defaults do. BadInput on
        flags that SGLang 0.5.23 would refuse.
        """
        known, flags = read_flags(command_line)
        values = {**defaults, **known}
        values["flags"] = _merge(tuple(defaults.get("flags", ())), flags)
        return _resolve({**values, "target": target or defaults.get("target")})

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: Target | None = None, **defaults: Any) -> Launch:
        """A launch from a mapping of SGLang's arguments, spelled with - or _ (as in its --config file)."""
        words: list[str] = []
        for key, value in config.items():
            if value is None or value is False:
                continue
            words.append("--" + str(key).lstrip("-").replace("_", "-"))
            if value is not True:
                words += [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
        return cls.parse(words, target, **defaults)

    @classmethod
    def from_server(cls, info: Mapping[str, Any], target: Target | None = None) -> Launch:
        """A launch from the fields of `/server_info`, which are resolved already.

        Only an allow-list of them is read.
        """
        if "speculative_algorithm" not in info:
            raise BadInput(
                "server_info has no field 'speculative_algorithm': not an SGLang server, or too old a one"
            )
        kept = {k: info[k] for k in SERVER_FIELDS if info.get(k) not in (None, False, "", "{}", "null")}
        flags = tuple(
            ("--" + k.replace("_", "-"), "" if v is True else shlex.quote(str(v))) for k, v in kept.items()
        )
        return _resolve(
            {
                "algorithm": info["speculative_algorithm"],
                "steps": info.get("speculative_num_steps"),
                "topk": info.get("speculative_eagle_topk"),
                "draft_tokens": info.get("speculative_num_draft_tokens"),
                "version": str(info.get("version") or "unknown"),
                "dtype": info.get("dtype"),
                "tp_size": info.get("tp_size") or 1,
                "draft_window": info.get("speculative_draft_window_size"),
                "target_path": info.get("model_path"),
                "draft_path": info.get("speculative_draft_model_path"),
                "target": target,
                "flags": flags,
            }
        )

    def edit(self, **changes: Any) -> Launch:
        """The same launch with fields changed, resolved again.

        `edit(steps=3)` of a chain also makes 4 draft tokens.
        """
        values = {k: getattr(self, k) for k in self.__dataclass_fields__}
        if not set(changes) <= set(values):
            raise BadInput(f"Launch has no field {sorted(set(changes) - set(values))[0]!r}")
        if changes.get("algorithm") and self.algorithm is None:  # a plain launch has no shape to keep
            values |= {"steps": None, "topk": None, "draft_tokens": None}
        return _resolve(values | changes)

    def with_flags(self, text: str | Sequence[str]) -> Launch:
        """The same launch with these flags given too: `with_flags("--speculative-algorithm EAGLE3")`."""
        known, flags = read_flags(text)
        return self.edit(**known, flags=_merge(self.flags, flags))

    def with_target(self, target: Target | None) -> Launch:
        return replace(self, target=target)

    def flag(self, name: str) -> str | None:
        """The value of another flag ("" for a switch), None if it is not set: `flag("--quantization")`."""
        value = dict(self.flags).get(name)
        return None if value is None else " ".join(shlex.split(value))

    def command(self) -> str:
        """The flags as text, ready for a shell."""
        words = []
        for name, (flag, _) in FLAGS.items():
            value = getattr(self, name)
            drafting = name in ("steps", "topk", "draft_tokens", "draft_window", "draft_path")
            if value is None or (name == "tp_size" and value == 1) or (drafting and self.algorithm is None):
                continue
            words += [flag, str(value)]
        for flag, value in self.flags:
            given = shlex.split(value)
            words += [f"{flag}={given[0]}"] if value.startswith(("-", "'-")) else [flag, *given]
        return shlex.join(words)


def _merge(old: tuple[tuple[str, str], ...], new: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((dict(old) | dict(new)).items())


def _resolve(values: dict[str, Any]) -> Launch:
    """Fill and correct as SGLang 0.5.23 does; BadInput where it would stop."""
    values = dict(values)
    algorithm = values.get("algorithm")
    algorithm = algorithm.upper() if algorithm else None
    values["algorithm"] = "EAGLE" if algorithm == "NEXTN" else algorithm
    if values.get("dtype") is not None:
        short = {"half": "float16", "float": "float32", "auto": None}
        values["dtype"] = short.get(str(values["dtype"]), str(values["dtype"]).removeprefix("torch."))
    shape: list[int | None] = [values.get(k) for k in ("steps", "topk", "draft_tokens")]
    if values["algorithm"] is None:
        shape = [0, 0, 0]
    elif values["algorithm"] in EAGLES:
        shape = [*_speculation(shape, values.get("target"), dict(values.get("flags", ())))]
    else:  # another way of drafting: its numbers as given
        shape = [n or 0 for n in shape]
    values |= dict(zip(("steps", "topk", "draft_tokens"), shape, strict=True))
    return Launch(**values)


def _speculation(shape: list[int | None], target: Target | None, flags: dict[str, str]) -> list[int]:
    steps, topk, tokens = shape
    if "--speculative-adaptive" in flags:
        steps, topk = (3 if steps is None else steps), (1 if topk is None else topk)
        return [steps, topk, steps + 1]
    if steps is None:
        if topk is not None or tokens is not None:
            raise BadInput(
                "--speculative-eagle-topk or --speculative-num-draft-tokens is given without "
                "--speculative-num-steps: SGLang stops on this; give all three or none"
            )
        return [5, 4, 8] if target and target.architecture in TREE_BY_DEFAULT else [3, 1, 4]
    if topk is None:
        raise BadInput(
            "--speculative-num-steps is given without --speculative-eagle-topk: SGLang stops on this"
        )
    if topk == 1:
        tokens = steps + 1  # SGLang rewrites it, with a warning in its log
    if tokens is None:
        raise BadInput(f"--speculative-eagle-topk {topk} is a tree: give --speculative-num-draft-tokens too")
    return [steps, topk, tokens]


def _validate(launch: Launch) -> None:
    if launch.tp_size < 1:
        raise BadInput(f"--tp-size {launch.tp_size}: must be at least 1")
    if launch.draft_window is not None and launch.draft_window < 1:
        raise BadInput(f"--speculative-draft-window-size {launch.draft_window}: must be positive")
    if launch.algorithm not in EAGLES:
        return
    steps, topk, tokens = launch.steps, launch.topk, launch.draft_tokens
    if steps < 1 or topk < 1:
        raise BadInput(f"speculation needs at least 1 step and topk 1, got {steps} and {topk}")
    if topk == 1 and tokens != steps + 1:
        raise BadInput(
            f"a chain of {steps} steps has {steps + 1} draft tokens (the root counts), not {tokens}"
        )
    nodes = topk + (steps - 1) * topk * topk
    if topk > 1 and not 2 <= tokens <= nodes + 1:
        raise BadInput(
            f"--speculative-num-draft-tokens {tokens}: a tree of {steps} steps and topk {topk} has room for "
            f"2 to {nodes + 1} (root and {nodes} candidates)"
        )
