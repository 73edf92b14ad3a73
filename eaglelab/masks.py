"""Loss masks judged by the text that they cover: is it the answer that a drafter has to predict?

Two things tell where an answer begins: special tokens of a chat template, and, where the text was generated
by the target itself and greedily, the target's own choices (`greedy`): in the answer every token is one, in
the prompt about a third are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from eaglelab.accumulate import Array

FEWEST = 4  # turns, before their beginnings are compared
USUAL = 0.9
HEADER = 4  # tokens: <|start_header_id|> assistant <|end_header_id|> and a newline
ODDS = 1e-3  # of what is put down to chance


@dataclass(frozen=True)
class Turn:
    """A stretch of supervised tokens [start, end) of a text."""

    text: int
    start: int
    end: int


def turns(masks: Mapping[int, Array]) -> list[Turn]:
    """Every stretch of every mask."""
    found = []
    for text, mask in masks.items():
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
        found += [Turn(text, int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return found


def judge(
    masks: Mapping[int, Array],
    ids: Sequence[Array],
    greedy: Mapping[int, Array],
    special: Collection[int] = (),
) -> tuple[list[str], list[str]]:
    """-> (what is wrong, what was seen). masks: text -> [S] bool; ids: token ids of each text.

    greedy: text -> [S - 1] bool, token i + 1 is the target's choice. special: ids of special tokens.
    """
    shares = [float(m.mean()) for m in masks.values()]
    seen = [f"{len(masks)} masks read: {np.mean(shares):.0%} of the tokens are trained on"]
    empty = sum(not m.any() for m in masks.values())
    if 2 * empty >= len(masks):
        return [f"{empty} of {len(masks)} samples train on no token at all"], seen
    if empty:
        seen.append(f"{empty} samples train on no token at all")
    wrong = [*_by_choice(masks, greedy, seen)]
    if not wrong:
        wrong += _by_template(masks, ids, set(special), seen)
    return wrong, seen


def _by_choice(masks: Mapping[int, Array], greedy: Mapping[int, Array], seen: list[str]) -> list[str]:
    """What the target's own choices say: the greedy answer must be inside the mask, the prompt outside."""
    on = np.concatenate([greedy[i][masks[i][1:]] for i in greedy if i in masks] or [np.zeros(0, bool)])
    off = np.concatenate([greedy[i][~masks[i][1:]] for i in greedy if i in masks] or [np.zeros(0, bool)])
    if len(on) < 32 or len(off) < 32:
        return []
    inside, outside = float(on.mean()), float(off.mean())
    seen.append(
        f"the target itself would write {inside:.0%} of the tokens trained on, {outside:.0%} of the others"
    )
    if outside >= 0.9 and inside <= outside - 0.2:
        return ["the prompt is trained on and the target's own answer is left out"]
    starts = [
        t for t in turns({i: masks[i] for i in greedy if i in masks}) if t.start > 1 and t.end - t.start > 8
    ]
    own = [t for t in starts if greedy[t.text][t.start : t.end - 1].mean() > 0.97]
    if inside < 0.9 or len(own) < FEWEST:
        return []
    early = sum(not greedy[t.text][t.start - 1] for t in own)
    if early >= max(2, len(own) / 4):
        return [
            f"the mask begins a token early: in {early} of {len(own)} texts its first token is the prompt's"
        ]
    late = [greedy[t.text][t.start - 2] for t in own]
    if all(late) and len(late) * log(max(outside, 1e-9)) < log(ODDS):
        return [
            f"the mask begins a token late: in {len(late)} of {len(late)} texts the one before it is answer"
        ]
    return []


def _by_template(
    masks: Mapping[int, Array], ids: Sequence[Array], special: set[int], seen: list[str]
) -> list[str]:
    """What special tokens say: they begin and end turns."""
    framed = {i: m for i, m in masks.items() if special & set(ids[i][1:-1].tolist())}
    if not framed:
        if all(m.all() for m in masks.values()):
            seen.append("every token is trained on, and no template's special token tells prompt from answer")
        return []
    whole = sum(bool(m.all()) for m in framed.values())
    if whole >= USUAL * len(framed):
        return [f"every token is trained on in {whole} of {len(framed)} samples: prompts and template too"]
    found = [t for t in turns(framed) if t.start >= 2 and t.end - t.start >= 2]
    if len(found) < FEWEST:
        return []
    headers, first_ones = (
        Counter(int(x) for row in rows for x in set(row.tolist()) & special)
        for rows in (
            [ids[t.text][max(0, t.start - HEADER) : t.start] for t in found],
            [ids[i][:3] for i in framed],
        )
    )
    marks = {  # what begins a text and every header in it: a turn begins there
        token
        for token, count in headers.items()
        if count >= USUAL * len(found) and first_ones[token] >= USUAL * len(framed)
    }
    inner = sum(any(int(x) in marks for x in ids[t.text][t.start + 1 : t.end - 2]) for t in found)
    if inner >= USUAL * len(found):
        return [
            f"{inner} of {len(found)} masked stretches run over the template's marks: prompts are trained on"
        ]
    before, two, first = (_mode(found, ids, at) for at in (-1, -2, 0))
    if before[1] < 0.6 and two[1] >= USUAL:
        return [
            "the mask begins a token late: what lies before it differs, and what lies before that does not"
        ]
    if (
        first[1] >= USUAL
        and before[1] >= USUAL
        and _header(framed, ids, before[0], two[0], first[0], special)
    ):
        return ["the mask begins a token early: its first token is the end of the template's header"]
    return []


def _mode(found: list[Turn], ids: Sequence[Array], at: int) -> tuple[int, float]:
    """The commonest token at this place beside the turns' starts, and its share."""
    token, count = Counter(int(ids[t.text][t.start + at]) for t in found).most_common(1)[0]
    return token, count / len(found)


def _header(
    masks: Mapping[int, Array], ids: Sequence[Array], before: int, two: int, first: int, special: set[int]
) -> bool:
    """Whether headers of another role, whose turns are not trained on, end with the same token."""
    for i, mask in masks.items():
        row = ids[i]
        for at in np.flatnonzero((row == first) & ~mask):
            if at < 2:
                continue
            if before in special and row[at - 1] == before and row[at - 2] != two:
                return True
            if two in special and row[at - 2] == two and row[at - 1] != before:
                return True
    return False
