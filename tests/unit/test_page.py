"""The page holds nothing that runs or is fetched, whatever the notebook's outputs hold."""

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from eaglelab import html, page

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def rendered(tmp_path):
    def render(*outputs, markdown="# Title"):
        cells = [new_markdown_cell(markdown), new_code_cell("secret_source = 1", outputs=list(outputs))]
        nbformat.write(new_notebook(cells=cells), tmp_path / "n.ipynb")
        page.render(tmp_path / "n.ipynb", tmp_path / "p.html", "run <1>")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["n.ipynb", "p.html"]
        return (tmp_path / "p.html").read_text(encoding="utf-8")

    return render


def shown(**data):
    return new_output("display_data", data={k.replace("_", "/", 1): v for k, v in data.items()})


def test_figures_and_pieces_are_inside_and_the_source_is_not(rendered):
    text = rendered(shown(image_png=PNG), shown(text_html=html.verdict_box("healthy", None, "fine")))
    assert f"data:image/png;base64,{PNG}" in text and "✓ healthy" in text and "Title" in text
    assert "secret_source" not in text and "<title>run &lt;1&gt;</title>" in text


def test_nothing_is_fetched_and_no_script_may_run(rendered):
    text = rendered(
        shown(image_png=PNG),
        new_output("display_data", data={"application/javascript": "alert(1)"}),
        new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": "x"}}),
        new_output("stream", name="stdout", text="<script>alert(1)</script>"),
        shown(text_plain="</pre><script>alert(2)</script>"),
        shown(text_html=html.table(("a", "b"), [(i, "x") for i in range(9)])),  # sorted by a script elsewhere
    )
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy and "default-src 'none'" in policy[1] and "script-src" not in policy[1]
    assert text.index("Content-Security-Policy") < text.index("<style>")
    assert not re.search(r"<(script|link|iframe|object|embed)\b", text)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text) and "@import" not in text
    assert "require" not in text and "mathjax" not in text.lower()
    assert len(text) < 20_000


def test_text_in_streams_and_plain_outputs_is_escaped(rendered):
    text = rendered(new_output("stream", name="stderr", text="</textarea><b onclick=x>"))
    assert "&lt;/textarea&gt;&lt;b onclick=x&gt;" in text
