import json
import math
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters import DATA, SGLANG, SPECULATORS, TARGET, edited
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.describe import describe
from eaglelab.errors import BadInput
from eaglelab.launch import Target
from eaglelab.layer_ids import sglang_depths, sglang_ids
from eaglelab.tensorfile import read_folder, read_header, statistics, write_safetensors

LAYER = [
    "layers.0.hidden_norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.v_proj.weight",
]


def raw(path: Path, header, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "body", "length", "says"),
    [
        ({"a": entry([2], 0, 8)}, b"1234567", None, "truncated"),
        ({"a": entry([2], 0, 8)}, b"123456789", None, "longer than its header says"),
        ({"a": entry([2], 0, 8)}, b"12345678", 5000, "header of 5,000 bytes in a file of"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"1" * 12, None, "'b' overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, b"1" * 16, None, "'b' follows unclaimed bytes"),
        ({"a": entry([3], 0, 8)}, b"12345678", None, "8 bytes do not fit shape [3] of F32"),
        ({"a": entry([-2], 0, 8)}, b"12345678", None, "not understood"),
        ({"a": entry([2], 0, 8, "F99")}, b"12345678", None, "'F99'"),
        ({"a": {"dtype": "F32"}}, b"", None, "'a' is incomplete"),
        (b"\x80\x02pickle", b"", None, "header is not JSON"),
        (b"[1]", b"", None, "not a JSON object"),
    ],
)
def test_damaged_file_is_named_with_what_is_wrong(tmp_path, header, body, length, says):
    path = raw(tmp_path / "model.safetensors", header, body, length)
    with pytest.raises(BadInput) as error:
        list(read_header(path))
    assert says in str(error.value) and "model.safetensors" in str(error.value)


def test_short_and_missing_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(BadInput, match="truncated"):
        list(read_header(tmp_path / "model.safetensors"))
    with pytest.raises(BadInput, match="No such file"):
        list(read_header(tmp_path / "none.safetensors"))


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8]


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    )
)
def test_reading_and_writing_agree_with_safetensors(tmp_path_factory, shapes):
    folder = tmp_path_factory.mktemp("st")
    tensors = {
        name: torch.randint(
            0, 2 if kind is torch.bool else 256, (math.prod(shape) * kind.itemsize,), dtype=torch.uint8
        )
        .view(kind)
        .reshape(shape)
        for name, (kind, shape) in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    found = read_folder(folder)
    write_safetensors(folder / "copy.safetensors", found)
    again = load_file(folder / "copy.safetensors")
    assert set(found) == set(again) == set(tensors)
    for name, tensor in tensors.items():
        for other in (found[name].torch(), again[name]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert not other.numel() or torch.equal(
                other.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)
            )


def kimi(folder: Path) -> Path:
    """A speculators drafter of Kimi's shapes: 4.7 GB of zeros that take no room on disk."""
    h, draft, inner = 7168, 32000, 18432
    shapes = {
        "embed_tokens.weight": [163840, h],
        "fc.weight": [h, 3 * h],
        "norm.weight": [h],
        "lm_head.weight": [draft, h],
        "layers.0.hidden_norm.weight": [h],
        "layers.0.input_layernorm.weight": [h],
        "layers.0.post_attention_layernorm.weight": [h],
        "layers.0.self_attn.q_proj.weight": [8192, 2 * h],
        "layers.0.self_attn.k_proj.weight": [8192, 2 * h],
        "layers.0.self_attn.v_proj.weight": [8192, 2 * h],
        "layers.0.self_attn.o_proj.weight": [h, 8192],
        "layers.0.mlp.gate_proj.weight": [inner, h],
        "layers.0.mlp.up_proj.weight": [inner, h],
        "layers.0.mlp.down_proj.weight": [h, inner],
    }
    header, position = {}, 0
    for name, shape in shapes.items():
        header[name] = entry(shape, position, position + 2 * math.prod(shape), "BF16")
        position += 2 * math.prod(shape)
    folder.mkdir()
    raw(folder / "model.safetensors", header)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) + position)
    config = json.loads((SPECULATORS / "config.json").read_text())
    config |= {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "draft_vocab_size": draft}
    config["transformer_layer_config"] |= {
        "hidden_size": h,
        "intermediate_size": inner,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 128,
        "vocab_size": 163840,
    }
    config["speculators_config"]["verifier"]["architectures"] = ["KimiK25ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_drafter_of_4_7_gb_is_inspected_in_under_a_second(tmp_path):
    folder = kimi(tmp_path / "kimi")
    assert (folder / "model.safetensors").stat().st_size > 2.4e9
    start = time.perf_counter()
    report = describe(open_checkpoint(folder))
    assert time.perf_counter() - start < 1.0
    assert report["tensors"]["fc.weight"]["shape"] == [7168, 21504]
    assert report["layer_ids"]["depths"] == [2, 30, 58]
    assert report["served"]["feed"]["depths"] == [2, 30, 58] and report["served"]["wiring"]["fc"] == "applied"


def test_both_dialects_give_the_same_canonical_names():
    speculators, sglang = open_checkpoint(SPECULATORS), open_checkpoint(SGLANG)
    rest = ["d2t", "fc.weight", "input_norm.weight", "lm_head.weight", "norm.weight", "t2d"]
    assert sorted(sglang.tensors) == sorted(LAYER + rest)
    assert sorted(speculators.tensors) == sorted([*LAYER, *rest, "embed_tokens.weight"])
    assert sglang.tensors["layers.0.mlp.up_proj.weight"].name_in_file == "midlayer.mlp.up_proj.weight"
    assert (speculators.dialect, sglang.dialect) == ("speculators", "sglang")
    assert (speculators.aux_layer_ids, sglang.aux_layer_ids) == ((2, 4, 5), (1, 3, 4))
    assert speculators.depths == sglang.depths == (2, 4, 5)
    assert speculators.feature_count == sglang.feature_count == 3
    assert torch.equal(sglang.load("fc.weight"), load_file(SGLANG / "model.safetensors")["fc.weight"])
    assert sglang.load("fc.weight", "float32").dtype == torch.float32
    assert sglang.unknown == speculators.unknown == ()


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0."])
def test_other_spellings_of_the_first_layer(tmp_path, prefix):
    folder = edited(tmp_path / "d", rename={"midlayer.": prefix})
    assert set(LAYER) <= set(open_checkpoint(folder).tensors)


def test_unknown_tensors_are_listed(tmp_path):
    folder = edited(tmp_path / "d", add={"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert open_checkpoint(folder).unknown == ("midlayer.self_attn.rotary_emb.inv_freq",)


def test_the_same_tensor_twice_is_refused(tmp_path):
    folder = edited(tmp_path / "d", add={"layers.0.hidden_norm.weight": torch.ones(128)})
    with pytest.raises(BadInput, match="are both layers.0.hidden_norm.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": {"hidden_size": 256}}, "'hidden_size' gives 256, but tensor 'fc.weight' has shape"),
        ({"config": {"vocab_size": 2048}}, "'vocab_size' gives 2,048, but tensor 't2d'"),
        ({"config": {"draft_vocab_size": 32}}, "'draft_vocab_size' gives 32"),
        ({"config": {"draft_vocab_size": None}}, "'draft_vocab_size' gives 1,024, but tensor 'd2t'"),
        ({"config": {"num_attention_heads": 4}}, "'num_attention_heads x head_dim' gives 64"),
        ({"config": {"intermediate_size": 5}}, "'intermediate_size' gives 5"),
        ({"config": {"hidden_size": "128"}}, "'hidden_size' is '128', which is not of the right type"),
        ({"config": {"hidden_size": True}}, "'hidden_size' is True"),
        ({"config": {"num_attention_heads": 0}}, "is 0"),
        ({"config": {"num_hidden_layers": -1}}, "'num_hidden_layers' is -1, which is negative"),
        ({"config": {"eagle_config": []}}, "'eagle_config' is []"),
        (
            {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}}},
            "expected a list of integers",
        ),
        ({"config": {"rope_theta": "1e4"}}, "'rope_theta' is '1e4'"),
        ({"config": {"target_hidden_size": 100}}, "no multiple of the target's hidden size 100"),
        ({"remove": ["hidden_size"]}, "'hidden_size' is missing"),
        ({"remove": ["vocab_size"]}, "'vocab_size' is missing"),
    ],
)
def test_config_errors_name_file_and_field(tmp_path, change, says):
    folder = edited(tmp_path / "d", **change)
    with pytest.raises(BadInput) as error:
        open_checkpoint(folder)
    assert says in str(error.value) and str(folder) in str(error.value)


def test_config_that_is_no_json(tmp_path):
    folder = edited(tmp_path / "d")
    for text in ("{'single': 1}", "", "[" * 100_000, "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(BadInput, match="config.json: (not JSON|holds a JSON list)"):
            open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(BadInput, match="config.json: cannot be read"):
        open_checkpoint(folder)
    with pytest.raises(BadInput, match="not a folder"):
        open_checkpoint(folder / "model.safetensors")


def test_an_unknown_dialect_is_a_question(tmp_path):
    folder = edited(tmp_path / "d", config={"architectures": ["NobodyEagle"]})
    with pytest.raises(
        BadInput, match=r"\['NobodyEagle'\].*Is it an EAGLE-3 drafter, and which tool wrote it\?"
    ):
        open_checkpoint(folder)
    folder = edited(
        tmp_path / "e", SPECULATORS, config={"architectures": ["DFlash"], "speculators_model_type": "dflash"}
    )
    with pytest.raises(BadInput, match="'speculators_model_type' is 'dflash'"):
        open_checkpoint(folder)
    with pytest.raises(BadInput, match="8 layers and no fc.weight: this looks like a whole target model"):
        open_checkpoint(TARGET)


@pytest.mark.parametrize(
    ("part", "rows", "columns", "says"),
    [
        ("self_attn.q_proj", 100, 256, "128 rows, so it is damaged"),
        ("mlp.down_proj", 128, 300, "384 columns, so it is damaged"),
        ("lm_head", 600, 128, "640 rows, so it is damaged"),
    ],
)
def test_a_tensor_cut_short_is_no_wrong_config(tmp_path, part, rows, columns, says):
    """Other tensors bear the config out. Where none does (all of test_catalogue's), the config is wrong."""
    name = f"{part}.weight" if part == "lm_head" else f"midlayer.{part}.weight"
    with pytest.raises(BadInput, match=says) as error:
        open_checkpoint(edited(tmp_path / "d", add={name: torch.ones(rows, columns).bfloat16()}))
    assert error.value.faults == ("weights-not-sane",)


def test_ids_under_a_key_that_nobody_reads_are_a_question(tmp_path):
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}
    with pytest.raises(BadInput, match=r"'target_layer_ids' is \[1, 2, 4\], which neither SGLang"):
        open_checkpoint(edited(tmp_path / "d", config=ids | {"target_layer_ids": [1, 2, 4]}))
    assert open_checkpoint(edited(tmp_path / "e", config=ids | {"moe_layer_ids": [1]})).aux_layer_ids is None


def test_a_pointer_of_git_lfs_is_called_so(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    with pytest.raises(BadInput, match="run git lfs pull"):
        list(read_header(tmp_path / "model.safetensors"))


def shards(folder: Path, where: dict | None = None) -> Path:
    """The target in two files with an index."""
    folder.mkdir()
    tensors = load_file(TARGET / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[:30], "model-2.safetensors": names[30:]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {n: file for file, part in halves.items() for n in part} | (where or {})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text((TARGET / "config.json").read_text())
    return folder


def test_sharded_model(tmp_path):
    whole, parts = open_target(TARGET), open_target(shards(tmp_path / "t"))
    assert parts.facts == Target("LlamaForCausalLM", 128, 8, 1024, "bfloat16")
    for name in ("embed_tokens.weight", "norm.weight", "lm_head.weight"):
        assert torch.equal(whole.load(name), parts.load(name))
    (tmp_path / "t/model-2.safetensors").unlink()
    with pytest.raises(
        BadInput, match="'model-2.safetensors' is named by model.safetensors.index.json but missing"
    ):
        open_target(tmp_path / "t")


def test_index_that_lies(tmp_path):
    with pytest.raises(BadInput, match="points outside the folder"):
        open_target(shards(tmp_path / "a", {"x": "../t/model-1.safetensors"}))
    with pytest.raises(BadInput, match="tensor 'x' is listed but in no shard"):
        open_target(shards(tmp_path / "b", {"x": "model-1.safetensors"}))
    (tmp_path / "b/model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(BadInput, match="field 'weight_map' is missing"):
        open_target(tmp_path / "b")
    (tmp_path / "b/model.safetensors.index.json").unlink()
    with pytest.raises(BadInput, match="2 .safetensors files and no model.safetensors.index.json"):
        open_target(tmp_path / "b")


def test_targets_in_other_shapes(tmp_path):
    facts = open_target(TARGET / "config.json")
    assert facts.facts == Target("LlamaForCausalLM", 128, 8, 1024, "bfloat16") and facts.tensors == {}
    with pytest.raises(BadInput, match="give the target's own folder"):
        facts.load("norm.weight")
    tensors = load_file(TARGET / "model.safetensors")
    config = json.loads((TARGET / "config.json").read_text())
    multimodal = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": config | {"tie_word_embeddings": True},
    }
    prefix = "language_model.model."
    (tmp_path / "config.json").write_text(json.dumps(multimodal))
    save_file(
        {
            prefix + "embed_tokens.weight": tensors["model.embed_tokens.weight"],
            prefix + "norm.weight": tensors["model.norm.weight"],
        },
        tmp_path / "target.safetensors",
    )
    tied = open_target(tmp_path)
    assert tied.facts.architecture == "KimiK25ForConditionalGeneration" and tied.facts.num_layers == 8
    assert torch.equal(tied.load("lm_head.weight"), tied.load("embed_tokens.weight"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    with pytest.raises(BadInput, match=r"shape \[1024, 128\], its config says 1000 x 128"):
        open_target(tmp_path)


def test_a_drafter_for_another_target():
    drafter = open_checkpoint(SGLANG)
    drafter.check_target(Target("LlamaForCausalLM", 128, 8, 1024))
    with pytest.raises(
        BadInput, match="'hidden_size': the drafter was trained for a target of 128.* has 4,096"
    ):
        drafter.check_target(Target("LlamaForCausalLM", 4096, 32, 1024))
    with pytest.raises(BadInput, match="'vocab_size'.*of 1,024.* has 128,256"):
        drafter.check_target(Target("LlamaForCausalLM", 128, 8, 128256))


@pytest.mark.parametrize(
    ("architecture", "layers", "ids", "depths"),
    [
        ("LlamaForCausalLM", 8, (1, 3, 4), (2, 4, 5)),
        (None, None, (1, 3, 4), (2, 4, 5)),
        ("KimiK25ForConditionalGeneration", 61, (1, 29, 57), (2, 30, 58)),
        ("KimiK25ForConditionalGeneration", 61, (2, 30, 58), (2, 30, 58)),
        ("DeepseekV3ForCausalLM", 61, (2, 29, 57), (2, 29, 57)),
        ("Glm4MoeLiteForCausalLM", 47, (1, 23, 43), (2, 24, 44)),
        ("GptOssForCausalLM", 36, (1, 17, 32), (2, 18, 33)),
        ("GptOssForCausalLM", 36, (24, 30, 36), (24, 30, 36)),
    ],
)
def test_layer_ids_by_architecture(architecture, layers, ids, depths):
    assert sglang_depths(ids, architecture, layers) == depths
    assert sglang_depths(sglang_ids(depths, architecture, layers), architecture, layers) == depths


@given(
    st.sampled_from(["LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"]),
    st.lists(st.integers(0, 35), min_size=1, max_size=5, unique=True).map(sorted),
)
def test_every_set_of_depths_has_ids(architecture, depths):
    if (architecture, depths) == ("DeepseekV3ForCausalLM", [1]):  # the one set that it cannot capture
        with pytest.raises(BadInput, match=r"no layer ids make SGLang capture depths \[1\]"):
            sglang_ids((1,), architecture, 36)
        return
    found = sglang_depths(sglang_ids(tuple(depths), architecture, 36), architecture, 36)
    assert sorted(found) == depths


def test_depths_without_ids(tmp_path):
    drafter = open_checkpoint(edited(tmp_path / "d", remove=["eagle_config"]))
    assert drafter.aux_layer_ids is None and drafter.depths == ()
    assert drafter.depths_in(Target("LlamaForCausalLM", 128, 8, 1024)) == (2, 4, 5)
    assert drafter.depths_in(Target("MiniMaxM3SparseForConditionalGeneration", 128, 8, 1024)) == (3, 5, 6)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 5e5}, (5e5, ())),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 5e5}, (1e6, ())),
        ({"rope_scaling": None, "rope_theta": 7.0}, (7.0, ())),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
                "rope_theta": 5e4,
            },
            (5e4, (("factor", 64.0), ("original_max_position_embeddings", 4096), ("rope_type", "yarn"))),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 4.0},
            (4.0, (("factor", 2.0), ("original_max_position_embeddings", 512), ("rope_type", "yarn"))),
        ),
    ],
)
def test_rope_in_both_forms(tmp_path, config, rope):
    read = open_checkpoint(edited(tmp_path / "d", config=config)).settings.rope
    assert (read.theta, read.scaling) == rope


def test_statistics_are_exact_and_count_what_is_not_finite(tmp_path):
    save_file(
        {"a": torch.tensor([0.0, 2.0, -4.0, float("nan"), float("inf")]).bfloat16()},
        tmp_path / "m.safetensors",
    )
    info = next(read_header(tmp_path / "m.safetensors"))
    found = statistics(info)
    assert found == pytest.approx(
        {"mean": -2 / 3, "std": math.sqrt(56) / 3, "absmax": 4.0, "zeros": 0.2, "nonfinite": 2}
    )


def test_statistics_equal_torch():
    checkpoint = open_checkpoint(SGLANG)
    for name in ("fc.weight", "lm_head.weight", "d2t"):
        tensor, found = checkpoint.load(name).double(), statistics(checkpoint.tensors[name])
        assert found["mean"] == pytest.approx(tensor.mean().item())
        assert found["std"] == pytest.approx(tensor.std(correction=0).item())
        assert found["absmax"] == tensor.abs().max().item()
        assert found["zeros"] == pytest.approx((tensor == 0).double().mean().item())


def test_opening_loads_neither_torch_nor_sglang():
    import subprocess
    import sys

    code = (
        "import sys; from eaglelab.checkpoint import open_checkpoint; from eaglelab.describe import describe;"
        f"describe(open_checkpoint({str(DATA / 'drafter-speculators')!r}));"
        "assert not {'torch', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_d2t_reads_as_offsets():
    d2t = open_checkpoint(SGLANG).d2t
    assert d2t is not None and d2t.dtype == np.int64 and d2t.shape == (640,)
    ids = d2t + np.arange(640)
    assert (np.diff(ids) > 0).all() and ids.max() < 1024
