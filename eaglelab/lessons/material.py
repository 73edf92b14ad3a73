"""What the lessons look at: the shipped capture, models and measured figures, opened once."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from eaglelab.html import Html, table
from eaglelab.serve import data_dir

if TYPE_CHECKING:
    from eaglelab.capture import Capture
    from eaglelab.checkpoint import Checkpoint, TargetModel
    from eaglelab.drafter import Drafter
    from eaglelab.simulate import Text


@cache
def golden() -> Capture:
    """The capture in data/: two requests on a healthy EAGLE3 server, chain, 5 steps."""
    from eaglelab.capture import open_capture

    return open_capture(data_dir() / "golden-capture")


@cache
def checkpoint() -> Checkpoint:
    """The drafter as SGLang loads it."""
    from eaglelab.checkpoint import open_checkpoint

    return open_checkpoint(data_dir() / "drafter-sglang")


@cache
def target() -> TargetModel:
    """The target's tensors."""
    from eaglelab.checkpoint import open_target

    return open_target(data_dir() / "target")


@cache
def drafter() -> Drafter:
    """The package's own drafter, wired as SGLang 0.5.23 serves it, in float32 as the demo server computes."""
    from eaglelab.drafter import Drafter
    from eaglelab.served import served

    return Drafter(checkpoint(), served(checkpoint(), golden().launch)[1], target())


@cache
def figures() -> dict[str, Any]:
    """What was measured when data/ was made."""
    return json.loads((data_dir() / "figures.json").read_text(encoding="utf-8"))


@cache
def texts() -> list[Text]:
    """The two requests' texts with every position's features, and a few more greedy tokens at the end."""
    from eaglelab.simulate import captured_text

    capture = golden()
    return [captured_text(t, capture.reprefill[rid]) for rid, t in capture.requests.items()]


@cache
def _words() -> Any:
    from eaglelab.strip import vocabulary

    return vocabulary([data_dir() / "target"])


def word(token: int) -> str:
    """A token's text, its spaces visible."""
    return (_words()(token) or f"#{token}").replace(" ", "␣").replace("\n", "⏎")


def spelled(tokens: Any) -> str:
    """Tokens as text, with bars between them."""
    return "|".join(word(int(t)) for t in tokens)


def picture(figure: Any, alt: str) -> Any:
    """A figure as a notebook shows it: a PNG that stands without a kernel."""
    from IPython.display import Image

    from eaglelab import plots

    return Image(data=plots.png(figure), format="png", alt=alt)


def shown(header: Any, rows: Any, caption: object = None) -> Html:
    """A table with a caption."""
    return table(header, rows, caption)
