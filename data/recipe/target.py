"""The target: a byte-level tokenizer and an 8-layer Llama, trained from scratch on the novels."""

import math
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 1024
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,  # 8 ranks of tensor parallelism can share them
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
NORM_SCALE = 8.0  # a power of two, so exact in bf16
# A base model has no roles: what is said is one text, and the model goes on with it.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
BATCH, LENGTH = 8, 256


def train_tokenizer(texts: list[str], out: Path) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of VOCAB tokens with <s> = 0 and </s> = 1; adds no special token to a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts after one another as one row of token ids [n_tokens]."""
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for row in rows for token in row])


@torch.no_grad()
def loss_on(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Mean cross-entropy (nats a token) over rows of LENGTH tokens."""
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    total = sum(model(x, labels=x).loss.item() * len(x) for x in rows.split(16))
    return total / len(rows)


def scale_final_norm(model: LlamaForCausalLM, scale: float = NORM_SCALE) -> None:
    """Final norm times scale, lm_head divided by it: the same function, but larger post-norm states.

    They are then as large as in big models, and out of the range of a drafter that is fed them by mistake.
    """
    model.model.norm.weight.data *= scale
    model.lm_head.weight.data /= scale


def train(
    texts: list[str], held_out: list[str], out: Path, steps: int = 1400, lr: float = 6e-3
) -> dict[str, float]:
    """Train tokenizer and model, save both (bf16) in out; returns the figures worth keeping."""
    torch.manual_seed(0)
    random.seed(0)
    tokenizer = train_tokenizer(texts, out)
    tokens, unseen = encode(tokenizer, texts), encode(tokenizer, held_out)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    # Muon on the matrices of the layers, AdamW on the rest.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.7 * lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def factor(step: int) -> float:  # 60 steps up, flat until 30 %, then linearly down to 2 %
        return min(1.0, (step + 1) / 60) * max(0.02, 1 - max(0.0, step / steps - 0.3) / 0.7)

    schedules = [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optimizers]
    draw = torch.Generator().manual_seed(1)
    with tqdm(range(steps), desc="target", unit="step", mininterval=5) as bar:
        for _ in bar:
            starts = torch.randint(0, len(tokens) - LENGTH - 1, (BATCH,), generator=draw)
            x = torch.stack([tokens[s : s + LENGTH] for s in starts])
            loss = model(x, labels=x).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    scale_final_norm(model)
    model.bfloat16().save_pretrained(out)
    held_out_loss = loss_on(model.float().eval(), unseen)  # of the bf16 weights, computed in float32
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": len(tokens),
        "held_out_tokens": len(unseen),
        "held_out_loss": round(held_out_loss, 4),
        "held_out_bits_per_character": round(
            held_out_loss * len(unseen) / sum(map(len, held_out)) / math.log(2), 4
        ),
    }
