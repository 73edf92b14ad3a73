"""01: can I look into this server, or this capture?"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping
from typing import Any

from eaglelab import report, tables, text
from eaglelab.errors import AttachError, BadInput
from eaglelab.html import Html, panel, table, verdict_box
from eaglelab.launch import EAGLES
from eaglelab.workbook.book import NOTEBOOKS, Workbook


def demo(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """For notebook 01: its names; where `demo` is set, with the address of a server started here.

    It is genuine SGLang with the tiny models, and ends with the kernel.
    """
    given = dict(namespace)
    if given.get("demo"):
        from eaglelab.serve import data_dir, start_server

        algorithm = str(given["demo"]).upper()
        if algorithm not in EAGLES:
            raise BadInput(f'demo = {given["demo"]!r}: "EAGLE3", or "EAGLE" for the founding incident')
        import torch

        torch.set_num_threads(1)  # the server needs the other cores: see `demo` in cli
        data, up = data_dir(), _demo.enter_context(start_server(algorithm))
        paths = {"drafter": data / "drafter-sglang", "target": data / "target", "features": data / "features"}
        given |= {"server": up.url, "capture": "", **{name: str(path) for name, path in paths.items()}}
    return given


_demo = contextlib.ExitStack()
atexit.register(_demo.close)


def answer(book: Workbook) -> Html:
    """What was attached to, the static verdict in a line, and what stands in the way of more."""
    evidence = book.evidence
    counts = [f"{d.part}.{d.field}" for d in evidence.differences if not d.inert]
    word = "broken"
    if evidence.served is None:
        line = f"this engine would not serve the drafter: {evidence.why_not('served')}"
    elif counts:
        line = f"training and serving differ in what counts: {', '.join(counts)}"
    else:
        word, line = "healthy", "training and serving agree in every field that counts"
    if book.capture is None:
        seen = f"Nothing was captured: {evidence.why_not('capture')}"
    else:
        states = [t.state for t in book.capture.requests.values()]
        seen = f"Captured: {len(states)} requests, {states.count('complete')} of them complete."
    return verdict_box(word, None, f"By files and flags alone, {line}.", [seen, book.diagnosis])


def facts(book: Workbook) -> Html:
    """Launch, drafter and capture; the server's own fields are folded."""
    shown = {n: book.found.facts[n] for n in ("launch", "drafter", "server") if book.found.facts.get(n)}
    return tables.facts_table(shown, folded=("server",))


def probe(book: Workbook) -> Html:
    """What a server's probe says of itself now; of a capture, what it holds."""
    if book.params.server:
        from eaglelab.server import Server

        with Server(book.params.server, os.environ.get(report.KEY)) as server:
            try:
                return tables.facts_table({"probe": server.probe_status()})
            except AttachError as error:
                return panel(str(error))
    return contents(book)


def contents(book: Workbook) -> Html:
    """Events, widths and requests of the capture, and whatever reading found odd."""
    if book.capture is None:
        return book.missing()
    said = text.capture(book.capture)[0]
    shown: dict[str, Any] = {name: said[name] for name in ("path", "engine", "events", "widths", "requests")}
    shown["re-prefilled"] = len(said["reprefilled"])
    shown["rank"] = {
        r: {k: c.get(k) for k in ("seen", "written", "dropped")} for r, c in book.capture.ranks.items()
    }
    shown["problems"] = [f"{p['severity']}: {p['where']}: {p['text']}" for p in said["problems"]] or "none"
    return tables.facts_table(shown)


def counters(book: Workbook) -> Html:
    """What SGLang counted of these requests."""
    if not book.evidence.counters:
        return book.missing("counters")
    return tables.measurements_table(book.evidence.counters)


def where_next(book: Workbook) -> Html:
    """The other notebooks, and what to give them so that they look at the same thing."""
    rows = [(f"{name}.ipynb", asks) for name, asks in NOTEBOOKS.items() if not name.startswith("01")]
    where = "without parameters, each looks at the shipped capture"
    if book.capture is not None and (book.params.server or book.own.get("capture")):
        given = f'capture = "{book.capture.path}" and drafter = "{book.params.drafter}"'
        where = f"give each {given}, so that all look at the same, and nothing is sent again"
    return table(("notebook", "its question"), rows, where)
