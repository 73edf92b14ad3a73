"""The drafter under the trained wiring is the trainer's own model, and its stages are what they say."""

from __future__ import annotations

import pytest
import torch
from trainer import DRAFT, HEADS, KV, ROWS, STEPS, VOCAB, Checkpoint, D, H, trainer_model, wired

from eaglelab.drafter import Drafter
from eaglelab.drafting import Drafting
from eaglelab.errors import BadInput
from eaglelab.rope import frequencies, rotate
from eaglelab.wiring import Rope, Wiring

CASES = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "all at once": {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True},
    "2 chunks": {"chunks": 2, "fc_norm": True},
    "5 chunks": {"chunks": 5, "norm_before_fc": True},
    "1 chunk": {"chunks": 1},
    "2 layers": {"layers": 2, "norm_output": True},
    "q and k norms": {"qk_norm": True},
    "biases": {"bias": True},
    "whole vocabulary": {"draft_vocab": VOCAB},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_trained_wiring_is_the_trainers_own_model(case):
    """Each draft step's logits and fed-back states equal speculators' Eagle3DraftModel to 1e-4."""
    model = trainer_model(**case)
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS + 1,))
    features = torch.randn(ROWS, model.fc.in_features)

    seen = []
    model.lm_head.register_forward_hook(lambda _, given, out: seen.append((given[0][0], out[0])))
    with (
        torch.no_grad()
    ):  # teacher-forced steps, as the trainer runs them: row r, step j is fed token r + 1 + j
        drafts = model(
            features[None], tokens[None, 1:], torch.zeros(1, ROWS, dtype=torch.long), ttt_steps=STEPS
        )

    logits, normed = [], []
    forced = torch.stack([torch.cat([tokens[2 + j :], tokens.new_zeros(1 + j)]) for j in range(STEPS)], dim=1)
    text = Drafting.over(wired(model), tokens, features)
    normed.append(text.normed)
    chains = text.chain(
        torch.arange(1, ROWS + 1), STEPS, forced,
        tap=lambda stage, x: (logits if stage == "logits" else normed if stage == "norm" else []).append(x),
    )  # fmt: skip

    assert len(logits) == len(normed) == len(seen) == STEPS
    for step, (state, expected) in enumerate(seen):
        torch.testing.assert_close(normed[step], state, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits[step], expected, atol=1e-4, rtol=1e-4)
        own = drafts[step][0] + (model.d2t[drafts[step][0]] if model.use_draft_vocab else 0)
        assert chains.tokens[:, step].tolist() == own.tolist()


def test_each_flag_matters():
    """The test above would see a flag that is read wrong: each moves the logits by far more than 1e-4."""
    torch.manual_seed(1)
    tokens, features = torch.randint(VOCAB, (ROWS + 1,)), torch.randn(ROWS, 3 * H)
    model = trainer_model(norm_before_fc=True)
    right = wired(model)
    state = {**model.state_dict(), **{f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)}}
    reference = Drafting.over(right, tokens, features).chain([9, 20], 3).probability
    edits = {"norm_before_fc": ("none", "per-chunk"), "residual": ("normed",), "feedback": ("post-norm",),
             "rope": (Rope(theta=1e6),), "step_offset": (7,), "token_shift": (0,), "eps": (0.1,)}  # fmt: skip
    for field, values in edits.items():
        for value in values:
            wrong = Drafter(Checkpoint(state), Wiring(**{**vars(right.wiring), field: value}))
            changed = Drafting.over(wrong, tokens, features).chain([9, 20], 3).probability
            assert (changed - reference).abs().max() > 1e-3, (field, value)


def drafter(seed=0, **changes) -> Drafter:
    model = trainer_model(norm_output=True)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("verifier")}
    wiring = Wiring(**{**vars(wired(model).wiring), **changes})
    torch.manual_seed(seed + 5)
    target = Checkpoint(
        {"embed_tokens.weight": torch.randn(VOCAB, H), "lm_head.weight": torch.randn(VOCAB, H)}
    )
    return Drafter(Checkpoint(weights), wiring, target)


def test_extend_in_pieces_equals_the_whole():
    torch.manual_seed(2)
    tokens, features = torch.randint(VOCAB, (31,)), torch.randn(30, 3 * H)
    whole = Drafting.over(drafter(), tokens, features)
    pieces = Drafting(drafter())
    for start, end in [(0, 1), (1, 12), (12, 30)]:
        pieces.extend(tokens[start + 1 : end + 1], features[start:end])
    torch.testing.assert_close(pieces.feedback, whole.feedback, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pieces.keys[0], whole.keys[0], atol=1e-5, rtol=1e-5)


def test_rows_after_the_start_change_nothing():
    """A draft from n rows sees these n rows only: later features and tokens may be anything."""
    torch.manual_seed(3)
    tokens, features = torch.randint(VOCAB, (31,)), torch.randn(30, 3 * H)
    before = Drafting.over(drafter(), tokens, features).chain([11], 4)
    features[11:] = 100 * torch.randn(19, 3 * H)
    tokens[12:] = 5
    after = Drafting.over(drafter(), tokens, features).chain([11], 4)
    assert before.tokens.tolist() == after.tokens.tolist()
    torch.testing.assert_close(before.probability, after.probability)


def test_bypassed_fc_takes_rows_of_its_own_width():
    bypassed = drafter(fc="bypassed")
    rows = torch.randn(5, H)
    assert torch.equal(bypassed.project(rows), rows)
    with pytest.raises(BadInput, match="features are 192 wide; the drafter with fc bypassed takes 64"):
        bypassed.project(torch.randn(5, 3 * H))
    with pytest.raises(BadInput, match="features are 64 wide; the drafter with fc applied takes 192"):
        drafter().project(rows)


def test_the_targets_head_is_cut_to_the_draft_vocabulary():
    """SGLang under EAGLE: the target's head stands in, cut to draft_vocab_size columns, and no d2t."""
    wrong = drafter(lm_head="target", embedding="target", vocab_map="dropped", logits_width=DRAFT)
    state = torch.randn(3, H)
    expected = (state @ wrong.head.T)[:, :DRAFT]
    torch.testing.assert_close(wrong.logits(state), expected)
    assert wrong.to_target(torch.tensor([0, 7, 39])).tolist() == [0, 7, 39]


def test_vocabulary_map_adds_the_offsets():
    tensors = dict(trainer_model().state_dict())
    tensors["d2t"] = torch.arange(DRAFT) + 3  # draft id i stands for target id 2 i + 3
    mapped = Drafter(Checkpoint(tensors), drafter().wiring)
    assert mapped.to_target(torch.tensor([0, 1, 39])).tolist() == [3, 5, 81]


def test_parameters_that_the_engine_never_loads():
    """A norm stays at ones; the values of anything else are unknown and said to be."""
    config = {"hidden_size": H, "num_attention_heads": HEADS, "intermediate_size": 80, "vocab_size": VOCAB}
    tensors = dict(trainer_model().state_dict())
    for gone in ("norm.weight", "layers.0.mlp.up_proj.weight"):
        del tensors[gone]
    wiring = Wiring(**{**vars(drafter().wiring), "unloaded": ("norm.weight", "layers.0.mlp.up_proj.weight")})
    lacking = Drafter(Checkpoint(tensors, config), wiring)
    assert torch.equal(lacking.weights["norm.weight"], torch.ones(H))
    assert lacking.guessed == ("layers.0.mlp.up_proj.weight",)
    assert lacking.weights["layers.0.mlp.up_proj.weight"].shape == (80, H)
    with pytest.raises(BadInput, match="memory: tensor norm.weight is missing"):
        Drafter(Checkpoint(tensors, config), drafter().wiring)


def test_a_missing_target_is_named():
    with pytest.raises(BadInput, match="lm_head.weight is the target's under this wiring"):
        drafter_without_target = Wiring(heads=HEADS, head_dim=D, lm_head="target", embedding="own")
        Drafter(Checkpoint(dict(trainer_model().state_dict())), drafter_without_target)


def test_every_stage_can_be_read():
    stages = []
    text = Drafting.over(drafter(norm_before_fc="none"), torch.arange(9), torch.randn(8, 3 * H))
    text.chain([4], 2, tap=lambda stage, x: stages.append((stage, tuple(x.shape))))
    once = [
        ("logits", (1, DRAFT)), ("vocabulary_map", (1,)), ("embed", (1, H)), ("layers.0.hidden_norm", (1, H)),
        ("layers.0.input_layernorm", (1, H)), ("layers.0.v", (1, KV, D)), ("layers.0.q", (1, HEADS, D)),
        ("layers.0.q_rope", (1, HEADS, D)), ("layers.0.k", (1, KV, D)), ("layers.0.k_rope", (1, KV, D)),
        ("layers.0.attention", (1, HEADS * D)), ("layers.0.o_proj", (1, H)),
        ("layers.0.post_attention_layernorm", (1, H)), ("layers.0.mlp", (1, H)), ("norm", (1, H)),
        ("feedback", (1, H)),
    ]  # fmt: skip
    assert stages == once + once[:2]


def test_forced_gap_is_how_far_the_fed_token_lies_below_the_best():
    text = Drafting.over(drafter(), torch.arange(9), torch.randn(8, 3 * H))
    free = text.chain([6], 2)
    logits = text.drafter.logits(text.normed[[5]])[0]
    worst = int(text.drafter.to_target(logits.argmin()))
    outside = next(t for t in range(VOCAB) if t not in set(text.drafter.vocabulary.tolist()))
    assert text.chain([6], 2, forced=[free.tokens[0].tolist()]).gap[0].tolist() == [0.0, 0.0]
    assert text.chain([6], 2, forced=[[worst, outside]]).gap[0, 0] == pytest.approx(
        float(logits.max() - logits.min())
    )
    assert text.chain([6], 2, forced=[[worst, outside]]).gap[0, 1] == float("inf")


def test_free_gap_is_how_far_the_runner_up_lies_behind():
    logits = []
    text = Drafting.over(drafter(), torch.arange(9), torch.randn(8, 3 * H))
    free = text.chain([6, 8], 2, tap=lambda stage, x: logits.append(x) if stage == "logits" else None)
    for step, rows in enumerate(logits):
        best = rows.sort(descending=True).values
        assert free.gap[:, step].tolist() == (best[:, 0] - best[:, 1]).tolist()
        torch.testing.assert_close(free.probability[:, step], rows.softmax(-1).max(-1).values)


def test_a_start_needs_its_rows():
    text = Drafting.over(drafter(), torch.arange(9), torch.randn(8, 3 * H))
    for start in (0, 9):
        with pytest.raises(ValueError, match="starts go from 1 to 8"):
            text.chain([start], 2)
    assert text.chain([], 2).tokens.shape == (0, 2)


def test_window_hides_old_rows():
    """Window w: a row sees the last w positions, its own included (speculators: kv > q - w)."""
    torch.manual_seed(4)
    tokens, features = torch.randint(VOCAB, (31,)), torch.randn(30, 3 * H)
    narrow = drafter(window=5)
    before = Drafting.over(narrow, tokens, features)
    features[:20] *= -3
    after = Drafting.over(narrow, tokens, features)
    torch.testing.assert_close(before.normed[24:], after.normed[24:])  # row 24 sees rows 20..24
    assert (before.normed[23] - after.normed[23]).abs().max() > 1e-3
    one, two = before.chain([25], 3), after.chain([25], 3)
    torch.testing.assert_close(one.probability, two.probability)


ROPES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512},
    "yarn": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn plain": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
}  # fmt: skip


@pytest.mark.parametrize("scaling", ROPES.values(), ids=ROPES)
def test_rope_frequencies_are_those_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=8192,
        rope_parameters={"rope_theta": 50000.0, "rope_type": "default", **scaling},
    )  # fmt: skip
    reference = LlamaRotaryEmbedding(config)
    inverse, factor = frequencies(Rope(50000.0, tuple(sorted(scaling.items()))), 64, 8192)
    torch.testing.assert_close(inverse, reference.inv_freq)
    assert factor == pytest.approx(reference.attention_scaling)


def test_interleaved_layout_is_the_half_layout_on_shuffled_channels():
    x, positions, table = torch.randn(5, 2, 8), torch.arange(5), frequencies(Rope(), 8)
    pairs = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # even channels first: 2i, 2i + 1 become i, i + 4
    turned = rotate(x[..., pairs], positions, table, "half")
    torch.testing.assert_close(rotate(x, positions, table, "interleaved")[..., pairs], turned)


def test_partial_rotary_leaves_the_tail():
    x, positions = torch.randn(5, 2, 8), torch.arange(5)
    turned = rotate(x, positions, frequencies(Rope(rotary_dim=4), 8), "half")
    assert torch.equal(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[..., :4], rotate(x[..., :4], positions, frequencies(Rope(), 4), "half"))


@pytest.mark.parametrize(("family", "layout"), [("Glm", "interleaved"), ("Phi", "half")])
def test_partial_rope_is_that_of_transformers(family, layout):
    """GLM rotates part of a head in pairs, Phi in halves."""
    import importlib

    import transformers

    modeling = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=48, num_attention_heads=2, num_key_value_heads=2, head_dim=24, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    x, positions = torch.randn(9, 2, 24), torch.arange(9)
    cos, sin = getattr(modeling, f"{family}RotaryEmbedding")(config)(x, positions[None])
    assert cos.shape[-1] == 12
    rows = x.transpose(0, 1)[None]  # [1, heads, rows, d]
    apply = modeling.apply_rotary_pos_emb
    if family == "Phi":  # its attention cuts the head before it rotates
        turned, _ = apply(rows[..., :12], rows[..., :12], cos, sin)
        expected = torch.cat([turned, rows[..., 12:]], dim=-1)
    else:
        expected, _ = apply(rows, rows, cos, sin)
    table = frequencies(Rope(300.0, rotary_dim=12), 24)
    torch.testing.assert_close(rotate(x, positions, table, layout), expected[0].transpose(0, 1))


def test_unknown_scaling_is_refused():
    with pytest.raises(BadInput, match="type 'longrope' is not known"):
        frequencies(Rope(scaling=(("type", "longrope"),)), 64)


def test_tokens_tree_of_paths():
    """With KV that follows the parent, a tree's scores are those of its paths, drafted one by one."""
    torch.manual_seed(6)
    tokens, features = torch.randint(VOCAB, (31,)), torch.randn(30, 3 * H)
    text = Drafting.over(drafter(tree_kv="parent"), tokens, features)
    tree = text.tree([17, 29], steps=3, topk=3, nodes=10)
    for start, row in zip([17, 29], range(2), strict=True):
        for node in range(9):
            path, at = [], node + 1
            while at:
                path.append(int(tree.tokens[row, at - 1]))
                at = int(tree.parents[row, at - 1])
            path.reverse()
            logits: list[torch.Tensor] = []
            text.chain(
                [start],
                len(path),
                [path],
                tap=lambda s, x, keep=logits: keep.append(x) if s == "logits" else None,
            )
            ids = [text.drafter.vocabulary.tolist().index(t) for t in path]
            product = torch.tensor(
                [float(x[0].softmax(-1)[i]) for x, i in zip(logits, ids, strict=True)]
            ).prod()
            assert float(tree.score[row, node]) == pytest.approx(float(product), rel=1e-4)
        depths = [0]
        for parent in tree.parents[row].tolist():
            depths.append(depths[parent] + 1)
        assert depths == sorted(depths)  # in the order in which they were drafted, not by score


def test_a_tree_of_width_one_is_the_chain():
    torch.manual_seed(7)
    tokens, features = torch.randint(VOCAB, (31,)), torch.randn(30, 3 * H)
    text = Drafting.over(drafter(), tokens, features)
    tree = text.tree([5, 12, 30], steps=4, topk=1, nodes=5)
    assert tree.tokens.tolist() == text.chain([5, 12, 30], 4).tokens.tolist()
    assert tree.parents.tolist() == [[0, 1, 2, 3]] * 3


def test_batched_trees_equal_trees_drafted_one_by_one():
    torch.manual_seed(8)
    tokens, features = torch.randint(VOCAB, (31,)), torch.randn(30, 3 * H)
    text = Drafting.over(drafter(), tokens, features)
    together = text.tree([5, 12, 30], steps=4, topk=4, nodes=16)
    for row, start in enumerate([5, 12, 30]):
        alone = text.tree([start], steps=4, topk=4, nodes=16)
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()
        assert together.parents[row].tolist() == alone.parents[0].tolist()


def test_a_later_layer_under_an_unloaded_hidden_norm():
    """SGLang's later layers norm with hidden_norm, which speculators never writes: it stays at ones."""
    model = trainer_model(layers=2)
    wiring = Wiring(**{**vars(wired(model).wiring), "later_norm": "hidden_norm"})
    wiring = Wiring(**{**vars(wiring), "unloaded": ("layers.1.hidden_norm.weight",)})
    config = {"hidden_size": H, "num_attention_heads": HEADS, "intermediate_size": 80, "vocab_size": VOCAB}
    served = Drafter(Checkpoint(dict(model.state_dict()), config), wiring)
    state = dict(model.state_dict()) | {"layers.1.input_layernorm.weight": torch.ones(H)}
    same = Drafter(Checkpoint(state), wired(model).wiring)
    tokens, features = torch.arange(20), torch.randn(19, 3 * H)
    torch.testing.assert_close(
        Drafting.over(served, tokens, features).normed, Drafting.over(same, tokens, features).normed
    )
    assert served.guessed == ()


def test_the_targets_rows_stand_in_for_a_head_that_was_left_out():
    """A drafter saved without a head of its own was trained on the target's rows of its vocabulary."""
    shared = drafter(lm_head="target", embedding="target")
    wide = drafter(lm_head="target", embedding="target", vocab_map="dropped")
    torch.testing.assert_close(shared.head, wide.head[shared.vocabulary])


def test_the_whole_context_can_be_shifted():
    """Rope is relative: positions may start anywhere."""
    tokens, features = torch.arange(20), torch.randn(19, 3 * H)
    one, two = (Drafting.over(drafter(position_start=p), tokens, features).chain([7], 4) for p in (0, 1))
    torch.testing.assert_close(one.probability, two.probability, atol=1e-5, rtol=1e-5)
