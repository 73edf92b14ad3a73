"""What each live parameter must hold, against shards cut here by hand from the files."""

import hashlib

import pytest
import torch
from drafters import SGLANG, TARGET, edited
from safetensors.torch import load_file

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.launch import Launch
from eaglelab.live import Layout, checksum, compare, expected_parameters, shard

FILE, THEIRS = load_file(SGLANG / "model.safetensors"), load_file(TARGET / "model.safetensors")
BLOCK = "midlayer."


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def of(algorithm="EAGLE3", tp_size=1, rank=0, **launch):
    drafter, target = open_checkpoint(SGLANG), open_target(TARGET)
    made = Launch(algorithm=algorithm, target=target.facts, tp_size=tp_size, **launch)
    return expected_parameters(drafter, target, made, rank)


def by_hand(tp: int, rank: int, kv_rank: int) -> dict[str, torch.Tensor]:
    """Heads of 16 rows: 8 query heads, 2 key and value heads."""
    q, k, v = (FILE[f"{BLOCK}self_attn.{p}_proj.weight"].view(-1, 16, 256) for p in "qkv")
    heads, inner = 8 // tp, 384 // tp
    kv = 2 // min(tp, 2)
    gate, up = (FILE[f"{BLOCK}mlp.{p}_proj.weight"] for p in ("gate", "up"))
    return {
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat(
            [q[rank * heads : (rank + 1) * heads], k[kv_rank * kv :][:kv], v[kv_rank * kv :][:kv]]
        ).view(-1, 256),
        "model.layers.0.self_attn.o_proj.weight": FILE[f"{BLOCK}self_attn.o_proj.weight"][
            :, rank * 128 // tp :
        ][:, : 128 // tp],
        "model.layers.0.mlp.gate_up_proj.weight": torch.cat(
            [gate[rank * inner :][:inner], up[rank * inner :][:inner]]
        ),
        "model.layers.0.mlp.down_proj.weight": FILE[f"{BLOCK}mlp.down_proj.weight"][:, rank * inner :][
            :, :inner
        ],
        "model.fc.weight": FILE["fc.weight"],
        "model.norm.weight": FILE["norm.weight"],
        "model.embed_tokens.weight": THEIRS["model.embed_tokens.weight"][rank * 1024 // tp :][: 1024 // tp],
        "lm_head.weight": FILE["lm_head.weight"][rank * 640 // tp :][: 640 // tp],
    }


@pytest.mark.parametrize(
    ("tp", "rank", "kv_rank"), [(1, 0, 0), (2, 0, 0), (2, 1, 1), (8, 0, 0), (8, 3, 0), (8, 4, 1), (8, 7, 1)]
)
def test_shards_by_rank(tp, rank, kv_rank):
    found = of(tp_size=tp, rank=rank)
    for name, tensor in by_hand(tp, rank, kv_rank).items():
        assert (found[name].shape, found[name].checksum) == (tuple(tensor.shape), sha(tensor)), name


def test_on_a_cpu_heads_and_mlp_are_padded_until_they_divide():
    """2 key and value heads on 8 ranks become 8, 8 query heads 32; an MLP of 384 becomes 512: zeros at the
    end.
    """
    q, k, v = (FILE[f"{BLOCK}self_attn.{p}_proj.weight"] for p in "qkv")
    gate, up = (FILE[f"{BLOCK}mlp.{p}_proj.weight"] for p in ("gate", "up"))
    out, down = FILE[f"{BLOCK}self_attn.o_proj.weight"], FILE[f"{BLOCK}mlp.down_proj.weight"]
    zeros = torch.zeros(64, 256, dtype=torch.bfloat16)
    for rank in range(8):
        found = of(tp_size=8, rank=rank, flags=(("--device", "cpu"),))
        real = rank < 2
        qkv = [q[64 * rank :][:64], k[16 * rank :][:16], v[16 * rank :][:16]] if real else [zeros, zeros[:32]]
        assert found["model.layers.0.self_attn.qkv_proj.weight"].checksum == sha(torch.cat(qkv))
        mixed = out[:, 64 * rank :][:, :64] if real else torch.zeros(128, 64, dtype=torch.bfloat16)
        assert found["model.layers.0.self_attn.o_proj.weight"].checksum == sha(mixed)
        real = rank < 6
        inner = [gate[64 * rank :][:64], up[64 * rank :][:64]] if real else [zeros[:, :128], zeros[:, :128]]
        assert found["model.layers.0.mlp.gate_up_proj.weight"].checksum == sha(torch.cat(inner))
        mixed = down[:, 64 * rank :][:, :64] if real else torch.zeros(128, 64, dtype=torch.bfloat16)
        assert found["model.layers.0.mlp.down_proj.weight"].checksum == sha(mixed)


def test_the_cast_comes_before_the_checksum():
    assert of(dtype="float32")["model.fc.weight"].checksum == sha(FILE["fc.weight"].float())
    assert of(dtype="float16")["model.fc.weight"].checksum == sha(FILE["fc.weight"].half())
    assert of()["model.fc.weight"].dtype == "bfloat16"


def test_under_eagle_the_head_is_the_targets_and_the_map_is_not_applied():
    right, wrong = of(), of("EAGLE")
    assert wrong["lm_head.weight"].source.kind == "target" and wrong["lm_head.weight"].shape == (1024, 128)
    assert wrong["lm_head.weight"].checksum == sha(THEIRS["lm_head.weight"])
    assert right["lm_head.weight"].checksum == sha(FILE["lm_head.weight"])
    hot = sha(FILE["d2t"] + torch.arange(640))
    assert right["model.hot_token_id"].checksum == right["worker.hot_token_id"].checksum == hot
    assert "worker.hot_token_id" not in wrong and wrong["model.hot_token_id"].checksum == hot


@pytest.mark.parametrize(
    ("rows", "tp", "sizes"),
    [(100, 1, [128]), (100, 2, [64, 64]), (100, 8, [16] * 8), (1000, 8, [128] * 8), (100, 3, [64] * 3)],
)
def test_vocabulary_shards_are_padded_with_zeros(rows, tp, sizes):
    """100 rows are padded to 128; for 3 ranks, which do not divide 128, to 192: a multiple of 64 x 3."""
    table = torch.arange(rows * 2).reshape(rows, 2) + 1
    layout = Layout(tp, 8, 2, 16, 384)
    parts = [shard("lm_head.weight", [table], "vocab", layout, rank) for rank in range(tp)]
    assert [len(p) for p in parts] == sizes
    whole = torch.cat(parts)
    assert torch.equal(whole[:rows], table) and not whole[rows:].any()


def live(expected) -> list[dict]:
    """What a probe would record if everything loaded."""
    return [
        {
            "name": e.name,
            "shape": list(e.shape),
            "dtype": e.dtype,
            "checksum": e.checksum,
            "shared_with_target": e.source.kind == "target",
        }
        for e in expected.values()
    ]


def test_all_equal_strikes_the_hypothesis_out():
    drafter, target = open_checkpoint(SGLANG), open_target(TARGET)
    for algorithm, tp, rank in (("EAGLE3", 1, 0), ("EAGLE", 1, 0), ("EAGLE3", 8, 5)):
        launch = Launch(algorithm=algorithm, target=target.facts, tp_size=tp)
        seen = live(expected_parameters(drafter, target, launch, rank))
        found = compare(seen, drafter, target, launch, rank)
        assert len(found) == len(seen) and all(m.equal for m in found)
    qkv = next(m for m in found if "qkv" in m.param)
    assert qkv.sources == tuple(f"layers.0.self_attn.{p}_proj.weight" for p in "qkv")
    assert "equals the file's layers.0.self_attn.q_proj.weight, " in qkv.why and "in bfloat16" in qkv.why


def test_the_live_dtype_is_believed():
    drafter, target = open_checkpoint(SGLANG), open_target(TARGET)
    seen = live(of(dtype="float32"))
    assert all(m.equal for m in compare(seen, drafter, target, Launch(target=target.facts)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"checksum": "0" * 64}, "differs from the file's norm.weight in bfloat16"),
        ({"shape": [64]}, "has shape [64], expected [128]"),
        (None, "the server has no such parameter"),
    ],
)
def test_one_parameter_that_is_not_as_it_must_be(change, why):
    drafter, target = open_checkpoint(SGLANG), open_target(TARGET)
    seen = live(of())
    seen = [
        p | (change or {}) if p["name"] == "model.norm.weight" else p
        for p in seen
        if change or p["name"] != "model.norm.weight"
    ]
    bad = [m for m in compare(seen, drafter, target, Launch(target=target.facts)) if not m.equal]
    assert [(m.param, m.equal, m.why) for m in bad] == [("model.norm.weight", False, why)]


def test_target_tensors_that_are_copies_or_not_at_hand():
    drafter, target = open_checkpoint(SGLANG), open_target(TARGET)
    launch, seen = Launch(target=target.facts), live(of())
    copies = [p | {"shared_with_target": False} for p in seen]
    assert [m.param for m in compare(copies, drafter, target, launch) if m.equal is False] == [
        "model.embed_tokens.weight"
    ]
    unknown = [m for m in compare(seen, drafter, None, launch) if m.equal is not True]
    assert [(m.param, m.equal) for m in unknown] == [("model.embed_tokens.weight", None)]
    assert "give --target" in unknown[0].why


def test_what_nothing_filled_and_what_is_not_modelled(tmp_path):
    drafter, target = open_checkpoint(edited(tmp_path / "d", drop=["lm_head"])), open_target(TARGET)
    launch = Launch(target=target.facts)
    found = {m.param: m for m in compare(live(of()), drafter, target, launch)}
    assert (found["lm_head.weight"].equal, found["lm_head.weight"].why) == (
        False,
        "the file has no lm_head.weight: nothing filled it",
    )
    quantised = launch.with_flags("--quantization fp8")
    assert {
        m.equal
        for m in compare(live(of()), open_checkpoint(SGLANG), target, quantised)
        if "hot" not in m.param
    } == {None}
    extra = [
        {
            "name": "model.layers.9.x",
            "shape": [1],
            "dtype": "float32",
            "checksum": "",
            "shared_with_target": False,
        }
    ]
    assert compare(live(of()) + extra, open_checkpoint(SGLANG), target, launch)[-1].equal is None


def test_tied_head_is_the_embedding(tmp_path):
    drafter, target = (
        open_checkpoint(edited(tmp_path / "d", config={"tie_word_embeddings": True})),
        open_target(TARGET),
    )
    launch = Launch(target=target.facts)
    expected = expected_parameters(drafter, target, launch)
    assert expected["lm_head.weight"].checksum == sha(THEIRS["model.embed_tokens.weight"])
    seen = [p for p in live(expected) if p["name"] != "lm_head.weight"]  # one parameter, two names
    assert all(m.equal for m in compare(seen, drafter, target, launch))


def test_checksum_is_the_probes():
    from eaglelab.probe.parameters import checksum as probes

    for tensor in (torch.randn(3, 5).bfloat16(), torch.randn(4, 4).T, torch.arange(7)):
        assert checksum(tensor) == probes(tensor)
