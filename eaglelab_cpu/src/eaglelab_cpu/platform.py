"""SGLang platform plugin (entry point group `sglang.srt.platforms`): SGLang's own CPU platform on any CPU.

SGLang calls `activate` while it imports `sglang.srt.utils.common`, in every process and before it imports
`sgl_kernel`. A general plugin would come too late, and a platform class of our own is refused for EAGLE
trees; so this returns SGLang's in-tree CPU platform and supplies the operators whose compiled build needs
recent Intel CPUs.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys


def activate() -> str | None:
    """Name of the platform class, or None unless SGLANG_USE_CPU_ENGINE=1: GPU servers are left alone."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return None
    if "sgl_kernel" not in sys.modules:
        from eaglelab_cpu import operators

        sys.modules["sgl_kernel"] = operators.sgl_kernel()
    _let_torchvision_import()
    return "sglang.srt.platforms.cpu.CpuSRTPlatform"


def _let_torchvision_import() -> None:
    """The registry's torchvision is linked to CUDA. Under a CPU torch its compiled part cannot load, and
    its Python part, all that SGLang needs, then asks for two operators by name: define them, never to be
    called."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    for compiled in pathlib.Path(spec.submodule_search_locations[0]).glob("_C*.so"):
        try:
            torch.ops.load_library(str(compiled))
            return
        except OSError:
            pass
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
        )
