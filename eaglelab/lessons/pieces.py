"""Lesson 2's material: streams, features and weights as tensors, and pictures of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from eaglelab.capture import to_float32
from eaglelab.html import Html
from eaglelab.lessons import material
from eaglelab.rope import rotate

Tensor = torch.Tensor
Weights = dict[str, Tensor]
EPS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 1e-5, 8, 2, 16, 128  # of the drafter in data/


@cache
def request() -> tuple[Any, Any]:
    """Trace and re-prefill of the shipped capture's first request."""
    capture = material.golden()
    rid, trace = next(iter(capture.requests.items()))
    return trace, capture.reprefill[rid]


def streams() -> dict[int, Tensor]:
    """Depth -> the target's residual stream along the first request's text, [n, H] float32."""
    again = request()[1]
    return {d: torch.from_numpy(to_float32(s, again.dtype)) for d, s in again.streams.items()}


def features() -> Tensor:
    """What the server fed its drafter along the same text, [n, 3 H]."""
    return material.texts()[0].features


def tokens() -> Tensor:
    """The text itself, with a few greedy tokens after it."""
    return torch.tensor(material.texts()[0].tokens)


@cache
def weights() -> Weights:
    """The drafter's tensors by their canonical names, in float32; the embedding is the target's."""
    drafter = material.drafter()
    return {name: t if name == "d2t" else t.float() for name, t in drafter.weights.items()}


def show_weights() -> Html:
    """Names and shapes, in the order in which they are used."""
    rows = []
    for name, t in weights().items():
        part = name.split(".")[-2] if "." in name else name
        shape = "\u00a0×\u00a0".join(map(str, t.shape))
        rows.append((list(ROLES).index(part), name, shape, ROLES[part]))
    return material.shown(
        ("tensor", "shape", "what it does"),
        [r[1:] for r in sorted(rows)],
        "H = 128; 8 heads, 2 kv heads of 16; 640 draft ids",
    )


ROLES = {
    "input_norm": "norm of the features, before fc",
    "fc": "three depths side by side -> one hidden state",
    "hidden_norm": "norm of the hidden state, before the layer",
    "embed_tokens": "shared with the target",
    "input_layernorm": "norm of the token's embedding, before the layer",
    "q_proj": "takes embedding and hidden state side by side: 2 H",
    "k_proj": "the same",
    "v_proj": "the same",
    "o_proj": "the heads' mix, back to H",
    "post_attention_layernorm": "norm before the MLP",
    "gate_proj": "MLP",
    "up_proj": "MLP",
    "down_proj": "MLP, back to H",
    "norm": "norm before the head",
    "lm_head": "the drafter's own: one row a draft id",
    "d2t": "draft id -> how much to add to get the target's id",
}


def show_round(number: int = 1) -> Html:
    """One round of the captured request, row by row, with its token ids and words."""
    trace, text = request()[0], material.texts()[0].tokens
    r = trace.rounds[number - 1]

    def said(token: int) -> str:
        return f"{token}\u00a0{material.word(token)}"

    rows = []
    for row in range(r.n - 3, r.n + len(r.draft_tokens) - 1):
        j = row - r.n + 1  # drafts known before this row's
        token = text[row + 1] if j <= 0 else r.draft_tokens[j - 1]
        fed = f"fc of feature {row}" if j <= 0 else f"feedback of row {row - 1}"
        draft = said(r.draft_tokens[j]) if j >= 0 else "(known)"
        judged = "" if j < 0 or j >= r.accept_len else said(text[row + 2])
        verdict = "" if not judged else "kept" if j < r.accept_len - 1 else "wrong: the bonus"
        rows.append((row, fed, said(token), draft, judged, verdict))
    header = ("row", "hidden state", "token", "guess", "the target writes", "")
    caption = f"Round {number}: {r.n} rows, {len(r.draft_tokens)} drafts, {r.accept_len} tokens committed"
    return material.shown(header, rows, caption)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding: x [rows, heads, 16] turned by angles that grow with the row's position."""
    drafter = material.drafter()
    return rotate(x, positions, drafter.rope, drafter.wiring.rope.layout)


def depth_figure() -> Any:
    """How long the target's rows are at each depth; the three that are fed are marked."""
    from eaglelab import plots
    from eaglelab.html import BLUE, GREY, INK

    found = streams()
    figure, (axes,) = plots.blank(1, 3.2)
    for depth, x in found.items():
        fed = depth in (2, 4, 5)
        length = float(x.norm(dim=1).median())
        axes.bar(depth, length, color=BLUE if fed else GREY, hatch="//" if fed else "", edgecolor="#ffffff")
        axes.annotate(f"{length:.3g}", (depth, length), ha="center", va="bottom", color=INK)
    axes.set_xticks(list(found))
    axes.set_xlabel("depth: decoder layers done (0: the embedding's output); hatched: fed to the drafter")
    axes.set_ylabel(f"length of a row\n(median of n = {len(found[0])})")
    axes.margins(y=0.15)
    return material.picture(figure, "length of a row of the residual stream at each depth")


def training_figure() -> Any:
    """What the trainer's own validation says, step by step (data/drafter-speculators/val_metrics.json)."""
    from eaglelab import plots
    from eaglelab.html import BLUE, INK, ORANGE

    measured = material.figures()["drafter"]
    figure, (axes,) = plots.blank(1, 3.2)
    rows = (
        ("cond_acc", "right, given that the steps before were", ORANGE, "s--", 9),
        ("full_acc", "all right up to this step", BLUE, "o-", -17),
    )
    for name, label, colour, style, above in rows:
        values = [measured[f"{name}_{step}"] for step in range(5)]
        axes.plot(range(5), values, style, color=colour, label=label)
        for x, y in enumerate(values):
            axes.annotate(
                f"{y:.2f}", (x, y), textcoords="offset points", xytext=(0, above), ha="center", color=INK
            )
    axes.set_xticks(range(5))
    axes.set_ylim(0, 1)
    axes.set_xlabel("step (0: from a true feature; 1 and on: from its own output)")
    axes.set_ylabel("share of positions,\nheld-out texts")
    axes.legend(frameon=False, loc="lower left")
    return material.picture(figure, "the trainer's validation, step by step")
