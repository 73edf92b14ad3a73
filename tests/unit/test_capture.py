"""The capture format: what goes in comes out, and every kind of damage is named."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from capture_maker import edit_event, make_capture
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eaglelab.capture import CaptureWriter, from_float32, open_capture, to_float32
from eaglelab.errors import BadInput
from eaglelab.traces import parents_of

REQUEST = st.tuples(st.integers(1, 12), st.lists(st.integers(1, 4), max_size=5), st.integers(1, 9))


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=4),
    width=st.integers(1, 7),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    topk=st.sampled_from([1, 2]),
    shard_bytes=st.sampled_from([1, 300, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_what_is_written_is_read(requests, width, dtype, topk, shard_bytes, seed):
    with tempfile.TemporaryDirectory() as name:
        truths = make_capture(Path(name), requests, width, dtype, topk, 4, seed, shard_bytes)
        capture = open_capture(name)
        assert capture.problems == []
        assert set(capture.requests) == set(truths)
        for rid, truth in truths.items():
            trace = capture.requests[rid]
            assert (trace.state, trace.prompt_ids, trace.tokens) == ("complete", truth.prompt, truth.tokens)
            assert trace.feature_dtype == dtype
            np.testing.assert_array_equal(trace.features, truth.features)
            assert trace.chunks == -(-len(truth.prompt) // truth.chunk)
            assert [r.accept_len for r in trace.rounds] == truth.accepts
            assert [r.draft_tokens for r in trace.rounds] == truth.drafts
            starts = [len(truth.prompt) + sum(truth.accepts[:j]) for j in range(len(truth.accepts))]
            assert [r.n for r in trace.rounds] == starts
            for r in trace.rounds:
                assert r.committed == truth.tokens[r.n + 1 : r.n + 1 + r.accept_len]
                assert r.parents == (None if topk == 1 else [0, 0, 0])
                assert r.fed.shape == (3,)


def test_bfloat16_bits():
    # 1.0 is 0x3F80; 1 + 2**-8 is halfway between 0x3F80 and 0x3F81 and goes to the even one.
    values = np.array([1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8, np.inf, np.nan, 3.0e38], np.float32)
    bits = from_float32(values, "bfloat16")
    assert [hex(b) for b in bits] == ["0x3f80", "0xc000", "0x3f80", "0x3f82", "0x7f80", "0x7fc0", "0x7f62"]
    back = to_float32(bits, "bfloat16")
    assert back[:5].tolist() == [1.0, -2.0, 1.0, 1.015625, np.inf] and np.isnan(back[5])


def test_bfloat16_is_torchs():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=10000).astype(np.float32) * 10.0 ** np.arange(-8, 8).repeat(
        625
    )
    theirs = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(from_float32(values, "bfloat16"), theirs)


def test_parents_of_a_known_tree():
    #        0
    #      1 2 3      node 0's children 1, 2, 3
    #     4 5  6      node 1's 4, 5; node 3's 6
    child = [1, 4, -1, 6, -1, -1, -1]
    sibling = [-1, 2, 3, -1, 5, -1, -1]
    assert parents_of(child, sibling) == [0, 0, 0, 1, 1, 3]
    with pytest.raises(ValueError, match="two parents"):
        parents_of([1, 2, 1], [-1, -1, -1])


def test_rounds_after_the_end_are_set_aside(tmp_path):
    make_capture(tmp_path, [(5, [2, 3, 1], 99)])
    meta = json.loads((tmp_path / "capture.json").read_text())
    meta["requests"]["r0"]["output_ids"] = meta["requests"]["r0"]["output_ids"][:4]  # 1 + 2, and one of the 3
    (tmp_path / "capture.json").write_text(json.dumps(meta))
    trace = open_capture(tmp_path).requests["r0"]
    assert (trace.state, trace.extra_rounds, len(trace.rounds)) == ("complete", 1, 2)
    assert trace.rows == len(trace.features) == len(trace.tokens) - 1 == 10


def test_a_cached_prefix_is_marked(tmp_path):
    make_capture(tmp_path, [(5, [2], 99)])
    edit_event(tmp_path, "request", lambda e: e.update(cached_prefix=2))

    def later(event):
        event.update(seq_lens=[2], lengths=[3], token_ids=[event["token_ids"][0][2:]])
        event["tensors"]["features"]["shape"][0] = 3

    edit_event(tmp_path, "prefill_extend", later)
    with pytest.raises(BadInput, match="holds float32"):  # the shard still has five rows
        open_capture(tmp_path)


def test_non_finite_values_are_evidence(tmp_path):
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        writer = CaptureWriter(folder, "dp0.tp0")
        writer.add("request", {"rid": "r0", "input_ids": [1, 2], "cached_prefix": 0}, {})
        about = {"rids": ["r0"], "seq_lens": [0], "lengths": [2], "token_ids": [[2, 3]], "chunked": [False]}
        values = from_float32(np.array([[1, np.nan], [np.inf, 2]], np.float32), dtype)
        writer.add("prefill_extend", about, {"features": (values, dtype)})
        writer.close()
        meta = {"schema": 1, "server": {}, "requests": {}, "ranks": {"dp0.tp0": {"written": 2}}}
        (folder / "capture.json").write_text(json.dumps(meta))
        problem = open_capture(folder).problems[0]
        assert problem.severity == "finding" and problem.text == "2 of 4 values of features are not finite"
        assert problem.where == "prefill_extend, rank dp0.tp0, seq 1"


def test_why_a_server_cannot_be_replayed_is_said(tmp_path):
    make_capture(tmp_path)
    meta = json.loads((tmp_path / "capture.json").read_text())
    (tmp_path / "capture.json").write_text(json.dumps({**meta, "limits": ["rejection sampling: drawn"]}))
    (problem,) = open_capture(tmp_path).problems
    assert (problem.severity, problem.where) == ("warning", "server")
    assert problem.text == "rungs 3 to 5 cannot be measured: rejection sampling: drawn"


def test_dropped_requests_are_partial(tmp_path):
    make_capture(tmp_path, [(5, [2, 3], 99), (4, [1], 99)])
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    kept = []
    for line in map(json.loads, lines):
        if line["kind"] == "decode_extend" and line["rids"] == ["r0", "r1"]:
            continue  # lost: the queue was full
        kept.append(json.dumps({**line, "seq": len(kept)}))
    (tmp_path / "events.jsonl").write_text("\n".join(kept) + "\n")
    meta = json.loads((tmp_path / "capture.json").read_text())
    dropped = dict.fromkeys(("r0", "r1"), "the queue was full")
    meta["ranks"]["dp0.tp0"].update(written=len(kept), dropped_rids=dropped)
    (tmp_path / "capture.json").write_text(json.dumps(meta))
    capture = open_capture(tmp_path)
    assert [(t.state, t.why) for t in capture.requests.values()] == [("partial", "the queue was full")] * 2
    assert [p.severity for p in capture.problems] == ["warning", "warning"]
    # The same loss without a word is damage.
    meta["ranks"]["dp0.tp0"]["dropped_rids"] = {}
    (tmp_path / "capture.json").write_text(json.dumps(meta))
    with pytest.raises(BadInput, match=r"line 6 .*seq_lens\[0\]: r0 had 5 rows, the event says 7"):
        open_capture(tmp_path)


def put(ids):
    ids[0] = 7777


DAMAGE = {
    "no lengths": ("prefill_extend", lambda e: e.pop("lengths"), "lengths: missing"),
    "text for a count": ("draft", lambda e: e.update(steps="3"), "steps: does not fit: 3"),
    "short list": ("decode_extend", lambda e: e.update(seq_lens=[]), "seq_lens: 0 entries for 1 requests"),
    "token lost": ("prefill_extend", lambda e: e["token_ids"][0].pop(), r"token_ids\[0\]: 4 tokens where 5"),
    "draft lost": ("draft", lambda e: e["token_ids"][0].pop(), r"token_ids\[0\]: 2 tokens where 3"),
    "accept": ("decode_extend", lambda e: e.update(accept_lens=[2]), r"accept_lens: \[2\] for rows \[1\]"),
    "rows": ("prefill_extend", lambda e: e["tensors"]["features"].update(shape=[4, 6]), "5 rows were due"),
    "dtype": ("draft", lambda e: e["tensors"]["fed"].update(dtype="int4"), r"tensors.fed.dtype: 'int4'"),
    "other dtype": ("draft", lambda e: e["tensors"]["fed"].update(dtype="float16"), "holds float32"),
    "shard": ("draft", lambda e: e["tensors"]["fed"].update(shard="no.safetensors"), "no.safetensors cannot"),
    "key": ("draft", lambda e: e["tensors"]["fed"].update(key="9.fed"), "has no whole 9.fed"),
    "no features": ("prefill_extend", lambda e: e.update(tensors={}), "tensors.features: missing"),
    "entry": ("draft", lambda e: e["tensors"].update(fed=3), "tensors.fed: needs shard"),
    "gap": ("draft", lambda e: e.update(seq=7), "seq: 7 where 2 was due: an event is missing"),
    "no tree": ("draft", lambda e: e.update(topk=2), r"next_token\[0\]: not the links of a tree"),
    "unknown rid": ("draft", lambda e: e.update(rids=["x"]), "rids: x has no request event before it"),
    "kind": ("draft", lambda e: e.update(kind="what"), "line 3, kind: not an event"),
    "fed ids": ("prefill_extend", lambda e: put(e["token_ids"][0]), "not the prompt, shifted"),
    "output": ("decode_extend", lambda e: put(e["token_ids"][0]), "r0.output_ids: not the tok"),
    "prompt": ("request", lambda e: put(e["input_ids"]), "r0.input_ids: not the tokens"),
    "retracted or lost": ("decode_extend", lambda e: e.update(seq_lens=[6]), r"seq_lens\[0\]: r0 had 5 rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_event_is_named(tmp_path, name):
    kind, change, message = DAMAGE[name]
    make_capture(tmp_path)
    line = edit_event(tmp_path, kind, change)
    with pytest.raises(BadInput, match=message) as caught:
        open_capture(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert f"line {line}" in str(caught.value) or "r0" in str(caught.value)


def test_widths_may_not_change(tmp_path):
    make_capture(tmp_path, width=6)
    writer = CaptureWriter(tmp_path, "dp0.tp1")
    for width in (6, 2):
        writer.add("request", {"rid": f"w{width}", "input_ids": [1], "cached_prefix": 0}, {})
        about = {
            "rids": [f"w{width}"],
            "seq_lens": [0],
            "lengths": [1],
            "token_ids": [[2]],
            "chunked": [False],
        }
        writer.add("prefill_extend", about, {"features": (np.zeros((1, width), np.float32), "float32")})
    writer.close()
    with pytest.raises(BadInput, match=r"tensors.features.shape: width 2 after 6"):
        open_capture(tmp_path)


def damage_file(name, change):
    def apply(folder):
        path = next(folder.glob(name))
        path.write_bytes(change(path.read_bytes()))

    return apply


FILES = {
    "truncated line": (damage_file("events.jsonl", lambda b: b[:-9]), "line 6: the last line is truncated"),
    "not JSON": (damage_file("events.jsonl", lambda b: b"{\n" + b), "events.jsonl, line 1: not JSON"),
    "not text": (damage_file("events.jsonl", lambda b: b"\xff\n"), "events.jsonl: cannot be read"),
    "no events": (damage_file("events.jsonl", lambda b: b""), "no events"),
    "event lost": (damage_file("events.jsonl", lambda b: b[: b.rindex(b"\n", 0, -1) + 1]), "written: 6, but"),
    "shard cut": (damage_file("shard-*", lambda b: b[:-9]), "tensors.features: shard-dp0.tp0-0000"),
    "shard garbage": (damage_file("shard-*", lambda b: b"garbage"), "cannot be read"),
    "no meta": (lambda folder: (folder / "capture.json").unlink(), "capture.json: not found"),
    "meta not JSON": (damage_file("capture.json", lambda b: b[:50]), "capture.json: not JSON"),
    "meta a list": (damage_file("capture.json", lambda b: b"[]"), "schema: 'list'"),
    "meta ids": (damage_file("capture.json", lambda b: b.replace(b': [', b': ["a", ')), "requests.r0: input"),
    "newer": (damage_file("capture.json", lambda b: b.replace(b'"schema": 1', b'"schema": 2')), "schema: 2"),
    "no ranks": (damage_file("capture.json", lambda b: b.replace(b'"ranks"', b'"rank"')), "ranks: an object"),
    "other rank": (damage_file("capture.json", lambda b: b.replace(b"dp0.tp0", b"dp1.tp0")), "not listed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(tmp_path, name):
    change, message = FILES[name]
    make_capture(tmp_path)
    change(tmp_path)
    with pytest.raises(BadInput, match=message):
        open_capture(tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    place=st.integers(0, 10**6),
    byte=st.integers(0, 255),
    name=st.sampled_from(["events.jsonl", "capture.json"]),
)
@example(place=6988, byte=32, name="events.jsonl")  # an event without a rank
def test_a_changed_byte_is_refused_or_harmless(place, byte, name):
    """Whatever one byte becomes: BadInput, or a capture that can be read; never another error."""
    with tempfile.TemporaryDirectory() as folder:
        make_capture(Path(folder), topk=2)
        path = Path(folder, name)
        raw = bytearray(path.read_bytes())
        raw[place % len(raw)] = byte
        path.write_bytes(bytes(raw))
        try:
            for trace in open_capture(folder).requests.values():
                trace.features.sum()
        except BadInput:
            pass


def test_lines_never_name_a_lost_tensor(tmp_path):
    """Killed at any moment, what is on disk is whole: shards come before the lines that name them."""
    writer = CaptureWriter(tmp_path, "dp0.tp0", shard_bytes=1 << 20)
    writer.add("draft", {}, {"fed": (np.zeros((2, 2), np.float32), "float32")})
    assert (tmp_path / "events.jsonl").read_text() == ""
    writer.flush()
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert (tmp_path / line["tensors"]["fed"]["shard"]).exists()
    assert not list(tmp_path.glob("*.partial"))


def test_importing_needs_neither_torch_nor_sglang():
    import subprocess
    import sys

    code = "import sys, eaglelab.capture, eaglelab.server, eaglelab.collect, eaglelab.probe;"
    code += " sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
