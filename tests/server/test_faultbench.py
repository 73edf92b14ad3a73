"""The part of the fault bench's FAST=1 that runs on genuine SGLang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_the_fast_cases_on_genuine_servers(servers, tmp_path):
    """Every required rate holds. The bench starts servers of its own, so the session's is stopped."""
    servers.stop()
    command = [sys.executable, "tests/faultbench", "--fast", "--genuine", "--out", str(tmp_path / "out put")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
