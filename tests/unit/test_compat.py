"""`make compat` on small made-up sources: what is there, what moved, what is gone, what is not as expected.

The real wheels are fetched by `make compat` alone.
"""

from __future__ import annotations

import zipfile
from types import SimpleNamespace

import pytest
from compat import facts
from compat.__main__ import check
from compat.facts import (
    Fact,
    all_facts,
    has,
    hook_facts,
    import_facts,
    needed,
    steps_after_forward,
    unknown_rules,
)
from compat.sources import Release, fetch, keep

from eaglelab.probe.hooks import Hooks
from eaglelab.releases import BEHAVIOURS


def release(folder, version="0.5.23", **files) -> Release:
    """A release of a few files, by path below sglang/srt."""
    for name, text in files.items():
        path = folder / "sglang" / "srt" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Release(version, folder)


WORKER = """
class Other:
    def draft(self): return 1
class Worker:
    def draft(self, batch):
        # a comment, and odd spacing
        return  batch [ 'ids' ]
"""


def test_a_method_is_found_in_its_own_class_and_spelled_pythons_way(tmp_path):
    source = release(tmp_path, w=WORKER).source("w.py", "Worker.draft")
    assert "return batch['ids']" in source and "return 1" not in source
    assert release(tmp_path).source("w.py", "Worker.gone") == release(tmp_path).source("gone.py") == ""


def test_there_moved_and_absent(tmp_path):
    fact = Fact("f", (("new.py", "load"), ("old.py", "load")), has("ids + 1"))
    there = release(tmp_path / "a", new="def load(ids):\n  return ids+1")
    moved = release(tmp_path / "b", old="def load(ids):\n  return ids+1", new="def other(): pass")
    changed = release(tmp_path / "c", new="def load(ids):\n  return ids")
    assert [fact.status(r) for r in (there, moved, changed, release(tmp_path / "d"))] == [
        "there", "moved", "absent", "absent",
    ]  # fmt: skip


def test_a_fact_that_is_not_as_expected_is_a_surprise(tmp_path):
    fact = Fact("counts from 1", (("a.py", ""),), has("ids + 1"), since=(0, 5, 13), until=(0, 5, 20))
    with_it, without = "def f(ids):\n  return ids + 1", "def f(ids):\n  return ids"
    kept = [("0.5.12.post1", without), ("0.5.13", with_it), ("0.5.20", without)]
    lines, surprises = check([release(tmp_path / v, v, a=text) for v, text in kept], [fact])
    assert not surprises and [c for c in lines[1].split()[3:]] == [".", "x", "."]
    turned = [("0.5.12.post1", with_it), ("0.5.13", without), ("0.5.20", with_it)]
    lines, surprises = check([release(tmp_path / f"t{v}", v, a=text) for v, text in turned], [fact])
    assert lines[1].split()[3:] == ["x!", ".!", "x!"] and len(surprises) == 3
    assert "0.5.13: counts from 1: absent, expected" in surprises


FORWARD = "    out = self.draft_runner.forward(batch)"
BEFORE = f"for i in steps:\n    batch.positions.add_(1)\n{FORWARD}"
AFTER = f"for i in steps:\n{FORWARD}\n    batch.positions.add_(1)"
FUSED = f"for i in steps:\n{FORWARD}\n    draft_topk1_postprocess(out, batch.positions)"


def test_where_the_positions_of_draft_steps_move_on():
    assert [steps_after_forward(s) for s in (BEFORE, AFTER, FUSED, "pass")] == [False, True, True, False]


def test_every_hook_target_and_every_import_of_the_probe_is_a_fact(tmp_path):
    names = {f.name.removeprefix("hook ") for f in hook_facts()}
    for version in ("0.5.11", "0.5.23"):
        assert {".".join(t.split(".")[-2:]) for t in Hooks(None, version).targets()} <= names
    assert {"EAGLEWorkerV2._forward_prefill_batch", "EAGLEWorkerV2.forward_batch_generation"} <= names
    (tmp_path / "mod.py").write_text("def f():\n    from sglang.srt.a.b import c as d\n")
    (fact,) = import_facts(tmp_path)
    assert fact.name == "import b.c"
    here = release(tmp_path / "x", **{"a/b": "c = 1"})
    exported = release(tmp_path / "y", **{"a/b": "from z import c"})
    package = release(tmp_path / "z", **{"a/b/__init__": "class c: pass"})
    gone = release(tmp_path / "g", **{"a/b": "d = 1"})
    assert [fact.status(r) for r in (here, exported, package, gone)] == ["there", "there", "there", "absent"]
    assert {"import hook_registry.HookRegistry", "import auth.auth_level"} <= {f.name for f in import_facts()}


def test_every_line_of_the_table_of_releases_is_checked():
    checked = {f.name.removesuffix(" (releases.py)") for f in all_facts() if f.name.endswith("(releases.py)")}
    assert checked == {b.name for b in BEHAVIOURS}


RULE = "class {}:\n    def set_eagle3_layers_to_capture(self, layer_ids=None):\n        {}\n"


def test_a_target_whose_rule_for_layer_ids_is_new_is_told(tmp_path):
    known = (
        "self.model.layers_to_capture = [val + 1 for val in layer_ids]",
        "self.language_model.set_eagle3_layers_to_capture(layer_ids)",
        "self.layers_to_capture = layers_to_capture",
    )
    files = {f"models/m{i}": RULE.format("A", line) for i, line in enumerate(known)}
    assert unknown_rules(release(tmp_path / "a", **files)) == []
    rule = RULE.format("New", "self.model.take = [val + 2 for val in layer_ids]")
    new = release(tmp_path / "b", **{"models/n": rule})
    assert unknown_rules(new) == ["models/n.py:New"]
    _, surprises = check([new], [Fact("f", (("models/n.py", ""),), has("val + 2"))])
    assert surprises == ["0.5.23: models/n.py:New: a rule for layer ids of no known form"]


def test_only_needed_files_of_a_wheel_are_kept(tmp_path):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang/srt/models/llama_eagle3.py", "x = 1")
        archive.writestr("sglang/srt/models/new.py", "def set_eagle3_layers_to_capture(): pass")
        archive.writestr("sglang/srt/models/other.py", "y = 1")
        archive.writestr("sglang/srt/speculative/a.so", "binary")
        archive.writestr("sglang/srt/../../escape.py", "def set_eagle3_layers_to_capture(): pass")
        archive.writestr("elsewhere.py", "")
    keep(wheel, tmp_path / "root", needed, facts.KEY)
    found = sorted(p.relative_to(tmp_path / "root").as_posix() for p in (tmp_path / "root").rglob("*.py"))
    assert found == ["sglang/srt/models/llama_eagle3.py", "sglang/srt/models/new.py"]
    assert not list(tmp_path.glob("*.py"))
    cached = fetch("root", tmp_path, needed, facts.KEY)  # no pip: it is there, and by the same key
    assert cached.source("models/llama_eagle3.py") == "x = 1"


@pytest.mark.parametrize(
    "version, name", [("0.5.20", "forward_batch_generation"), ("0.5.21", "_forward_prefill_batch")]
)
def test_the_prefill_is_hooked_where_this_release_has_it(version, name):
    targets = Hooks(SimpleNamespace(), version).targets()
    assert [t for t in targets if t.endswith(f"EAGLEWorkerV2.{name}")]
    assert len([t for t in targets if "EAGLEWorkerV2." in t]) == 1
    assert facts.RELEASES[-1] == "0.5.23" and len(set(facts.RELEASES)) == 17
