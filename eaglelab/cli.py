"""The commands. Each imports what it needs when it runs, so that `eaglelab --help` is quick.

Results go to stdout, progress and messages to stderr; `--json` prints one JSON object on stdout and nothing
else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from eaglelab import __version__
from eaglelab.errors import HEALTHY, NOT_HEALTHY, AttachError, BadInput, EaglelabError

INTERRUPTED = 130
app = typer.Typer(
    name="eaglelab",
    help="Find out where between the trainer and the server an EAGLE-3 drafter lost its acceptance.",
    epilog="Exit codes: 0 healthy; 1 broken or inconclusive; 2 usage or bad input; 3 could not reach, attach or "
    "capture; 4 kernel died; 5 timed out; 6 no summary record; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _text(metavar: str, words: str, *names: str) -> Any:
    return Annotated[str, typer.Option(*names, metavar=metavar, help=words)]


def _count(metavar: str, words: str, least: int, *names: str) -> Any:
    return Annotated[int, typer.Option(*names, min=least, metavar=metavar, help=words)]


def _switch(words: str, *names: str) -> Any:
    return Annotated[bool, typer.Option(*names, help=words)]


Algorithm = _text("NAME", "--speculative-algorithm of the launch: EAGLE3 or EAGLE.")
Topk = _count("N", "1: a chain of 5 drafts; more: a tree of 16 draft tokens.", 1)
Tp = _count("N", "Tensor-parallel ranks.", 1, "--tp")
Port = _count("P", "Port on 127.0.0.1; 0: a free one.", 0)
Flags = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(metavar="[-- SGLANG FLAGS]", help="Passed on to SGLang.", show_default=False),
]
Url = _text("URL", "Address of the server, http://HOST:PORT.")
Drafter = _text("PATH", "Folder of the drafter's checkpoint.")
Target = _text("PATH", "The target's folder, or its config.json.")
Features = _text("PATH", "What the trainer stored; adds rungs 1 and 2.")
Prompts = _text(
    "FILE", "JSON lines of messages, prompt or input_ids (default: the held-out prompts of data/)."
)
LaunchFlags = _text('"SGLANG FLAGS"', "Flags of a launch.")
Engine = _text("NAME==VERSION", "The engine to think of.")
CaptureDir = _text("DIR", "A capture recorded earlier.")
NewFolder = _text("DIR", "A new folder.")
Out = _text("DIR", "Folder for this run (default: runs/ and the time).")
Baseline = _text("DIR", "An earlier report to compare with.")
MaxRequests = _count("N", "Send only the first N prompts; 0: all of them.", 0)
NewTokens = _count("N", "Tokens to generate for each prompt.", 1)
AllRanks = _switch("Record every tensor-parallel rank.", "--all-ranks")
Reprefill = _switch("Send each text again as one prefill, to name depths.")
Statistics = _switch("Read tensors and rows through, for their statistics.", "--statistics")
Json = _switch("Print one JSON object on stdout and nothing else.", "--json")
Timeout = Annotated[float, typer.Option(metavar="S", help="Seconds until the whole run is stopped.")]
KeyFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="FILE", help="Holds the server's API key (default: EAGLELAB_API_KEY)."),
]
Assign = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("-p", metavar="NAME=VALUE", help="Any parameter of the report's notebook."),
]


@dataclass
class Result:
    """What a command found: an object for `--json`, text for people, and the exit code."""

    data: dict[str, Any]
    text: str
    code: int = HEALTHY


def command(*examples: str) -> Callable[[Callable[..., Result | None]], Callable[..., None]]:
    """Register a command: examples under --help, errors as one message and an exit code, one way to print."""

    def register(function: Callable[..., Result | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**options: Any) -> None:
            as_json = options.pop("as_json", False)
            try:  # while a command works, nothing but its result may reach stdout under --json
                with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                    result = function(**options)
            except (EaglelabError, OSError, KeyboardInterrupt) as error:
                if os.environ.get("EAGLELAB_DEBUG") == "1":
                    raise
                result = _failure(error)
            if result and (as_json or result.text):
                typer.echo(json.dumps(result.data, default=str) if as_json else result.text)
            if result:
                raise typer.Exit(result.code)

        return app.command(epilog="\n\n".join(["Examples:", *examples]))(run)

    return register


def _failure(error: BaseException) -> Result:
    """The message goes to stderr; under --json it is the object on stdout too."""
    stopped = isinstance(error, KeyboardInterrupt)
    code = INTERRUPTED if stopped else getattr(error, "exit_code", BadInput.exit_code)
    message = str(error) or "interrupted"
    _say(f"eaglelab: {message}")
    return Result({"error": message, "exit_code": code}, "", code)


@app.callback(invoke_without_command=True)
def _top(version: _switch("Print the version.", "--version") = False) -> None:  # type: ignore[valid-type]
    if version:
        typer.echo(f"eaglelab {__version__}")
        raise typer.Exit()


@command(
    "eaglelab demo",
    "eaglelab demo --algorithm EAGLE",
    "eaglelab demo --topk 4 --tp 8 -- --disable-radix-cache",
)
def demo(
    algorithm: Algorithm = "EAGLE3",
    topk: Topk = 1,
    tp: Tp = 1,
    flags: Flags = None,
    out: Out = "",
    baseline: Baseline = "",
    max_requests: MaxRequests = 0,
    timeout: Timeout = 1800,
    as_json: Json = False,
) -> Result:
    """Start genuine SGLang on this CPU with the tiny models of data/, then report on it as on any server."""
    from eaglelab import serve as module

    data = module.data_dir()
    paths = {"drafter": data / "drafter-sglang", "target": data / "target", "features": data / "features"}
    options: dict[str, Any] = {name: str(path) for name, path in paths.items() if path.exists()}
    options |= {"max_requests": max_requests, "baseline": baseline, "out": out}
    with module.start_server(
        algorithm, topk, tp=tp, extra_flags=_sglang_flags(flags), progress=_say
    ) as server:
        return _report({**options, "server": server.url}, (), timeout, None)


@command(
    "eaglelab serve",
    "eaglelab serve --algorithm EAGLE --port 30000",
    "eaglelab serve --tp 2 -- --log-requests",
)
def serve(
    algorithm: Algorithm = "EAGLE3", topk: Topk = 1, tp: Tp = 1, port: Port = 0, flags: Flags = None
) -> None:
    """Start the same server, print its address and leave it running until Ctrl-C."""
    from eaglelab import serve as module

    extra = _sglang_flags(flags)
    with module.start_server(
        algorithm, topk, tp=tp, port=port or None, extra_flags=extra, progress=_say
    ) as up:
        typer.echo(up.url)
        _say(f"log: {up.log}; stop it with Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            os.waitid(os.P_PID, up.pid, os.WEXITED | os.WNOWAIT)
            raise AttachError("the server ended by itself")
    _say("stopped")


@command("eaglelab capture --server http://127.0.0.1:30000 --prompts my.jsonl --out runs/capture")
def capture(
    server: Url,
    out: NewFolder,
    prompts: Prompts = "",
    all_ranks: AllRanks = False,
    max_requests: MaxRequests = 0,
    max_new_tokens: NewTokens = 128,
    reprefill: Reprefill = True,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> Result:
    """Record what a live server's drafter is fed, for our own prompts only, and what replay needs of its
    target."""
    from eaglelab import report as module
    from eaglelab import text

    asked = {"all_ranks": all_ranks, "max_requests": max_requests, "max_new_tokens": max_new_tokens}
    got = module.record(server, prompts, Path(out), _key(api_key_file), _bar(), reprefill=reprefill, **asked)
    return Result(*text.capture(got))


@command(
    "eaglelab inspect data/drafter-sglang --target data/target",
    'eaglelab inspect DRAFTER --target config.json --launch "--speculative-algorithm EAGLE"',
    "eaglelab inspect runs/1/capture",
    "eaglelab inspect FEATURES --statistics --json",
)
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A drafter, a capture or stored features.")],
    target: Target = "",
    launch: LaunchFlags = "",
    engine: Engine = "sglang==0.5.23",
    statistics: Statistics = False,
    as_json: Json = False,
) -> Result:
    """Say what is in a checkpoint, a capture or stored features, and what an engine would do with a
    drafter."""
    from eaglelab import text

    return Result(*text.inspect(path, target, launch, engine, statistics))


@command(
    "eaglelab replay --capture runs/1/capture --drafter DRAFTER",
    'eaglelab replay --capture runs/1/capture --drafter DRAFTER --launch "--speculative-algorithm EAGLE3"',
)
def replay(
    capture: CaptureDir,
    drafter: Drafter,
    target: Target = "",
    launch: LaunchFlags = "",
    as_json: Json = False,
) -> Result:
    """Draft every captured round again; with --launch, predict what the same texts would do under other
    flags."""
    from eaglelab import text

    return Result(*text.replay(Path(capture), drafter, target, launch))


@command(
    "eaglelab diagnose --server http://127.0.0.1:30000 --drafter DRAFTER",
    "eaglelab diagnose --capture runs/1/capture --drafter DRAFTER --json",
)
def diagnose(
    drafter: Drafter,
    server: Url = "",
    capture: CaptureDir = "",
    target: Target = "",
    features: Features = "",
    prompts: Prompts = "",
    launch: LaunchFlags = "",
    max_requests: MaxRequests = 0,
    max_new_tokens: NewTokens = 128,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> Result:
    """Gather the evidence, run every check and the ladder, and give the verdict with its findings."""
    from eaglelab import report as module
    from eaglelab import text

    options = {k: v for k, v in locals().items() if isinstance(v, (str, int))}
    params = module.from_options(options, ())
    with tempfile.TemporaryDirectory(prefix="eaglelab-") as folder:
        found = module.gather(params, Path(folder), _key(api_key_file), _bar())
        return Result(*text.diagnosis(found), HEALTHY if found.verdict == "healthy" else NOT_HEALTHY)


@command("eaglelab convert data/drafter-speculators /tmp/served --to sglang --target data/target")
def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="The drafter's folder.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="A new folder.")],
    to: _text("NAME", "The form to write: sglang or speculators."),  # type: ignore[valid-type]
    target: Target = "",
    as_json: Json = False,
) -> Result:
    """Write a drafter in the other form: names, layer ids and config; whole, or not at all."""
    from eaglelab import convert as module
    from eaglelab import text

    return Result(*text.conversion(dst, module.convert(src, dst, to, target or None)))


@command(
    "eaglelab report --server http://127.0.0.1:30000 --drafter DRAFTER --features FEATURES --out runs/2",
    "eaglelab report --server http://127.0.0.1:30000 --drafter DRAFTER --baseline runs/1",
    "eaglelab report --drafter DRAFTER -p capture=runs/1/capture -p max_new_tokens=64",
)
def report(
    drafter: Drafter,
    server: Url = "",
    target: Target = "",
    features: Features = "",
    prompts: Prompts = "",
    baseline: Baseline = "",
    out: Out = "",
    assign: Assign = None,
    timeout: Timeout = 3600,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> Result:
    """Run the report's notebook headless: records, an HTML page, an exit code, a comparison with an earlier
    run."""
    options = {"server": server, "drafter": drafter, "target": target, "features": features}
    options |= {"prompts": prompts, "baseline": baseline, "out": out}
    return _report(options, assign or (), timeout, _key(api_key_file))


def _report(options: dict[str, Any], assign: Iterable[str], timeout: float, key: str | None) -> Result:
    from eaglelab import report as module
    from eaglelab import text

    params = module.from_options({k: v for k, v in options.items() if v not in ("", 0)}, assign)
    outcome = module.run(params, timeout=timeout, api_key=key, progress=_bar())
    if not outcome.complete:
        _say(f"eaglelab: {outcome.message}\nwhat there is lies in {outcome.folder}")
    return Result(*text.outcome(outcome), outcome.exit_code)


def _sglang_flags(flags: list[str] | None) -> list[str]:
    """What stands after `--`. A word before it is a slip, not a flag."""
    if flags and not flags[0].startswith("-"):
        raise BadInput(f"unexpected argument {flags[0]!r}; SGLang's own flags come after --")
    return flags or []


def _key(file: Path | None) -> str | None:
    """The server's API key, from a file or the environment; never an argument, which others could read."""
    if file is None:
        return os.environ.get("EAGLELAB_API_KEY") or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--api-key-file {file}: cannot be read: {error}") from error
    if not key or len(key.splitlines()) != 1:
        raise BadInput(f"--api-key-file {file}: the key must be its only line")
    return key


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _bar() -> Callable[[str, int, int], None]:
    from eaglelab.progress import bar

    return bar()


def main() -> None:
    """Entry point. SIGTERM unwinds like Ctrl-C, so that servers and kernels are stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()


if __name__ == "__main__":
    main()
