"""One model for cell, command line and tests; unknown names and secrets never pass."""

import pytest

from eaglelab.errors import BadInput
from eaglelab.params import ReportParams, from_options


@pytest.fixture
def given(tmp_path):
    (tmp_path / "drafter").mkdir()
    return {"server": "http://h:1", "drafter": str(tmp_path / "drafter")}


def test_paths_become_absolute_and_addresses_plain(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = ReportParams.checked({**given, "drafter": "drafter", "server": "h:1/", "out": "runs/1"})
    assert (params.server, params.drafter) == ("http://h:1", str(tmp_path / "drafter"))
    assert params.out == str(tmp_path / "runs/1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tragte": "x"}, "parameter 'tragte': there is none of that name (did you mean 'target'?)"),
        ({"api_key": "s"}, "a key is never a parameter: set EAGLELAB_API_KEY or use --api-key-file"),
        ({"target": "/nowhere/x"}, "parameter 'target': /nowhere/x does not exist"),
        ({"server": "http://u:p@h:1"}, "no user, password or query belongs in the address"),
        ({"server": "ftp://h"}, "is not an address like http://HOST:PORT"),
        ({"server": "http://h:x"}, "is not an address like http://HOST:PORT"),
        ({"server": "http://h:70000"}, "is not an address like http://HOST:PORT"),
        ({"server": "30000"}, "is not an address like http://HOST:PORT"),
        ({"capture": "runs/1"}, "runs/1 does not exist\x00"),
        ({"drafter": "org/name"}, "does not exist (a name on a hub? Download it, and give the folder)"),
        ({"server": ""}, "give one of --server (to capture it) and --capture"),
        ({"capture": "/"}, "give one of --server (to capture it) and --capture"),
        ({"drafter": ""}, "give --drafter"),
        ({"max_new_tokens": 0}, "parameter 'max_new_tokens': Input should be greater than or equal to 1"),
        ({"max_new_tokens": "many"}, "parameter 'max_new_tokens': Input should be a valid integer"),
        ({"launch": "--a 'b"}, "parameter 'launch': No closing quotation"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, change, message):
    with pytest.raises(BadInput) as error:
        ReportParams.checked({**given, **change})
    assert message in str(error.value) + "\x00"  # \x00: nothing after it


def test_assignments_are_typed_by_the_model(given):
    params = from_options(
        given, ["max_new_tokens=64", "all_ranks=true", "launch=--speculative-algorithm EAGLE"]
    )
    assert (params.max_new_tokens, params.all_ranks) == (64, True)
    assert params.launch == "--speculative-algorithm EAGLE"


@pytest.mark.parametrize(
    ("text", "message"),
    [("max_requests", "NAME=VALUE"), ("server=http://x", "given twice"), ("n=1", "none of that name")],
)
def test_assignments_that_do_not_fit(given, text, message):
    with pytest.raises(BadInput, match=message):
        from_options(given, [text])


def test_secrets_in_a_launch_line_are_dropped(given):
    line = "--tp 2 --api-key canary1 --admin-api-key=canary2 --speculative-algorithm EAGLE3"
    params = ReportParams.checked({**given, "launch": line})
    assert params.launch == "--tp 2 --speculative-algorithm EAGLE3"
    assert "canary" not in params.command() + repr(params)


def test_command_makes_the_same_parameters_again(given):
    import shlex

    params = from_options({**given, "out": "x"}, ["max_requests=3", "launch=--tp 2"])
    words = shlex.split(params.command())
    assert words[:2] == ["eaglelab", "report"] and "--out" not in words
    options = {
        words[i][2:].replace("-", "_"): words[i + 1]
        for i in range(2, len(words), 2)
        if words[i].startswith("--")
    }
    again = from_options(options, [words[i + 1] for i in range(2, len(words), 2) if words[i] == "-p"])
    assert again == params.model_copy(update={"out": ""})
