"""Notebooks 01 and 05 in JupyterLab, as a user has them: run, clicked, walked by keyboard, in the dark."""

import json
import statistics
import time

import pytest
from armed import KEY
from browser.jupyter import is_blank
from browser.live import live

pytestmark = pytest.mark.browser

SIZES = """all => all.map((e) => ({height: e.getBoundingClientRect().height,
    words: e.textContent.trim().length, picture: !!e.querySelector("img")}))"""
# Every text of the outputs on its ground: [text, ratio] where WCAG's contrast is under 4.5.
CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  const areas = document.querySelectorAll(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea-output");
  for (const area of areas) {
    const texts = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode, parent = text.parentElement;
      if (!text.data.trim() || !parent.checkVisibility()) continue;
      if (parent.closest(":disabled, select, option, style, script")) continue;
      let ground = parent, alpha = 1;
      for (let e = parent; e; e = e.parentElement) alpha *= Number(getComputedStyle(e).opacity);
      const clear = (e) => (parse(getComputedStyle(e).backgroundColor)[3] ?? 1) === 0;
      while (ground && clear(ground)) ground = ground.parentElement;
      const below = parse(getComputedStyle(ground ?? document.body).backgroundColor);
      const ink = parse(getComputedStyle(parent).color).slice(0, 3)
        .map((v, i) => alpha * v + (1 - alpha) * below[i]);
      const [a, b] = [light(ink), light(below)].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      if (ratio < 4.5) found.push([text.data.trim().slice(0, 40), ratio.toFixed(2)]);
    }
  }
  return found;
}"""


def press(notebook, key):
    """Press a key; seconds until the pane shows what it led to."""
    pane = notebook.locator(".eaglelab-pane")
    before, start = pane.get_attribute("data-step"), time.perf_counter()
    notebook.page.keyboard.press(key)
    notebook.page.wait_for_function(
        "([selector, before]) => document.querySelector(selector).dataset.step !== before",
        arg=[".jp-NotebookPanel:not(.lm-mod-hidden) .eaglelab-pane", before],
        polling=5,
    )
    return time.perf_counter() - start


def test_the_stepper_is_walked_by_keyboard(opened, record_property):
    notebook = opened("05_step_by_step.ipynb")
    pane = notebook.show(".eaglelab-pane")
    assert "Round 1 of 15 (from 0), draft-extend" in pane.inner_text()
    pane.click(position={"x": 5, "y": 5})
    took = [press(notebook, "ArrowRight") for _ in range(24)]
    record_property("seconds a step", [round(t, 3) for t in took])
    print(f"a step takes {statistics.median(took):.3f} s (median of 24), {max(took):.3f} s at most")
    assert statistics.median(took) < 0.2
    assert "Round 4 of 15 (from 0), draft step 3" in pane.inner_text()
    press(notebook, "ArrowLeft")
    assert "draft step 2" in pane.inner_text() and "Likeliest tokens of draft step 2" in pane.inner_text()
    press(notebook, "End")
    assert "The verify" in pane.inner_text()
    titles = pane.locator("span[title]").evaluate_all("all => all.map((e) => e.title)")
    assert any("target's probability" in t and "the target chose" in t for t in titles)
    press(notebook, "ArrowDown")
    assert "Round 5 of 15 (from 0), verify" in pane.inner_text()
    press(notebook, "Home")
    press(notebook, "ArrowUp")
    assert "Round 4 of 15 (from 0), draft-extend" in pane.inner_text()
    assert not is_blank(pane.screenshot())


def test_edits_and_controls_change_the_round_and_no_key_reaches_jupyterlab(opened):
    notebook = opened("05_step_by_step.ipynb")
    cells, pane = notebook.cells(), notebook.show(".eaglelab-pane")
    button = notebook.locator("button:has-text('Draft so too')")
    request, field = (notebook.locator(".eaglelab-stepper select").nth(i) for i in range(2))
    for widget in (request, field, notebook.locator(".eaglelab-stepper button").first, pane):
        widget.focus()
        for key in "ddbjm":
            notebook.page.keyboard.press(key)
        notebook.page.wait_for_timeout(50)
    assert notebook.cells() == cells
    field.select_option("rope.theta")
    value = notebook.locator(".eaglelab-stepper input[type=text]").nth(1)
    value.fill("a million")
    value.blur()
    button.click()
    notebook.locator("text=✗ Not drafted so").wait_for()
    value.fill("1000000")
    value.blur()
    button.click()
    notebook.locator(".eaglelab-pane:has-text('edited: rope.theta = 1000000')").wait_for()
    assert "≠ served and trained" in pane.inner_text() and "layers.0.q_rope" in pane.inner_text()
    flags = notebook.locator(".eaglelab-stepper input[type=text]").nth(0)
    flags.fill("--speculative-eagle-topk 4 --speculative-num-draft-tokens 16")
    flags.blur()
    field.select_option("–")
    button.click()
    notebook.locator(".eaglelab-pane:has-text('edited: --speculative-eagle-topk 4')").wait_for()
    pane.click(position={"x": 5, "y": 5})
    for _ in range(3):
        press(notebook, "ArrowRight")
    assert "Tree as edited: " in pane.inner_text() and "branches went into draft step 3" in pane.inner_text()
    assert not is_blank(pane.screenshot())


@pytest.mark.parametrize("name", ["01_start_here.ipynb", "05_step_by_step.ipynb", "the others.ipynb"])
def test_light_and_dark_every_output_is_there_and_legible(opened, name):
    notebook = opened(name)
    said = {o["cell"] for o in notebook.outputs()}
    cells = json.loads(notebook.model())["cells"]
    speak = {i for i, c in enumerate(cells) if c["cell_type"] == "code" and not c["metadata"].get("tags")}
    assert said == speak  # all but the parameters
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.command("apputils:change-theme", theme=theme)
        notebook.page.wait_for_timeout(300)
        notebook.locator(".jp-RenderedHTMLCommon details").evaluate_all(
            "all => all.forEach((d) => d.open = true)"
        )
        assert notebook.page.evaluate(CONTRAST) == []
        for box in notebook.locator(".jp-OutputArea-output").evaluate_all(SIZES):
            assert box["height"] > 8 and (box["words"] or box["picture"]), box
        pictures = ".jp-OutputArea-output img, " if theme.endswith("Dark") else ""  # the same in both
        for drawn in notebook.locator(f"{pictures}.eaglelab-pane, .eaglelab-attach").all():
            drawn.scroll_into_view_if_needed()
            assert not is_blank(drawn.screenshot())


def test_long_tables_sort_and_search(opened):
    notebook = opened("01_start_here.ipynb")
    table = notebook.show("table.eaglelab-rows[data-live]")
    search = notebook.show("label:has-text('search ') input")
    rows = "all => all.filter((r) => r.checkVisibility()).map((r) => r.cells[0].innerText)"
    before = table.locator("tr:has(td)").evaluate_all(rows)
    table.locator("th").first.click()
    assert table.locator("tr:has(td)").evaluate_all(rows) == sorted(before, key=str.lower) != before
    table.locator("th").first.click()
    assert table.locator("tr:has(td)").evaluate_all(rows) == sorted(before, key=str.lower, reverse=True)
    search.fill(before[0].upper())
    found = table.locator("tr:has(td)").evaluate_all(rows)
    assert before[0] in found and len(found) < len(before)
    search.fill("")


def wait_for(server, state):
    until = time.monotonic() + 20
    while server.state != state and time.monotonic() < until:
        time.sleep(0.05)
    assert server.state == state


def test_the_attach_panel_captures_and_leaves_nothing_armed(opened, tmp_path, lab):
    with live(tmp_path / "spool") as (url, server):
        notebook = opened("01_start_here.ipynb")
        panel = notebook.show(".eaglelab-attach")
        names = ("Connect", "Arm", "Send")
        button = {name: panel.get_by_role("button", name=name, exact=True) for name in names}
        panel.locator("input[type=text]").first.fill(url)
        panel.locator("input[type=text]").first.blur()
        button["Connect"].click()
        panel.locator("text=wants an API key").wait_for()
        panel.locator(".eaglelab-key").fill(KEY)
        panel.locator(".eaglelab-key").blur()
        button["Connect"].click()
        panel.locator("text=SGLang 0.5.23").wait_for()
        panel.locator("textarea").fill("What does a drafter see?")
        panel.locator("textarea").blur()
        server.truths = dict(list(server.truths.items())[:1])
        button["Send"].click()
        panel.locator("text=✓ Captured").wait_for()
        assert server.state == "closed" and list(lab.folder.glob("runs/*/capture/capture.json"))
        button["Arm"].click()
        wait_for(server, "armed")
        panel.locator("text=/, armed, [0-9]+ s left/").first.wait_for()
        notebook.command("docmanager:save")
        saved = (lab.folder / "01_start_here.ipynb").read_text()
        assert KEY not in notebook.model() and KEY not in saved and "SGLang" in saved
        notebook.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.restart()"
        )
        wait_for(server, "closed")
