"""Attacker text cannot leave its place: one escape function, and every piece goes through it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import read

from eaglelab import html, strip, tables
from eaglelab.diff import Difference
from eaglelab.records import Finding

NASTY = [
    "<script>alert(1)</script>",
    "</textarea><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x=\'',
    "\u202ereversed",
    "a\0b",
    "\ud800 lone",
    "\u2028line",
    "]]><!-- -->",
    "<\x1b[31mansi",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<script>", "&lt;script&gt;"),
        ("\"'&", "&quot;&#x27;&amp;"),
        ("\u202e", "⟨U+202E⟩"),
        ("\0", "⟨U+0000⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("\u200b\ufeff", "⟨U+200B⟩⟨U+FEFF⟩"),
        ("a\n\tb é 漢 🙂", "a\n\tb é 漢 🙂"),
        (None, "–"),
    ],
)
def test_escape(text, expected):
    assert html.escape(text) == expected


@given(st.text(st.characters(codec=None)))
def test_escaped_text_is_text_only_and_can_be_written(text):
    escaped = html.escape(text)
    seen = read(f"<p title='{escaped}'>{escaped}</p>")
    assert seen.tags == ["p"] and seen.text == html.printable(text) and len(seen.attributes) == 1
    escaped.encode("utf-8")


def pieces(text):
    finding = Finding(fault=text, verdict="failed", title=text, evidence=[text, text], fix=text)
    token = strip.Token(7, 3, "accepted", text, 0.5)
    return {
        "verdict": html.verdict_box("broken", text, text, [text, html.code(text)]),
        "findings": tables.findings_table([finding]),
        "wiring": tables.wiring_table([Difference(text, text, text, False, text)]),
        "facts": tables.facts_table(
            {text: {text: text}, "list": [text, text], "more": {"a": text}}, ("more",)
        ),
        "strip": strip.token_strip([token], [strip.Step([token], token, 2)] * 20, text),
    }


@pytest.mark.parametrize("name", pieces(""))
@pytest.mark.parametrize("text", NASTY)
def test_no_piece_lets_text_become_markup(name, text):
    harmless, nasty = read(pieces("harmless")[name]), read(pieces(text)[name])
    assert nasty.tags == harmless.tags
    assert {k for k, _ in nasty.attributes} <= {"style", "title"}
    assert html.printable(text) in nasty.text or html.printable(text).replace("\n", "↵") in nasty.text
    nasty.text.encode("utf-8")


@pytest.mark.parametrize("name", pieces(""))
def test_every_ground_has_its_ink(name):
    """A dark theme must not put its own light text on our light ground."""
    for key, style in read(pieces("x")[name]).attributes:
        if key == "style" and "background" in style:
            assert "color:" + html.INK in style.replace(" ", ""), style


def test_findings_come_failed_first_with_words_not_only_colours():
    findings = [
        Finding(fault="c", verdict="passed", title="third"),
        Finding(fault="b", verdict="skipped", title="second"),
        Finding(fault="a", verdict="failed", title="first", predicted_accept_length=3.684),
    ]
    text = read(tables.findings_table(findings)).text
    assert text.index("first") < text.index("second") < text.index("third")
    assert "✗ failed" in text and "– skipped" in text and "✓ passed" in text and "3.684" in text


def test_facts_are_flattened_to_dotted_names():
    text = read(
        tables.facts_table({"server": {"tp": 8, "models": ["a", "b"]}, "none": None, "empty": {}})
    ).text
    assert text == "whatvalueserver.tp8server.modelsa, bnone–empty{}"


@pytest.mark.parametrize(
    ("drafts", "parents", "committed", "expected"),
    [
        # a chain: two right, the third wrong, the rest never looked at
        ([5, 6, 7, 8], None, [5, 6, 9], ["accepted", "accepted", "rejected", "not reached"]),
        # all right: the bonus comes on top
        ([5, 6], None, [5, 6, 7], ["accepted", "accepted"]),
        # nothing right; the bonus happens to equal a later draft
        ([5, 6], None, [6], ["rejected", "not reached"]),
        # the first draft equals the bonus, but was not accepted
        ([5, 6], None, [5], ["rejected", "not reached"]),
        # a tree: root -> 5, 6; 5 -> 7; 6 -> 8, 9. The target goes 6, 9, then 1
        (
            [5, 6, 7, 8, 9],
            [0, 0, 1, 2, 2],
            [6, 9, 1],
            ["rejected", "accepted", "not reached", "rejected", "accepted"],
        ),
    ],
)
def test_fates(drafts, parents, committed, expected):
    assert strip.fates(drafts, parents, committed) == expected


def test_strip_tells_id_position_fate_and_probability():
    token = strip.Token(42, 17, "rejected", " the\n", 0.25)
    seen = read(strip.chip(token))
    assert seen.text == "✗  the↵"
    title = "id 42, ' the\\n', position 17, rejected, drafter's probability 0.250"
    assert dict(seen.attributes)["title"] == title
    assert read(strip.chip(strip.Token(42, 17, "bonus"))).text == "+ #42"


def test_strip_folds_after_a_dozen_rounds():
    token = strip.Token(1, 1, "accepted", "a")
    page = strip.token_strip([], [strip.Step([token], None, 1)] * 15, "caption")
    assert "3 more rounds" in page and page.count("round ") == 15
    assert "<details>" in page and "<details>" not in strip.token_strip(
        [], [strip.Step([token], None, 1)] * 12, ""
    )


def test_a_tree_is_shown_depth_by_depth():
    drafts = [strip.Token(i, position, "rejected", f"t{i}") for i, position in enumerate([4, 5, 4, 5])]
    tree = read(strip.token_strip([], [strip.Step(drafts, None, 1)], "")).text
    assert "✗ t0✗ t2│✗ t1✗ t3" in tree
    chain = read(strip.token_strip([], [strip.Step(drafts[:2], None, 1)], "")).text
    assert "✗ t0✗ t1" in chain
