"""The report's notebook run on a real capture: records, page, exit codes, comparison with an earlier run."""

import html
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from browser.jupyter import is_blank
from typer.testing import CliRunner

from eaglelab import baseline, cli, records
from eaglelab.errors import BadInput
from eaglelab.serve import data_dir

pytestmark = pytest.mark.notebook
DATA = data_dir()
REQUIRED = [
    "accept_length.server",
    *(f"accept_length.rung{n}" for n in ("1", "2", "3", "3.stored", "4", "5")),
    *("replay.agreement", "width.prefill_extend", "width.draft", "width.decode_extend"),
]  # fmt: skip


def report(
    out,
    *words,
    drafter=DATA / "drafter-sglang",
    target=DATA / "target",
    capture=DATA / "golden-capture",
    **options,
):
    command = ["report", "--drafter", drafter, "--target", target, "--out", out, *words]
    command += ["--features", DATA / "features"]  # the golden capture is too short for intervals of its own
    command += ["-p", f"capture={capture}"] if capture else []
    return CliRunner().invoke(cli.app, [str(w) for w in command], **options)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "healthy"
    done = report(out, env={"EAGLELAB_API_KEY": "canary-b7c1"})
    assert done.exit_code == 0, done.stderr
    return out, done


def test_a_healthy_report_is_whole(healthy):
    out, done = healthy
    assert done.stdout.splitlines()[-2:] == ["healthy", str(out / "report.html")]
    assert sorted(os.listdir(out)) == ["figures", "report.html", "report.ipynb", "report.jsonl"]
    assert os.listdir(out.parent) == ["healthy"]  # nothing is left under a .partial name
    assert "climbing the ladder" in done.stderr


def test_its_records(healthy):
    out, _ = healthy
    lines = [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]
    assert lines[0]["type"] == "provenance" and lines[-1]["type"] == "summary"
    found = {line["name"]: line for line in lines if line["type"] == "measurement"}
    assert set(REQUIRED) <= set(found)
    for line in found.values():
        assert line["unit"] and line["definition"] and (line["value"] is not None or line["reason"])
    assert found["replay.agreement"]["value"] == 1.0
    assert found["accept_length.rung4"]["value"] == found["accept_length.rung5"]["value"] > 3
    findings = [line for line in lines if line["type"] == "finding"]
    counts = {o: sum(f["verdict"] == o for f in findings) for o in ("passed", "failed", "skipped", "errored")}
    summary = {"type": "summary", "verdict": "healthy", "fault": None, **counts, "total": len(findings)}
    assert lines[-1] == summary
    figures = [line for line in lines if line["type"] == "figure"]
    assert [f["name"] for f in figures] == ["ladder", "acceptance", "chunks"]
    for figure in figures:
        assert (out / figure["path"]).read_bytes().startswith(b"\x89PNG")
        assert "-p" in figure["command"] and "capture=" in figure["command"]
    assert (
        lines[0]["facts"]["launch"]["algorithm"] == "EAGLE3"
        and len(lines[0]["facts"]["drafter"]["sha256"]) == 64
    )


def test_its_page(healthy):
    out, _ = healthy
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r"<(script|link|iframe)\b", page) and 'http-equiv="Content-Security-Policy"' in page
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    order = [
        "✓ healthy",
        "The ladder",
        "draft-extend after prefill",
        "row norm",
        "round 1:",
        "outcome",
        "Make it again:",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "canary-b7c1" not in page + (out / "report.ipynb").read_text() + (out / "report.jsonl").read_text()
    assert "measure(" not in text  # no source on a reader's page


@pytest.mark.browser
def test_its_page_reads_in_a_browser_without_scripts_and_network(healthy, browser):
    context = browser.new_context(
        java_script_enabled=False, offline=True, viewport={"width": 1200, "height": 900}
    )
    page, asked, said = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
    page.on("console", lambda message: said.append(message.text))
    page.goto((healthy[0] / "report.html").as_uri())
    assert page.get_by_text("✓ healthy").first.is_visible()
    boxes = [page.locator("img").nth(i).bounding_box() for i in range(3)]
    assert all(box["width"] > 900 and box["height"] > 150 for box in boxes)
    assert boxes[0]["y"] < 1200  # verdict and ladder are on the first screens
    assert not any(is_blank(page.locator("img").nth(i).screenshot()) for i in range(3))
    titles = page.locator("span[title*='accepted, drafter']")
    assert titles.count() > 10 and titles.first.get_attribute("title").startswith("id ")
    page.locator("summary").first.click()  # folding needs no script
    assert page.get_by_text("round 13:").first.is_visible()
    assert set(asked) <= {"file", "data"} and said == []
    context.close()


def test_a_broken_launch_exits_1_and_strange_names_stay_text(tmp_path):
    strange = tmp_path / "<script>alert(1)<"
    shutil.copytree(DATA / "drafter-sglang", strange)
    words = ["-p", "launch=--speculative-algorithm EAGLE", "--json"]
    done = report(tmp_path / "run", *words, drafter=strange)
    said = json.loads(done.stdout)
    assert done.exit_code == said["exit_code"] == 1 and said["verdict"] == "broken"
    assert said["report"] == str(tmp_path / "run/report.html")
    page = (tmp_path / "run/report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;" in page
    assert "✗ broken" in page


def test_a_fall_since_the_baseline_makes_a_run_broken(healthy, tmp_path):
    earlier = tmp_path / "earlier"
    shutil.copytree(healthy[0], earlier)
    found = records.read(earlier / "report.jsonl")
    for record in found:
        if record.type == "measurement" and record.name == "accept_length.rung2":
            record.value, record.interval = record.value + 1, (record.value + 0.9, record.value + 1.1)
        if record.type == "provenance":
            record.facts["launch"]["topk"] = 4
    records.write(earlier / "report.jsonl", found)
    done = report(tmp_path / "run", "--baseline", earlier)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-2] == "broken: regression-against-baseline"
    now = records.read(tmp_path / "run/report.jsonl")
    (failed,) = [r for r in now if r.type == "finding" and r.verdict == "failed"]
    assert failed.title.startswith("1 of ") and "accept_length.rung2" in failed.evidence[1]
    assert "also changed: launch.topk: 4 then, 1 now" in failed.evidence
    page = (tmp_path / "run/report.html").read_text()
    assert "regressed" in page and html.escape(baseline.RULE) in page


def test_the_same_again_is_no_regression(healthy, tmp_path):
    done = report(tmp_path / "run", "--baseline", healthy[0] / "report.jsonl")
    assert done.exit_code == 0
    (found,) = [
        r for r in records.read(tmp_path / "run/report.jsonl") if getattr(r, "fault", "") == baseline.FAULT
    ]
    assert found.verdict == "passed" and not [e for e in found.evidence if e.startswith("also changed")]


def test_a_drafter_for_another_target_exits_2_before_a_kernel_starts(tmp_path):
    config = json.loads((DATA / "target/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2048}))
    done = report(tmp_path / "run", target=tmp_path / "config.json")
    assert done.exit_code == 2 and "it is a drafter for another target" in done.stderr
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_damaged_capture_exits_2_before_a_kernel_starts(tmp_path):
    capture = tmp_path / "capture"
    shutil.copytree(DATA / "golden-capture", capture)
    lines = (capture / "events.jsonl").read_text()
    (capture / "events.jsonl").write_text(lines[: len(lines) // 2])
    done = report(tmp_path / "run", capture=capture)
    assert done.exit_code == 2 and "events.jsonl, line" in done.stderr
    assert not list(tmp_path.glob("run*"))


def test_a_dead_server_exits_3(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    words = ["--server", "http://127.0.0.1:1", "--prompts", tmp_path / "p.jsonl"]
    done = report(tmp_path / "run", *words, capture=None)
    assert done.exit_code == 3 and "http://127.0.0.1:1: nothing answers there" in done.stderr
    assert os.listdir(tmp_path) == ["p.jsonl"]


def test_an_unfinished_baseline_is_refused_before_a_kernel_starts(tmp_path):
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier/report.jsonl").write_text("")
    done = report(tmp_path / "run", "--baseline", tmp_path / "earlier")
    assert done.exit_code == BadInput.exit_code and "did not finish" in done.stderr
    assert not Path(tmp_path / "run.partial").exists()
