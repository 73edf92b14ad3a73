"""What a newcomer stumbled over: told before anything is sent or started, and in words."""

from pathlib import Path

import pytest

from eaglelab import collect
from eaglelab.checks import rungs
from eaglelab.errors import BadInput
from eaglelab.gather import target_of
from eaglelab.prompts import as_prompts
from eaglelab.server import ServerFacts

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([5, 1024], "prompt 2: token id 1024 is outside the target's vocabulary of 1,024; nothing was sent"),
        ([5, -1], "prompt 2: token id -1"),
        ([5] * 600, "prompt 2: 600 tokens do not fit the server's context of 512"),
    ],
)
def test_token_ids_that_would_kill_the_server_are_never_sent(ids, says):
    facts = ServerFacts({"context_length": 512})
    collect._check_tokens(None, as_prompts([[1, 2], [0, 1023]]), 1024, facts)
    with pytest.raises(BadInput, match=says):
        collect._check_tokens(None, as_prompts([[1, 2], ids]), 1024, facts)


def test_a_rung_that_was_reprefilled_says_nothing_of_the_feed():
    class Rung:
        source = "re-prefilled at the trained depths"
        reason = None

    class Ladder:
        drops = {
            "feed": type(
                "Drop", (), {"upper": 5.0, "lower": 5.0, "value": 0.0, "interval": (0, 0), "failed": False}
            )
        }
        rungs = {"3.stored": Rung, "2": Rung}

    class Evidence:
        ladder = Ladder

    found = rungs._drop(rungs.DROPS["feed"], "feed", Evidence)
    assert found.verdict == "skipped" and "re-prefilled" in found.evidence[0]
    Rung.source = "rows as captured"
    assert rungs._drop(rungs.DROPS["feed"], "feed", Evidence).verdict == "passed"


def test_a_target_that_lies_where_the_server_says_needs_no_option(monkeypatch):
    class Capture:
        target_dir = None
        launch = type("Launch", (), {"target_path": str(DATA / "target")})

    assert target_of("", Capture).facts.vocab_size == 1024
    Capture.launch.target_path = "/not/here"
    assert target_of("", Capture) is None
