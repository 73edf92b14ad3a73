"""The commands. Each imports what it needs when it runs, so that `eaglelab --help` is quick."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from eaglelab import __version__
from eaglelab import options as o
from eaglelab.console import Result, app, bar, command, complain, key, say
from eaglelab.errors import HEALTHY, NOT_HEALTHY, AttachError, BadInput
from eaglelab.flags import SECRET


@app.callback(invoke_without_command=True)
def _top(version: o.Version = False) -> None:
    if version:
        typer.echo(f"eaglelab {__version__}")
        raise typer.Exit()


@command(
    "eaglelab demo",
    "eaglelab demo --algorithm EAGLE",
    "eaglelab demo --topk 4 --tp 8 -- --disable-radix-cache",
)
def demo(
    algorithm: o.Algorithm = "EAGLE3",
    topk: o.Topk = 1,
    tp: o.Tp = 1,
    flags: o.Flags = None,
    out: o.Out = "",
    baseline: o.Baseline = "",
    max_requests: o.MaxRequests = 0,
    timeout: o.Timeout = 1800,
    as_json: o.Json = False,
) -> Result:
    """Start genuine SGLang on this CPU with the tiny models of data/, then report on it as on any server."""
    from eaglelab import serve as module

    data = module.data_dir()
    paths = {"drafter": data / "drafter-sglang", "target": data / "target", "features": data / "features"}
    options: dict[str, Any] = {name: str(path) for name, path in paths.items() if path.exists()}
    options |= {"max_requests": max_requests, "baseline": baseline, "out": out}
    _refuse_early(out, baseline)
    # The server keeps a core or more of this machine busy: two threads of the report, waiting for one another
    # on what is left, take ten times as long, and the tiny models gain nothing by a second one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    again = ["eaglelab", "demo", "--algorithm", algorithm, "--topk", str(topk), "--tp", str(tp)]
    if flags and not any(SECRET.search(flag) for flag in flags):
        again += ["--", *flags]
    with (
        _made_again_by(again),
        module.start_server(
            _algorithm(algorithm), topk, tp=tp, extra_flags=_sglang_flags(flags), progress=say
        ) as server,
    ):
        return _report({**options, "server": server.url}, (), timeout, None)


@command(
    "eaglelab serve",
    "eaglelab serve --algorithm EAGLE --port 30000",
    "eaglelab serve --tp 2 -- --log-requests",
)
def serve(
    algorithm: o.Algorithm = "EAGLE3", topk: o.Topk = 1, tp: o.Tp = 1, port: o.Port = 0, flags: o.Flags = None
) -> None:
    """Start the same server, print its address and leave it running until Ctrl-C."""
    from eaglelab import serve as module

    extra = _sglang_flags(flags)
    with module.start_server(
        _algorithm(algorithm), topk, tp=tp, port=port or None, extra_flags=extra, progress=say
    ) as up:
        typer.echo(up.url)
        say(f"log: {up.log}; stop it with Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            os.waitid(os.P_PID, up.pid, os.WEXITED | os.WNOWAIT)
            raise AttachError(f"the server ended by itself.{module.tail(up.log)}")
    say("stopped")


@command("eaglelab capture --server http://127.0.0.1:30000 --prompts my.jsonl --out runs/capture")
def capture(
    server: o.Url,
    out: o.NewFolder,
    prompts: o.Prompts = "",
    all_ranks: o.AllRanks = False,
    all_traffic: o.AllTraffic = False,
    max_requests: o.MaxRequests = 0,
    max_new_tokens: o.NewTokens = 128,
    reprefill: o.Reprefill = True,
    api_key_file: o.KeyFile = None,
    as_json: o.Json = False,
) -> Result:
    """Record what a live server feeds its drafter, for our own prompts only."""
    from eaglelab import text
    from eaglelab.collect import capture_server
    from eaglelab.prompts import load_prompts
    from eaglelab.serve import data_dir
    from eaglelab.server import Server

    some = load_prompts(prompts or data_dir() / "prompts.jsonl", max_requests or None)
    if all_traffic:
        say("--all-traffic: while this runs, other users' prompts and hidden states are recorded too")
    how: dict[str, Any] = {"all_ranks": all_ranks, "all_traffic": all_traffic, "reprefill": reprefill}
    how |= {"target": True, "progress": bar()}
    with Server(server, key(api_key_file)) as client:
        got = capture_server(client, some, out, max_new_tokens, **how)
    return Result(*text.capture(got))


@command("eaglelab disarm --server http://127.0.0.1:30000")
def disarm(server: o.Url, api_key_file: o.KeyFile = None, as_json: o.Json = False) -> Result:
    """Disarm a server's probe, whoever armed it, and drop what it was recording; again does no harm."""
    from eaglelab.server import Server

    with Server(server, key(api_key_file)) as client:
        was = client.probe_status().get("armed")
        client.disarm()
        if was:
            client.discard(was)
    words = f"disarmed; recording {was} is dropped" if was else "it was not armed"
    return Result({"server": client.url, "was_armed": was}, f"{client.url}: {words}")


@command(
    "eaglelab inspect data/drafter-sglang --target data/target",
    'eaglelab inspect DRAFTER --target config.json --launch "--speculative-algorithm EAGLE"',
    "eaglelab inspect runs/1/capture",
    "eaglelab inspect FEATURES --statistics --json",
)
def inspect(
    path: o.Path_,
    target: o.Target = "",
    launch: o.LaunchFlags = "",
    engine: o.Engine = "sglang==0.5.23",
    dialect: o.Dialect = "",
    statistics: o.Statistics = False,
    allow_pickle: o.AllowPickle = False,
    as_json: o.Json = False,
) -> Result:
    """Say what is in a checkpoint, a capture or stored features, and what an engine does with a drafter."""
    from eaglelab import text

    return Result(*text.inspect(path, target, launch, engine, dialect, statistics, allow_pickle))


@command(
    "eaglelab replay --capture runs/1/capture --drafter DRAFTER",
    'eaglelab replay --capture runs/1/capture --drafter DRAFTER --launch "--speculative-algorithm EAGLE3"',
)
def replay(
    capture: o.CaptureDir,
    drafter: o.Drafter,
    target: o.Target = "",
    launch: o.LaunchFlags = "",
    dialect: o.Dialect = "",
    as_json: o.Json = False,
) -> Result:
    """Draft every captured round again; with --launch, predict the same texts under other flags."""
    from eaglelab import text

    return Result(*text.replay(Path(capture), drafter, target, launch, dialect))


@command(
    "eaglelab diagnose --server http://127.0.0.1:30000 --drafter DRAFTER",
    "eaglelab diagnose --capture runs/1/capture --drafter DRAFTER --json",
    'eaglelab diagnose --drafter DRAFTER --target config.json --launch "--speculative-algorithm EAGLE"',
)
def diagnose(
    drafter: o.Drafter,
    server: o.Url = "",
    served_drafter: o.ServedDrafter = "",
    capture: o.CaptureDir = "",
    target: o.Target = "",
    features: o.Features = "",
    prompts: o.Prompts = "",
    launch: o.LaunchFlags = "",
    engine: o.Engine = "",
    dialect: o.Dialect = "",
    allow_pickle: o.AllowPickle = False,
    all_ranks: o.AllRanks = False,
    max_requests: o.MaxRequests = 0,
    max_new_tokens: o.NewTokens = 128,
    api_key_file: o.KeyFile = None,
    as_json: o.Json = False,
) -> Result:
    """Gather the evidence, run every check and the ladder, and give the verdict with its findings."""
    from eaglelab import report as module
    from eaglelab import text
    from eaglelab.workbook import BookParams

    options: dict[str, Any] = {
        "drafter": drafter,
        "served_drafter": served_drafter,
        "server": server,
        "capture": capture,
        "target": target,
        "launch": launch,
        "engine": engine,
        "dialect": dialect,
        "all_ranks": all_ranks,
    }
    options |= {"features": features, "allow_pickle": allow_pickle, "prompts": prompts}
    options |= {"max_requests": max_requests, "max_new_tokens": max_new_tokens}
    params = BookParams.checked(options)
    with tempfile.TemporaryDirectory(prefix="eaglelab-") as folder:
        found = module.gather(params, Path(folder), key(api_key_file), bar())
        return Result(*text.diagnosis(found), HEALTHY if found.verdict == "healthy" else NOT_HEALTHY)


@command("eaglelab convert data/drafter-speculators /tmp/served --to sglang --target data/target")
def convert(
    src: o.Source,
    dst: o.Destination,
    to: o.Form,
    target: o.Target = "",
    dialect: o.Dialect = "",
    as_json: o.Json = False,
) -> Result:
    """Write a drafter in the other form: names, layer ids and config; whole, or not at all."""
    from eaglelab import convert as module
    from eaglelab import text

    return Result(
        *text.conversion(dst, module.convert(src, dst, to, target or None, dialect=dialect or None))
    )


@command(
    "eaglelab faults",
    "eaglelab faults eagle-flag-on-eagle3-drafter",
)
def faults(slug: o.Slug = "", as_json: o.Json = False) -> Result:
    """List what goes wrong between trainer and server, and what finds it; or explain one fault."""
    from eaglelab import manual

    return Result(*manual.faults(slug))


@command(
    'eaglelab explain "accept len: 1.05, accept rate: 0.21" --steps 5',
    'eaglelab explain "accept rate: 0.20" --draft-tokens 5',
    'eaglelab explain "$(tail -1 server.log)" --steps 3 --topk 4 --draft-tokens 16 --json',
)
def explain(
    text: o.Pasted,
    steps: o.Steps = 0,
    draft_tokens: o.DraftTokens = 0,
    topk: o.DraftTopk = 1,
    as_json: o.Json = False,
) -> Result:
    """Say in plain words what a pasted log line, metric or response tells of acceptance (SGLang, vLLM)."""
    from eaglelab import manual

    return Result(*manual.explained(text, steps or None, draft_tokens or None, topk))


@command(
    "eaglelab report --server http://127.0.0.1:30000 --drafter DRAFTER --features FEATURES --out runs/2",
    "eaglelab report --server http://127.0.0.1:30000 --drafter DRAFTER --baseline runs/1",
    "eaglelab report --drafter DRAFTER --capture runs/1/capture",
)
def report(
    drafter: o.Drafter,
    server: o.Url = "",
    served_drafter: o.ServedDrafter = "",
    capture: o.CaptureDir = "",
    target: o.Target = "",
    features: o.Features = "",
    prompts: o.Prompts = "",
    baseline: o.Baseline = "",
    dialect: o.Dialect = "",
    allow_pickle: o.AllowPickle = False,
    all_ranks: o.AllRanks = False,
    max_requests: o.MaxRequests = 0,
    max_new_tokens: o.NewTokens = 128,
    out: o.Out = "",
    assign: o.Assign = None,
    timeout: o.Timeout = 3600,
    wait: o.Wait = 0,
    api_key_file: o.KeyFile = None,
    as_json: o.Json = False,
) -> Result:
    """Run the report's notebook headless: records, a page, an exit code, a comparison with a baseline."""
    options: dict[str, Any] = {"server": server, "drafter": drafter, "target": target, "features": features}
    options |= {
        "served_drafter": served_drafter,
        "capture": capture,
        "prompts": prompts,
        "baseline": baseline,
        "dialect": dialect,
        "allow_pickle": allow_pickle,
        "all_ranks": all_ranks,
        "max_requests": max_requests,
        "max_new_tokens": max_new_tokens,
        "out": out,
    }
    return _report(options, assign or (), timeout, key(api_key_file), wait)


@command(
    "eaglelab export runs/2 --to junit --out junit.xml",
    'eaglelab export runs/2 --to markdown >> "$GITHUB_STEP_SUMMARY"',
    "eaglelab export runs/2 --to github",
)
def export(run: o.RunFolder, to: o.ExportForm, out: o.File = None, exit_code: o.ExitCode = False) -> Result:
    """Print a finished report as a scheduler wants it: JUnit XML, Markdown, GitHub annotations."""
    from eaglelab import export as module
    from eaglelab import page

    text, verdict = module.export(run, to)
    if out:
        page.write(out, text)
    healthy = verdict == "healthy" or not exit_code
    return Result({}, "" if out else text.rstrip("\n"), HEALTHY if healthy else NOT_HEALTHY)


@command("eaglelab history runs --out history.html", "eaglelab history runs --json")
def history(runs: o.RunsFolder, out: o.PageFile = Path("history.html"), as_json: o.Json = False) -> Result:
    """Draw many reports as one page: accept length over time, per set of prompts, versions marked."""
    from eaglelab import history as module
    from eaglelab import page

    found = module.read(runs)
    page.write(out, module.page(found, runs))
    text = f"runs: {len(found.runs)}; folders left out: {len(found.left_out)}\n{out}"
    return Result({"page": str(out), "runs": module.rows(found), "left_out": found.left_out}, text)


@contextlib.contextmanager
def _made_again_by(words: list[str]) -> Iterator[None]:
    """What a report names as the command that makes it again; see `params.ReportParams.command`."""
    os.environ["EAGLELAB_COMMAND"] = shlex.join(words)
    try:
        yield
    finally:
        del os.environ["EAGLELAB_COMMAND"]


def _refuse_early(out: str, baseline: str) -> None:
    """What can be refused is refused before a server is started for it."""
    from eaglelab import baseline as earlier
    from eaglelab import runs

    if out:
        runs.check_out(Path(out))
    if baseline:
        earlier.load(Path(baseline))


def _report(
    options: dict[str, Any], assign: Iterable[str], timeout: float, secret: str | None, wait: float = 0
) -> Result:
    from eaglelab import report as module
    from eaglelab import text
    from eaglelab.params import ReportParams, from_options

    fields = ReportParams.model_fields
    params = from_options({k: v for k, v in options.items() if v != fields[k].default}, assign)
    outcome = module.run(params, timeout=timeout, wait=wait, api_key=secret, progress=bar())
    if not outcome.complete:
        complain(f"{outcome.message}\nwhat there is lies in {outcome.folder}", outcome.exit_code)
    return Result(*text.outcome(outcome), outcome.exit_code)


def _algorithm(name: str) -> str:
    if name.upper() not in ("EAGLE3", "EAGLE", "NEXTN"):
        raise BadInput(f"--algorithm {name}: EAGLE3 or EAGLE (NEXTN is another name of EAGLE)")
    return name.upper()


def _sglang_flags(flags: list[str] | None) -> list[str]:
    """What stands after `--`. A word before it is a slip, not a flag."""
    if flags and not flags[0].startswith("-"):
        raise BadInput(f"unexpected argument {flags[0]!r}; SGLang's own flags come after --")
    return flags or []


def main() -> None:
    """Entry point. SIGTERM and a lost terminal unwind like Ctrl-C: servers and kernels are stopped."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not so under nohup
            signal.signal(number, signal.default_int_handler)
    app()


if __name__ == "__main__":
    main()
