"""eaglelab_cpu's tree operators equal SGLang's own Triton kernels, which run in Triton's interpreter."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).with_name("triton_trees.py")


@pytest.mark.server
def test_trees_and_verify_equal_triton(server_python):
    switches = {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    switches["TORCHDYNAMO_DISABLE"] = (
        "1"  # as serve.py does: compiling fails in a folder with a space in its name
    )
    done = subprocess.run(
        [server_python, str(SCRIPT)], env=os.environ | switches, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trees, *accepted = map(int, done.stdout.split()[-6:])
    assert trees == 48
    assert accepted == [0, 1, 2, 3, 4]
