"""One text replayed round by round, as HTML: every draft token with what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eaglelab.html import BLUE, GREY, INK, ORANGE, PAPER, TINT, VERMILLION, Html, element, panel, printable

if TYPE_CHECKING:
    from eaglelab.evidence import Evidence
    from eaglelab.traces import Round, Trace

Fate = Literal["accepted", "rejected", "not reached", "bonus", "prompt", "drafted", "to come"]
# The mark goes with the colour, so that neither is needed to read the other.
LOOK: dict[Fate, tuple[str, str]] = {
    "accepted": ("", f"background:{TINT[BLUE]};border:1px solid {BLUE}"),
    "rejected": (
        "✗ ",
        f"background:{TINT[VERMILLION]};border:1px solid {VERMILLION};text-decoration:line-through",
    ),
    "not reached": ("", f"background:{TINT[GREY]};border:1px dashed {GREY}"),
    "bonus": ("+ ", f"background:{TINT[ORANGE]};border:2px solid {ORANGE};font-weight:bold"),
    "prompt": ("", f"background:{TINT[GREY]};border:1px solid {TINT[GREY]}"),
    "drafted": ("", f"background:{PAPER};border:1px solid {INK}"),
    "to come": ("", f"background:{PAPER};border:1px dotted {GREY};opacity:0.6"),
}
SHOWN = 12  # rounds before the fold


@dataclass(frozen=True)
class Token:
    """A token in the strip. `text` is None when there is no tokenizer; then its id stands for it.

    probability, target_probability: the drafter's and the target's own, of this token; choice: what the
    target chose here, in words; rank: the place of that choice among the drafter's, from 1.
    """

    id: int
    position: int
    fate: Fate
    text: str | None = None
    probability: float | None = None
    target_probability: float | None = None
    choice: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Step:
    """One round: its draft tokens, then what the target added."""

    drafts: Sequence[Token]
    bonus: Token | None
    accept_length: int


def fates(drafts: Sequence[int], parents: Sequence[int] | None, committed: Sequence[int]) -> list[Fate]:
    """What became of each draft token of a round.

    drafts, parents: as in `traces.Round` (parents None: a chain; node i + 1 is drafts[i], 0 the root).
    committed: the tokens this round committed, bonus last. A draft is accepted if its parent was and the
    target chose the same token there; rejected if its parent was and the target chose another; else it was
    not reached.

    >>> fates([7, 8, 9], None, [7, 5])
    ['accepted', 'rejected', 'not reached']
    """
    accepted_at = {0: 0}  # node -> depth, for the root and the accepted nodes
    out: list[Fate] = []
    for i, token in enumerate(drafts):
        depth = accepted_at.get(i if parents is None else parents[i])
        if depth is None:
            out.append("not reached")
        elif depth < len(committed) - 1 and committed[depth] == token:
            accepted_at[i + 1] = depth + 1
            out.append("accepted")
        else:
            out.append("rejected")
    return out


def token_strip(prompt: Sequence[Token], steps: Sequence[Step], caption: object) -> Html:
    """The prompt's end, a legend, then one line a round (from 0); those after the first dozen are folded."""
    rows = [_row(i, step) for i, step in enumerate(steps)]
    parts: list[object] = [
        element("p", caption),
        element("p", *map(chip, prompt[-40:])),
        _legend(),
        *rows[:SHOWN],
    ]
    if len(rows) > SHOWN:
        more = element("summary", f"{len(rows) - SHOWN} more rounds", style="cursor:pointer;padding:4px 0")
        parts.append(element("details", more, *rows[SHOWN:]))
    return panel(*parts)


def chip(token: Token, titled: bool = True) -> Html:
    """One token. Its `title` gives id, position, what became of it, and what both models thought of it."""
    mark, look = LOOK[token.fate]
    shown = f"#{token.id}" if token.text is None else token.text.replace("\n", "↵").replace("\t", "⇥") or "∅"
    style = (
        f"color:{INK};{look};border-radius:3px;padding:0 3px;margin:1px;display:inline-block;white-space:pre"
    )
    text = "" if token.text is None else f"{token.text!r}, "
    title = f"id {token.id}, {text}position {token.position}, {token.fate}{_thought(token)}"
    return element(
        "span",
        mark + printable(shown),
        style=f"{style};unicode-bidi:isolate",
        title=title if titled else None,
    )


def _thought(token: Token) -> str:
    said = []
    if token.probability is not None:
        said.append(f"drafter's probability {token.probability:.3f}")
    if token.target_probability is not None:
        said.append(f"target's probability {token.target_probability:.3f}")
    if token.choice is not None:
        place = "outside the draft vocabulary" if token.rank is None else f"the drafter's number {token.rank}"
        said.append(f"the target chose {token.choice}, {place}")
    return "".join(f", {words}" for words in said)


def _row(number: int, step: Step) -> Html:
    head = f"round {number}: {step.accept_length} committed"
    label = element("span", head, style="display:inline-block;width:13em;color:#555555;font-size:12px")
    chips: list[Html] = []
    drafts = sorted(step.drafts, key=lambda token: token.position)
    for before, token in zip([None, *drafts], drafts, strict=False):
        if before and before.position != token.position and len({t.position for t in drafts}) < len(drafts):
            chips.append(element("span", "│", style="color:#555555;padding:0 3px"))  # trees: the next depth
        chips.append(chip(token))
    return element("div", label, *chips, chip(step.bonus) if step.bonus else "", style="padding:1px 0")


def _legend() -> Html:
    words: tuple[Fate, ...] = ("accepted", "rejected", "not reached", "bonus")
    named = [chip(Token(0, 0, fate, fate), titled=False) for fate in words]
    tail = "bonus: the token that the target adds to every verify"
    return element("p", *named, f"  {tail}", style="font-size:12px")


def words(evidence: Evidence) -> Callable[[int], str | None]:
    """Token id -> text, by the tokenizer of the target or of the drafter, as far as one lies here."""
    return vocabulary(
        [evidence.target and evidence.target.path, evidence.launch.target_path, evidence.checkpoint.path]
    )


def of_evidence(evidence: Evidence, rid: str | None = None) -> Html:
    """One request (default: the first complete one): what the server drafted, what the target took of it."""
    requests = evidence.capture.requests.values() if evidence.capture else ()
    whole = (t for t in requests if t.state == "complete" and t.rounds and rid in (None, t.rid))
    trace = next(whole, None)
    if trace is None:
        return panel(f"No prompt to replay: {evidence.why_not('capture')}")
    word = words(evidence)
    chances, meant = _chances(evidence, trace), _verified(evidence, trace)
    steps = []
    for r in trace.rounds:
        drafts = []
        for i, (token, fate, at) in enumerate(_placed(r)):
            chance = meant.get((at, token)) if fate != "not reached" else None
            drafts.append(Token(token, at, fate, word(token), chances.get((r.n, i)), chance))
        at, last = r.n + r.accept_len, r.committed[-1]
        bonus = Token(last, at, "bonus", word(last), target_probability=meant.get((at, last)))
        steps.append(Step(drafts, bonus, r.accept_len))
    start = trace.rounds[0].n + 1
    prompt = [Token(t, i, "prompt", word(t)) for i, t in enumerate(trace.tokens[:start])]
    total = sum(r.accept_len for r in trace.rounds) / len(trace.rounds)
    caption = (
        f"Request {trace.rid}: {trace.prompt_len} prompt tokens (the last 40 below), {len(trace.rounds)} "
        f"rounds, accept length {total:.2f}. Hover over a token for its id, position, and its probability "
        "for the drafter and for the target."
    )
    return token_strip(prompt, steps, caption)


def vocabulary(folders: Sequence[Any]) -> Callable[[int], str | None]:
    """Token id -> text, by the first tokenizer.json found; without one every text is None."""
    for folder in folders:
        path = Path(folder or "") / "tokenizer.json"
        if folder and path.is_file():
            try:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(path))
            except (
                Exception
            ):  # the library raises bare Exceptions; a report is no place to fail over a tokenizer
                continue
            return lambda token: tokenizer.decode([token], skip_special_tokens=False)
    return lambda token: None


def _depths(count: int, parents: Sequence[int] | None) -> list[int]:
    """Position of each draft token after the root."""
    depth = [0]
    for i in range(count):
        depth.append(depth[i if parents is None else parents[i]] + 1)
    return depth[1:]


def _placed(r: Round) -> list[tuple[int, Fate, int]]:
    """(token, what became of it, position) of each draft token."""
    said, depths = fates(r.draft_tokens, r.parents, r.committed), _depths(len(r.draft_tokens), r.parents)
    return [(t, fate, r.n + depth) for t, fate, depth in zip(r.draft_tokens, said, depths, strict=True)]


def _verified(evidence: Evidence, trace: Trace) -> dict[tuple[int, int], float]:
    """(position, token) -> the target's probability, of all that a verify looked at along its own text."""
    capture, target = evidence.capture, evidence.target
    if capture is None or target is None or "lm_head.weight" not in target.tensors:
        return {}
    from eaglelab.verifier import Verifier

    verifier = Verifier(capture, target)
    asked = {(at, token) for r in trace.rounds for token, fate, at in _placed(r) if fate != "not reached"}
    asked |= {(r.n + r.accept_len, r.committed[-1]) for r in trace.rounds}
    positions = sorted({at for at, _ in asked if verifier.knows(trace.rid, at)})
    found: dict[tuple[int, int], float] = {}
    for i in range(0, len(positions), 64):  # rows as wide as the vocabulary
        some = positions[i : i + 64]
        rows = verifier.logits(trace.rid, some).softmax(-1)
        place = {at: row for row, at in enumerate(some)}
        found |= {(at, token): float(rows[place[at], token]) for at, token in asked if at in place}
    return found


def _chances(evidence: Evidence, trace: Trace) -> dict[tuple[int, int], float]:
    """(rows before the round, draft token's index) -> the drafter's probability, where replay agrees."""
    if (
        evidence.served is None
        or evidence.target is None
        or evidence.ladder is None
        or not evidence.ladder.replay
    ):
        return {}
    import torch

    from eaglelab.drafter import Drafter
    from eaglelab.drafting import Drafting
    from eaglelab.simulate import captured_text

    wiring, launch, text = evidence.served[1], evidence.launch, captured_text(trace)
    drafter = Drafter(evidence.checkpoint, wiring, evidence.target, "cpu", getattr(torch, wiring.dtype))
    rounds = [r for r in trace.rounds if r.draft_tokens]
    count = len(rounds[0].draft_tokens) if rounds else 0
    rounds = [r for r in rounds if len(r.draft_tokens) == count]
    state, starts = Drafting.over(drafter, text.tokens, text.features), [r.n for r in rounds]
    if not rounds:
        return {}
    if launch.topk == 1:
        chains = state.chain(starts, count, [r.draft_tokens for r in rounds])
        own, chance = chains.tokens.tolist(), chains.probability.tolist()
    else:  # a tree's score is the product along its path
        trees = state.tree(starts, launch.steps, launch.topk, count + 1)
        above = torch.cat([torch.ones(len(rounds), 1), trees.score.cpu()], 1).gather(1, trees.parents.cpu())
        own, chance = trees.tokens.tolist(), (trees.score.cpu() / above).tolist()
    return {
        (r.n, i): chance[j][i]
        for j, r in enumerate(rounds)
        for i in range(count)
        if own[j][i] == r.draft_tokens[i]
    }
