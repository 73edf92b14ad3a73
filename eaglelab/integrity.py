"""Verify a capture on reading: whole, ordered, consistent with itself and with what was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from eaglelab.errors import BadInput

if TYPE_CHECKING:
    from eaglelab.capture import Capture, Event


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(of, value))


_texts, _counts, _tokens = _list(_text), _list(_count), _list(_list(_count))
_flags = _list(lambda value: isinstance(value, bool))
_EVERY = {"seq": _count, "rank": _text, "tensors": lambda value: isinstance(value, dict)}
_BATCH = {"rids": _texts, "seq_lens": _counts, "token_ids": _tokens}
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "request": {"rid": _text, "input_ids": _counts, "cached_prefix": _count},
    "prefill_extend": _BATCH | {"lengths": _counts, "chunked": _flags},
    "draft": _BATCH | {"steps": _count, "topk": _count, "draft_tokens": _count},
    "decode_extend": _BATCH | {"lengths": _counts, "accept_lens": _counts},
    "reprefill": _BATCH | {"lengths": _counts, "of": _text},
}


def verify(capture: Capture) -> None:
    """Raise BadInput on damage (file, event, field); put evidence, as non-finite rows, in `.problems`."""
    from eaglelab.capture import SITES

    widths: dict[str, int] = {}
    due: dict[str, int] = {}
    for event in capture.events():
        _fields(event)
        if event.data["seq"] != due.get(event.rank, 0):
            text = f"{event.data['seq']} where {due.get(event.rank, 0)} was due: an event is missing"
            raise event.fail("seq", text)
        due[event.rank] = event.data["seq"] + 1
        _rows(event)
        for name in event.data["tensors"]:
            _finite(event, name)
        site = SITES.get(event.kind, "")
        if site in event.data["tensors"]:
            width = event.shape(site)[-1]
            if widths.setdefault(event.kind, width) != width:
                raise event.fail(f"tensors.{site}.shape", f"width {width} after {widths[event.kind]}")
    _written(capture, due)
    _said(capture)
    _sent(capture)


def _fields(event: Event) -> None:
    """Every field that this kind of event must carry is there, and lists are as long as the batch."""
    data = event.data
    for name, fits in (_EVERY | _FIELDS[event.kind]).items():
        value = data.get(name)
        if not fits(value):
            raise event.fail(name, "missing" if value is None else f"does not fit: {str(value)[:80]}")
        if isinstance(value, list) and event.kind != "request" and len(value) != len(data["rids"]):
            raise event.fail(name, f"{len(value)} entries for {len(data['rids'])} requests")
    for name, entry in data["tensors"].items():
        if not isinstance(entry, dict) or not {"shard", "key", "dtype", "shape"} <= entry.keys():
            raise event.fail(f"tensors.{name}", f"needs shard, key, dtype and shape; found {str(entry)[:80]}")


def _rows(event: Event) -> None:
    """Rows, lengths and token counts of one event agree."""
    data = event.data
    if event.kind == "request":
        return
    draft = event.kind == "draft"
    lengths = [data["draft_tokens"] - 1] * len(data["rids"]) if draft else data["lengths"]
    for j, (ids, length) in enumerate(zip(data["token_ids"], lengths, strict=True)):
        if len(ids) != length:
            raise event.fail(f"token_ids[{j}]", f"{len(ids)} tokens where {length} were due")
    if event.kind == "decode_extend" and data["accept_lens"] != lengths:
        raise event.fail("accept_lens", f"{data['accept_lens']} for rows {lengths}")
    if event.kind in ("prefill_extend", "decode_extend") and "features" not in data["tensors"]:
        raise event.fail("tensors.features", "missing")
    rows = len(data["rids"]) if draft else sum(lengths)
    for name, entry in data["tensors"].items():
        if len(entry["shape"]) != 2 or entry["shape"][0] != rows:
            raise event.fail(f"tensors.{name}.shape", f"{entry['shape']} where {rows} rows were due")


def _finite(event: Event, name: str) -> None:
    from eaglelab.capture import STORED, Problem

    dtype = event.dtype(name)
    if dtype not in STORED:
        raise event.fail(f"tensors.{name}.dtype", f"{dtype!r} is not one of {', '.join(STORED)}")
    array = event.tensor(name)
    if dtype == "bfloat16":  # the exponent's bits all ones: infinite or not a number
        bad = int(np.count_nonzero((array & 0x7F80) == 0x7F80))
    else:
        bad = int(array.size - np.count_nonzero(np.isfinite(array)))
    if bad:
        text = f"{bad} of {array.size} values of {name} are not finite"
        where = f"{event.kind}, rank {event.rank}, seq {event.data['seq']}"
        event.capture.problems.append(Problem("finding", where, text))


def _written(capture: Capture, found: dict[str, int]) -> None:
    """As many events as each rank says it wrote; what a rank dropped is said."""
    from eaglelab.capture import Problem

    path = capture.path / "capture.json"
    for rank in found:
        if rank not in capture.ranks:
            raise BadInput(f"{path}: ranks: events.jsonl has events of {rank}, which is not listed")
    for rank, counts in capture.ranks.items():
        written, have = counts.get("written"), found.get(rank, 0)
        if written != have:
            raise BadInput(f"{path}: ranks.{rank}.written: {written}, but events.jsonl has {have}: not whole")
        for rid, why in counts.get("dropped_rids", {}).items():
            capture.problems.append(Problem("warning", f"rank {rank}", f"{rid} was dropped: {why}"))


def _said(capture: Capture) -> None:
    """What the probe says of itself that a reader must know: ranks unseen, errors, re-prefills lost."""
    from eaglelab.capture import Problem

    meta = capture.meta
    found = [("server", f"rungs 3 to 5 cannot be measured: {why}") for why in meta.get("limits", [])]
    if meta.get("missing_ranks"):
        found.append(
            ("ranks", f"{meta['missing_ranks']} ranks were not seen; their node keeps its own folder")
        )
    for rank, counts in capture.ranks.items():
        if counts.get("errors"):
            found.append(
                (f"rank {rank}", f"errors in the probe {counts['errors']}: {counts.get('last_error')}")
            )
    found += [(f"rank {rank}", note) for rank, note in meta.get("rank_notes", {}).items()]
    for rid, answer in meta.get("reprefill", {}).get("requests", {}).items():
        if rid not in capture.reprefill:
            found.append(
                ("re-prefill", f"{rid}: {answer.get('skipped') or 'the server recorded nothing of it'}")
            )
    capture.problems += [Problem("warning", where, text) for where, text in found]


def _sent(capture: Capture) -> None:
    """What was captured is what was sent and answered, token by token; what is missing is said."""
    from eaglelab.capture import Problem

    dropped = {rid for counts in capture.ranks.values() for rid in counts.get("dropped_rids", {})}
    for rid in sorted(capture.sent.keys() - capture.requests.keys() - dropped):
        capture.problems.append(Problem("warning", "requests", f"{rid} was sent, but nothing of it captured"))
    path, events = capture.path / "capture.json", capture.path / "events.jsonl"
    for rid, trace in capture.requests.items():
        ids = capture.sent.get(rid, {}).get("input_ids")
        if ids is not None and ids != trace.prompt_ids:
            raise BadInput(f"{path}: requests.{rid}.input_ids: not the tokens that the server prefilled")
        prompt, answer = trace.tokens[: trace.prompt_len], trace.tokens[trace.prompt_len :]
        if prompt != trace.prompt_ids[: len(prompt)]:
            raise BadInput(f"{events}: {rid}: token_ids: the fed ids are not the prompt, shifted by one")
        output = trace.output_ids or []
        if any(a != b for a, b in zip(output, answer, strict=False)):
            raise BadInput(f"{path}: requests.{rid}.output_ids: not the tokens that were captured")
