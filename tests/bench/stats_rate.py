"""How fast FeatureStats reads bf16 rows, against plain torch.var_mean on the same block, in turns.

    python tests/bench/stats_rate.py [--rows 2000] [--width 21504] [--chunks 3] [--threads 1] [--turns 5]

Both get the same number of threads and take turns, since machines drift. The figure that counts is the ratio
of medians: FeatureStats must not take more than 1.3 times as long as torch.var_mean(rows, dim=0), which
computes two of its numbers. Exit code 1 when it does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable

TARGET = 1.3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("rows", 2000), ("width", 21504), ("chunks", 3), ("threads", 1), ("turns", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(a.threads)  # before numpy and torch are loaded
    import numpy as np
    import torch

    from eaglelab.stats import FeatureStats

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    block = (torch.randn(a.rows, a.width) * torch.rand(a.width).mul(3).exp()).to(torch.bfloat16)
    bits = block.view(torch.int16).numpy().view(np.uint16)

    def seconds(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    tracemalloc.start()  # numpy reports its buffers to it
    stats = FeatureStats(a.width, a.chunks).update(bits, threads=a.threads)
    extra = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    ours, plain = [], []
    for _ in range(a.turns):
        ours.append(seconds(lambda: FeatureStats(a.width, a.chunks).update(bits, threads=a.threads)))
        plain.append(seconds(lambda: torch.var_mean(block, dim=0)))
    variance, mean = torch.var_mean(block.double(), dim=0, correction=0)
    assert np.allclose(stats.variance, variance.numpy(), rtol=1e-12)
    assert np.allclose(stats.mean, mean.numpy(), rtol=0, atol=1e-12 * variance.sqrt().max().item())

    gigabytes = bits.nbytes / 1e9
    for name, times in (("FeatureStats", ours), ("torch.var_mean", plain)):
        median = statistics.median(times)
        best = gigabytes / min(times)
        print(f"{name:15s} {gigabytes / median:5.2f} GB/s of bf16 (median of {a.turns}; best {best:.2f})")
    ratio = statistics.median(ours) / statistics.median(plain)
    print(f"time ratio {ratio:.2f} (target at most {TARGET}); {extra:.0f} MB of memory beyond the block")
    return ratio > TARGET


if __name__ == "__main__":
    raise SystemExit(main())
