"""Each trainer's stored features, written as its own source writes them, and files that are hostile."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from eaglelab.errors import BadInput
from eaglelab.features import StoredFeatures

torch = pytest.importorskip("torch")
S, K, H = 7, 3, 4
IDS = torch.arange(S)
MASK = torch.tensor([0, 0, 0, 1, 1, 1, 1])


def layers(i=0):
    """k + 1 tensors [S, H] in bf16, the last one the verifier's."""
    draw = torch.Generator().manual_seed(i)
    return [torch.randn(S, H, generator=draw).to(torch.bfloat16) for _ in range(K + 1)]


def old_speculators(folder):
    """v0.4.0 scripts/data_generation_offline.py: a list of layers; data_config.json and lengths beside it."""
    for i in (0, 2, 10):
        torch.save(
            {"input_ids": IDS + i, "hidden_states": layers(i), "loss_mask": MASK}, folder / f"data_{i}.pt"
        )
    (folder / "data_config.json").write_text(json.dumps({"version": "2.0"}))
    (folder / "sample_lengths.json").write_text(json.dumps({str(i): S for i in (0, 2, 10)}))
    torch.save({1: 3, 2: 5}, folder / "token_freq.pt")
    return "speculators <= 0.4", "before the final norm"


def specforge(folder, compress=False):
    """scripts/prepare_hidden_states.py: rows_*/data_*.ckpt, batched states, gzip on request."""
    for i in (0, 2, 10):
        parts = layers(i)
        record = {
            "input_ids": IDS + i,
            "loss_mask": MASK,
            "hidden_state": parts[-1][None],
            "aux_hidden_state": torch.cat(parts[:-1], dim=-1)[None],
        }
        group = folder / f"rows_{i // 5 * 5}-{i // 5 * 5 + 5}"
        group.mkdir(exist_ok=True)
        if compress:
            with gzip.open(group / f"data_{i}.ckpt.gz", "wb", compresslevel=6) as file:
                torch.save(record, file)
        else:
            torch.save(record, group / f"data_{i}.ckpt")
    torch.save({"d2t": IDS, "t2d": IDS > 1}, folder / "vocab_mapping.pt")
    return "SpecForge", "after the final norm"


def specforge_gz(folder):
    return specforge(folder, compress=True)


def model_optimizer(folder, **more):
    """compute_hidden_states_hf.py: <conversation>.pt."""
    for i in (0, 2, 10):
        parts = layers(i)
        with open(folder / f"conversation-{i}.pt", "wb") as file:
            record = {
                "input_ids": IDS + i,
                "hidden_states": parts[-1],
                "aux_hidden_states": torch.cat(parts[:-1], dim=-1),
                "loss_mask": MASK,
                "conversation_id": f"conversation-{i}",
            }
            torch.save(record | more, file)
    return "Model-Optimizer", "after the final norm"


def model_optimizer_before(folder):
    model_optimizer(folder, hidden_states_prenorm=True)
    return "Model-Optimizer", "before the final norm"


def angelslim(folder):
    """tools/generate_hidden_for_draft_model.py: everything with a batch of one."""
    (folder / "rows_0-1000").mkdir()
    for i in (0, 2, 10):
        parts = layers(i)
        point = {
            "input_ids": (IDS + i)[None],
            "loss_mask": MASK[None],
            "hidden_states": torch.cat(parts[:-1], dim=-1)[None],
            "target_hiddens": parts[-1][None],
            "position_ids": torch.arange(S)[None],
        }
        torch.save(point, folder / "rows_0-1000" / f"data_{i}.ckpt")
    return "AngelSlim", "after the final norm"


WRITERS = (old_speculators, specforge, specforge_gz, model_optimizer, model_optimizer_before, angelslim)


@pytest.mark.parametrize("write", WRITERS)
def test_as_its_trainer_writes_it(write, tmp_path):
    layout, last_is = write(tmp_path)
    with pytest.raises(BadInput, match="pickled by torch.save.*--allow-pickle.*weights_only=True"):
        StoredFeatures.open(tmp_path)
    stored = StoredFeatures.open(tmp_path, depths=[2, 4, 5], hidden_size=H, allow_pickle=True)
    assert (stored.layout, stored.last_is, stored.dtype, stored.chunks) == (layout, last_is, "bfloat16", K)
    assert stored.names[-1] == f"last, {last_is}" and stored.tokens == 3 * S
    numbers = [0, 1, 2] if layout == "Model-Optimizer" else [0, 2, 10]
    assert [s.index for s in stored.samples] == numbers
    for sample, i in zip(stored.samples, (0, 2, 10), strict=True):
        assert sample.token_ids.tolist() == (IDS + i).tolist()
        assert sample.loss_mask.tolist() == MASK.bool().tolist()
        bits = torch.stack(layers(i), dim=1).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(sample.states, bits)
        np.testing.assert_array_equal(sample.features, bits[:, :K].reshape(S, -1))
        np.testing.assert_array_equal(sample.last, bits[:, K])
    assert list(stored.problems()) == []


def test_vllms_connector_by_any_file_name(tmp_path):
    st = pytest.importorskip("safetensors.torch")
    for i, name in enumerate(("cmpl-b2", "cmpl-a7")):
        held = {"hidden_states": torch.stack(layers(i), dim=1), "token_ids": IDS + i}
        st.save_file(held, tmp_path / f"{name}.safetensors")
    stored = StoredFeatures.open(tmp_path)
    assert (stored.layout, stored.last_is) == ("vLLM hidden-state connector", "unknown")
    assert [s.path.stem for s in stored.samples] == ["cmpl-a7", "cmpl-b2"]
    assert stored.samples[0].token_ids.tolist() == (IDS + 1).tolist()
    assert stored.samples[0].loss_mask is None and "stores no loss mask" in stored.no_loss_mask
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="holds no stored features"):
        StoredFeatures.open(tmp_path)  # a model's folder


def test_no_mask_and_samples_that_are_cut(tmp_path):
    def record(ids, mask):
        parts = layers()
        both = {"input_ids": ids, "hidden_states": parts[-1], "aux_hidden_states": torch.cat(parts[:-1], -1)}
        return both | ({"loss_mask": mask} if mask is not None else {})

    torch.save(record(IDS, None), tmp_path / "a.pt")
    torch.save(record(torch.arange(S + 2), None), tmp_path / "b.pt")
    with pytest.raises(BadInput, match="b.pt: 7 rows of states for 9 input_ids"):
        StoredFeatures.open(tmp_path, allow_pickle=True)
    stored = StoredFeatures.open(tmp_path, allow_pickle=True, strict=False)
    assert len(stored.samples) == 1 and "7 rows of states for 9 input_ids" in stored.truncated[0]
    assert stored.samples[0].loss_mask is None and "holds no loss_mask" in stored.no_loss_mask


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def evil(path):
    torch.save({"input_ids": IDS, "hidden_states": Evil()}, path)


def claims_more(path):
    wide = torch.zeros(1, 1, dtype=torch.bfloat16).expand(1 << 20, 1 << 20)
    torch.save({"input_ids": torch.arange(1 << 20), "hidden_states": [wide] * 4, "loss_mask": MASK}, path)


def record(**changes):
    return lambda path: torch.save(
        {"input_ids": IDS, "hidden_states": layers(), "loss_mask": MASK} | changes, path
    )


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (evil, "not a file of tensors that torch.save wrote"),
        (claims_more, r"claims shape \[1048576, 1048576\], which the file does not hold"),
        (lambda p: p.write_bytes(b""), "not a file of tensors"),
        (lambda p: p.write_bytes(b"PK\x03\x04 no zip"), "not a file of tensors"),
        (lambda p: p.write_bytes(pickle.dumps({"input_ids": Evil()})), "not a file of tensors"),
        (lambda p: torch.save([1, 2], p), "holds a list, expected a dict"),
        (
            lambda p: torch.save({"input_ids": IDS}, p),
            r"holds \['input_ids'\]; expected input_ids and the hidden",
        ),
        (record(hidden_states=torch.zeros(S, H)), "'hidden_states' is a Tensor, expected a list"),
        (record(hidden_states=[torch.zeros(S, H), torch.zeros(S, H + 1)]), r"holds widths \[4, 5\]"),
        (record(hidden_states=[torch.zeros(S, H), torch.zeros(S + 1, H)]), "chunks and last state differ"),
        (record(hidden_states=[torch.zeros(S, H).to_sparse()] * 2), "expected a dense tensor"),
        (record(hidden_states=[torch.zeros(S, H, dtype=torch.float64)] * 2), "hidden states are float64"),
        (record(input_ids=torch.zeros(S)), "'input_ids' is torch.float32"),
        (record(aux_hidden_states=torch.zeros(S, H + 1), hidden_states=torch.zeros(S, H)), "no multiple of"),
    ],
)
def test_hostile_and_damaged_files_end_in_bad_input(write, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "d"
    folder.mkdir()
    write(folder / "data_0.pt")
    with pytest.raises(BadInput, match=says):
        StoredFeatures.open(folder, allow_pickle=True)
    assert not Path("pwned").exists()


def test_a_compressed_file_that_grows_without_end_and_one_that_is_none(tmp_path, monkeypatch):
    specforge_gz(tmp_path)
    monkeypatch.setattr("eaglelab.pickled.LARGEST", 100)
    with pytest.raises(BadInput, match="data_0.ckpt.gz: grows to more than"):
        StoredFeatures.open(tmp_path, allow_pickle=True)
    (tmp_path / "rows_0-5" / "data_0.ckpt.gz").write_bytes(b"no gzip")
    with pytest.raises(BadInput, match="not a file of tensors"):
        StoredFeatures.open(tmp_path, allow_pickle=True)


def test_files_of_two_trainers_are_not_mixed(tmp_path):
    old_speculators(tmp_path)
    angelslim(tmp_path)
    with pytest.raises(BadInput, match="the first file is of"):
        StoredFeatures.open(tmp_path, allow_pickle=True)


def test_a_large_folder_is_read_in_part(tmp_path, monkeypatch):
    old_speculators(tmp_path)
    monkeypatch.setattr("eaglelab.pickled.MOST_FILES", 2)
    stored = StoredFeatures.open(tmp_path, allow_pickle=True)
    assert [s.index for s in stored.samples] == [0, 2] and stored.ignored == ["data_10.pt"]


def test_diagnose_and_inspect_read_them_only_when_asked_to(tmp_path):
    """SpecForge's form of the shipped features: healthy, its teacher after the norm; refused unasked."""
    pytest.importorskip("transformers")
    from typer.testing import CliRunner

    from eaglelab import cli, diagnose
    from eaglelab.forward import run_target

    data = Path(__file__).parents[2] / "data"
    shipped = StoredFeatures.open(data / "features").samples[:3]
    runs = run_target(data / "target", [s.token_ids.tolist() for s in shipped])
    folder = tmp_path / "rows_0-2000"
    folder.mkdir()
    for i, (sample, run) in enumerate(zip(shipped, runs, strict=True)):
        aux = torch.from_numpy(np.concatenate([run.stream(d) for d in (2, 4, 5)], axis=1))
        stored = {
            "input_ids": torch.from_numpy(sample.token_ids),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64)),
            "hidden_state": torch.from_numpy(run.final)[None].to(torch.bfloat16),
            "aux_hidden_state": aux[None].to(torch.bfloat16),
        }
        torch.save(stored, folder / f"data_{i}.ckpt")
    flags = "--speculative-algorithm EAGLE3 --dtype float32"
    files = {"drafter": data / "drafter-speculators", "target": data / "target", "launch": flags}
    with pytest.raises(BadInput, match="--allow-pickle"):
        diagnose.run(**files, features=tmp_path)
    found = diagnose.run(**files, features=tmp_path, allow_pickle=True)
    assert found.failed == []
    verdicts = {f.fault: f.verdict for f in found.findings}
    assert (
        verdicts["teacher-norm"] == verdicts["stored-features-shifted"] == verdicts["loss-mask"] == "passed"
    )
    assert found.ladder.rungs["1"].accept_length > 3, "its starts are found from the normed state"
    words = ["inspect", str(tmp_path), "--json"]
    assert CliRunner().invoke(cli.app, words).exit_code == 2
    answer = CliRunner().invoke(cli.app, [*words, "--allow-pickle"])
    assert answer.exit_code == 0 and json.loads(answer.stdout)["format"] == "SpecForge"
