"""The attach panel's model on a genuine server: it records, and whatever ends it, nothing stays armed."""

import subprocess
import sys
import time

import pytest

from eaglelab.attach import Attachment, asked

ARMED_AND_WAITING = """
import sys, time
from eaglelab import attach
attach.LEASE = 2.0
attach.Attachment(sys.argv[1]).arm(sys.argv[2], lambda *step: None)
print("armed", flush=True)
time.sleep(60)
"""


@pytest.mark.server("eagle3-chain")
def test_prompts_are_sent_one_after_the_other_and_collected(server, tmp_path):
    attachment = Attachment(server.url)
    assert "not armed" in attachment.look()["probe"]
    attachment.arm(tmp_path / "out", lambda *step: None)
    assert ", armed, " in attachment.status()
    for prompt in ("It is a truth universally", "The evil of the distance from"):
        attachment.send(asked(prompt, ""), 24)
    lengths = {m.name: m.value for m in attachment.counters()}
    assert lengths["accept_length.server"] > 1.5
    capture = attachment.finish()
    assert [t.state for t in capture.requests.values()] == ["complete"] * 2 and len(capture.reprefill) == 2
    assert capture.target_dir and "not armed" in attachment.status()


@pytest.mark.server("eagle3-chain")
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_kernel_that_ends_leaves_nothing_armed(server, tmp_path, how):
    words = [sys.executable, "-c", ARMED_AND_WAITING, server.url, str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout.readline() == "armed\n"
        probe = Attachment(server.url).server
        assert probe.probe_status()["armed"]
        getattr(kernel, how)()
        kernel.wait()
    until = time.monotonic() + 10
    while probe.probe_status()["armed"] and time.monotonic() < until:
        time.sleep(0.1)
    assert probe.probe_status()["armed"] is None
