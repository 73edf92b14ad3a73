"""Tables of a report, each from the values that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from eaglelab import baseline
from eaglelab.html import Html, code, element, escape, lines, outcome, panel, table

if TYPE_CHECKING:
    from eaglelab.drift import Drift
    from eaglelab.evidence import Evidence
    from eaglelab.misses import TokenLoss
    from eaglelab.records import Measurement


FOLDED = ("acceptance.rung", "acceptance.server.draft", "training_accuracy.")  # measurements shown folded


def findings_table(findings: Iterable[Any]) -> Html:
    """Findings (records.Finding), failed first; the fix stands under the evidence."""
    order = ("failed", "errored", "skipped", "passed")
    rows = []
    for f in sorted(findings, key=lambda f: order.index(f.verdict)):
        said: list[object] = list(f.evidence)
        if f.fix:
            fix = code(f.fix) if f.fix.startswith("--") else escape(f.fix)  # a flag, or a sentence
            said.append(Html(element("b", "Fix: ") + fix))
        if f.predicted_accept_length is not None:
            said.append(element("b", f"Predicted accept length after it: {f.predicted_accept_length:.3f}"))
        rows.append((outcome(f.verdict), lines((element("b", f.title), code(f.fault))), f.rung, lines(said)))
    words = "accept length = tokens committed per verify, bonus included"
    return table(("outcome", "finding", "rung", "evidence and fix"), rows, f"{len(rows)} findings; {words}")


def wiring_table(differences: Iterable[Any]) -> Html:
    """Differences (wiring.Difference) between what was trained and what is served; those that count first."""
    rows = []
    for d in sorted(differences, key=lambda d: d.inert):
        trained, served = (
            ", ".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in (d.trained, d.served)
        )
        now = served if d.inert else element("b", served)
        rows.append((f"{d.part}.{d.field}", trained, now, "inert" if d.inert else "counts", d.why))
    if not rows:
        return panel("Trained and served do the same with this checkpoint: no field differs.")
    caption = (
        "What training and serving do differently, from files and flags; inert = proven to change nothing"
    )
    return table(("field", "trained", "served", "effect", "why"), rows, caption)


def facts_table(facts: Mapping[str, Any], folded: Sequence[str] = ()) -> Html:
    """Nested facts, one line a leaf, dotted names; parts named in `folded` start folded."""
    shown = table(("what", "value"), list(_leaves({k: v for k, v in facts.items() if k not in folded})))
    parts: list[object] = [shown]
    for name in folded:
        if facts.get(name):
            summary = element("summary", name, style="cursor:pointer;padding:4px 0")
            parts.append(
                panel(element("details", summary, table(("what", "value"), list(_leaves(facts[name])))))
            )
    return Html("".join(map(str, parts)))


def _leaves(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield prefix + str(name), ", ".join(map(str, value)) or None
        else:
            yield prefix + str(name), str(value) if isinstance(value, (int, float)) else value


def sites_table(evidence: Evidence) -> Html:
    """Width of what is fed at each site, beside the trained one."""
    from eaglelab.checks.feed import SITES

    widths = evidence.capture.widths if evidence.capture else {}
    trained, own = evidence.trained[0].width, evidence.checkpoint.hidden_size
    rows = [(words, widths.get(site), own if site == "draft" else trained) for site, words in SITES.items()]
    return table(
        ("site", "width served", "width trained"), rows, "Width of spec_info.hidden_states, numbers a row"
    )


def depths_table(evidence: Evidence) -> Html:
    """The depth that each chunk was recognised as, beside the one it was trained as."""
    if evidence.depths is None:
        return panel(f"Depths were not named: {evidence.why_not('depths')}")
    meant = [f"depth {d}" for d in evidence.trained[0].depths]
    served = evidence.depths.chunks
    header = ["chunk", "recognised as", "match", "error", "next best", "its error", "nearer the first"]
    rows: list[list[object]] = []
    for i, c in enumerate(served):
        found = "none of them" if c.match == "none" else str(c.place)
        sure = f"{c.confidence:.0%} of {c.rows} rows"
        rows.append([i, found, c.match, c.error, c.runner_up, c.runner_up_error, sure])
    if len(meant) == len(served):
        header.insert(2, "trained")
        for row, depth in zip(rows, meant, strict=True):
            row.insert(2, depth)
    words = f"Each chunk served, recognised by its vectors; trained: {', '.join(meant) or 'unknown'}"
    return table(header, rows, f"{words}; error = |x - s| / |s| to the re-prefilled residual stream")


def chunks_table(chunks: Iterable[Any]) -> Html:
    """stats.ChunkStats in numbers, with what is not finite and the dimensions that stand out."""
    rows = []
    for c in chunks:
        outliers = lines(f"{o.dimension} (rms x{o.rms_ratio:.1f})" for o in c.outliers[:4]) or "none"
        norms, values = (f"{s.mean:.4g} ± {s.sd:.3g}" for s in (c.norms, c.values))
        rows.append((c.name, c.rows, c.width, norms, values, c.nan + c.inf, c.constant_dimensions, outliers))
    header = ("chunk", "rows", "width", "row norm", "value", "not finite", "constant dims", "outlier dims")
    return table(header, rows, "Hidden states fed at the draft-extends, per chunk; mean ± standard deviation")


def measurements_table(measurements: Iterable[Measurement]) -> Html:
    """Every number with its definition; those per draft position, which a figure shows, are folded."""
    shown: list[tuple[Any, ...]] = []
    folded: list[tuple[Any, ...]] = []
    for m in measurements:
        interval = f"{m.interval[0]:.3f} to {m.interval[1]:.3f}" if m.interval else None
        words = m.definition if m.value is not None else f"not measured: {m.reason}"
        rows = folded if m.name.startswith(FOLDED) else shown
        rows.append((m.name, m.value, m.unit, interval, m.count, words))
    header = ("name", "value", "unit", "95 % interval", "n", "definition")
    parts = [table(header, shown)]
    if folded:
        more = element("summary", f"{len(folded)} more: by draft position, and the trainer's accuracy")
        parts.append(panel(element("details", more, table(header, folded))))
    return Html("".join(parts))


def accuracy_table(measurements: Iterable[Measurement]) -> Html:
    """The trainer's validation accuracy by step, and what is left of it: "" where none was measured."""
    known = {m.name: m.value for m in measurements}
    columns = {
        "training_accuracy.said.full.step{}": "trainer said",
        "training_accuracy.full.step{}": "reproduced",
        "training_accuracy.counted.step{}": "whole vocabulary",
        "training_accuracy.left_out.step{}": "no draft id: left out",
        "acceptance.rung1.draft{}": "rung 1",
        "acceptance.rung2.draft{}": "rung 2",
    }
    rows: list[tuple[Any, ...]] = []
    while known.get(f"training_accuracy.full.step{len(rows)}") is not None:
        t = len(rows)
        names = [name.format(t + 1 if "rung" in name else t) for name in columns]
        rows.append((t + 1, *(known.get(name) for name in names)))
    if not rows:
        return Html("")
    caption = lines(
        (
            "The trainer's accuracy, and what is left of it: positions with the first j drafts right",
            "trainer said: on its own validation texts; reproduced: by its definition, on the stored texts",
            "whole vocabulary: judged by what a server chooses; left out: the positions without a draft id",
            "rung 1: only where the target would write this text; rung 2: and with own drafts fed back",
        )
    )
    return table(("drafts", *columns.values()), rows, caption)


def comparison_table(movements: Sequence[baseline.Movement], source: str) -> Html:
    """What moved since an earlier run."""
    moved = [m for m in movements if m.how != "same"]
    rows = [(m.name, m.before, m.after, m.moved, m.margin, m.how) for m in moved]
    caption = f"{len(moved)} of {len(movements)} measurements moved since {source}; {baseline.RULE}"
    return table(("measurement", "before", "now", "moved by", "95 % interval ±", "how"), rows, caption)


def outliers_table(chunks: Sequence[Any], most: int = 5) -> Html:
    """Dimensions that stand out of each chunk (stats.ChunkStats), the largest first."""
    rows = [
        (c.name, o.dimension, o.rms, o.rms_ratio, o.peak, o.peak_ratio)
        for c in chunks
        for o in c.outliers[:most]
    ]
    if not rows:
        return panel(
            "No dimension stands out: none has 6 times the median rms, or 1000 times the median value."
        )
    header = ("chunk", "dimension", "rms", "x median rms", "peak", "x median value")
    total = sum(len(c.outliers) for c in chunks)
    return table(header, rows, f"{len(rows)} of {total} outlier dimensions; at most {most} a chunk")


def drift_table(found: Sequence[Drift]) -> Html:
    """Stored against served, a line a chunk: row by row where the positions are the same, else as a whole."""
    header = ("chunk", "stored rows", "served rows", "norm stored", "norm served")
    if found[0].way == "same positions":
        rows = [(d.name, *d.rows, *d.norms, d.error, d.error_p90, d.cosine) for d in found]
        words = (
            f"The same texts at the same positions ({found[0].source}); error = |served - stored| / |stored|"
        )
        return table((*header, "median error", "90 %", "cosine"), rows, words)
    other = [(d.name, *d.rows, *d.norms, f"{d.moved} of {len(d.shifts)}", d.distance) for d in found]
    words = (
        "Different texts, so distributions only: part of what differs is the text; KS = largest gap between "
    )
    words += "the two distributions of values, 0 to 1"
    return table((*header, "dims moved > 1 sd", "KS"), other, words)


def names_table(evidence: Evidence) -> Html:
    """Every parameter of the engine's drafter: which tensors of which file fill it, and what is live."""
    if evidence.loading is None:
        return panel(f"What this engine loads is not known: {evidence.why_not('served')}")
    tensors = evidence.checkpoint.tensors
    live: dict[str, list[Any]] = {}
    for matches in (evidence.live or {}).values():
        for m in matches:
            live.setdefault(m.param, []).append(m)
    rows: list[tuple[object, ...]] = []
    for name, source in evidence.loading.params.items():
        file = [
            tensors[t].name_in_file if source.kind != "target" and t in tensors else t for t in source.tensors
        ]
        shapes = [" × ".join(map(str, tensors[t].shape)) for t in source.tensors if t in tensors]
        came = outcome("failed") if source.kind in ("initial", "partial") else source.kind
        names, whole = lines(map(_dotted, file)) or None, _whole(lines(shapes))
        rows.append((_dotted(name), came, names, whole, _live(live.pop(name, []))))
    rows += [(_dotted(name), "not a parameter", None, "", _live(found)) for name, found in live.items()]
    words = (
        "live: sha256 of the server's tensor against the file's, after the engine's cast, fusion and sharding"
    )
    header = ("engine parameter", "filled from", "tensors in the file", "shapes", "live")
    return table(header, rows, f"{len(rows)} parameters; {words}")


def _dotted(name: str) -> Html:
    """A dotted name that may break behind its dots."""
    return Html(escape(name).replace(".", ".<wbr>"))


def _whole(said: object) -> Html:
    """What may not break."""
    return element("span", said, style="white-space:nowrap")


def _live(matches: Sequence[Any]) -> object:
    if not matches:
        return None
    worst = min(matches, key=lambda m: (m.equal is not False, m.equal is not None))
    word = "failed" if worst.equal is False else "skipped" if worst.equal is None else "passed"
    said = _whole(f"equal on {len(matches)} rank(s)") if worst.equal else worst.why
    return lines((outcome(word), said))


def lost_names_table(evidence: Evidence) -> Html:
    """What is lost on the way from the file to the engine: unknown, dropped, replaced, left at random."""
    loading = evidence.loading
    rows = [("in the file, known to no dialect", ", ".join(evidence.original.unknown) or "none")]
    if loading:
        rows += [
            (
                "in the file, taken by no parameter: dropped without a word",
                ", ".join(loading.dropped) or "none",
            ),
            ("loaded, then replaced by the target's", ", ".join(loading.replaced) or "none"),
            (
                "in the engine, filled by nothing: left at its initial values",
                ", ".join(loading.initial) or "none",
            ),
        ]
    return table(("what", "names"), rows, "Names that do not meet")


def sides_table(evidence: Evidence) -> Html:
    """Feed and wiring side by side, every field; those that differ are marked and come first."""
    if evidence.served is None:
        return panel(f"This engine would not serve the drafter: {evidence.why_not('served')}")
    differ: dict[tuple[str, str], Any] = {(d.part, d.field): d for d in evidence.differences}
    rows = []
    for part, i in (("feed", 0), ("wiring", 1)):
        before, after = (vars(side[i]) for side in (evidence.trained, evidence.served))
        for name, value in before.items():
            d = differ.get((part, name))
            mark = "" if d is None else _whole("≠ inert" if d.inert else element("b", "≠ counts"))
            rows.append((f"{part}.{name}", _value(value), _value(after[name]), mark))
    rows.sort(key=lambda row: ["≠ counts" not in row[3], row[3] == ""])
    return table(
        ("field", "trained", "served", "same?"),
        rows,
        "What the drafter is fed (feed) and does with it (wiring)",
    )


def _value(value: Any) -> str:
    if is_dataclass(value):
        return ", ".join(f"{k} {_value(v)}" for k, v in vars(value).items())
    return ", ".join(map(_value, value)) or "none" if isinstance(value, (list, tuple)) else str(value)


def tokens_table(found: Sequence[TokenLoss], word: Any, most: int = 15) -> Html:
    """Tokens that the drafts missed most often."""
    rows = []
    for t in found[:most]:
        if not t.missed:
            break
        text = word(t.token)
        draftable = {None: "not known", True: "yes", False: element("b", "no: it can never be drafted")}
        rows.append(
            (
                t.token,
                None if text is None else repr(text),
                t.missed,
                t.found,
                t.share,
                draftable[t.draftable],
            )
        )
    never = sum(t.missed for t in found if t.draftable is False)
    total = sum(t.missed for t in found)
    missed = sum(t.missed > 0 for t in found)
    caption = f"{total} misses, {never} of tokens outside the draft vocabulary; "
    caption += f"the {len(rows)} most missed of {missed} tokens"
    header = ("token id", "text", "missed", "drafted right", "share missed", "in the draft vocabulary")
    return table(header, rows, caption)
