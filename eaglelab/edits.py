"""Single edits of a drafter's setting: what a trainer, a converter or an engine may have done otherwise.

Each is one thing that goes wrong in practice, done to the wiring, to a tensor, to the rows that are fed, or
to the way in which steps follow each other. A replay under the edit that comes out as the server's, or as the
training's, names the fault. An edit that changes nothing under rope (a shift of every position) is no edit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from eaglelab.drafter import Attend, Drafter, Tap
from eaglelab.drafting import Drafting, _Branches
from eaglelab.wiring import Rope, Wiring

if TYPE_CHECKING:
    from eaglelab.checkpoint import TargetModel
    from eaglelab.overlay import Overlay
    from eaglelab.simulate import Text
    from eaglelab.traces import Round

Blocks = Sequence[tuple[int, int]]  # (first row, rows) of the draft-extend after each verify
Rows = Callable[[torch.Tensor, Blocks], torch.Tensor]  # features [rows, width] -> the same shape
Tokens = Callable[[list[int], int], list[int]]  # tokens, length of the prompt -> as many tokens
THETAS = (1e4, 1e6, 5e5, 1e5, 5e4, 1e3, 5e6, 1e7, 100.0)  # of published drafters and targets, and slips
NAMED = frozenset(
    {
        "rope-theta", "rope-scaling", "mrope-or-partial-rotary", "norm-output", "norm-before-residual",
        "norm-before-fc-not-applied", "d2t-dropped", "d2t-absolute", "qk-norm-or-bias-dropped",
        "sliding-window-ignored", "token-shift", "position-offset", "random-embedding-exported",
        "trained-embedding-replaced", "tied-head-reduced-vocab", "trained-head-replaced",
        "prefix-cache-hit", "checkpoint-dtype", "engine-residual-or-extra-norm", "weights-not-loaded",
        "stale-rows", "chunk-order", "feed-mismatch",
    }
)  # fmt: skip
KEPT = "kept keys"
CHUNKS = 4  # orders are tried of at most so many chunks: 23 of 4


@dataclass(frozen=True)
class Edit:
    """One edit. `slug`: the fault that it is, None where the catalogue has none.

    wiring: the setting with the edit; tensors: replaced ones, by canonical name; rows, tokens: done to the
    features and the tokens of a text; skipped, doubled: norms that are left out, or applied twice; twist:
    see `Twisted`.
    """

    slug: str | None
    words: str
    wiring: Wiring
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Rows | None = None
    tokens: Tokens | None = None
    skipped: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    twist: str = ""
    dtype: str = ""  # of the arithmetic, where it is another than the setting's

    def then(self, other: Edit, base: Wiring) -> Edit:
        """Both edits at once; of the wiring, what each of them changed of `base`."""
        changes = {
            name: getattr(other.wiring, name)
            for name in base.__dataclass_fields__
            if getattr(other.wiring, name) != getattr(base, name)
        }
        first, second = self.rows, other.rows
        both: Rows | None = first or second
        if first and second:
            both = _chained(first, second)
        return Edit(
            other.slug,
            f"{self.words}; and {other.words}",
            replace(self.wiring, **changes),
            {**self.tensors, **other.tensors},
            both,
            self.tokens or other.tokens,
            self.skipped + other.skipped,
            self.doubled + other.doubled,
            self.twist or other.twist,
            self.dtype or other.dtype,
        )


def _chained(first: Rows, second: Rows) -> Rows:
    return lambda rows, blocks: second(first(rows, blocks), blocks)


class Twisted(Drafter):
    """A drafter under an edit that no field of a wiring expresses.

    twist: "stale feedback" (every step is fed what the first one was), "stuck position", "stuck token", "one
    step late" (each step is fed the state of the step before last); KEPT is a matter of `Kept`.
    """

    def edit(self, edit: Edit) -> Twisted:
        self.skipped, self.doubled, self.twist = edit.skipped, edit.doubled, edit.twist
        self.extending, self.just_drafted, self.last = False, False, torch.empty(0)
        self.first: tuple[torch.Tensor, ...] = ()  # tokens, states and positions of the first step
        return self

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name in self.skipped:
            return x
        return super().norm(name, super().norm(name, x)) if name in self.doubled else super().norm(name, x)

    def project(self, features: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        self.extending = True
        return super().project(features, tap)

    def logits(self, normed: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        if self.just_drafted:  # twice without a pass between: a new draft begins
            self.first = ()
        self.just_drafted = True
        return super().logits(normed, tap)

    def forward(self, tokens, hidden, positions, attend: Attend, tap: Tap | None = None):
        if self.extending or self.twist in ("", KEPT):
            self.extending = False
            self.first = ()
            return super().forward(tokens, hidden, positions, attend, tap)
        self.just_drafted = False
        if not self.first:
            self.first, self.last = (tokens, hidden, positions), hidden
        elif self.twist == "stale feedback":
            hidden = self.first[1]
        elif self.twist == "stuck token":
            tokens = self.first[0]
        elif self.twist == "stuck position":
            positions = self.first[2]
        elif self.twist == "one step late":
            hidden, self.last = self.last, hidden
        return super().forward(tokens, hidden, positions, attend, tap)


class Kept(Drafting):
    """Drafting in which keys and values that draft steps wrote of accepted tokens stay: round after round."""

    @torch.no_grad()
    def walk(self, text: Text, rounds: Sequence[Round]) -> list[list[int]]:
        """The drafts of each round, in order, every step given the server's tokens. Chains only."""
        tokens, found = torch.as_tensor(text.tokens), []
        shift = self.drafter.wiring.token_shift
        for r in rounds:
            if self.rows < r.n:  # the prompt, or a round that was not drafted
                self.extend(tokens[self.rows + shift : r.n + shift], text.features[self.rows : r.n])
            branches = _Branches(self, torch.tensor([r.n]), 1, len(r.draft_tokens))
            normed, feedback = self.normed[r.n - 1 : r.n], self.feedback[r.n - 1 : r.n]
            own = []
            for step, token in enumerate(r.draft_tokens):
                own.append(int(self.drafter.to_target(self.drafter.logits(normed).argmax(-1))))
                if step < len(r.draft_tokens) - 1:
                    normed, feedback = branches.step(torch.tensor([token]), feedback, None)
            found.append(own)
            end = min(r.n + r.accept_len, len(text.features))
            self.extend(tokens[r.n + shift : end + shift], text.features[r.n : end])
            kept = min(end - r.n - 1, len(r.draft_tokens) - 1)
            for layer in range(self.drafter.wiring.layers):
                self.keys[layer][r.n : r.n + kept] = branches.keys[layer][0, :kept]
                self.values[layer][r.n : r.n + kept] = branches.values[layer][0, :kept]
        return found


def build(edit: Edit, checkpoint: Overlay, target: TargetModel | None, device: str, dtype: Any) -> Drafter:
    """The drafter under an edit. BadInput where the edit does not fit its tensors."""
    dtype = getattr(torch, edit.dtype) if edit.dtype else dtype
    source = checkpoint.over(edit.tensors) if edit.tensors else checkpoint
    return Twisted(source, edit.wiring, target, device, dtype).edit(edit)


def of_setting(
    wiring: Wiring, checkpoint: Overlay, target: TargetModel | None, engine: bool
) -> Iterator[Edit]:
    """Edits of what a config says, nearly the same for training and for serving (`engine`)."""
    w = wiring

    def change(slug: str | None, words: str, **fields: Any) -> Edit:
        return Edit(slug, words, replace(w, **fields))

    yield from _rope(w, target)
    other = "pre-norm" if w.feedback == "post-norm" else "post-norm"
    yield change("norm-output", f"draft steps are fed the {other} state", feedback=other)
    other = "raw" if w.residual == "normed" else "normed"
    yield change("norm-before-residual", f"the first residual is {other}", residual=other)
    if w.fc == "applied" and w.norm_before_fc != "none":
        yield change("norm-before-fc-not-applied", "no norm before fc", norm_before_fc="none")
    if w.vocab_map == "d2t":
        yield change("d2t-dropped", "d2t is not applied", vocab_map="dropped")
        yield change("d2t-absolute", "target ids in d2t are taken for offsets", vocab_map="misread")
        offsets = checkpoint.load("d2t")
        raw = {"d2t": offsets - torch.arange(len(offsets))}
        yield Edit("d2t-absolute", "the offsets in d2t are taken for target ids", w, raw)
    if w.head_dim and not w.latent and w.qk_norm:
        yield change("qk-norm-or-bias-dropped", "no norms of queries and keys", qk_norm=False)
    if w.attention_bias or w.output_bias:
        words = "no biases in the attention"
        yield change("qk-norm-or-bias-dropped", words, attention_bias=False, output_bias=False)
    if w.window is not None:
        yield change("sliding-window-ignored", "no sliding window", window=None)
    for shift in (-1, 1):
        words = f"features are paired with tokens {shift:+d} beside theirs"
        yield change("token-shift", words, token_shift=w.token_shift + shift)
    for shift in (-1, 1, -2, 2, 4, 8):
        words = f"draft steps stand {shift:+d} beside their positions"
        yield change("position-offset", words, step_offset=w.step_offset + shift)
    yield from _shared(w, checkpoint, target, engine)


def _rope(w: Wiring, target: TargetModel | None) -> Iterator[Edit]:
    theirs = target_rope(target)
    thetas = dict.fromkeys([*([theirs.theta] if theirs else []), *THETAS])
    for theta in thetas:
        if theta != w.rope.theta:
            rope = replace(w.rope, theta=theta)
            yield Edit(
                "rope-theta", f"rope theta {theta:g} in place of {w.rope.theta:g}", replace(w, rope=rope)
            )
    if w.rope.scaling:
        rope = replace(w.rope, scaling=())
        yield Edit("rope-scaling", "no rope scaling", replace(w, rope=rope))
    if theirs and theirs.scaling and theirs.scaling != w.rope.scaling:
        rope = replace(w.rope, scaling=theirs.scaling)
        yield Edit("rope-scaling", "the target's rope scaling", replace(w, rope=rope))
    if not w.rope.scaling:
        for factor in (2.0, 4.0, 8.0):
            scaling = (("factor", factor), ("rope_type", "linear"))
            words = f"rope scaled linearly by {factor:g}"
            yield Edit("rope-scaling", words, replace(w, rope=replace(w.rope, scaling=scaling)))
    other: Literal["half", "interleaved"] = "interleaved" if w.rope.layout == "half" else "half"
    words = f"rope turns {other} pairs of channels"
    yield Edit("mrope-or-partial-rotary", words, replace(w, rope=replace(w.rope, layout=other)))
    for share in (2, 4):
        if w.head_dim and not w.rope.rotary_dim and w.head_dim % (2 * share) == 0:
            rope = replace(w.rope, rotary_dim=w.head_dim // share)
            words = f"rope turns one {'half' if share == 2 else 'quarter'} of a head only"
            yield Edit("mrope-or-partial-rotary", words, replace(w, rope=rope))
    if w.rope.rotary_dim:
        rope = replace(w.rope, rotary_dim=0)
        yield Edit("mrope-or-partial-rotary", "rope turns whole heads", replace(w, rope=rope))


def target_rope(target: TargetModel | None) -> Rope | None:
    from eaglelab.errors import BadInput
    from eaglelab.settings import read_rope

    if target is None:
        return None
    try:
        return read_rope(target.config.get("text_config") or target.config, str(target.path))
    except BadInput:
        return None


def _shared(w: Wiring, checkpoint: Overlay, target: TargetModel | None, engine: bool) -> Iterator[Edit]:
    """Another embedding, another head. An embedding that does worse than the target's was not trained."""
    if w.embedding == "target" and "embed_tokens.weight" in checkpoint.tensors:
        yield Edit("random-embedding-exported", "the file's own embedding", replace(w, embedding="own"))
    if w.embedding == "own" and target is not None and "embed_tokens.weight" in target.tensors:
        slug = "trained-embedding-replaced" if engine else "random-embedding-exported"
        yield Edit(slug, "the target's embedding", replace(w, embedding="target"))
    if w.lm_head != "tied" and w.logits_width:
        yield Edit(
            "tied-head-reduced-vocab", "the embedding's first rows as head", replace(w, lm_head="tied")
        )
    if target is None or w.lm_head == "target":
        return
    head, rows = target.tensors.get("lm_head.weight"), w.logits_width or None
    if head is None:
        return
    if w.vocab_map == "d2t":
        words = "the target's head, at the rows of d2t"
        yield Edit("trained-head-replaced", words, replace(w, lm_head="target"))
    first = head.torch()[:rows]
    yield Edit("trained-head-replaced", "the first rows of the target's head", w, {"lm_head.weight": first})


def of_engine(wiring: Wiring, checkpoint: Overlay, target: TargetModel | None) -> Iterator[Edit]:
    """Edits that an engine may make against its own files: lost tensors, lost norms, steps that go astray."""
    w = wiring
    for name in used_norms(w, checkpoint):
        short = name.removesuffix(".weight")
        lost = "norm-before-fc-not-applied" if "input_norm" in name or "fc_norm" in name else None
        ones = torch.ones(tuple(checkpoint.tensors[name].shape))
        if name not in w.unloaded:
            yield Edit("weights-not-loaded", f"{name} at its initial value, ones", w, {name: ones})
        odd = lost or "engine-residual-or-extra-norm"
        yield Edit(odd, f"{short} is left out", w, skipped=(short,))
        yield Edit("engine-residual-or-extra-norm", f"{short} is applied twice", w, doubled=(short,))
    for name, info in checkpoint.tensors.items():
        if name.startswith("layers.") and name.endswith("_proj.weight") and name not in w.unloaded:
            words = f"{name} is zero, as memory that nothing filled"
            yield Edit("weights-not-loaded", words, w, {name: torch.zeros(tuple(info.shape))})
    for n in range(w.layers):
        ends = [f"layers.{n}.{end}.weight" for end in ("self_attn.o_proj", "mlp.down_proj")]
        if all(name in checkpoint.tensors for name in ends):
            zero = {name: torch.zeros(tuple(checkpoint.tensors[name].shape)) for name in ends}
            yield Edit("weights-not-loaded", f"layer {n} adds nothing, as if never loaded", w, zero)
    yield Edit("stale-rows", "every step is fed the state that the first one was", w, twist="stale feedback")
    yield Edit("stale-rows", "each step is fed the state of the step before last", w, twist="one step late")
    yield Edit("stale-rows", "every step is fed the first step's token", w, twist="stuck token")
    yield Edit("position-offset", "all draft steps stand at one position", w, twist="stuck position")
    words = "the draft-extend after a verify leaves what draft steps wrote of accepted tokens"
    yield Edit("engine-residual-or-extra-norm", words, w, twist=KEPT)
    for window in (8, 16, 32, 64, 128):
        words = f"a window of {window} keys"
        yield Edit("sliding-window-ignored", words, replace(w, window=window))
    for eps in (1e-6, 1e-5, 1e-12):
        if eps != w.eps:
            yield Edit(None, f"epsilon {eps:g} in place of {w.eps:g} in every norm", replace(w, eps=eps))
    for dtype in ("bfloat16", "float16"):
        if w.dtype == "float32":
            yield Edit("checkpoint-dtype", f"it computes in {dtype} in place of {w.dtype}", w, dtype=dtype)
    yield Edit(None, "branches of a tree see their parent's keys", replace(w, tree_kv="parent"))


def of_rows(
    wiring: Wiring, chunks: int, width: int, target: TargetModel | None, engine: bool
) -> Iterator[Edit]:
    """Edits of the rows that are fed: their chunks in another order, one lost, rows of other positions."""
    w = wiring
    if 1 < chunks <= CHUNKS:
        for order in permutations(range(chunks)):
            if list(order) != sorted(order):
                yield Edit(
                    "chunk-order", f"chunks in the order {list(order)}", w, rows=_reordered(order, width)
                )
    if not engine:
        return
    for i in range(chunks):
        yield Edit("stale-rows", f"chunk {i} is zero", w, rows=_blank(i, width))
    yield Edit("token-shift", "rows of the prompt are paired with the token before", w, tokens=_prompt_late)
    yield Edit("token-shift", "rows of the prompt are paired with the token after", w, tokens=_prompt_early)
    yield Edit("prefix-cache-hit", "the rows of the prompt but its last are zero", w, rows=_no_prompt)
    yield Edit("stale-rows", "each row is that of the position before", w, rows=lambda x, _: _moved(x, 1))
    yield Edit("stale-rows", "each row is that of the position after", w, rows=lambda x, _: _moved(x, -1))
    yield Edit("stale-rows", "the rows after a verify are those after the verify before", w, rows=_stale)
    if target is not None and "norm.weight" in target.tensors:
        weight = target.load("norm.weight", torch.float32)
        eps = float((target.config.get("text_config") or target.config).get("rms_norm_eps", 1e-6))
        words = "chunks that went through the target's final norm"
        yield Edit("feed-mismatch", words, w, rows=lambda x, _: _normed(x, weight, eps))


def _reordered(order: tuple[int, ...], width: int) -> Rows:
    return lambda x, _: torch.cat([x[:, i * width : (i + 1) * width] for i in order], dim=1)


def _blank(index: int, width: int) -> Rows:
    def blank(x: torch.Tensor, _: Blocks) -> torch.Tensor:
        x = x.clone()
        x[:, index * width : (index + 1) * width] = 0
        return x

    return blank


def _prompt_late(tokens: list[int], prompt: int) -> list[int]:
    """Row 0 keeps its token, row i has token i; as where ids are not shifted when a prompt is handed over."""
    return [tokens[0], tokens[1], *tokens[1:prompt], *tokens[prompt + 1 :]]


def _prompt_early(tokens: list[int], prompt: int) -> list[int]:
    return [tokens[0], *tokens[2 : prompt + 1], *tokens[prompt:]]


def _no_prompt(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    x = x.clone()
    x[: max(0, (blocks[0][0] if blocks else len(x)) - 1)] = 0
    return x


def _stale(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Row by row of a block; where the block before committed fewer, what stood there is not captured."""
    out = x.clone()
    for (before, had), (start, count) in zip(blocks, blocks[1:], strict=False):
        some = min(had, count)
        out[start : start + some] = x[before : before + some]
    return out


def _moved(x: torch.Tensor, by: int) -> torch.Tensor:
    return torch.cat([x[:by], x[:-by]]) if by > 0 else torch.cat([x[-by:], x[by:]])


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    parts = x.float().split(len(weight), dim=1)
    return torch.cat([F.rms_norm(part, weight.shape, weight, eps) for part in parts], dim=1)


def used_norms(w: Wiring, checkpoint: Overlay) -> list[str]:
    """Norms of the file that this wiring applies, by canonical name."""
    found = []
    for name in checkpoint.tensors:
        if not name.endswith("norm.weight") and not name.startswith("fc_norm."):
            continue
        before = name.startswith(("input_norm", "fc_norm."))
        if before and (w.fc == "bypassed" or w.norm_before_fc == "none"):
            continue
        if name.endswith(("q_norm.weight", "k_norm.weight")) and not w.qk_norm:
            continue
        found.append(name)
    return found
