"""A page is one file in which everything is; an XML parser is the judge of its drawings."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from loadgen.results.figures import Figure, to_svg
from loadgen.results.page import Page, Section, write_page, write_pictures
from loadgen.results.plots import Series, lines
from loadgen.results.tables import Mark, TextTable


def draw(axes: Axes) -> None:
    lines(axes, [Series("<a>", [(0.0, 1.0)]), Series("b", [(0.0, 2.0)])], "x", "y")


TABLE = TextTable("Table <1>", ("", "x"), [("a & b", "1"), ("", "missed")], "a note", marks={"missed": Mark.BAD})
PAGE = Page(
    "Title <&>",
    ("lead one", "lead two"),
    (
        Section("First", "some text", (Figure("Figure 1", "caption 1", draw), Figure("Figure 1", "again", draw))),
        Section("Second", tables=(TABLE,)),
    ),
)


class Reader(HTMLParser):
    """Notes tags that stay open, and what the document would load."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href") and value and not value.startswith("#"):
                self.loaded.append(value)
            if name == "id" and value:
                self.ids.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_figures_of_one_name_are_pictures_of_two(tmp_path: Path) -> None:
    written = write_pictures(PAGE, tmp_path / "a.html")
    assert [path.name for path in written] == ["a-figure-1.png", "a-figure-1-2.png"]
    assert all(path.stat().st_size > 1000 for path in written)


def test_the_page_is_whole_has_everything_and_loads_nothing(tmp_path: Path) -> None:
    text = write_page(PAGE, tmp_path / "a.html").read_text("utf-8")
    found = Reader(text)
    assert (found.open, found.loaded) == ([], [])
    assert len(found.ids) == len(set(found.ids))
    for words in ("Title &lt;&amp;&gt;", "lead two", "First", "some text", "caption 1", "Table &lt;1&gt;", "a note"):
        assert words in text
    assert text.count("<svg") == 2
    assert "a &amp; b</td>" in text
    assert '<td class="bad">missed</td>' in text


SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("djinn & co", "<script>", "$5 a_b", "_hidden")


def two_lines(axes: Axes) -> None:
    lines(axes, [Series(name, [(0.0, 1.0), (1.0, place)]) for place, name in enumerate(NAMES)], "seconds", "turns")


def texts(drawing: str) -> list[str]:
    return ["".join(text.itertext()).strip() for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


@pytest.fixture
def axes() -> Axes:
    return Drawing().subplots()


def test_drawings_have_every_name_as_text_and_need_nothing_from_elsewhere() -> None:
    """Those of one page share no ids."""
    figure = Figure("title", "caption", two_lines)
    drawings = [to_svg(figure, prefix) for prefix in ("figure-0", "figure-1")]
    ids = [{found.get("id") for found in ElementTree.fromstring(drawing).iter()} - {None} for drawing in drawings]
    assert not ids[0] & ids[1]
    for drawing, own in zip(drawings, ids, strict=True):
        assert {*NAMES, "seconds", "turns"} <= set(texts(drawing))
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', drawing)) <= own
        assert not re.findall(r'(?:src|href)="(?!#)', drawing)
        assert "currentColor" in drawing, "the colour of the page"
