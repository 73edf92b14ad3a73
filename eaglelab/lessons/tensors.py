"""Lesson 2: EAGLE-3 from tensors up: the reader's functions against the package's drafter and a server's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from eaglelab.drafting import Drafting
from eaglelab.html import Html
from eaglelab.lessons import material
from eaglelab.lessons.checking import Case, NotYet, ask, compare, passed, plain, two
from eaglelab.lessons.pieces import (
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Tensor,
    Weights,
    depth_figure,
    features,
    request,
    rope,
    show_round,
    show_weights,
    streams,
    tokens,
    training_figure,
    weights,
)

__all__ = ["EPS", "depth_figure", "features", "rope", "show_round", "show_weights", "streams", "tokens"]
__all__ += ["training_figure", "weights"]
CLOSE = 1e-4  # relative; float32 sums in another order differ by about 1e-6


def check_fuse(fuse: Callable[[dict[int, Tensor]], Tensor]) -> Html:
    """The reader's features against those that the server fed."""
    mine, wanted = ask(fuse, streams()), features()
    n = len(streams()[0])
    wanted = wanted[:n]
    mine, names = _tensor(mine, wanted, "fuse"), streams()
    for i, depth in enumerate((2, 4, 5)):
        chunk = mine[:, i * HIDDEN : (i + 1) * HIDDEN]
        if _off(chunk, wanted[:, i * HIDDEN : (i + 1) * HIDDEN]) > CLOSE:
            is_ = next((d for d, s in names.items() if _off(chunk, s) < CLOSE), None)
            yours = "no depth at all" if is_ is None else f"depth {is_}"
            raise NotYet(f"Chunk {i} should be depth {depth}; yours is {yours}.")
    return passed(
        f"Your {n} rows are the rows that the genuine server fed its drafter: largest relative difference "
        f"{_off(mine, wanted):.1e}."
    )  # fmt: skip


def check_rms_norm(rms_norm: Callable[[Tensor, Tensor, float], Tensor]) -> Html:
    """Against torch's own."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 24, generator=draw) * 3 + 1, torch.rand(24, generator=draw) + 0.5
    wanted = F.rms_norm(x, (24,), weight, EPS)
    centred = F.layer_norm(x, (24,), None, None, EPS) * weight
    by_sum = x / (x.norm(dim=-1, keepdim=True) + EPS) * weight
    mistakes = (
        (centred, "That is LayerNorm: RMSNorm subtracts no mean."),
        (F.rms_norm(x, (24,), None, EPS), "The weight is missing."),
        (F.rms_norm(x, (24,), weight + 1, EPS), "The weight is multiplied as it is, without adding 1."),
        (by_sum, "Divide by the root of the *mean* square, not of the sum."),
    )
    _same(ask(rms_norm, x, weight, EPS), wanted, "rms_norm of rows of width 24", mistakes)
    tiny = torch.full((1, 24), 1e-4)
    without = (F.rms_norm(tiny, (24,), weight, EPS**2), "eps is added to the mean square, under the root.")
    wanted = F.rms_norm(tiny, (24,), weight, EPS)
    _same(ask(rms_norm, tiny, weight, EPS), wanted, "rms_norm of a nearly empty row", (without,))
    return passed("The same as torch.nn.functional.rms_norm.")


def check_project(project: Callable[[Tensor, Weights], Tensor]) -> Html:
    """Against the package's drafter, on the server's rows."""
    drafter, x, w = material.drafter(), features(), weights()
    chunks = x.split(HIDDEN, dim=-1)
    each = torch.cat([F.rms_norm(c, (HIDDEN,), None, EPS) for c in chunks], -1) * w["input_norm.weight"]
    mistakes = (
        (x @ w["fc.weight"].T, "input_norm is missing: this drafter was trained with a norm before fc."),
        (each @ w["fc.weight"].T, "The norm goes over the whole row of 384, not over each chunk."),
    )
    _same(ask(project, x, w), drafter.project(x), "project of the server's rows", mistakes)
    return passed(f"{len(x)} rows of 384 have become rows of 128, as in the package.")


def check_pair(pair: Callable[[list[int], Tensor], tuple[Tensor, Tensor]]) -> Html:
    """The shift by one: feature i goes with token i + 1."""
    rows = torch.arange(4)[:, None].expand(4, 2)

    def listed(tokens: list[int], features: Tensor) -> list:
        ids, kept = two(ask(pair, tokens, features), "pair", "the tokens and the features")
        return [ids, [row[0] if isinstance(row, list) else row for row in plain(kept)]]

    listed.__name__ = "pair"
    compare(
        listed,
        [
            Case(([10, 11, 12, 13, 14], rows), [[11, 12, 13, 14], [0, 1, 2, 3]],
                 "Row 0 goes with token 1, which the target chose from it."),
            Case(([10, 11, 12, 13, 14, 15, 16], rows), [[11, 12, 13, 14], [0, 1, 2, 3]],
                 "Tokens beyond the rows are not needed yet."),
        ],
        [(lambda t, f: [t[: len(f)], list(range(len(f)))], "No shift: feature i comes *from* token i.")],
    )  # fmt: skip
    return passed("Feature i goes with token i + 1.")


def check_attention(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Html:
    """Against torch's own, with grouped heads and a causal mask."""
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(9, HEADS, HEAD_DIM, generator=draw)
    k, v = (torch.randn(9, KV_HEADS, HEAD_DIM, generator=draw) for _ in range(2))
    mistakes = (
        (_attend(q, k, v, causal=False), "A row must not see later rows: mask them."),
        (_attend(q, k, v, scale=1.0), "The scores are divided by the root of head_dim, 4."),
        (
            _attend(q, k, v, grouped=False),
            "Heads 0 to 3 share kv head 0, 4 to 7 kv head 1: repeat_interleave.",
        ),
    )
    _same(ask(attention, q, k, v), _attend(q, k, v), "attention", mistakes)
    return passed("The same as torch's scaled_dot_product_attention, causal, with 4 query heads a kv head.")


def _attend(q: Tensor, k: Tensor, v: Tensor, causal=True, scale=None, grouped=True) -> Tensor:
    group = q.shape[1] // k.shape[1]
    if grouped:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    else:
        k, v = (x.repeat(1, group, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(0, 1)


Layer = Callable[[Tensor, Tensor, Tensor, Weights], tuple[Tensor, Tensor]]


def check_layer(layer: Layer) -> Html:
    """The reader's forward against the package's, on the server's rows."""
    drafter, w = material.drafter(), weights()
    n = 60
    ids, positions = tokens()[1 : n + 1], torch.arange(n)
    hidden = drafter.project(features()[:n])
    wanted = drafter.forward(ids, hidden, positions, lambda _, q, k, v: _attend(q, k, v))
    got = ask(layer, ids, hidden, positions, w)
    got = two(got, "layer", "normed and feedback")
    mistakes = [(_variant(ids, hidden, positions, w, **{name: True}), said) for name, said in SLIPS.items()]
    _same(got[0], wanted[0], "normed", mistakes)
    raw = _variant(ids, hidden, positions, w, raw=True)
    mistakes = [
        (hidden, "It is what this step returns, not what it was given."),
        (raw, "This drafter was trained with norm_output: what is fed back has gone through the final norm."),
    ]
    _same(got[1], wanted[1], "feedback", mistakes)
    off = _off(got[0], wanted[0])
    return passed(f"Your forward is the package's: largest relative difference {off:.1e} over {n} rows.")


SLIPS = {
    "swapped": "The embedding comes first, then the hidden state: cat([embed, x]).",
    "no_hidden_norm": "The hidden state goes through hidden_norm before the concatenation.",
    "no_input_norm": "The embedding goes through input_layernorm before the concatenation.",
    "normed_residual": "The residual is the hidden state as it came in, before hidden_norm.",
    "no_residual": "Add the residual after the attention's output projection.",
    "no_mlp_residual": "Add the MLP's output to what went into its norm.",
    "no_rope": "q and k are turned by rope before they meet.",
    "raw": "The final norm is missing.",
}


def _variant(ids, hidden, positions, w: Weights, **slips: bool) -> Tensor:
    """The forward with one typical slip; returns normed (or what goes into the norm, for `raw`)."""
    has = slips.get

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w[name + ".weight"], EPS)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"layers.0.{name}_proj.weight"])

    embed = w["embed_tokens.weight"][ids]
    embed = embed if has("no_input_norm") else norm("layers.0.input_layernorm", embed)
    x = hidden if has("no_hidden_norm") else norm("layers.0.hidden_norm", hidden)
    residual = x if has("normed_residual") else torch.zeros_like(x) if has("no_residual") else hidden
    x = torch.cat([x, embed] if has("swapped") else [embed, x], dim=-1)
    q, k, v = (linear(f"self_attn.{p}", x).view(len(x), -1, HEAD_DIM) for p in "qkv")
    if not has("no_rope"):
        q, k = rope(q, positions), rope(k, positions)
    hidden = residual + linear("self_attn.o", _attend(q, k, v).flatten(1))
    x = norm("layers.0.post_attention_layernorm", hidden)
    x = linear("mlp.down", F.silu(linear("mlp.gate", x)) * linear("mlp.up", x))
    hidden = x if has("no_mlp_residual") else hidden + x
    return hidden if has("raw") else norm("norm", hidden)


Draft = Callable[[Tensor, Tensor, Weights, int], list[int]]


def check_draft(draft: Draft, rounds: int = 12) -> Html:
    """The reader's drafts against those of the genuine server, round by round."""
    w, text, trace = weights(), tokens(), request()[0]
    for i, r in enumerate(trace.rounds[:rounds], 1):
        got = plain(ask(draft, text[: r.n + 1], features()[: r.n], w, len(r.draft_tokens)))
        if got == r.draft_tokens:
            continue
        where = f"Round {i} starts with {r.n} rows: the server drafted {r.draft_tokens}, you {got}."
        pairs = enumerate(zip(got, r.draft_tokens, strict=False))
        same = next((j for j, (a, b) in pairs if a != b), len(got))
        said = "What is fed to the next step is not right yet." if same else ""
        if got[:1] == [_best(text[: r.n + 1], features()[: r.n])]:
            said = "These are draft ids: add d2t[id] to get the target's."
        raise NotYet(f"{where} The first {same} agree. {said}".rstrip())
    count = sum(len(r.draft_tokens) for r in trace.rounds[:rounds])
    return passed(
        f"All {count} draft tokens of {rounds} rounds are those that genuine SGLang drafted, one by one."
    )


def _best(text: Tensor, rows: Tensor) -> int:
    """The first draft as a draft id."""
    drafter = material.drafter()
    return int(drafter.logits(Drafting.over(drafter, text, rows).normed[-1:]).argmax())


def check_rounds(rounds: Callable[..., list[int]]) -> Html:
    """The whole request, drafted and verified by the reader: the server's accept lengths."""
    trace, text = request()[0], material.texts()[0]
    wanted = [r.accept_len for r in trace.rounds]
    got = ask(rounds, tokens(), features(), trace.prompt_len, text.end, weights(), 5)
    got = plain(got)
    if got == [x - 1 for x in wanted]:
        raise NotYet("These are accepted drafts; tokens committed count the bonus too, one a round.")
    if got != wanted:
        pairs = enumerate(zip(got, wanted, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(got), len(wanted)))
        raise NotYet(
            f"The server's {len(wanted)} rounds committed {wanted}; yours are {got}: the first {same} agree. "
            "After a round that committed c tokens, the next starts with c more rows."
        )
    counters = material.golden().sent[trace.rid]["counters"]
    exact = 1 + counters["spec_num_correct_drafts"] / counters["spec_verify_ct"]
    return passed(
        f"All {len(wanted)} rounds commit what they committed on the server: accept length "
        f"{sum(got) / len(got):.4f}; the server counted {exact:.4f}.",
        "You have rebuilt the speculative decoding of a genuine server from its tensors.",
    )


def _off(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def _tensor(got: Any, wanted: Tensor, what: str) -> Tensor:
    """A tensor (or array) of the shape that is wanted, else NotYet."""
    shape = tuple(getattr(got, "shape", ()))
    if shape != tuple(wanted.shape):
        yours = list(shape) if shape else type(got).__name__
        raise NotYet(f"{what}: a tensor of shape {list(wanted.shape)} is wanted, yours is {yours}.")
    return torch.as_tensor(got)


def _same(got: Any, wanted: Tensor, what: str, mistakes=()) -> None:
    """NotYet unless equal up to rounding; a mistake that is recognised is named."""
    got = _tensor(got, wanted, what)
    if not got.isfinite().all():
        raise NotYet(
            f"{what}: some numbers are nan or infinite. Does a row see nothing at all, not even itself?"
        )
    if _off(got, wanted) <= CLOSE:
        return
    named = next(
        (said for wrong, said in mistakes if wrong.shape == got.shape and _off(got, wrong) <= CLOSE), ""
    )
    raise NotYet(f"{what} differs by {_off(got, wanted):.1%} of its length. {named}".rstrip())
