"""An executed notebook without a kernel: from disk, no network, no scripts (the report: see test_report)."""

import pytest
from browser.jupyter import is_blank

from eaglelab import page

pytestmark = pytest.mark.browser


@pytest.fixture
def offline(browser):
    """`offline(path)`: a page opened from disk; anything it asks the network for is an error."""
    context = browser.new_context(
        java_script_enabled=False, offline=True, viewport={"width": 1100, "height": 900}
    )
    asked = []
    context.on("request", lambda request: asked.append(request.url))

    def open_page(path):
        shown = context.new_page()
        shown.goto(path.as_uri())
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        return shown

    yield open_page
    context.close()


def pictures(shown):
    found = shown.locator("img").all()
    for picture in found:
        picture.scroll_into_view_if_needed()
        assert not is_blank(picture.screenshot())
    return len(found)


def test_an_executed_notebook_reads_from_disk(offline, opened, lab, tmp_path):
    """Run in JupyterLab, saved, rendered: figures, tables, folds, strips, and the widget's note."""
    notebook = opened("05_step_by_step.ipynb")
    notebook.command("docmanager:save")
    page.render(lab.folder / "05_step_by_step.ipynb", tmp_path / "05.html", "05")
    shown = offline(tmp_path / "05.html")
    assert pictures(shown) == 1 and "needs a running kernel" in shown.locator("body").inner_text()
    fold = shown.locator("details", has_text="draft step 2").first
    fold.locator("summary").first.click()  # a fold needs no script
    assert fold.locator("text=Likeliest tokens").first.is_visible()
    assert not is_blank(shown.screenshot(full_page=True))
