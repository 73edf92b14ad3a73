"""Genuine SGLang servers for the tests, one a configuration, at most one alive at a time.

How to use it, in any file (best in tests/server):

    @pytest.mark.server("eagle3-chain")
    def test_something(server):
        httpx.get(server.url + "/server_info")        # a eaglelab.serve.RunningServer: url, pid, log,
        launch_command

    @pytest.mark.parametrize("server", ["eagle3-chain", "eagle3-tree"], indirect=True)   # the same, for
    several def test_several(server): ...

    @pytest.mark.server("aux-off")                    # a configuration that must be built first: name it
    and start it def test_own(servers, tmp_path): server = servers.get("aux-off",
    drafter=edited_drafter(tmp_path))   # arguments of eaglelab.serve.start_server

    def test_against_plain(plain_outputs, server):    # greedy token ids without speculation, see PROMPTS
        assert [a["output_ids"] for a in generate(server.url, PROMPTS)] == plain_outputs     # from helpers
        import ...

Tests are ordered so that each configuration starts once; getting one stops the one before. A start costs
16-30 s (TP 8: a minute), so share these, and leave a server as you found it (disarm the probe). Every such
test carries the marker `server`, so `-m "not server"` runs without one. No server environment: skipped, but
an error where CI=true.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack

import pytest
from helpers import CONFIGURATIONS, PROMPTS, generate


class Servers:
    """Starts servers on demand; `get` stops the one that runs, if it is another (or no longer answers)."""

    def __init__(self, logs):
        self._logs = logs
        self._stack = ExitStack()
        self._name = None
        self._server = None

    def get(self, name: str, **arguments):
        from eaglelab.serve import start_server

        if name != self._name or not self._server.is_up():
            self.stop()
            arguments = arguments or CONFIGURATIONS[name]
            log = self._logs / f"{name}.log"
            self._server = self._stack.enter_context(start_server(log=log, **arguments))
            self._name = name
        return self._server

    def stop(self):
        self._name = self._server = None
        self._stack.close()


@pytest.fixture(scope="session")
def server_python() -> str:
    """The Python that has SGLang."""
    from eaglelab.errors import BadInput
    from eaglelab.serve import server_python

    try:
        python = server_python()
        subprocess.run([python, "-c", "import importlib.util as u; assert u.find_spec('sglang')"], check=True)
    except (BadInput, subprocess.CalledProcessError) as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs the server environment: {error}", pytrace=False)
        pytest.skip(f"no server environment: {error}")
    return python


@pytest.fixture(scope="session")
def servers(server_python, tmp_path_factory):
    """The session's `Servers`."""
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture
def server(request, servers):
    """The running server of the test's configuration: its `server` marker, or the indirect parameter."""
    return servers.get(_configuration(request.node))


@pytest.fixture(scope="session")
def plain_outputs(servers) -> list[list[int]]:
    """Greedy token ids of PROMPTS without speculation, one at a time (session-wide: asked for before
    `server`)."""
    url = servers.get("plain").url
    return [generate(url, prompt)[0]["output_ids"] for prompt in PROMPTS]


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium, one for all tests. None here: skipped, but an error where CI=true."""
    from browser.jupyter import chromium
    from playwright.sync_api import sync_playwright

    program = chromium()
    if program is None:
        words = "no Chromium: `apt-get install chromium`, or `playwright install chromium`"
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a browser: {words}", pytrace=False)
        pytest.skip(words)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, headless=True)
        yield running
        running.close()


def _configuration(item) -> str | None:
    parameters = getattr(item, "callspec", None)
    if parameters is not None and "server" in parameters.params:
        return parameters.params["server"]
    marker = item.get_closest_marker("server")
    return marker.args[0] if marker and marker.args else None


def pytest_collection_modifyitems(items):
    order = {name: i for i, name in enumerate(CONFIGURATIONS)}

    def place(item):
        name = _configuration(item)
        if name is not None:
            return 1, order.get(name, len(order)), name
        return (1, len(order) + 1, "") if item.get_closest_marker("server") else (0, 0, "")

    for item in items:
        if {"server", "servers", "plain_outputs"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.server)  # behind the test's own marker, which stays the closest
    items.sort(key=place)
