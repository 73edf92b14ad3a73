"""The base install fits a server's environment as it is: nothing else would be installed or moved."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.server
def test_installing_eaglelab_moves_no_pin(server_python):
    """pip itself says so, without an index to fetch anything from."""
    pip = [server_python, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "--dry-run", "--no-index", "--no-build-isolation", str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (would,) = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    assert would.split()[2:] == ["eaglelab-0.1.0"]
