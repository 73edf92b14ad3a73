"""The options that the commands share, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer


def _value(metavar: str, words: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=words, **more)


def _switch(words: str, *names: str) -> Any:
    return typer.Option(*names, help=words)


# typer reads these annotations at run time, also where `list[str] | None` is not to its liking
Texts = Optional[list[str]]  # noqa: UP045
OptionalPath = Optional[Path]  # noqa: UP045

Algorithm = Annotated[str, _value("NAME", "--speculative-algorithm of the launch: EAGLE3 or EAGLE.")]
Topk = Annotated[int, _value("N", "1: a chain of 5 drafts; more: a tree of 16 draft tokens.", min=1)]
Tp = Annotated[int, _value("N", "Tensor-parallel ranks.", "--tp", min=1)]
Port = Annotated[int, _value("P", "Port on 127.0.0.1; 0: a free one.", min=0)]
Flags = Annotated[Texts, typer.Argument(metavar="[-- SGLANG FLAGS]", help="Passed on to SGLang.")]
Url = Annotated[str, _value("URL", "Address of the server, http://HOST:PORT.")]
Drafter = Annotated[str, _value("PATH", "Folder of the drafter's checkpoint.")]
ServedDrafter = Annotated[
    str, _value("PATH", "Folder that the server loads (default: the launch's own, else --drafter converted).")
]
Target = Annotated[str, _value("PATH", "The target's folder, or its config.json.")]
Features = Annotated[str, _value("PATH", "What the trainer stored; adds rungs 1 and 2.")]
Prompts = Annotated[str, _value("FILE", "JSON lines of messages, prompt or input_ids (default: data/'s).")]
LaunchFlags = Annotated[str, _value('"SGLANG FLAGS"', "Flags of a launch.")]
Engine = Annotated[
    str,
    _value("NAME==VERSION", "The engine to think of (default: what the server says, else sglang==0.5.23)."),
]
CaptureDir = Annotated[str, _value("DIR", "A capture recorded earlier.")]
NewFolder = Annotated[str, _value("DIR", "A new folder.")]
Out = Annotated[str, _value("DIR", "Folder for this run (default: runs/ and the time).")]
Baseline = Annotated[str, _value("DIR", "An earlier report to compare with.")]
MaxRequests = Annotated[int, _value("N", "Send only the first N prompts; 0: all of them.", min=0)]
NewTokens = Annotated[int, _value("N", "Tokens to generate for each prompt.", min=1)]
Timeout = Annotated[float, _value("S", "Seconds until the whole run is stopped.", min=1)]
KeyFile = Annotated[OptionalPath, _value("FILE", "Holds the server's API key (default: EAGLELAB_API_KEY).")]
Assign = Annotated[Texts, _value("NAME=VALUE", "Any parameter of the report's notebook.", "-p")]
Dialect = Annotated[str, _value("NAME", "The tool that wrote the drafter, where its files cannot tell.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished report.")]
RunsFolder = Annotated[Path, typer.Argument(metavar="RUNS", help="Folder that holds reports.")]
ExportForm = Annotated[str, _value("NAME", "junit, markdown or github (annotations).", "--to")]
ExitCode = Annotated[bool, _switch("End with 1 unless the run was healthy.", "--exit-code")]
File = Annotated[OptionalPath, _value("FILE", "Write here (default: stdout).", "--out")]
PageFile = Annotated[Path, _value("FILE", "The page to write.", "--out")]
Wait = Annotated[float, _value("S", "Seconds to wait while another report works on this server.", min=0)]
Form = Annotated[str, _value("NAME", "The form to write: sglang, speculators or vllm.")]
AllowPickle = Annotated[bool, _switch("Read features pickled by torch.save, tensors only.", "--allow-pickle")]
AllRanks = Annotated[bool, _switch("Record every tensor-parallel rank.", "--all-ranks")]
AllTraffic = Annotated[
    bool, _switch("Record other users' requests too: their tokens leave the server.", "--all-traffic")
]
Reprefill = Annotated[bool, _switch("Send each text again as one prefill, to name depths.")]
Statistics = Annotated[bool, _switch("Read tensors and rows through.", "--statistics")]
Json = Annotated[bool, _switch("Print one JSON object on stdout and nothing else.", "--json")]
Version = Annotated[bool, _switch("Print the version.", "--version")]
Path_ = Annotated[Path, typer.Argument(metavar="PATH", help="A drafter, a capture or stored features.")]
Source = Annotated[Path, typer.Argument(metavar="SRC", help="The drafter's folder.")]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="A new folder.")]
Slug = Annotated[str, typer.Argument(metavar="SLUG", help="Explain this one.")]
Pasted = Annotated[str, typer.Argument(metavar="TEXT", help="A line of a log, metrics, or a response.")]
Steps = Annotated[int, _value("S", "--speculative-num-steps; vLLM's num_speculative_tokens.", min=0)]
DraftTokens = Annotated[int, _value("N", "--speculative-num-draft-tokens (a chain's: S + 1).", min=0)]
DraftTopk = Annotated[
    int, _value("K", "--speculative-eagle-topk of the server; 1: a chain.", "--topk", min=1)
]
