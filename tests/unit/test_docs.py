"""The documentation: links lead somewhere, every error has its section, the reference is current."""

import ast
import dataclasses
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eaglelab import errors
from eaglelab.catalogue import Fault
from eaglelab.checks import Check
from eaglelab.stats import FeatureStats

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "tests/*.md", "data/*.md", "notebooks/**/*.md")
PAGES = sorted({page for pattern in FOLDERS for page in ROOT.glob(pattern)})
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclasses.dataclass(frozen=True)
class Golden:
    """As much of an `Evidence` as the check of CONTRIBUTING.md looks at."""

    stats: Any
    capture: Any


def anchors(page):
    """The anchors that a code host gives to a page's headings."""
    found = []
    for title in re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M):
        plain = re.sub(r"[^\w\- ]", "", title.lower().replace("`", ""))
        found.append(plain.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^(    .*|```.*?```)$", "", page.read_text(), flags=re.M | re.S)
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {link}"


def test_every_page_is_linked_from_the_index():
    linked = {Path(link).name for link in LINK.findall((ROOT / "docs/README.md").read_text())}
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= linked


def test_every_exit_code_has_its_section():
    there = anchors(ROOT / "docs/errors.md")
    for code in range(2, 7):
        assert errors.page(code).partition("#")[2] in there
    assert errors.page(0) == errors.page(130) == ""


def test_every_attach_error_is_explained():
    """The function that raises it holds a phrase which errors.md quotes in bold."""
    phrases = re.findall(r"\*\*(.+?)\*\*", (ROOT / "docs/errors.md").read_text())
    phrases = [part for phrase in phrases for part in phrase.split(" ... ")]
    unexplained = []
    for path in (ROOT / "eaglelab").rglob("*.py"):
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
        for function in functions:
            nodes = list(ast.walk(function))
            called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            words = "".join(str(n.value) for n in nodes if isinstance(n, ast.Constant))
            if "AttachError" in called and not any(phrase in words for phrase in phrases):
                unexplained.append(f"{path.name}: {function.name}")
    assert unexplained == []


def test_the_check_of_the_contributing_page_works():
    """Its three pieces as they stand there: the check, its catalogue entry, the test on broken rows."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    check, entry, test = (
        textwrap.dedent(block) for block in re.findall(r"(?m)(?:^ {7}.*\n|^\n(?= {7}))+", page)
    )
    rows = np.random.default_rng(0).standard_normal((50, 9)).astype("float32")
    evidence = Golden(FeatureStats(9, 3), SimpleNamespace(requests={"a": SimpleNamespace(features=rows)}))
    evidence.stats.update(rows)
    names = {"Check": Check, "Evidence": object, "Finding": object, "Fault": Fault, "np": np}
    exec(check, names)
    fault = eval(entry.rstrip().rstrip(","), names)
    assert fault.slug == names["CONSTANT"].fault and fault.detected == "yes"
    names |= {"feed": SimpleNamespace(**names), "FeatureStats": FeatureStats, "replace": dataclasses.replace}
    exec(test, names)
    names["test_a_constant_dimension_is_told"](evidence)


def test_the_reference_is_what_the_commands_say():
    words = [sys.executable, "-m", "typer", "eaglelab.cli", "utils", "docs", "--name", "eaglelab"]
    said = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert (ROOT / "docs/reference.md").read_text().strip() == said.strip(), "run `make docs`"


def test_a_failing_command_names_the_page():
    words = [sys.executable, "-m", "eaglelab.cli", "inspect", "/nowhere"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "see docs/errors.md#2-usage-or-bad-input"
