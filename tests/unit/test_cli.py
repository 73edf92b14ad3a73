"""The commands: what reaches stdout and stderr, and the exit codes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eaglelab import cli, collect, records, report, runs, serve
from eaglelab.errors import AttachError
from eaglelab.records import Finding

DATA = Path(__file__).parents[2] / "data"
COMMANDS = (
    "demo", "serve", "capture", "disarm", "inspect", "replay", "diagnose", "convert", "faults", "explain",
    "report", "export", "history",
)  # fmt: skip
DEAD = "http://127.0.0.1:1"


def run(*words, **options):
    return CliRunner().invoke(cli.app, [str(w) for w in words], **options)


def process(*words, **environment):
    command = [sys.executable, "-m", "eaglelab.cli", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


def test_help_loads_nothing_heavy():
    heavy = (
        "torch numpy matplotlib papermill nbconvert IPython httpx pydantic safetensors sglang transformers"
    )
    script = f"import sys, eaglelab.cli; print(sorted(set({heavy.split()}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_examples(name):
    done = run(name, "--help")
    assert done.exit_code == 0 and "Examples:" in done.output and f"eaglelab {name}" in done.output
    assert name in run("--help").output


def test_an_example_is_one_line_to_copy():
    example = (
        'eaglelab diagnose --drafter DRAFTER --target config.json --launch "--speculative-algorithm EAGLE"'
    )
    assert f"  {example}\n" in run("diagnose", "--help").output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_signals_unwind_like_ctrl_c_unless_they_are_ignored(monkeypatch, number, before):
    monkeypatch.setattr(cli, "app", lambda: os.kill(os.getpid(), number))
    known = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(number, before)
    try:
        with pytest.raises(KeyboardInterrupt) if before is signal.SIG_DFL else contextlib.nullcontext():
            cli.main()
    finally:
        for n, handler in known.items():
            signal.signal(n, handler)


def test_version_and_codes_in_the_help():
    assert "drafter, for our own prompts only." in " ".join(run("--help").output.split())  # not cut short
    assert run("--version").output == "eaglelab 0.1.0\n"
    assert "Exit codes: 0 healthy; 1 broken or inconclusive; 2 usage" in run("--help").output


DRAFTER, GOLDEN = DATA / "drafter-sglang", DATA / "golden-capture"
REPORT = ["report", "--drafter", DATA, "--server", DEAD]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nope"], "No such option"),
        (["report"], "--drafter"),
        (["demo", "EAGLE"], "unexpected argument 'EAGLE'; SGLang's own flags come after --"),
        (["demo", "--algorithm", "MEDUSA"], "--algorithm MEDUSA: EAGLE3 or EAGLE"),
        (["demo", "--topk", "0"], "--topk"),
        (["inspect", "/nowhere"], "/nowhere: does not exist"),
        (["inspect", DATA / "prompts.jsonl"], "a file; give the folder of a drafter, a capture or"),
        (["replay", "--capture", DATA / "prompts.jsonl", "--drafter", DATA], "capture.json: not found"),
        (["report", "--drafter", DATA, "--capture", "/nowhere"], "'capture': /nowhere does not exist"),
        (
            ["inspect", DATA / "target", "--engine", "vllm==1"],
            "--engine vllm==1: write it as sglang==VERSION",
        ),
        (["disarm", "--server", "http://h:x"], "'http://h:x' is not an address like http://HOST:PORT"),
        (["report", "--drafter", DRAFTER, "--capture", DATA], "a capture is a directory with capture.json"),
        (["report", "--drafter", DRAFTER, "--capture", GOLDEN, "--features", DATA], "no stored features"),
        ([*REPORT, "--timeout", "0"], "--timeout"),
        ([*REPORT, "-p", "repeat=2"], "parameter 'repeat': there is none"),
        ([*REPORT, "-p", "api_key=s"], "a key is never a parameter"),
        ([*REPORT, "--baseline", DATA], "report.jsonl is not there"),
        ([*REPORT, "--out", DATA], "exists and is not empty"),
        ([*REPORT, "--api-key-file", "/nowhere"], "--api-key-file /nowhere: cannot be read"),
        (["convert", DATA / "drafter-sglang", DATA, "--to", "speculators"], "exists already"),
        (
            ["replay", "--capture", DATA, "--drafter", DATA],
            "a capture is a directory with capture.json in it",
        ),
    ],
)
def test_usage_errors_exit_2_with_their_message(words, message):
    done = run(*words)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.output
    assert done.stdout == ""


def test_debug_shows_the_traceback():
    done = process("inspect", "/nowhere", EAGLELAB_DEBUG="1")
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert "Traceback" not in process("inspect", "/nowhere", EAGLELAB_DEBUG="").stderr


def test_json_is_one_object_and_nothing_else():
    done = run("inspect", DATA / "drafter-sglang", "--target", DATA / "target", "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == 0 and said["kind"] == "drafter"
    assert said["layer_ids"]["written"] == [1, 3, 4] and said["layer_ids"]["depths"] == [2, 4, 5]


def test_an_error_under_json_is_an_object_too():
    done = run("inspect", "/nowhere", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout) == {"error": "/nowhere: does not exist", "exit_code": 2}


def test_what_is_printed_while_working_stays_off_stdout_under_json(monkeypatch):
    from eaglelab import text

    def chatty(*_):
        print("noise")
        return {"a": 1}, "text"

    monkeypatch.setattr(text, "inspect", chatty)
    assert run("inspect", "x", "--json").stdout == '{"a": 1}\n'
    assert run("inspect", "x").stdout == "noise\ntext\n"


def test_inspect_names_the_incident_without_a_server():
    flags = "--speculative-algorithm EAGLE --speculative-num-steps 5 --speculative-eagle-topk 1"
    done = run("inspect", DATA / "drafter-sglang", "--target", DATA / "target/config.json", "--launch", flags)
    text = " ".join(done.stdout.split())
    assert (
        "width 384 -> 128" in text and "fc applied -> bypassed" in text and "vocab_map d2t -> dropped" in text
    )


def test_convert_says_what_it_did_and_the_result_is_a_drafter(tmp_path):
    done = run(
        "convert", DATA / "drafter-speculators", tmp_path / "d", "--to", "sglang", "--target", DATA / "target"
    )
    assert done.exit_code == 0 and "layer ids [2, 4, 5] -> [1, 3, 4]" in done.stdout
    assert json.loads(run("inspect", tmp_path / "d", "--json").stdout)["dialect"] == "sglang"


@pytest.mark.parametrize(
    "words", [["capture", "--out", "x"], ["diagnose", "--drafter", DATA / "drafter-sglang"]]
)
def test_a_dead_server_exits_3(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    done = run(*words, "--server", DEAD, "--prompts", "p.jsonl")
    assert done.exit_code == 3 and "nothing answers there" in done.stderr and done.stdout == ""
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl"]


@pytest.mark.parametrize(("content", "code"), [(b"canary\n", 3), (b"", 2), (b"a\nb\n", 2), (b"\xff", 2)])
def test_the_key_comes_from_a_file_or_the_environment(content, code, monkeypatch, tmp_path):
    keys = []

    def attach(server, *_, **__):
        keys.append(server._client.headers.get("Authorization"))
        raise AttachError("no")

    monkeypatch.setattr(collect, "capture_server", attach)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "key").write_bytes(content)
    words = ["capture", "--server", DEAD, "--out", tmp_path / "c", "--prompts", tmp_path / "p.jsonl"]
    done = run(*words, "--api-key-file", tmp_path / "key")
    assert done.exit_code == code and "canary" not in done.output
    assert keys == (["Bearer canary"] if code == 3 else [])
    run(*words, env={"EAGLELAB_API_KEY": "other"})
    assert keys[-1] == "Bearer other"


@pytest.fixture
def web():
    """A small web server; `answers` maps a path to (status, body)."""
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path, answers.get("*", (404, "{}")))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


def sglang(algorithm):
    return {
        "/server_info": (
            200,
            json.dumps({"speculative_algorithm": algorithm, "tp_size": 1, "version": "0.5.23"}),
        ),
        "/model_info": (200, "{}"),
    }


@pytest.mark.parametrize("command", ["report", "diagnose", "capture"])
@pytest.mark.parametrize(
    ("said", "message"),
    [
        (sglang("EAGLE3"), "has no eaglelab plugin: `pip install /path/to/eaglelab`, a checkout"),
        (sglang(None), "runs without speculation: there is no drafter to look at"),
        ({"*": (401, "")}, "wants an API key (HTTP 401). Set EAGLELAB_API_KEY or use --api-key-file"),
        ({"*": (200, "<html>hello</html>")}, "does not look like an SGLang server"),
    ],
)
def test_servers_that_cannot_be_captured_exit_3_each_with_its_message(web, tmp_path, command, said, message):
    url, answers = web
    answers |= said
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    words = [command, "--server", url, "--prompts", tmp_path / "p.jsonl"]
    words += ["--drafter", DATA / "drafter-sglang"] if command != "capture" else []
    words += ["--out", tmp_path / "out"] if command != "diagnose" else []
    done = run(*words, env={"EAGLELAB_API_KEY": ""})
    assert done.exit_code == 3 and message in done.stderr and done.stdout == ""
    assert os.listdir(tmp_path) == ["p.jsonl"]


class Server:
    """Stands in for start_server: remembers how it was asked and whether it was stopped."""

    url, pid, log = "http://127.0.0.1:1", 1, "log"

    def __init__(self, monkeypatch, tmp_path):
        self.asked, self.stopped = None, False
        monkeypatch.setattr(serve, "start_server", self.start)
        for name in ("drafter-sglang", "target"):
            (tmp_path / "data" / name).mkdir(parents=True)
        monkeypatch.setenv("EAGLELAB_DATA", str(tmp_path / "data"))

    @contextlib.contextmanager
    def start(self, algorithm, topk, **more):
        self.asked = (algorithm, topk, more["tp"], more["extra_flags"])
        try:
            yield self
        finally:
            self.stopped = True


@pytest.fixture
def server(monkeypatch, tmp_path):
    return Server(monkeypatch, tmp_path)


def finished(folder, verdict, fault):
    finding = Finding(fault="f", verdict="failed" if fault else "passed", title="title", fix="--flag")
    summary = records.summarise([finding], verdict, fault)
    folder.mkdir()
    records.write(folder / "report.jsonl", [finding, summary])
    return runs.Outcome(1 if fault else 0, verdict, folder, summary)


@pytest.mark.parametrize(("verdict", "fault", "code"), [("healthy", None, 0), ("broken", "f", 1)])
def test_demo_ends_with_verdict_and_page_and_stops_the_server(
    server, monkeypatch, tmp_path, verdict, fault, code
):
    asked, again = [], []

    def fake(params, **_):
        asked.append(params)
        again.append(params.command())
        return finished(tmp_path / "run", verdict, fault)

    monkeypatch.setattr(report, "run", fake)
    done = run(
        "demo",
        "--algorithm",
        "eagle",
        "--topk",
        "4",
        "--tp",
        "2",
        "--max-requests",
        "3",
        "--",
        "--page-size",
        "1",
    )
    assert done.exit_code == code and server.stopped
    assert server.asked == ("EAGLE", 4, 2, ["--page-size", "1"])
    last = done.stdout.splitlines()[-2:]
    assert last == ["healthy" if code == 0 else "broken: f", str(tmp_path / "run/report.html")]
    assert asked[0].drafter.endswith("drafter-sglang") and asked[0].max_requests == 3
    assert again == ["eaglelab demo --algorithm eagle --topk 4 --tp 2 -- --page-size 1"]
    assert asked[0].command().startswith("eaglelab report --server ")  # only while the demo runs


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (AttachError("no probe"), 3, "no probe"),
        (runs.Interrupted(Path("/x.partial")), 130, "interrupted; what there is lies in /x.partial"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
    ],
)
def test_demo_stops_the_server_in_every_case(server, monkeypatch, error, code, message):
    monkeypatch.setattr(report, "run", lambda *_, **__: (_ for _ in ()).throw(error))
    done = run("demo")
    assert done.exit_code == code and message in done.stderr and server.stopped and done.stdout == ""


def test_an_incomplete_report_says_where_the_rest_lies(monkeypatch):
    outcome = runs.Outcome(5, "the run was stopped after 3 s", Path("/runs/1.partial"))
    monkeypatch.setattr(report, "run", lambda *_, **__: outcome)
    words = ["report", "--server", DEAD, "--drafter", DATA]
    done = run(*words)
    assert done.exit_code == 5 and done.stdout == ""
    assert "the run was stopped after 3 s\nwhat there is lies in /runs/1.partial" in done.stderr
    said = json.loads(run(*words, "--json").stdout)
    assert said["exit_code"] == 5 and said["verdict"] is None and said["error"] == outcome.message
