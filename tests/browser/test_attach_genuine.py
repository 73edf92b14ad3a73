"""The attach panel against genuine SGLang: started by its button, recorded, gone with the kernel."""

import shutil
import time

import httpx
import pytest
from browser.jupyter import Notebook

from eaglelab.capture import open_capture

pytestmark = pytest.mark.browser


def test_the_panel_starts_the_demo_records_it_and_ends_it_with_the_kernel(browser, lab, server_python):
    shutil.copy(lab.folder / "01_start_here.ipynb", lab.folder / "01_genuine.ipynb")
    notebook = Notebook(browser.new_page(viewport={"width": 1400, "height": 1000}), lab, "01_genuine.ipynb")
    notebook.run_all()
    panel = notebook.show(".eaglelab-attach")
    panel.get_by_role("button", name="Start the demo's server").click()
    panel.locator("text=/SGLang 0\\.5\\.\\d+/").first.wait_for(timeout=240_000)
    address = panel.locator("input[type=text]").first.input_value()
    before = set(lab.folder.glob("runs/*/capture/capture.json"))
    panel.locator("textarea").fill("It is a truth universally acknowledged, that")
    panel.locator("textarea").blur()
    panel.get_by_role("button", name="Send", exact=True).click()
    panel.locator("text=✓ Captured").wait_for(timeout=240_000)
    (found,) = set(lab.folder.glob("runs/*/capture/capture.json")) - before
    traces = list(open_capture(found.parent).requests.values())
    assert [t.state for t in traces] == ["complete"] and len(traces[0].rounds) > 3
    assert not httpx.get(f"{address}/eaglelab/status").json()["armed"]
    notebook.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.shutdown()"
    )
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            httpx.get(f"{address}/health", timeout=2)
        except httpx.HTTPError:
            return
        time.sleep(0.5)
    raise AssertionError("the demo's server outlived its kernel")
