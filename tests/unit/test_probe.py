"""The probe on stand-ins for SGLang's worker: what it records, what it drops, and that it never does harm."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_fakes import PREFIX, Engine, Mode, Request, make_worker

from eaglelab import probe
from eaglelab.capture import CaptureWriter, open_capture
from eaglelab.probe import hooks as hooks_module
from eaglelab.probe import parameters, recorder, reprefill, routes, session, spool, staging
from eaglelab.probe.hooks import Hooks
from eaglelab.probe.recorder import Recorder
from eaglelab.probe.session import Arm, Session

OURS, ALSO_OURS, THEIRS = PREFIX + "a", PREFIX + "b", "someone-else"


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def armed(folder, stager=None, **bounds) -> tuple[Hooks, Session]:
    """Hooks of a recorder whose session is armed, without its watching thread."""
    rec = Recorder(folder)
    rec.session = Session(
        Arm("test", PREFIX, **bounds), folder / "s", "dp0.tp0", stager or staging.CpuStager()
    )
    return Hooks(rec), rec.session


def finish(session, engine=None, outputs=True):
    """End the session and make a capture of what it wrote."""
    session.end()
    until(lambda: session.closed)
    folder = session._writer.folder
    said = session.status()
    requests = {}
    if engine:
        for r in engine.reqs:
            tokens = engine.tokens[r.rid][len(r.origin_input_ids) :]
            requests[r.rid] = {"input_ids": r.origin_input_ids, "output_ids": tokens if outputs else None}
    ranks = {"dp0.tp0": {"primary": True, "written": said["written"], "dropped_rids": said["dropped_rids"]}}
    meta = {"schema": 1, "server": {}, "requests": requests, "ranks": ranks}
    (folder / "capture.json").write_text(json.dumps(meta))
    return open_capture(folder)


# -- what it records


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("chunk", [3, 100])
def test_it_records_our_rows_before_they_are_overwritten(tmp_path, topk, chunk):
    hooks, live = armed(tmp_path)
    engine = Engine(hooks, make_worker(topk), [OURS, THEIRS, ALSO_OURS], [5, 7, 8])
    engine.prefill(chunk)
    for accepts in ([1, 2, 4], [3, 1, 1], [4, 4, 2]):
        engine.round(accepts)
    capture = finish(live, engine)
    assert set(capture.requests) == {OURS, ALSO_OURS}
    for rid, trace in capture.requests.items():
        assert (trace.state, trace.tokens) == ("complete", engine.tokens[rid])
        np.testing.assert_array_equal(trace.features, engine.features[rid].numpy())
        assert [r.draft_tokens for r in trace.rounds] == engine.drafts[rid]
        assert [r.accept_len for r in trace.rounds] == engine.accepts[rid]
        assert [r.parents for r in trace.rounds] == [None if topk == 1 else [0, 0, 0]] * 3
        assert all(np.abs(r.fed).max() < 10 and (r.fed != -1).any() for r in trace.rounds)
    text = (tmp_path / "s" / "events.jsonl").read_text()
    assert THEIRS not in text


def test_gather():
    rows = torch.arange(12).reshape(6, 2)
    for spans in ([(0, 6)], [(1, 3)], [(0, 2), (2, 3), (5, 6)], [(0, 1), (1, 2)]):
        wanted = [row for start, end in spans for row in rows[start:end].tolist()]
        taken = hooks_module.gather(rows, spans)
        assert taken.tolist() == wanted and taken.data_ptr() != rows[spans[0][0] :].data_ptr()


class Spy(staging.CpuStager):
    def __init__(self):
        self.rows = []

    def stage(self, tensors):
        self.rows += [len(tensors["features"])] if "features" in tensors else []
        return super().stage(tensors)


def test_rows_of_others_never_leave_the_device(tmp_path):
    spy = Spy()
    hooks, live = armed(tmp_path, spy)
    engine = Engine(hooks, make_worker(), [THEIRS, OURS, "HEALTH_CHECK_1"], [50, 4, 3])
    engine.prefill()
    engine.round([1, 2, 3])
    assert spy.rows == [4, 4]  # our four prompt rows, our one block of four
    assert list(finish(live, engine).requests) == [OURS]


def test_all_traffic_takes_everyone_but_health_checks(tmp_path):
    hooks, live = armed(tmp_path, all_traffic=True)
    engine = Engine(hooks, make_worker(), [THEIRS, OURS, "HEALTH_CHECK_1"], [5, 4, 3])
    engine.prefill()
    engine.round([1, 2, 3])
    assert set(finish(live, engine).requests) == {THEIRS, OURS}


def test_a_request_seen_too_late_is_left_alone(tmp_path):
    """Armed while a request was already decoding: it has no prefill here, so nothing of it is taken."""
    hooks, live = armed(tmp_path)
    live_session, hooks.recorder.session = hooks.recorder.session, None
    engine = Engine(hooks, make_worker(), [OURS], [5])
    engine.prefill()
    hooks.recorder.session = live_session
    engine.round([2])
    live.end()
    until(lambda: live.closed)
    assert live.status()["written"] == 0


def test_idle_batches_of_data_parallel_ranks_pass(tmp_path):
    hooks, live = armed(tmp_path)
    batch = SimpleNamespace(reqs=[], forward_mode=Mode("IDLE"))
    assert hooks.prefill_extend(lambda *a: "out", None, batch, None) == "out"
    assert hooks.draft(lambda *a: "out", None, batch) == "out"
    assert hooks.decode_extend(lambda *a: "out", None, batch, None) == "out"
    assert live.errors == {} and live.seen == 0


# -- bounds


class Stuck(staging.CpuStager):
    """Copies that do not finish until `go` is set: a slow disk, a busy bus."""

    def __init__(self):
        self.go = threading.Event()

    def stage(self, tensors):
        staged = super().stage(tensors)
        wait = staged.wait
        staged.wait = lambda: self.go.wait(30) and wait()
        return staged


@pytest.mark.parametrize("bound", [{"queue_events": 3}, {"queue_bytes": 900}])
def test_a_full_queue_drops_whole_requests_and_never_waits(tmp_path, bound):
    stuck = Stuck()
    hooks, live = armed(tmp_path, stuck, **bound)
    engine = Engine(hooks, make_worker(), [OURS, ALSO_OURS], [5, 6])
    start = time.monotonic()
    engine.prefill()
    for _ in range(6):
        engine.round([2, 1])
    assert time.monotonic() - start < 5
    assert set(live.dropped) == {OURS, ALSO_OURS} and set(live.dropped.values()) == {"the queue was full"}
    seen = live.seen
    engine.round([1, 1])
    assert live.seen == seen, "nothing more is taken of a dropped request"
    stuck.go.set()
    capture = finish(live, engine)
    assert [t.state for t in capture.requests.values()] == ["partial"] * len(capture.requests)
    assert len(capture.problems) == 2


def test_bounds_on_requests_events_and_bytes(tmp_path):
    for name, bounds, why in (
        ("a", {"max_requests": 1}, "more than 1 requests"),
        ("b", {"max_events": 4}, "more than 4 events"),
        ("c", {"max_bytes": 200}, "more than 200 bytes"),
    ):
        hooks, live = armed(tmp_path / name, **bounds)
        engine = Engine(hooks, make_worker(), [OURS, ALSO_OURS], [5, 6])
        engine.prefill()
        for _ in range(3):
            engine.round([1, 1])
        assert why in live.dropped.values()
        capture = finish(live, engine)
        dropped = [f"{rid} was dropped: {text}" for rid, text in live.dropped.items()]
        assert [p.text for p in capture.problems] == dropped


def test_requests_without_end_are_not_all_named(tmp_path, monkeypatch):
    """Under all traffic; the list goes into the status, again and again."""
    monkeypatch.setattr(session, "NAMED", 3)
    _, live = armed(tmp_path, all_traffic=True, max_requests=1)
    for i in range(10):
        live.admit(f"theirs-{i}", [1], 0)
    live.drop(["theirs-0"], "taken, so always named")
    assert list(live.dropped) == ["theirs-1", "theirs-2", "theirs-3", "theirs-0"]
    assert live.status()["dropped"] == 10
    finish(live)


def test_after_the_end_nothing_is_taken(tmp_path):
    hooks, live = armed(tmp_path)
    engine = Engine(hooks, make_worker(), [OURS], [5])
    engine.prefill()
    live.end()
    engine.round([1])
    assert live.dropped == {OURS: "the probe was disarmed"}
    finish(live, engine)


# -- it never does harm


def boom(*_args, **_kwargs):
    raise RuntimeError("injected")


FAULTS = {
    "gather": (hooks_module, "gather"),
    "spans": (hooks_module, "spans_of"),
    "split": (hooks_module, "split"),
    "admit": (Session, "admit"),
    "wants": (Session, "wants"),
    "record": (Session, "record"),
    "failed itself": (Session, "failed"),
    "drop": (Session, "drop"),
    "stage": (staging.CpuStager, "stage"),
    "wait": (staging.Staged, "wait"),
    "graph": (Hooks, "_graph"),
    "about": (Hooks, "_about"),
    "engine": (hooks_module.engine, "graph_backend_disabled"),
    "write": (CaptureWriter, "add"),
    "flush": (CaptureWriter, "flush"),
    "close": (CaptureWriter, "close"),
    "reprefill plan": (reprefill, "plan"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_ours_never_reaches_the_scheduler(tmp_path, monkeypatch, name):
    """The stand-in engine asserts that every call returns what the original returned."""
    monkeypatch.setattr(threading, "excepthook", lambda args: pytest.fail(f"a thread died: {args.exc_value}"))
    hooks, live = armed(tmp_path)
    monkeypatch.setattr(*FAULTS[name], boom)
    if name in ("failed itself", "drop"):  # called only when something else went wrong
        monkeypatch.setattr(hooks_module, "spans_of", boom)
    engine = Engine(hooks, make_worker(4), [OURS, THEIRS], [5, 6])
    engine.prefill(3)
    engine.round([1, 2])
    assert hooks.prefill(lambda worker, batch: "out", make_worker(), SimpleNamespace(reqs=[])) == "out"
    live.end()
    until(lambda: live.closed)
    counted = sum(live.errors.values()) + sum(hooks.recorder.errors.values())
    assert counted > 0, "counted, and so in the status"
    if live.errors and name not in ("drop", "flush", "close"):
        assert "injected" in live.last_error
        assert OURS in live.dropped or OURS not in live.admitted


def test_sglangs_own_errors_pass_through(tmp_path):
    hooks, live = armed(tmp_path)
    batch = SimpleNamespace(reqs=[], forward_mode=Mode("IDLE"))
    for hook in (hooks.prefill_extend, hooks.decode_extend):
        with pytest.raises(RuntimeError, match="injected"):
            hook(boom, None, batch, None)
    with pytest.raises(RuntimeError, match="injected"):
        hooks.draft(boom, None, batch)
    assert live.errors == {}


def test_a_full_disk_ends_the_session(tmp_path, monkeypatch):
    hooks, live = armed(tmp_path)
    engine = Engine(hooks, make_worker(), [OURS], [5])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CaptureWriter, "add", full)
    engine.prefill()
    until(lambda: live.closed)  # the client waits for it
    engine.round([1])
    assert "No space left" in live.last_error and live.dropped[OURS].startswith("an error in the probe")


def test_short_tensors_drop_the_request_not_the_server(tmp_path):
    hooks, live = armed(tmp_path)
    reqs = [Request(OURS, [1, 2, 3])]
    batch = SimpleNamespace(reqs=reqs, extend_lens=[3], prefix_lens=[0], input_ids=torch.zeros(3),
                            forward_mode=Mode("EXTEND"), chunked_req=None)  # fmt: skip
    assert hooks.prefill_extend(lambda *a: "out", make_worker(), batch, torch.zeros(2, 4)) == "out"
    assert "rows to 3 wanted, the tensor has 2" in live.last_error
    assert live.dropped == {OURS: "an error in the probe (prefill_extend)"}


def test_idle_is_one_attribute(tmp_path):
    """Idle, a hook touches neither batch nor worker."""
    hooks = Hooks(Recorder(tmp_path))
    assert hooks.prefill_extend(lambda *a: a, None, None, None) == (None, None, None)
    assert hooks.draft(lambda *a: a, None, None) == (None, None)
    assert hooks.decode_extend(lambda *a: a, None, None, None) == (None, None, None)


# -- the recorder and its control file


def watched(tmp_path) -> Recorder:
    rec = Recorder(tmp_path)
    rec.attach(make_worker())
    until((tmp_path / "dp0.tp0" / "status.json").exists)
    return rec


def said(tmp_path):
    return spool.statuses(tmp_path)["dp0.tp0"]


def test_arm_disarm_and_arm_again(tmp_path):
    rec = watched(tmp_path)
    assert said(tmp_path)["armed"] is None and rec.session is None
    spool.set_control(tmp_path, {"id": "one", "rid_prefix": PREFIX, "unknown": 1})
    until(lambda: said(tmp_path)["armed"] == "one")
    assert said(tmp_path)["records"] and not said(tmp_path)["closed"]
    engine = Engine(Hooks(rec), rec.worker, [OURS], [5])
    engine.prefill()
    engine.round([2])
    spool.set_control(tmp_path, None)
    until(lambda: said(tmp_path)["closed"] and said(tmp_path)["armed"] is None)
    status = said(tmp_path)["session"]
    assert (status["seen"], status["written"], status["requests"], status["dropped"]) == (4, 4, 1, 0)
    assert (tmp_path / "dp0.tp0" / "one" / "events.jsonl").exists()
    spool.set_control(tmp_path, {"id": "two", "rid_prefix": PREFIX})
    until(lambda: said(tmp_path)["armed"] == "two")
    assert not (tmp_path / "dp0.tp0" / "one").exists(), "an older recording makes room"


def test_it_disarms_itself(tmp_path):
    rec = watched(tmp_path)
    spool.set_control(tmp_path, {"id": "one", "rid_prefix": PREFIX, "ttl_s": 0.3})
    until(lambda: said(tmp_path)["armed"] == "one")
    until(lambda: rec.session is None and said(tmp_path)["armed"] is None and said(tmp_path)["closed"])


def test_an_order_can_be_renewed(tmp_path):
    rec = watched(tmp_path)
    order = {"id": "one", "rid_prefix": PREFIX, "ttl_s": 1.0}
    spool.set_control(tmp_path, order)
    until(lambda: said(tmp_path)["armed"] == "one")
    session = rec.session
    for _ in range(8):
        time.sleep(0.25)
        spool.set_control(tmp_path, order)
    assert rec.session is session, "longer than its time to live, and still the same"
    until(lambda: rec.session is None)


def test_bad_orders_and_failing_steps_are_said(tmp_path, monkeypatch):
    rec = watched(tmp_path)
    (tmp_path / "control.json").write_text("{")
    until(lambda: rec._stamp is not None)
    monkeypatch.setattr(parameters, "write_parameters", boom)
    spool.set_control(tmp_path, {"id": "one", "rid_prefix": PREFIX})
    until(lambda: said(tmp_path)["armed"] == "one")
    assert "injected" in said(tmp_path)["parameters"] and said(tmp_path)["records"]
    spool.set_control(tmp_path, {"rid_prefix": PREFIX})  # no id
    until(lambda: rec.errors.get("control"))
    assert rec.session is None


def test_other_tensor_parallel_ranks_record_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder.engine, "identity", lambda w: recorder.engine.Identity(0, 1, False))
    rec = Recorder(tmp_path)
    rec.attach(make_worker())
    for arm_id, everyone in (("one", False), ("two", True)):
        spool.set_control(tmp_path, {"id": arm_id, "rid_prefix": PREFIX, "all_ranks": everyone})
        until(lambda i=arm_id: spool.statuses(tmp_path).get("dp0.tp1", {}).get("armed") == i)
        status = spool.statuses(tmp_path)["dp0.tp1"]
        assert (status["records"], status["primary"]) == (everyone, False)
        assert (tmp_path / "dp0.tp1" / arm_id / "parameters.json").exists(), "its own shard's checksums"


def test_live_parameters(tmp_path):
    worker = make_worker()
    found = {p["name"]: p for p in parameters.drafter_parameters(worker)}
    assert set(found) == {"embed_tokens.weight", "fc.weight", "model.hot_token_id"}
    fc = worker.draft_runner.model.fc.weight.detach()
    raw = fc.view(torch.int16).numpy().tobytes()
    assert found["fc.weight"] == {
        "name": "fc.weight", "shape": [4, 12], "dtype": "bfloat16", "shared_with_target": False,
        "target_name": None, "checksum": hashlib.sha256(raw).hexdigest(),
    }  # fmt: skip
    assert found["embed_tokens.weight"]["shared_with_target"]
    assert found["embed_tokens.weight"]["target_name"] == "embed_tokens.weight"
    ids = np.arange(5, dtype=np.int64).tobytes()
    assert found["model.hot_token_id"]["checksum"] == hashlib.sha256(ids).hexdigest()


def test_checksums_do_not_depend_on_the_chunk(monkeypatch):
    tensor = torch.randn(7, 5).bfloat16()
    whole = parameters.checksum(tensor)
    monkeypatch.setattr(parameters, "CHUNK", 6)
    assert parameters.checksum(tensor) == whole
    assert parameters.checksum(tensor.t()) == parameters.checksum(tensor.t().contiguous()) != whole


# -- copies on an accelerator, with the device abstracted


class Lazy(torch.Tensor):
    """A host tensor whose `copy_` waits for its stream, as a copy to pinned memory does."""

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        DEVICE.current.pending.append(lambda: torch.Tensor.copy_(self, source))
        return self


class FakeDevice:
    class Stream:
        def __init__(self):
            self.pending, self.waits = [], []

        def wait_event(self, event):
            assert event.stream is not None, "the event was recorded before it is waited for"
            self.waits.append(event)

    class Event:
        stream = None

        def record(self, stream):
            self.stream = stream

        def synchronize(self):
            for step in self.stream.pending:
                step()
            self.stream.pending = []

    def __init__(self):
        self.main = self.current = self.Stream()

    def current_stream(self):
        return self.current

    def stream(self, stream):
        import contextlib

        @contextlib.contextmanager
        def inside():
            self.current, before = stream, self.current
            yield
            self.current = before

        return inside()


DEVICE = FakeDevice()


def test_copies_run_behind_an_event_on_a_side_stream():
    stager = staging.DeviceStager(DEVICE, lambda t: torch.full_like(t, -1).as_subclass(Lazy))
    staged = stager.stage({"x": torch.ones(2, 3)})
    assert stager._side is not DEVICE.main and stager._side.waits[0].stream is DEVICE.main
    assert not DEVICE.main.pending, "the scheduler's stream does no copying"
    assert staged._host["x"].tolist() == [[-1.0] * 3] * 2, "nothing has waited"
    assert staged._keep is not None, "the source lives until the copy is done"
    array, dtype = staged.wait()["x"]
    assert (array.tolist(), dtype, staged._keep, staged.bytes) == ([[1.0] * 3] * 2, "float32", None, 24)


def test_the_same_recording_through_the_device_stager(tmp_path):
    stager = staging.DeviceStager(DEVICE, lambda t: torch.full_like(t, -1).as_subclass(Lazy))
    hooks, live = armed(tmp_path, stager)
    engine = Engine(hooks, make_worker(), [OURS, THEIRS], [5, 7])
    engine.prefill()
    engine.round([2, 1])
    trace = finish(live, engine).requests[OURS]
    assert trace.tokens == engine.tokens[OURS]
    np.testing.assert_array_equal(trace.features, engine.features[OURS].numpy())


# -- re-prefill


class Inner(torch.nn.Module):
    """Collects as SGLang's models do: a list of chunks, or one packed tensor; nothing when none is asked."""

    def __init__(self, packed: bool, layers: int = 3, width: int = 4):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.layers_to_capture, self.packed, self.calls = [], packed, 0

    def forward(self, x):
        self.calls += 1
        aux = []
        for i, layer in enumerate(self.layers):
            if i in self.layers_to_capture:
                aux.append(x.clone())
            x = x + layer(x)
        out = self.norm(x)
        if not aux:
            return out
        return out, torch.cat(aux, dim=-1) if self.packed else aux


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("usual", [[], [1], [0, 2]])
@pytest.mark.parametrize("depths", [[0, 1, 2, 3], [1, 3], [2]])
def test_the_drafter_is_handed_what_it_always_gets(packed, usual, depths):
    inner, x = Inner(packed), torch.randn(5, 4)
    inner.layers_to_capture = list(usual)
    truth, stream = [], x
    for layer in inner.layers:
        truth.append(stream)
        stream = stream + layer(stream)
    truth.append(stream)
    before = inner(x)
    with reprefill.collecting(inner, depths, pytest.fail) as streams:
        during = inner(x)
    after = inner(x)
    for out in (during, after):
        if not usual:
            torch.testing.assert_close(out, before, rtol=0, atol=0)
            continue
        assert type(out[1]) is type(before[1])
        torch.testing.assert_close(out[0], before[0], rtol=0, atol=0)
        for a, b in zip(out[1], before[1], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert set(streams) == {f"depth{d}" for d in depths} | {"final"}
    for d in depths:
        torch.testing.assert_close(streams[f"depth{d}"], truth[d])
    assert inner.layers_to_capture == usual and "forward" not in vars(inner)
    assert not inner.norm._forward_hooks and inner.calls == 3


def test_a_model_that_returns_something_else_runs_as_if_we_were_not_there():
    inner = Inner(packed=False)
    inner.layers_to_capture = [1]
    original = type(inner).forward
    x = torch.randn(2, 4)
    inner.forward = lambda x: (*original(inner, x), "more")
    errors = []
    with reprefill.collecting(inner, [0, 1], errors.append) as streams:
        out = inner(x)
    assert out[2] == "more" and len(out[1]) == 1 and streams == {}
    assert "something else" in str(errors[0])


@pytest.mark.parametrize("fault", ["_chunks", "_cut", "the model", "the norm's hook"])
def test_an_error_while_collecting_leaves_the_forward_as_it_was(tmp_path, monkeypatch, fault):
    """Errors that come after the original ran, or out of it because more was asked of it."""
    monkeypatch.setenv(spool.NONCE, "n")
    hooks, live = armed(tmp_path)
    worker, inner, x = make_worker(), Inner(packed=True), torch.randn(3, 4)
    inner.layers_to_capture = usual = [1]
    worker.target_worker.model_runner.model = inner
    before = inner(x)
    if fault == "the model":  # cannot collect three states
        monkeypatch.setattr(
            Inner, "forward", lambda self, x: before if self.layers_to_capture == [1] else boom()
        )
    elif fault == "the norm's hook":
        monkeypatch.setattr(inner.norm, "forward", lambda x, norm=inner.norm.forward: (norm(x), None))
        monkeypatch.setattr(Inner, "forward", lambda self, x: self.norm(x) and before)
    else:
        monkeypatch.setattr(reprefill, fault, boom)
    during = hooks.prefill(lambda worker, batch: inner(x), worker, a_batch("n.all." + OURS))
    for ours, theirs in zip(during, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert live.errors["reprefill"] >= 1 and inner.layers_to_capture is usual
    assert "forward" not in vars(inner) and not inner.norm._forward_hooks
    live.end()


def test_out_of_memory_on_one_of_several_ranks_is_not_run_again(monkeypatch):
    """The others have gone on: a second forward here would meet them in another collective."""
    inner, calls = Inner(packed=True), []

    def full(*_):
        calls.append(1)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(reprefill, "_chunks", full)
    monkeypatch.setattr(reprefill.engine, "parallel", lambda n, default: 2)
    with reprefill.collecting(inner, [0], calls.append), pytest.raises(torch.OutOfMemoryError):
        inner(torch.randn(2, 4))
    assert calls == [1] and inner.calls == 1 and inner.layers_to_capture == []


def a_batch(*rids, length=3):
    return SimpleNamespace(
        reqs=[Request(rid, [1] * length) for rid in rids], extend_lens=[length] * len(rids),
        prefix_lens=[0] * len(rids), forward_mode=Mode("EXTEND"), input_ids=torch.arange(length * len(rids)),
    )  # fmt: skip


def test_the_plan_needs_the_nonce_and_fits_the_budget(monkeypatch):
    worker = make_worker()
    monkeypatch.setenv(spool.NONCE, "n0nce")
    assert reprefill.plan(worker, a_batch("n0nce.all.x")) == [0, 1, 2]
    assert reprefill.plan(worker, a_batch("n0nce.2-0.x", "other")) == [0, 2]
    assert reprefill.plan(worker, a_batch("other", "guess.all.x")) is None
    with pytest.raises(ValueError, match="2 layers"):
        reprefill.plan(worker, a_batch("n0nce.9.x"))
    monkeypatch.setenv(reprefill.BUDGET, str(3 * 4 * 4 * 3))  # tokens, width, bytes, depths
    assert reprefill.plan(worker, a_batch("n0nce.all.x")) == [0, 1, 2]
    assert reprefill.plan(worker, a_batch("n0nce.all.x", length=4)) is None
    monkeypatch.delenv(spool.NONCE)
    assert reprefill.plan(worker, a_batch("n0nce.all.x", ".all.x")) is None


@pytest.mark.parametrize("name,value", [("nnodes", 2), ("pp_size", 2)])
def test_no_re_prefill_across_nodes_or_pipeline_stages(monkeypatch, name, value):
    monkeypatch.setattr(reprefill.engine, "parallel", lambda n, default: value if n == name else default)
    monkeypatch.setenv(spool.NONCE, "n")
    assert reprefill.off(make_worker())
    assert reprefill.plan(make_worker(), a_batch("n.all.x")) is None


def test_graphs_switch_it_off_and_say_how_to_switch_it_on(monkeypatch):
    monkeypatch.setattr(reprefill.engine, "graph_backend_disabled", lambda *a: False)
    assert "--cuda-graph-backend-prefill disabled" in reprefill.off(make_worker())


def test_whether_layers_are_collected_never_depends_on_being_armed(tmp_path, monkeypatch):
    """Ranks learn of an arm at different moments; collecting on some only could hang their collectives."""
    monkeypatch.setenv(spool.NONCE, "n")
    seen = []
    for hooks in (Hooks(Recorder(tmp_path)), armed(tmp_path)[0]):
        worker = make_worker()
        inner = reprefill.inner_model(worker)
        batch = a_batch("n.all." + OURS)
        hooks.prefill(lambda w, b, inner=inner: seen.append("forward" in vars(inner)), worker, batch)
    assert seen == [True, True]


def test_re_prefill_is_recorded_by_request(tmp_path, monkeypatch):
    monkeypatch.setenv(spool.NONCE, "n")
    hooks, live = armed(tmp_path)
    worker, inner = make_worker(), Inner(packed=True)
    worker.target_worker.model_runner.model = inner
    x = torch.randn(6, 4)
    batch = a_batch("n.0-3." + OURS, "other")

    def original(worker, batch):
        inner(x)
        batch.input_ids = None

    hooks.prefill(original, worker, batch)
    capture = finish(live)
    item = capture.reprefill[OURS]
    assert (item.token_ids, item.depths, item.dtype) == ([0, 1, 2], [0, 3], "float32")
    np.testing.assert_array_equal(item.stream(0), x[:3].numpy())
    assert item.final.shape == (3, 4) and live.status()["written"] == 1


# -- processes, folders, routes


def test_roles(monkeypatch):
    monkeypatch.setattr(probe.multiprocessing, "parent_process", lambda: None)
    assert probe.role() == "http"
    engine = compile("def __init__(self):\n    return role()", "/x/entrypoints/engine.py", "exec")
    space = {"role": probe.role}
    exec(engine, space)
    assert space["__init__"](None) == "none", "an offline Engine"
    monkeypatch.setattr(probe.multiprocessing, "parent_process", lambda: object())

    def run_scheduler_process():
        return probe.role()

    def run_detokenizer_process():
        return probe.role()

    assert (run_scheduler_process(), run_detokenizer_process()) == ("scheduler", "none")


def test_register_never_raises(monkeypatch, caplog):
    monkeypatch.setattr(probe, "role", boom)
    probe.register()
    assert "probe is off" in caplog.text


def test_without_routes_there_is_no_spool(root, monkeypatch):
    monkeypatch.setattr(probe, "role", lambda: "http")
    monkeypatch.setattr(routes, "attach", lambda: False)
    probe.register()
    assert spool.FOLDER not in os.environ and list(root.parent.iterdir()) == [root]


def test_a_scheduler_without_a_spool_is_left_alone(monkeypatch):
    monkeypatch.delenv(spool.FOLDER, raising=False)
    monkeypatch.setattr(probe, "role", lambda: "scheduler")
    monkeypatch.setattr(hooks_module, "register", lambda: pytest.fail("registered"))
    probe.register()


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLELAB_SPOOL_DIR", str(tmp_path))
    for name in (spool.FOLDER, spool.NONCE):
        monkeypatch.setenv(name, "to be replaced")
    folder = spool.create()
    routes._order.clear()
    yield folder
    routes._order.clear()
    spool.remove(folder)


def test_the_spool_is_private(root):
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert os.environ[spool.FOLDER] == str(root) and len(os.environ[spool.NONCE]) == 32


def test_spools_of_dead_servers_are_swept(root, tmp_path):
    for name in ("eaglelab-spool-dead", "eaglelab-spool-being-made", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "eaglelab-spool-dead" / "alive").touch()
    spool._sweep(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted(["eaglelab-spool-being-made", "mine", root.name]), "the living one stays"


def test_only_plain_files_of_ours_are_served(root, tmp_path):
    (root / "dp0.tp0" / "abc").mkdir(parents=True)
    (root / "dp0.tp0" / "abc" / "events.jsonl").write_text("x")
    (tmp_path / "secret").write_text("secret")
    (root / "dp0.tp0" / "abc" / "link").symlink_to(tmp_path / "secret")
    assert spool.inside(root, "dp0.tp0", "abc", "events.jsonl")
    for names in (("dp0.tp0", "abc", "link"), ("dp0.tp0", "abc", "../../control.json"), ("..", "secret"),
                  ("dp0.tp0", "abc"), ("dp0.tp0", ".."), ("", "x"), ("dp0.tp0", "abc", "no")):  # fmt: skip
        assert spool.inside(root, *names) is None
    listed = routes.listing("abc")
    assert [(f["name"], f["bytes"], f["sha256"][:8]) for f in listed] == [("events.jsonl", 1, "2d711642")]
    assert routes.listing("../abc") == [] == routes.listing("*")


def test_orders_are_checked(root):
    for order, message in (
        ({"what": 1}, "what: unknown"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"max_requests": "many"}, "max_requests: 'many' is not a int above 0"),
        ({"max_requests": True}, "max_requests"),
        ({"all_ranks": 1}, "all_ranks"),
        ({"id": "mine"}, "id: unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            routes.start(order)
    armed = routes.start({"ttl_s": 60, "all_ranks": True})
    assert armed["rid_prefix"] == f"eaglelab-{armed['id']}-"
    assert json.loads((root / "control.json").read_text())["arm"]["all_ranks"] is True
    assert "reprefill_prefix" not in (root / "control.json").read_text()
    assert routes.state()["armed"] == armed["id"]
    with pytest.raises(routes.Busy, match="another capture"):
        routes.start({})
    assert routes.start({"force": True})["id"] != armed["id"]


def test_an_expired_arm_makes_way(root):
    first = routes.start({"ttl_s": 0.2})
    assert routes.renew(first["id"]) and not routes.renew("other")
    assert not routes.discard(first["id"]), "not while it is armed"
    time.sleep(0.25)
    assert routes.state()["armed"] is None and not routes.renew(first["id"])
    routes.start({})


def test_recordings_are_discarded(root):
    for arm_id in ("abc", "def"):
        (root / "dp0.tp0" / arm_id).mkdir(parents=True)
    assert not routes.discard("*") and routes.discard("abc")
    assert [p.name for p in (root / "dp0.tp0").iterdir()] == ["def"]


def test_took(monkeypatch):
    import functools

    def hook():
        pass

    def wrap(original, with_):
        @functools.wraps(original)
        def wrapper():
            return with_

        return wrapper

    plain = lambda: None  # noqa: E731
    module = SimpleNamespace()
    monkeypatch.setattr("pkgutil.resolve_name", lambda name: getattr(module, name))
    module.f = plain
    assert not hooks_module.took("f", hook)
    module.f = wrap(plain, hook)
    assert hooks_module.took("f", hook)
    module.f = wrap(wrap(plain, hook), "another plugin's")
    assert hooks_module.took("f", hook)
    assert not hooks_module.took("g", hook)
