"""Captures of genuine SGLang: harmless, whole, and equal to what the server says of itself."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from helpers import PROMPTS

from eaglelab.collect import capture_server
from eaglelab.errors import AttachError
from eaglelab.server import Server

TOKENS = 40
DEPTHS = (2, 4, 5)  # what the drafter of data/ is fed under EAGLE3


def quiet(*_):
    pass


def take(server, out, prompts=PROMPTS, **more):
    return capture_server(Server(server.url), prompts, out, TOKENS, ignore_eos=True, progress=quiet, **more)


def outputs(capture):
    return [capture.sent[rid]["output_ids"] for rid in sorted(capture.sent)]


def check_streams(capture, depths):
    """The captured features are the re-prefilled streams at `depths` (None: the normed final state)."""
    assert capture.meta["reprefill"]["state"] == "done" and len(capture.reprefill) == len(capture.requests)
    for rid, again in capture.reprefill.items():
        trace = capture.requests[rid]
        assert again.token_ids == trace.tokens[: len(again.token_ids)]
        assert again.depths == list(range(9)) and len(again.further) == 5
        n = len(again.token_ids) - 1
        wanted = again.final if depths is None else np.concatenate([again.stream(d) for d in depths], axis=1)
        scale = np.abs(wanted).max()
        assert np.abs(trace.features[:n] - wanted[:n]).max() <= 1e-5 * scale
        if depths is not None:
            off = np.concatenate([again.stream(d + 1) for d in depths], axis=1)
            assert np.abs(trace.features[:n] - off[:n]).max() > 1e-2 * scale, (
                "the depth next door is another one"
            )


@pytest.mark.parametrize(
    "server,widths,depths",
    [
        ("eagle3-chain", (384, 128, 384), DEPTHS),
        ("eagle3-tree", (384, 128, 384), DEPTHS),
        ("eagle-chain", (128, 128, 128), None),
        ("eagle3-chain-tp2", (384, 128, 384), DEPTHS),
    ],
    indirect=["server"],
)
def test_harmless_whole_and_of_the_right_width(server, widths, depths, tmp_path):
    client = Server(server.url)
    before = [a.output_ids for a in client.generate(PROMPTS, TOKENS, ignore_eos=True)]
    capture = take(server, tmp_path / "out", batch=4)
    after = [a.output_ids for a in client.generate(PROMPTS, TOKENS, ignore_eos=True)]
    assert before == outputs(capture) == after, "the same greedy tokens armed and unarmed"

    assert tuple(capture.widths.values()) == widths and capture.problems == []
    for trace in capture.requests.values():
        assert trace.state == "complete" and trace.rows == len(trace.tokens) - 1
        assert trace.tokens[trace.prompt_len :][:TOKENS] == trace.output_ids
        counters = capture.sent[trace.rid]["counters"]
        assert sum(r.accept_len - 1 for r in trace.rounds) == counters["spec_num_correct_drafts"]
        assert len(trace.rounds) == counters["spec_verify_ct"]
        for r in trace.rounds:
            assert r.fed.shape == (128,) and len(r.draft_tokens) == (15 if r.parents else 5)
            path = set(r.draft_tokens)
            assert set(r.committed[:-1]) <= path, "what was accepted had been drafted"
    check_streams(capture, depths)
    ranks = client.probe_status()["ranks"].values()
    assert all(rank["errors"] == {} and (rank["session"] or {"errors": {}})["errors"] == {} for rank in ranks)
    assert all(all(rank["hooks"].values()) for rank in ranks)


@pytest.mark.server("eagle3-chain-tp8")
def test_eight_ranks_agree(server, tmp_path):
    from safetensors import safe_open

    capture = take(server, tmp_path / "out", PROMPTS[:2], all_ranks=True, target=True)
    ranks = [f"dp0.tp{i}" for i in range(8)]
    assert sorted(capture.ranks) == sorted(capture.parameters) == ranks
    assert [rank for rank in ranks if capture.ranks[rank]["primary"]] == ["dp0.tp0"]
    first = list(capture.events("dp0.tp0"))
    assert len(first) > 20
    for rank in ranks[1:]:
        for ours, theirs in zip(first, capture.events(rank), strict=True):
            same = ("kind", "seq", "rids", "seq_lens", "token_ids", "accept_lens")
            assert [ours.data.get(k) for k in same] == [theirs.data.get(k) for k in same]
            for name in ours.data["tensors"]:
                np.testing.assert_array_equal(ours.tensor(name), theirs.tensor(name))
    check_streams(capture, DEPTHS)
    shapes = {p["name"]: p["shape"] for p in capture.parameters["dp0.tp3"]}
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"][0] < 128, "each rank has checksums of its shard"
    checksums = {json.dumps(capture.parameters[rank]) for rank in ranks}
    assert len(checksums) == 8
    model = capture.facts["model_path"] + "/model.safetensors"
    with safe_open(model, "pt") as file, safe_open(capture.target_dir / "target.safetensors", "pt") as served:
        for ours, theirs in (
            ("embed_tokens", "model.embed_tokens"),
            ("norm", "model.norm"),
            ("lm_head", "lm_head"),
        ):
            wanted = file.get_tensor(f"{theirs}.weight").float()  # the server runs in float32
            assert served.get_tensor(f"{ours}.weight").equal(wanted)


@pytest.mark.server("eagle3-chain-chunked")
def test_chunked_prefill(server, tmp_path):
    client = Server(server.url)
    long = " ".join(PROMPTS)
    before = client.generate([long, PROMPTS[0]], TOKENS, ignore_eos=True)
    capture = take(server, tmp_path / "out", [long, PROMPTS[0]], batch=2)
    assert outputs(capture) == [a.output_ids for a in before]
    traces = [capture.requests[rid] for rid in sorted(capture.requests)]
    assert traces[0].chunks >= 3 and all(t.state == "complete" for t in traces)
    check_streams(capture, DEPTHS)
    pieces = [e for e in capture.events(kind="reprefill") if e.data["of"] == traces[0].rid]
    assert len(pieces) >= 3 and capture.reprefill[traces[0].rid].depths == list(range(9))


@pytest.mark.server("eagle3-chain")
def test_only_our_rows_are_taken_while_others_use_the_server(server, tmp_path):
    client, stop, others = Server(server.url), threading.Event(), []
    alone = [a.output_ids for a in client.generate(PROMPTS, TOKENS, ignore_eos=True)]

    def somebody():
        with Server(server.url) as theirs:
            while not stop.is_set():
                others.extend(theirs.generate(PROMPTS[:2], TOKENS, ["theirs-0", "theirs-1"], ignore_eos=True))

    thread = threading.Thread(target=somebody)
    thread.start()
    try:
        capture = take(server, tmp_path / "out", batch=2)
    finally:
        stop.set()
        thread.join()
    assert others and {tuple(a.output_ids) for a in others} == {tuple(alone[0]), tuple(alone[1])}
    assert outputs(capture) == alone
    assert "theirs" not in (tmp_path / "out" / "events.jsonl").read_text()
    mixed = [e for e in capture.events() if e.data.get("batch_size", 0) > len(e.rids)]
    assert mixed, "some batches held their requests too"
    check_streams(capture, DEPTHS)


@pytest.mark.server("eagle3-chain")
def test_the_nonce_stays_secret_and_is_needed(server, tmp_path):
    client = Server(server.url)
    order = client.arm(ttl_s=30)
    nonce = order["reprefill_prefix"]
    try:
        with pytest.raises(AttachError, match="another capture"):
            client.arm()
        assert nonce not in json.dumps(client.probe_status())
        client.generate(["Emma"], 2, ["0" * len(nonce) + ".all." + order["rid_prefix"] + "x"])
        client.generate(["Emma"], 2, [f"{nonce}.all.somebody-else"])
        client.generate(
            ["Emma"], 2, [f"{nonce}.99.{order['rid_prefix']}x"]
        )  # no such depth: an ordinary request
    finally:
        status = client.disarm()
    assert status["armed"] is None
    capture = take(server, tmp_path / "out", PROMPTS[:1])
    for path in (tmp_path / "out").iterdir():
        assert nonce.encode() not in path.read_bytes()
    assert list(capture.reprefill) == list(capture.requests)


@pytest.mark.server("eagle3-chain")
def test_only_some_depths(server, tmp_path):
    capture = take(server, tmp_path / "out", PROMPTS[:1], depths=(0, 8))
    assert next(iter(capture.reprefill.values())).depths == [0, 8]


@pytest.mark.server("eagle3-chain")
def test_files_of_the_spool_are_private(server):
    import httpx

    order = Server(server.url).arm(ttl_s=30)
    base = f"{server.url}/eaglelab/files"
    try:
        for path in (
            f"{order['id']}/dp0.tp0/nothing",
            f"{order['id']}/..%2f..%2fcontrol.json/x",
            "x/dp0.tp0/status.json",
        ):
            assert httpx.get(f"{base}/{path}", trust_env=False).status_code == 404
        listed = Server(server.url).files(order["id"])
        assert {entry["rank"] for entry in listed} <= {"dp0.tp0"}
    finally:
        Server(server.url).disarm()


def test_under_a_key(servers, tmp_path):
    key = "sk-a-key-of-this-test-0123456789"
    server = servers.get("keyed", api_key=key)
    for wrong, words in ((None, "wants an API key"), ("sk-wrong", "refuses the API key")):
        with pytest.raises(AttachError, match=words):
            Server(server.url, wrong).probe_status()
        with pytest.raises(AttachError, match=words):
            capture_server(Server(server.url, wrong), PROMPTS, tmp_path / "no", progress=quiet)
    client = Server(server.url, key)
    capture = capture_server(client, PROMPTS[:1], tmp_path / "out", 8, progress=quiet)
    assert capture.requests and key not in json.dumps(client.facts().fields)
    for path in (tmp_path / "out").iterdir():
        assert key.encode() not in path.read_bytes()


def test_without_the_plugin(servers, tmp_path):
    server = servers.get("no-plugin", env={"SGLANG_PLUGINS": "eaglelab_cpu"})
    client = Server(server.url)
    with pytest.raises(AttachError, match="no eaglelab plugin.*still work"):
        capture_server(client, PROMPTS, tmp_path / "out", progress=quiet)
    answers = client.generate(PROMPTS[:1], 8)
    rows = {m.name: m.value for m in client.counters(answers).measurements()}
    assert client.facts().algorithm == "EAGLE3" and rows["accept_length.server"] >= 1


@pytest.mark.server("plain")
def test_without_speculation(server, tmp_path):
    with pytest.raises(AttachError, match="runs without speculation"):
        capture_server(Server(server.url), PROMPTS, tmp_path / "out", progress=quiet)
