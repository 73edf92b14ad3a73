"""How long and how much memory does a replay at Kimi's width take? A random drafter, bfloat16, 32 rounds.

    python tests/bench/kimi_width.py [--rounds 32] [--prompt 256] [--threads 2] [--scale 1]

The shapes are those of a Llama-style drafter for Kimi: hidden 7,168, three chunks of features (fc 7,168 x
21,504), 64 heads and 64 kv heads of 128, intermediate 18,432, vocabulary 163,840. The weights are noise, so
the drafts mean nothing; time and memory do. Fails above 20 GiB.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass

import torch

from eaglelab.drafter import Drafter
from eaglelab.replay import replay_text
from eaglelab.simulate import Speculation, Text
from eaglelab.traces import Round
from eaglelab.wiring import Rope, Wiring

LIMIT = 20  # GiB
STEPS = 3


@dataclass
class Noise:
    """A checkpoint of seeded noise: made when it is read, kept by nobody but the drafter."""

    shapes: dict[str, tuple[int, ...]]
    path: str = "noise"

    @property
    def tensors(self):
        return self.shapes

    def load(self, name: str, dtype=None) -> torch.Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        return torch.empty(shape, dtype=dtype).normal_(0, shape[1] ** -0.5)


def shapes(scale: int) -> dict[str, tuple[int, ...]]:
    hidden, heads, inner, vocabulary = 7168 // scale, 64 * 128 // scale, 18432 // scale, 163840 // scale
    layer = "layers.0."
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        "fc.weight": (hidden, 3 * hidden),
        **{f"{layer}self_attn.{p}_proj.weight": (heads, 2 * hidden) for p in "qkv"},
        layer + "self_attn.o_proj.weight": (hidden, heads),
        layer + "mlp.gate_proj.weight": (inner, hidden),
        layer + "mlp.up_proj.weight": (inner, hidden),
        layer + "mlp.down_proj.weight": (hidden, inner),
        **{f"{layer}{name}.weight": (hidden,) for name in norms},
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=32)
    options.add_argument("--prompt", type=int, default=256, help="tokens before the first round")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--scale", type=int, default=1, help="divide every width by this")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)

    start = time.perf_counter()
    noise = Noise(shapes(given.scale))
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    rope, heads = Rope(50000.0, tuple(sorted(yarn.items()))), 64 // given.scale
    wiring = Wiring(
        rope=rope, heads=heads, kv_heads=heads, head_dim=128, vocab_map="identity", embedding="own"
    )
    drafter = Drafter(noise, wiring)
    made = time.perf_counter()
    rows, vocabulary = given.prompt + 2 * given.rounds, drafter.vocab_size
    features = torch.randn(rows, 3 * drafter.hidden_size, dtype=torch.bfloat16)
    text = Text("bench", torch.randint(vocabulary, (rows + 1,)).tolist(), features, given.prompt, rows + 1)
    starts = range(given.prompt, rows, 2)
    drafts = torch.randint(vocabulary, (given.rounds, STEPS)).tolist()
    rounds = [Round(n, d, None, 2, text.tokens[n + 1 : n + 3]) for n, d in zip(starts, drafts, strict=True)]
    begun = time.perf_counter()
    found = replay_text(drafter, text, rounds, Speculation(STEPS, 1, STEPS + 1), forced=True)
    done = time.perf_counter()

    weights = sum(w.nbytes for w in {id(w): w for w in drafter.weights.values()}.values()) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    tokens = sum(len(r.own) for r in found)
    print(f"weights {weights:.1f} GiB, made in {made - start:.1f} s")
    print(f"replayed {len(found)} rounds, {tokens} draft tokens, over {rows} rows of {features.shape[1]:,}")
    print(f"in {done - begun:.1f} s ({given.threads} threads)")
    print(f"peak memory {peak:.1f} GiB (limit {LIMIT})")
    if peak > LIMIT or len(found) != given.rounds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
