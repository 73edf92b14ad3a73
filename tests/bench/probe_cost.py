"""What the probe costs: one idle call, and whole runs without it, idle and armed. Prints figures and ratios.

    python tests/bench/probe_cost.py --idle          a second: one idle hook, one idle poll
    python tests/bench/probe_cost.py [--rounds 7]    two genuine servers, minutes: tokens a second, ratios

The runs without the probe are on a server that does not load the plugin. Batches of 4 prompts run under each
condition in turn; the ratio is of the best rounds, which other load on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from helpers import PROMPTS  # noqa: E402

TOKENS = 128


def timed(calls: int, call) -> float:
    """Seconds a call, the best of 5 runs."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def idle_call() -> None:
    import functools

    from engine_fakes import make_worker

    from eaglelab.probe.hooks import Hooks
    from eaglelab.probe.recorder import Recorder

    with tempfile.TemporaryDirectory() as name:
        rec = Recorder(pathlib.Path(name))
        hook = Hooks(rec).draft

        def original(worker, batch):
            return None

        @functools.wraps(original)
        def wrapped(*args, **kwargs):  # as sglang 0.5.23 plugins/hook_registry.py wraps an AROUND hook
            return hook(original, *args, **kwargs)

        bare = timed(100_000, lambda: original(None, None))
        ours = timed(100_000, lambda: wrapped(None, None))
        print(f"idle hook: {1e9 * (ours - bare):.0f} ns a worker call (bare call {1e9 * bare:.0f} ns)")
        rec.worker = make_worker()
        rec.folder, rec.facts = pathlib.Path(name), {}
        from eaglelab.probe.engine import Identity

        rec.identity = Identity(0, 0, True)
        rec.poll()
        poll = timed(1000, rec.poll)
        print(f"idle poll: {1e6 * poll:.0f} us, ten a second: {100 * 10 * poll:.3f} % of one core")


def batch(client, prefix: str | None = None) -> float:
    rids = [f"{prefix or 'bench-'}{time.monotonic_ns()}-{i}" for i in range(4)]
    start = time.perf_counter()
    client.generate(PROMPTS, TOKENS, rids, ignore_eos=True)
    return 4 * TOKENS / (time.perf_counter() - start)


def servers(rounds: int) -> None:
    from eaglelab.serve import start_server
    from eaglelab.server import Server

    speed: dict[str, list[float]] = {n: [] for n in ("without", "idle", "armed, others", "armed, recording")}
    for name, env in (("without", {"SGLANG_PLUGINS": "eaglelab_cpu"}), ("with", {})):
        with start_server(env=env) as server, Server(server.url) as client:
            batch(client)
            for _ in range(rounds):
                if name == "without":
                    speed["without"].append(batch(client))
                    continue
                speed["idle"].append(batch(client))
                order = client.arm(ttl_s=120)
                while client.probe_status()["ranks"]["dp0.tp0"]["armed"] != order["id"]:
                    time.sleep(0.05)
                speed["armed, others"].append(batch(client))
                speed["armed, recording"].append(batch(client, order["rid_prefix"]))
                client.disarm()
                time.sleep(0.3)
    best = max(speed["without"])
    for name, values in speed.items():
        text = f"best {max(values):.0f}, median {statistics.median(values):.0f} tokens/s"
        print(f"{name:18} {text}; best against best without the probe: {max(values) / best:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    idle_call()
    if not options.idle:
        servers(options.rounds)
