"""The attach panel and its model, against a stand-in server: whatever happens, nothing stays armed."""

import json
import threading
import time

import httpx
import ipywidgets
import pytest
from armed import KEY, Armed, Stub
from typer.testing import CliRunner

from eaglelab import attach, cli, widgets
from eaglelab.attach import Attachment, Stopped, asked
from eaglelab.errors import AttachError, BadInput
from eaglelab.prompts import as_prompts
from eaglelab.widgets import attaching


def quiet(*_):
    pass


def attached(made, key=KEY):
    return Attachment("http://127.0.0.1:1", key, transport=httpx.MockTransport(Stub(**made.answers)))


@pytest.fixture
def made(tmp_path):
    return Armed(tmp_path / "spool")


def test_look_tells_the_launch_and_the_probe_or_why_there_is_none(made):
    seen = attached(made).look()
    assert seen["server"] == "http://127.0.0.1:1, SGLang 0.5.23"
    assert "--speculative-algorithm EAGLE3" in seen["launch"] and "not armed" in seen["probe"]
    del made.answers["/eaglelab/status"]
    assert "has no eaglelab plugin" in attached(made).look()["probe"]


def test_arm_send_as_often_as_one_likes_and_collect(made, tmp_path):
    attachment, told = attached(made), []
    attachment.arm(tmp_path / "out", lambda *step: told.append(step))
    assert made.state == "armed" and made.order["ttl_s"] == attach.LEASE and attachment.armed
    attachment.arm(tmp_path / "other", quiet)  # again: it is armed already
    for prompt in as_prompts(made.prompts()):
        attachment.send([prompt])
    assert {m.name for m in attachment.counters()} >= {"accept_length.server"}
    capture = attachment.finish()
    assert made.state == "closed" and not attachment.armed and capture.path == tmp_path / "out"
    assert {rid: t.tokens for rid, t in capture.requests.items()} == {
        rid: truth.tokens for rid, truth in made.truths.items()
    }
    assert ("prompts", 1, 1) in told


def test_letting_go_twice_does_no_harm(made, tmp_path):
    attachment = attached(made)
    attachment.arm(tmp_path / "out", quiet)
    assert attachment.disarm() and attachment.disarm() and made.state == "closed"
    with pytest.raises(BadInput, match="the server is not armed"):
        attachment.send(as_prompts(["x"]))
    attachment.arm(tmp_path / "out", quiet)  # and it can be armed anew
    with pytest.raises(BadInput, match="nothing was sent yet"):
        attachment.finish()
    attachment.disarm()
    assert not (tmp_path / "out").exists()


def test_stop_in_the_middle_of_a_batch_ends_it_and_keeps_nothing(made, tmp_path):
    generate = made.answers["/generate"]
    attachment = attached(made)

    def stopped(request):
        attachment.disarm()
        return generate(request)

    made.answers["/generate"] = stopped
    attachment = attached(made)
    attachment.arm(tmp_path / "out", quiet)
    with pytest.raises(Stopped, match="nothing is armed"):
        attachment.send(as_prompts(made.prompts()))
    assert made.state == "closed" and not attachment.armed and not (tmp_path / "out").exists()


def test_stop_while_it_arms_leaves_it_disarmed(made, tmp_path):
    arm = made.answers["/eaglelab/arm"]

    def stopped(request):
        attachment.disarm()
        return arm(request)

    made.answers["/eaglelab/arm"] = stopped
    attachment = attached(made)
    with pytest.raises(Stopped):
        attachment.arm(tmp_path / "out", quiet)
    assert made.state == "closed" and not attachment.armed


def test_a_server_that_is_lost_leaves_nothing_armed_here(made, tmp_path):
    made.answers["/generate"] = httpx.ReadError("reset")
    attachment = attached(made)
    attachment.arm(tmp_path / "out", quiet)
    with pytest.raises(AttachError, match="ReadError"):
        attachment.send(as_prompts(made.prompts()))
    assert made.state == "closed" and not attachment.armed
    lets_go, made.answers["/eaglelab/disarm"] = made.answers["/eaglelab/disarm"], httpx.ConnectError("no")
    attachment = attached(made)
    attachment.arm(tmp_path / "out", quiet)
    assert attachment.disarm() is False and made.state == "armed"  # said, not raised
    made.answers["/eaglelab/disarm"] = lets_go
    attachment.server = attached(made).server  # it answers again
    assert attachment.disarm() is True and made.state == "closed"


def test_anothers_recording_is_left_alone(made, tmp_path):
    made.state = "armed"  # by somebody else
    assert attached(made).disarm() is True and made.state == "armed"


def test_the_lease_is_renewed_and_its_loss_is_said(made, tmp_path, monkeypatch):
    monkeypatch.setattr(attach, "LEASE", 0.06)
    renewed = threading.Semaphore(0)
    answers = iter([{}, {}, {}])

    def renew(_):
        renewed.release()
        return next(answers, 409)

    made.answers["/eaglelab/renew/1"] = renew
    attachment = attached(made)
    attachment.arm(tmp_path / "out", quiet)
    assert all(renewed.acquire(timeout=5) for _ in range(4))
    until = time.monotonic() + 5
    while attachment.armed and time.monotonic() < until:
        time.sleep(0.01)
    assert "no longer armed" in str(attachment.lost)
    with pytest.raises(AttachError, match="no longer armed: .*HTTP 409"):
        attachment.send(as_prompts(["x"]))


def test_the_end_of_the_kernel_disarms(made, tmp_path):
    attachment = attached(made)
    attachment.arm(tmp_path / "out", quiet)
    attach._let_go()  # what atexit calls
    assert made.state == "closed"


def test_what_is_asked(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"input_ids": [1, 2]}\n{"prompt": "x"}\n')
    assert len(asked("ignored", f" {tmp_path / 'p.jsonl'} ")) == 2
    assert asked("hello", "")[0].prompt == "hello"
    assert asked("hello", "", chat=True)[0].messages == ({"role": "user", "content": "hello"},)
    with pytest.raises(BadInput, match="write a prompt, choose an example"):
        asked("  ", "")


def test_disarm_is_a_command(made, monkeypatch):
    monkeypatch.setattr("eaglelab.server.Server", lambda url, key: made.server())
    made.state = "armed"
    for words in ("recording 1 is dropped", "it was not armed"):
        done = CliRunner().invoke(cli.app, ["disarm", "--server", "http://127.0.0.1:1"])
        assert done.exit_code == 0 and words in done.output and made.state == "closed"


# -- the panel


@pytest.fixture
def panel(made, tmp_path, monkeypatch):
    monkeypatch.delenv("EAGLELAB_API_KEY", raising=False)
    keys = []

    def attachment(url, key=None):
        keys.append(key)
        return attached(made, key)

    monkeypatch.setattr(attaching, "Attachment", attachment)
    shown = widgets.attach("http://127.0.0.1:1", str(tmp_path / "runs"))
    shown.keys = keys
    return shown


def click(panel, name):
    panel.buttons[name].click()
    if panel.busy is not None:
        panel.busy.join(10)


def test_the_panel_captures_in_three_clicks(panel, made):
    assert panel.buttons["send"].disabled and "needs a running kernel" in panel.note
    click(panel, "connect")
    assert "SGLang 0.5.23" in panel.seen.value and not panel.buttons["send"].disabled
    panel.prompt.value = "tell me"
    made.truths = dict(list(made.truths.items())[:1])
    click(panel, "send")
    assert panel.trouble.value == "" and "✓ Captured" in panel.got.value, panel.trouble.value
    assert panel.captures[0].is_dir() and str(panel.captures[0]) in panel.got.value
    assert made.state == "closed" and panel.bar.value == panel.bar.max


def test_the_key_is_in_no_state_and_no_output(panel, made):
    panel.key._handle_custom_msg({"secret": KEY}, [])
    click(panel, "connect")
    assert panel.keys == [KEY]
    state = json.dumps(ipywidgets.Widget.get_manager_state())
    assert "SGLang 0.5.23" in state and KEY not in state  # the panel's own state is in there
    assert KEY not in json.dumps(panel._repr_mimebundle_())


def test_trouble_stands_in_the_panel_and_stop_twice_is_nothing(panel, made):
    click(panel, "connect")
    click(panel, "send")
    assert "write a prompt" in panel.trouble.value
    click(panel, "arm")
    assert made.state == "armed" and not panel.buttons["collect"].disabled
    for _ in range(2):
        panel.buttons["disarm"].click()
        assert made.state == "closed" and panel.buttons["collect"].disabled
    made.answers["/generate"] = httpx.ReadError("reset")
    click(panel, "connect")
    panel.prompt.value = "x"
    click(panel, "send")
    assert "ReadError" in panel.trouble.value and made.state == "closed"
    panel.url.value = ""
    click(panel, "connect")
    assert "http://HOST:PORT" in panel.trouble.value and panel.buttons["send"].disabled


def test_examples_fill_the_box(panel):
    labels = [label for label, _ in panel.examples.options]
    assert labels[1] == "all 10 of data/prompts.jsonl" and len(labels) == 2 + attaching.EXAMPLES
    panel.examples.index = 2
    assert panel.prompt.value and not panel.file.value
    panel.examples.index = 1
    assert panel.file.value.endswith("prompts.jsonl") and not panel.prompt.value
