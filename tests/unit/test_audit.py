"""Stored features judged: the shipped ones are healthy, and each way of spoiling them has its name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eaglelab import diagnose
from eaglelab.audit import audit
from eaglelab.catalogue import find
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.checks import data
from eaglelab.errors import BadInput
from eaglelab.features import StoredFeatures
from eaglelab.forward import run_target
from eaglelab.gather import static_evidence
from eaglelab.launch import Launch
from eaglelab.tensorfile import hold

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
st = pytest.importorskip("safetensors.torch")

DATA = Path(__file__).parents[2] / "data"
CHAIN = "--speculative-algorithm EAGLE3 --dtype float32"


@pytest.fixture(scope="module")
def given():
    """Files and flags alone, all right."""
    target = open_target(DATA / "target")
    launch = Launch.parse(CHAIN, target.facts)
    return static_evidence(open_checkpoint(DATA / "drafter-speculators"), launch, target)


@pytest.fixture(scope="module")
def texts():
    """Every depth of the stored texts, as the target gives them."""
    stored = StoredFeatures.open(DATA / "features")
    return run_target(DATA / "target", [s.token_ids.tolist() for s in stored.samples])


def spoiled(folder, change):
    """A copy of the shipped features; `change(tensors, i)` of each sample."""
    shutil.copytree(DATA / "features", folder)
    for path in sorted((folder / "hidden_states").glob("*.safetensors")):
        held = change(st.load_file(path), int(path.stem[3:]))
        st.save_file({name: t.contiguous() for name, t in held.items()}, path)
    return folder


def masked(folder, change):
    """The same with every loss mask changed."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_from_disk(str(DATA / "features")).with_format(None)
    columns = {name: list(rows[name]) for name in rows.column_names}
    columns["loss_mask"] = [[int(x) for x in change(np.asarray(m) > 0)] for m in columns["loss_mask"]]
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    shutil.copytree(DATA / "features" / "hidden_states", folder / "hidden_states")
    return folder


def judged(given, folder, **more):
    evidence = replace(given, **more)
    evidence.data = audit(StoredFeatures.open(folder, strict=False), evidence)
    return {f.fault: f for f in data.findings(evidence)}


def failed(found):
    return [slug for slug, f in found.items() if f.verdict == "failed"]


def states(change):
    return lambda held, i: held | {"hidden_states": change(held["hidden_states"], i).to(torch.bfloat16)}


def test_the_shipped_features_are_healthy(given):
    found = judged(given, DATA / "features")
    assert {f.verdict for f in found.values()} == {"passed"} and len(found) == 5
    assert "compared with the target run here with transformers, in float32" in (
        found["stored-features-shifted"].evidence
    )
    assert found["teacher-norm"].evidence[1].startswith("the target's choice from it is the next token for 8")
    assert any("trained on from token 40: '" in line for line in found["loss-mask"].evidence)


@pytest.mark.parametrize(
    ("slug", "change", "says"),
    [
        (
            "dump-truncated",
            lambda held, i: held | {"hidden_states": held["hidden_states"][64:]},
            "hidden_states has 128 rows for 192 token_ids",
        ),
        (
            "dump-truncated",
            lambda held, i: {name: t[64:] for name, t in held.items()},
            "the first 64 of the text's 192 tokens have no row",
        ),
        (
            "dump-truncated",
            lambda held, i: {name: t[:-9] for name, t in held.items()},
            "the last 9 of the text's 192 tokens have no row",
        ),
        (
            "dump-truncated",
            states(lambda x, i: x * (torch.arange(192) > 19)[:, None, None]),
            "are all zeros, never written",
        ),
        (
            "token-shift",
            states(lambda x, i: torch.cat([x[1:], x[-1:]])),
            "row i holds the state of token i + 1",
        ),
        (
            "token-shift",
            states(lambda x, i: torch.cat([x[:1], x[:-1]])),
            "row i holds the state of token i - 1",
        ),
        ("chunk-order", states(lambda x, i: x[:, [1, 0, 2, 3]]), "chunk 0: depth 4 (exact"),
        (
            "target-quantized-or-rotated",
            states(lambda x, i: x.float() @ torch.linalg.qr(torch.randn(128, 128, generator=seed()))[0]),
            "in another basis",
        ),
        ("target-quantized-or-rotated", states(lambda x, i: x * 4), "times 4"),
    ],
)
def test_what_was_done_to_the_dump_is_named(given, slug, change, says, tmp_path):
    found = judged(given, spoiled(tmp_path / "d", change))
    assert failed(found) == [slug] and found[slug].title == find(slug).title
    assert any(says in line for line in found[slug].evidence), found[slug].evidence


def seed():
    return torch.Generator().manual_seed(1)


def test_numbers_that_are_not_finite_or_saturated(given, tmp_path):
    def infinite(x, i):
        x = x.clone()
        x[7, 1, 3] = float("inf")
        return x

    found = judged(given, spoiled(tmp_path / "inf", states(infinite)))
    assert (
        failed(found) == ["features-overflow"]
        and "1 non-finite values" in found["features-overflow"].evidence[0]
    )

    def half(held, i):
        x = held["hidden_states"].half()
        x[3, 0, 0] = 65504
        return held | {"hidden_states": x}

    found = judged(given, spoiled(tmp_path / "half", half))
    assert failed(found) == ["features-overflow"]
    assert "4 numbers stand at the largest that float16 can hold" in found["features-overflow"].evidence


def test_a_normed_teacher_and_depths_beside_the_configs(given, texts, tmp_path):
    def rows(depths, last):
        def change(held, i):
            chunks = [texts[i].stream(d) for d in depths] + [last(texts[i])]
            return held | {"hidden_states": torch.from_numpy(np.stack(chunks, axis=1)).to(torch.bfloat16)}

        return change

    found = judged(given, spoiled(tmp_path / "norm", rows((2, 4, 5), lambda t: t.final)))
    assert (
        failed(found) == ["teacher-norm"]
        and found["teacher-norm"].evidence[-1] == "the norm is applied twice"
    )
    found = judged(given, spoiled(tmp_path / "plus", rows((3, 5, 6), lambda t: t.stream(8))))
    assert failed(found) == ["stored-features-shifted"]
    # the same disagreement, but it is the config that is wrong: the drafter was trained on what is stored
    feed = replace(given.trained[0], depths=(3, 5, 6))
    found = judged(given, DATA / "features", trained=(feed, given.trained[1]))
    assert failed(found) == ["ids-plus-one"]
    assert found["ids-plus-one"].evidence[-1].startswith("so it was trained on the stored depths")


def test_texts_that_the_server_was_sent_are_compared_with_its_own_states(given, texts):
    """Its re-prefill is at hand, so the target is not run here."""
    again = {f"eaglelab-x-stored-{i}": text for i, text in enumerate(texts)}
    found = judged(given, DATA / "features", capture=SimpleNamespace(reprefill=again, requests={}))
    lines = found["stored-features-shifted"].evidence
    assert found["stored-features-shifted"].verdict == "passed"
    assert "compared with the server's re-prefill of the same texts" in lines
    other = {rid: replace(text, token_ids=text.token_ids[::-1]) for rid, text in again.items()}
    found = judged(given, DATA / "features", capture=SimpleNamespace(reprefill=other, requests={}))
    assert "compared with the target run here with transformers, in float32" in (
        found["stored-features-shifted"].evidence
    )


def test_a_norm_whose_weight_is_stored_less_one(given, texts):
    target = open_target(DATA / "target")
    weight = target.tensors["norm.weight"]
    less = hold(weight.name_in_file, replace(weight, dtype="float32"), weight_of(weight) - 1)
    target = replace(target, tensors={**target.tensors, "norm.weight": less})
    assert judged(given, DATA / "features", target=target)["teacher-norm"].verdict == "passed"
    from eaglelab.audit import Audit, _last

    rows = np.stack([texts[0].final] * 2, axis=1)
    sample = SimpleNamespace(
        states=rows, dtype="float32", length=len(rows), token_ids=np.array(texts[0].token_ids)
    )
    found = Audit(samples=[sample])
    _last(found, target)
    assert found.last == "after the final norm"


def weight_of(info):
    return info.torch(torch.float32).numpy()


def test_the_state_before_the_norm_where_its_format_promises_the_one_after(given, monkeypatch):
    monkeypatch.setattr(data, "_altered", lambda _: False)
    evidence = replace(given)
    evidence.data = audit(StoredFeatures.open(DATA / "features"), evidence)
    evidence.data.declared_last = "after the final norm"
    found = data.teacher(evidence.data)
    assert found.verdict == "failed" and found.evidence[-1] == "the norm is never applied"
    evidence.data.declared_last = "unknown"
    assert data.teacher(evidence.data).verdict == "passed"


def test_another_target_and_a_slightly_other_one(given, tmp_path):
    def tuned(noise):
        folder = tmp_path / str(noise)
        shutil.copytree(DATA / "target", folder)
        held = st.load_file(folder / "model.safetensors")
        for name, tensor in held.items():
            if tensor.ndim == 2:
                extra = torch.randn(tensor.shape, generator=seed()) * tensor.float().std() * noise
                held[name] = (tensor.float() + extra).to(tensor.dtype)
        st.save_file(held, folder / "model.safetensors", {"format": "pt"})
        return open_target(folder)

    assert failed(judged(given, DATA / "features", target=tuned(0.5))) == ["target-not-the-trained-one"]
    found = judged(given, DATA / "features", target=tuned(0.03))
    assert failed(found) == []
    assert any("a light fine-tune" in line for line in found["stored-features-shifted"].evidence)
    other = tuned(0.4)
    other.config["quantization_config"] = {"quant_method": "fp8"}
    assert failed(judged(given, DATA / "features", target=other)) == ["target-quantized-or-rotated"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m & False, "4 of 4 samples train on no token at all"),
        (lambda m: ~m, "the prompt is trained on and the target's own answer is left out"),
        (lambda m: np.roll(m, -1) | (np.arange(len(m)) == 191), "the mask begins a token early"),
    ],
)
def test_masks_that_cover_something_else(given, change, says, tmp_path):
    found = judged(given, masked(tmp_path / "d", change))
    assert failed(found) == ["loss-mask"] and found["loss-mask"].evidence[0].startswith(says)


def test_training_on_every_token_of_plain_text_is_nobodys_fault(given, tmp_path):
    assert failed(judged(given, masked(tmp_path / "d", lambda m: m | True))) == []


def test_without_a_target_that_can_be_run_the_reason_is_said(given, tmp_path):
    small = tmp_path / "target"
    small.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DATA / "target" / name, small / name)
    held = st.load_file(DATA / "target" / "model.safetensors")
    three = {
        n: t
        for n, t in held.items()
        if n.endswith(("embed_tokens.weight", "model.norm.weight", "lm_head.weight"))
    }
    st.save_file(three, small / "model.safetensors", {"format": "pt"})
    found = judged(given, DATA / "features", target=open_target(small))
    assert found["stored-features-shifted"].verdict == "skipped"
    assert "the target's file lacks" in found["stored-features-shifted"].evidence[0]
    assert found["teacher-norm"].verdict == "passed", "three tensors are enough for it"
    with pytest.raises(BadInput, match="GB of weights are too many to run here"):
        run_target(DATA / "target", [[1, 2]], largest=1000)
    with pytest.raises(BadInput, match="no weights of the target lie here"):
        run_target(tmp_path, [[1, 2]])


def test_diagnose_finds_it_in_files_alone(tmp_path):
    folder = spoiled(tmp_path / "d", lambda held, i: held | {"hidden_states": held["hidden_states"][64:]})
    files = {"drafter": DATA / "drafter-speculators", "target": DATA / "target"}
    found = diagnose.run(**files, features=folder, launch=CHAIN)
    assert (found.verdict, found.fault) == ("broken", "dump-truncated")
