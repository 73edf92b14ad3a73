"""Start genuine SGLang on this machine's CPU, for demo, tests and teaching, and leave nothing behind.

The server runs in its own Python environment (`eaglelab_cpu` and SGLang installed), in its own process
group, on 127.0.0.1. The flags are those with which sglang 0.5.23 runs on a CPU; the operators come from
`eaglelab_cpu`.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from eaglelab.errors import AttachError, BadInput

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
DRAFT_TOKENS_OF_A_TREE = 16
LINES_SHOWN = 25  # of the log, when a server dies

CPU_FLAGS = (
    "--device cpu --dtype float32 --max-total-tokens 8192 --max-running-requests 4 --disable-cuda-graph"
    " --prefill-attention-backend intel_amx --decode-attention-backend intel_amx"
)
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # wakes eaglelab_cpu, and SGLang's own CPU branches
    "OMP_NUM_THREADS": "1",  # essential: 16 ms a verify against 850 ms with one thread a core
    "MKL_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # /health then answers at once
}


@dataclass(frozen=True)
class RunningServer:
    """A server that is up. `log` is the file that it writes to; `launch_command` never holds the key."""

    url: str
    pid: int
    launch_command: str
    log: pathlib.Path

    def is_up(self) -> bool:
        """Whether it answers now."""
        return _answers(int(self.url.rpartition(":")[2]))


def data_dir() -> pathlib.Path:
    """Folder of the tiny models and prompts: EAGLELAB_DATA, else `data` in the checkout."""
    folder = pathlib.Path(os.environ.get("EAGLELAB_DATA") or CHECKOUT / "data").expanduser().absolute()
    if not folder.is_dir():
        raise BadInput(
            f"{folder} is not a folder. The tiny models come with the git checkout (eaglelab installed with"
            " `pip install -e`); set EAGLELAB_DATA to its data folder."
        )
    return folder


def server_python() -> str:
    """The Python that has SGLang: EAGLELAB_SERVER_PYTHON, else the checkout's `.venv-server`, else this."""
    named = os.environ.get("EAGLELAB_SERVER_PYTHON")
    if named:
        if shutil.which(named) is None:
            raise BadInput(f"EAGLELAB_SERVER_PYTHON={named} cannot be run. Name a Python that has sglang.")
        return named
    beside = CHECKOUT / ".venv-server" / "bin" / "python"
    if beside.exists():
        return str(beside)
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    raise BadInput(
        f"No Python with SGLang: neither EAGLELAB_SERVER_PYTHON nor {beside} exists. Run `make setup` in the"
        " checkout, or set EAGLELAB_SERVER_PYTHON."
    )


def server_command(
    algorithm: str | None = "EAGLE3",
    topk: int = 1,
    steps: int = 5,
    draft_tokens: int | None = None,
    tp: int = 1,
    port: int = 30000,
    target: str | os.PathLike | None = None,
    drafter: str | os.PathLike | None = None,
    extra_flags: Sequence[str] = (),
) -> list[str]:
    """The flags after `python -m sglang.launch_server`; of a flag given twice SGLang takes the last."""
    target = pathlib.Path(target) if target else data_dir() / "target"
    flags = ["--model-path", _model_folder(target, "target"), "--host", "127.0.0.1", "--port", str(port)]
    flags += CPU_FLAGS.split()
    if tp != 1:
        flags += ["--tp-size", str(tp)]
    if algorithm is not None:
        drafter = pathlib.Path(drafter) if drafter else data_dir() / "drafter-sglang"
        if draft_tokens is None:
            draft_tokens = steps + 1 if topk == 1 else DRAFT_TOKENS_OF_A_TREE
        flags += ["--speculative-algorithm", algorithm]
        flags += ["--speculative-draft-model-path", _model_folder(drafter, "drafter")]
        flags += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)]
        flags += ["--speculative-num-draft-tokens", str(draft_tokens)]
        flags += ["--speculative-draft-attention-backend", "intel_amx"]
    return flags + list(extra_flags)


@contextlib.contextmanager
def start_server(
    algorithm: str | None = "EAGLE3",
    topk: int = 1,
    steps: int = 5,
    draft_tokens: int | None = None,
    tp: int = 1,
    port: int | None = None,
    target: str | os.PathLike | None = None,
    drafter: str | os.PathLike | None = None,
    extra_flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    api_key: str | None = None,
    python: str | None = None,
    log: str | os.PathLike | None = None,
    progress: Callable[[str], None] | None = None,
    patience: float = 600.0,
) -> Iterator[RunningServer]:
    """Run genuine SGLang on the CPU for the length of a `with` block.

    algorithm None: no speculation. draft_tokens None: steps + 1 for a chain, 16 for a tree. port None: a
    free one. log None: a file that is removed with the server. progress: called with one line at a time
    (default: to stderr). patience: seconds until it must be up. The block is entered when the server
    answers; on leaving it, also by an exception, Ctrl-C, SIGTERM or the death of this process, the server's
    whole process group is stopped. Raises BadInput (no server environment, no model folder), AttachError
    (it died or did not come up; with its log).
    """
    say = progress or _to_stderr
    if port and _taken(port):
        raise BadInput(f"port {port} is taken: stop what listens there, or name another (0: a free one)")
    port = port or free_port()
    flags = server_command(algorithm, topk, steps, draft_tokens, tp, port, target, drafter, extra_flags)
    python = python or server_python()
    with contextlib.ExitStack() as stack:
        # Short, private, and also the server's TMPDIR: SGLang leaves its sockets' files there.
        private = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eaglelab-")))
        log_path = pathlib.Path(log).absolute() if log else private / "server.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.touch(0o600)  # SGLang writes all its arguments there, the key too
        command = [python, "-m", "sglang.launch_server", *flags]
        secret = []
        if api_key is not None:  # by file: a command line is public, and copied into reports
            key_file = private / "key.yaml"
            key_file.touch(0o600)
            key_file.write_text(json.dumps({"api-key": api_key}))
            secret = ["--config", str(key_file)]
        stack.enter_context(_signals_as_exceptions())
        process = stack.enter_context(
            _process_group(command + secret, _environment(tp, private, env), log_path)
        )
        url = f"http://127.0.0.1:{port}"
        what = "no speculation" if algorithm is None else f"{algorithm}, {steps} steps, topk {topk}"
        name = f"SGLang on the CPU ({what}, tp {tp})"
        _wait_until_up(process, port, name, lambda: tail(log_path, api_key), say, patience)
        yield RunningServer(url, process.pid, shlex.join(command), log_path)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _taken(port: int) -> bool:
    """Whether something listens there already: it would be taken for our server, which then dies unseen."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _model_folder(path: pathlib.Path, what: str) -> str:
    path = path.expanduser().absolute()
    if not (path / "config.json").is_file():
        raise BadInput(f"{path} has no config.json. Name the {what}'s folder (config.json, *.safetensors).")
    return str(path)


def _environment(tp: int, private: pathlib.Path, extra: Mapping[str, str] | None) -> dict[str, str]:
    hidden = ("EAGLELAB_API_KEY", "PYTHONHOME")  # the key is for attaching to other servers
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= CPU_ENVIRONMENT | {"TMPDIR": str(private)}
    if tp != 1:  # SGLang wants a core named for each rank; ranks may share one
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        bind = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = bind
    return environment | dict(extra or {})


@contextlib.contextmanager
def _process_group(command: list[str], environment: dict[str, str], log: pathlib.Path):
    """A process that leads its own group; the group is dead afterwards, even if this process is killed."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    guard = None
    try:
        # SIGKILL cannot be caught: this shell sees its standard input close when we are gone.
        script = 'read -r _; kill -s KILL -- "-$1"; rm -rf "$2"'
        guard = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", str(process.pid), environment["TMPDIR"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        yield process
    finally:
        _stop_group(process)
        if guard is not None:
            guard.kill()
            guard.communicate()


def _stop_group(process: subprocess.Popen) -> None:
    """SIGKILL at once, as SGLang stops itself: a SIGTERM it only answers after 5 s, and nothing is lost."""
    shared = _shared_memory(process.pid)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # (macOS: EPERM for zombies)
            os.killpg(process.pid, signal.SIGKILL)
        if process.poll() is not None and not _members(process.pid):
            break
        time.sleep(0.05)
    for path in shared:
        path.unlink(missing_ok=True)


def _members(group: int) -> list[int]:
    """Living processes of a process group, by /proc (empty where there is none)."""
    pids = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":  # zombies may never be reaped
                pids.append(int(stat.parent.name))
    return pids


def _shared_memory(group: int) -> list[pathlib.Path]:
    """Files in /dev/shm that the group's processes have mapped; killed, SGLang leaves them behind.

    Matched by inode: the C library maps a semaphore under another name than the one that stays.
    """
    inodes = set()
    for pid in _members(group):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, path
                if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                    inodes.add(int(fields[4]))
    found = []
    for path in pathlib.Path("/dev/shm").glob("*"):
        with contextlib.suppress(OSError):
            if path.stat().st_ino in inodes:
                found.append(path)
    return found


@contextlib.contextmanager
def _signals_as_exceptions():
    """SIGTERM and SIGHUP end Python without unwinding; turned into SystemExit, they stop the server first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number, _frame):
        raise SystemExit(128 + number)

    ours = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _wait_until_up(process, port: int, name: str, tail, say, patience: float) -> None:
    start = time.monotonic()
    say(f"Starting {name}")
    next_word = 10.0
    while not _answers(port):
        waited = time.monotonic() - start
        if process.poll() is not None:
            raise AttachError(f"{name} ended with code {process.returncode} while it started.{tail()}")
        if waited > patience:
            raise AttachError(f"{name} was not up after {patience:.0f} s.{tail()}")
        if waited > next_word:
            say(f"Starting {name}: {waited:.0f} s")
            next_word += 10.0
        time.sleep(0.2)
    say(f"{name} is up after {time.monotonic() - start:.0f} s at http://127.0.0.1:{port}")


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tail(log: pathlib.Path, api_key: str | None = None) -> str:
    """The last lines of a server's log, for an error message; the log itself goes with the server."""
    text = log.read_text(errors="replace")
    lines = (text.replace(api_key, "(key)") if api_key else text).splitlines()[-LINES_SHOWN:]
    return f" The last lines of its log ({log}):\n" + "\n".join(f"    {line}" for line in lines)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
