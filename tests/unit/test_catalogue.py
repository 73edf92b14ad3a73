"""The catalogue holds what the code can say, and names only what exists."""

import importlib
import json
import pkgutil
from dataclasses import fields

import pytest
import torch
from drafters import DATA, SGLANG, SPECULATORS, TARGET, edited
from typer.testing import CliRunner

from eaglelab import catalogue, checks, cli, diagnose, edits
from eaglelab.catalogue import Fault
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.checks import Check, names, static
from eaglelab.checks.causes import CAUSES, Cause
from eaglelab.errors import BadInput
from eaglelab.gather import static_evidence
from eaglelab.launch import Launch
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
    emitted = slugs_in(Check) | slugs_in(Cause) | names.NAMED | edits.NAMED
    assert len(emitted) >= 16
    assert emitted - FAULTS.keys() == set()


def test_what_detects_a_fault_exists():
    exists = {
        "cause": {cause.slug for cause in CAUSES},
        "check": slugs_in(Check),
        "diff": {f.name for f in (*fields(Feed), *fields(Wiring))},
        "replay": edits.NAMED,
        "rung": {"1", "2", "3", "4", "5"},
        "command": {c.callback.__name__ for c in cli.app.registered_commands},
    }
    for fault in FAULTS.values():
        for way in fault.detected_by:
            kind, _, name = way.partition(":")
            assert name in exists[kind], f"{fault.slug}: {way}"


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


EAGLE3, EAGLE = "--speculative-algorithm EAGLE3", "--speculative-algorithm EAGLE"
LAYER = "midlayer.self_attn."
IDS = "eagle_aux_hidden_state_layer_ids"
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 32}


def ones(name, *shape):
    return {name: torch.ones(shape, dtype=torch.bfloat16)}


# Each fault that is said to show in `trained` against `served`, done to a tiny drafter. Several: all together
# must show every field that the entry names.
STATIC = {
    "eagle-flag-on-eagle3-drafter": [{"launch": EAGLE}],
    "aux-hidden-state-off": [{"config": {"eagle_config": {"use_aux_hidden_state": False}}}],
    "lm-head-missing": [{"drop": ["lm_head"]}],
    "tied-head-reduced-vocab": [{"config": {"tie_word_embeddings": True}}],
    "random-embedding-exported": [{"add": ones("embed_tokens.weight", 1024, 128)}],
    "trained-head-replaced": [{"launch": EAGLE}, {"add": ones("embed_tokens.weight", 1024, 128)}],
    "trained-embedding-replaced": [{"add": ones("embed_tokens.weight", 1024, 128), "base": SPECULATORS}],
    "d2t-dropped": [{"launch": EAGLE}],
    "d2t-absolute": [{"absolute": 300}],
    "midlayer-name": [{"rename": {"midlayer": "block"}}],
    "qk-norm-or-bias-dropped": [
        {"add": ones(LAYER + "q_norm.weight", 16)},
        {"add": ones(LAYER + "q_proj.bias", 128)},
    ],
    "checkpoint-dtype": [
        {
            "launch": f"{EAGLE3} --dtype float16",
            "add": {"lm_head.weight": torch.full((640, 128), 1e-9).bfloat16()},
        }
    ],
    "ids-missing": [{"config": {IDS: [2, 4, 5], "eagle_config": {IDS: None}}}],
    "norm-before-residual": [{"config": {"norm_before_residual": True}, "base": SPECULATORS}],
    "norm-before-fc-not-applied": [{"config": {"eagle_config": {"norm_before_fc": False}}}],
    "mrope-or-partial-rotary": [{"config": {"partial_rotary_factor": 0.5}}],
    "sliding-window-ignored": [{"config": WINDOW}],
    "multi-layer-drafter": [{"layers": 2}],
    "position-offset": [{"version": "0.5.11"}],
    "chunk-order": [{"config": {"eagle_config": {IDS: [3, 1, 4]}, "eaglelab_dialect": "specforge"}}],
    "tensors-dropped": [{"rename": {"midlayer": "block"}}],
    "parameters-not-loaded": [{"drop": ["lm_head"]}],
}


def second_layer():
    from safetensors.torch import load_file

    first = {n: t for n, t in load_file(SGLANG / "model.safetensors").items() if "midlayer" in n}
    found = {n.replace("midlayer", "layers.1"): t for n, t in first.items() if "hidden_norm" not in n}
    narrow = {n: t[:, :128].contiguous() for n, t in found.items() if n[-15:-13] in ("q_", "k_", "v_")}
    return found | narrow | {"layers.1.input_layernorm.weight": torch.full((128,), 0.5).bfloat16()}


def absolute_map(size):
    """A draft vocabulary of the target ids 10, 11, ..., with those ids in d2t where offsets belong."""
    marked = torch.zeros(1024, dtype=torch.bool)
    marked[10 : size + 10] = True
    return {"d2t": torch.arange(size) + 10, "t2d": marked, **ones("lm_head.weight", size, 128)}


def evidence(folder, launch=EAGLE3, base=SGLANG, layers=1, absolute=0, version="0.5.23", **changes):
    if absolute:
        changes = {"config": {"draft_vocab_size": absolute}, "add": absolute_map(absolute)}
    if layers == 2:
        changes = {"config": {"num_hidden_layers": 2}, "add": second_layer()}
    target = open_target(TARGET)
    checkpoint = open_checkpoint(edited(folder, base, **changes))
    return static_evidence(checkpoint, Launch.parse(launch, target=target.facts, version=version), target)


def said_to_differ(fault):
    return {way.partition(":")[2] for way in fault.detected_by if way.startswith("diff:")}


def test_every_static_claim_is_tried():
    assert {fault.slug for fault in FAULTS.values() if said_to_differ(fault)} == STATIC.keys()


# What the fields of a case are called, where that is another fault than the one that the case stands for: a
# file by itself does not tell these apart.
CALLED = {
    "trained-head-replaced": {"eagle-flag-on-eagle3-drafter", "random-embedding-exported"},
    "trained-embedding-replaced": {"random-embedding-exported"},
    "d2t-dropped": {"eagle-flag-on-eagle3-drafter"},
    "tensors-dropped": {"midlayer-name"},
    "position-offset": {"position-offset", "norm-output", "norm-before-fc-not-applied"},  # all of 0.5.11
    "parameters-not-loaded": {"lm-head-missing"},
}


@pytest.mark.parametrize("slug", STATIC)
def test_a_difference_is_called_by_its_name(slug, tmp_path):
    found = [evidence(tmp_path / str(i), **case) for i, case in enumerate(STATIC[slug])]
    said = {f.fault for some in found for f in static.findings(some) if f.verdict == "failed"}
    assert said == CALLED.get(slug, {slug})


@pytest.mark.parametrize("slug", STATIC)
def test_a_fault_shows_in_the_fields_that_its_entry_names(slug, tmp_path):
    found = [evidence(tmp_path / str(i), **case) for i, case in enumerate(STATIC[slug])]
    assert all(f.served for f in found), [f.missing.get("served") for f in found]
    assert {d.field for f in found for d in f.differences if not d.inert} >= said_to_differ(FAULTS[slug])


REFUSED = {
    "head-dim-wrong": {"config": {"head_dim": 32}},
    "drafter-width-differs": {"config": {"hidden_size": 64}},
    "checkpoint-dtype": {"config": {"vocab_size": 1000}},
}


@pytest.mark.parametrize("slug", REFUSED)
def test_what_inspect_is_said_to_find_it_refuses(slug, tmp_path):
    assert "command:inspect" in FAULTS[slug].detected_by
    with pytest.raises(BadInput, match="correct the config"):
        open_checkpoint(edited(tmp_path / "d", SGLANG, **REFUSED[slug]))


@pytest.mark.parametrize(
    ("slug", "case", "says"),
    [
        ("fc-width-differs", {"config": {"eagle_config": {IDS: [1, 3]}}}, "it stops while loading"),
        (
            "id-past-the-last-layer",
            {"config": {"eagle_config": {IDS: [1, 3, 7]}}},
            "SGLang stops at the first",
        ),
        ("d2t-absolute", {"absolute": 640}, "d2t holds target ids"),
        ("checkpoint-dtype", {"config": {"torch_dtype": "float16"}}, "hands over bfloat16"),
    ],
)
def test_what_the_engine_is_said_to_refuse(slug, case, says, tmp_path):
    assert "check:engine-refuses-drafter" in FAULTS[slug].detected_by
    found = evidence(tmp_path / "d", **case)
    assert found.served is None and says in found.missing["served"]


INNER = "transformer_layer_config"
# Faults of the file that is given, against the shipped capture of a healthy server: (what is done, the checks
# of the entry that must fail). What only a sick server shows is not here.
CAPTURED = {
    "draft-quantization-inherited": (
        {"add": ones("midlayer.mlp.down_proj.weight", 128, 384)},
        {"weights-not-loaded", "runtime-mismatch"},
    ),
    "midlayer-name": (STATIC["midlayer-name"][0], {"weights-not-loaded"}),
    "ids-missing": (STATIC["ids-missing"][0], {"feed-depths"}),
    "ids-plus-one": ({"base": SPECULATORS, "config": {IDS: [1, 3, 4]}}, {"feed-depths"}),
    "ids-off-by-one": ({"base": SPECULATORS, "config": {IDS: [3, 5, 6]}}, {"feed-depths"}),
    "norm-output": (
        {"base": SPECULATORS, "config": {"norm_output": False}},
        {"exposure-bias", "runtime-mismatch"},
    ),
    "rope-theta": (
        {"base": SPECULATORS, "config": {INNER: {"rope_parameters": {"rope_theta": 1e6}}}},
        {"runtime-mismatch"},
    ),
    "rope-scaling": (
        {"base": SPECULATORS, "config": {INNER: {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}}},
        {"runtime-mismatch"},
    ),
}


@pytest.mark.parametrize("slug", CAPTURED)
def test_a_fault_fails_the_checks_that_its_entry_names(slug, tmp_path):
    changes, expected = CAPTURED[slug]
    assert {f"check:{name}" for name in expected} <= set(FAULTS[slug].detected_by)
    drafter = edited(tmp_path / "d", **changes)
    capture, features = DATA / "golden-capture", DATA / "features"
    found = diagnose.run(drafter=drafter, capture=capture, features=features, target=TARGET)
    failed = {f.fault for f in found.failed}
    assert expected <= failed or (expected == {"feed-depths"} and slug in failed)  # by its own name
