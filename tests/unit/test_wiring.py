import json

import pytest
import torch
from drafters import SGLANG, SPECULATORS, TARGET, edited
from safetensors.torch import load_file, save_file

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.convert import view
from eaglelab.diff import Difference, diff
from eaglelab.errors import BadInput
from eaglelab.launch import Launch, Target
from eaglelab.loader import loading
from eaglelab.served import refusals, served
from eaglelab.trained import trained
from eaglelab.wiring import Feed, Rope, Wiring

FACTS = Target("LlamaForCausalLM", 128, 8, 1024, "bfloat16")
EAGLE3 = Launch(algorithm="EAGLE3", target=FACTS)
EAGLE = Launch(algorithm="EAGLE", target=FACTS)
TRAINED = Wiring(
    fc="applied",
    norm_before_fc="whole",
    residual="raw",
    feedback="post-norm",
    rope=Rope(theta=10000.0),
    heads=8,
    kv_heads=2,
    head_dim=16,
    qk_norm=False,
    attention_bias=False,
    layers=1,
    window=None,
    max_positions=512,
    eps=1e-5,
    embedding="own",
    lm_head="own",
    logits_width=640,
    vocab_map="d2t",
    token_shift=1,
    position_start=1,
    dtype="bfloat16",
)
BLOCK = "midlayer.self_attn."


def open_edited(tmp_path, base=SGLANG, **changes):
    return open_checkpoint(edited(tmp_path / "drafter", base, **changes))


def fields(differences: list[Difference], inert: bool = False) -> list[str]:
    return [d.field for d in differences if d.inert is inert]


def test_trained_of_the_speculators_drafter():
    feed, wiring = trained(open_checkpoint(SPECULATORS))
    assert feed == Feed(depths=(2, 4, 5), width=384, final_norm=False, dtype="bfloat16")
    assert wiring == TRAINED


def test_served_under_eagle3_differs_from_training_in_nothing_that_counts():
    checkpoint, target = open_checkpoint(SPECULATORS), open_target(TARGET)
    feed, wiring = served(open_checkpoint(SGLANG), EAGLE3)
    assert feed == Feed(depths=(2, 4, 5), width=384, final_norm=False, dtype="bfloat16")
    found = diff(trained(checkpoint, FACTS), (feed, wiring), checkpoint, target)
    assert fields(found) == []
    assert [(d.field, d.trained, d.served, d.why) for d in found] == [
        ("embedding", "own", "target", "the drafter's embedding equals the target's, number by number"),
        (
            "position_start",
            1,
            0,
            "rope is relative: the same shift of every position changes no attention score",
        ),
    ]
    assert served(view(checkpoint, target=target), EAGLE3) == (feed, wiring)


def test_served_under_the_wrong_flag_is_the_incident():
    drafter, target = open_checkpoint(SGLANG), open_target(TARGET)
    feed, wiring = served(drafter, EAGLE)
    assert feed == Feed(depths=(8,), width=128, final_norm=True, dtype="bfloat16")
    found = diff(trained(drafter, FACTS), (feed, wiring), drafter, target)
    assert [(d.part, d.field, d.trained, d.served, d.inert) for d in found] == [
        ("feed", "depths", (2, 4, 5), (8,), False),
        ("feed", "width", 384, 128, False),
        ("feed", "final_norm", False, True, False),
        ("wiring", "fc", "applied", "bypassed", False),
        ("wiring", "lm_head", "own", "target", False),
        ("wiring", "vocab_map", "d2t", "dropped", False),
    ]
    assert wiring.logits_width == 640 and wiring.embedding == "target"


def test_aux_hidden_state_off_keeps_head_and_map(tmp_path):
    drafter = open_edited(tmp_path, config={"eagle_config": {"use_aux_hidden_state": False}})
    feed, wiring = served(drafter, EAGLE3)
    assert (feed.width, feed.depths, feed.final_norm) == (128, (8,), True)
    assert (wiring.fc, wiring.lm_head, wiring.vocab_map) == ("bypassed", "own", "d2t")
    assert fields(diff(trained(drafter, FACTS), (feed, wiring), drafter)) == [
        "depths",
        "width",
        "final_norm",
        "fc",
    ]


@pytest.mark.parametrize(
    ("nested", "top", "target", "depths"),
    [
        ([4, 1, 3], None, FACTS, (2, 4, 5)),  # ascending, whatever the order
        (None, [0, 1, 2], FACTS, (2, 4, 5)),  # ids at the top level are not read: the default
        ([1, 3, 4], [1, 3, 4], FACTS, (2, 4, 5)),
        ([1, 3, 4], None, None, (2, 4, 5)),
        ([1, 3, 4], None, Target("DeepseekV3ForCausalLM", 128, 8, 1024), (2, 4, 5)),
        ([2, 3, 4], None, Target("DeepseekV3ForCausalLM", 128, 8, 1024), (2, 3, 4)),
        ([4, 6, 8], None, Target("GptOssForCausalLM", 128, 8, 1024), (4, 6, 8)),
        (None, None, Target("LlamaForCausalLM", 128, 10, 1024), (2, 5, 7)),
    ],
)
def test_which_depths_are_served(tmp_path, nested, top, target, depths):
    config = {"eagle_config": {"norm_before_fc": True, "use_aux_hidden_state": True}}
    if nested is not None:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = nested
    if top is not None:
        config["eagle_aux_hidden_state_layer_ids"] = top
    drafter = open_edited(tmp_path, remove=["eagle_config"])
    drafter = drafter.with_config(config)
    assert served(drafter, Launch(algorithm="EAGLE3", target=target))[0].depths == depths


def test_ids_that_contradict_each_other_are_a_question(tmp_path):
    drafter = open_edited(tmp_path)
    with pytest.raises(BadInput, match=r"\[0, 1, 2\] at the top level.*\[1, 3, 4\] in eagle_config"):
        drafter.with_config({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})


def test_ids_left_out_need_the_target(tmp_path):
    drafter = open_edited(tmp_path, remove=["eagle_config"])
    with pytest.raises(
        BadInput, match="'eagle_config.eagle_aux_hidden_state_layer_ids' is missing.*give --target"
    ):
        served(drafter, Launch(algorithm="EAGLE3"))


@pytest.mark.parametrize(
    ("change", "launch", "says"),
    [
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}},
            EAGLE3,
            "hands over 256 numbers a token",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}},
            EAGLE3,
            "depths [2, 4]",
        ),  # depth 8 of 8
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [20]}},
            EAGLE3,
            "none of the layer ids is captured",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, EAGLE3, "SGLang makes fc 128 x 256"),
        ({"num_aux_hidden_states": 4}, EAGLE3, "SGLang makes fc 128 x 512"),
        ({"tie_word_embeddings": True}, EAGLE, "'tie_word_embeddings' under EAGLE"),
        ({"target_hidden_size": None}, EAGLE3, "'target_hidden_size' is null"),
        (
            {},
            Launch(algorithm="EAGLE3", target=Target("LlamaForCausalLM", 64, 8, 1024)),
            "drafter for another target",
        ),
        (
            {},
            Launch(algorithm="EAGLE3", target=Target("LlamaForCausalLM", 128, 8, 999)),
            "drafter for another target",
        ),
    ],
)
def test_what_the_engine_stops_on(tmp_path, change, launch, says):
    config = json.loads((SGLANG / "config.json").read_text())
    drafter = open_checkpoint(SGLANG)
    nested = change.get("eagle_config")
    config |= change | ({"eagle_config": config["eagle_config"] | nested} if nested else {})
    folder = edited(tmp_path / "d", config=config)
    drafter = open_checkpoint(folder)
    assert says in "; ".join(refusals(drafter, launch))
    with pytest.raises(BadInput):
        served(drafter, launch)


def test_a_missing_draft_vocabulary_stops_the_engine(tmp_path):
    drafter = open_edited(tmp_path, remove=["draft_vocab_size"], drop=["d2t", "lm_head"])
    assert "'draft_vocab_size' is missing" in refusals(drafter, EAGLE3)[0]


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        (Launch(algorithm=None, steps=0, topk=0, draft_tokens=0), "no EAGLE drafter is served"),
        (Launch(algorithm="EAGLE", flags=(("--speculative-token-map", "m.pt"),)), "not modelled"),
        (Launch(engine="vllm"), "only sglang is modelled"),
        (Launch(flags=(("--json-model-override-args", "{"),)), "not a JSON object"),
    ],
)
def test_what_is_not_modelled_says_so(launch, says):
    with pytest.raises(BadInput, match=says):
        served(open_checkpoint(SGLANG), launch)


def test_speculators_has_no_class_in_sglang():
    with pytest.raises(
        BadInput, match=r"no model class for \['Eagle3DraftModel'\].*eaglelab convert .* --to sglang"
    ):
        served(open_checkpoint(SPECULATORS), EAGLE3)


def test_override_arguments_reach_the_drafter():
    launch = EAGLE3.with_flags(
        ["--json-model-override-args", '{"norm_output": false, "rms_norm_eps": 0.001}']
    )
    _, wiring = served(open_checkpoint(SGLANG), launch)
    assert (wiring.feedback, wiring.eps) == ("pre-norm", 0.001)


def test_loading_of_the_shipped_drafter():
    found = loading(open_checkpoint(SGLANG), EAGLE3)
    assert (found.dropped, found.replaced, found.initial) == ((), (), ())
    qkv = found.params["model.layers.0.self_attn.qkv_proj.weight"]
    assert qkv.kind == "own" and qkv.rule == "qkv"
    assert qkv.tensors == tuple(f"layers.0.self_attn.{p}_proj.weight" for p in "qkv")
    gate_up = found.params["model.layers.0.mlp.gate_up_proj.weight"]
    assert gate_up.tensors == ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")
    assert found.params["model.embed_tokens.weight"].kind == "target"
    assert {n: p.rule for n, p in found.params.items() if p.rule != "replicated"} == {
        "model.embed_tokens.weight": "vocab",
        "model.layers.0.self_attn.qkv_proj.weight": "qkv",
        "model.layers.0.self_attn.o_proj.weight": "row",
        "model.layers.0.mlp.gate_up_proj.weight": "column",
        "model.layers.0.mlp.down_proj.weight": "row",
        "lm_head.weight": "vocab",
    }


def test_a_missing_head_stays_at_its_initial_value(tmp_path):
    drafter = open_edited(tmp_path, drop=["lm_head"])
    assert loading(drafter, EAGLE3).initial == ("lm_head.weight",)
    _, wiring = served(drafter, EAGLE3)
    assert (wiring.lm_head, wiring.unloaded) == ("initial", ("lm_head.weight",))
    found = diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter)
    assert [(d.field, d.trained, d.served) for d in found] == [
        ("lm_head", "target", "initial"),
        ("unloaded", (), ("lm_head.weight",)),
    ]
    assert fields(found) == ["lm_head", "unloaded"]
    assert served(drafter, EAGLE)[1].lm_head == "target"  # under EAGLE the target's head stands in


def test_names_that_no_parameter_takes_are_dropped(tmp_path):
    bias = {BLOCK + "q_proj.bias": torch.ones(128), BLOCK + "q_norm.weight": torch.ones(16)}
    drafter = open_edited(tmp_path, add=bias, rename={"input_norm": "input_norms"})
    found = loading(drafter, EAGLE3)
    assert set(found.dropped) == {*bias, "input_norms.weight"}
    assert found.initial == ("model.input_norm.weight",)
    _, wiring = served(drafter, EAGLE3)
    assert set(wiring.dropped) == {
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.q_norm.weight",
        "input_norms.weight",
    }
    before = trained(drafter, FACTS)
    assert before[1].qk_norm and before[1].attention_bias
    assert fields(diff(before, served(drafter, EAGLE3), drafter)) == [
        "qk_norm",
        "attention_bias",
        "unloaded",
        "dropped",
    ]


def test_a_bias_of_zeros_changes_nothing(tmp_path):
    zeros = {BLOCK + f"{p}_proj.bias": torch.zeros(n) for p, n in (("q", 128), ("k", 32), ("v", 32))}
    drafter = open_edited(tmp_path, add=zeros)
    found = diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter)
    assert fields(found) == [] and fields(found, inert=True) == ["attention_bias", "dropped"]


def test_half_a_fused_parameter_is_partial(tmp_path):
    drafter = open_edited(tmp_path, drop=["k_proj"])
    source = loading(drafter, EAGLE3).params["model.layers.0.self_attn.qkv_proj.weight"]
    assert (source.kind, source.missing) == ("partial", ("layers.0.self_attn.k_proj.weight",))
    assert served(drafter, EAGLE3)[1].unloaded == ("layers.0.self_attn.k_proj.weight",)


def test_norm_that_was_trained_but_not_switched_on(tmp_path):
    drafter = open_edited(tmp_path, config={"eagle_config": {"norm_before_fc": False}})
    before, after = trained(drafter, FACTS), served(drafter, EAGLE3)
    assert (before[1].norm_before_fc, after[1].norm_before_fc) == ("whole", "none")
    assert fields(diff(before, after, drafter)) == ["norm_before_fc", "dropped"]


@pytest.mark.parametrize("key", ["fc_norm", "use_aux_norm"])
def test_norms_per_chunk(tmp_path, key):
    names = (
        ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
        if key == "use_aux_norm"
        else ("fc_norm.0", "fc_norm.1", "fc_norm.2")
    )
    drafter = open_edited(
        tmp_path,
        config={key: True, "eagle_config": {"norm_before_fc": False}},
        drop=["input_norm"],
        add={name + ".weight": torch.ones(128) for name in names},
    )
    assert trained(drafter)[1].norm_before_fc == served(drafter, EAGLE3)[1].norm_before_fc == "per-chunk"
    assert served(drafter, EAGLE3)[1].unloaded == ()


def test_norm_before_residual_is_not_read(tmp_path):
    drafter = open_edited(tmp_path, config={"norm_before_residual": True})
    found = diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter)
    assert [(d.field, d.trained, d.served, d.inert) for d in found] == [("residual", "normed", "raw", False)]


def test_tied_head_with_a_reduced_vocabulary(tmp_path):
    drafter = open_edited(tmp_path, config={"tie_word_embeddings": True})
    found = loading(drafter, EAGLE3)
    assert found.dropped == ("lm_head.weight",) and "lm_head.weight" not in found.params
    _, wiring = served(drafter, EAGLE3)
    assert (wiring.lm_head, wiring.logits_width, wiring.vocab_map) == ("tied", 640, "d2t")
    assert "lm_head" in fields(diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter))


def whole_vocabulary(folder, head=None):
    """A drafter of the whole vocabulary that shares the target's head, or has `head` of its own."""
    add = {} if head is None else {"lm_head.weight": head}
    return edited(folder, config={"draft_vocab_size": None}, drop=["lm_head", "d2t", "t2d"], add=add)


def test_the_whole_vocabulary_shares_the_targets_head(tmp_path):
    target = open_target(TARGET)
    without = open_checkpoint(whole_vocabulary(tmp_path / "a"))
    wiring = served(without, EAGLE3)[1]
    assert (wiring.lm_head, wiring.logits_width, wiring.vocab_map) == ("target", 1024, "identity")
    assert diff(trained(without, FACTS), served(without, EAGLE3), without, target) == []
    head = target.load("lm_head.weight")
    equal = open_checkpoint(whole_vocabulary(tmp_path / "b", head))
    found = diff(trained(equal, FACTS), served(equal, EAGLE3), equal, target)
    assert fields(found) == [] and fields(found, inert=True) == ["lm_head"]
    assert fields(diff(trained(equal, FACTS), served(equal, EAGLE3), equal)) == [
        "lm_head"
    ]  # no proof, no claim
    other = open_checkpoint(whole_vocabulary(tmp_path / "c", head + 1))
    assert fields(diff(trained(other, FACTS), served(other, EAGLE3), other, target)) == ["lm_head"]


def test_embedding_that_was_trained_is_replaced(tmp_path):
    target = open_target(TARGET)
    mine = target.load("embed_tokens.weight").clone()
    mine[5, 5] += 1
    drafter = open_edited(tmp_path, add={"embed_tokens.weight": mine})
    assert loading(drafter, EAGLE3).replaced == ("embed_tokens.weight",)
    assert fields(diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter, target)) == ["embedding"]
    assert fields(diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter)) == ["embedding"]


def test_embedding_in_another_dtype_is_equal_number_by_number(tmp_path):
    target = open_target(TARGET)
    drafter = open_edited(
        tmp_path, add={"embed_tokens.weight": target.load("embed_tokens.weight", "float32")}
    )
    assert fields(diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter, target), inert=True) == [
        "embedding"
    ]


def test_embedding_frozen_by_config_is_believed_until_the_target_is_there():
    drafter = open_checkpoint(SPECULATORS)
    found = diff(trained(drafter, FACTS), served(view(drafter), EAGLE3), drafter)
    assert "embedding" in fields(found, inert=True)


def test_identity_map_dropped_is_inert(tmp_path):
    drafter = open_edited(tmp_path, drop=["d2t", "t2d"], add={"d2t": torch.zeros(640, dtype=torch.int64)})
    assert "vocab_map" in fields(diff(trained(drafter, FACTS), served(drafter, EAGLE), drafter), inert=True)


def two_layers(folder, norm: str, weight: torch.Tensor):
    """A second layer, whose norm before attention is called `norm`."""
    first = {
        n.replace("midlayer", "layers.1"): t
        for n, t in load_file(SGLANG / "model.safetensors").items()
        if "midlayer" in n
    }
    second = {
        n: t[:, :128].contiguous() if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else t
        for n, t in first.items()
    }
    second = {n: t for n, t in second.items() if "hidden_norm" not in n and "input_layernorm" not in n}
    second[f"layers.1.{norm}.weight"] = weight
    return edited(folder, config={"num_hidden_layers": 2}, add=second)


def test_later_layers_norm(tmp_path):
    weight = torch.full((128,), 0.5, dtype=torch.bfloat16)
    drafter = open_checkpoint(two_layers(tmp_path / "a", "input_layernorm", weight))
    found = diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter)
    assert [(d.field, d.trained, d.served) for d in found if not d.inert] == [
        ("later_norm", "input_layernorm", "hidden_norm"),
        ("unloaded", (), ("layers.1.hidden_norm.weight",)),
    ]
    ones = open_checkpoint(two_layers(tmp_path / "b", "input_layernorm", torch.ones_like(weight)))
    assert fields(diff(trained(ones, FACTS), served(ones, EAGLE3), ones)) == []
    renamed = open_checkpoint(two_layers(tmp_path / "c", "hidden_norm", weight))
    assert diff(trained(renamed, FACTS), served(renamed, EAGLE3), renamed) == []
    assert loading(renamed, EAGLE3).initial == ("model.layers.1.input_layernorm.weight",)  # and never used


@pytest.mark.parametrize(
    ("dtype", "asked", "live", "inert"),
    [
        ("bfloat16", None, "bfloat16", None),
        ("bfloat16", "float32", "float32", True),
        ("bfloat16", "float16", "float16", True),  # none of these numbers leaves float16's range
        ("float32", "bfloat16", "bfloat16", None),  # whatever the config says, the tensors are bfloat16
        ("float16", "float32", "float32", True),
    ],
)
def test_dtype(tmp_path, dtype, asked, live, inert):
    drafter = open_edited(tmp_path, config={"torch_dtype": dtype})
    launch = EAGLE3.edit(dtype=asked)
    assert served(drafter, launch)[1].dtype == live
    found = [
        d
        for d in diff(trained(drafter, FACTS), served(drafter, launch), drafter)
        if d.field == "dtype" and d.part == "wiring"
    ]
    assert [d.inert for d in found] == ([] if inert is None else [inert])


@pytest.mark.parametrize("dtype", ["float16", "float32", None])
def test_a_drafter_of_another_dtype_than_its_target_is_refused(tmp_path, dtype):
    """As genuine SGLang did on a CPU; float32, or nothing said, is served as float16."""
    drafter = open_edited(tmp_path, config={"torch_dtype": dtype})
    with pytest.raises(BadInput, match="SGLang stops at the first request; write bfloat16") as refused:
        served(drafter, EAGLE3)
    assert refused.value.faults == ("checkpoint-dtype",)


def test_a_dtype_of_smaller_range_loses_numbers(tmp_path):
    small = open_edited(tmp_path, add={"lm_head.weight": torch.full((640, 128), 1e-9).bfloat16()})
    found = diff(trained(small, FACTS), served(small, EAGLE3.edit(dtype="float16")), small)
    assert [(d.field, d.inert) for d in found if d.part == "wiring"] == [("dtype", False)]
    assert "lm_head.weight leave float16's range" in found[-1].why


def test_window(tmp_path):
    drafter = open_checkpoint(SGLANG)
    wiring = served(drafter, EAGLE3.edit(draft_window=64))[1]
    assert wiring.window == 65  # SGLang's backends let a token see itself and that many before it
    assert fields(diff(trained(drafter, FACTS), served(drafter, EAGLE3.edit(draft_window=64)), drafter)) == [
        "window"
    ]
    assert (
        fields(diff(trained(drafter, FACTS), served(drafter, EAGLE3.edit(draft_window=600)), drafter)) == []
    )
    inner = {"transformer_layer_config": {"layer_types": ["sliding_attention"], "sliding_window": 65}}
    windowed = open_edited(tmp_path, SPECULATORS, config=inner)
    assert trained(windowed)[1].window == 65


def test_rope_as_both_sides_read_it(tmp_path):
    drafter = open_edited(tmp_path, config={"partial_rotary_factor": 0.5, "rope_is_neox_style": False})
    rope = served(drafter, EAGLE3)[1].rope
    assert (rope.layout, rope.rotary_dim) == ("interleaved", 8)
    assert fields(diff(trained(drafter, FACTS), served(drafter, EAGLE3), drafter)) == ["rope"]


def test_qwen3_defaults_of_speculators(tmp_path):
    folder = edited(tmp_path / "d", SPECULATORS)
    config = json.loads((folder / "config.json").read_text())
    inner = config["transformer_layer_config"]
    config["transformer_layer_config"] = {
        "model_type": "qwen3",
        **{k: inner[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads")},
        "intermediate_size": 384,
        "vocab_size": 1024,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    wiring = trained(open_checkpoint(folder))[1]
    assert (wiring.qk_norm, wiring.eps, wiring.max_positions, wiring.rope.theta) == (True, 1e-6, 32768, 1e4)


def test_own_embedding_where_the_target_is_wider(tmp_path):
    """A drafter narrower than its target keeps its own embedding; under EAGLE the engine would mix the
    widths.
    """
    wide = Target("LlamaForCausalLM", 256, 8, 1024)
    tensors = load_file(SGLANG / "model.safetensors")
    embedding = torch.zeros(1024, 128, dtype=torch.bfloat16)
    tensors["fc.weight"] = torch.zeros(128, 768, dtype=torch.bfloat16)
    tensors["input_norm.weight"] = torch.ones(768, dtype=torch.bfloat16)
    folder = edited(tmp_path / "d", config={"target_hidden_size": 256})
    save_file({**tensors, "embed_tokens.weight": embedding}, folder / "model.safetensors")
    drafter = open_checkpoint(folder)
    launch = Launch(algorithm="EAGLE3", target=wide)
    feed, wiring = served(drafter, launch)
    assert (feed.width, wiring.embedding, wiring.fc) == (768, "own", "applied")
    assert diff(trained(drafter, wide), (feed, wiring), drafter) == []
    assert "fc takes 768" in "; ".join(refusals(drafter, launch.edit(algorithm="EAGLE")))


def test_dummy_weights_fill_nothing():
    found = loading(open_checkpoint(SGLANG), EAGLE3.with_flags("--speculative-draft-load-format dummy"))
    assert set(found.initial) == set(found.params) - {"model.embed_tokens.weight"}
