"""How long do inspect, diff and diagnose take on drafters of Kimi-K2.5's true shapes, from files and flags?

    python tests/bench/kimi_files.py [--limit 2.0] [--rounds 3]

Sparse files: 7168 wide, fc 7168 x 21504, a target of 163,840 tokens; a Llama-style drafter with its own draft
vocabulary, one with the whole vocabulary, and one with multi-head latent attention. Their numbers are zeros,
which `diagnose` says; what is measured is the time of the whole command, start of Python included, and of the
diff in a running one. The best of some rounds counts, which other load disturbs least. Fails above the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, VOCABULARY, INNER, HEADS, LAYER = 7168, 163840, 18432, 64, "midlayer."
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}
FLAGS = "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 --tp-size 8"
COMMON: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "max_position_embeddings": 262144, "rope_theta": 50000.0, "rope_scaling": YARN, "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
}  # fmt: skip
LLAMA = {**COMMON, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "head_dim": 128}
LLAMA["eaglelab_dialect"] = "sglang"  # the ids alone mean one layer more to SpecForge
LATENT = {
    **COMMON, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
TARGET = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": WIDTH, "num_hidden_layers": 61,
        "vocab_size": VOCABULARY, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
    },
}  # fmt: skip


def shapes(draft: int, latent: bool = False) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensors of a drafter whose head has `draft` rows."""
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (draft, WIDTH),
        **{f"{LAYER}mlp.{p}_proj.weight": (INNER, WIDTH) for p in ("gate", "up")},
        f"{LAYER}mlp.down_proj.weight": (WIDTH, INNER),
        **{f"{LAYER}{n}.weight": (WIDTH,)
           for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }  # fmt: skip
    attention = {f"{p}_proj.weight": (HEADS * 128, 2 * WIDTH) for p in "qkv"}
    if latent:
        attention = {
            "q_a_proj.weight": (1536, 2 * WIDTH), "q_b_proj.weight": (HEADS * 192, 1536),
            "kv_a_proj_with_mqa.weight": (512 + 64, 2 * WIDTH), "kv_b_proj.weight": (HEADS * 256, 512),
        }  # fmt: skip
        found |= {f"{LAYER}self_attn.q_a_layernorm.weight": (1536,)}
        found |= {f"{LAYER}self_attn.kv_a_layernorm.weight": (512,)}
    attention["o_proj.weight"] = (WIDTH, HEADS * 128)
    found |= {f"{LAYER}self_attn.{name}": shape for name, shape in attention.items()}
    typed: dict[str, tuple[tuple[int, ...], str]] = {name: (shape, "BF16") for name, shape in found.items()}
    if draft < VOCABULARY:
        typed |= {"d2t": ((draft,), "I64"), "t2d": ((VOCABULARY,), "BOOL")}
    return typed


def sparse(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], str]]) -> Path:
    """A folder whose tensors are holes: gigabytes long, and no block on the disk but the header's."""
    sizes, header, at = {"BF16": 2, "I64": 8, "BOOL": 1}, {}, 0
    for name, (shape, dtype) in tensors.items():
        length = sizes[dtype]
        for side in shape:
            length *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + length]}
        at += length
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return folder


def best(rounds: int, call) -> float:
    """Seconds of the quickest of some calls."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def command(*words: str) -> None:
    """One command of eaglelab in a process of its own. Whatever verdict: it must give one."""
    run = subprocess.run([sys.executable, "-m", "eaglelab.cli", *words], capture_output=True, text=True)
    if run.returncode not in (0, 1) or not run.stdout.strip():
        raise SystemExit(f"eaglelab {' '.join(words)}: exit code {run.returncode}\n{run.stdout}{run.stderr}")


def compare(drafter: Path, target: Path) -> None:
    from eaglelab.checkpoint import open_checkpoint, open_target
    from eaglelab.diff import diff
    from eaglelab.launch import Launch
    from eaglelab.served import served
    from eaglelab.trained import trained

    model, checkpoint = open_target(target), open_checkpoint(drafter)
    launch = Launch.parse(FLAGS, target=model.facts)
    diff(trained(checkpoint, model.facts), served(checkpoint, launch), checkpoint, model)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--limit", type=float, default=2.0, help="seconds for each")
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    slow = []
    with tempfile.TemporaryDirectory(prefix="kimi-") as folder:
        root = Path(folder)
        target = root / "target.json"
        target.write_text(json.dumps(TARGET))
        drafters = {
            "Llama-style, draft vocabulary 32,000": (LLAMA | {"draft_vocab_size": 32000}, shapes(32000)),
            "Llama-style, whole vocabulary": (LLAMA | {"draft_vocab_size": VOCABULARY}, shapes(VOCABULARY)),
            "latent attention (MLA)": (LATENT | {"draft_vocab_size": VOCABULARY}, shapes(VOCABULARY, True)),
        }
        for i, (words, (config, tensors)) in enumerate(drafters.items()):
            path = sparse(root / str(i), config, tensors)
            file = path / "model.safetensors"
            held = file.stat().st_blocks * 512
            print(
                f"{words}: {file.stat().st_size / 2**30:.1f} GiB, {held / 2**10:.0f} KiB of them on the disk"
            )
            where = ("--drafter", str(path), "--target", str(target), "--launch", FLAGS)
            steps = {
                "inspect": lambda p=path: command("inspect", str(p), "--target", str(target)),
                "diff": lambda p=path: compare(p, target),
                "diagnose": lambda w=where: command("diagnose", *w),
            }
            for step, call in steps.items():
                seconds = best(given.rounds, call)
                print(f"  {step:9} {seconds:.2f} s")
                slow += [f"{words}: {step}"] if seconds > given.limit else []
    if slow:
        raise SystemExit(f"slower than {given.limit} s: {'; '.join(slow)}")


if __name__ == "__main__":
    main()
