"""What a trainer meant with a checkpoint: Feed and Wiring, read off its config and tensors."""

from __future__ import annotations

from dataclasses import replace

from eaglelab.checkpoint import Checkpoint
from eaglelab.launch import Target
from eaglelab.wiring import Feed, Wiring, feature_norm
from eaglelab.yarn import as_transformers


def trained(checkpoint: Checkpoint, target: Target | None = None) -> tuple[Feed, Wiring]:
    """What the trainer's config and tensors say. Tensors outrank flags: a norm that was saved was trained.

    `target` is needed only where a dialect's layer ids depend on it, or are left out; else `depths` is ().
    Source: speculators 0.9.0 models/eagle3/core.py and model_definitions.py.
    """
    s, tensors = checkpoint.settings, checkpoint.tensors
    chunks = checkpoint.feature_count
    if checkpoint.takes_features:
        feed = Feed(checkpoint.depths_in(target), chunks * s.target_hidden_size, dtype=checkpoint.dtype)
    else:  # the target's last hidden state, after its final norm, stands in the drafter's place
        last = (target.num_layers,) if target else ()
        feed = Feed(last, s.target_hidden_size, final_norm=True, dtype=checkpoint.dtype)
    per_chunk = s.fc_norm or "fc_norm.0.weight" in tensors
    whole = s.norm_before_fc or "input_norm.weight" in tensors
    names = set(tensors)
    own_head = "lm_head.weight" in tensors
    return feed, Wiring(
        fc="applied" if checkpoint.takes_features else "bypassed",
        norm_before_fc=feature_norm(whole, per_chunk),
        residual="normed" if s.norm_before_residual else "raw",
        feedback="post-norm" if s.norm_output else "pre-norm",
        rope=replace(s.rope, scaling=tuple(sorted(as_transformers(dict(s.rope.scaling)).items()))),
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        latent=s.latent,
        qk_norm=s.qk_norm or any(n.endswith((".q_norm.weight", ".k_norm.weight")) for n in names),
        attention_bias=any(n.endswith("q_proj.bias") for n in names),
        output_bias=any(n.endswith("o_proj.bias") for n in names),
        layers=s.layers,
        later_norm="hidden_norm" if "layers.1.hidden_norm.weight" in names else "input_layernorm",
        window=s.window,
        full_layers=s.full_layers,
        # models/eagle3/attention.py: a draft step keeps its row's mask, and adds the drafts before it
        window_moves=s.window is None or checkpoint.dialect != "speculators",
        max_positions=s.max_positions,
        eps=s.eps,
        embedding="own" if "embed_tokens.weight" in names else "target",
        lm_head="own" if own_head else "tied" if s.tied else "target",
        logits_width=s.draft_vocab_size,
        vocab_map="d2t" if "d2t" in names else "identity",
        position_start=checkpoint.spelling.position_start,
        dtype=checkpoint.dtype,
    )
