"""A pane of HTML that hears keys, and keeps them from JupyterLab.

JupyterLab's command mode would take `d d` pressed on a dropdown for "delete this cell", and an arrow on a
button for "the next cell". So every plain key pressed inside a box of class `eaglelab-keys` ends there.
"""

from __future__ import annotations

from typing import Any

import anywidget
import ipywidgets
import traitlets

KEYS_END_HERE = "eaglelab-keys"

_ESM = """
function render({ model, el }) {
  const pane = document.createElement("div");
  pane.className = "eaglelab-pane";
  pane.tabIndex = 0;
  pane.setAttribute("data-lm-suppress-shortcuts", "true");
  const show = () => {
    pane.innerHTML = model.get("html");
    pane.dataset.step = model.get("step");
  };
  const heard = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    event.stopPropagation();
    if (event.target.closest("input, textarea, select")) return;
    if (model.get("hears").includes(event.key)) {
      event.preventDefault();
      model.send({ key: event.key });
    }
  };
  let box = null;
  let waiting = 0;
  const attach = () => {
    box = el.closest(".eaglelab-keys");
    if (box) box.addEventListener("keydown", heard);
    else waiting = requestAnimationFrame(attach);
  };
  model.on("change:step", show);
  show();
  el.appendChild(pane);
  attach();
  return () => {
    cancelAnimationFrame(waiting);
    if (box) box.removeEventListener("keydown", heard);
    model.off("change:step", show);
  };
}
export default { render };
"""


class Pane(anywidget.AnyWidget):
    """`show(html)` replaces what is shown; each key of `hears` comes back as the message {"key": ...}."""

    _esm = _ESM
    html = traitlets.Unicode("").tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)  # counts up with every change; also data-step in the page
    hears = traitlets.List(traitlets.Unicode(), []).tag(sync=True)

    def show(self, html: str) -> None:
        with self.hold_sync():
            self.html = str(html)
            self.step += 1


class Shown:
    """A widget with a note for those who have no kernel: `note` stands where it cannot be shown."""

    box: ipywidgets.Box
    note: str

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {**self.box._repr_mimebundle_(), "text/html": self.note}
