"""data/: what is in it fits together; and the recipe's own logic. Figures: tests/server/test_data.py."""

import json
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from eaglelab.capture import open_capture
from eaglelab.errors import BadInput

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA / "recipe"))
import corpus  # noqa: E402
import make  # noqa: E402
import stages  # noqa: E402


def read(name: str) -> dict:
    return json.loads((DATA / name).read_text())


# What is there


def test_everything_is_there_and_small():
    for name in (
        *(
            "target/config.json",
            "target/model.safetensors",
            "target/tokenizer.json",
            "target/tokenizer_config.json",
        ),
        *("drafter-speculators/config.json", "drafter-speculators/model.safetensors"),
        *(
            "drafter-speculators/val_metrics.json",
            "drafter-sglang/config.json",
            "drafter-sglang/model.safetensors",
        ),
        *("prompts.jsonl", "figures.json", "features/meta.json", "features/hidden_states/hs_0.safetensors"),
        *("README.md", "golden-capture/capture.json", "golden-capture/events.jsonl"),
    ):
        assert (DATA / name).is_file(), name
    files = [f for f in DATA.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert sum(f.stat().st_size for f in files) <= 8_000_000


def test_no_file_names_the_machine_it_was_made_on():
    for file in (f for f in DATA.rglob("*") if f.suffix in (".json", ".jsonl", ".md", ".py")):
        found = re.findall(r"(?:/work|/tmp|/root|/home)/\S*", file.read_text())
        assert not found, f"{file}: {found}"


# The models


def test_target_and_drafter_have_the_same_shape():
    target, sglang = read("target/config.json"), read("drafter-sglang/config.json")
    trainer = read("drafter-speculators/config.json")["transformer_layer_config"]
    for config in (target, sglang, trainer):
        assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
            8,
            2,
            16,
        )
        assert (config["hidden_size"], config["vocab_size"], config["rms_norm_eps"]) == (128, 1024, 1e-5)
        assert config["max_position_embeddings"] == 512
    assert target["architectures"] == ["LlamaForCausalLM"] and target["num_hidden_layers"] == 8
    assert sglang["architectures"] == ["LlamaForCausalLMEagle3"] and sglang["num_hidden_layers"] == 1
    assert (
        target["rope_parameters"]
        == trainer["rope_parameters"]
        == {"rope_type": "default", "rope_theta": 10000.0}
    )
    assert sglang["rope_theta"] == 10000.0


def test_layer_ids_are_written_in_each_dialect():
    assert read("drafter-speculators/config.json")["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    # SGLang adds one to explicit ids (sglang 0.5.23 models/llama.py set_eagle3_layers_to_capture).
    eagle = read("drafter-sglang/config.json")["eagle_config"]
    assert eagle["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4] and eagle["use_aux_hidden_state"] is True


def test_drafter_points_at_the_target_beside_it():
    verifier = read("drafter-speculators/config.json")["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "../target"


def test_both_forms_of_the_drafter_hold_the_same_tensors():
    trainer = load_file(DATA / "drafter-speculators/model.safetensors")
    sglang = load_file(DATA / "drafter-sglang/model.safetensors")
    assert set(sglang) == {n.replace("layers.0.", "midlayer.") for n in trainer} - {"embed_tokens.weight"}
    for name, tensor in trainer.items():
        if name != "embed_tokens.weight":
            assert torch.equal(sglang[name.replace("layers.0.", "midlayer.")], tensor), name
    assert sglang["fc.weight"].shape == (128, 3 * 128) and sglang["input_norm.weight"].shape == (3 * 128,)
    assert sglang["d2t"].shape == (640,) and int(trainer["t2d"].sum()) == 640


def test_drafter_was_trained_for_this_target():
    target = load_file(DATA / "target/model.safetensors")
    drafter = load_file(DATA / "drafter-speculators/model.safetensors")
    assert torch.equal(drafter["embed_tokens.weight"], target["model.embed_tokens.weight"])
    # Its head is its own: nothing of the target's is left (a frozen head would be equal).
    kept = torch.arange(640) + drafter["d2t"]
    own, theirs = drafter["lm_head.weight"].float(), target["lm_head.weight"][kept].float()
    assert abs(torch.nn.functional.cosine_similarity(own, theirs).mean().item()) < 0.5


def test_weights_are_finite_bf16():
    for name in ("target", "drafter-speculators", "drafter-sglang"):
        for key, tensor in load_file(DATA / name / "model.safetensors").items():
            if key not in ("d2t", "t2d"):
                assert tensor.dtype == torch.bfloat16 and torch.isfinite(tensor).all(), (name, key)


# Prompts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DATA / "target/tokenizer.json"))


def test_prompts_parse_and_have_about_48_tokens(tokenizer):
    prompts = [json.loads(line) for line in (DATA / "prompts.jsonl").read_text().splitlines()]
    kinds = [list(prompt) for prompt in prompts]
    assert 8 <= len(prompts) <= 12
    assert kinds.count(["prompt"]) >= 6 and ["messages"] in kinds and ["input_ids"] in kinds
    for prompt in prompts:
        text = prompt.get("prompt") or (prompt.get("messages") or [{}])[0].get("content")
        ids = prompt.get("input_ids") or tokenizer.encode(text).ids
        assert 40 <= len(ids) <= 48, text
        assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_messages_are_one_text_for_a_base_model():
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template((DATA / "target/chat_template.jinja").read_text())
    said = [{"role": "system", "content": "It was late."}, {"role": "user", "content": "Emma"}]
    assert template.render(messages=said, add_generation_prompt=True) == "It was late.\nEmma"


# Stored features


@pytest.fixture(scope="module")
def samples() -> list[dict[str, torch.Tensor]]:
    return [load_file(f) for f in sorted((DATA / "features/hidden_states").glob("hs_*.safetensors"))]


def argmax(hidden: torch.Tensor) -> torch.Tensor:
    """The target's next token after each row [T, H] of its last hidden states (before the final norm)."""
    with safe_open(DATA / "target/model.safetensors", "pt") as weights:
        norm, head = (
            weights.get_tensor("model.norm.weight").float(),
            weights.get_tensor("lm_head.weight").float(),
        )
    x = hidden.float()
    return ((x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm) @ head.T).argmax(-1)


def test_features_are_in_the_offline_format(samples):
    assert len(samples) == 4
    for sample in samples:
        assert (
            sample["hidden_states"].shape == (192, 4, 128) and sample["hidden_states"].dtype == torch.bfloat16
        )
        assert sample["token_ids"].shape == (192,) and torch.isfinite(sample["hidden_states"]).all()
    meta = read("features/meta.json")
    assert meta["aux_layer_ids"] == [2, 4, 5] and meta["depths"] == [2, 4, 5, 8]


def test_features_have_hundreds_of_usable_starts(samples):
    """A start counts when each of the next 5 stored tokens is the target's argmax."""
    starts = 0
    for sample in samples:
        hit = argmax(sample["hidden_states"][:-1, 3]) == sample["token_ids"][1:]
        starts += int(hit.unfold(0, 5, 1).all(-1).sum())
    assert starts >= 500


def test_features_are_of_the_depths_that_they_name(samples):
    """The target, run again on the stored tokens, has these residual streams at depths 2, 4, 5 and 8."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32).eval()
    last = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    with torch.no_grad():
        streams = model.model(samples[0]["token_ids"][None], output_hidden_states=True).hidden_states
    for k, depth in enumerate((2, 4, 5, 8)):
        truth = last[0] if depth == 8 else streams[depth][0]
        assert torch.equal(samples[0]["hidden_states"][:, k], truth.bfloat16()), depth


def test_speculators_reads_the_features():
    """Its own dataset class, which its trainer and validator use."""
    data = pytest.importorskip("speculators.train.data")
    rows = data.ArrowDataset(max_len=512, datapath=DATA / "features", on_missing="raise")
    assert len(rows) == 4
    for row in (rows[i] for i in range(4)):
        assert row["hidden_states"].shape == (192, 3 * 128) and row["verifier_last_hidden_states"].shape == (
            192,
            128,
        )
        assert row["loss_mask"].tolist() == [0] * 40 + [1] * 152


# The golden capture


@pytest.fixture(scope="module")
def golden():
    return open_capture(DATA / "golden-capture")


def test_golden_capture_is_whole(golden):
    assert golden.widths == {"prefill_extend": 384, "draft": 128, "decode_extend": 384}
    assert (golden.launch.algorithm, golden.launch.steps, golden.launch.topk) == ("EAGLE3", 5, 1)
    assert (golden.launch.target_path, golden.launch.draft_path) == ("data/target", "data/drafter-sglang")
    assert len(golden.requests) == len(golden.reprefill) == 2
    for rid, trace in golden.requests.items():
        assert (
            trace.state == "complete"
            and trace.tokens[trace.prompt_len :][:64] == golden.sent[rid]["output_ids"]
        )
        counted = golden.sent[rid]["counters"]
        assert len(trace.rounds) == counted["spec_verify_ct"] > 12
        assert sum(r.accept_len - 1 for r in trace.rounds) == counted["spec_num_correct_drafts"] > 20


def test_golden_capture_holds_the_streams_of_the_target(golden):
    """What the server handed to the drafter, and the re-prefilled streams, as transformers computes them."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32).eval()
    for rid, trace in golden.requests.items():
        again = golden.reprefill[rid]
        with torch.no_grad():
            tokens = torch.tensor([again.token_ids])
            streams = [s[0] for s in model.model(tokens, output_hidden_states=True).hidden_states]
        truth = torch.cat([streams[depth] for depth in (2, 4, 5)], -1)
        fed = torch.from_numpy(trace.features)[: len(truth)]  # the last verify may have gone beyond the end
        assert len(fed) == len(truth) == trace.prompt_len + 64
        assert torch.allclose(fed, truth, atol=1e-3 * truth.abs().max().item())
        for depth in range(8):
            stream = torch.from_numpy(again.stream(depth))
            assert torch.allclose(stream, streams[depth], atol=1e-3 * streams[depth].abs().max().item()), (
                depth
            )
        assert torch.allclose(torch.from_numpy(again.final), streams[8], atol=0.05)  # after the final norm


# Words


def test_readme_names_licences_and_quotes_the_measured_figures():
    readme, figures = (DATA / "README.md").read_text(), read("figures.json")
    for word in ("public domain", "MIT", "r-cran-janeaustenr", "make data", "lm_head", "real models"):
        assert word in readme, word
    quoted = {f"{measured['accept_length']:.2f}" for measured in figures["measure"]["servers"].values()}
    quoted |= {f"{figures['target']['held_out_loss']:.2f}", f"{figures['drafter']['full_acc_0']:.3f}"}
    assert {q for q in quoted if q not in readme} == set()


# The recipe


def test_recipe_lists_its_stages():
    names = ["novels", "target", "texts", "drafter", "convert", "prompts", "measure", "capture", "install"]
    assert list(stages.STAGES) == names
    shown = subprocess.run(
        [sys.executable, DATA / "recipe/make.py", "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    for name in names:
        assert re.search(rf"^  {name} +[A-Z]", shown.stdout, re.MULTILINE), name


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    ran = []

    def stage(name):
        def do(_work):
            if name == "b" and ran.count("b") == 0:
                ran.append("b")
                raise KeyboardInterrupt
            ran.append(name)
            return {}

        return do

    monkeypatch.setattr(make, "STAGES", {name: stage(name) for name in "abc"})
    work = stages.Work(tmp_path, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        make.run(work, again=None, until=None)
    make.run(work, again=None, until=None)
    assert ran == ["a", "b", "b", "c"]
    make.run(work, again=None, until=None)
    assert ran == ["a", "b", "b", "c"]
    make.run(work, again="b", until="b")
    assert ran == ["a", "b", "b", "c", "b"]
    make.run(work, again=None, until=None)  # "b" was made anew, so what follows is too
    assert ran == ["a", "b", "b", "c", "b", "c"]


def test_recipe_says_what_the_environment_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make, "NEEDED", {"torch": "1.", "no-such-package": ""})
    monkeypatch.setattr(make, "DISK", 1e9)
    assert make.main(["--scratch", str(tmp_path), "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    for words in (
        r"torch: 1\.\* is needed",
        "no-such-package: not installed",
        "disk: .* GB are free",
        "make data",
    ):
        assert re.search(words, said), words


def test_smoke_keeps_its_toys_out_of_data(capsys):
    with pytest.raises(SystemExit):
        make.main(["--smoke"])
    assert "--data" in capsys.readouterr().err


def test_without_apt_the_recipe_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.shutil, "which", lambda _: None)
    with pytest.raises(BadInput, match="apt-get and dpkg-deb not found.*r-cran-janeaustenr.*Rdata.rdb"):
        corpus.fetch(tmp_path)


def xdr(strings: list[str], version: int) -> bytes:
    """A character vector as R's serialize() writes it."""
    head = b"X\n" + struct.pack(">3i", version, 0x040201, 0x030500 if version == 3 else 0x020300)
    if version == 3:
        head += struct.pack(">i", 5) + b"UTF-8"
    body = b"".join(struct.pack(">2i", 0x00040009, len(s.encode())) + s.encode() for s in strings)
    return head + struct.pack(">2i", 16, len(strings)) + body


@given(st.lists(st.lists(st.text(max_size=20), max_size=5), max_size=4), st.sampled_from([2, 3]))
def test_r_database_is_read_back(vectors, version):
    values = [xdr(strings, version) for strings in vectors]
    rdb = b"".join(struct.pack(">I", len(v)) + zlib.compress(v) for v in values)
    assert [corpus.r_strings(value) for value in corpus.r_values(rdb)] == vectors


def test_a_cut_off_r_database_is_refused():
    value = xdr(["Emma"], 2)
    rdb = struct.pack(">I", len(value) + 1) + zlib.compress(value)
    with pytest.raises(BadInput, match="byte 0"):
        list(corpus.r_values(rdb))


def test_held_out_blocks_are_kept_apart(tmp_path):
    lines = [f"Paragraph {i} of a novel that has many." for i in range(40 * 60)]
    value = xdr([x for line in lines for x in (line, "")], 3)
    (tmp_path / "x.rdb").write_bytes(struct.pack(">I", len(value)) + zlib.compress(value))
    training, held_out = corpus.blocks(tmp_path / "x.rdb")
    assert (len(training), len(held_out)) == (58, 2)
    assert held_out[0].startswith("Paragraph 480 ") and held_out[1].startswith("Paragraph 1480 ")
    together = sorted("".join(training + held_out).splitlines(), key=lambda x: int(x.split()[1]))
    assert together == lines


def test_vocabulary_map_is_of_offsets():
    drafter = load_file(DATA / "drafter-sglang/model.safetensors")
    kept = np.arange(640) + drafter["d2t"].numpy()
    assert kept.tolist() == sorted(set(kept.tolist())) and kept.max() < 1024
    assert np.flatnonzero(drafter["t2d"].numpy()).tolist() == kept.tolist()
