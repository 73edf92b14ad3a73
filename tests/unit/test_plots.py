"""Figures say what they show, and nothing in them is cut or covered."""

import itertools

import numpy as np
import pytest
from matplotlib.text import Text

from eaglelab import plots
from eaglelab.plots import Bar
from eaglelab.stats import FeatureStats

TRAINED = "captured features, trained wiring"
INCIDENT = [
    Bar("rung 1", "every step given the stored feature", "stored", 3.92, (3.8, 4.05), [0.8, 0.7, 0.6], 1200),
    Bar("rung 2", "trained wiring", "stored", reason="under 100 starts; " + "a very long reason " * 20),
    Bar("rung 3", TRAINED, "generated", 3.69, (3.5, 3.9), [0.76, 0.6, 0.5], 281),
    Bar(
        "rung 4",
        "captured features, served wiring",
        "generated",
        1.0,
        (1.0, 1.0),
        [0, 0, 0],
        1020,
        "",
        "wiring",
    ),
    Bar("rung 5", "the server itself", "generated", 1.0, (1.0, 1.0), [0, 0, 0], 1020),
]


def texts(figure):
    """(text, its box in pixels) of everything that is drawn: ticks outside the view are not."""
    renderer, drawn = figure.canvas.get_renderer(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", lambda self, renderer: drawn.setdefault(self))
        figure.draw(renderer)
    return [(t.get_text(), t.get_window_extent(renderer)) for t in drawn if t.get_visible() and t.get_text()]


def stats(scale=1.0):
    rows = np.random.default_rng(0).standard_normal((500, 96)).astype(np.float32) * scale
    rows[:, 40] *= 300
    fed = FeatureStats(96, 3, ["depth 2", "depth 4", "depth 5"]).update(rows)
    return [fed.chunk(i) for i in range(3)]


FIGURES = {
    "ladder": lambda: plots.ladder(INCIDENT, top=6),
    "nothing measured": lambda: plots.ladder([Bar("rung 1", "w", "stored", reason="no features")]),
    "acceptance": lambda: plots.acceptance(INCIDENT),
    "no acceptance": lambda: plots.acceptance(INCIDENT[1:2]),
    "chunks": lambda: plots.chunks(stats()),
    "large chunks": lambda: plots.chunks(stats(1e4)),
    "zero chunks": lambda: plots.chunks(stats(0.0)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_or_covered(name):
    figure = FIGURES[name]()
    drawn = texts(figure)
    width, height = figure.canvas.get_width_height()
    for text, box in drawn:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, (
            f"cut: {text!r}"
        )
    for (a, box_a), (b, box_b) in itertools.combinations(drawn, 2):
        assert not box_a.overlaps(box_b), f"{a!r} covers {b!r}"


@pytest.mark.parametrize("name", FIGURES)
def test_each_axis_names_what_it_shows(name):
    for axes in FIGURES[name]().axes:
        assert axes.get_xlabel() and axes.get_title(loc="left")


def test_the_failing_drop_is_marked_in_words():
    drawn = [text for text, _ in texts(plots.ladder(INCIDENT, top=6))]
    assert "1.00   ✗ wiring: −2.69 from rung 3" in drawn
    assert sum("✗" in text for text in drawn) == 1
    assert any(text.startswith("not measured: under 100 starts;") for text in drawn)
    assert "rung 1: every step given the stored feature\nstored texts, n = 1200 starts" in drawn
    assert "rung 3: captured features, trained wiring\ngenerated texts, n = 281 rounds" in drawn


def test_bars_end_at_their_values():
    (axes,) = plots.ladder(INCIDENT, top=6).axes
    assert [round(bar.get_x() + bar.get_width(), 3) for bar in axes.patches] == [3.92, 3.69, 1.0, 1.0]


def test_text_with_dollars_is_not_mathematics():
    plots.png(plots.ladder([Bar("rung 1", "$\\frac{$", "stored", reason="$_$ costs $")]))


def test_png_is_small():
    picture = plots.png(plots.ladder(INCIDENT))
    assert picture.startswith(b"\x89PNG") and len(picture) < 150_000
