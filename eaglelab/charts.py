"""Figures of the workbook's notebooks, in the look of `plots`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eaglelab.html import BLUE, GREY, INK, ORANGE, RULE, VERMILLION
from eaglelab.plots import MARKERS, SERIES, _title, blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eaglelab.baseline import Movement
    from eaglelab.depths import ChunkName
    from eaglelab.drift import Drift
    from eaglelab.misses import PromptLoss, StretchLoss
    from eaglelab.stats import FeatureStats

MOST_LINES = 30  # rows of a figure that a reader can still tell apart
LENGTH = "accept length: tokens per verify, bonus included (1 = nothing accepted)"


def dimensions(stats: FeatureStats, names: Sequence[str]) -> Figure:
    """Root mean square of every dimension, a panel a chunk; the ones that stand out are marked and named."""
    from eaglelab.stats import OUTLIER_RMS

    figure, panels = blank(stats.chunks, height=3.4)
    rms = np.nan_to_num(np.sqrt(stats.mean**2 + stats.variance), posinf=0.0).reshape(stats.chunks, -1)
    top = float(rms.max()) or 1.0  # a dimension without a finite value has none to show
    bottom = float(rms[rms > 0].min()) if (rms > 0).any() else top / 10
    for i, axes in enumerate(panels):
        outliers = stats.outliers(i)
        axes.plot(rms[i], ".", color=SERIES[0], markersize=3, rasterized=True)
        axes.axhline(np.median(rms[i]), color=INK, linewidth=1)
        axes.axhline(OUTLIER_RMS * np.median(rms[i]), color=VERMILLION, linewidth=1, linestyle="--")
        for o in outliers[:3]:
            axes.plot(o.dimension, o.rms, "X", color=VERMILLION, markersize=8)
            axes.annotate(f" {o.dimension}", (o.dimension, o.rms), color=INK, fontsize=9.5, va="center")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.set_ylim(bottom / 1.5, max(top, OUTLIER_RMS * float(np.median(rms))) * 2)
        axes.set_xlim(-0.03 * rms.shape[1], 1.1 * rms.shape[1])
        words = "1 outlier" if len(outliers) == 1 else f"{len(outliers)} outliers"
        _title(axes, textwrap.fill(names[i], max(12, 80 // stats.chunks)) + f"\n{words}")
        axes.set_xlabel("dimension")
    panels[0].set_ylabel(f"root mean square (log scale)\nover n = {stats.rows} rows")
    return figure


def depth_errors(chunks: Sequence[ChunkName]) -> Figure:
    """How far each chunk lies from the residual stream at every depth: the lowest point names it."""
    figure, (axes,) = blank(1, height=3.6)
    places = sorted(chunks[0].errors, key=lambda p: (p.depth, p.final_norm))
    for i, chunk in enumerate(chunks):
        errors = [chunk.errors[p] for p in places]
        axes.plot(errors, marker=MARKERS[i % 7], color=SERIES[i % 7], label=f"chunk {i}: {chunk.place}")
        axes.plot(places.index(chunk.place), chunk.error, "o", mfc="none", mec=INK, markersize=15)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(-0.002, None)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ticks = ["embedding" if p.depth == 0 else f"{p.depth}{' normed' if p.final_norm else ''}" for p in places]
    shown = range(0, len(places), max(1, len(places) // 16))
    axes.set_xticks(list(shown), [ticks[i] for i in shown])
    axes.set_xlabel("depth of the residual stream (decoder layers passed)")
    axes.set_ylabel("median error |x − s| / |s|\n(linear below 0.01)")
    _title(axes, f"Each chunk against every depth, n = {chunks[0].rows} rows; circled: what it was named")
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def drift(found: Sequence[Drift]) -> Figure:
    """How far each dimension's mean moved from stored to served, sorted, a line a chunk."""
    figure, (axes,) = blank(1, height=3.6)
    largest = 1.2
    for i, d in enumerate(found):
        shifts = np.sort(np.abs(d.shifts[np.isfinite(d.shifts)]))[::-1]
        share = (np.arange(len(shifts)) + 1) / max(len(shifts), 1)
        style = ("-", "--", "-.", ":")[i % 4]
        axes.plot(share, shifts, linestyle=style, color=SERIES[i % 7], linewidth=2, label=d.name)
        largest = max(largest, float(shifts[0]) if len(shifts) else 0)
    axes.axhline(1, color=VERMILLION, linewidth=1, linestyle="--")
    axes.text(1.0, 1.02, "one standard deviation", color=INK, fontsize=9.5, ha="right", va="bottom")
    axes.set_ylim(0, 1.1 * largest)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the chunk's dimensions (most moved first)")
    axes.set_ylabel("mean moved by\n(standard deviations as stored)")
    then, now = found[0].rows
    _title(axes, f"Stored against served, {found[0].way}: n = {then} stored, {now} served rows")
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def prompts(found: Sequence[PromptLoss], labels: Sequence[str]) -> Figure:
    """Accept length of each prompt, the worst first, beside the trained wiring on the same text."""
    shown = found[:MOST_LINES]
    figure, (axes,) = blank(1, height=0.36 * len(shown) + 1.8)
    ideal = [p.others.get("3") for p in shown]
    for y, (p, best) in enumerate(zip(shown, ideal, strict=True)):
        if best is not None:
            axes.plot((p.accept_length, best), (y, y), color=GREY, linewidth=1.5, zorder=1)
            axes.plot(best, y, "D", mfc="none", mec=ORANGE, mew=2, markersize=10, zorder=2)
        axes.plot(p.accept_length, y, "o", color=BLUE, markersize=6, zorder=3)
    axes.plot([], [], "o", color=BLUE, markersize=6, label="server")
    if any(best is not None for best in ideal):
        axes.plot([], [], "D", mfc="none", mec=ORANGE, mew=2, markersize=10, label="trained wiring (rung 3)")
    mean = sum(p.accept_length * p.rounds for p in found) / sum(p.rounds for p in found)
    axes.axvline(mean, color=INK, linewidth=1, linestyle="--", label=f"all prompts: {mean:.2f}")
    axes.set_yticks(range(len(shown)), [f"{labels[y]}  ({p.rounds} rounds)" for y, p in enumerate(shown)])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0.93, 0.15 + 1.03 * max([1.5, *(p.accept_length for p in shown), *filter(None, ideal)]))
    axes.set_xlabel(LENGTH)
    more = f", the {len(shown)} worst of {len(found)}" if len(shown) < len(found) else f", n = {len(found)}"
    _title(axes, f"Accept length per prompt{more}")
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def along_text(found: Sequence[StretchLoss]) -> Figure:
    """Accept length by distance from the prompt: a drafter that loses its way falls from left to right."""
    from eaglelab.misses import STRETCH

    figure, (axes,) = blank(1, height=3.0)
    axes.plot([s.start + STRETCH / 2 for s in found], [s.accept_length for s in found], "o-", color=BLUE)
    for s in found if len(found) <= 12 else ():
        at = (s.start + STRETCH / 2, s.accept_length)
        axes.annotate(f"n={s.rounds}", at, (0, 8), textcoords="offset points", ha="center", fontsize=9.5)
    axes.set_ylim(0.9, 1.2 * max((s.accept_length for s in found), default=1) + 0.2)
    axes.set_xlim(0, max((s.start for s in found), default=0) + STRETCH)
    axes.set_xlabel(f"generated tokens before the round, in stretches of {STRETCH}")
    axes.set_ylabel("accept length\n(tokens per verify)")
    _title(axes, f"Accept length along the text, n = {sum(s.rounds for s in found)} rounds")
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    return figure


def norms(stages: Sequence[str], served: Sequence[float | None], trained: Sequence[float | None]) -> Figure:
    """L2 norm of one row at each stage, under the served and the trained wiring."""
    figure, (axes,) = blank(1, height=0.34 * len(stages) + 1.7)
    looks = (("trained wiring", trained, ORANGE, "D", 11), ("served wiring", served, BLUE, "o", 6))
    for label, values, colour, mark, size in looks:
        at = [(v, y) for y, v in enumerate(values) if v is not None]
        fill = colour if mark == "o" else "none"
        x, y = zip(*at, strict=True) if at else ((), ())
        axes.plot(x, y, mark, mfc=fill, mec=colour, mew=2, markersize=size, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_yticks(range(len(stages)), stages)
    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.set_xlabel("L2 norm of the row (log scale)")
    _title(axes, "First draft step, stage by stage: n = 1 row a stage")
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def predictions(rows: Sequence[tuple[str, float | None, tuple[float, float] | None, int, str]]) -> Figure:
    """Accept length now (the first row) and after each edit: (name, value, 95 % interval, rounds, reason)."""
    figure, (axes,) = blank(1, height=0.6 * len(rows) + 1.5)
    now = rows[0][1]
    right = max([1.5] + [max(v, i[1] if i else v) for _, v, i, _, _ in rows if v is not None])
    for y, (_, value, interval, _, reason) in enumerate(rows):
        if value is None:
            words = textwrap.shorten(f"not predicted: {reason}", 80, placeholder=" …")
            axes.text(1, y, words, va="center", color="#555555", style="italic", fontsize=9.5)
            continue
        high, colour = interval[1] if interval else value, INK if y == 0 else BLUE
        if interval:
            axes.plot(interval, (y, y), color=colour, linewidth=2, marker="|", markersize=13)
        axes.plot(value, y, "s" if y == 0 else "o", color=colour, markersize=8)
        axes.text(high + 0.03 * right, y, f"{value:.2f}", va="center", color=INK, weight="bold")
    if now is not None:
        axes.axvline(now, color=GREY, linewidth=1, linestyle="--")
    names = [
        textwrap.fill(name, 44, break_on_hyphens=False) + (f"\nn = {n} rounds" if n else "")
        for name, _, _, n, _ in rows
    ]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0.93, right * 1.15 + 0.1)
    axes.set_xlabel(LENGTH)
    sure = "whiskers: 95 % intervals" if any(row[2] for row in rows) else "too few texts for 95 % intervals"
    _title(axes, f"Now and after each edit; {sure}")
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    return figure


def movements(found: Sequence[Movement]) -> Figure:
    """Accept lengths of two runs, one line each."""
    rows = [m for m in found if m.name.startswith("accept_length.") and None not in (m.before, m.after)]
    figure, (axes,) = blank(1, height=0.42 * max(len(rows), 1) + 1.7)
    for y, m in enumerate(rows):
        before, after = _number(m.before), _number(m.after)
        axes.plot((before, after), (y, y), color=GREY, linewidth=1.5, zorder=1)
        axes.plot(before, y, "D", mfc="none", mec=ORANGE, mew=2, markersize=11, zorder=2)
        axes.plot(after, y, "o", color=BLUE, markersize=6, zorder=3)
        axes.text(max(before, after), y, f"    {m.moved:+.2f}, {m.how}", va="center", color=INK, fontsize=10)
    axes.plot([], [], "D", mfc="none", mec=ORANGE, mew=2, markersize=11, label="before")
    axes.plot([], [], "o", color=BLUE, markersize=6, label="after")
    axes.set_yticks(range(len(rows)), [m.name.removeprefix("accept_length.") for m in rows])
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axes.set_xlim(0.93, 1.25 * max([1.5] + [max(_number(m.before), _number(m.after)) for m in rows]))
    axes.set_xlabel(LENGTH)
    _title(axes, f"Accept lengths, before and after, n = {len(rows)} measured in both")
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def _number(value: Any) -> float:
    return float(value)
