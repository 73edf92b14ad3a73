"""The stepper as a widget: keys and controls move a `stepper.Stepper`, `workbook.stops` renders it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from eaglelab import stepper
from eaglelab.errors import BadInput
from eaglelab.html import Html, element, panel
from eaglelab.widgets.pane import KEYS_END_HERE, Pane, Shown
from eaglelab.workbook import stops

if TYPE_CHECKING:
    from eaglelab.workbook import Workbook

KEYS = {"ArrowRight": "next stop", "ArrowLeft": "stop before", "ArrowDown": "next round",
        "ArrowUp": "round before", "Home": "draft-extend", "End": "verify"}  # fmt: skip
HELP = "Keys, after a click on the round: → ← next stop and back, ↓ ↑ next round and back, Home, End."
NOTE = panel("The stepper needs a running kernel. The same round stands above, stop by stop.")
NONE = "–"


class Steps(Shown):
    """The widget. BadInput: there is nothing to step through."""

    def __init__(self, book: Workbook, request: str = "", number: int = 0):
        self.model = stepper.Stepper(book.evidence, request, number)
        self.word, self.note = book.word, NOTE
        rids = [(f"{t.rid}  {book.label(t.prompt_ids)}", t.rid) for t in self.model.requests]
        self.request = w.Dropdown(options=rids, description="request", layout=w.Layout(width="440px"))
        self.number = w.BoundedIntText(description="round", layout=w.Layout(width="170px"))
        back = self._button("◀ back", lambda: self._key("ArrowLeft"))
        forward = self._button("forward ▶", lambda: self._key("ArrowRight"))
        self.flags = w.Text(
            description="flags",
            placeholder="--speculative-num-steps 3",
            continuous_update=False,
            layout=w.Layout(width="330px"),
        )
        self.field = w.Dropdown(
            options=[NONE, *self.model.fields], description="wiring", layout=w.Layout(width="260px")
        )
        self.value = w.Combobox(placeholder="value", layout=w.Layout(width="150px"), disabled=True)
        edits = [self._button("Draft so too", self._edit), self._button("Clear", self._clear)]
        self.said, self.pane = w.HTML(), Pane(hears=list(KEYS))
        self.box = w.VBox(
            [
                w.HBox([self.request, self.number, back, forward]),
                w.HBox([self.flags, self.field, self.value, *edits]),
                w.HTML(element("span", HELP, style="font-size:12px")),
                self.said,
                self.pane,
            ]
        )
        self.box.add_class(KEYS_END_HERE)
        self.box.add_class("eaglelab-stepper")
        self.request.observe(self._asked, "value")
        self.number.observe(self._asked, "value")
        self.field.observe(self._field, "value")
        self.pane.on_msg(lambda _widget, content, _buffers: self._key(content.get("key", "")))
        self._show()
        # A full collection takes as long as a step may (0.12 s), most of it for modules that never go away:
        # set them aside, and first what an earlier stepper of this kernel left behind.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _button(self, text: str, do: Callable[[], None]) -> w.Button:
        button = w.Button(description=text, layout=w.Layout(width="auto"))
        button.on_click(lambda _: do())
        return button

    def _key(self, key: str) -> None:
        model = self.model
        if key in ("ArrowRight", "ArrowLeft"):
            model.forward(1 if key == "ArrowRight" else -1)
        elif key in ("ArrowDown", "ArrowUp"):
            number = model.number + (1 if key == "ArrowDown" else -1)
            if 0 <= number < len(model.trace.rounds):
                stop = model.stop
                model.go(number=number)
                model.stop = min(stop, len(model.stops) - 1)
        elif key in ("Home", "End"):
            model.stop = 0 if key == "Home" else len(model.stops) - 1
        self._show()

    def _asked(self, _change: Any) -> None:
        """The reader chose a request or a round; what `_show` set itself is no question."""
        model = self.model
        if self.request.value != model.trace.rid:
            model.go(request=self.request.value, number=0)
        elif self.number.value != model.number:
            model.go(number=self.number.value)
        else:
            return
        self._show()

    def _field(self, _change: Any) -> None:
        field = self.field.value
        self.value.disabled = field == NONE
        self.value.options = self.model.fields.get(field, [])
        self.value.value = ""
        self.value.placeholder = f"now {self.model.value(field)}" if field != NONE else "value"

    def _edit(self) -> None:
        field = "" if self.field.value == NONE else self.field.value
        try:
            self.model.edit(self.flags.value.strip(), field, self.value.value.strip())
        except BadInput as error:
            self._say(panel(element("b", "✗ Not drafted so: "), str(error)))
            return
        self._show()

    def _clear(self) -> None:
        self.flags.value, self.field.value = "", NONE
        self.model.edit()
        self._show()

    def _say(self, words: Html | str) -> None:
        self.said.value = str(words)

    def _show(self) -> None:
        model = self.model
        self._say("")
        self.request.value = model.trace.rid
        self.number.max = len(model.trace.rounds) - 1
        self.number.value = model.number
        self.pane.show(stops.page(model, self.word))
