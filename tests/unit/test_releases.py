"""What older releases of SGLang do otherwise: each line of the table changes `served` as it says."""

from __future__ import annotations

import shlex

import httpx
import pytest
import torch
from drafters import DATA, SGLANG, edited

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.errors import AttachError, BadInput
from eaglelab.gather import static_evidence
from eaglelab.launch import Launch, Target
from eaglelab.layer_ids import captures_last, sglang_depths
from eaglelab.loader import loading
from eaglelab.releases import BEHAVIOURS, NEWEST, at_least, caveat, differences, does, number
from eaglelab.served import refusals, served
from eaglelab.server import Server

CHAIN = "--speculative-algorithm EAGLE3"
HIDDEN = 128


def under(version: str, flags: str = CHAIN, target: Target | None = None) -> Launch:
    return Launch.parse(flags, target=target or open_target(DATA / "target").facts, version=version)


@pytest.mark.parametrize(
    "text, expected",
    [("0.5.12.post1", (0, 5, 12)), ("v0.5.9", (0, 5, 9)), ("0.6.0.dev3+gabc", (0, 6, 0)), ("unknown", None)],
)
def test_numbers_of_versions(text, expected):
    assert number(text) == expected


def test_what_is_newer_or_unknown_counts_as_the_newest_and_says_so():
    assert differences(NEWEST) == differences("0.6.1") == differences("unknown") == []
    assert caveat(NEWEST) is None and caveat("0.5.11") is None
    assert "newer than what was checked" in caveat("0.6.1") and NEWEST in caveat("0.6.1")
    assert "not known" in caveat("unknown") and "older than what was checked" in caveat("0.4.6")
    assert len(differences("0.5.10")) == len(BEHAVIOURS) == len({b.name for b in BEHAVIOURS})
    assert set(differences("0.5.10")) - set(differences("0.5.11")) == {BEHAVIOURS[0].before}
    assert not does("0.5.16", "norm-before-fc") and does("0.5.17", "norm-before-fc")


def test_the_newest_release_serves_the_drafter_as_it_was_trained():
    evidence = static_evidence(open_checkpoint(SGLANG), under(NEWEST), open_target(DATA / "target"))
    assert not [d for d in evidence.differences if not d.inert]


def test_before_0_5_17_the_norm_before_fc_is_dropped_without_a_word():
    checkpoint = open_checkpoint(SGLANG)
    assert checkpoint.settings.norm_before_fc
    old, new = served(checkpoint, under("0.5.16"))[1], served(checkpoint, under("0.5.17"))[1]
    assert (old.norm_before_fc, old.dropped) == ("none", ("input_norm.weight",))
    assert (new.norm_before_fc, new.dropped) == ("whole", ())


def test_before_0_5_12_draft_steps_stand_one_position_further_on():
    checkpoint = open_checkpoint(SGLANG)
    assert [served(checkpoint, under(v))[1].step_offset for v in ("0.5.11", "0.5.12")] == [1, 0]


def test_before_0_5_12_only_the_name_midlayer_is_known(tmp_path):
    renamed = edited(tmp_path / "d", rename={"midlayer.": "layers.0."})
    for path, lost in ((SGLANG, False), (renamed, True)):
        checkpoint = open_checkpoint(path)
        wiring = served(checkpoint, under("0.5.11"))[1]
        assert ("layers.0.mlp.down_proj.weight" in wiring.unloaded) is lost
        assert ("layers.0.mlp.down_proj.weight" in wiring.dropped) is lost
        assert "model.midlayer.mlp.down_proj.weight" in loading(checkpoint, under("0.5.11")).params
        assert not served(checkpoint, under("0.5.12"))[1].unloaded


def test_before_0_5_12_the_feedback_flag_and_the_window_are_not_read(tmp_path):
    checkpoint = open_checkpoint(edited(tmp_path / "d", config={"norm_output": True}))
    flags = f"{CHAIN} --speculative-draft-window-size 16"
    old, new = served(checkpoint, under("0.5.11", flags))[1], served(checkpoint, under("0.5.12", flags))[1]
    assert (old.feedback, old.window) == ("pre-norm", None)
    assert (new.feedback, new.window) == ("post-norm", 17)


def test_before_0_5_12_norms_of_chunks_are_dropped(tmp_path):
    norms = {f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}
    checkpoint = open_checkpoint(edited(tmp_path / "d", config={"fc_norm": True}, add=norms))
    old, new = served(checkpoint, under("0.5.11"))[1], served(checkpoint, under("0.5.17"))[1]
    assert old.norm_before_fc == "none" and set(norms) <= set(old.dropped)
    assert new.norm_before_fc == "both" and not set(norms) & set(new.dropped)


def test_before_0_5_12_fc_takes_three_chunks_and_one_layer_is_served(tmp_path):
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}, "num_aux_hidden_states": 2}
    two = edited(tmp_path / "two", config=ids, drop=("fc", "input_norm"),
                 add={"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)})  # fmt: skip
    checkpoint = open_checkpoint(two)
    assert not refusals(checkpoint, under("0.5.12"))
    assert any("makes fc 128 x 384" in text for text in refusals(checkpoint, under("0.5.11")))
    layers = open_checkpoint(edited(tmp_path / "layers", config={"num_hidden_layers": 2}))
    assert any("serves one layer only" in text for text in refusals(layers, under("0.5.11")))
    assert not refusals(layers, under("0.5.12"))


def test_layer_ids_of_deepseek_and_gpt_oss_follow_the_release():
    kimi, oss = "KimiK25ForConditionalGeneration", "GptOssForCausalLM"
    assert sglang_depths((2, 30, 58), kimi, 61, "0.5.12") == (3, 31, 59)  # before sglang#25454
    assert sglang_depths((2, 30, 58), kimi, 61, "0.5.13") == (2, 30, 58)
    assert sglang_depths((1, 29, 57), kimi, 61, "0.5.12") == sglang_depths((1, 29, 57), kimi, 61)
    assert sglang_depths((2, 12, 24), oss, 24, "0.5.16") == (3, 13, 25)
    assert sglang_depths((2, 12, 24), oss, 24, "0.5.17") == (2, 12, 24)
    assert not captures_last(oss, "0.5.16") and captures_last(oss, "0.5.17")
    assert not captures_last("LlamaForCausalLM") and captures_last("Gemma3ForCausalLM", "0.5.12")


def test_ids_of_a_kimi_drafter_are_named_on_the_release_that_adds_one():
    """The same drafter and launch: fed as trained by 0.5.13, one layer later by 0.5.12."""
    checkpoint = open_checkpoint(SGLANG)  # ids [1, 3, 4]; here on a target of Kimi's rule
    target = open_target(DATA / "target").facts
    kimi = Target("DeepseekV3ForCausalLM", target.hidden_size, target.num_layers, target.vocab_size)
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}
    from dataclasses import replace

    moved = replace(checkpoint, config=checkpoint.config | ids)
    fed = {v: served(moved, under(v, target=kimi))[0].depths for v in ("0.5.12", "0.5.13")}
    assert fed == {"0.5.12": (3, 5, 6), "0.5.13": (2, 4, 5)}


def _names(version: str, checkpoint=None) -> dict[str, str]:
    from eaglelab.checks import static

    evidence = static_evidence(
        checkpoint or open_checkpoint(SGLANG), under(version), open_target(DATA / "target")
    )
    return {f.fault: f.verdict for f in static.findings(evidence)}


def test_the_diagnosis_of_an_old_release_names_what_it_does_otherwise():
    found = _names("0.5.11")
    named = ("norm-before-fc-not-applied", "norm-output", "position-offset")
    assert {name for name, verdict in found.items() if verdict == "failed"} == set(named)
    assert found["engine-regression"] == "passed"  # what the release does otherwise, as evidence
    assert "engine-regression" not in _names(NEWEST) and _names("0.7.0")["engine-regression"] == "skipped"
    assert "failed" not in _names(NEWEST).values() and "failed" not in _names("0.7.0").values()


OLD = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4, "tp_size": 1, "dtype": "float32", "model_path": "/m",
    "speculative_draft_model_path": "/d",
    "internal_states": [{"avg_spec_accept_length": 1.02}],
}  # fmt: skip
ANSWER = {
    "output_ids": [1, 2, 3], "text": "abc",
    "meta_info": {"completion_tokens": 3, "spec_verify_ct": 2, "spec_accept_token_num": 0,
                  "spec_draft_token_num": 6, "finish_reason": {"type": "length"}},
}  # fmt: skip


@pytest.mark.parametrize(
    "version, words",
    [
        ("0.5.10.post1", "too old for plugins .0.5.11 and later"),
        ("0.5.12", "too old for the probe .it attaches to 0.5.14"),
        ("0.5.20", "has no eaglelab plugin"),
    ],
)
def test_a_server_without_the_probe_is_refused_and_told_what_still_works(version, words):
    """Old, or new without our plugin: facts, counters and the static diagnosis still work."""

    def answer(request: httpx.Request) -> httpx.Response:
        pages = {"/get_server_info": OLD | {"version": version}, "/get_model_info": {"model_path": "/m"},
                 "/generate": [ANSWER]}  # fmt: skip
        page = pages.get(request.url.path)
        return httpx.Response(404) if page is None else httpx.Response(200, json=page)

    server = Server("http://127.0.0.1:30000", transport=httpx.MockTransport(answer))
    with pytest.raises(AttachError, match=words) as caught:
        server.probe_status()
    said = str(caught.value)
    assert caught.value.exit_code == 3 and "Facts, counters and a static diagnosis still work" in said
    command = shlex.split(said[said.index("eaglelab inspect ") :])
    assert command[2:7] == ["/d", "--target", "/m", "--engine", f"sglang=={version}"]
    assert Launch.parse(command[8], version=version).draft_tokens == 4  # the server's own launch
    facts = server.facts()
    assert facts.version == version and facts.lifetime_accept_length == pytest.approx(1.02)
    counted = {m.name: m.value for m in server.counters(server.generate([[1, 2]], 3), facts).measurements()}
    assert counted["accept_length.server"] == 1.0 and counted["acceptance_rate.server"] == 0.0
    assert counted["accept_length.sglang"] == 1.5  # the prefill's token counts there
    launch = facts.launch.with_target(open_target(DATA / "target").facts)
    assert launch.version == version
    step_offset = served(open_checkpoint(SGLANG), launch)[1].step_offset
    assert step_offset == (0 if at_least(version, (0, 5, 12)) else 1)


@pytest.mark.parametrize("version, attaches", [("0.5.13", False), ("0.5.14", True)])
def test_a_probe_that_answers_without_a_rank_attaches_from_0_5_14(version, attaches):
    """0.5.11 to 0.5.13 load the plugin, but their draft worker has nothing to hook at its start."""
    pages = {"/server_info": OLD | {"version": version}, "/model_info": {}, "/eaglelab/status": {"ranks": {}}}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=pages[request.url.path]))
    server = Server("http://127.0.0.1:30000", transport=transport)
    if attaches:
        assert server.probe_status() == {"ranks": {}}  # still starting: the capture says so
    else:
        with pytest.raises(AttachError, match="too old for the probe"):
            server.probe_status()


def test_a_drafter_with_latent_attention_needs_0_5_12():
    from dataclasses import replace

    from eaglelab.settings import Latent

    checkpoint = open_checkpoint(SGLANG)
    latent = Latent(*[8] * len(Latent.__dataclass_fields__))
    mla = replace(checkpoint, settings=replace(checkpoint.settings, latent=latent))
    assert any("has no MLA drafter" in text for text in refusals(mla, under("0.5.11")))
    assert not any("has no MLA drafter" in text for text in refusals(mla, under("0.5.12")))


def test_an_engine_that_is_not_modelled_is_refused():
    with pytest.raises(BadInput, match="only sglang is modelled"):
        served(open_checkpoint(SGLANG), under(NEWEST).edit(engine="vllm"))
