"""Every dialect: recognised or asked about, trained as its tool meant it, loaded or converted."""

import json

import pytest
import torch
from drafters import SGLANG, TARGET
from safetensors.torch import load_file
from spellings import SPELLINGS, eagle_config, latent, spelled

from eaglelab import text
from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.convert import convert, plan, view
from eaglelab.describe import describe
from eaglelab.diff import diff
from eaglelab.errors import BadInput
from eaglelab.launch import Launch, Target
from eaglelab.loader import loading
from eaglelab.served import served
from eaglelab.trained import trained

FACTS = Target("LlamaForCausalLM", 128, 8, 1024)
KIMI = Target("KimiK25ForConditionalGeneration", 128, 8, 1024)
OPEN = {"specforge"}  # leaves no signature: told by --dialect


def opened(folder, name, **changes):
    return open_checkpoint(spelled(folder, name, **changes), name if name in OPEN else None)


@pytest.mark.parametrize(
    ("name", "ids", "depths", "residual", "start", "own_embedding"),
    [
        ("safeailab", None, (2, 4, 5), "raw", 0, False),
        ("sglang", (1, 3, 4), (2, 4, 5), "raw", 0, False),
        ("specforge", (1, 3, 4), (2, 4, 5), "raw", 0, False),
        ("torchspec", None, (2, 4, 5), "raw", 0, True),
        ("model-optimizer", (1, 3, 4), (2, 4, 5), "raw", 0, False),
        ("vllm", (2, 4, 5), (2, 4, 5), "normed", 0, False),
        ("angelslim", None, (2, 4, 5), "raw", 0, False),
        ("automodel", None, (2, 4, 5), "raw", 0, True),
        ("speculators-0.1", None, (2, 4, 5), "normed", 1, True),
        ("speculators", (2, 4, 5), (2, 4, 5), "raw", 1, True),
    ],
)
def test_what_each_trainer_meant(tmp_path, name, ids, depths, residual, start, own_embedding):
    drafter = opened(tmp_path / "d", name)
    assert (drafter.dialect, drafter.aux_layer_ids, drafter.unknown) == (name, ids, ())
    feed, wiring = trained(drafter, FACTS)
    assert (feed.depths, feed.width, feed.final_norm, feed.dtype) == (depths, 384, False, "bfloat16")
    assert (wiring.fc, wiring.norm_before_fc, wiring.residual) == ("applied", "none", residual)
    assert (wiring.lm_head, wiring.vocab_map, wiring.logits_width) == ("own", "d2t", 640)
    assert (wiring.feedback, wiring.layers, wiring.heads, wiring.head_dim) == ("pre-norm", 1, 8, 16)
    assert (wiring.rope.theta, wiring.rope.scaling, wiring.position_start) == (10000.0, (), start)
    assert wiring.embedding == ("own" if own_embedding else "target")


def test_every_spelling_has_a_row_above():
    assert len(SPELLINGS) == 10


@pytest.mark.parametrize("name", ["sglang", "specforge", "torchspec", "model-optimizer"])
def test_what_sglang_loads_as_it_is(tmp_path, name):
    drafter, target = opened(tmp_path / "d", name), open_target(TARGET)
    launch = Launch(target=target.facts)
    assert view(drafter) is drafter
    assert loading(drafter, launch).dropped == () and loading(drafter, launch).initial == ()
    found = diff(trained(drafter, target.facts), served(drafter, launch), drafter, target)
    assert [d.field for d in found if not d.inert] == []


@pytest.mark.parametrize(
    "name", ["safeailab", "vllm", "angelslim", "automodel", "speculators-0.1", "speculators"]
)
def test_what_sglang_does_not_load(tmp_path, name):
    drafter, target = opened(tmp_path / "d", name), open_target(TARGET)
    with pytest.raises(BadInput, match="does not start with it; convert it first"):
        served(drafter, Launch(target=target.facts))
    seen = served(view(drafter, "sglang", target), Launch(target=target.facts))
    found = [d.field for d in diff(trained(drafter, target.facts), seen, drafter, target) if not d.inert]
    assert found == (["residual"] if name in ("vllm", "speculators-0.1") else [])


def test_ids_out_of_order_come_by_layer_from_hooks(tmp_path):
    ids = {"eagle_aux_hidden_state_layer_ids": [4, 1, 3], "next_layer_regular": True}
    assert opened(tmp_path / "d", "model-optimizer", config={"eagle_config": ids}).depths == (2, 4, 5)


def test_boundaries_up_to_the_last_layer(tmp_path):
    ids = {"eagle_aux_hidden_state_layer_ids": [4, 6, 8], "next_layer_regular": True}
    drafter = opened(tmp_path / "d", "model-optimizer", config={"eagle_config": ids})
    assert drafter.depths_in(Target("GptOssForCausalLM", 128, 8, 1024)) == (4, 6, 8)
    assert drafter.depths_in(Target("GptOssForCausalLM", 128, 9, 1024)) == (5, 7, 9)


def test_without_features_the_last_hidden_state_is_fed(tmp_path):
    config = {"eagle_config": {"use_aux_hidden_state": False, "next_layer_regular": True}}
    drafter = opened(tmp_path / "d", "model-optimizer", config=config, drop=("fc.weight",))
    feed, wiring = trained(drafter, FACTS)
    assert (feed.depths, feed.width, feed.final_norm, wiring.fc) == ((8,), 128, True, "bypassed")
    with pytest.raises(BadInput, match="'use_aux_hidden_state' is false"):
        plan(drafter, "vllm")


def test_ids_that_two_tools_read_differently_are_a_question(tmp_path):
    folder = spelled(
        tmp_path / "d", "sglang", config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}
    )
    says = (
        r"layer ids \[2, 4, 5\] on KimiK25ForConditionalGeneration mean to sglang depths \[2, 4, 5\], "
        r"to specforge depths \[3, 5, 6\]. Which tool wrote it\? Give --dialect sglang or --dialect specforge"
    )
    with pytest.raises(BadInput, match=says):
        trained(open_checkpoint(folder), KIMI)
    assert trained(open_checkpoint(folder, "sglang"), KIMI)[0].depths == (2, 4, 5)
    assert trained(open_checkpoint(folder, "specforge"), KIMI)[0].depths == (3, 5, 6)
    assert trained(open_checkpoint(folder), FACTS)[0].depths == (3, 5, 6)  # no doubt on other targets
    shallow = Target("DeepseekV3ForCausalLM", 128, 5, 1024)
    assert trained(open_checkpoint(folder), shallow)[0].depths == (2, 4, 5)  # depth 6 of 5 cannot be meant
    folder = spelled(tmp_path / "e", "sglang", config={"eaglelab_dialect": "specforge"})
    assert open_checkpoint(folder).dialect == "specforge" and open_checkpoint(folder).rivals == ()


def test_vllm_or_angelslim_is_a_question_only_where_ids_are_given(tmp_path):
    folder = spelled(tmp_path / "d", "angelslim")
    config = json.loads((folder / "config.json").read_text())
    del config["target_model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    drafter = open_checkpoint(folder)
    assert drafter.dialect == "vllm" and trained(drafter, FACTS)[0].depths == (2, 4, 5)
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="Give --dialect vllm or --dialect angelslim"):
        trained(open_checkpoint(folder))
    assert open_checkpoint(folder, "angelslim").depths == (2, 4, 5)
    assert open_checkpoint(folder, "vllm").depths == (1, 3, 4)


@pytest.mark.parametrize("name", ["angelslim", "vllm"])
def test_a_tie_that_ties_nothing(tmp_path, name):
    """Their classes make a head of their own whatever tie_word_embeddings says; SGLang's drops it."""
    config = {"tie_word_embeddings": True}
    drafter = opened(tmp_path / "d", name, config=config, drop=("lm_head.weight",))
    assert trained(drafter, FACTS)[1].lm_head == "target"
    tied = opened(tmp_path / "e", "sglang", config=config)
    assert tied.settings.tied and served(tied, Launch(target=FACTS))[1].lm_head == "tied"


def test_marks_of_two_tools_are_a_question(tmp_path):
    folder = spelled(tmp_path / "d", "model-optimizer", config={"_torchspec_version": "0.1"})
    with pytest.raises(BadInput, match="bears the marks of model-optimizer and of torchspec"):
        open_checkpoint(folder)


def test_a_dialect_nobody_knows(tmp_path):
    with pytest.raises(BadInput, match="no dialect 'medusa'; known are speculators, speculators-0.1"):
        open_checkpoint(SGLANG, "medusa")
    folder = spelled(tmp_path / "d", "specforge", config={"architectures": ["MyEagle3"]})
    with pytest.raises(BadInput, match="give --dialect NAME"):
        open_checkpoint(folder)
    assert trained(open_checkpoint(folder, "specforge"), FACTS)[0].depths == (2, 4, 5)


def test_an_old_file_that_leaves_out_the_residual_is_a_question(tmp_path):
    folder = spelled(tmp_path / "d", "speculators-0.1", config={"norm_before_residual": None})
    with pytest.raises(BadInput, match="speculators takes that as false, vLLM as true. Which was it trained"):
        open_checkpoint(folder)


def test_ids_that_contradict_each_other_are_a_question(tmp_path):
    folder = spelled(tmp_path / "d", "sglang", config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    with pytest.raises(
        BadInput, match=r"is \[2, 4, 5\] at the top level, .* and \[1, 3, 4\] in eagle_config"
    ):
        open_checkpoint(folder)


def test_the_last_layer_listed_for_the_teacher_is_not_fed(tmp_path):
    config = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 7]}
    assert opened(tmp_path / "d", "speculators", config=config).depths == (2, 4, 5)


def test_a_map_of_target_ids_is_recognised_and_converted(tmp_path):
    shipped = load_file(SGLANG / "model.safetensors")
    ids = shipped["d2t"] + torch.arange(640)
    folder = spelled(tmp_path / "d", "sglang", tensors={"d2t": ids})
    drafter, target = open_checkpoint(folder), open_target(TARGET)
    assert drafter.map_form == "absolute" and torch.equal(drafter.load("d2t"), shipped["d2t"])
    assert open_checkpoint(SGLANG).map_form == "offset"
    assert trained(drafter, FACTS)[1].vocab_map == "d2t"
    with pytest.raises(BadInput, match="d2t holds target ids, SGLang takes them for offsets"):
        served(drafter, Launch(target=target.facts))
    assert "d2t holds target ids" in describe(drafter, target)["notes"][0]
    done = convert(folder, tmp_path / "v", "vllm")
    assert torch.equal(load_file(tmp_path / "v" / "model.safetensors")["d2t"], shipped["d2t"])
    assert "offsets were written" in done.warnings[-1]


def test_a_map_of_low_target_ids_is_served_wrongly_without_stopping(tmp_path):
    ids = torch.arange(0, 500, 1)[: 640 // 2]
    rows = {"d2t": ids, "t2d": torch.zeros(1024, dtype=torch.bool).index_fill_(0, ids, True)}
    head = load_file(SGLANG / "model.safetensors")["lm_head.weight"][:320].contiguous()
    folder = spelled(
        tmp_path / "d", "sglang", config={"draft_vocab_size": 320}, tensors={**rows, "lm_head.weight": head}
    )
    drafter, launch = open_checkpoint(folder), Launch(target=FACTS)
    (found,) = [
        d for d in diff(trained(drafter, FACTS), served(drafter, launch), drafter) if d.field == "vocab_map"
    ]
    assert (found.trained, found.served, found.inert) == ("d2t", "misread", False)


def test_three_forms_and_back_are_bitwise(tmp_path):
    source = SGLANG
    for step, to in enumerate(("vllm", "speculators", "sglang", "speculators", "vllm", "sglang")):
        convert(source, tmp_path / f"{step}", to, TARGET)
        source = tmp_path / f"{step}"
        before, after = open_checkpoint(SGLANG), open_checkpoint(source)
        assert (after.dialect, after.rivals) == (to, ())
        assert trained(after, FACTS)[0] == trained(before, FACTS)[0]
    ours, shipped = load_file(source / "model.safetensors"), load_file(SGLANG / "model.safetensors")
    assert ours.keys() == shipped.keys() and all(torch.equal(ours[n], shipped[n]) for n in ours)


def test_what_vllm_reads(tmp_path):
    done = convert(SGLANG, tmp_path / "v", "vllm")
    names = load_file(tmp_path / "v" / "model.safetensors")
    assert {"layers.0.hidden_norm.weight", "fc.weight", "input_norm.weight", "d2t"} <= set(names)
    assert not [n for n in names if n.startswith(("model.", "midlayer."))]  # vLLM puts model. before each
    config = open_checkpoint(tmp_path / "v").config
    assert config["architectures"] == ["Eagle3LlamaForCausalLM"] and config["norm_output"] is True
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["norm_before_residual"] is False
    assert config["eagle_config"]["norm_before_fc"] is True
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert done.ids == ((1, 3, 4), (2, 4, 5), (2, 4, 5))


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        (
            {},
            {"layers.0.self_attn.q_norm.weight": torch.ones(16)},
            "q_norm.weight: vLLM's Llama drafter has no",
        ),
        ({}, {"layers.0.self_attn.q_proj.bias": torch.ones(128)}, "attention_bias: vLLM makes q, k, v and o"),
    ],
)
def test_what_vllm_cannot_express_is_warned_of(tmp_path, config, tensors, says):
    folder = spelled(tmp_path / "d", "speculators", config=config, tensors=tensors)
    assert says in "; ".join(plan(open_checkpoint(folder), "vllm").warnings)


@pytest.mark.parametrize("name", ["vllm", "angelslim"])
def test_a_converted_one_loads_in_the_real_speculators_class(tmp_path, name):
    eagle3 = pytest.importorskip("speculators.models.eagle3")
    source = spelled(tmp_path / "d", name)
    convert(source, tmp_path / "s", "speculators", TARGET)
    model = eagle3.Eagle3DraftModel.from_pretrained(tmp_path / "s")
    assert model.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert model.config.norm_before_residual is (name == "vllm")
    for canonical, tensor in model.state_dict().items():
        if canonical in open_checkpoint(source).tensors:
            assert torch.equal(tensor, open_checkpoint(source).load(canonical)), canonical


def test_a_narrower_drafter_keeps_its_embedding(tmp_path):
    fc = torch.randn(128, 3 * 256).bfloat16()
    config = {"target_hidden_size": 256, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    folder = spelled(tmp_path / "d", "speculators-0.1", config=config, tensors={"fc.weight": fc})
    convert(folder, tmp_path / "s", "sglang")
    written = open_checkpoint(tmp_path / "s")
    assert (written.target_hidden_size, written.feature_count) == (256, 3)
    assert "embed_tokens.weight" in written.tensors
    takes = loading(written, Launch(target=Target("LlamaForCausalLM", 256, 8, 1024)))
    assert takes.params["model.embed_tokens.weight"].kind == "own"


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_a_drafter_with_latent_attention_is_read_and_served(tmp_path, prefix):
    drafter = open_checkpoint(latent(tmp_path / "d", prefix))
    assert (drafter.dialect, drafter.unknown, drafter.depths) == ("sglang-mla", (), (2, 4, 5))
    assert drafter.tensors["layers.0.self_attn.kv_b_proj.weight"].shape == (256, 32)
    report = describe(drafter, None, Launch(target=KIMI))
    assert report["tensors"]["layers.0.self_attn.q_a_proj.weight"]["shape"] == [48, 256]
    assert report["refusals"] == report["loading"]["dropped"] == report["loading"]["initial"] == []
    assert report["loading"]["replaced"] == ["embed_tokens.weight"]
    assert [d["field"] for d in report["differences"] if not d["inert"]] == ["embedding"]
    assert report["settings"]["latent"]["kv_lora_rank"] == 32
    _, said = text.drafter(drafter.path, "", "", "sglang==0.5.23", "", False)
    assert "q rank 48" in said and "not proven equal to the target's" in said
    with pytest.raises(BadInput, match="multi-head latent attention"):
        plan(drafter, "vllm")


def test_latent_widths_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(BadInput, match="'q_lora_rank' gives 64"):
        open_checkpoint(latent(tmp_path / "d", config={"q_lora_rank": 64}))
    with pytest.raises(BadInput, match="field 'kv_lora_rank' is missing"):
        open_checkpoint(latent(tmp_path / "e", config={"kv_lora_rank": None}))


def test_latent_ids_by_who_wrote_them(tmp_path):
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert open_checkpoint(latent(tmp_path / "a", config={"eagle_config": ids})).depths == (2, 4, 5)
    signed = {**ids, "next_layer_regular": True}
    drafter = open_checkpoint(latent(tmp_path / "b", config={"eagle_config": signed}))
    assert (drafter.dialect, drafter.depths) == ("model-optimizer-mla", (3, 5, 6))


def test_an_order_of_ids_that_the_file_does_not_explain_is_a_question(tmp_path):
    """To SGLang, whose rows ascend, [4, 1, 3] are depths 2, 4, 5; SpecForge may have meant 5, 2, 4."""
    config = {"eagle_config": eagle_config([4, 1, 3])}
    folder = spelled(tmp_path / "d", "sglang", config=config)
    with pytest.raises(BadInput, match=r"depths \[2, 4, 5\].*depths \[5, 2, 4\].*--dialect sglang or"):
        _ = open_checkpoint(folder).depths
    assert open_checkpoint(folder, "sglang").depths == (2, 4, 5)
    assert open_checkpoint(folder, "specforge").depths == (5, 2, 4)
    assert open_checkpoint(spelled(tmp_path / "t", "torchspec", config=config)).depths == (2, 4, 5)
