"""JupyterLab as a user starts it, and a headless Chromium that looks at it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglelab.serve import free_port

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"
SETTINGS = {  # nothing asked, nothing fetched; the theme as chosen; cells out of sight are drawn too
    "apputils-extension/themes": {"adaptive-theme": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
FLAGS = (
    "--no-browser --allow-root --ip=127.0.0.1 --ServerApp.port_retries=0 --LabApp.expose_app_in_browser=True"
    " --LabApp.extension_manager=readonly --LabApp.news_url="
    " --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"
)


def chromium() -> str | None:
    """The system's browser, else the one that `playwright install chromium` has put here."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as p:
            own = p.chromium.executable_path
        found = own if Path(own).exists() else None
    return found


@dataclass
class Lab:
    """A running JupyterLab. `folder`: what it serves."""

    url: str
    token: str
    folder: Path

    def address(self, notebook: str) -> str:
        return f"{self.url}/lab/tree/{notebook}?reset&token={self.token}"


@contextlib.contextmanager
def jupyter_lab(folder: Path, home: Path) -> Iterator[Lab]:
    """JupyterLab with a fresh home over `folder`, stopped with all its kernels at the end."""
    settings = home / "settings"
    for name, chosen in SETTINGS.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(chosen))
    port, token = free_port(), secrets.token_hex(16)
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = os.environ | {name: str(home / name.lower()) for name in places}
    environment |= {"HOME": str(home), "JUPYTERLAB_SETTINGS_DIR": str(settings), "OMP_NUM_THREADS": "1"}
    environment.pop("MPLBACKEND", None)
    command = [sys.executable, "-m", "jupyterlab", *FLAGS.split(), f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    with open(home / "lab.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    lab = Lab(f"http://127.0.0.1:{port}", token, folder)
    try:
        _wait_until_up(lab, process, home / "lab.log")
        yield lab
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(lab: Lab, process: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            asked = urllib.request.Request(
                f"{lab.url}/api/status", headers={"Authorization": f"token {lab.token}"}
            )
            with urllib.request.urlopen(asked, timeout=5):
                return
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not come up:\n{log.read_text()[-3000:]}")


class Notebook:
    """A notebook open in a page of the browser."""

    def __init__(self, page: Any, lab: Lab, name: str):
        self.page = page
        page.goto(lab.address(name))
        page.locator("#jupyterlab-splash").wait_for(state="detached", timeout=60_000)
        page.wait_for_function(
            """() => { const w = window.jupyterapp?.shell.currentWidget;
                const s = w?.context?.sessionContext;
                return w?.context?.isReady && s?.isReady && s.session?.kernel?.status === 'idle'; }""",
            timeout=60_000,
        )

    def run_all(self) -> None:
        """Run every cell; AssertionError with its words if one ends in an error."""
        whole = self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        assert whole and self.errors() == [], self.errors()

    def outputs(self) -> list[dict[str, Any]]:
        """Every output as the notebook's model holds it, its cell's number with it."""
        return self.page.evaluate(
            """() => { const m = window.jupyterapp.shell.currentWidget.content.model, found = [];
                for (let i = 0; i < m.cells.length; i++) { const c = m.cells.get(i);
                    if (c.type === 'code') for (const o of c.outputs.toJSON()) found.push({...o, cell: i}); }
                return found; }"""
        )

    def model(self) -> str:
        """The whole notebook as it would be saved."""
        return json.dumps(
            self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.toJSON()")
        )

    def errors(self) -> list[str]:
        """What ended in an error, in its own words."""
        return [f"{o['ename']}: {o['evalue']}" for o in self.outputs() if o["output_type"] == "error"]

    def command(self, name: str, **arguments: Any) -> Any:
        """Run one of JupyterLab's own commands."""
        code = "([name, given]) => window.jupyterapp.commands.execute(name, given).then(() => null)"
        return self.page.evaluate(code, [name, arguments])

    def show(self, selector: str) -> Any:
        """The element, scrolled to and visible."""
        found = self.locator(selector).first
        found.scroll_into_view_if_needed()
        found.wait_for()
        return found

    def cells(self) -> int:
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.cells.length")

    def locator(self, selector: str) -> Any:
        return self.page.locator(PANEL).locator(selector)


def is_blank(png: bytes) -> bool:
    """Whether hardly anything is drawn: under a hundredth of the picture is not its commonest colour."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    colours = picture.getcolors(maxcolors=1 << 24) or []
    most = max(count for count, _ in colours)
    return len(colours) < 8 or most > 0.99 * picture.width * picture.height
