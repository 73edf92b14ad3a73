"""The executed notebook as one HTML file that reads with scripts and network off.

nbconvert's own templates fetch require.js, MathJax and the widgets' manager from elsewhere, so only the
cells come from nbconvert ("basic" template, no input); the page around them is ours and forbids every script
and every request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eaglelab.html import INK, PAPER, RULE, SCRIPT, escape

SHOWN = (
    "text/html",
    "image/png",
    "image/jpeg",
    "text/plain",
)  # no JavaScript, no widgets, no raw HTML in Markdown
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = f"""
:root {{ color-scheme: light }}
body {{ margin: 0 auto; padding: 1.5rem; max-width: 1120px; background: {PAPER}; color: {INK};
       font: 15px/1.5 'DejaVu Sans', system-ui, sans-serif }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid {RULE} }}
img {{ max-width: 100%; height: auto }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 'DejaVu Sans Mono', monospace }}
td {{ max-width: 42rem; overflow-wrap: break-word }}
a {{ color: #004b7a }}
@media print {{ h2 {{ break-after: avoid }} img, tr {{ break-inside: avoid }} }}
"""


def render(notebook: Path, page: Path, title: str) -> None:
    """Write `page` from an executed notebook; a reader sees no page or the whole one."""
    import nbformat
    from nbconvert import HTMLExporter

    node: Any = nbformat.read(notebook, as_version=4)
    for cell in node.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                _shown(output) for output in cell.outputs if "data" not in output or _shown(output).data
            ]
    node.metadata.pop("widgets", None)
    exporter = HTMLExporter(template_name="basic", exclude_anchor_links=True)
    exporter.exclude_input = exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(node)
    write(page, shell(title, body))


def shell(title: str, body: str) -> str:
    """A whole page around `body`: our style, and a policy that forbids every script and every request."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        f"{body.replace(SCRIPT, '')}\n</body></html>\n"
    )


def write(page: Path, text: str) -> None:
    """Write a page; a reader sees the old one or the whole new one."""
    partial = page.with_name(page.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(page)


def _shown(output: Any) -> Any:
    """The output with only the forms that a page without scripts can show."""
    for form in [form for form in output.get("data", {}) if form not in SHOWN]:
        del output["data"][form]
    return output
