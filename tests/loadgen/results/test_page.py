"""A page is one file in which everything is, as what it was given."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from matplotlib.axes import Axes

from loadgen.results.figures import Figure
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


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    found = Reader(write_page(PAGE, tmp_path / "a.html").read_text("utf-8"))
    assert found.open == []
    assert found.loaded == []
    assert len(found.ids) == len(set(found.ids))


def test_everything_is_on_it_and_nothing_becomes_markup(tmp_path: Path) -> None:
    text = write_page(PAGE, tmp_path / "a.html").read_text("utf-8")
    for words in ("Title &lt;&amp;&gt;", "lead two", "First", "some text", "caption 1", "Table &lt;1&gt;", "a note"):
        assert words in text
    assert text.count("<svg") == 2
    assert "a &amp; b</td>" in text
    assert re.search(r'<td class="bad">missed</td>', text)


def test_a_page_without_figures_or_tables(tmp_path: Path) -> None:
    text = write_page(Page("t", (), (Section("nothing"),)), tmp_path / "a.html").read_text("utf-8")
    assert Reader(text).open == []
    assert "<svg" not in text
    assert "<table" not in text


def test_figures_of_one_name_are_pictures_of_two(tmp_path: Path) -> None:
    written = write_pictures(PAGE, tmp_path / "a.html")
    assert [path.name for path in written] == ["a-figure-1.png", "a-figure-1-2.png"]
    assert all(path.stat().st_size > 1000 for path in written)
