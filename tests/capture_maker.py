"""Makes captures as a server would leave them, together with the truth that went into them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eaglelab.capture import SCHEMA, CaptureWriter, from_float32

SERVER = {"speculative_algorithm": "EAGLE3", "version": "0.5.23", "tp_size": 1}


@dataclass
class Truth:
    """One request as it was: features of every position, tokens, where its rounds began."""

    prompt: list[int]
    accepts: list[int]
    chunk: int
    tokens: list[int] = field(default_factory=list)
    features: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    drafts: list[list[int]] = field(default_factory=list)


def make_capture(
    folder: Path,
    requests: list[tuple[int, list[int], int]] = (
        (5, [1, 3], 99),
    ),  # prompt length, accept lengths, chunk size
    width: int = 6,
    dtype: str = "float32",
    topk: int = 1,
    draft_tokens: int = 4,
    seed: int = 0,
    shard_bytes: int = 64 << 20,
) -> dict[str, Truth]:
    """Requests are prefilled one by one, then drafted and verified in one batch while they have rounds."""
    random = np.random.default_rng(seed)
    truths = {}
    for i, (length, accepts, chunk) in enumerate(requests):
        rows = length + sum(accepts)
        truth = Truth(random.integers(0, 1000, length).tolist(), accepts, chunk)
        truth.tokens = truth.prompt + random.integers(0, 1000, rows + 1 - length).tolist()
        truth.features = from_float32(random.normal(size=(rows, width)).astype(np.float32), dtype)
        truth.drafts = random.integers(0, 1000, (len(accepts), draft_tokens - 1)).tolist()
        truths[f"r{i}"] = truth

    writer = CaptureWriter(folder, "dp0.tp0", shard_bytes)
    at = dict.fromkeys(truths, 0)
    for rid, truth in truths.items():
        writer.add("request", {"rid": rid, "input_ids": truth.prompt, "cached_prefix": 0}, {})
        while at[rid] < len(truth.prompt):
            start, end = at[rid], min(at[rid] + truth.chunk, len(truth.prompt))
            about = {
                "mode": "EXTEND", "graph": "eager", "rids": [rid], "seq_lens": [start],
                "lengths": [end - start],
                "token_ids": [truth.tokens[start + 1 : end + 1]], "chunked": [end < len(truth.prompt)],
            }  # fmt: skip
            writer.add("prefill_extend", about, {"features": (truth.features[start:end], dtype)})
            at[rid] = end
    spec = {
        "mode": "DECODE",
        "graph": "eager",
        "steps": draft_tokens - 1,
        "topk": topk,
        "draft_tokens": draft_tokens,
    }
    for j in range(max(len(t.accepts) for t in truths.values())):
        live = [rid for rid, t in truths.items() if j < len(t.accepts)]
        batch = {**spec, "rids": live, "seq_lens": [at[rid] for rid in live]}
        about = {**batch, "token_ids": [truths[rid].drafts[j] for rid in live]}
        if topk > 1:  # a root with one child, whose siblings are the rest
            about["next_token"] = [[1] + [-1] * (draft_tokens - 1) for _ in live]
            about["next_sibling"] = [[-1, *range(2, draft_tokens), -1] for _ in live]
        fed = random.normal(size=(len(live), 3)).astype(np.float32)
        writer.add("draft", about, {"fed": (fed, "float32")})
        accepts = [truths[rid].accepts[j] for rid in live]
        rows = [(rid, at[rid], at[rid] + n) for rid, n in zip(live, accepts, strict=True)]
        about = {
            **batch, "lengths": accepts, "accept_lens": accepts,
            "token_ids": [truths[rid].tokens[a + 1 : b + 1] for rid, a, b in rows],
        }  # fmt: skip
        features = np.concatenate([truths[rid].features[a:b] for rid, a, b in rows])
        writer.add("decode_extend", about, {"features": (features, dtype)})
        for rid, _, end in rows:
            at[rid] = end
    writer.close()
    write_meta(folder, truths, writer.events)
    return truths


def write_meta(folder: Path, truths: dict[str, Truth], written: int) -> None:
    requests = {
        rid: {"input_ids": t.prompt, "output_ids": t.tokens[len(t.prompt) :]} for rid, t in truths.items()
    }
    ranks = {
        "dp0.tp0": {"primary": True, "seen": written, "written": written, "dropped": 0, "dropped_rids": {}}
    }
    meta = {"schema": SCHEMA, "server": SERVER, "ranks": ranks, "requests": requests}
    (folder / "capture.json").write_text(json.dumps(meta))


def edit_event(folder: Path, kind: str, change, index: int = 0) -> int:
    """Apply `change` to the data of the `index`-th event of `kind`; returns its line number."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines()
    numbers = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == kind]
    data = json.loads(lines[numbers[index]])
    change(data)
    lines[numbers[index]] = json.dumps(data)
    path.write_text("\n".join(lines) + "\n")
    return numbers[index] + 1
