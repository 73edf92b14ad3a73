"""What tests against a running server share: its configurations, prompts, one request, one figure."""

from __future__ import annotations

import json
import urllib.request

CONFIGURATIONS: dict[str, dict] = {
    "plain": {"algorithm": None},
    "eagle3-chain": {},
    "eagle3-tree": {"topk": 4},
    "eagle-chain": {"algorithm": "EAGLE"},  # the incident: EAGLE instead of EAGLE3
    "eagle3-chain-chunked": {"extra_flags": ["--chunked-prefill-size", "16"]},
    "eagle3-chain-tp2": {"tp": 2},
    "eagle3-chain-tp8": {"tp": 8},
}

PROMPTS = [
    "It is a truth universally acknowledged, that a single man in possession",
    "Emma Woodhouse, handsome, clever, and rich, with",
    "She had been forced into prudence in her youth,",
    "The family of Dashwood had long been settled in Sussex. Their estate was large, and their residence was",
]
NEW_TOKENS = 64


def generate(url: str, prompts: str | list[str], new_tokens: int = NEW_TOKENS, **more) -> list[dict]:
    """Greedy /generate of one prompt or, in one batch, of several: SGLang's answers (output_ids,
    meta_info)."""
    prompts = [prompts] if isinstance(prompts, str) else prompts
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = json.dumps({"text": prompts, "sampling_params": sampling, **more}).encode()
    request = urllib.request.Request(url + "/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def accept_length(answers: list[dict]) -> float:
    """1 + correct drafts / verifies over all answers: the bonus counts, the prefill token does not."""
    meta = [answer["meta_info"] for answer in answers]
    return 1 + sum(m["spec_num_correct_drafts"] for m in meta) / sum(m["spec_verify_ct"] for m in meta)
