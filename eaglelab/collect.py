"""Capture a running server: arm, send, collect, disarm, and put a verified capture in place, or nothing at
all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from eaglelab import __version__
from eaglelab.capture import SCHEMA, Capture, open_capture, write_json
from eaglelab.errors import AttachError, BadInput
from eaglelab.prompts import Prompt, as_prompts
from eaglelab.server import Answer, Server, ServerFacts

SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # names that the server may give to files
TTL = 1800.0  # seconds that the probe stays armed if we vanish; renewed before every batch
Progress = Callable[[str, int, int], None]  # what, done, of


def capture_server(
    server: Server,
    prompts: Sequence[Prompt | str | list[int]],
    out: str | Path,
    max_new_tokens: int = 128,
    *,
    all_ranks: bool = False,
    reprefill: bool = True,
    depths: Sequence[int] | None = None,
    target: bool = False,
    ignore_eos: bool = False,
    texts: Sequence[Sequence[int]] = (),
    batch: int | None = None,
    max_bytes: int = 32 << 30,
    all_traffic: bool = False,
    progress: Progress | None = None,
    patience: float = 120.0,
) -> Capture:
    """Send `prompts` greedily to an armed server and collect what its drafter was fed.

    out: a directory that does not exist, or is empty. all_ranks: record every tensor-parallel rank.
    reprefill: send each text again as one prefill, recording the residual stream at `depths` (None:
    all). target: also fetch the target's embedding, norm and head. texts: token ids that are only
    prefilled (the trainer's stored texts, for rung 3), under the request ids PREFIX-stored-<i>. batch:
    requests at a time (None: up to 8, or the server's maximum). patience: seconds for the ranks to arm
    and to close. Raises AttachError, BadInput.
    """
    out, show = Path(out), progress or bar()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} exists; name a new folder for the capture, or an empty one")
    facts = server.require_speculation()
    status = server.probe_status(facts)
    _check_hooks(server, status)
    asked = as_prompts(prompts)
    size = batch or min(8, int(facts.fields.get("max_running_requests") or 8))
    order = server.arm(
        all_ranks=all_ranks, target=target, all_traffic=all_traffic,
        max_requests=max(256, len(asked) + len(texts)),
        max_bytes=max_bytes, ttl_s=TTL,
    )  # fmt: skip
    meta: dict[str, Any] = {
        "schema": SCHEMA,
        "eaglelab": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "id": order["id"],
        "requests": {},
    }
    try:
        status = _wait(server, lambda r: r["armed"] == order["id"], patience, "arm")
        answers = _send(server, asked, order["rid_prefix"], max_new_tokens, ignore_eos, size, meta, show)
        if texts:
            stored = as_prompts([list(ids) for ids in texts])
            _send(server, stored, order["rid_prefix"] + "stored-", 1, True, size, meta, show, "stored texts")
        meta["reprefill"] = {"state": "not asked", "requests": {}}
        if reprefill:
            _reprefill(server, status, order, facts, meta, depths, show)
        counters = server.counters(answers)
        meta["measurements"] = [m.model_dump() for m in counters.measurements()]
    finally:
        with contextlib.suppress(AttachError):
            server.disarm()
    status = _wait(server, lambda r: r["closed"], patience, "close")
    _describe(meta, facts, status)
    capture = _assemble(server, order["id"], out, meta, max_bytes, show)
    with contextlib.suppress(AttachError):
        server.discard(order["id"])
    return capture


def bar() -> Progress:
    """A progress bar on stderr where that is a terminal, else a line when something begins."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def show(what: str, done: int, of: int) -> None:
        if what not in bars:
            quiet = not sys.stderr.isatty()
            if quiet:
                print(f"capture: {what} ({of})", file=sys.stderr, flush=True)
            bars[what] = tqdm(total=of, desc=what, file=sys.stderr, disable=quiet, leave=False)
        bars[what].update(done - bars[what].n)
        if done >= of:
            bars[what].close()

    return show


def _check_hooks(server: Server, status: dict[str, Any]) -> None:
    if not status["ranks"]:
        raise AttachError(f"{server.url}: no scheduler has reported to the probe yet. Is it still starting?")
    for rank, said in status["ranks"].items():
        missing = [name for name, took in said["hooks"].items() if not took and "Graph" not in name]
        if missing:
            text = f"SGLang {said['facts'].get('engine', {}).get('version')} has no {', '.join(missing)}"
            raise AttachError(f"{server.url}: the probe could not hook rank {rank}: {text}.")


def _wait(server: Server, ready: Callable[[dict], bool], patience: float, what: str) -> dict[str, Any]:
    """Poll until every rank that the HTTP process can see is ready."""
    until = time.monotonic() + patience
    while True:
        status = server.probe_status()
        late = [rank for rank, said in status["ranks"].items() if not ready(said)]
        if not late:
            return status
        if time.monotonic() > until:
            raise AttachError(f"{server.url}: ranks {', '.join(late)} did not {what} within {patience:.0f} s")
        time.sleep(0.1)


def _send(
    server: Server, prompts: list[Prompt], prefix: str, max_new_tokens: int, ignore_eos: bool, size: int,
    meta: dict[str, Any], show: Progress, what: str = "prompts",
) -> list[Answer]:  # fmt: skip
    """Generate in batches; what was sent and answered goes to meta["requests"]."""
    ids = [server.token_ids(prompt) for prompt in prompts]
    answers: list[Answer] = []
    show(what, 0, len(prompts))
    for group in _groups([one is None for one in ids], size):
        sent: Any = [ids[i] if ids[i] is not None else prompts[i].prompt for i in group]
        server.renew(meta["id"])
        got = server.generate(sent, max_new_tokens, [f"{prefix}{i:04d}" for i in group], ignore_eos)
        answers += got
        for i, answer in zip(group, got, strict=True):
            meta["requests"][answer.rid] = {
                "input_ids": ids[i],
                "output_ids": answer.output_ids,
                "text": answer.text,
                "counters": {k: v for k, v in answer.meta_info.items() if k.startswith("spec_")},
                "finish_reason": answer.meta_info.get("finish_reason"),
            }
        show(what, len(answers), len(prompts))
    return answers


def _groups(kinds: list[bool], size: int) -> list[list[int]]:
    """Consecutive indices of one kind (a batch holds only token ids or only texts), `size` at most."""
    groups: list[list[int]] = []
    for i, kind in enumerate(kinds):
        if not groups or len(groups[-1]) == size or kinds[groups[-1][0]] != kind:
            groups.append([])
        groups[-1].append(i)
    return groups


def _reprefill(
    server: Server, status: dict[str, Any], order: dict[str, Any], facts: ServerFacts, meta: dict[str, Any],
    depths: Sequence[int] | None, show: Progress,
) -> None:  # fmt: skip
    """Send each prompt and output once more as one prefill, under the id that the probe answers to."""
    state = meta["reprefill"]
    off = next((said["reprefill_off"] for said in status["ranks"].values() if said["reprefill_off"]), None)
    if off:
        state.update(state="skipped", reason=off)
        return
    model = next(iter(status["ranks"].values()))["facts"]["target"]
    layers = model["num_layers"]
    if not all(0 <= depth <= layers for depth in depths or ()):
        raise BadInput(
            f"depths {list(depths or ())}: the target has {layers} layers, so depths 0 to {layers}"
        )
    width = 4 if model["dtype"] == "float32" else 2
    row = model["hidden_size"] * width * (len(depths) if depths else layers + 1)
    room = max(1, status["reprefill_budget"] // row)  # tokens
    wanted = "all" if depths is None else "-".join(map(str, depths))
    texts = {
        rid: sent["input_ids"] + sent["output_ids"]
        for rid, sent in meta["requests"].items()
        if sent["input_ids"] is not None and sent["output_ids"] is not None
    }
    state.update(state="done", depths=wanted)
    if len(texts) < len(meta["requests"]):
        state["reason"] = f"{len(meta['requests']) - len(texts)} texts have no known token ids"
    show("re-prefill", 0, len(texts))
    for done, (rid, text) in enumerate(texts.items(), 1):
        if len(text) > room:
            state["requests"][rid] = {"skipped": f"{len(text)} tokens are over the probe's budget of {room}"}
        else:  # one at a time: the budget is for a whole batch
            steps = int(facts.fields.get("speculative_num_steps") or 1)
            name = f"{order['reprefill_prefix']}.{wanted}.{rid}"
            server.renew(order["id"])
            answer = server.generate([text], steps, [name], ignore_eos=True)[0]
            state["requests"][rid] = {"further": answer.output_ids}
        show("re-prefill", done, len(texts))


def _describe(meta: dict[str, Any], facts: ServerFacts, status: dict[str, Any]) -> None:
    """Facts, ranks and what was lost, from the closed ranks' own words."""
    ranks = status["ranks"]
    model = next(iter(ranks.values()))["facts"]
    meta["server"] = {**facts.fields, "target": model.get("target")}
    meta["engine"] = model.get("engine")
    meta["probe"] = {"version": status["probe"], "hooks": next(iter(ranks.values()))["hooks"]}
    meta["model"] = model
    meta["missing_ranks"] = max(0, int(model.get("expected_ranks") or 1) - len(ranks))
    meta["ranks"] = {}
    for rank, said in ranks.items():
        session = said["session"] if said["session"] and said["session"]["id"] == meta["id"] else None
        if session:
            wanted = ("seen", "written", "dropped", "dropped_rids", "bytes", "errors", "last_error")
            meta["ranks"][rank] = {"primary": said["primary"], **{k: session[k] for k in wanted}}
    meta["limits"] = limits(facts)
    notes = {rank: said["parameters"] for rank, said in ranks.items()}
    meta["rank_notes"] = {rank: note for rank, note in notes.items() if note != "done"}


def limits(facts: ServerFacts) -> list[str]:
    """Why this server's own drafts cannot be replayed (rungs 4 and 5), or nothing."""
    found = []
    if facts.fields.get("speculative_use_rejection_sampling"):
        found.append("rejection sampling: draft tokens are drawn at random")
    if facts.fields.get("disaggregation_mode") not in (None, "null", ""):
        found.append("prefill and decode are disaggregated: no server has both halves of a request")
    return found


def _assemble(
    server: Server, arm_id: str, out: Path, meta: dict[str, Any], max_bytes: int, show: Progress
) -> Capture:
    """Download into OUT.partial, verify, rename. On any failure nothing is left."""
    files = server.files(arm_id)
    total = sum(int(f["bytes"]) for f in files)
    if total > max_bytes:
        sizes = f"{total >> 20} MiB, over the limit of {max_bytes >> 20} MiB"
        raise AttachError(f"{server.url}: the capture is {sizes}")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if total * 1.2 > free:
        raise BadInput(f"{out.parent}: the capture needs {total >> 20} MiB, {free >> 20} MiB are free")
    partial = out.with_name(out.name + f".partial-{os.getpid()}")
    partial.mkdir()
    try:
        meta["parameters"] = {}
        shards: list[Path] = []
        with open(partial / "events.jsonl", "wb") as events:
            for done, entry in enumerate(files, 1):
                _take(server, arm_id, entry, partial, events, meta, shards)
                show("download", done, len(files))
        if shards:
            write_target(partial / "target", shards, meta["model"])
            for shard in shards:
                shutil.rmtree(shard, ignore_errors=True)
        write_json(partial / "capture.json", meta)
        open_capture(partial)
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return open_capture(out)


def _take(
    server: Server, arm_id: str, entry: dict, partial: Path, events: Any, meta: dict, shards: list[Path]
) -> None:
    """One file of one rank, checked against its announced size and sha256, to its place in the capture."""
    rank, name, size = str(entry["rank"]), str(entry["name"]), int(entry["bytes"])
    if not (SAFE.fullmatch(name) and SAFE.fullmatch(rank)):
        raise AttachError(f"{server.url}: {rank}/{name}: not a file name")
    landing = partial / f"{rank}.{name}.download"
    with open(landing, "wb") as sink:
        server.download(arm_id, rank, name, sink, size)
    digest = hashlib.sha256()
    with open(landing, "rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    if landing.stat().st_size != size or digest.hexdigest() != entry["sha256"]:
        raise AttachError(f"{server.url}: {rank}/{name} arrived damaged; capture again")
    if name == "events.jsonl":
        with open(landing, "rb") as source:
            shutil.copyfileobj(source, events)
    elif name == "parameters.json":
        meta["parameters"][rank] = json.loads(landing.read_text(encoding="utf-8"))
    elif name.startswith("target."):
        folder = partial / f"target-{rank}"
        folder.mkdir(exist_ok=True)
        os.replace(landing, folder / name)
        if folder not in shards:
            shards.append(folder)
        return
    elif name.startswith(f"shard-{rank}-") and name.endswith(".safetensors"):
        os.replace(landing, partial / name)
        return
    else:
        raise AttachError(f"{server.url}: {rank}/{name}: not a file of a capture")
    landing.unlink()


def write_target(folder: Path, shards: list[Path], model: dict[str, Any]) -> None:
    """Join the ranks' rows of the target's tensors, cut to the vocabulary: target.safetensors and
    config.json.
    """
    from safetensors.numpy import load_file

    facts = model["target"]
    whole: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    filled: dict[str, np.ndarray] = {}
    for shard in shards:
        about = json.loads((shard / "target.json").read_text(encoding="utf-8"))
        dtypes |= about["dtypes"]
        for name, array in load_file(shard / "target.safetensors").items():
            first, end = about["rows"].get(name, [0, len(array)])
            rows = facts["vocab_size"] if name in about["rows"] else len(array)
            joined = whole.setdefault(name, np.zeros((rows, *array.shape[1:]), array.dtype))
            joined[first:end] = array
            filled.setdefault(name, np.zeros(rows, bool))[first:end] = True
    lost = [name for name, rows in filled.items() if not rows.all()]
    if lost:
        raise AttachError(f"the target's {', '.join(lost)}: rows are missing; a rank was not seen")
    folder.mkdir()
    _save(folder / "target.safetensors", whole, dtypes)
    config = {
        "architectures": [facts["architecture"]],
        "hidden_size": facts["hidden_size"],
        "num_hidden_layers": facts["num_layers"],
        "vocab_size": facts["vocab_size"],
        "torch_dtype": facts["dtype"],
        **model["target_config"],
    }
    write_json(folder / "config.json", config)


def _save(path: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str]) -> None:
    """A safetensors file under the tensors' true dtypes, bfloat16 among them, which numpy cannot name."""
    codes = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
    header, offset = {}, 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": codes[dtypes[name]],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            out.write(np.ascontiguousarray(array).data)
        out.flush()
        os.fsync(out.fileno())
