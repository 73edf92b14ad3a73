"""Speculation must not change the text: greedy output equals plain greedy, whatever the drafting and
batching.

Each case also has to accept drafts (accept length well above 1), else the equality would prove nothing.
"""

from __future__ import annotations

import pytest
from helpers import PROMPTS, accept_length, generate

SPECULATING = {  # configuration -> least accept length on these prompts (measured: 3.9, 3.5, 3.9, 3.9, 3.9)
    "eagle3-chain": 3.3,
    "eagle3-tree": 3.0,
    "eagle3-chain-tp2": 3.3,
    "eagle3-chain-tp8": 3.3,
}


def ids(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("server", SPECULATING, indirect=True)
def test_speculation_gives_the_plain_text(plain_outputs, server, request):
    batch = generate(server.url, PROMPTS)
    assert ids(batch) == plain_outputs
    assert accept_length(batch) > SPECULATING[request.node.callspec.params["server"]]
    if "tp8" not in request.node.name:  # eight ranks on two cores are slow
        assert [ids(generate(server.url, prompt))[0] for prompt in PROMPTS] == plain_outputs


@pytest.mark.server("eagle-chain")
def test_the_wrong_flag_gives_the_plain_text_too(plain_outputs, server):
    """The incident's trap: nothing in the output shows that no draft was accepted."""
    batch = generate(server.url, PROMPTS)
    assert ids(batch) == plain_outputs
    assert accept_length(batch) <= 1.05


@pytest.mark.parametrize("server", ["eagle3-chain-chunked"], indirect=True)
def test_chunked_prefill_and_cached_prefixes_give_the_plain_text(plain_outputs, server):
    """Prompts of 16 tokens and more arrive in several chunks; the second time they are read from the radix
    cache."""
    first, second = generate(server.url, PROMPTS), generate(server.url, PROMPTS)
    assert ids(first) == plain_outputs
    assert ids(second) == plain_outputs
    assert max(answer["meta_info"]["prompt_tokens"] for answer in first) > 16
    assert min(answer["meta_info"]["cached_tokens"] for answer in second) >= 8
    assert accept_length(first) > 3.0
    assert accept_length(second) > 3.0
