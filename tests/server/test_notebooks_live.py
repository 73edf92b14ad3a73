"""The numbered notebooks against a live server, by their parameters cell alone."""

import html
import re
import time

import pytest
from reading_notebooks import NUMBERED, run, shown

from eaglelab.serve import data_dir

SECONDS = 60  # what a notebook may take


@pytest.mark.server("eagle-chain")
def test_every_numbered_notebook_tells_the_incident_of_a_live_server(server, tmp_path):
    data, told, captures = data_dir(), {}, []
    for path in NUMBERED[:6]:
        out, start = tmp_path / f"a run of {path.stem}", time.monotonic()
        given = {"server": server.url, "drafter": str(data / "drafter-sglang"), "out": str(out)}
        given |= {"max_requests": 2, "max_new_tokens": 32}
        pieces = shown(run(path, tmp_path / path.name, **given))
        assert time.monotonic() - start < SECONDS, path.stem
        assert "nothing" not in pieces and "Not shown" not in "".join(pieces), path.stem
        told[path.stem[:2]] = [html.unescape(re.sub(r"<[^>]+>", " ", piece)) for piece in pieces]
        captures.append(str(out / "capture"))
    answer = {name: pieces[0] for name, pieces in told.items()}
    assert "✗ broken" in answer["01"] and "Captured: 2 requests, 2 of them complete" in answer["01"]
    assert "Rows of 128 numbers: depth 8 after the final norm" in answer["02"]
    assert "Weights: 13 of 13 live parameters equal the file" in answer["03"]
    assert "broken: eagle-flag-on-eagle3-drafter" in answer["04"]
    assert "As trained: other drafts" in answer["05"]
    assert "--speculative-algorithm EAGLE3" in answer["06"] and "No 95 % interval" in answer["06"]
    pair = {"before": captures[0], "after": captures[1], "drafter": given["drafter"]}
    moved = html.unescape("".join(shown(run(NUMBERED[6], tmp_path / "07.ipynb", **pair))))
    assert "✓ passed" in moved and "Nothing beyond noise" in moved and "2 of 2 prompts in both" in moved
