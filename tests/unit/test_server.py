"""The HTTP client and the collection, against a stand-in server. Each failure has its own words."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import httpx
import numpy as np
import pytest
from armed import INFO, KEY, Armed, Stub

from eaglelab import assemble, collect
from eaglelab.assemble import write_target
from eaglelab.capture import open_capture
from eaglelab.collect import capture_server
from eaglelab.counters import Answer, Counters
from eaglelab.errors import AttachError, BadInput
from eaglelab.prompts import Prompt, as_prompts, load_prompts
from eaglelab.server import Server


def client(key=None, **answers) -> Server:
    return Server("http://127.0.0.1:30000/", key, transport=httpx.MockTransport(Stub(**answers)))


def test_facts_are_an_allow_list():
    facts = client(KEY).facts()
    assert facts.fields["speculative_algorithm"] == "EAGLE3" and facts.lifetime_accept_length == 3.0
    assert (facts.launch.algorithm, facts.launch.steps, facts.launch.draft_tokens) == ("EAGLE3", 3, 4)
    assert KEY not in repr(facts) and "launch_command" not in facts.fields
    assert not [name for name in facts.fields if "key" in name]


def test_older_servers_answer_the_older_names():
    facts = client(
        **{"/server_info": 404, "/get_server_info": INFO, "/model_info": 404, "/get_model_info": {}}
    ).facts()
    assert facts.version == "0.5.23"


def test_the_key_goes_out_and_appears_nowhere():
    stub = Stub()
    server = Server("http://h:1", KEY, transport=httpx.MockTransport(stub))
    server.facts()
    assert stub.seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(server) + str(vars(server)) and server._client._trust_env is False


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
    monkeypatch.setenv("ALL_PROXY", "http://proxy.invalid:1")
    with pytest.raises(AttachError, match="127.0.0.1:9.* nothing answers"):
        Server("http://127.0.0.1:9").facts()


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://me:secret@h:1", "file:///etc/passwd"])
def test_addresses_that_are_refused(url):
    with pytest.raises(BadInput) as caught:
        Server(url)
    assert "secret" not in str(caught.value)


ATTACH = {
    "dead": ({"/server_info": httpx.ConnectError("refused")}, "nothing answers there"),
    "slow": ({"/server_info": httpx.ReadTimeout("slow")}, "no answer in time"),
    "cut off": ({"/server_info": httpx.ReadError("cut")}, "ReadError"),
    "not http": ({"/server_info": httpx.RemoteProtocolError("what")}, "Is this an HTTP server"),
    "other server": ({"/server_info": 404}, "does not look like an SGLang server"),
    "html": ({"/server_info": httpx.Response(200, html="<html>")}, "does not look like an SGLang server"),
    "other json": ({"/server_info": {"hello": 1}}, "does not look like an SGLang server"),
    "a list": ({"/server_info": []}, "does not look like an SGLang server"),
    "wrong key": ({"/server_info": 401}, "wants an API key .HTTP 401.. Set EAGLELAB_API_KEY"),
    "redirect": ({"/server_info": httpx.Response(302, headers={"location": "http://evil"})}, "redirects"),
    "broken": ({"/server_info": httpx.Response(500, text="oh no")}, "HTTP 500: oh no"),
    "no speculation": ({"/server_info": {**INFO, "speculative_algorithm": None}}, "without speculation"),
    "ngram": ({"/server_info": {**INFO, "speculative_algorithm": "NGRAM"}}, "algorithm NGRAM"),
    "no plugin": ({}, "no eaglelab plugin: `pip install /path/to/eaglelab`.*still work"),
    "too old": ({"/server_info": {**INFO, "version": "0.5.10.post2"}}, "too old for plugins.*still work"),
    "workers": ({"/server_info": {**INFO, "tokenizer_worker_num": 2}}, "several tokenizer workers"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACH)
def test_each_failure_to_attach_has_its_own_words(tmp_path, name):
    answers, message = ATTACH[name]
    with pytest.raises(AttachError, match=re.compile(message, re.S)) as caught:
        capture_server(client(**answers), ["x"], tmp_path / "out")
    assert caught.value.exit_code == 3 and "http://127.0.0.1:30000" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_wrong_key_and_a_missing_key_read_differently():
    with pytest.raises(AttachError, match="refuses the API key") as caught:
        client(KEY, **{"/server_info": 401}).facts()
    assert KEY not in str(caught.value)


def test_an_endless_answer_is_cut(monkeypatch):
    monkeypatch.setattr("eaglelab.server.MAX_JSON", 100)
    with pytest.raises(AttachError, match="the answer is over"):
        client(**{"/server_info": httpx.Response(200, text="x" * 101)}).facts()


def test_counters_with_their_definitions():
    # Three verifies with 2, 0 and 4 correct of 5 proposed; N = 6 draft tokens.
    answers = [Answer("a", [1], "", {"spec_num_correct_drafts": 2, "spec_num_proposed_drafts": 10,
                                     "spec_verify_ct": 2, "completion_tokens": 5}),
               Answer("b", [1], "", {"spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 5,
                                     "spec_verify_ct": 1, "completion_tokens": 6})]  # fmt: skip
    info = {**INFO, "speculative_num_draft_tokens": 6}
    rows = {m.name: m for m in client(**{"/server_info": info}).counters(answers).measurements()}
    assert rows["accept_length.server"].value == 3.0  # 1 + 6 / 3
    assert rows["acceptance_rate.server"].value == 0.4  # 6 / 15
    assert rows["accept_length.sglang"].value == pytest.approx(11 / 3)
    assert rows["accept_rate.old_style"].value == 0.5  # (6 + 3) / (3 * 6)
    assert rows["accept_length.lifetime"].value == 3.0
    assert "nothing accepted reads 0.17" in rows["accept_rate.old_style"].definition
    nothing = Counters(0, 0, 0, 0, 6).measurements()
    assert all(m.value is None and m.reason for m in nothing)
    silent = [Answer("a", [1], "", {"spec_verify_ct": 4, "completion_tokens": 6})]
    rows = {m.name: m for m in client(**{"/server_info": info}).counters(silent).measurements()}
    for name in ("accept_length.server", "acceptance_rate.server", "accept_rate.old_style"):
        assert rows[name].value is None and rows[name].reason.endswith("do not count correct drafts"), name
    assert rows["accept_length.sglang"].value == 1.5
    zero = {m.name: m for m in Counters(0, 25, 5, 6, 5).measurements()}
    assert zero["accept_length.server"].value == 1.0 and zero["acceptance_rate.server"].value == 0.0
    assert zero["accept_rate.old_style"].value == 0.2, "0.20 with 5 draft tokens is zero accepted"


def test_a_server_that_breaks_off_while_it_tokenizes_is_sent_the_text():
    broken = client(**{"/v1/tokenize": httpx.ReadError("reset")})
    assert broken.token_ids(Prompt(prompt="x")) is None
    with pytest.raises(AttachError, match="cannot apply its chat template"):
        broken.token_ids(Prompt(messages=({"role": "user", "content": "x"},)))


def test_generation_is_greedy_and_never_cached():
    stub = Stub(**{"/generate": [{"text": "a", "output_ids": [1], "meta_info": {"id": "r"}}] * 2})
    server = Server("http://h:1", transport=httpx.MockTransport(stub))
    answers = server.generate([[1, 2], [3]], 5, ["r0", "r1"])
    body = json.loads(stub.seen[-1].content)
    assert [a.output_ids for a in answers] == [[1], [1]] and [a.rid for a in answers] == ["r0", "r1"]
    assert body["input_ids"] == [[1, 2], [3]] and body["rid"] == ["r0", "r1"]
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 5, "ignore_eos": False}
    assert len(set(body["cache_salt"])) == 2
    aborted = [{"meta_info": {"finish_reason": {"type": "abort", "message": "too long"}}}]
    with pytest.raises(AttachError, match="every request was aborted: too long"):
        client(**{"/generate": aborted}).generate(["x"])


# -- prompts


def test_prompts_of_every_kind(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [
        '{"prompt": "a"}',
        "",
        '{"input_ids": [1, 2]}',
        '{"messages": [{"role": "user", "content": "b"}]}',
    ]
    path.write_text("\n".join(lines))
    messages = ({"role": "user", "content": "b"},)
    assert load_prompts(path) == [Prompt(prompt="a"), Prompt(input_ids=(1, 2)), Prompt(messages=messages)]
    assert load_prompts(path, limit=1) == [Prompt(prompt="a")] == as_prompts(["a"])
    assert as_prompts([[1, 2]]) == [Prompt(input_ids=(1, 2))]


@pytest.mark.parametrize("line,message", [
    ("{", "line 2: not JSON"), ("[]", "line 2: needs exactly one of"), ("{}", "has none"),
    ('{"prompt": "a", "input_ids": [1]}', "has prompt, input_ids"), ('{"prompt": ""}', "prompt: a text"),
    ('{"prompt": 3}', "prompt: a text"), ('{"input_ids": []}', "input_ids: a list of token ids"),
    ('{"input_ids": [1.5]}', "input_ids"), ('{"input_ids": [true]}', "input_ids"),
    ('{"input_ids": [-1]}', "input_ids"),
    ('{"messages": ["hello"]}', "objects with role and content"),
])  # fmt: skip
def test_bad_prompts_name_the_line(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(BadInput, match=message) as caught:
        load_prompts(path)
    assert str(path) in str(caught.value)


def test_no_prompts_at_all(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n")
    for name, message in (("p.jsonl", "no prompts"), ("none.jsonl", "cannot read")):
        with pytest.raises(BadInput, match=message):
            load_prompts(tmp_path / name)


def test_messages_are_templated_by_the_server_or_refused():
    answer = {"tokens": [5, 6], "count": 2}
    assert client(**{"/v1/tokenize": answer}).token_ids(
        Prompt(messages=({"role": "user", "content": "x"},))
    ) == [5, 6]
    assert client().token_ids(Prompt(prompt="x")) is None, "an older server: the text goes out as it is"
    assert client().token_ids(Prompt(input_ids=(1, 2))) == [1, 2]
    with pytest.raises(AttachError, match="cannot apply its chat template"):
        client().token_ids(Prompt(messages=({"role": "user", "content": "x"},)))


# -- collecting


def quiet(*_):
    pass


def test_a_capture_is_collected_whole(tmp_path):
    made = Armed(tmp_path / "spool")
    capture = capture_server(made.server(), made.prompts(), tmp_path / "deep" / "out", progress=quiet)
    assert made.state == "closed"
    assert {rid: t.tokens for rid, t in capture.requests.items()} == {
        r: t.tokens for r, t in made.truths.items()
    }
    assert capture.parameters == {"dp0.tp0": [{"name": "fc.weight"}]}
    assert capture.meta["reprefill"] == {"state": "skipped", "reason": "graphs", "requests": {}}
    assert capture.launch.target.hidden_size == 4
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["out"]
    for path in (tmp_path / "deep" / "out").iterdir():
        assert KEY.encode() not in path.read_bytes()


def test_errors_of_a_ranks_probe_are_in_the_capture(tmp_path):
    """Those outside the session too, as of a re-prefill that could not be planned."""
    made = Armed(tmp_path / "spool")
    plain = made.status

    def status(*_):
        said = plain()
        said["ranks"]["dp0.tp0"] |= {"errors": {"reprefill": 1}, "last_error": "reprefill: KeyError: 'x'"}
        return said

    made.answers["/eaglelab/status"] = status
    capture = capture_server(made.server(), made.prompts(), tmp_path / "out", progress=quiet)
    (problem,) = [p for p in capture.problems if "since the server started" in p.text]
    assert problem.where == "rank dp0.tp0" and problem.text.endswith("reprefill: KeyError: 'x'")


def test_one_aborted_request_does_not_cost_the_others(tmp_path):
    """It is told as partial, its counters are left out, and its text is not sent again."""
    made = Armed(tmp_path / "spool")

    def generate(request):
        answers = Armed.generate(made, request)
        counted = {"spec_num_correct_drafts": 2, "spec_verify_ct": 2}
        answers[0]["meta_info"] = counted
        gone = {"type": "abort", "message": "it took too long"}
        answers[1] = {"output_ids": [], "meta_info": {"spec_verify_ct": 9, "finish_reason": gone}}
        return answers

    made.answers["/generate"] = generate
    capture = capture_server(made.server(), made.prompts(), tmp_path / "out", progress=quiet)
    first, second = capture.requests.values()
    assert first.state == "complete"
    assert (second.state, second.why) == ("partial", "the server aborted it: it took too long")
    values = {m["name"]: m["value"] for m in capture.meta["measurements"]}
    assert values["accept_length.server"] == 2.0


def test_an_existing_folder_is_never_touched(tmp_path):
    made = Armed(tmp_path / "spool")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(BadInput, match="out exists"):
        capture_server(made.server(), made.prompts(), out, progress=quiet)
    with pytest.raises(BadInput, match="mine is no folder that can be written to"):
        capture_server(made.server(), made.prompts(), out / "mine" / "below", progress=quiet)
    assert made.order is None and (out / "mine").exists(), "refused before anything is armed"
    (out / "mine").unlink()
    capture_server(made.server(), made.prompts(), out, progress=quiet)  # an empty one is welcome


FILES = "/eaglelab/files/1"


def one_file(rank="r", name="x", size=1):
    return {"files": [{"rank": rank, "name": name, "bytes": size, "sha256": ""}]}


TROUBLE = {
    "damaged": (f"{FILES}/dp0.tp0/events.jsonl", httpx.Response(200, content=b"x"), AttachError, "damaged"),
    "altered": (
        f"{FILES}/dp0.tp0/parameters.json",
        httpx.Response(200, content=b'[{"name": "no.weight"}]'),  # as long as the true one
        AttachError,
        "damaged",
    ),
    "endless": (
        f"{FILES}/dp0.tp0/parameters.json",
        httpx.Response(200, content=b"x" * 99),
        AttachError,
        "longer",
    ),
    "gone": (f"{FILES}/dp0.tp0/events.jsonl", 404, AttachError, "HTTP 404"),
    "died": ("/generate", httpx.ReadError("reset"), AttachError, "ReadError: reset. Has the server ended"),
    "interrupted": ("/generate", KeyboardInterrupt("^C"), KeyboardInterrupt, "C"),
    "interrupted as it arms": ("/eaglelab/arm", signal.SIGINT, KeyboardInterrupt, "^$"),
    "interrupted as it disarms": ("/eaglelab/disarm", signal.SIGINT, KeyboardInterrupt, "^$"),
    "stranger": (FILES, one_file(rank="..", name="y"), AttachError, "not a file name"),
    "climber": (FILES, one_file(name="../x"), AttachError, "not a file name"),
    "huge": (FILES, one_file(size=1 << 50), AttachError, "over the limit"),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_disarms_and_leaves_nothing(tmp_path, name):
    path, answer, error, message = TROUBLE[name]

    def give(request):
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        if isinstance(answer, signal.Signals):
            os.kill(os.getpid(), answer)
            return getattr(made, path.rpartition("/")[2])(request)
        return answer

    made = Armed(tmp_path / "spool", **{path: give})
    with pytest.raises(error, match=message):
        capture_server(made.server(), made.prompts(), tmp_path / "x" / "out", progress=quiet)
    assert made.state == "closed", "disarmed"
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())


def test_another_capture_is_waited_for(tmp_path):
    """Also one whose client was killed: its lease ends by itself."""
    made, told = Armed(tmp_path / "spool"), []

    def say(line):
        told.append(line)
        made.state = "closed"

    server, made.state = made.server(), "armed"
    with pytest.raises(AttachError, match="armed by another capture, which ends by itself in 9 s"):
        server.wait_until_free(server.facts(), 0, say)
    server.wait_until_free(server.facts(), 30, say)
    server.wait_until_free(server.facts(), 0, say)
    assert told == ["another capture has armed http://127.0.0.1:1: waiting up to 30 s"]


def test_a_full_disk_is_said_before_it_is_filled(tmp_path, monkeypatch):
    made = Armed(tmp_path / "spool")
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(assemble.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BadInput, match="MiB are free"):
        capture_server(made.server(), made.prompts(), tmp_path / "out", progress=quiet)
    assert not (tmp_path / "out").exists()


def test_tampered_events_do_not_become_a_capture(tmp_path):
    made = Armed(tmp_path / "spool")
    path = tmp_path / "spool" / "events.jsonl"
    path.write_text(path.read_text().replace('"seq": 3', '"seq": 4'))
    with pytest.raises(BadInput, match="an event is missing"):
        capture_server(made.server(), made.prompts(), tmp_path / "out", progress=quiet)
    assert not (tmp_path / "out").exists()


def test_ranks_that_never_arm_are_named(tmp_path):
    made = Armed(tmp_path / "spool")
    made.answers["/eaglelab/arm"] = lambda r: {"id": "2", "rid_prefix": "p", "reprefill_prefix": "n"}
    with pytest.raises(AttachError, match="ranks dp0.tp0 did not arm within 0 s"):
        capture_server(made.server(), made.prompts(), tmp_path / "out", progress=quiet, patience=0.01)


def test_hooks_that_did_not_take_are_named(tmp_path):
    made = Armed(tmp_path / "spool")
    status = made.status()
    status["ranks"]["dp0.tp0"]["hooks"] = {"mod.Worker.draft": False, "mod.GraphRunner.execute": False}
    made.answers["/eaglelab/status"] = status
    with pytest.raises(
        AttachError, match="could not hook rank dp0.tp0: SGLang 0.5.23 has no mod.Worker.draft"
    ):
        capture_server(made.server(), made.prompts(), tmp_path / "out", progress=quiet)


def test_batches_hold_one_kind():
    assert collect._groups([False] * 5, 2) == [[0, 1], [2, 3], [4]]
    assert collect._groups([False, True, True, False], 8) == [[0], [1, 2], [3]]


def test_the_targets_shards_are_joined(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import save_file

    torch = pytest.importorskip("torch")
    table = torch.randn(5, 4).bfloat16()
    bits = table.view(torch.int16).numpy().view(np.uint16)
    model = {"target": {"architecture": "F", "hidden_size": 4, "num_layers": 2, "vocab_size": 5,
                        "dtype": "bfloat16"},
             "target_config": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}}  # fmt: skip
    shards = []
    for rank, (start, end) in enumerate(((0, 3), (3, 5))):
        shard = tmp_path / f"s{rank}"
        shard.mkdir()
        save_file(
            {"embed_tokens.weight": bits[start:end], "norm.weight": np.ones(4, np.float32)},
            shard / "target.safetensors",
        )
        about = {"rows": {"embed_tokens.weight": [start, end]},
                 "dtypes": {"embed_tokens.weight": "bfloat16", "norm.weight": "float32"}}  # fmt: skip
        (shard / "target.json").write_text(json.dumps(about))
        shards.append(shard)
    write_target(tmp_path / "target", shards, model)
    with safe_open(tmp_path / "target" / "target.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("embed_tokens.weight"), table)
        assert file.get_tensor("norm.weight").tolist() == [1, 1, 1, 1]
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["torch_dtype"], config["rms_norm_eps"]) == (
        2,
        "bfloat16",
        1e-5,
    )
    with pytest.raises(AttachError, match="embed_tokens.weight: rows are missing"):
        write_target(tmp_path / "again", shards[:1], model)


def test_open_capture_is_what_was_collected(tmp_path):
    made = Armed(tmp_path / "spool")
    capture_server(made.server(), made.prompts(), tmp_path / "out", progress=quiet)
    assert open_capture(tmp_path / "out").widths == {"prefill_extend": 6, "draft": 3, "decode_extend": 6}
