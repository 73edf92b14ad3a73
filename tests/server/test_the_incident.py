"""Lesson 3 with a server of its own."""

import contextlib
import re

import nbformat
import pytest
from reading_lessons import FOLDER, kind, play

from eaglelab.lessons import incident


@pytest.mark.server("eagle-chain")
def test_the_incident_on_a_genuine_server(servers, monkeypatch):
    """Lesson 3 with a server: the same answers hold, and the restarted server accepts as predicted."""

    @contextlib.contextmanager
    def shared(algorithm):
        yield servers.get({"EAGLE": "eagle-chain", "EAGLE3": "eagle3-chain"}[algorithm])

    monkeypatch.setattr(incident, "start_server", shared)
    notebook = nbformat.read(FOLDER / "3_the_incident.ipynb", as_version=4)
    shown = play(notebook)
    assert all("✓ passed" in str(shown[c.id]) for c in notebook.cells if kind(c) == "check")
    (predicted, counted) = (
        [float(x) for x in re.findall(r">(\d\.\d\d)<", str(shown[c.id]))]
        for c in notebook.cells
        if c.source in ("case.predict(fix)", "case.restart(fix)")
    )
    assert predicted[0] == counted[0] < 1.1 and counted[1] > 2
    assert abs(predicted[1] - counted[1]) < 0.05 * counted[1]
