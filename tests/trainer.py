"""A random EAGLE-3 drafter as speculators itself builds it, and the same one in eaglelab."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from eaglelab.drafter import Drafter
from eaglelab.traces import Round, Trace
from eaglelab.wiring import Rope, Wiring

H, HEADS, KV, D, VOCAB, DRAFT, ROWS, STEPS = 64, 4, 2, 16, 96, 40, 23, 4


class Checkpoint:
    """Tensors in memory, by canonical name."""

    def __init__(self, tensors, config=None):
        self.tensors, self.path, self.config = tensors, "memory", config or {}

    def load(self, name, dtype=None):
        return self.tensors[name].to(dtype) if dtype else self.tensors[name]


def trainer_model(chunks=3, layers=1, draft_vocab=DRAFT, qk_norm=False, bias=False, layer=None, **flags):
    """speculators' own Eagle3DraftModel with random weights (norms too), in float32; `layer`: its layer's."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from transformers import LlamaConfig, Qwen3Config

    sizes = dict(
        hidden_size=H, intermediate_size=80, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=D,
        num_hidden_layers=layers, vocab_size=VOCAB, rms_norm_eps=1e-5, attention_bias=bias, rope_theta=5000.0,
        max_position_embeddings=128, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    layer = (Qwen3Config if qk_norm else LlamaConfig)(**{**sizes, **(layer or {})})
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=list(range(1, chunks + 1)), **flags,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Eagle3DraftModel(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.rand(parameter.shape) + 0.5 if "norm" in name else torch.randn(parameter.shape) * 0.2
            )
        if draft_vocab != VOCAB:
            kept = torch.randperm(VOCAB)[:draft_vocab].sort().values
            model.d2t.copy_(kept - torch.arange(draft_vocab))
    return model


def wired(model) -> Drafter:
    c, layer = model.config, model.config.transformer_layer_config
    wiring = Wiring(
        norm_before_fc="whole" if c.norm_before_fc else "per-chunk" if c.fc_norm else "none",
        residual="normed" if c.norm_before_residual else "raw",
        feedback="post-norm" if c.norm_output else "pre-norm",
        position_start=1, rope=Rope(theta=5000.0),
        heads=HEADS, kv_heads=KV, head_dim=D, layers=len(model.layers), eps=1e-5,
        qk_norm=layer.model_type == "qwen3", attention_bias=layer.attention_bias,
        output_bias=layer.attention_bias,
        embedding="own", lm_head="own",
        vocab_map="d2t" if model.use_draft_vocab else "identity", dtype="float32",
    )  # fmt: skip
    return Drafter(Checkpoint(model.state_dict()), wiring)


DRAFTS = 3  # draft tokens a round of `generation`


def trainers_drafts(model, tokens, features, n, steps):
    """What speculators' own model drafts after n rows: teacher forcing, its drafts as the teacher's."""
    ids = torch.cat([tokens[1 : n + 1], torch.zeros(steps, dtype=torch.long)])  # row i sees token i + 1
    rows = torch.cat(
        [features[:n], torch.zeros(steps, features.shape[1])]
    )  # rows past n - 1 are not looked at
    out: list[int] = []
    for step in range(steps):
        with torch.no_grad():
            drafts = model(
                rows[None], ids[None], torch.zeros(1, len(ids), dtype=torch.long), ttt_steps=step + 1
            )
        choice = drafts[step][0, n - 1]
        out.append(int(choice + model.d2t[choice]))
        ids[n + step] = out[-1]
    return out


def generation() -> SimpleNamespace:
    """A capture of a 'server': a text in which some of the drafts come true, its rounds, and its drafter."""
    model = trainer_model(norm_output=True, norm_before_fc=True)
    torch.manual_seed(11)
    tokens, features = torch.randint(VOCAB, (80,)), torch.randn(80, 3 * H)
    prompt, end, n, rounds = 10, 60, 10, []
    generator = np.random.default_rng(3)
    while n + 1 < end:
        drafts = trainers_drafts(model, tokens, features, n, DRAFTS)
        right = int(generator.integers(0, DRAFTS + 1))
        tokens[n + 1 : n + 1 + right] = torch.tensor(drafts[:right])
        if right < DRAFTS and tokens[n + 1 + right] == drafts[right]:
            tokens[n + 1 + right] = (drafts[right] + 1) % VOCAB
        committed = tokens[n + 1 : n + right + 2].tolist()
        rounds.append(Round(n, drafts, None, right + 1, committed))
        n += right + 1
    kept = Trace("a", "dp0.tp0", tokens[:prompt].tolist(), tokens=tokens[: n + 1].tolist(), rounds=rounds)
    kept.feature_dtype, kept.output_ids = "float32", tokens[prompt:end].tolist()
    kept.features = features[:n].numpy()
    launch = SimpleNamespace(steps=DRAFTS, topk=1, draft_tokens=DRAFTS + 1)
    return SimpleNamespace(
        requests={"a": kept}, reprefill={}, launch=launch,
        drafter=wired(model), tokens=tokens, features=features,
    )  # fmt: skip
