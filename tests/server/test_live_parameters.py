"""The weights of a running server, every rank: each live parameter is the file's, or the target's where
shared.
"""

import pytest
from drafters import SGLANG, SPECULATORS, TARGET
from helpers import PROMPTS, accept_length, generate

from eaglelab.checkpoint import open_checkpoint, open_target
from eaglelab.convert import convert
from eaglelab.live import compare


@pytest.mark.parametrize(
    ("server", "ranks"),
    [("eagle3-chain", 1), ("eagle-chain", 1), ("eagle3-chain-tp2", 2), ("eagle3-chain-tp8", 8)],
    indirect=["server"],
)
def test_every_live_parameter_equals_its_source(server, ranks, tmp_path):
    from eaglelab.collect import capture_server
    from eaglelab.server import Server

    capture = capture_server(
        Server(server.url), PROMPTS[:1], tmp_path / "capture", 4, all_ranks=True, reprefill=False
    )
    assert len(capture.parameters) == ranks
    for rank, parameters in capture.parameters.items():
        tp_rank = int(rank.rpartition("tp")[2])
        found = compare(parameters, open_checkpoint(SGLANG), open_target(TARGET), capture.launch, tp_rank)
        assert [(m.param, m.why) for m in found if not m.equal] == []
        names = {m.param for m in found}
        assert {"model.fc.weight", "model.layers.0.self_attn.qkv_proj.weight", "lm_head.weight"} <= names
        shared = {m.param for m in found if m.kind == "target"}
        head = {"lm_head.weight"} if capture.launch.algorithm == "EAGLE" else set()
        assert shared == {"model.embed_tokens.weight"} | head
        assert ("worker.hot_token_id" in names) == (capture.launch.algorithm == "EAGLE3")


def test_a_converted_drafter_is_accepted_like_the_shipped_one(servers, tmp_path):
    shipped = accept_length(generate(servers.get("eagle3-chain").url, PROMPTS))
    convert(SPECULATORS, tmp_path / "converted", "sglang", TARGET)
    converted = servers.get("converted", drafter=tmp_path / "converted")
    assert accept_length(generate(converted.url, PROMPTS)) == shipped > 2.5
