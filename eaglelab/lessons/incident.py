"""Lesson 3: a drafter that stopped accepting. A genuine server, its evidence, and checks of each hypothesis.

Where no environment with SGLang exists, the same evidence comes from a capture of such a server, which lies
beside the notebook (notebooks/lessons/incident: one request, 23 rounds).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import tempfile
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from eaglelab import charts, tables
from eaglelab.capture import Capture, open_capture
from eaglelab.checkpoint import Checkpoint, TargetModel, open_checkpoint
from eaglelab.errors import BadInput
from eaglelab.html import Html, code, panel
from eaglelab.launch import Launch
from eaglelab.lessons import material
from eaglelab.lessons.checking import given, needs
from eaglelab.serve import CHECKOUT, RunningServer, data_dir, server_python, start_server

RECORDED = CHECKOUT / "notebooks" / "lessons" / "incident"
PROMPTS, NEW = 3, 48  # prompts sent to a live server, new tokens each
_STARTED: list[Case] = []


@dataclass
class Case:
    """The evidence of one server. `server` is None where a recorded one stands in; `why` says why."""

    original: Checkpoint  # as the trainer saved it
    served: Checkpoint  # as SGLang loads it
    target: TargetModel
    server: RunningServer | None = None
    why: str = ""
    running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def close(self) -> Html:
        """Stop the server."""
        self.running.close()
        self.server = None
        return panel("The server is stopped." if not self.why else "Nothing to stop.")

    @cached_property
    def capture(self) -> Capture:
        """What was recorded of the server: the first access records it."""
        return _record(self.server, self.files) if self.server else open_capture(RECORDED)

    @property
    def launch(self) -> Launch:
        return self.capture.launch.with_target(self.target.facts)

    @property
    def counters(self) -> list[dict[str, int]]:
        """Per request, what SGLang counted: spec_num_correct_drafts, spec_verify_ct and others."""
        return [sent["counters"] for sent in self.capture.sent.values()]

    def scene(self) -> Html:
        """What the operator knows on the first morning."""
        command = (
            self.server.launch_command if self.server else f"sglang.launch_server {self.launch.command()}"
        )
        shown = command[command.find("sglang.launch_server") :].replace(str(data_dir()), "data")
        where = f"running at {self.server.url}" if self.server else f"recorded earlier ({self.why})"
        return Html(panel(f"A genuine SGLang 0.5.23, {where}. Its launch: ", code(shown)))

    def answers(self) -> Html:
        """What was asked, what came back, and what the server counted."""
        rows = []
        for sent in self.capture.sent.values():
            c = sent["counters"]
            told = f"{c['spec_num_correct_drafts']} correct drafts, {c['spec_verify_ct']} verifies"
            prompt = material.spelled(sent["input_ids"][-10:])
            rows.append(("…" + prompt, material.spelled(sent["output_ids"][:14]) + "…", told))
        return material.shown(("end of the prompt", "the answer begins", "the server's counters"), rows)

    def stored_features(self) -> Html:
        """The drafter on what its trainer stored, wired as it was trained; no server takes part."""
        first, second = self.stored["1"], self.stored["2"]
        rows = [
            ("given every true feature and token", first.accept_length),
            ("fed its own drafts, as a server would", second.accept_length),
        ]
        words = (
            f"Four stored texts, a round from each of {len(second.rounds.lengths)} positions. The "
            f"validation's {promised():.2f} is of other texts"
        )
        return material.shown(("on the trainer's own features", "accept length"), rows, words)

    @cached_property
    def stored(self) -> dict[str, Any]:
        """Rungs 1 and 2 of the ladder, on data/features."""
        from eaglelab.features import StoredFeatures
        from eaglelab.ladder import climb

        stored = StoredFeatures.open(data_dir() / "features")
        right = self.launch.with_flags("--speculative-algorithm EAGLE3")
        return climb(self.original, self.target, None, stored, right, "cpu", self.served).rungs

    @property
    def file_names(self) -> list[str]:
        """Tensor names in the drafter's file, as SGLang is given it."""
        return sorted(self.served.file_names)

    @cached_property
    def engine_takes(self) -> dict[str, list[str]]:
        """Each parameter that SGLang's class wants from the file, with the tensors that it is filled from."""
        from eaglelab.loader import loading

        found = loading(self.served, self.launch.with_flags("--speculative-algorithm EAGLE3"))
        takes = {
            name: [self.served.tensors[t].name_in_file for t in source.tensors]
            for name, source in found.params.items()
            if source.kind == "own"
        }
        return takes | {"hot_token_id (the vocabulary map)": ["d2t", "t2d"]}

    def live(self) -> Html:
        """Every parameter inside the running server, by checksum, against the numbers in files."""
        from eaglelab import live

        rank, seen = next(iter(self.capture.parameters.items()))
        rows = []
        for m in live.compare(seen, self.served, self.target, self.launch, 0):
            whose = "the TARGET's file" if m.kind == "target" else "the drafter's file"
            parts = ", ".join(name.removesuffix(".weight").rpartition(".")[2] for name in m.sources)
            rows.append((m.param, "equal" if m.equal else "differs", f"{whose}: {parts}"))
        return material.shown(("parameter in the server", "checksum", "against"), rows, f"rank {rank}")

    def tensors(self, side: str) -> dict[str, Any]:
        """Canonical name -> tensor, "trainer" or "served", of those that training has changed."""
        given_names = {"trainer": self.original, "served": self.served}[side]
        names = [n for n in given_names.tensors if n not in ("embed_tokens.weight", "t2d")]
        return {name: given_names.load(name) for name in sorted(names)}

    def events(self) -> list[tuple[str, tuple[int, ...]]]:
        """(where, shape of the hidden states handed over there), event by event."""
        from eaglelab.capture import SITES

        return [(e.kind, tuple(e.shape(SITES[e.kind]))) for e in self.capture.events() if e.kind in SITES]

    def agreement(self, **wiring: str) -> tuple[int, int]:
        """Replay under the trained wiring with these fields changed -> (equal draft tokens, all)."""
        from eaglelab.drafter import Drafter
        from eaglelab.replay import replay
        from eaglelab.trained import trained

        base = replace(trained(self.served, self.target.facts)[1], dtype=self.launch.dtype or "float32")
        wired: Any = replace(base, **wiring)  # type: ignore[arg-type]
        found = replay(self.capture, Drafter(self.served, wired, self.target))
        return found.equal, found.tokens

    def fingerprint(self) -> Any:
        """What the rows are, by comparing them with the target's streams."""
        from eaglelab.depths import name_capture

        figure = charts.depth_errors(name_capture(self.capture, layers=8).chunks)
        return material.picture(figure, "how far the rows lie from each depth of the target")

    def predict(self, flags: str) -> Html:
        """The accept length after an edit, simulated on this server's own texts."""
        from eaglelab.counterfactual import counterfactual

        with needs(9):
            given(flags, "fix")
        found = counterfactual(self.capture, self.served, self.target, flags, launch=self.launch)
        if found.rounds is None:
            raise BadInput(found.reason or "cannot be predicted")
        now = 1 + drafts_per_verify(self.counters)
        rows = [("as it was served", f"{now:.2f}"), (f"predicted: {flags}", f"{found.accept_length:.2f}")]
        words = f"Predicted from the broken server alone, {len(found.rounds.lengths)} rounds"
        return material.shown(("launch", "accept length"), rows, words)

    def restart(self, flags: str) -> Html:
        """Start the server anew with these flags, ask the same, and count. Without an environment: say so."""
        if self.server is None:
            return panel(f"No server here ({self.why or 'it is stopped'}), so it stays a prediction.")
        self.running.close()
        self.server = self.running.enter_context(start_server(self.launch.with_flags(flags).algorithm))
        counted = [sent["counters"] for sent in _record(self.server, self.files).sent.values()]
        lengths = (1 + drafts_per_verify(c) for c in (self.counters, counted))
        rows = [(name, f"{x:.2f}") for name, x in zip(("before", flags), lengths, strict=True)]
        return material.shown(("launch", "accept length, counted by the server"), rows)

    def diagnosis(self) -> Html:
        """The same in one call, as `eaglelab diagnose` does it."""
        from eaglelab import diagnose

        data = data_dir()
        found = diagnose.run(
            drafter=data / "drafter-sglang", capture=self.capture.path, target=data / "target",
        )  # fmt: skip
        return tables.findings_table([f for f in found.findings if f.verdict == "failed"])


def start(server: bool = True) -> Case:
    """Start genuine SGLang with the drafter of data/; or take the recorded one where there is no SGLang."""
    data = data_dir()
    trained, served = (open_checkpoint(data / f"drafter-{form}") for form in ("speculators", "sglang"))
    case = Case(trained, served, material.target())
    try:
        if not server:
            raise BadInput("as you asked")
        server_python()
    except BadInput as error:
        case.why = str(error)
        return case
    while _STARTED:  # the cell is run again: the server that it started before makes room
        _STARTED.pop().close()
    case.server = case.running.enter_context(start_server("EAGLE"))
    _STARTED.append(case)
    atexit.register(case.files.close)
    atexit.register(case.running.close)
    return case


def record_again(folder: str | Path = RECORDED) -> Capture:
    """Make the recording anew (after `make data`): one request, 24 tokens in, 24 out, four depths.

    folder: one that does not exist, or is empty; so move the old one away first.
    """
    from eaglelab.collect import capture_server
    from eaglelab.prompts import load_prompts
    from eaglelab.server import Server

    with start_server("EAGLE") as running, Server(running.url) as attached:
        prompt = (attached.token_ids(load_prompts(data_dir() / "prompts.jsonl")[0]) or [])[:24]
        capture_server(attached, [prompt], folder, 24, depths=(2, 4, 5, 8))
    meta = Path(folder) / "capture.json"  # this machine's paths become those that the models have everywhere
    meta.write_text(meta.read_text(encoding="utf-8").replace(str(data_dir()), "data"), encoding="utf-8")
    return open_capture(folder)


def _record(server: RunningServer, files: contextlib.ExitStack) -> Capture:
    from eaglelab.collect import capture_server
    from eaglelab.prompts import load_prompts
    from eaglelab.server import Server

    folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="eaglelab-lesson-")))
    with Server(server.url) as attached:
        asked = [ids for p in load_prompts(data_dir() / "prompts.jsonl") if (ids := attached.token_ids(p))]
        return capture_server(attached, asked[:PROMPTS], folder / "capture", NEW)


def drafts_per_verify(counters: list[dict[str, int]]) -> float:
    """m of several requests."""
    return sum(c["spec_num_correct_drafts"] for c in counters) / sum(c["spec_verify_ct"] for c in counters)


def promised() -> float:
    """Accept length that the trainer's own validation amounts to: 1 + the sum over positions."""
    path = data_dir() / "drafter-speculators" / "val_metrics.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    return 1 + sum(value for name, value in found.items() if "full_acc" in name)
