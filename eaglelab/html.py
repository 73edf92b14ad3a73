"""HTML pieces of a report: inline styles only, every colour explicit, readable with scripts and network off.

Prompts, tokens and server facts are text that someone else wrote. All of it passes through `escape`, the one
place where text becomes HTML: every piece is built from `element`, which escapes whatever is not `Html`
already.
"""

from __future__ import annotations

import html as _html
import unicodedata
from collections.abc import Iterable, Sequence

# Okabe-Ito, with tints pale enough for dark text. Colour never stands alone: a mark and a word go with it.
INK, RULE, PAPER = "#1a1a1a", "#d0d0d0", "#ffffff"
BLUE, ORANGE, VERMILLION, GREY = "#0072B2", "#E69F00", "#D55E00", "#767676"
TINT = {BLUE: "#e3f0f8", ORANGE: "#fdf3dc", VERMILLION: "#fbe9df", GREY: "#f1f1f1"}
LOOK = {  # outcome or verdict -> (mark, colour)
    "healthy": ("✓", BLUE),
    "passed": ("✓", BLUE),
    "broken": ("✗", VERMILLION),
    "failed": ("✗", VERMILLION),
    "errored": ("!", ORANGE),
    "inconclusive": ("?", ORANGE),
    "skipped": ("–", GREY),
}
_FONT = "font-family:'DejaVu Sans',system-ui,sans-serif;font-size:14px;line-height:1.45"
_MONO = "font-family:'DejaVu Sans Mono',ui-monospace,monospace;font-size:13px"


class Html(str):
    """Text that is HTML already. A notebook shows it as such."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


def printable(text: object) -> str:
    """`text` without characters that hide, reorder or break their surroundings, or are no UTF-8.

    NUL and other control characters, lone surrogates and format characters (bidi overrides, zero-width)
    become `⟨U+202E⟩` and the like; newline and tab stay.
    """
    return "".join(
        f"⟨U+{ord(c):04X}⟩" if c not in "\n\t" and unicodedata.category(c) in _HIDDEN else c
        for c in str(text)
    )


_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def escape(value: object) -> Html:
    """The one place where text becomes HTML. `Html` passes unchanged; None is an en dash."""
    if isinstance(value, Html):
        return value
    return Html(_html.escape(printable("–" if value is None else value), quote=True))


def element(tag: str, *content: object, style: str = "", title: object = None) -> Html:
    """`<tag style title>content</tag>`, each piece of content escaped unless it is `Html`."""
    attributes = (f' style="{style}"' if style else "") + (
        f' title="{escape(title)}"' if title is not None else ""
    )
    return Html(f"<{tag}{attributes}>{''.join(escape(c) for c in content)}</{tag}>")


def lines(items: Iterable[object]) -> Html:
    """Items below one another."""
    return Html("<br>".join(escape(item) for item in items))


# Where scripts run (JupyterLab, a plain nbconvert page), longer tables sort by a click and can be searched.
# A report's page holds no script: `page` takes it out. It runs again for outputs that are not yet in place.
SORTED = 8  # rows
SCRIPT = """<script>(() => { const run = () => {
for (const table of document.querySelectorAll("table.eaglelab-rows:not([data-live])")) {
  table.dataset.live = "1";
  const [head, ...rows] = table.rows, box = document.createElement("input");
  const label = document.createElement("label");
  label.append(`search ${rows.length} rows, or click a heading to sort: `, box);
  label.style.cssText = "font-size:12px;color:#555555";
  box.style.cssText = "color:#1a1a1a;background:#ffffff;border:1px solid #767676;margin:2px 0";
  box.oninput = () => rows.forEach((r) => { r.hidden =
    !r.textContent.toLowerCase().includes(box.value.toLowerCase()); });
  box.onkeydown = (event) => event.stopPropagation();
  table.before(label);
  [...head.cells].forEach((cell, i) => {
    const text = (r) => r.cells[i].textContent.trim();
    let way = 1;
    cell.style.cursor = "pointer"; cell.title = "sort";
    cell.onclick = () => {
      rows.sort((a, b) => way * (text(a) - text(b) || text(a).localeCompare(text(b))));
      way = -way;
      rows.forEach((r) => table.tBodies[0].append(r));
    };
  });
} }; run(); setTimeout(run, 0); setTimeout(run, 400); })()</script>"""


def table(header: Sequence[object], rows: Iterable[Sequence[object]], caption: object = None) -> Html:
    """A plain table. Numbers stand right. A longer one can be sorted and searched where scripts run."""
    cell = (
        f"padding:4px 10px;border-bottom:1px solid {RULE};vertical-align:top;color:{INK};background:{PAPER};"
    )
    head = [
        element("th", h, style=cell + "text-align:left;font-weight:bold;white-space:nowrap") for h in header
    ]
    body = [
        element("tr", *(element("td", _number(v), style=cell + f"text-align:{_side(v)}") for v in row))
        for row in rows
    ]
    parts = [
        element("caption", caption, style=f"text-align:left;padding:4px 0;color:{INK};background:{PAPER}")
    ]
    content = (parts if caption else []) + [element("tr", *head), *body]
    whole = element("table", *content, style=f"border-collapse:collapse;{_FONT}")
    if len(body) < SORTED:
        return panel(whole)
    return panel(Html(whole.replace("<table", '<table class="eaglelab-rows"', 1) + SCRIPT))


def panel(*content: object) -> Html:
    """White ground and dark ink, whatever the theme around it; wide content scrolls inside."""
    style = f"background:{PAPER};color:{INK};padding:6px 8px;overflow-x:auto;{_FONT}"
    return element("div", *content, style=style)


def _number(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def _side(value: object) -> str:
    return "right" if isinstance(value, (int, float)) and not isinstance(value, bool) else "left"


def outcome(word: str) -> Html:
    """An outcome or a verdict with its mark and colour."""
    mark, colour = LOOK[word]
    style = f"color:{INK};background:{TINT[colour]};border-left:5px solid {colour}"
    return element("span", f"{mark} {word}", style=style + ";padding:1px 8px;white-space:nowrap")


def verdict_box(verdict: str, fault: str | None, headline: str, details: Iterable[object] = ()) -> Html:
    """The first thing on the page: the verdict, the fault, one sentence, then what to do."""
    mark, colour = LOOK[verdict]
    title = element(
        "div", f"{mark} {verdict}" + (f": {fault}" if fault else ""), style="font-size:22px;font-weight:bold"
    )
    body = [element("div", line, style="margin-top:6px") for line in (headline, *details)]
    style = f"background:{TINT[colour]};color:{INK};border-left:10px solid {colour};padding:12px 16px;{_FONT}"
    return element("div", title, *body, style=style)


def code(text: object) -> Html:
    """A command or a flag, to copy."""
    style = f"color:{INK};background:{TINT[GREY]};padding:1px 5px;white-space:pre-wrap;{_MONO}"
    return element("code", text, style=style)
