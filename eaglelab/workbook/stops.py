"""A stop of the stepper as HTML: strip, candidates, tree and tensors. Reads without kernel and script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from eaglelab.html import BLUE, Html, element, escape, panel, printable, table
from eaglelab.stepper import EXTEND, VERIFY, Stepper, on_text
from eaglelab.steps import Pass, Step, View, fingerprint
from eaglelab.strip import Fate, Token, chip

Word = Callable[[int], "str | None"]
BEFORE = 14  # tokens of the text before the round
SAME = "= the same"


def page(stepper: Stepper, word: Word) -> Html:
    """Everything at the stop where the reader stands."""
    views, stop = drawn(stepper), stepper.stops[stepper.stop]
    parts: list[object] = [heading(stepper), strip(stepper, word)]
    parts += [element("p", f"As {n}: {v}") for n, v in stepper.views.items() if isinstance(v, str)]
    if stop == VERIFY:
        parts.append(verified(stepper, word))
    sides = alike(views, _shape) if any(v.tree for v in views.values()) and stop != EXTEND else []
    row: list[object] = [tree(stepper, names, views[names[0]], word) for names in sides]
    if stop not in (EXTEND, VERIFY):
        row.append(candidates(stepper, word, stepper.stop - 1))
        row += [] if sides else [tensors(stepper)]
    parts += [beside(*row)] if row else []
    if sides and stop != VERIFY and stepper.stop > 1:
        parts += [branches(names, views[names[0]], stepper.stop - 1, word) for names in sides]
    if stop == EXTEND or (sides and stop != VERIFY):
        parts.append(tensors(stepper))
    return panel(*parts)


def gist(stepper: Stepper, word: Word) -> str:
    """A stop in a few words: what was drafted there, or what became of it all."""
    view = next(iter(drawn(stepper).values()), None)
    if view is None or stepper.stop == 0:
        return f": {stepper.round.n} rows"
    if stepper.stops[stepper.stop] == VERIFY:
        return f": {stepper.round.accept_len - 1} accepted, {quote(word, stepper.round.committed[-1])} added"
    if stepper.stop > len(view.passes):
        return ""
    found = view.passes[stepper.stop - 1][on_text(view.passes[stepper.stop - 1])]
    token, chance = found.choices[0]
    said = "the target's choice too" if token == found.target else "the target chose another"
    tail = "off the target's text" if found.target is None else said
    return f": {quote(word, token)} with p {chance:.3f}, {tail}"


def drawn(stepper: Stepper) -> dict[str, View]:
    """The sides under which the round could be drafted."""
    return {name: view for name, view in stepper.views.items() if not isinstance(view, str)}


def alike(views: dict[str, View], key: Callable[[View], Any]) -> list[list[str]]:
    """Names of sides, those together that look the same."""
    found: list[tuple[Any, list[str]]] = []
    for name, view in views.items():
        seen = key(view)
        for other, names in found:
            if other == seen:
                names.append(name)
                break
        else:
            found.append((seen, [name]))
    return [names for _, names in found]


def _shape(view: View) -> list[tuple[int, int]]:
    return [(step.own, step.parent) for step in view.steps]


def beside(*pieces: object) -> Html:
    """Pieces in a row as far as there is room."""
    style = "display:flex;flex-wrap:wrap;gap:4px 28px;align-items:flex-start"
    return element("div", *pieces, style=style)


def walk(stepper: Stepper, word: Word) -> Html:
    """The whole round, a fold a stop; the reader stands where he stood before."""
    kept, parts = stepper.stop, []
    for i, name in enumerate(stepper.stops):
        stepper.stop = i
        summary = element(
            "summary", element("b", name), gist(stepper, word), style="cursor:pointer;padding:4px 0"
        )
        parts.append(element("details", summary, page(stepper, word)))
    stepper.stop = kept
    return panel(*parts)


def heading(stepper: Stepper) -> Html:
    """Where the reader stands, and what became of the round."""
    r, trace = stepper.round, stepper.trace
    where = f"Round {stepper.number} of {len(trace.rounds) - 1} (from 0), {stepper.stops[stepper.stop]}"
    shape = "" if r.parents is None else " in a tree"
    said = f"request {trace.rid}, {r.n + 1} tokens before it; the server drafted {len(r.draft_tokens)}{shape}"
    edit = f"; edited: {stepper.edits}" if stepper.edits else ""
    took = f" and committed {r.accept_len}, the bonus included"
    return element("p", element("b", where), f": {said}{took}{edit}", style="margin:2px 0")


# -- the strip


def strip(stepper: Stepper, word: Word) -> Html:
    """The text before, the drafts so far under each side, and at the verify what became of them."""
    n, tokens = stepper.round.n, stepper.trace.tokens
    before = [Token(t, i, "prompt", word(t)) for i, t in enumerate(tokens[: n + 1])][-BEFORE:]
    rows = [_line("text so far", [chip(t) for t in before])]
    views = drawn(stepper)
    for names in alike(views, _shape):
        chips = list(_drafts(stepper, views[names[0]], word))
        rows.append(_line(f"as {' and '.join(names)}", chips))
    if stepper.stops[stepper.stop] == VERIFY:
        after = [Token(t, n + 1 + i, "accepted", word(t)) for i, t in enumerate(stepper.round.committed)]
        last = after.pop()
        chips = [*map(chip, after), chip(Token(last.id, last.position, "bonus", last.text))]
        rows.append(_line("server committed", chips))
    return element("div", *rows)


def _line(label: str, chips: list[Html]) -> Html:
    head = element("span", label, style="display:inline-block;width:13em;color:#555555;font-size:12px")
    return element("div", head, *chips, style="padding:1px 0")


def _drafts(stepper: Stepper, view: View, word: Word) -> Iterator[Html]:
    verify, depth = stepper.stops[stepper.stop] == VERIFY, 1
    for step in sorted(view.steps, key=lambda s: s.depth):
        if view.tree and step.depth != depth:
            yield element("span", "│", style="color:#555555;padding:0 3px")
        depth = step.depth
        yield chip(token(step, view, word, _fate(step, verify, step.depth <= stepper.stop)))
    if verify and view.bonus is not None and view.accept_len is not None:
        yield chip(Token(view.bonus, view.n + view.accept_len, "bonus", word(view.bonus)))


def _fate(step: Step, verify: bool, drafted: bool) -> Fate:
    if not verify:
        return "drafted" if drafted else "to come"
    return "accepted" if step.accepted else "rejected" if step.target is not None else "not reached"


def token(step: Step, view: View, word: Word, fate: Fate) -> Token:
    """A draft token with what both models thought of it."""
    source, choice = step.source, step.target
    return Token(
        step.own, view.n + step.depth, fate, word(step.own), step.probability,
        source.target_probability(step.own), None if choice is None else quote(word, choice), source.rank,
    )  # fmt: skip


def quote(word: Word, token: int) -> str:
    """A token in words with its id; its id alone without a tokenizer."""
    text = word(token)
    return f"#{token}" if text is None else f"{text!r} #{token}"


# -- candidates


def candidates(stepper: Stepper, word: Word, step: int) -> Html:
    """The likeliest tokens of one draft step under each side, beside the target's own."""
    views = {name: view for name, view in drawn(stepper).items() if step < len(view.passes)}
    shown = {name: v.passes[step][on_text(v.passes[step])] for name, v in views.items()}
    columns: dict[str, list[Html]] = {}
    for names in alike(views, lambda v: _rounded(v.passes[step][on_text(v.passes[step])])):
        found = shown[names[0]]
        columns[f"drafter as {' and '.join(names)}"] = [
            _choice(word, t, p, marked=t == found.target) for t, p in found.choices
        ]
    known = next((p for p in shown.values() if p.target_choices), None)
    chosen = next((p.target for p in shown.values() if p.target is not None), None)
    if known:
        columns["target"] = [_choice(word, t, p, marked=t == known.target) for t, p in known.target_choices]
    rows = [
        [i + 1, *(c[i] if i < len(c) else "" for c in columns.values())]
        for i in range(max(map(len, columns.values()), default=0))
    ]
    if chosen is None:
        said = "the target's choice is not known here: these drafts have left its text"
    else:
        ranks = (f"{p.rank or 'outside the draft vocabulary'} as {n}" for n, p in shown.items() if p.target)
        said = f"the target chose {quote(word, chosen)} (◆): rank among the drafter's: {', '.join(ranks)}"
    return table(("rank", *columns), rows, f"Likeliest tokens of draft step {step + 1}; {said}")


def _rounded(found: Pass) -> list[tuple[int, str]]:
    return [(token, f"{chance:.3f}") for token, chance in found.choices]


def _choice(word: Word, token: int, chance: float, marked: bool) -> Html:
    bar = f"display:inline-block;width:{round(60 * chance)}px;height:9px;background:{BLUE};margin:0 6px"
    text = f"{'◆ ' if marked else ''}{printable(quote(word, token))}"
    said = element("b", text) if marked else escape(text)
    return Html(element("span", f"{chance:.3f}") + element("span", style=bar) + said)


def verified(stepper: Stepper, word: Word) -> Html:
    """Each draft token on the target's text: what the target chose there, and how far apart they were."""
    rows, views = [], drawn(stepper)
    for names in alike(views, _shape):
        for step in views[names[0]].steps:
            if step.target is None:
                continue
            said = "accepted ✓" if step.accepted else "rejected ✗"
            own, choice = (step.source.target_probability(t) for t in (step.own, step.target))
            rank = step.source.rank or "not draftable"
            drafted, target = quote(word, step.own), quote(word, step.target)
            chances = (step.probability, own, choice)
            rows.append((" and ".join(names), step.depth, drafted, target, *chances, rank, said))
    header = ("as", "step", "drafted", "target chose", "p draft", "p* draft", "p* choice", "rank", "fate")
    words = (
        f"The verify, {len(rows)} drafts on the target's text (those that left it were not reached). p: the "
        "drafter's probability, p*: the target's; rank: of the target's choice among the drafter's"
    )
    return table(header, rows, words)


def tree(stepper: Stepper, sides: list[str], view: View, word: Word) -> Html:
    """The tree so far, a node a line; what was drafted and not kept stands in `branches`."""
    verify, nodes = stepper.stops[stepper.stop] == VERIFY, [s for s in view.steps if s.depth <= stepper.stop]
    children: dict[int, list[Step]] = {}
    for step in nodes:
        children.setdefault(step.parent, []).append(step)
    rows: list[Html] = []

    def add(parent: int, indent: str) -> None:
        below = children.get(parent, [])
        for i, step in enumerate(below):
            last = i == len(below) - 1
            line = element("span", indent + ("└ " if last else "├ "), style="white-space:pre;color:#555555")
            fate = _fate(step, verify, True)
            chance = element("span", f"  {step.probability:.3f}", style="font-size:12px;white-space:pre")
            rows.append(
                element("div", line, chip(token(step, view, word, fate)), chance, style="line-height:1.25")
            )
            add(step.number, indent + ("  " if last else "│ "))

    add(0, "")
    parts: list[object] = [
        element(
            "div",
            f"Tree as {' and '.join(sides)}: {len(nodes)} of {len(view.steps)} nodes, each with p",
            style="padding:4px 0",
        ),
        element(
            "div",
            chip(Token(view.before[-1], view.n, "prompt", word(view.before[-1]))),
            " the root, committed last",
        ),
        element("div", *rows, style="font-family:'DejaVu Sans Mono',monospace;font-size:13px"),
    ]
    return element("div", *parts, style="margin-top:6px")


def branches(sides: list[str], view: View, step: int, word: Word) -> Html:
    """The branches that went on into a draft step, each with its candidates; bold: kept in the final tree."""
    if step >= len(view.passes):
        return Html("")
    kept = {(s.source.path, s.own) for s in view.steps}
    rows = []
    for p in view.passes[step]:
        path = " ".join((word(t) or f"#{t}").strip() or "␣" for t in p.path)
        said = (f"{quote(word, t)} {chance:.3f}" for t, chance in p.choices)
        cells = (
            element("b", text) if (p.path, t) in kept else text
            for text, (t, _) in zip(said, p.choices, strict=True)
        )  # fmt: skip
        rows.append((path, p.score, spaced(cells), None if p.target is None else quote(word, p.target)))
    header = ("branch", "its score", "candidates (bold: kept)", "target's choice")
    who = " and ".join(sides)
    words = f"{len(rows)} branches went into draft step {step + 1} as {who}; score = product of p along it"
    return table(header, rows, words)


def spaced(pieces: Iterable[object]) -> Html:
    """Pieces that a line may break between, and nowhere else."""
    style = "display:inline-block;white-space:nowrap;margin-right:14px"
    return Html("".join(element("span", piece, style=style) for piece in pieces))


# -- tensors


def stages(view: View, stop: int) -> dict[str, Any]:
    """Stage -> row at a stop. The first draft step has only logits: its pass is the draft-extend's."""
    steps = view.passes[max(0, stop - 1)] if stop <= len(view.passes) else []
    rows = steps[on_text(steps)].tensors if steps else {}
    if stop > 1:
        return rows
    return {stage: row for stage, row in rows.items() if (stage == "logits") == (stop == 1)}


STAGES = {
    "features": "the target's hidden states at this place, the chunks side by side",
    "input_norm": "the whole row, normed before fc",
    "fc_norm": "each chunk, normed before fc",
    "fc": "the chunks, fused into one row of the drafter's width",
    "embed": "the embedding of the token just chosen",
    "hidden_norm": "the state that is drafted from, normed: half of what attention reads",
    "input_layernorm": "the embedding (in later layers: the residual stream), normed",
    "q_latent": "the query, squeezed (MLA)",
    "kv_latent": "key and value, squeezed (MLA)",
    "q": "the query",
    "k": "the key",
    "v": "the value",
    "q_rope": "the query, turned by its position",
    "k_rope": "the key, turned by its position",
    "attention": "what attention gathers from this row and those before it",
    "o_proj": "the same, projected back to the drafter's width",
    "post_attention_layernorm": "the residual stream, normed before the mlp",
    "mlp": "what the mlp adds",
    "norm": "the last state, normed: what the head reads",
    "feedback": "the state that the next draft step is fed",
    "logits": "a score for every token of the draft vocabulary",
}


def tensors(stepper: Stepper) -> Html:
    """Norm and fingerprint of each stage's row, and how far apart; sides with equal rows share a column."""
    views = drawn(stepper)
    sides = alike(views, lambda v: {s: fingerprint(row) for s, row in stages(v, stepper.stop).items()})
    rows = {" and ".join(names): stages(views[names[0]], stepper.stop) for names in sides}
    if not any(rows.values()):
        return Html("")
    names: list[str] = []
    for found in rows.values():
        names = merged(names, list(found))
    first, *others = rows
    body, header = [], ["stage", "size", first]
    for name in others:
        header += [name, f"≠ {first}"]
    for stage in names:
        told = element("span", stage, title=STAGES.get(stage.rpartition(".")[2]))
        line: list[object] = [told, _size(rows, stage), _norm(rows[first].get(stage))]
        for name in others:
            line += [_norm(rows[name].get(stage)), _apart(rows[first].get(stage), rows[name].get(stage))]
        body.append(line)
    words = "L2 norm and fingerprint (8 digits of the sha256 of its float32 bytes); hover for what it is"
    words += f"; ≠ is |a − b| / |b|, b as {first}" if others else ""
    words += "; each side goes on from its own drafts" if others and stepper.stop > 1 else ""
    error = next((v.fed_error for v in views.values()), None)
    if stepper.stop == 0 and error is not None:
        words += f"; the feedback that the server handed on differs by {error:.2g}, as {first}"
    return table(header, body, f"One row a stage: {words}")


def _norm(row: Any) -> Html:
    said = "not there" if row is None else f"{float(row.norm()):.4g}  {fingerprint(row)}"
    return element("span", said, style="white-space:pre")


def _size(rows: dict[str, dict[str, Any]], stage: str) -> str:
    return " / ".join(sorted({str(found[stage].numel()) for found in rows.values() if stage in found}))


def _apart(served: Any, other: Any) -> object:
    if served is None and other is None:
        return SAME
    if served is None or other is None:
        return element("b", "≠ one has no such stage")
    if served.shape != other.shape:
        return element("b", "≠ other width")
    if fingerprint(served) == fingerprint(other):
        return SAME
    apart = float((other - served).norm() / served.norm().clamp_min(1e-30))
    return f"≈ {apart:.1g}, rounding" if apart < 1e-5 else element("b", f"≠ {apart:.3g}")


def merged(first: list[str], second: list[str]) -> list[str]:
    """The names of both, each list's order kept.

    >>> merged(["features", "embed", "norm"], ["features", "fc", "embed", "norm", "map"])
    ['features', 'fc', 'embed', 'norm', 'map']
    """
    out, after = list(first), 0
    for name in second:
        if name in out:
            after = out.index(name) + 1
        else:
            out.insert(after, name)
            after += 1
    return out
