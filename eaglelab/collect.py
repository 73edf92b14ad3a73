"""Capture a running server: arm, send, collect, disarm; a verified capture in its place, or nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eaglelab import __version__
from eaglelab.assemble import assemble
from eaglelab.capture import SCHEMA, Capture
from eaglelab.counters import Counters, abortion
from eaglelab.errors import AttachError, BadInput
from eaglelab.prompts import Prompt, as_prompts
from eaglelab.server import Answer, Server, ServerFacts

TTL = 300.0  # seconds that the probe stays armed if we vanish; renewed before every batch
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
    asked = as_prompts(prompts)
    room = max(256, len(asked) + len(texts))
    recording = Recording(
        server, out, all_ranks=all_ranks, all_traffic=all_traffic, target=target, batch=batch,
        max_requests=room, max_bytes=max_bytes, progress=progress, patience=patience,
    )  # fmt: skip
    with recording:
        recording.send(asked, max_new_tokens, ignore_eos)
        if texts:
            recording.prefill(texts)
        if reprefill:
            recording.reprefill(depths)
    return recording.collect()


class Recording:
    """An armed server: `with Recording(server, out) as r:`, `r.send(...)`, often; then `r.collect()`.

    The block is entered when every rank is armed, and leaving it disarms. Parameters as in `capture_server`;
    ttl: seconds that the probe stays armed without a word from us (`renew`, and every batch, says one).
    answers: those to `send`, so far.
    """

    def __init__(
        self,
        server: Server,
        out: str | Path,
        *,
        all_ranks: bool = False,
        all_traffic: bool = False,
        target: bool = False,
        batch: int | None = None,
        max_requests: int = 256,
        max_bytes: int = 32 << 30,
        ttl: float = TTL,
        progress: Progress | None = None,
        patience: float = 120.0,
    ) -> None:
        self.server, self.out, self.show, self.patience = server, Path(out), progress or bar(), patience
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise BadInput(f"{self.out} exists; name a new folder for the capture, or an empty one")
        above = next(p for p in (self.out.absolute(), *self.out.absolute().parents) if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise BadInput(f"{self.out}: {above} is no folder that can be written to; nothing was recorded")
        self.facts = server.require_speculation()
        _check_hooks(server, server.probe_status(self.facts))
        self.size = batch or min(8, int(self.facts.fields.get("max_running_requests") or 8))
        self.max_bytes = max_bytes
        self._order = {
            "all_ranks": all_ranks, "target": target, "all_traffic": all_traffic,
            "max_requests": max_requests, "max_bytes": max_bytes, "ttl_s": float(ttl),
        }  # fmt: skip
        self.answers: list[Answer] = []
        self.id = ""

    def __enter__(self) -> Recording:
        try:
            with _uninterrupted():
                self._armed = self.server.arm(**self._order)
                self.id = self._armed["id"]
            self._status = _wait(self.server, lambda r: r["armed"] == self.id, self.patience, "arm")
        except BaseException:
            if self.id:
                self.__exit__()
            raise
        self.meta: dict[str, Any] = {
            "schema": SCHEMA,
            "eaglelab": __version__,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "id": self.id,
            "requests": {},
            "reprefill": {"state": "not asked", "requests": {}},
        }
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted(), contextlib.suppress(AttachError):
            self.server.disarm()

    def renew(self) -> None:
        """Stay armed for another time to live. AttachError where somebody has disarmed it."""
        self.server.renew(self.id)

    def send(
        self,
        prompts: Sequence[Prompt | str | list[int]],
        max_new_tokens: int = 128,
        ignore_eos: bool = False,
    ) -> list[Answer]:
        """Generate greedily, in batches; `answers` grows with each of them."""
        asked = as_prompts(prompts)
        _check_tokens(self.server, asked, self._vocab_size, self.facts)
        prefix = self._armed["rid_prefix"]
        return _send(self, asked, prefix, max_new_tokens, ignore_eos, "prompts", self.answers)

    def prefill(self, texts: Sequence[Sequence[int]]) -> None:
        """Send the trainer's stored texts, to be prefilled only."""
        stored = as_prompts([list(ids) for ids in texts])
        _check_tokens(self.server, stored, self._vocab_size, self.facts, "stored text")
        _send(self, stored, self._armed["rid_prefix"] + "stored-", 1, True, "stored texts", [])

    def reprefill(self, depths: Sequence[int] | None = None) -> None:
        """Send every text so far again as one prefill."""
        _reprefill(self, self._status, self._armed["reprefill_prefix"], depths)

    def counters(self) -> Counters:
        """What the server has counted of the answers so far."""
        return self.server.counters(self.answers, self.facts)

    def collect(self) -> Capture:
        """Disarmed, fetch what was recorded: the capture in its place, verified, or nothing there."""
        counters = self.server.counters(self.answers)
        self.meta["measurements"] = [m.model_dump() for m in counters.measurements()]
        status = _wait(self.server, lambda r: r["closed"], self.patience, "close")
        _describe(self.meta, self.facts, status)
        capture = assemble(self.server, self.id, self.out, self.meta, self.max_bytes, self.show)
        with contextlib.suppress(AttachError):
            self.server.discard(self.id)
        return capture

    @property
    def _vocab_size(self) -> int | None:
        return (next(iter(self._status["ranks"].values()))["facts"].get("target") or {}).get("vocab_size")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and the like wait for the end of the block: an order cut short would leave a server armed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {n: handler for n, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


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


def _check_tokens(
    server: Server, prompts: list[Prompt], vocab_size: int | None, facts: ServerFacts, what: str = "prompt"
) -> None:
    """Before anything is sent: SGLang does not check token ids, and dies of one outside its vocabulary."""
    longest = facts.fields.get("context_length")
    for number, prompt in enumerate(prompts, 1):
        ids = prompt.input_ids
        if ids is None:
            continue
        bad = [i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
        if bad:
            size = f"the target's vocabulary of {vocab_size:,}"
            raise BadInput(f"{what} {number}: token id {bad[0]} is outside {size}; nothing was sent")
        if longest and len(ids) >= longest:
            raise BadInput(
                f"{what} {number}: {len(ids):,} tokens do not fit the server's context of {longest:,}"
            )


def _send(
    recording: Recording, prompts: list[Prompt], prefix: str, max_new_tokens: int, ignore_eos: bool,
    what: str, answers: list[Answer],
) -> list[Answer]:  # fmt: skip
    """Generate in batches; what was sent and answered goes to meta["requests"], the answers to `answers`."""
    server, show, first = recording.server, recording.show, len(answers)
    ids = [server.token_ids(prompt) for prompt in prompts]
    show(what, 0, len(prompts))
    for group in _groups([one is None for one in ids], recording.size):
        sent: Any = [ids[i] if ids[i] is not None else prompts[i].prompt for i in group]
        recording.renew()
        rids = [f"{prefix}{first + i:04d}" for i in group]
        got = server.generate(sent, max_new_tokens, rids, ignore_eos)
        answers += got
        for i, answer in zip(group, got, strict=True):
            recording.meta["requests"][answer.rid] = {
                "input_ids": ids[i],
                "output_ids": answer.output_ids,
                "text": answer.text,
                "counters": {k: v for k, v in answer.meta_info.items() if k.startswith("spec_")},
                "finish_reason": answer.meta_info.get("finish_reason"),
            }
        show(what, len(answers) - first, len(prompts))
    return answers[first:]


def _groups(kinds: list[bool], size: int) -> list[list[int]]:
    """Consecutive indices of one kind (a batch holds only token ids or only texts), `size` at most."""
    groups: list[list[int]] = []
    for i, kind in enumerate(kinds):
        if not groups or len(groups[-1]) == size or kinds[groups[-1][0]] != kind:
            groups.append([])
        groups[-1].append(i)
    return groups


def _reprefill(
    recording: Recording, status: dict[str, Any], prefix: str, depths: Sequence[int] | None
) -> None:
    """Send each prompt and output once more as one prefill, under the id that the probe answers to."""
    server, facts, meta, show = recording.server, recording.facts, recording.meta, recording.show
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
        if sent["input_ids"] is not None and sent["output_ids"] is not None and abortion(sent) is None
    }
    state.update(state="done", depths=wanted)
    if len(texts) < len(meta["requests"]):
        state["reason"] = (
            f"{len(meta['requests']) - len(texts)} texts were aborted, or have no known token ids"
        )
    show("re-prefill", 0, len(texts))
    for done, (rid, text) in enumerate(texts.items(), 1):
        if len(text) > room:
            state["requests"][rid] = {"skipped": f"{len(text)} tokens are over the probe's budget of {room}"}
        else:  # one at a time: the budget is for a whole batch
            steps = int(facts.fields.get("speculative_num_steps") or 1)
            name = f"{prefix}.{wanted}.{rid}"
            recording.renew()
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
    meta["rank_notes"] = {rank: note for rank, said in ranks.items() if (note := _note(said))}


def _note(said: dict[str, Any]) -> str:
    """What went wrong in a rank's probe outside its session: parameters not read, errors of its own."""
    found = [said["parameters"]] if said["parameters"] != "done" else []
    if said.get("errors"):
        found.append(f"errors in the probe since the server started {said['errors']}: {said['last_error']}")
    return "; ".join(found)


def limits(facts: ServerFacts) -> list[str]:
    """Why this server's own drafts cannot be replayed (rungs 4 and 5), or nothing."""
    found = []
    if facts.fields.get("speculative_use_rejection_sampling"):
        found.append("rejection sampling: draft tokens are drawn at random")
    if facts.fields.get("disaggregation_mode") not in (None, "null", ""):
        found.append("prefill and decode are disaggregated: no server has both halves of a request")
    return found
