"""The trainer's validation accuracy: equal to what speculators' own model says on the same texts."""

from __future__ import annotations

import json

import pytest
import torch
from drafters import SPECULATORS, TARGET
from trainer import DRAFT, VOCAB, H, trainer_model, wired

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.drafter import Drafter
from eaglelab.features import StoredFeatures
from eaglelab.stored import Truth, stored_texts
from eaglelab.trained import trained
from eaglelab.training_accuracy import Counts, Document, drafts, measure, of_stored, said

STEPS = 5


def reference(model, sequences, steps):
    """speculators' own forward and metrics over packed sequences -> {full, conditional}, by step."""
    from speculators.losses import resolve_loss_config
    from speculators.train.utils import normalize_counted_metrics

    loss = resolve_loss_config("kl_div", "eager")  # the fused one needs an accelerator

    sums: dict[str, float] = {}
    for documents in sequences:
        lengths = [len(d.tokens) - 1 for d in documents]
        with torch.no_grad():
            _, _, metrics = model(
                hidden_states=torch.cat([d.features[:-1] for d in documents])[None],
                input_ids=torch.cat([d.tokens[1:] for d in documents])[None],
                document_ids=torch.arange(len(documents)).repeat_interleave(torch.tensor(lengths))[None],
                loss_mask=torch.cat([d.mask[1:] for d in documents])[None],
                position_ids=torch.cat([torch.arange(1, n + 1) for n in lengths])[None],
                verifier_last_hidden_states=torch.cat([d.last[1:] for d in documents])[None],
                ttt_steps=steps,
                loss_config=loss,
            )
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    means = normalize_counted_metrics(sums)
    names = {"full": "full_acc_{}", "conditional": "cond_acc_{}"}
    return {kind: [means[name.format(t)] for t in range(steps)] for kind, name in names.items()}


class Head:
    """A target's final norm and head, as `Truth` holds them."""

    def __init__(self, norm, head, eps=1e-5):
        self.norm, self.head, self.eps, self.device = norm, head, eps, "cpu"


def shipped():
    """The shipped features, the drafter under its trained wiring, the truth, and speculators' own model."""
    checkpoint, target = open_checkpoint(SPECULATORS), open_target(TARGET)
    feed, wiring = trained(checkpoint, target.facts)
    drafter = Drafter(checkpoint, wiring, target, dtype=torch.float32)
    stored = StoredFeatures.open(SPECULATORS.parent / "features")
    texts = list(stored_texts(stored, feed))
    documents = [
        Document(torch.tensor(t.tokens), t.features, t.last, torch.tensor(stored.samples[t.index].loss_mask))
        for t in texts
    ]
    return drafter, Truth(target), documents, stored, texts


@pytest.fixture(scope="module")
def data():
    return shipped()


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """speculators' own Eagle3DraftModel, loaded from the shipped checkpoint by its own code."""
    import shutil

    from speculators.models.eagle3.core import Eagle3DraftModel

    folder = tmp_path_factory.mktemp("genuine") / "drafter"
    shutil.copytree(SPECULATORS, folder)
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(TARGET)
    config["transformer_layer_config"]["_attn_implementation"] = "eager"
    (folder / "config.json").write_text(json.dumps(config))
    model = Eagle3DraftModel.from_pretrained(folder)
    model.load_verifier_weights()
    return model.float().eval()


@pytest.mark.parametrize("pack", [1, 2])
def test_it_equals_speculators_own_model_on_the_shipped_features(data, genuine, pack):
    drafter, truth, documents, *_ = data
    assert genuine._attn_impl == "eager"
    ours = measure(drafter, truth, documents, STEPS, pack)
    sequences = [documents[i : i + pack] for i in range(0, len(documents), pack)]
    theirs = reference(genuine, sequences, STEPS)
    assert ours.trainer.full == pytest.approx(theirs["full"], abs=1e-3)
    assert ours.trainer.conditional == pytest.approx(theirs["conditional"], abs=1e-3)
    assert 0.5 < ours.trainer.full[0] < 1.0 and ours.trainer.full[4] < ours.trainer.full[0]


@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_output": True}, {"norm_before_fc": True, "norm_before_residual": True}, {"layers": 2}],
)
def test_it_equals_speculators_own_model_with_random_weights(flags):
    """Odd lengths, a loss mask with holes, a reduced vocabulary, texts packed by threes."""
    model = trainer_model(**flags)
    torch.manual_seed(4)
    norm, head = torch.rand(H) + 0.5, torch.randn(VOCAB, H)
    kept = torch.arange(DRAFT) + model.d2t
    with torch.no_grad():
        model.verifier_norm.weight.copy_(norm)
        model.verifier_lm_head.weight.copy_(head[kept])
    documents = [
        Document(torch.randint(VOCAB, (n,)), torch.randn(n, 3 * H), torch.randn(n, H), torch.rand(n) > 0.3)
        for n in (9, 30, 6, 17, 23)
    ]
    drafter = wired(model)
    # A drafter with random weights is never right: let the truth be its own first drafts now and then.
    documents = [_partly_right(drafter, d, norm, head) for d in documents]
    for pack in (1, 3):
        ours = measure(drafter, Head(norm, head), documents, 4, pack)
        theirs = reference(model, [documents[i : i + pack] for i in range(0, 5, pack)], 4)
        assert ours.trainer.full == pytest.approx(theirs["full"], abs=1e-6)
        assert ours.trainer.conditional == pytest.approx(theirs["conditional"], abs=1e-6)
        assert ours.trainer.full[1] > 0


def _partly_right(drafter, document, norm, head):
    """The text with states under which the target says what the drafter drafts, at two places of three."""
    predicted = drafts(drafter, [document], 2)
    last = document.last.clone()
    for i in range(len(predicted)):
        if i % 3:
            last[i + 1] = head[predicted[i, 0]] / norm * 20
    return Document(document.tokens, document.features, last, document.mask)


def test_the_steps_that_are_counted_by_hand():
    """Four rows, two steps; the third row is not under the mask."""
    counts = Counts.none(2)
    predicted = torch.tensor([[5, 6], [6, 7], [7, 8], [9, 0]])
    counts.add(predicted, torch.tensor([5, 6, 7, 8]), torch.tensor([True, True, False, True]))
    # step 0: rows 0 and 1 right, row 3 wrong. Step 1: row 0 right (target row 1); row 1 right too, but its
    # target row 2 is not under the mask; row 2 never started. Its target rows 1 and 3 count.
    assert counts.right.tolist() == [2, 1] and counts.counted.tolist() == [3, 2]
    assert counts.before.tolist() == [3, 2]
    assert counts.full == [2 / 3, 0.5] and counts.conditional == [2 / 3, 0.5]


def test_positions_without_a_draft_id_counted_and_left_out():
    """Three positions of four have no draft id; of the others the drafter is right at all."""
    model = trainer_model()
    drafter = wired(model)
    torch.manual_seed(5)
    norm, head, n = torch.ones(H), torch.nn.functional.normalize(torch.randn(VOCAB, H)), 41
    tokens, features = torch.randint(VOCAB, (n,)), torch.randn(n, 3 * H)
    empty = Document(tokens, features, torch.zeros(n, H), torch.ones(n, dtype=torch.bool))
    own = drafts(drafter, [empty], 1)[:, 0]
    foreign = next(i for i in range(VOCAB) if i not in drafter.vocabulary)
    last = torch.zeros(n, H)
    last[1:] = head[torch.where(torch.arange(n - 1) % 4 == 0, own, torch.tensor(foreign))]
    found = measure(drafter, Head(norm, head), [Document(tokens, features, last, empty.mask)], 2)
    rows = {m.name: m for m in found.measurements()}
    full, counted, left_out = (rows[f"training_accuracy.{k}.step0"] for k in ("full", "counted", "left_out"))
    assert (counted.value, counted.count, left_out.value, left_out.count) == (0.25, 40, 1.0, 10)
    assert rows["training_accuracy.out_of_vocabulary"].value == 0.75
    assert 0.25 <= full.value < 1.0 and full.count == 40  # the trainer judges by the best token with an id
    assert all(m.definition and m.count is not None for m in rows.values())


def test_what_the_trainer_said_stands_beside_it(data, tmp_path):
    drafter, truth, _, stored, texts = data
    found = of_stored(drafter, truth, stored, texts, STEPS, SPECULATORS)
    wrote = json.loads((SPECULATORS / "val_metrics.json").read_text())
    rows = {m.name: m.value for m in found.measurements()}
    for t in range(STEPS):
        assert rows[f"training_accuracy.said.full.step{t}"] == wrote[f"full_acc_{t}_epoch"]
        assert rows[f"training_accuracy.said.conditional.step{t}"] == wrote[f"cond_acc_{t}_epoch"]
    assert found.masked and said(tmp_path, STEPS) == {}
    (tmp_path / "val_metrics.json").write_text('{"full_acc_0_epoch": 0.5, "full_acc_1_epoch": null}')
    assert said(tmp_path, STEPS) == {"full": [0.5]}
    (tmp_path / "val_metrics.json").write_text("[")
    assert said(tmp_path, STEPS) == {}


def test_the_report_shows_what_is_left_of_it(data):
    from eaglelab.tables import accuracy_table

    drafter, truth, documents, *_ = data
    rows = measure(drafter, truth, documents, 2).measurements()
    shown = accuracy_table(rows)
    assert f"{rows[0].value:.4g}"[:5] in shown and "rung 2" in shown and accuracy_table([]) == ""
    assert shown.count("<tr") == 3  # the header, and one row a step


def test_a_text_of_one_token_has_no_row():
    model, alone = trainer_model(), torch.ones(1, dtype=torch.bool)
    one = Document(torch.tensor([3]), torch.randn(1, 3 * H), torch.randn(1, H), alone)
    found = measure(wired(model), Head(torch.ones(H), torch.randn(VOCAB, H)), [one], 3)
    assert found.trainer.full == [0.0] * 3 and found.positions == 0
    rows = found.measurements()
    assert all(m.value is None and "no position" in m.reason for m in rows) and len(rows) == 13
