"""The console: how every command prints, fails and exits.

Results go to stdout, progress and messages to stderr; `--json` prints one JSON object on stdout and nothing
else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from eaglelab.errors import HEALTHY, INTERRUPTED, BadInput, EaglelabError, page
from eaglelab.progress import Progress

app = typer.Typer(
    name="eaglelab",
    help="Find out where between the trainer and the server an EAGLE-3 drafter lost its acceptance.",
    epilog="Exit codes: 0 healthy; 1 broken or inconclusive; 2 usage or bad input; 3 could not reach, attach "
    "or capture; 4 kernel died; 5 timed out; 6 no summary record; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class Command(TyperCommand):
    """A command whose examples are shown as they are typed, and which is listed with its whole sentence."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return self.help or ""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        for line in (self.epilog or "").split("\n\n"):
            formatter.write(f"  {line}\n")


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
                result = failure(error)
            if result and (as_json or result.text):
                typer.echo(json.dumps(result.data, default=str) if as_json else result.text)
            if result:
                raise typer.Exit(result.code)

        return app.command(cls=Command, epilog="\n\n".join(["Examples:", *examples]))(run)

    return register


def failure(error: BaseException) -> Result:
    """The message goes to stderr; under --json it is the object on stdout too."""
    stopped = isinstance(error, KeyboardInterrupt)
    code = INTERRUPTED if stopped else getattr(error, "exit_code", BadInput.exit_code)
    message = str(error) or "interrupted"
    complain(message, code)
    return Result({"error": message, "exit_code": code}, "", code)


def complain(message: str, code: int) -> None:
    """An error on stderr, and the page that explains its kind."""
    say(f"eaglelab: {message}" + (f"\nsee {page(code)}" if page(code) else ""))


def key(file: Path | None) -> str | None:
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


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def bar() -> Progress:
    from eaglelab import progress

    return progress.bar()
