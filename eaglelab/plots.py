"""Static figures of a report: matplotlib `Figure` objects, white ground and dark ink in every theme.

Colours are Okabe-Ito's; a mark, a word or a line style always goes with them. Every axis names its unit,
every title says what was measured over how many rows or rounds.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eaglelab.html import BLUE, GREY, INK, RULE, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from eaglelab.ladder import Ladder

SERIES = ("#0072B2", "#E69F00", "#CC79A7", "#000000", "#56B4E9", "#009E73", "#D55E00")
MARKERS, STYLES = "osD^vPX", ("-", "--", "-.", ":", "-", "--", "-.")
_RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Bar:
    """One line of the ladder figure. `texts` names what was measured: only the same texts compare."""

    name: str  # "rung 4"
    what: str  # "captured features, served wiring"
    texts: str  # "stored" or "generated"
    value: float | None = None  # accept length
    interval: tuple[float, float] | None = None  # 95 %
    positions: Sequence[float] = ()  # per draft position: share of rounds accepted up to it
    count: int | None = None  # rounds or starts
    reason: str = ""  # why there is no value
    failed: str = ""  # "wiring" if the drop from the rung above to this one failed


WHAT = {
    "1": ("every step given the stored feature", "stored"),
    "2": ("trained wiring, own drafts fed back", "stored"),
    "3.stored": ("as the server feeds it, trained wiring", "stored"),
    "3": ("as the server feeds it, trained wiring", "generated"),
    "4": ("as the server feeds it, served wiring", "generated"),
    "5": ("the server itself", "generated"),
}


def bars(found: Ladder | None) -> list[Bar]:
    """The rungs of a climbed ladder (ladder.Ladder) as lines of the figure; None: none could be measured."""
    if found is None:
        return [Bar(f"rung {n[0]}", *WHAT[n], reason="no ladder was climbed; see the findings") for n in WHAT]
    from eaglelab import paired
    from eaglelab.ladder import MEANING

    failed = {below: meaning for (_, below), meaning in MEANING.items() if meaning in found.failed}
    out = []
    for name, rung in found.rungs.items():
        what, texts = WHAT[name]
        if "re-prefilled" in rung.source:
            what = "re-prefilled at the trained depths, trained wiring"
        label = Bar(f"rung {name[0]}", what, texts, reason=rung.reason or "", failed=failed.get(name, ""))
        if rung.rounds is not None:
            label = replace(
                label,
                value=rung.accept_length,
                interval=paired.interval(rung.rounds),
                positions=rung.rounds.acceptance,
                count=len(rung.rounds.lengths),
            )
        out.append(label)
    return out


def ladder(rungs: Sequence[Bar], top: float | None = None) -> Figure:
    """Accept length per rung with its 95 % interval, from the trainer's features down to the live server.

    top: the most that one verify can commit (steps + 1); it fixes the axis, so that two runs compare.
    """
    figure, (axes,) = blank(1, height=0.62 * len(rungs) + 1.3)
    right = max([top or 1.5] + [1.05 * r.value for r in rungs if r.value is not None])
    above: Bar | None = None
    for y, rung in enumerate(rungs):
        if rung.value is None:
            reason = textwrap.fill(f"not measured: {rung.reason}", 78, max_lines=2, placeholder=" …")
            axes.text(1, y, reason, va="center", color="#555555", style="italic", fontsize=9.5)
            continue
        colour, mark = (VERMILLION, "X") if rung.failed else (BLUE, "o")
        axes.barh(y, rung.value - 1, left=1, height=0.5, color=colour, alpha=0.25)
        axes.plot(rung.value, y, mark, color=colour, markersize=9, zorder=3, clip_on=False)
        high = rung.interval[1] if rung.interval else rung.value
        if rung.interval:
            whisker: dict[str, Any] = {"linewidth": 2, "marker": "|", "markersize": 13, "clip_on": False}
            axes.plot(rung.interval, (y, y), color=colour, **whisker)
        label = f"{rung.value:.2f}"
        if rung.failed and above is not None and above.value is not None:
            label += f"   ✗ {rung.failed}: −{above.value - rung.value:.2f} from {above.name}"
        axes.text(high + 0.02 * right, y, label, va="center", color=INK, fontsize=10.5, weight="bold")
        above = rung
    for y in range(1, len(rungs)):
        if rungs[y].texts != rungs[y - 1].texts:
            axes.axhline(y - 0.5, color="#888888", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rungs)), [_rung_label(r) for r in rungs])
    axes.set_ylim(len(rungs) - 0.4, -0.6)
    axes.set_xlim(0.93, right + 0.5)
    axes.set_xlabel("accept length: tokens per verify, bonus included (1 = nothing accepted)")
    _title(axes, "The ladder: one thing changed a rung; whiskers are 95 % intervals")
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure


def _rung_label(rung: Bar) -> str:
    unit = "starts" if rung.texts == "stored" else "rounds"
    behind = f", n = {rung.count} {unit}" if rung.count else ""
    few = "" if rung.interval or rung.value is None else " (no interval: too few)"
    return f"{rung.name}: {rung.what}\n{rung.texts} texts{behind}{few}"


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=12, color=INK, pad=10)


def acceptance(rungs: Sequence[Bar]) -> Figure:
    """Acceptance at each draft position, given that those before it were accepted; one line a rung."""
    figure, (axes,) = blank(1, height=3.8)
    measured = [r for r in rungs if len(r.positions)]
    for i, rung in enumerate(measured):
        steps = range(1, len(rung.positions) + 1)
        style: dict[str, Any] = {"color": SERIES[i % 7], "marker": MARKERS[i % 7], "linestyle": STYLES[i % 7]}
        style["markersize"] = max(11 - 1.5 * i, 4)  # lines that coincide stay visible
        label = f"{rung.name}, {rung.texts} (n = {rung.count})"
        axes.plot(steps, rung.positions, label=label, alpha=0.9, **style)
    longest = max((len(r.positions) for r in measured), default=1)
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.8, longest + 0.2)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("draft position (1 = first token drafted)")
    axes.set_ylabel("share of rounds accepted\nup to this position")
    _title(axes, "Acceptance per draft position")
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    if measured:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    else:
        axes.text(0.5, 0.5, "no rung was measured", transform=axes.transAxes, ha="center", color="#555555")
    return figure


def chunks(chunk_stats: Sequence[Any]) -> Figure:
    """Row norms and values of each chunk (stats.ChunkStats): medians within wider and wider quantiles."""
    from matplotlib.ticker import NullLocator

    figure, (norms, values) = blank(2, height=0.55 * len(chunk_stats) + 1.9)
    for y, chunk in enumerate(chunk_stats):
        _spread(norms, y, chunk.norms, SERIES[y % 7])
        _spread(values, y, chunk.values, SERIES[y % 7])
    rows = max((c.rows for c in chunk_stats), default=0)
    names = [textwrap.fill(c.name, 22) for c in chunk_stats]
    norms.set_yticks(range(len(chunk_stats)), names)
    values.set_yticks(range(len(chunk_stats)), [""] * len(chunk_stats))
    _title(norms, f"Row norms, n = {rows} rows")
    _title(values, "Values, exact bf16 quantiles")
    norms.set_xlabel("euclidean norm of a row")
    values.set_xlabel("value (symmetric log scale)")
    scale = max((abs(c.values.quantiles.get(q, 0)) for c in chunk_stats for q in (0.1, 0.9)), default=1) or 1
    values.set_xscale("symlog", linthresh=_power(scale))
    values.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    values.xaxis.set_minor_locator(NullLocator())
    values.locator_params(axis="x", numticks=5)
    values.axvline(0, color=GREY, linewidth=0.8)
    for axes in (norms, values):
        axes.set_ylim(len(chunk_stats) - 0.5, -0.5)
        axes.grid(axis="x", color=RULE, linewidth=0.6)
    _, high = norms.get_xlim()
    norms.set_xlim(0, 1.03 * high)
    return figure


def _spread(axes: Axes, y: int, spread: Any, colour: str) -> None:
    """Nested bars 0.1-99.9, 1-99 and 10-90 %, the median as a line, the extremes as points."""
    q = spread.quantiles
    for low, high, height in ((0.001, 0.999, 0.12), (0.01, 0.99, 0.28), (0.1, 0.9, 0.5)):
        if low in q and high in q:
            axes.barh(y, q[high] - q[low], left=q[low], height=height, color=colour, alpha=0.45)
    if 0.5 in q:
        axes.plot((q[0.5], q[0.5]), (y - 0.3, y + 0.3), color=INK, linewidth=2)
    axes.plot((spread.low, spread.high), (y, y), "x", color=colour, markersize=6)


def _power(scale: float) -> float:
    """The power of ten just below `scale`."""
    import math

    return 10.0 ** math.floor(math.log10(scale)) if scale > 0 else 1.0


def blank(columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure 10 inches wide, without pyplot: nothing is left open and no backend is chosen."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(_RC):
        margin = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)  # a dark theme begins where the white ends
        figure = Figure(figsize=(10, height), layout=margin)
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def png(figure: Figure, dpi: int = 110) -> bytes:
    """The figure as PNG."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=dpi)
    return out.getvalue()
