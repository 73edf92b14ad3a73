"""What the numbered notebooks call: parameters, edits, pairs, and servers that cannot be captured."""

import html
import json
import shlex
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from eaglelab import charts, plots, report, workbook
from eaglelab.baseline import Movement
from eaglelab.errors import AttachError, BadInput
from eaglelab.launch import Launch
from eaglelab.misses import PromptLoss, StretchLoss
from eaglelab.serve import data_dir
from eaglelab.stats import FeatureStats
from eaglelab.workbook import fixes, lost, moved, names, ranks, rounds, start

DATA = data_dir()
GOLDEN = {"capture": str(DATA / "golden-capture"), "drafter": str(DATA / "drafter-sglang")}
INCIDENT = "--speculative-algorithm EAGLE"


@pytest.fixture(scope="module")
def book():
    return workbook.open_book(GOLDEN | {"target": str(DATA / "target")})


def test_nothing_given_is_the_shipped_capture():
    params = workbook.book_params({"server": "", "capture": "", "drafter": "", "other": 3})
    assert params.capture == str(DATA / "golden-capture") and params.features == str(DATA / "features")


def test_what_is_given_is_never_mixed_with_the_shipped_capture():
    with pytest.raises(BadInput, match="give drafter"):
        workbook.book_params({"capture": GOLDEN["capture"]})
    with pytest.raises(BadInput, match="give a server, a capture, or launch"):
        workbook.book_params({"drafter": GOLDEN["drafter"]})
    with pytest.raises(BadInput, match="give one of server"):
        workbook.book_params(GOLDEN | {"server": "http://h:1"})


def test_files_and_flags_alone_tell_the_incident():
    found = workbook.open_book(
        {"drafter": GOLDEN["drafter"], "target": str(DATA / "target"), "launch": INCIDENT}
    )
    said = start.answer(found)
    assert "✗ broken" in said and "wiring.fc" in said and "Fix: --speculative-algorithm EAGLE3" in said
    assert "Not shown: no server and no capture" in start.contents(found)


def test_a_server_without_the_plugin_still_gets_its_static_verdict(monkeypatch):
    def refuse(*_):
        raise AttachError("http://h:1 has no eaglelab plugin")

    monkeypatch.setattr(report, "gather", refuse)
    launch = Launch.parse(INCIDENT + " --model-path x")
    facts = SimpleNamespace(launch=launch)
    monkeypatch.setattr("eaglelab.server.Server.require_speculation", lambda self: facts)
    asked = {"server": "http://h:1", "drafter": GOLDEN["drafter"], "target": str(DATA / "target")}
    said = start.answer(workbook.open_book(asked))
    assert "✗ broken" in said and "has no eaglelab plugin" in said


def test_a_server_that_does_not_answer_is_an_error():
    asked = {"server": "http://127.0.0.1:9", "drafter": GOLDEN["drafter"]}
    with pytest.raises(AttachError, match="nothing answers there"):
        workbook.open_book(asked)


def test_again_names_what_was_given_and_nothing_else(book):
    given = f"-p capture {shlex.quote(GOLDEN['capture'])}"
    assert given in html.unescape(book.again("x", request="", round_number=2))
    assert "request" not in book.again("x", request="") and "-p launch" not in book.again("x")
    shipped = workbook.open_book({"capture": ""})
    assert ">papermill notebooks/x.ipynb again.ipynb</code>" in shipped.again("x")


def test_where_next_names_a_capture_that_was_given():
    assert "without parameters" in start.where_next(workbook.open_book({"capture": ""}))
    incident = {"capture": str(DATA.parent / "notebooks/lessons/incident"), "drafter": GOLDEN["drafter"]}
    found = workbook.open_book(incident)
    said = html.unescape(start.where_next(found))
    assert f'capture = "{incident["capture"]}" and drafter = "{incident["drafter"]}"' in said
    assert "broken: eagle-flag-on-eagle3-drafter" in lost.answer(found)


def test_edits_are_flags_or_fields():
    assert fixes.parse_edits(' | --a 1 | {"b": {"c": false}} ') == [("--a 1", {}), ("", {"b": {"c": False}})]
    with pytest.raises(BadInput, match="'a=1' is neither"):
        fixes.parse_edits("--x | a=1")


def test_an_edit_is_priced_on_the_texts_of_the_capture(book):
    worse, refused = fixes.fixes(book, f"{INCIDENT} | --speculative-eagle-topk 0")
    assert worse.found.accept_length == pytest.approx(1.016, abs=0.01)  # data/README.md: 1.01 to 1.04
    assert worse.gain.value == pytest.approx(1.016 - 130 / 41, abs=0.01) and worse.origin == "what if"
    assert refused.found.accept_length is None and refused.found.reason
    assert "None of these: accept length now 3.17" in fixes.answer(book, INCIDENT)


def test_all_that_diagnose_prices_is_priced_and_why_there_is_no_interval(tmp_path):
    served = shutil.copytree(GOLDEN["drafter"], tmp_path / "served")
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6}))
    given = {"target": str(DATA / "target"), "served_drafter": str(served), "launch": INCIDENT}
    found = workbook.open_book(GOLDEN | given)
    told = {f.fault: f.predicted_accept_length for f in found.found.failed if f.predicted_accept_length}
    priced = {
        f.name.split(":")[0]: f.found.accept_length for f in fixes.fixes(found) if f.origin == "cause found"
    }
    assert priced.pop("all 2 causes") == pytest.approx(130 / 41)  # as captured: nothing is left to undo
    assert priced == told and {"rope-theta", "eagle-flag-on-eagle3-drafter"} <= set(told)
    assert "No 95 % interval: this capture holds under 8 stretches" in fixes.fixes_table(found)


def test_rounds_as_served_and_as_trained(book):
    both = rounds.views(book, "", 1)
    assert [s.own for s in both["served"].steps] == [s.server for s in both["trained"].steps]
    assert "1 of 5 drafts accepted" in rounds.answer(book, "", 1)
    assert "has rounds 0 to 15" in rounds.answer(book, "", 99)
    assert "there is none; there are" in rounds.answer(book, "nobody")


def test_rows_of_another_feed_are_drafted_from_the_reprefill():
    found = workbook.open_book(GOLDEN | {"target": str(DATA / "target"), "launch": INCIDENT})
    both = rounds.views(found, "", 1)
    assert [s.accepted for s in both["trained"].steps] == [True, False, False, False, False]
    assert "fc" in both["trained"].steps[0].norms and "fc" not in both["served"].steps[0].norms
    assert "? inconclusive" in lost.answer(found) and "✗ failed" in names.answer(found)


def test_a_dropped_tensor_shows(tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(DATA / "drafter-sglang", tmp_path / "drafter")
    path = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(path)
    tensors["midlayer.mlp.up_typo.weight"] = tensors.pop("midlayer.mlp.up_proj.weight")
    save_file(tensors, path)
    asked = {"drafter": str(tmp_path / "drafter"), "launch": "--speculative-algorithm EAGLE3"}
    found = workbook.open_book(asked | {"target": str(DATA / "target")})
    assert "✗ failed" in names.answer(found) and "1 unknown" in names.answer(found)
    assert "midlayer.mlp.up_typo.weight" in names.names(found) and "✗ failed" in names.names(found)


def test_a_capture_against_itself_has_not_moved():
    pair = moved.open_pair({})
    assert {m.how for m in pair.movements} == {"same"} and pair.conditions == []
    assert "✓ passed" in moved.answer(pair) and "nothing may move" in moved.answer(pair)
    assert moved.prompts(pair).count("same text") == 2
    with pytest.raises(BadInput, match="give both before and after"):
        moved.open_pair({"before": "x"})


def test_two_reports_are_compared_by_their_records(tmp_path, book):
    from eaglelab import records

    for name, change in (("a", 0.0), ("b", -2.0)):
        (tmp_path / name).mkdir()
        found = [r.model_copy(deep=True) for r in book.found.records()]
        for r in found:
            if isinstance(r, records.Measurement) and r.name == "accept_length.rung5":
                r.value, r.interval = r.value + change, (r.value + change - 0.1, r.value + change + 0.1)
        records.write(tmp_path / name / "report.jsonl", found)
    pair = moved.open_pair({"before": str(tmp_path / "a"), "after": str(tmp_path / "b" / "report.jsonl")})
    assert [m.name for m in pair.movements if m.how == "regressed"] == ["accept_length.rung5"]
    assert "✗ failed" in moved.answer(pair) and "give two captures" in moved.prompts(pair)


def test_same_prompts_and_where_their_outputs_part():
    def trace(prompt, output):
        return SimpleNamespace(prompt_ids=prompt, prompt_len=len(prompt), tokens=prompt + output)

    a = [trace([1, 2], [5, 6, 7]), trace([3], [1])]
    b = [trace([1, 2], [5, 9]), trace([4], [1]), trace([3], [1, 2])]
    assert [parts for *_, parts in moved.same_prompts(a, b)] == [1, None]


PROMPTS = [PromptLoss(f"r{i}", [1], 20, 1 + i / 10, {"3": 2.0}) for i in range(60)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: charts.prompts(PROMPTS, ["words"] * 30),
        lambda: charts.prompts(PROMPTS[:1], ["words"]),
        lambda: charts.along_text([StretchLoss(32 * i, 3, 2.0) for i in range(40)]),
        lambda: charts.movements([]),
        lambda: charts.movements([Movement("accept_length.rung5", 3.0, 1.0, 0.2, "regressed")]),
        lambda: charts.predictions([("now", 1.0, None, 3, ""), ("--x" * 40, None, None, 0, "why " * 60)]),
        lambda: charts.norms(["fc", "norm"], [None, 1.0], [2.0, 1.0]),
        lambda: charts.dimensions(FeatureStats(40, 5), ["chunk 0 (depth 10 after the final norm)"] * 5),
    ],
)  # fmt: skip
def test_figures_are_drawn_with_titles_axes_and_nothing_outside(draw):
    figure = draw()
    assert plots.png(figure)[:4] == b"\x89PNG"
    for axes in figure.axes:
        assert axes.get_xlabel() and axes.get_title(loc="left")
    boxes = sorted((a.get_tightbbox() for a in figure.axes), key=lambda box: box.x0)
    assert boxes[0].x0 >= -1 and boxes[-1].x1 <= figure.bbox.width + 1
    assert all(a.x1 <= b.x0 + 1 for a, b in zip(boxes, boxes[1:], strict=False))


def test_ranks_are_laid_beside_one_another(tmp_path):
    from capture_maker import make_capture

    from eaglelab.capture import open_capture

    make_capture(tmp_path / "c", [(5, [1, 3], 99), (4, [2, 2], 99)])
    capture = open_capture(tmp_path / "c")
    assert ranks.compared(capture) == []
    other = [replace(e, data={**e.data, "rank": "dp0.tp1"}) for e in capture.events("dp0.tp0")]
    capture.meta["ranks"]["dp0.tp1"] = {"primary": False}
    both = capture.events
    capture.events = lambda rank=None, kind=None: other if rank == "dp0.tp1" else both(rank, kind)
    found = ranks.compared(capture)
    assert {b.what for b in found} >= {"prefill_extend: features", "decode_extend: features"}
    assert all(b.equal == b.events > 0 and b.gap == 0 for b in found)
    read = capture._read
    first = next(e for e in other if e.kind == "prefill_extend")
    capture._read = lambda e, name: read(e, name) * (1.5 if e is first else 1)
    pair = SimpleNamespace(paths=("a/c", "a/c"), books=(SimpleNamespace(capture=capture),) * 2)
    page = ranks.ranks(pair)
    assert "<b>≠ 0.5</b>" in page and page.count("= the same") == len(found) - 1


def test_progress_of_a_capture_stands_in_one_line_that_is_gone_at_the_end(monkeypatch):
    shown = []
    line = SimpleNamespace(update=shown.append)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=True))
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: line)
    monkeypatch.setattr("IPython.display.clear_output", lambda wait: shown.append("gone" if wait else ""))
    with pytest.raises(AttachError), report.told() as say:
        say("prompts", 2, 3)
        raise AttachError("gone")
    assert "prompts: 2 of 3" in shown[0] and shown[1] == "gone"
    with report.told(False) as say:
        say("prompts", 2, 3)
    assert len(shown) == 2
