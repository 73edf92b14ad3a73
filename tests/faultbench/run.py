"""Run the fault bench: inject, diagnose, weigh; table, totals and records in runs/faultbench."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from eaglelab.errors import BadInput
from eaglelab.records import Provenance

from . import table
from .cases import ROOT, Bench, Case, Injected, Length, all_cases
from .judge import Outcome, Required, outcome, required, weigh

Say = Callable[[str], None]


def run_case(case: Case, bench: Bench) -> Outcome:
    """Inject, diagnose, weigh. Whatever breaks is the outcome's error."""
    from eaglelab import diagnose

    found = outcome(case)
    try:
        injected = inject(case, bench)
    except Exception as error:
        found.error = f"not injected: {type(error).__name__}: {error}"
        return found
    for name in ("before", "after"):
        if given := getattr(injected, name):
            setattr(found, name, given.value)
            found.source = given.source
    start = time.perf_counter()
    try:
        weigh(found, diagnose.run(**injected.inputs), bool(injected.inputs.get("capture")))
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
    found.seconds = round(time.perf_counter() - start, 3)
    return found


def inject(case: Case, bench: Bench) -> Injected:
    """Inject, or take what lies in a kept folder from an earlier run (`--keep`)."""
    if not bench.keep:
        return case.inject(bench)
    listed = bench.root / "injected.jsonl"
    for line in reversed(listed.read_text().splitlines() if listed.exists() else []):
        kept = json.loads(line)
        if kept["name"] == case.name:
            lengths = {n: kept[n] and Length(**kept[n]) for n in ("before", "after")}
            return Injected(kept["inputs"], **lengths)
    found = case.inject(bench)
    lengths = {n: (one := getattr(found, n)) and asdict(one) for n in ("before", "after")}
    inputs = {name: str(given) for name, given in found.inputs.items()}
    with open(listed, "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"name": case.name, "inputs": inputs, **lengths}) + "\n")
    return found


def run(cases: Sequence[Case], bench: Bench, say: Say = print) -> list[Outcome]:
    """Every case in turn. The servers that they share are stopped at the end."""
    found = []
    try:
        for i, case in enumerate(cases, 1):
            one = run_case(case, bench)
            found.append(one)
            said = ", ".join(one.named[:3]) or one.error or one.verdict
            say(f"[{i}/{len(cases)}] {'ok ' if one.passed else 'NO '} {case.name}: {said}"[:160])
    finally:
        bench.close()
    return found


def write(folder: Path, outcomes: list[Outcome], rates: list[Required], facts: dict) -> None:
    """records.jsonl (provenance, cases, totals, summary) and table.md, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    last = table.summary(outcomes, rates)
    lines = [Provenance(facts=facts), *outcomes, *(r.measurement() for r in rates), last]
    texts = {
        "records.jsonl": "".join(line.model_dump_json() + "\n" for line in lines),
        "table.md": table.markdown(outcomes, rates),
    }
    for name, text in texts.items():
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / name)


def chosen(given: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for. BadInput if there is none."""
    found = [case for case in all_cases() if not given.fast or case.fast]
    if given.only:
        found = [c for c in found if any(word in (c.name, c.kind) or word in c.slugs for word in given.only)]
    if given.no_server or given.genuine:
        found = [case for case in found if bool(case.server) == given.genuine]
    if not found:
        raise BadInput(f"no case is named {' or '.join(given.only or ['so'])}; --list names all")
    return found


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests/faultbench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases by name, slug or kind")
    parser.add_argument("--fast", action="store_true", help="the subset for CI (under 8 minutes)")
    parser.add_argument("--no-server", action="store_true", help="leave out what needs the genuine server")
    parser.add_argument("--genuine", action="store_true", help="only what needs the genuine server")
    parser.add_argument("--total", nargs="+", type=Path, metavar="FOLDER", help="add up parts that ran")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="inject there, and what lies there from before no more"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--out", type=Path, help="folder for the records (default: in runs/)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every required rate was reached; 1: one was missed; 2: bad input."""
    given = options().parse_args(arguments)
    if given.total:
        return total(given.total, given.out or ROOT / "runs" / "faultbench")
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    try:
        cases = chosen(given)
        if given.list:
            for case in cases:
                print(f"{case.kind:13} {case.name:38} {case.server:12} {' + '.join(case.slugs)}")
            return 0
        python = _server_python() if any(case.server for case in cases) else ""
    except BadInput as error:
        print(error)
        return 2
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(given.keep or Path(folder), python, keep=given.keep is not None)
        outcomes = run(cases, bench, lambda line: print(line, flush=True))
    part = "only" if given.only else "fast" if given.fast else _half(given)
    out = given.out or ROOT / "runs" / "-".join(filter(None, ("faultbench", part)))
    rates = required(outcomes, whole=not part)
    facts = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cases": len(cases),
        "fast": given.fast,
        "only": given.only,
        "no_server": given.no_server,
        "seconds": round(time.perf_counter() - start, 1),
        "slowest_diagnosis_seconds": max(one.seconds for one in outcomes),
    }
    return conclude(out, outcomes, rates, facts)


def total(folders: Sequence[Path], out: Path) -> int:
    """Parts of the bench, run one by one, as one whole run; of a case in several, the last counts."""
    parts = [table.read(folder) for folder in folders]
    outcomes = {one.name: one for found, _, _ in parts for one in found}
    known = [outcomes[case.name] for case in all_cases() if case.name in outcomes]
    facts = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cases": len(known),
        "parts": [given for _, _, given in parts],
        "seconds": sum(given.get("seconds", 0.0) for _, _, given in parts),
        "slowest_diagnosis_seconds": max(one.seconds for one in known),
    }
    return conclude(out, known, required(known, whole=True), facts)


def conclude(out: Path, outcomes: list[Outcome], rates: list[Required], facts: dict) -> int:
    """Write and print; 0 if every required rate was reached."""
    write(out, outcomes, rates, facts)
    print(table.console(rates, outcomes))
    print(f"{len(outcomes)} cases in {facts['seconds']:.0f} s; {out / 'table.md'}")
    return 0 if all(rate.met for rate in rates) else 1


def _half(given: argparse.Namespace) -> str:
    return "no-server" if given.no_server else "genuine" if given.genuine else ""


def _server_python() -> str:
    from eaglelab.serve import server_python

    return server_python()
