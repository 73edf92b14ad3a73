"""Stored features: read as the trainer reads them, and refused with file and field when they do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from eaglelab.accumulate import to_bf16
from eaglelab.errors import BadInput
from eaglelab.features import StoredFeatures, count_nonfinite

S, K, H = 7, 3, 4


def states(seed, rows=S, layers=K + 1):
    return np.random.default_rng(seed).standard_normal((rows, layers, H)).astype(np.float32)


def tokens(seed, rows=S):
    return np.arange(rows, dtype=np.int64) + 10 * seed


def write_bf16(path, token_ids, bits, **more):
    """safetensors by hand, because numpy has no bfloat16."""
    parts = [("token_ids", "I64", token_ids), ("hidden_states", "BF16", bits)]
    parts += [(name, "F32", array) for name, array in more.items()]
    header, body = {}, b""
    for name, kind, array in parts:
        header[name] = {
            "dtype": kind,
            "shape": array.shape,
            "data_offsets": [len(body), len(body) + array.nbytes],
        }
        body += array.tobytes()
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


@pytest.fixture
def folder(tmp_path):
    """Rows 0, 2 and 10 stored, lengths 7, 9 and 7; no dataset."""
    (tmp_path / "hidden_states").mkdir()
    for i, rows in ((0, S), (2, S + 2), (10, S)):
        write_bf16(hs(tmp_path, i), tokens(i, rows), to_bf16(states(i, rows)))
    return tmp_path


def hs(folder, i):
    return folder / "hidden_states" / f"hs_{i}.safetensors"


def with_dataset(folder, rows=11, **columns):
    datasets = pytest.importorskip("datasets")
    lengths = [S + 2 if i == 2 else S for i in range(rows)]
    data = {
        "input_ids": [tokens(i, n).tolist() for i, n in enumerate(lengths)],
        "loss_mask": [[0] * 3 + [1] * (n - 3) for n in lengths],
        "seq_len": lengths,
    } | columns
    datasets.Dataset.from_dict(data).with_format("torch").save_to_disk(folder)
    return folder


def test_samples_in_row_order_as_stored(folder):
    stored = StoredFeatures.open(folder, depths=[2, 4, 5], hidden_size=H, vocab_size=200)
    assert [s.index for s in stored.samples] == [0, 2, 10]
    assert (stored.layout, stored.dtype, stored.chunks, stored.hidden_size) == (
        "speculators >= 0.5",
        "bfloat16",
        3,
        4,
    )
    assert stored.tokens == 7 + 9 + 7
    assert stored.names == ["depth 2", "depth 4", "depth 5", "last, before the final norm"]
    sample, bits = stored.samples[1], to_bf16(states(2, 9))
    assert sample.length == 9 and sample.token_ids.tolist() == list(range(20, 29))
    np.testing.assert_array_equal(sample.states, bits)
    np.testing.assert_array_equal(sample.hidden, bits[:, :3])
    np.testing.assert_array_equal(sample.last, bits[:, 3])
    assert sample.features.shape == (9, 12)
    np.testing.assert_array_equal(sample.features[4, 4:8], bits[4, 1])
    assert list(stored.problems()) == []


def test_as_the_trainer_itself_reads_it(folder):
    """speculators' own dataset class on the same folder: the same rows, and its width k * H."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("speculators")
    from speculators.train.data import ArrowDataset

    with_dataset(folder)
    theirs = ArrowDataset(max_len=64, datapath=folder, on_missing="raise")
    stored = StoredFeatures.open(folder)
    assert stored.no_loss_mask is None
    for sample in stored.samples:
        item = theirs[sample.index]
        for mine, name in ((sample.features, "hidden_states"), (sample.last, "verifier_last_hidden_states")):
            bits = item[name].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            np.testing.assert_array_equal(mine, bits)
        assert item["input_ids"].tolist() == sample.token_ids.tolist()
        assert item["loss_mask"].tolist() == sample.loss_mask.astype(int).tolist()


def test_the_dataset_gives_the_loss_mask(folder):
    stored = StoredFeatures.open(with_dataset(folder) / "hidden_states")  # either folder will do
    assert stored.samples[1].loss_mask.tolist() == [False] * 3 + [True] * 6
    assert stored.samples[1].loss_mask.dtype == bool


def test_without_a_dataset_or_pyarrow_the_reason_is_kept(folder, monkeypatch):
    stored = StoredFeatures.open(folder)
    assert stored.samples[0].loss_mask is None and "no arrow dataset" in stored.no_loss_mask
    with_dataset(folder)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    stored = StoredFeatures.open(folder)
    assert stored.samples[0].loss_mask is None and "pyarrow is not installed" in stored.no_loss_mask


def test_other_dtypes(tmp_path):
    for dtype in (np.float32, np.float16):
        save_file(
            {"token_ids": tokens(1), "hidden_states": states(1).astype(dtype)}, tmp_path / "hs_1.safetensors"
        )
        stored = StoredFeatures.open(tmp_path)
        assert stored.dtype == np.dtype(dtype).name
        np.testing.assert_array_equal(stored.samples[0].hidden, states(1).astype(dtype)[:, :3])


def test_names_the_trainer_does_not_read_are_listed(folder):
    (folder / "hidden_states" / "hs_x.safetensors").write_bytes(b"")
    (folder / "hidden_states" / "hs_0.safetensors.lock").write_bytes(b"")
    assert StoredFeatures.open(folder).ignored == ["hs_x.safetensors"]


def test_opening_reads_headers_only(folder, monkeypatch):
    monkeypatch.setattr(np, "memmap", None)
    monkeypatch.setattr(np, "fromfile", None)
    assert StoredFeatures.open(folder).tokens == 23


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: write_bf16(hs(f, 2), tokens(2, 6), to_bf16(states(2))), "hs_2.*7 rows for 6 token_ids"),
        (lambda f: write_bf16(hs(f, 2), tokens(2, 0), to_bf16(states(2, 0))), "hs_2.*0 rows"),
        (
            lambda f: write_bf16(hs(f, 2), tokens(2), to_bf16(states(2, S, 3))),
            r"hs_2.*\[S, 3, 4\], but .*\[S, 4, 4\]",
        ),
        (lambda f: write_bf16(hs(f, 2), tokens(2), to_bf16(states(2)[:, 0])), r"hs_2.*shape \[7, 4\]"),
        (lambda f: write_bf16(hs(f, 2), tokens(2), to_bf16(states(2, S, 1))), r"hs_2.*\[S, k \+ 1, H\]"),
        (
            lambda f: write_bf16(hs(f, 2), tokens(2)[:, None], to_bf16(states(2))),
            r"hs_2.*token_ids is int64 \[7, 1\]",
        ),
        (lambda f: save_file({"token_ids": tokens(2)}, hs(f, 2)), "hs_2.*'hidden_states' is missing"),
        (lambda f: save_file({"hidden_states": states(2)}, hs(f, 2)), "hs_2.*'token_ids' is missing"),
        (
            lambda f: save_file({"token_ids": tokens(2), "hidden_states": states(2)}, hs(f, 2)),
            "hs_2.*float32.*bfloat16",
        ),
        (
            lambda f: save_file(
                {"token_ids": tokens(2), "hidden_states": states(2).astype(np.int8)}, hs(f, 2)
            ),
            "hs_2.*hidden_states is int8",
        ),
        (
            lambda f: write_bf16(
                hs(f, 2), tokens(2), to_bf16(states(2)), hidden_states_scales=np.ones(7, np.float32)
            ),
            "hs_2.*FP8",
        ),
        (lambda f: hs(f, 2).write_bytes(hs(f, 2).read_bytes()[:-5]), "hs_2.*truncated"),
        (lambda f: hs(f, 2).write_bytes(b"not safetensors at all"), "hs_2"),
    ],
)
def test_a_file_that_does_not_fit_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(BadInput, match=message):
        StoredFeatures.open(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": [2, 4]}, r"holds 4 layers; .*depths \[2, 4\] needs 3"),
        ({"depths": [2, 4, 5, 8]}, r"holds 4 layers; .* needs 5"),
        ({"hidden_size": 128}, "is 4 wide, the target's hidden size is 128"),
    ],
)
def test_features_of_another_drafter(folder, options, message):
    with pytest.raises(BadInput, match=message):
        StoredFeatures.open(folder, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_that_are_not_finite(tmp_path, bad, dtype):
    x = states(1, rows=600)
    x[0, 0, 0], x[1, 0, 0] = 0.0, 6e4 if dtype == "float16" else 3e38  # close to the largest finite value
    fine = to_bf16(x) if dtype == "bfloat16" else x.astype(dtype)
    assert count_nonfinite(fine, dtype) == 0
    x[599, 2, 1] = bad
    path = tmp_path / "hs_1.safetensors"
    if dtype == "bfloat16":
        write_bf16(path, tokens(1, 600), to_bf16(x))
    else:
        save_file({"token_ids": tokens(1, 600), "hidden_states": x.astype(dtype)}, path)
    stored = StoredFeatures.open(tmp_path)
    for read in ("hidden", "last", "features"):
        with pytest.raises(BadInput, match="hs_1.*hidden_states: 1 non-finite values from row 512 on"):
            getattr(stored.samples[0], read)
    assert stored.samples[0].states.shape == (600, 4, 4)  # statistics may still look
    assert len(list(stored.problems())) == 1


def test_token_ids_outside_the_vocabulary(folder):
    assert StoredFeatures.open(folder, vocab_size=107).samples[2].token_ids[-1] == 106
    stored = StoredFeatures.open(folder, vocab_size=106)
    assert stored.samples[1].token_ids[0] == 20
    with pytest.raises(BadInput, match="hs_10.*token_ids go from 100 to 106, the vocabulary has 106"):
        _ = stored.samples[2].token_ids
    write_bf16(hs(folder, 0), tokens(0) - 1, to_bf16(states(0)))
    with pytest.raises(BadInput, match="hs_0.*from -1"):
        _ = StoredFeatures.open(folder).samples[0].token_ids


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: with_dataset(f, rows=2), "the dataset has 2 rows, but there is a hs_2"),
        (lambda f: with_dataset(f, input_ids=[[1] * S] * 11), "hs_0.*are not input_ids of row 0"),
        (lambda f: with_dataset(f, loss_mask=[[1]] * 11), "row 0: loss_mask is not as long"),
    ],
)
def test_a_dataset_of_something_else_is_a_problem(folder, make, message):
    assert any(__import__("re").search(message, p) for p in StoredFeatures.open(make(folder)).problems())


def test_a_broken_dataset(folder):
    with_dataset(folder)
    next(folder.glob("*.arrow")).write_bytes(b"gone")
    with pytest.raises(BadInput, match="arrow dataset cannot be read"):
        StoredFeatures.open(folder)
    (folder / "state.json").write_text("{}")
    with pytest.raises(BadInput, match="arrow dataset cannot be read"):
        StoredFeatures.open(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(BadInput, match="state.json"):
        StoredFeatures.open(folder)


def test_what_is_no_folder_of_features(tmp_path):
    with pytest.raises(BadInput, match="no such folder"):
        StoredFeatures.open(tmp_path / "absent")
    with pytest.raises(BadInput, match="holds no stored features"):
        StoredFeatures.open(tmp_path)
    (tmp_path / "hs_x.safetensors").write_bytes(b"")
    with pytest.raises(BadInput, match="hs_<row>.safetensors; found hs_x"):
        StoredFeatures.open(tmp_path)


@pytest.mark.parametrize("name", ["data_0.pt", "rows_0-100/data_3.ckpt", "rows_0-100/data_3.ckpt.gz"])
def test_older_pickled_formats_are_refused_unopened(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(BadInput, match=r"data_.*pickled by torch.save.*--allow-pickle"):
        StoredFeatures.open(tmp_path)
