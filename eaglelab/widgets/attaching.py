"""The attach panel: buttons and fields around an `attach.Attachment`; what goes wrong stands in it.

The key is typed into a field of its own, which is no trait of a widget: it is sent to the kernel once, and is
in no widget state, no metadata and no output.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as w
import traitlets

from eaglelab import tables
from eaglelab.attach import Attachment, asked
from eaglelab.errors import BadInput, EaglelabError
from eaglelab.html import ORANGE, TINT, VERMILLION, code, element, panel
from eaglelab.widgets.pane import KEYS_END_HERE, Shown

NOTE = panel("The attach panel needs a running kernel. Without one: ", code("eaglelab capture --server URL"))
EXAMPLES = 5
LOOKS = 1.0  # seconds between two looks at an armed server

_ESM = """
function render({ model, el }) {
  const field = document.createElement("input");
  field.type = "password";
  field.autocomplete = "off";
  field.className = "eaglelab-key";
  field.placeholder = model.get("placeholder");
  field.style.width = "16em";
  field.addEventListener("change", () => model.send({ secret: field.value }));
  el.append("API key ", field);
}
export default { render };
"""


class Secret(anywidget.AnyWidget):
    """A password field whose content is sent to `value`, which no front end and no file ever sees."""

    _esm = _ESM
    placeholder = traitlets.Unicode("").tag(sync=True)

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.secret = ""
        self.on_msg(self._said)

    def _said(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        self.secret = str(content.get("secret") or "")


class Panel(Shown):
    """The widget. `attachment`: the server looked at; `captures`: what was collected."""

    def __init__(self, url: str = "", out: str = ""):
        self.note, self.out = NOTE, Path(out or "runs")
        self.attachment: Attachment | None = None
        self.captures: list[Path] = []
        self.busy: threading.Thread | None = None
        self.length = ""  # as shown last
        self._demo = contextlib.ExitStack()
        wide = w.Layout(width="340px")
        self.url = w.Text(value=url, description="server", placeholder="http://127.0.0.1:30000", layout=wide)
        given = "from EAGLELAB_API_KEY" if os.environ.get("EAGLELAB_API_KEY") else "if it has one"
        self.key = Secret(placeholder=given)
        self.examples = w.Dropdown(options=_examples(), description="example", layout=wide)
        self.kind = w.Dropdown(options=[("plain text", False), ("chat message", True)], description="as")
        self.prompt = w.Textarea(placeholder="a prompt", layout=w.Layout(width="690px", height="70px"))
        self.file = w.Text(
            description="or a file", placeholder="my-prompts.jsonl", continuous_update=False, layout=wide
        )
        self.tokens = w.BoundedIntText(128, min=1, max=4096, description="new tokens")
        self.at_once = w.Checkbox(value=True, description="collect when sent", indent=False)
        self.buttons = {
            name: self._button(text, do)
            for name, text, do in (
                ("connect", "Connect", self.connect),
                ("demo", "Start the demo's server", self.demo),
                ("arm", "Arm", self.arm),
                ("send", "Send", self.send),
                ("collect", "Collect", self.collect),
                ("disarm", "Stop and disarm", self.disarm),
            )
        }
        self.bar = w.IntProgress(value=0, max=1, layout=w.Layout(width="260px"))
        self.doing, self.seen, self.live, self.trouble, self.got = (w.HTML() for _ in range(5))
        row, b = w.HBox, self.buttons
        self.box = w.VBox(
            [
                row([self.url, self.key, b["connect"], b["demo"]]),
                self.seen,
                row([self.examples, self.kind, self.tokens]),
                self.prompt,
                row([self.file, self.at_once]),
                row([b["arm"], b["send"], b["collect"], b["disarm"]]),
                row([self.bar, self.doing]),
                self.trouble,
                self.live,
                self.got,
            ]
        )
        self.box.add_class(KEYS_END_HERE)
        self.box.add_class("eaglelab-attach")
        self.examples.observe(self._example, "value")
        self._buttons()

    # -- what the buttons do

    def connect(self) -> None:
        def do() -> None:
            before, self.attachment = self.attachment, None
            if before is not None and before.armed:
                before.disarm()
            if not self.url.value.strip():
                raise BadInput("give the server's address, http://HOST:PORT")
            key = self.key.secret or os.environ.get("EAGLELAB_API_KEY")
            attachment = Attachment(self.url.value.strip(), key or None)
            self.seen.value = tables.facts_table(attachment.look())
            self.attachment = attachment

        self.seen.value = ""
        self._do("connecting", do)

    def demo(self) -> None:
        """Start genuine SGLang with the tiny models; it ends with the kernel."""
        from eaglelab.serve import start_server

        def do() -> None:
            server = start_server(progress=lambda line: self._tell(line, 0, 0))
            self.url.value = self._demo.enter_context(server).url
            self._tell("the demo's server is up; its drafter is data/drafter-sglang", 1, 1)
            self.attachment = Attachment(self.url.value)
            self.seen.value = tables.facts_table(self.attachment.look())

        self._do("starting the demo's server", do)

    def arm(self) -> None:
        self._do("arming", self._arm)

    def send(self) -> None:
        def do() -> None:
            prompts = asked(self.prompt.value, self.file.value, self.kind.value)
            self._arm()
            answers = self._attached().send(prompts, self.tokens.value)
            self._live()
            self._answered([a.text for a in answers if a.text])
            if self.at_once.value:
                self._collect()

        self._do("sending", do)

    def collect(self) -> None:
        self._do("collecting", self._collect)

    def disarm(self) -> None:
        """At once, whatever else is under way; again does no harm."""
        if self.attachment is None:
            return
        said = self.attachment.disarm()
        words = "disarmed" if said else "the server does not answer; its probe disarms itself"
        self._tell(f"stopped: {words}", 0, 1)
        self._buttons()

    # -- pieces

    def _arm(self) -> None:
        attachment = self._attached()
        if not attachment.armed:
            self.live.value = self.got.value = self.length = ""
            stamp = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%f}"[:-3] + "Z"
            attachment.arm((self.out / stamp / "capture").absolute(), self._tell)
            threading.Thread(target=self._watch, args=(attachment,), daemon=True).start()
            self._tell("armed", 0, 1)

    def _collect(self) -> None:
        capture = self._attached().finish()
        self.captures.append(capture.path)
        done = [t.state for t in capture.requests.values()].count("complete")
        self.got.value = panel(
            element("b", f"✓ Captured {len(capture.requests)} requests, {done} complete. "),
            "For every notebook: ",
            code(f'capture = "{capture.path}"'),
            " and your drafter; or ",
            code(f"eaglelab diagnose --capture '{capture.path}' --drafter DRAFTER"),
        )

    def _attached(self) -> Attachment:
        if self.attachment is None:
            raise BadInput("connect to a server first")
        return self.attachment

    def _do(self, what: str, action: Callable[[], None]) -> None:
        """Run an action beside the kernel's own thread, one at a time; its error is shown in place."""
        if self.busy is not None and self.busy.is_alive():
            self._trouble("wait for what is under way, or stop it")
            return

        def run() -> None:
            try:
                action()
            except EaglelabError as error:
                self._trouble(str(error))
            except Exception as error:
                self._trouble(f"{type(error).__name__}: {error}")
            finally:
                self.busy = None
                self._buttons()

        self.trouble.value = ""
        self._tell(what, 0, 0)
        self.busy = threading.Thread(target=run, name="eaglelab-panel", daemon=True)
        self._buttons()
        self.busy.start()

    def _watch(self, attachment: Attachment) -> None:
        """While this recording is armed: the probe's own words, and the accept length so far."""
        recording = attachment.recording
        while attachment.recording is recording is not None:
            with contextlib.suppress(EaglelabError):
                self._live(attachment.status())
            time.sleep(LOOKS)
        if attachment.armed:  # again, meanwhile
            return
        self.live.value = panel(self.length) if self.length else ""
        if attachment.lost is not None:
            self._trouble(str(attachment.lost))
        self._buttons()

    def _live(self, status: str = "") -> None:
        """The accept length so far, and what the probe says of itself."""
        found = {m.name: m.value for m in self._attached().counters()}
        if found.get("accept_length.server") is not None:
            words = f"accept length so far: {found['accept_length.server']:.2f}"
            self.length = element("div", words, style="font-size:20px;font-weight:bold")
        if status or self.length:
            self.live.value = panel(self.length, status)

    def _answered(self, texts: list[str]) -> None:
        shown = (element("div", f"… {text[-300:]}", style="padding:2px 0") for text in texts[:3])
        self.got.value = panel(element("b", f"{len(texts)} answers"), *shown)

    def _example(self, change: Any) -> None:
        path = change["new"].get("file", "")
        self.file.value, self.prompt.value = path, change["new"].get("prompt", "")

    def _button(self, text: str, do: Callable[[], None]) -> w.Button:
        button = w.Button(description=text, layout=w.Layout(width="auto"))
        button.on_click(lambda _: do())
        return button

    def _buttons(self) -> None:
        """Which buttons do something now."""
        busy = self.busy is not None and self.busy.is_alive()
        there, armed = self.attachment is not None, self.attachment is not None and self.attachment.armed
        usable = {
            "connect": not busy,
            "demo": not busy,
            "arm": there and not busy and not armed,
            "send": there and not busy,
            "collect": armed and not busy,
            "disarm": there and (armed or busy),
        }
        for name, can in usable.items():
            self.buttons[name].disabled = not can

    def _tell(self, what: str, done: int, of: int) -> None:
        self.bar.max, self.bar.value = max(of, 1), done
        self.doing.value = element("span", f"{what} {done} of {of}" if of > 1 else what)
        if done:
            self._live_quietly()

    def _live_quietly(self) -> None:
        with contextlib.suppress(EaglelabError):
            self._live()

    def _trouble(self, words: str) -> None:
        style = f"background:{TINT[VERMILLION]};color:#1a1a1a;border-left:6px solid {ORANGE};padding:6px 10px"
        self.trouble.value = element("div", element("b", "✗ "), words, style=style)


def _examples() -> list[tuple[str, dict[str, str]]]:
    """Prompts that come with the checkout, and all of them as a file."""
    from eaglelab.prompts import load_prompts
    from eaglelab.serve import data_dir

    found: list[tuple[str, dict[str, str]]] = [("–", {})]
    with contextlib.suppress(BadInput):
        path = data_dir() / "prompts.jsonl"
        prompts = load_prompts(path)
        found.append((f"all {len(prompts)} of {path.parent.name}/{path.name}", {"file": str(path)}))
        for p in prompts[:EXAMPLES]:
            if p.prompt:
                found.append((" ".join(p.prompt[-60:].split()), {"prompt": p.prompt}))
    return found
