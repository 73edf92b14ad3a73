"""serve.py with a stand-in for SGLang: its flags, how it dies, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from eaglelab import serve
from eaglelab.errors import AttachError, BadInput

FAKE = """
import http.server, os, pathlib, subprocess, sys, time
flags = sys.argv[sys.argv.index("sglang.launch_server") + 1:]
print("flags", *flags)
print("bind", os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"), flush=True)
if os.environ.get("FAKE") == "die":
    print(pathlib.Path(flags[flags.index("--config") + 1]).read_text() if "--config" in flags else "")
    print("RuntimeError: no memory", flush=True)
    sys.exit(7)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(300)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(flags[flags.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path):
    """A `python` that starts a little HTTP server, with a child which ignores SIGTERM; and two models."""
    (tmp_path / "fake.py").write_text(FAKE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {tmp_path}/fake.py "$@"\n')
    python.chmod(0o755)
    for model in ("target", "drafter"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text("{}")
    return {
        "python": str(python), "target": tmp_path / "target", "drafter": tmp_path / "drafter",
        "log": tmp_path / "logs" / "server.log", "progress": lambda line: None,
    }  # fmt: skip


def flags(command: list[str]) -> dict[str, str]:
    """Flag -> its value, the last one where it comes twice."""
    return {a: b for a, b in zip(command, command[1:], strict=False) if a.startswith("--")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def child_of(log: Path) -> int:
    return int(log.read_text().split("child ")[1].split()[0])


def gone(*pids: int) -> bool:
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_the_usual_command(fake):
    models = {"target": fake["target"], "drafter": fake["drafter"]}
    chain = flags(serve.server_command(**models))
    assert chain["--speculative-algorithm"] == "EAGLE3"
    assert chain["--speculative-num-steps"] == "5"
    assert chain["--speculative-eagle-topk"] == "1"
    assert chain["--speculative-num-draft-tokens"] == "6"
    assert chain["--speculative-draft-model-path"] == str(fake["drafter"])
    assert chain["--host"] == "127.0.0.1"
    assert chain["--dtype"] == "float32"
    assert "--tp-size" not in chain
    assert flags(serve.server_command(steps=3, **models))["--speculative-num-draft-tokens"] == "4"
    tree = flags(serve.server_command("EAGLE", topk=4, tp=8, **models))
    assert tree["--speculative-algorithm"] == "EAGLE"
    assert tree["--speculative-num-draft-tokens"] == "16"
    assert tree["--tp-size"] == "8"
    plain = serve.server_command(None, extra_flags=["--dtype", "bfloat16"], **models)
    assert not [flag for flag in plain if flag.startswith("--speculative")]
    assert flags(plain)["--dtype"] == "bfloat16"


def test_a_server_lives_as_long_as_its_block(fake):
    lines: list[str] = []
    with serve.start_server(tp=2, **fake | {"progress": lines.append}) as server:
        assert server.is_up()
        assert server.log.read_text().startswith("flags --model-path")
        child = child_of(server.log)
        assert alive(child)
        cores = sorted(os.sched_getaffinity(0))
        assert f"bind {cores[0]}|{cores[1 % len(cores)]}\n" in server.log.read_text()
        assert server.launch_command.split()[1:3] == ["-m", "sglang.launch_server"]
        port = flags(shlex.split(server.launch_command))["--port"]
        assert server.url == "http://127.0.0.1:" + port
        with pytest.raises(BadInput, match="is taken"), serve.start_server(port=int(port), **fake):
            pass
    assert gone(server.pid, child)
    assert not server.is_up()
    assert lines[0] == "Starting SGLang on the CPU (EAGLE3, 5 steps, topk 1, tp 2)"
    assert "is up after" in lines[-1]


def test_an_exception_in_the_block_stops_it(fake):
    with pytest.raises(KeyboardInterrupt), serve.start_server(**fake) as server:
        child = child_of(server.log)
        raise KeyboardInterrupt
    assert gone(server.pid, child)


def test_a_death_at_the_start_shows_the_log(fake):
    words = r"(?s)ended with code 7.*RuntimeError: no memory"
    with pytest.raises(AttachError, match=words), serve.start_server(env={"FAKE": "die"}, **fake):
        pass


def test_the_key_is_in_no_command_line(fake):
    with serve.start_server(api_key="s3cret", **fake) as server:
        seen = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
        key_file = Path(flags(seen)["--config"])
        assert key_file.read_text() == '{"api-key": "s3cret"}'
        assert key_file.stat().st_mode & 0o777 == 0o600
        assert "s3cret" not in " ".join(seen) + server.launch_command + server.log.read_text()
    assert not key_file.parent.exists()
    with (
        pytest.raises(AttachError) as caught,
        serve.start_server(api_key="s3cret", env={"FAKE": "die"}, **fake),
    ):
        pass
    assert '{"api-key": "(key)"}' in str(caught.value)  # what the log holds, SGLang's own words included
    assert "s3cret" in fake["log"].read_text()
    assert fake["log"].stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_no_signal_leaves_it_behind(fake, tmp_path, number):
    """Not even SIGKILL, which this process cannot see."""
    script = f"""
        import time
        from eaglelab.serve import start_server
        target, drafter, log = {str(fake["target"])!r}, {str(fake["drafter"])!r}, {str(fake["log"])!r}
        with start_server(python={fake["python"]!r}, target=target, drafter=drafter, log=log) as server:
            print(server.pid, flush=True)
            time.sleep(60)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    server = int(run.stdout.readline())
    child = child_of(fake["log"])
    assert alive(server) and alive(child)
    run.send_signal(number)
    run.communicate(timeout=20)
    assert run.returncode == {signal.SIGTERM: 143, signal.SIGHUP: 129}.get(number, -number)
    try:
        assert gone(server, child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)


def test_what_is_missing_is_named(fake, monkeypatch, tmp_path):
    with pytest.raises(BadInput, match="nowhere has no config.json. Name the drafter's folder"):
        serve.server_command(target=fake["target"], drafter=tmp_path / "nowhere")
    monkeypatch.setenv("EAGLELAB_DATA", str(tmp_path / "no-data"))
    with pytest.raises(BadInput, match="no-data is not a folder.*EAGLELAB_DATA"):
        serve.data_dir()
    monkeypatch.setenv("EAGLELAB_SERVER_PYTHON", "/no/such/python")
    with pytest.raises(BadInput, match="EAGLELAB_SERVER_PYTHON=/no/such/python cannot be run"):
        serve.server_python()
    monkeypatch.delenv("EAGLELAB_SERVER_PYTHON")
    monkeypatch.setattr(serve, "CHECKOUT", tmp_path)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="make setup"):
        serve.server_python()
    (tmp_path / ".venv-server" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-server" / "bin" / "python").touch()
    assert serve.server_python() == str(tmp_path / ".venv-server" / "bin" / "python")
