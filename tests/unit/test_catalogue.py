"""The catalogue holds what the code can say, and names only what exists."""

import importlib
import json
import pkgutil
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from eaglelab import catalogue, checks, cli
from eaglelab.catalogue import Fault
from eaglelab.checks import Check
from eaglelab.checks.causes import CAUSES, Cause
from eaglelab.errors import BadInput
from eaglelab.wiring import Feed, Wiring

FAULTS = catalogue.faults()
# Numbers of the collection: stable, with gaps where two entries became one.
NUMBERS = (
    {1, 2, 3, 4} | set(range(5, 22)) - {14} | set(range(23, 33)) - {30} | set(range(33, 38))
    | {38, *range(40, 49)} | {49, 50, 53, 54, 55, 56} | {57, 58, 59, 61, 62} | {63, 64, 65, 66, 67, 69, 70}
)  # fmt: skip


def slugs_in(kind):
    """Slugs of every Check or Cause that a module of checks/ holds, also inside tuples and dicts."""
    found = set()
    for info in pkgutil.iter_modules(checks.__path__):
        module = importlib.import_module(f"eaglelab.checks.{info.name}")
        for value in vars(module).values():
            group = (
                value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
            )
            found |= {v.fault if kind is Check else v.slug for v in group if isinstance(v, kind)}
    return found


def test_every_slug_that_the_code_can_emit_is_in_the_catalogue():
    emitted = slugs_in(Check) | slugs_in(Cause)
    assert len(emitted) >= 16
    assert emitted - FAULTS.keys() == set()


def test_what_detects_a_fault_exists():
    names = {
        "cause": {cause.slug for cause in CAUSES},
        "check": slugs_in(Check),
        "diff": {f.name for f in (*fields(Feed), *fields(Wiring))},
        "rung": {"1", "2", "3", "4", "5"},
        "command": {c.callback.__name__ for c in cli.app.registered_commands},
    }
    for fault in FAULTS.values():
        for way in fault.detected_by:
            kind, _, name = way.partition(":")
            assert name in names[kind], f"{fault.slug}: {way}"


def test_slugs_are_unique_and_every_collected_fault_is_there():
    listed = [fault for section in catalogue.sections().values() for fault in section]
    assert len(listed) == len(FAULTS)
    assert {fault.number for fault in listed} - {0} == NUMBERS
    assert len([fault for fault in listed if fault.number]) == len(NUMBERS)


def test_no_entry_is_half_written():
    for slug, fault in FAULTS.items():
        assert slug == slug.lower() and " " not in slug
        assert fault.title and fault.cause and fault.fix and fault.signals, slug
        assert set(fault.signals) <= set(catalogue.Signal.__args__), slug
        assert fault.rung in (None, 1, 2, 3, 4, 5), slug
        assert fault.detected_by or fault.undetected, (
            f"{slug}: says neither what finds it nor why nothing does"
        )
        assert fault.number == 0 or fault.threads or fault.source, f"{slug}: where is it known from?"


def test_what_is_detected_by_a_named_cause_is_that_entry():
    """A cause's slug is the slug of the fault that it undoes."""
    for cause in CAUSES:
        assert f"cause:{cause.slug}" in FAULTS[cause.slug].detected_by


def test_references_are_addresses_where_the_owner_is_known():
    fault = Fault("s", 1, "", "", (), "", 1, threads="sglang#21272 tokenspeed#1 nm-testing/model")
    assert fault.references == [
        "https://github.com/sgl-project/sglang/issues/21272",
        "tokenspeed#1",
        "nm-testing/model",
    ]


def test_an_unknown_slug_names_the_nearest():
    with pytest.raises(BadInput, match="did you mean rope-theta"):
        catalogue.find("rope-thta")
    with pytest.raises(BadInput, match="`eaglelab faults` lists them"):
        catalogue.find("zzzz")


def run(*words):
    return CliRunner().invoke(cli.app, ["faults", *words])


def test_the_table_lists_every_slug():
    output = run().output
    assert all(f"  {slug} " in output for slug in FAULTS)
    assert output.splitlines()[-1].startswith(f"{len(FAULTS)} faults: ")


def test_one_fault_explained():
    output = " ".join(run("eagle-flag-on-eagle3-drafter").output.split())
    assert "fix --speculative-algorithm EAGLE3" in output
    assert "read in thread https://github.com/sgl-project/sglang/issues/21272" in output
    assert "found by a known cause, undone and derived anew: eagle-flag-on-eagle3-drafter" in output


def test_as_json():
    said = json.loads(run("--json").stdout)
    assert {fault["slug"] for fault in said["faults"]} == FAULTS.keys()
    assert sum(said["detected"].values()) == len(FAULTS)
    assert json.loads(run("sampling", "--json").stdout)["detected"] == "no"
    assert run("no-such-fault", "--json").exit_code == 2
