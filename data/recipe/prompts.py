"""Prompts out of the held-out blocks: those for the server, and those where the stored features begin."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

SHORTEST, LONGEST = 40, 48  # tokens of a prompt, which ends before the word that would pass the longest


def opening(tokenizer: PreTrainedTokenizerFast, paragraph: str) -> list[int]:
    """The first words of a paragraph as tokens; [] if it is short.

    A text that stops between words has the tokens that it had within the whole.
    """
    words = paragraph.split(" ")
    ids: list[int] = []
    for n in range(1, len(words)):
        longer = tokenizer(" ".join(words[:n]), add_special_tokens=False)["input_ids"]
        if len(longer) > LONGEST:
            return ids
        ids = longer
    return []


def openings(tokenizer: PreTrainedTokenizerFast, block: str) -> list[list[int]]:
    """The openings of all paragraphs of a block that are long enough."""
    found = (opening(tokenizer, paragraph) for paragraph in block.splitlines())
    return [ids for ids in found if len(ids) >= SHORTEST]


def for_server(tokenizer: PreTrainedTokenizerFast, blocks: list[str]) -> list[dict[str, Any]]:
    """One prompt a block: all are text, except one of messages and one of token ids."""
    ids = [openings(tokenizer, block)[0] for block in blocks]
    texts = [tokenizer.decode(i) for i in ids]
    lines: list[dict[str, Any]] = [{"prompt": text} for text in texts[:-2]]
    return [*lines, {"messages": [{"role": "user", "content": texts[-2]}]}, {"input_ids": ids[-1]}]


def for_features(tokenizer: PreTrainedTokenizerFast, blocks: list[str]) -> torch.Tensor:
    """Prompts [n_blocks, SHORTEST] of the stored features: other paragraphs than those of for_server."""
    return torch.tensor([openings(tokenizer, block)[1][:SHORTEST] for block in blocks])
