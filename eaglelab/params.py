"""The parameters of a report, one model for the command line, the notebook and the tests.

They are validated before a kernel starts. papermill writes parameters in clear into the executed notebook,
so none of them is a secret: the API key comes by the environment variable EAGLELAB_API_KEY or by a file.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from eaglelab.errors import BadInput
from eaglelab.launch import SECRET

MODELS = ("drafter", "served_drafter", "target")
FOLDERS_AND_FILES = (*MODELS, "features", "prompts", "capture", "baseline")


class ReportParams(BaseModel):
    """What one report measures. An empty text means "not given"; paths become absolute.

    >>> ReportParams.checked({"server": "http://h:1", "tragte": "x"})
    Traceback (most recent call last):
    eaglelab.errors.BadInput: parameter 'tragte': there is none of that name (did you mean 'target'?)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    server: str = Field("", description="address of the SGLang server, http://HOST:PORT")
    drafter: str = Field(
        "", description="folder of the drafter, as its trainer saved it or as SGLang loads it"
    )
    served_drafter: str = Field(
        "",
        description="folder that the server loads; empty: the launch's own, else the drafter, converted",
    )
    target: str = Field(
        "", description="the target's folder or config.json; empty: the probe hands over what is needed"
    )
    features: str = Field("", description="what the trainer stored; empty: rungs 1 and 2 are skipped")
    prompts: str = Field(
        "", description="JSON lines of messages, prompt or input_ids; empty: the prompts of data/"
    )
    capture: str = Field("", description="an earlier capture to read, instead of a server")
    launch: str = Field(
        "", description="SGLang flags to believe instead of what the server says of its launch"
    )
    dialect: str = Field("", description="the tool that wrote the drafter, where its files cannot tell")
    baseline: str = Field("", description="folder of an earlier report to compare with")
    out: str = Field("", description="folder for this run's files; empty: runs/ and the time")
    max_new_tokens: int = Field(128, ge=1, description="tokens to generate for each prompt")
    max_requests: int = Field(0, ge=0, description="how many prompts to send; 0: all of them")
    allow_pickle: bool = Field(False, description="read features pickled by torch.save, tensors only")
    all_ranks: bool = Field(False, description="record every tensor-parallel rank, to see that they agree")

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> ReportParams:
        """Validated parameters. Raises BadInput naming the parameter, in words."""
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                raise BadInput(f"parameter {name!r}: there is none of that name{_hint(name)}") from None
            message = first["msg"].removeprefix("Value error, ")
            raise BadInput(f"parameter {name!r}: {message}" if name else message) from None

    @classmethod
    def of_cell(cls, namespace: Mapping[str, Any]) -> ReportParams:
        """The parameters that a notebook's cells have set: `ReportParams.of_cell(globals())`."""
        return cls.checked({name: namespace[name] for name in cls.model_fields})

    @field_validator("server")
    @classmethod
    def _server(cls, url: str) -> str:
        from eaglelab.server import address

        return address(url) if url else url

    @field_validator(*FOLDERS_AND_FILES)
    @classmethod
    def _path(cls, text: str, info: ValidationInfo) -> str:
        if not text:
            return text
        path = Path(text).expanduser().absolute()
        if not path.exists():
            like_one = info.field_name in MODELS and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text)
            hub = " (a name on a hub? Download it, and give the folder)" if like_one else ""
            raise ValueError(f"{path} does not exist{hub}")
        return str(path)

    @field_validator("out")
    @classmethod
    def _out(cls, text: str) -> str:
        return str(Path(text).expanduser().absolute()) if text else text

    @field_validator("launch")
    @classmethod
    def _launch(cls, text: str) -> str:
        """Flags without the values of --api-key and the like."""
        kept: list[str] = []
        hidden = False
        for word in shlex.split(text.replace("\\\n", " ")):
            hidden = bool(SECRET.search(word.replace("_", "-"))) if word.startswith("-") else hidden
            if not hidden:
                kept.append(word)
        return shlex.join(kept) if len(kept) < len(shlex.split(text.replace("\\\n", " "))) else text

    @model_validator(mode="after")
    def _enough(self) -> ReportParams:
        if bool(self.server) == bool(self.capture):
            raise ValueError("give one of --server (to capture it) and --capture (recorded earlier)")
        if not self.drafter:
            raise ValueError("give --drafter, the folder of the drafter's checkpoint")
        return self

    def given(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, in their order."""
        return {name: value for name, value in self if value != type(self).model_fields[name].default}

    def command(self) -> str:
        """The command that makes this report again (with a new --out).

        `eaglelab demo` says its own by EAGLELAB_COMMAND: its server is gone when the report is read.
        """
        if again := os.environ.get("EAGLELAB_COMMAND"):
            return again
        options = (
            "server",
            "drafter",
            "served_drafter",
            "target",
            "features",
            "prompts",
            "baseline",
            "dialect",
            "max_requests",
            "max_new_tokens",
        )
        words = ["eaglelab", "report"]
        for name, value in self.given().items():
            if name != "out":
                option = "--" + name.replace("_", "-")
                words += [option, str(value)] if name in options else ["-p", f"{name}={value}"]
        return shlex.join(words)


def from_options(options: Mapping[str, Any], assignments: Iterable[str]) -> ReportParams:
    """Parameters from the command line's options (None: not given) and its `-p NAME=VALUE`."""
    given = {name: value for name, value in options.items() if value is not None}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"-p {text}: write it as -p NAME=VALUE")
        if name in given:
            raise BadInput(f"-p {name}=...: given twice")
        given[name] = value
    return ReportParams.checked(given)


def _hint(name: str) -> str:
    import difflib

    if SECRET.search(name.replace("_", "-")):
        return "; a key is never a parameter: set EAGLELAB_API_KEY or use --api-key-file"
    close = difflib.get_close_matches(name, ReportParams.model_fields, n=1)
    return (
        f" (did you mean {close[0]!r}?)" if close else f"; there are {', '.join(ReportParams.model_fields)}"
    )
