"""The EAGLE-3 drafter in plain PyTorch: `forward` is the whole model, each stage named and readable.

One code path serves both ends of the ladder: a `Wiring` says what the trainer did (`trained`) or what the
engine will do (`served`). Facts: sglang 0.5.23 `models/llama_eagle3.py`, `layers/logits_processor.py`;
speculators 0.9.0 `models/eagle3/{core,model_definitions}.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from eaglelab import latent
from eaglelab.errors import BadInput
from eaglelab.rope import frequencies, rotate
from eaglelab.wiring import Wiring

Tap = Callable[[str, torch.Tensor], None]  # (stage, tensor): read it, do not keep a reference to write into
See = Callable[[str, torch.Tensor], torch.Tensor]  # the same, handing the tensor on
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (layer, q, k, v) -> mix


class Drafter:
    """The drafter's tensors under one wiring.

    checkpoint, target: anything with `.tensors` and `.load(canonical name, dtype)` (eaglelab.checkpoint).
    `guessed` names parameters which the engine leaves at an initial value that nobody can know.
    """

    def __init__(self, checkpoint: Any, wiring: Wiring, target: Any = None, device: str = "cpu", dtype=None):
        self.wiring, self.device = wiring, torch.device(device)
        self.dtype = dtype or getattr(torch, wiring.dtype)
        self.weights, self.guessed = _gather(checkpoint, wiring, target, self.device, self.dtype)
        self.embedding, self.head = self.weights["embed_tokens.weight"], self.weights["lm_head.weight"]
        self.hidden_size, self.vocab_size = self.embedding.shape[1], self.embedding.shape[0]
        self.head_dim = wiring.head_dim or self.hidden_size // wiring.heads
        self.qkv = latent.qkv if wiring.latent else _qkv
        self.scale = latent.scale(wiring) if wiring.latent else self.head_dim**-0.5
        turning = wiring.latent.qk_rope_head_dim if wiring.latent else self.head_dim
        self.rope = frequencies(wiring.rope, turning, wiring.max_positions)
        self.draft_vocab_size = min(len(self.head), wiring.logits_width or len(self.head))
        self.vocabulary = torch.arange(self.draft_vocab_size, device=self.device)  # draft id -> target id
        if wiring.vocab_map == "misread":  # the file holds target ids, and the engine adds the index to them
            self.vocabulary = 2 * self.vocabulary
        if wiring.vocab_map in ("d2t", "misread"):
            self.vocabulary = self.vocabulary + self.weights["d2t"][: self.draft_vocab_size]

    @torch.no_grad()
    def project(self, features: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        """Target features [rows, width] -> hidden [rows, H]. Bypassed `fc` lets them through untouched."""
        see, wiring = _seer(tap), self.wiring
        x = see("features", features.to(self.device, self.dtype))
        takes = self.weights["fc.weight"].shape[1] if wiring.fc == "applied" else self.hidden_size
        if x.shape[-1] != takes:
            raise BadInput(f"features are {x.shape[-1]} wide; the drafter with fc {wiring.fc} takes {takes}")
        if wiring.fc == "bypassed":
            return x
        if wiring.norm_before_fc in ("whole", "both"):
            x = see("input_norm", self.norm("input_norm", x))
        if wiring.norm_before_fc in ("per-chunk", "both"):
            chunks = x.split(len(self.weights["fc_norm.0.weight"]), dim=-1)
            x = see("fc_norm", torch.cat([self.norm(f"fc_norm.{i}", c) for i, c in enumerate(chunks)], -1))
        return see("fc", self.linear("fc", x))

    @torch.no_grad()
    def forward(self, tokens, hidden, positions, attend: Attend, tap: Tap | None = None):
        """One pass over independent rows.

        tokens [rows] target ids; hidden [rows, H], projected features or the feedback of the step before;
        positions [rows]; `attend` keeps k, v and returns the mix [rows, heads, width of v].
        -> (normed, feedback), both [rows, H].
        """
        see, wiring = _seer(tap), self.wiring
        embed = see("embed", F.embedding(tokens, self.embedding))
        for n in range(wiring.layers):
            layer = f"layers.{n}."
            residual = hidden
            x = see(layer + "hidden_norm", self.norm(_state_norm(n, wiring), hidden))
            if n == 0:  # the first layer takes token and hidden state side by side, each under its own norm
                if wiring.residual == "normed":
                    residual = x
                embed = see(layer + "input_layernorm", self.norm(layer + "input_layernorm", embed))
                x = torch.cat([embed, x], dim=-1)
            q, k, v = self.qkv(self, layer, x, positions, see)
            mixed = see(layer + "attention", attend(n, q, k, v).flatten(1))
            hidden = residual + see(layer + "o_proj", self.linear(layer + "self_attn.o_proj", mixed))
            x = see(layer + "post_attention_layernorm", self.norm(layer + "post_attention_layernorm", hidden))
            x = F.silu(self.linear(layer + "mlp.gate_proj", x)) * self.linear(layer + "mlp.up_proj", x)
            hidden = hidden + see(layer + "mlp", self.linear(layer + "mlp.down_proj", x))
        normed = see("norm", self.norm("norm", hidden))
        return normed, see("feedback", normed if wiring.feedback == "post-norm" else hidden)

    @torch.no_grad()
    def logits(self, normed: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        """normed [rows, H] -> logits [rows, draft_vocab_size] float32; a longer head is cut, as in SGLang."""
        return _seer(tap)("logits", F.linear(normed, self.head[: self.draft_vocab_size]).float())

    def to_target(self, draft_ids: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        """The vocabulary map: draft ids -> target ids, any shape."""
        return _seer(tap)("vocabulary_map", self.vocabulary[draft_ids])

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[name + ".weight"], self.wiring.eps)


def _qkv(drafter: Drafter, at: str, x: torch.Tensor, positions: torch.Tensor, see: See):
    """Plain attention of layer `at`: x [rows, width] -> q [rows, heads, d], k and v [rows, kv heads, d]."""
    own, layout = at + "self_attn.", drafter.wiring.rope.layout
    q, k, v = (drafter.linear(f"{own}{p}_proj", x).unflatten(-1, (-1, drafter.head_dim)) for p in "qkv")
    if drafter.wiring.qk_norm:
        q, k = drafter.norm(own + "q_norm", q), drafter.norm(own + "k_norm", k)
    see(at + "v", v)
    q = see(at + "q_rope", rotate(see(at + "q", q), positions, drafter.rope, layout))
    k = see(at + "k_rope", rotate(see(at + "k", k), positions, drafter.rope, layout))
    return q, k, v


def _state_norm(n: int, wiring: Wiring) -> str:
    """The norm of a layer's hidden state; trainers and engines differ about it in later layers."""
    return f"layers.{n}.{'hidden_norm' if n == 0 else wiring.later_norm}"


def _seer(tap: Tap | None) -> See:
    def see(stage: str, tensor: torch.Tensor) -> torch.Tensor:
        if tap is not None:
            tap(stage, tensor)
        return tensor

    return see


def _names(wiring: Wiring, present) -> list[str]:
    """Every parameter that the wiring uses, head and embedding aside."""
    names, optional = ["norm.weight"], []
    if wiring.vocab_map in ("d2t", "misread"):
        names.append("d2t")
    if wiring.fc == "applied":
        names.append("fc.weight")
        optional.append("fc.bias")
        if wiring.norm_before_fc in ("whole", "both"):
            names.append("input_norm.weight")
        if wiring.norm_before_fc in ("per-chunk", "both"):
            names += sorted(n for n in {*present, *wiring.unloaded} if n.startswith("fc_norm."))
    for n in range(wiring.layers):
        layer = f"layers.{n}."
        parts = (*latent.PARTS, "o_proj") if wiring.latent else [f"{p}_proj" for p in "qkvo"]
        names += [f"{layer}self_attn.{part}.weight" for part in parts]
        names += [f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
        names += [layer + "post_attention_layernorm.weight"]
        names += [_state_norm(n, wiring) + ".weight"] + [layer + "input_layernorm.weight"] * (n == 0)
        if wiring.qk_norm:
            names += [f"{layer}self_attn.{p}_norm.weight" for p in "qk"]
        biased = "qkv" * wiring.attention_bias + "o" * wiring.output_bias
        optional += [f"{layer}self_attn.{p}_proj.bias" for p in biased]
    return names + [name for name in optional if name in present and name not in wiring.dropped]


def _gather(checkpoint: Any, wiring: Wiring, target: Any, device: torch.device, dtype: torch.dtype):
    """-> (canonical name -> tensor as the wiring uses it, names whose values can only be guessed)."""
    weights, guessed = {}, []

    def load(source: Any, name: str) -> torch.Tensor:
        if source is None:
            raise BadInput(f"{name} is the target's under this wiring, and no target is given (--target)")
        return source.load(name, None if name == "d2t" else dtype).to(device)

    for name in _names(wiring, checkpoint.tensors):
        if name in wiring.unloaded:
            weights[name], known = _initial(name, checkpoint, wiring)
            weights[name] = weights[name].to(device, dtype)
            guessed += [] if known else [name]
        elif name in checkpoint.tensors:
            weights[name] = load(checkpoint, name)
        else:
            raise BadInput(f"{checkpoint.path}: tensor {name} is missing, and the wiring needs it")
    source = {"target": target, "own": checkpoint}
    weights["embed_tokens.weight"] = load(source[wiring.embedding], "embed_tokens.weight")
    if wiring.lm_head == "tied":
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    elif wiring.lm_head == "initial":
        rows = wiring.logits_width or len(weights["embed_tokens.weight"])
        weights["lm_head.weight"] = _random((rows, len(weights["norm.weight"]))).to(device, dtype)
        guessed.append("lm_head.weight")
    else:
        weights["lm_head.weight"] = load(source[wiring.lm_head], "lm_head.weight")
        if wiring.lm_head == "target" and wiring.vocab_map == "d2t":  # its rows at the draft ids' targets
            shared = weights["d2t"] + torch.arange(len(weights["d2t"]), device=device)
            weights["lm_head.weight"] = weights["lm_head.weight"][shared]
    return weights, tuple(guessed)


def _initial(name: str, checkpoint: Any, wiring: Wiring) -> tuple[torch.Tensor, bool]:
    """What an engine's parameter holds when the file lacks it -> (tensor, whether that is known).

    A norm is ones; anything else is uninitialised memory, for which seeded noise stands in.
    """
    if "norm" in name and name.endswith(".weight"):
        return torch.ones(_shape(name, checkpoint, wiring)), True
    return _random(_shape(name, checkpoint, wiring)), False


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def _shape(name: str, checkpoint: Any, wiring: Wiring) -> tuple[int, ...]:
    """Shape of a parameter: its own in the file if it is there, else by the rules of the architecture."""
    if name in checkpoint.tensors:
        return tuple(checkpoint.tensors[name].shape)
    c = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim, kv_heads = c.get("head_dim") or hidden // heads, c.get("num_key_value_heads") or heads
    first = 2 * hidden if name.startswith("layers.0.") else hidden
    features = checkpoint.tensors["fc.weight"].shape[1] if "fc.weight" in checkpoint.tensors else 3 * hidden
    shapes = {
        "input_norm": (features,), "fc": (hidden, features), "lm_head": (c["vocab_size"], hidden),
        "q_norm": (head_dim,), "k_norm": (head_dim,), "q_proj": (heads * head_dim, first),
        "k_proj": (kv_heads * head_dim, first), "v_proj": (kv_heads * head_dim, first),
        "o_proj": (hidden, heads * head_dim), "gate_proj": (c["intermediate_size"], hidden),
        "up_proj": (c["intermediate_size"], hidden), "down_proj": (hidden, c["intermediate_size"]),
        **latent.shapes(wiring, hidden),
    }  # fmt: skip
    return shapes.get(name.split(".")[-2], (hidden,))
