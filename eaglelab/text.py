"""What the commands print: for each a JSON-able object, and the same as text for people."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglelab.errors import BadInput
from eaglelab.html import LOOK, printable

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.convert import Plan
    from eaglelab.diagnose import Diagnosis
    from eaglelab.launch import Launch
    from eaglelab.records import Finding
    from eaglelab.runs import Outcome

Both = tuple[dict[str, Any], str]


def rows(table: Iterable[Sequence[object]], indent: str = "  ") -> str:
    """Columns aligned; the last one is wrapped to the terminal."""
    cells = [
        ["–" if v is None else f"{v:.4g}" if isinstance(v, float) else printable(v) for v in r] for r in table
    ]
    if not cells:
        return f"{indent}none"
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    room = max(40, shutil.get_terminal_size((100, 24)).columns)
    out = []
    for row in cells:
        head = indent + "".join(cell.ljust(width + 2) for cell, width in zip(row, widths, strict=False))
        out.append(
            textwrap.fill(
                row[-1], room, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
            )
            or head
        )
    return "\n".join(out)


def inspect(
    path: Path,
    target: str,
    launch: str,
    engine: str,
    dialect: str,
    statistics: bool,
    allow_pickle: bool = False,
) -> Both:
    """A drafter, a capture or stored features: told apart by what lies there."""
    if (path / "capture.json").exists():
        from eaglelab.capture import open_capture

        return capture(open_capture(path))
    if (path / "config.json").exists() or path.name == "config.json":
        return drafter(path.parent if path.is_file() else path, target, launch, engine, dialect, statistics)
    if not path.exists():
        raise BadInput(f"{path}: does not exist")
    if path.is_file():
        raise BadInput(f"{path}: a file; give the folder of a drafter, a capture or stored features")
    if not any(path.iterdir()):
        raise BadInput(f"{path}: an empty folder")
    return stored(path, statistics, allow_pickle)


def drafter(path: Path, target: str, launch: str, engine: str, dialect: str, statistics: bool) -> Both:
    """Dialect, layer ids both ways, what the engine takes and drops, trained beside served."""
    from eaglelab.checkpoint import open_checkpoint, open_target
    from eaglelab.describe import describe
    from eaglelab.launch import Launch, engine_version

    version = engine_version(engine)
    checkpoint, model = open_checkpoint(path, dialect or None), open_target(target) if target else None
    facts = model.facts if model else None
    asked: Launch | None = Launch.parse(launch, target=facts, version=version) if launch else None
    if asked and asked.algorithm is None:
        raise BadInput(
            f"--launch {launch!r}: no --speculative-algorithm in it; such a launch serves no drafter"
        )
    said = describe(checkpoint, model, asked or Launch(version=version, target=facts), statistics)
    said["launch"]["assumed"] = asked is None
    ids = said["layer_ids"]
    parts = [
        rows([
            ("drafter", said["path"]),
            ("dialect", said["dialect"]),
            ("size", f"{len(said['tensors'])} tensors, {said['bytes'] / 1e6:,.1f} MB"),
            ("layer ids", f"{ids['written']} as {ids['written_as']} writes them; depths {ids['depths']};"
             f" {ids['as_sglang']} for SGLang, {ids['as_speculators']} for speculators and vLLM"),
            ("launch", said["launch"]["command"] + (" (assumed)" if said["launch"]["assumed"] else "")),
            ("engine", said["launch"]["engine"]),
            *(("", line) for line in [said["launch"]["release"]["caveat"] or ""] if line),
            *(("", line) for line in said["launch"]["release"]["differences"]),
        ], "")
    ]  # fmt: skip
    if statistics:
        table = [
            (
                name,
                t["dtype"],
                t["shape"],
                f"mean {t['mean']:.4g} sd {t['std']:.4g} largest {t['absmax']:.4g}",
            )
            for name, t in said["tensors"].items()
            if "mean" in t
        ]
        parts.append("tensors:\n" + rows(table))
    if said["trained"] is None:  # not modelled: the names and widths are all there is to say
        parts.append("tensors:\n" + rows((n, t["dtype"], t["shape"]) for n, t in said["tensors"].items()))
    parts += [f"note: {note}" for note in said["notes"]]
    for reason in said["refusals"]:
        parts.append(f"this engine would not serve it: {reason}")
    if said["loading"]:
        parts.append("dropped without a word:\n" + rows([(n,) for n in said["loading"]["dropped"]]))
        parts.append("left at their initial values:\n" + rows([(n,) for n in said["loading"]["initial"]]))
    if said["differences"] is not None:
        counts = [d for d in said["differences"] if not d["inert"]]
        inert = [d for d in said["differences"] if d["inert"]]
        shown = [(d["field"], _short(d["trained"]), "->", _short(d["served"]), d["why"]) for d in counts]
        parts.append(f"trained -> served, {len(counts)} differences that count:\n" + rows(shown))
        parts.append(f"{len(inert)} that change nothing:\n" + rows((d["field"], d["why"]) for d in inert))
    if asked and said["trained"] is not None:
        failed = _static_findings(checkpoint, asked, model)
        said["findings"] = [f.model_dump() for f in failed]
        parts.append(findings(failed) or "no fault that files and flags can tell")
    return said, "\n\n".join(parts)


def _static_findings(checkpoint: Any, launch: Any, model: Any) -> list[Finding]:
    """What files and flags alone tell: failed findings, the cause first."""
    from eaglelab.checks import static
    from eaglelab.gather import static_evidence

    found = static.findings(static_evidence(checkpoint, launch, model))
    return [f for f in found if f.verdict == "failed"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return textwrap.shorten(text, 60, placeholder=" …") if " " in text else text[:60]


def stored(path: Path, statistics: bool, allow_pickle: bool = False) -> Both:
    """What a trainer stored: samples, tokens, widths."""
    from eaglelab.features import StoredFeatures

    found = StoredFeatures.open(path, allow_pickle=allow_pickle)
    said: dict[str, Any] = {
        "kind": "features",
        "path": str(path),
        "format": found.layout,
        "samples": len(found.samples),
        "tokens": found.tokens,
        "dtype": found.dtype,
        "chunks": found.chunks,
        "hidden_size": found.hidden_size,
        "layers": found.names,
    }
    parts = [rows([(k, ", ".join(v) if isinstance(v, list) else v) for k, v in said.items()], "")]
    if statistics:
        from eaglelab.stats import FeatureStats

        stats = FeatureStats(found.chunks * found.hidden_size, found.chunks, found.names[:-1])
        said["problems"] = list(found.problems())
        for sample in found.samples if not said["problems"] else ():
            stats.update(sample.features)
        said["statistics"] = stats.summary().splitlines()
        parts.append("statistics:\n" + rows([(line,) for line in said["statistics"] + said["problems"]]))
    return said, "\n\n".join(parts)


def capture(got: Capture) -> Both:
    """Launch, events, widths, requests and whatever reading found odd."""
    events: dict[str, int] = {}
    for event in got.events():
        events[event.kind] = events.get(event.kind, 0) + 1
    requests = {rid: trace.state for rid, trace in got.requests.items()}
    states = {state: list(requests.values()).count(state) for state in sorted(set(requests.values()))}
    measured = [m for m in got.meta.get("measurements", []) if m["value"] is not None]
    said = {
        "kind": "capture",
        "path": str(got.path),
        "launch": got.launch.command(),
        "engine": f"{got.launch.engine}=={got.launch.version}",
        "ranks": got.ranks,
        "events": events,
        "widths": got.widths,
        "requests": requests,
        "reprefilled": sorted(got.reprefill),
        "measurements": got.meta.get("measurements", []),
        "problems": [{"severity": p.severity, "where": p.where, "text": p.text} for p in got.problems],
    }
    text = rows([
        ("capture", said["path"]),
        ("launch", said["launch"]),
        ("ranks", ", ".join(got.ranks)),
        ("events", ", ".join(f"{n} {kind}" for kind, n in events.items())),
        ("widths", ", ".join(f"{w} at {site}" for site, w in got.widths.items())),
        ("requests", ", ".join(f"{n} {state}" for state, n in states.items())),
        ("re-prefilled", len(got.reprefill)),
        *((m["name"], f"{m['value']:.4g} {m['unit']}: {m['definition']}") for m in measured),
        *((p.severity, f"{p.where}: {p.text}") for p in got.problems),
    ], "")  # fmt: skip
    return said, text


def replay(path: Path, drafter: str, target: str, launch: str, dialect: str = "") -> Both:
    """Every captured round drafted again; with `launch`, what the same texts would do under those flags."""
    from eaglelab import replay as module
    from eaglelab.capture import open_capture
    from eaglelab.checkpoint import open_checkpoint
    from eaglelab.counterfactual import counterfactual
    from eaglelab.gather import launch_of, static_evidence, target_of

    got = open_capture(path)
    model = target_of(target, got)
    if model is None or "lm_head.weight" not in model.tensors:
        raise BadInput(f"{path}: holds no tensors of the target, which replay needs: give --target PATH")
    evidence = static_evidence(open_checkpoint(drafter, dialect or None), launch_of("", got, model), model)
    evidence.checkpoint.check_target(model.facts)
    if evidence.served is None:
        raise BadInput(evidence.why_not("served"))
    if launch:
        found = counterfactual(got, evidence.checkpoint, model, flags=launch)
        if found.accept_length is None:
            raise BadInput(f"--launch {launch}: cannot be predicted from this capture: {found.reason}")
        low, high = found.interval or (None, None)
        now = [r.accept_len for trace in got.requests.values() for r in trace.rounds]
        said: dict[str, Any] = {"launch": launch, "predicted_accept_length": found.accept_length}
        said |= {"interval": found.interval, "features": found.source}
        said["captured_accept_length"] = sum(now) / len(now) if now else None
        between = f" (95 % interval {low:.3f} to {high:.3f})" if low is not None else ""
        text = f"predicted accept length under {launch}: {found.accept_length:.3f}{between}, {found.source}\n"
        return said, text + f"captured: {said['captured_accept_length']:.3f}" if now else text
    import torch

    from eaglelab.drafter import Drafter

    wiring = evidence.served[1]
    done = module.replay(
        got, Drafter(evidence.checkpoint, wiring, model, "cpu", getattr(torch, wiring.dtype))
    )
    measured = done.measurements()
    said = {"agreement": done.agreement if done.tokens else None, "tokens": done.tokens, "equal": done.equal}
    said |= {"rounds": len(done.rounds), "exact": done.exact, "forced": done.forced, "dtype": done.dtype}
    said |= {"skipped": done.skipped, "measurements": [m.model_dump() for m in measured]}
    lines = [
        f"{done.equal:,} of {done.tokens:,} draft tokens equal the server's, over {len(done.rounds)} rounds"
    ]
    lines.append(rows((m.name, m.value, m.unit, m.reason or m.definition) for m in measured))
    lines += [f"skipped {rid}: {why}" for rid, why in done.skipped.items()]
    return said, "\n".join(lines)


def findings(found: Iterable[Finding]) -> str:
    """Findings as text: outcome and title, then evidence and fix."""
    out = []
    for f in found:
        out.append(f"{LOOK[f.verdict][0]} {f.verdict}: {f.title} [{f.fault}]")
        out += [f"    {line}" for line in f.evidence]
        if f.fix:
            gain = (
                f" (predicted accept length {f.predicted_accept_length:.2f})"
                if f.predicted_accept_length
                else ""
            )
            out.append(f"    fix: {f.fix}{gain}")
    return printable("\n".join(out))


def diagnosis(found: Diagnosis) -> Both:
    """Findings, accept lengths, and the verdict in the last line."""
    said = found.summary().model_dump(exclude={"type"})
    said |= {"findings": [f.model_dump(exclude={"type"}) for f in found.findings]}
    said |= {"measurements": [m.model_dump(exclude={"type"}) for m in found.measurements]}
    lengths = [
        (m.name, m.value, m.reason or m.unit)
        for m in found.measurements
        if m.name.startswith("accept_length")
    ]
    last = verdict(found.verdict, found.fault)
    if found.verdict == "inconclusive" and found.capture is None:
        last = f"files and flags agree; no server was looked at (--server or --capture)\n{last}"
    return said, "\n".join([findings(found.findings), rows(lengths, ""), last])


def verdict(word: str, fault: str | None) -> str:
    return word + (f": {fault}" if fault else "")


def conversion(dst: Path, plan: Plan) -> Both:
    """What a conversion renamed, dropped, added and warned about."""
    said = {"path": str(dst), "to": plan.to, "renamed": plan.renamed, "dropped": plan.dropped}
    said |= {"added": plan.added, "warnings": plan.warnings}
    before, after, depths = plan.ids
    moved = {old: new for old, new in plan.renamed.items() if old != new}
    parts = [f"{dst}: {len(plan.tensors)} tensors in the {plan.to} form"]
    parts.append(f"layer ids {list(before)} -> {list(after)} (depths {list(depths)})")
    parts.append(f"renamed:\n{rows(moved.items())}")
    parts += [f"dropped: {name}" for name in plan.dropped] + [f"added: {name}" for name in plan.added]
    return said, "\n".join([*parts, *(f"warning: {w}" for w in plan.warnings)])


def outcome(done: Outcome) -> Both:
    """How a report ended. The last two lines of text are verdict and page."""
    from eaglelab import records, runs

    page = done.folder / runs.PAGE
    said: dict[str, Any] = {
        "verdict": None,
        "fault": None,
        "exit_code": done.exit_code,
        "out": str(done.folder),
    }
    if not done.complete or done.summary is None:
        return said | {"error": done.message}, ""
    said |= {**done.summary.model_dump(exclude={"type"}), "report": str(page)}
    found = [r for r in records.read(done.folder / runs.RECORDS) if isinstance(r, records.Finding)]
    told = ("skipped", "errored") if done.summary.verdict == "inconclusive" else ("failed",)
    failed = findings(f for f in found if f.verdict in told)
    last = f"{verdict(done.summary.verdict, done.summary.fault)}\n{page}"
    return said, f"{failed}\n{last}" if failed else last
