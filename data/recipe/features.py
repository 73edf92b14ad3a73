"""Texts and the target's hidden states on them, in the offline format of speculators 0.9.0.

A folder holds an arrow dataset (input_ids, loss_mask, seq_len) and hidden_states/hs_<row>.safetensors with
token_ids [T] and hidden_states [T, 4, H] in bf16: the residual stream at LAYERS, then after the last layer,
before the final norm.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from speculators.train.vocab_mapping import save_token_frequency_distribution
from tqdm import tqdm
from transformers import LlamaForCausalLM

LAYERS = (
    2,
    4,
    5,
)  # speculators' ids: "the input of layer i", which is the residual stream after i layers (depth i)
LENGTH, PROMPT = 256, 32  # tokens of a training text; of these, the book's where the target goes on by itself
BATCH = 96

Text = tuple[torch.Tensor, int]  # token ids [T]; how many of them are the prompt


def continued(model: Any, prompts: torch.Tensor, length: int, **how: Any) -> torch.Tensor:
    """Prompts [n, P] continued by the model to [n, length]."""
    new = length - prompts.shape[1]
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **how)


def training_texts(
    model: LlamaForCausalLM, tokens: torch.Tensor, book: int = 512, own: int = 1536
) -> list[Text]:
    """Texts for the drafter: cuts from the books, and the target's own, half greedy, half sampled.

    A drafter learns to guess the target, not the books, so most texts are the target's.
    """
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(3)

    def cuts(n: int, length: int) -> torch.Tensor:
        starts = torch.randint(0, len(tokens) - length, (n,), generator=draw)
        return torch.stack([tokens[s : s + length] for s in starts])

    texts: list[Text] = [(row, 0) for row in cuts(book, LENGTH)]
    ways: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 0}]
    for i, at in enumerate(tqdm(range(0, own, BATCH), desc="target's own texts", unit="batch")):
        prompts = cuts(min(BATCH, own - at), PROMPT)
        texts += [(row, PROMPT) for row in continued(model, prompts, LENGTH, **ways[i % 2])]
    order = torch.randperm(len(texts), generator=draw).tolist()
    return [texts[i] for i in order]


def least_repetitive(texts: torch.Tensor, n: int) -> torch.Tensor:
    """The n of the texts [m, T] with the most different runs of four tokens; greedy text goes in circles."""
    return torch.stack(sorted(texts, key=lambda row: -len(row.unfold(0, 4, 1).unique(dim=0)))[:n])


@torch.no_grad()
def hidden_states(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [n, T] to [n, T, len(LAYERS) + 1, H] in bf16."""
    last = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    streams = model.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    return torch.stack([*(streams[i] for i in LAYERS), last[0]], dim=2).to(torch.bfloat16)


def rows(model: LlamaForCausalLM, texts: list[Text]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each hs_<row>.safetensors; all texts have the same length."""
    for at in tqdm(range(0, len(texts), 32), desc="hidden states", unit="batch"):
        tokens = torch.stack([ids for ids, _ in texts[at : at + 32]])
        for ids, states in zip(tokens, hidden_states(model, tokens), strict=True):
            yield {"token_ids": ids.contiguous(), "hidden_states": states.contiguous()}


def store(model: LlamaForCausalLM, texts: list[Text], out: Path, frequencies: bool = False) -> None:
    """Write the folder that `speculators train --data-path` reads.

    `frequencies` adds token_freq.pt, from which the trainer picks the drafter's vocabulary.
    """
    shutil.rmtree(out, ignore_errors=True)
    columns = {
        "input_ids": [ids.tolist() for ids, _ in texts],
        # The loss skips the prompt, and position 0, which nothing predicts.
        "loss_mask": [[int(i >= max(prompt, 1)) for i in range(len(ids))] for ids, prompt in texts],
        "seq_len": [len(ids) for ids, _ in texts],
    }
    dataset = Dataset.from_dict(columns).with_format("torch")
    dataset.save_to_disk(out)
    (out / "hidden_states").mkdir()
    for i, tensors in enumerate(rows(model, texts)):
        save_file(tensors, out / "hidden_states" / f"hs_{i}.safetensors")
    if frequencies:
        save_token_frequency_distribution(dataset, out / "token_freq.pt")


def describe(model: LlamaForCausalLM, texts: list[Text], out: Path) -> None:
    """Write meta.json, which says what speculators' format leaves out: whose layers, which text."""
    n = model.config.num_hidden_layers
    meta = {
        "format": "speculators 0.9.0 offline",
        "aux_layer_ids": list(LAYERS),
        "depths": [*LAYERS, n],
        "depth_k_is": "the residual stream after k decoder layers; 0 is the output of the embedding",
        "last_is": "before the final norm",
        "dtype": "bfloat16 (computed in float32)",
        "prompt_lengths": [prompt for _, prompt in texts],
        "continued_by": "the target, greedily",
    }
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
