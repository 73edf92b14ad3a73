"""What the bench makes for itself: the target's streams along texts, stored features, accept lengths.

The target's own forward (transformers, float32) gives the residual stream at every depth along the greedy
continuations of data/prompts.jsonl, 128 tokens each, which is what data/README.md measured on the genuine
server; so an accept length simulated here is comparable with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from drafters import merge

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.convert import view
from eaglelab.drafter import Drafter
from eaglelab.errors import BadInput
from eaglelab.launch import Launch
from eaglelab.served import served
from eaglelab.simulate import Rounds, Speculation, Text, simulate
from eaglelab.trained import trained
from eaglelab.wiring import Feed, Wiring

from .cases import DATA, FEATURES, SPECULATORS, TARGET, Bench, Length

CHAIN = (
    "--speculative-algorithm EAGLE3 --speculative-num-steps 5 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 6 --dtype float32"
)
NEW_TOKENS = 128
EPS = 1e-5
DEPTHS = (2, 4, 5)  # of the shipped drafter


@dataclass
class Streams:
    """One text: token ids [T]; the residual stream [T, H] at depths 0 to n; the length of its prompt."""

    tokens: list[int]
    depths: list[torch.Tensor]
    prompt_len: int

    def rows(self, feed: Feed, norm: torch.Tensor) -> torch.Tensor:
        """[T, width]: the rows that a drafter gets under this feed."""
        found = [self.depths[d] for d in feed.depths]
        if feed.final_norm:
            found = [F.rms_norm(self.depths[-1], norm.shape, norm, EPS)]
        return torch.cat(found, dim=-1)


_KEPT: dict[str, Any] = {}  # made once in a process: no bench changes them


def _once(key: str, make: Callable[[], Any]) -> Any:
    if key not in _KEPT:
        _KEPT[key] = make()
    return _KEPT[key]


def target_model(bench: Bench) -> Any:
    """The tiny target as transformers runs it, in float32."""

    def load():
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()

    return _once("target", load)


def streams_of(bench: Bench, tokens: Sequence[int], prompt_len: int) -> Streams:
    """The target's streams along a text."""
    model, last = target_model(bench), []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.no_grad():
        ids = torch.tensor([list(tokens)])
        found = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    return Streams(list(tokens), [x[0] for x in (*found[:-1], last[0])], prompt_len)


def prompts(bench: Bench) -> list[list[int]]:
    """Token ids of data/prompts.jsonl."""

    def read():
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
        found = []
        for line in (DATA / "prompts.jsonl").read_text().splitlines():
            asked = json.loads(line)
            if "messages" in asked:
                ids = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True)
                ids = ids["input_ids"] if not isinstance(ids, list) else ids
            else:
                ids = asked.get("input_ids") or tokenizer(asked["prompt"])["input_ids"]
            found.append([int(i) for i in ids])
        return found

    return _once("prompts", read)


def generations(bench: Bench) -> list[Streams]:
    """The prompts, continued greedily."""

    def make():
        model, found = target_model(bench), []
        for ids in prompts(bench):
            one = torch.tensor([ids])
            with torch.no_grad():
                out = model.generate(
                    one,
                    attention_mask=torch.ones_like(one),
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    do_sample=False,
                )
            found.append(streams_of(bench, out[0].tolist(), len(ids)))
        return found

    return _once("generations", make)


def stored_streams(bench: Bench) -> list[Streams]:
    """The texts of data/features."""

    def make():
        from safetensors.torch import load_file

        files = sorted((FEATURES / "hidden_states").glob("hs_*.safetensors"))
        return [streams_of(bench, load_file(f)["token_ids"].tolist(), 40) for f in files]

    return _once("stored streams", make)


def walk(bench: Bench, checkpoint: Any, feed: Feed, wiring: Wiring, launch: Launch) -> Length | None:
    """The accept length along our generations; None where this drafter cannot run so."""
    target = open_target(TARGET)
    norm = target.load("norm.weight", torch.float32)
    try:
        drafter = Drafter(checkpoint, wiring, target, dtype=torch.float32)
        speculation, parts = Speculation.of(launch), []
        for text in generations(bench):
            rows = text.rows(feed, norm)
            one = Text("bench", text.tokens, rows, text.prompt_len, len(text.tokens))
            parts.append(simulate(drafter, one, speculation))
    except BadInput:
        return None
    return Length(Rounds.join(parts, launch.steps).accept_length, "simulated")


def as_served(bench: Bench, path: Path, flags: str = CHAIN) -> Length | None:
    """What this folder gives, served with these flags; None where the engine does not start with it."""
    target = open_target(TARGET)
    launch = Launch.parse(flags, target=target.facts)
    try:
        checkpoint = open_checkpoint(path)
        form = checkpoint if "sglang" in checkpoint.spelling.engines else view(checkpoint, "sglang", target)
        feed, wiring = served(form, launch)
    except BadInput:
        return None
    return walk(bench, form, feed, wiring, launch)


def as_trained(bench: Bench, path: Path, flags: str = CHAIN) -> Length | None:
    """What this folder gives where it is fed and wired as its own files say."""
    target = open_target(TARGET)
    launch = Launch.parse(flags, target=target.facts)
    try:
        checkpoint = open_checkpoint(path)
        feed, wiring = trained(checkpoint, target.facts)
    except BadInput:
        return None
    return walk(bench, checkpoint, feed, wiring, launch)


def store(
    bench: Bench,
    depths: Sequence[int] = DEPTHS,
    *,
    last: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    edit: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    texts: Sequence[Streams] | None = None,
    dataset: bool = True,
) -> Path:
    """A folder of stored features in the trainer's format, at these depths, of the texts of data/features.

    last: changes the teacher's state [T, H]; edit: the whole [T, k + 1, H]; dataset: with the arrow files
    (texts, loss mask), which hold for the texts of data/features only.
    """
    from safetensors.torch import save_file

    folder = bench.folder() / "data"
    shutil.copytree(FEATURES, folder)
    (folder / "meta.json").unlink()
    if not dataset:
        for path in [*folder.glob("*.arrow"), *folder.glob("*.json")]:
            path.unlink()
    for i, text in enumerate(texts or stored_streams(bench)):
        states = torch.stack([*(text.depths[d] for d in depths), last(text.depths[-1])], dim=1)
        tensors = {"token_ids": torch.tensor(text.tokens), "hidden_states": edit(states).bfloat16()}
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, folder / f"hidden_states/hs_{i}.safetensors"
        )
    return folder


def edit_stored(bench: Bench, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A copy of data/features with the tensors of every sample changed."""
    from safetensors.torch import load_file, save_file

    folder = bench.folder() / "data"
    shutil.copytree(FEATURES, folder)
    (folder / "meta.json").unlink()
    for path in sorted((folder / "hidden_states").glob("hs_*.safetensors")):
        save_file({n: t.contiguous() for n, t in change(load_file(path)).items()}, path)
    return folder


def edit_masks(bench: Bench, change: Callable[[list[int]], list[int]]) -> Path:
    """A copy of data/features with every loss mask changed."""
    from datasets import Dataset, load_from_disk

    folder, rows = bench.folder() / "data", load_from_disk(FEATURES).with_format(None)
    columns = {name: list(rows[name]) for name in rows.column_names}
    columns["loss_mask"] = [change([int(i) for i in mask]) for mask in columns["loss_mask"]]
    Dataset.from_dict(columns).save_to_disk(folder)
    shutil.copytree(FEATURES / "hidden_states", folder / "hidden_states")
    return folder


def refit(
    bench: Bench,
    depths: Sequence[int],
    norm: str = "whole",
    config: dict[str, Any] | None = None,
    noise: float = 0.0,
    rank: int = 0,
) -> Path:
    """The trainer's drafter, its fc fitted anew to other depths (least squares on the target's streams).

    norm: "whole", "per-chunk" or "none" before fc. For weak drafters: noise, added to fc, relative to its
    spread; rank, how many directions of what fc gave are learned. The same arguments give the same folder.
    """

    def make():
        from safetensors.torch import load_file, save_file

        path = bench.path()
        tensors = load_file(SPECULATORS / "model.safetensors")
        wide = {n: t.float() for n, t in tensors.items() if n in ("fc.weight", "input_norm.weight")}
        texts = [*generations(bench), *stored_streams(bench)]
        old = torch.cat([torch.cat([t.depths[d] for d in DEPTHS], -1) for t in texts])
        wanted = F.rms_norm(old, (old.shape[1],), wide["input_norm.weight"], EPS) @ wide["fc.weight"].T
        width = old.shape[1] // len(DEPTHS)
        chunks = [torch.cat([t.depths[d] for t in texts]) for d in depths]
        fed = torch.cat(chunks, -1)
        if norm == "whole":
            fed = F.rms_norm(fed, (fed.shape[1],), None, EPS)
        elif norm == "per-chunk":
            fed = torch.cat([F.rms_norm(c, (width,), None, EPS) for c in chunks], -1)
        fed, wanted = fed.double(), wanted.double()
        ridge = 1e-6 * float((fed * fed).sum(0).mean()) * torch.eye(fed.shape[1], dtype=torch.float64)
        fc = torch.linalg.solve(fed.T @ fed + ridge, fed.T @ wanted).T.float()
        if rank:
            axes = torch.linalg.svd((fed @ fc.T.double()), full_matrices=False).Vh[:rank].float()
            fc = axes.T @ (axes @ fc)
        fc = fc + noise * fc.std() * torch.randn(fc.shape, generator=torch.Generator().manual_seed(0))
        tensors["fc.weight"] = fc.bfloat16().contiguous()
        del tensors["input_norm.weight"]
        if norm == "whole":
            tensors["input_norm.weight"] = torch.ones(fed.shape[1]).bfloat16()
        for i in range(len(depths) if norm == "per-chunk" else 0):
            tensors[f"fc_norm.{i}.weight"] = torch.ones(width).bfloat16()
        values = json.loads((SPECULATORS / "config.json").read_text())
        flags = {"norm_before_fc": norm == "whole", "fc_norm": norm == "per-chunk"}
        merge(values, {"eagle_aux_hidden_state_layer_ids": list(depths), **flags, **(config or {})})
        path.mkdir()
        (path / "config.json").write_text(json.dumps(values))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return bench.once(f"refit {tuple(depths)} {norm} {config} {noise} {rank}", make)


Tensors = dict[str, torch.Tensor]


def copied(
    bench: Bench,
    base: Path,
    config: dict[str, Any] | None = None,
    remove: Sequence[str] = (),
    tensors: Callable[[Tensors], Tensors] | None = None,
) -> Path:
    """A copy of a drafter's folder. config: merged in, nested too; remove: keys; tensors: edits them."""
    from safetensors.torch import load_file, save_file

    path = bench.path()
    path.mkdir()
    values = json.loads((base / "config.json").read_text())
    merge(values, config or {})
    for key in remove:
        del values[key]
    (path / "config.json").write_text(json.dumps(values))
    held = load_file(base / "model.safetensors")
    held = tensors(held) if tensors else held
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    return path


def converted(bench: Bench, path: Path) -> Path:
    """What `eaglelab convert` makes of a trainer's folder for SGLang; the same folder each time."""

    def make():
        from eaglelab.convert import convert

        out = bench.path()
        convert(path, out, to="sglang", target=TARGET)
        return out

    return bench.once(f"converted {path}", make)
