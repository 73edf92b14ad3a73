"""Tables of a report, each from the values that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eaglelab import baseline
from eaglelab.html import Html, code, element, escape, lines, outcome, panel, table

if TYPE_CHECKING:
    from eaglelab.evidence import Evidence
    from eaglelab.records import Measurement


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
        rows = folded if m.name.startswith("acceptance.rung") else shown
        rows.append((m.name, m.value, m.unit, interval, m.count, words))
    header = ("name", "value", "unit", "95 % interval", "n", "definition")
    parts = [table(header, shown)]
    if folded:
        more = element("summary", f"{len(folded)} more: acceptance per draft position and rung")
        parts.append(panel(element("details", more, table(header, folded))))
    return Html("".join(parts))


def comparison_table(movements: Sequence[baseline.Movement], source: str) -> Html:
    """What moved since an earlier run."""
    moved = [m for m in movements if m.how != "same"]
    rows = [(m.name, m.before, m.after, m.moved, m.margin, m.how) for m in moved]
    caption = f"{len(moved)} of {len(movements)} measurements moved since {source}; {baseline.RULE}"
    return table(("measurement", "before", "now", "moved by", "95 % interval ±", "how"), rows, caption)
