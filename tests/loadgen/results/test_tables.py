"""Tables on a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from loadgen.results.tables import Mark, TextTable, to_rich


def printed(*tables: TextTable) -> str:
    console = Console(width=100, file=StringIO(), record=True)
    console.print(to_rich(tables))
    return console.export_text()


def test_cells_are_printed_as_they_are() -> None:
    table = TextTable("A [bold] title", ("", "[x]"), [("[/]", "1"), ("", "2")], "a [note]", marks={"1": Mark.GOOD})
    text = printed(table)
    for words in ("A [bold] title", "[x]", "[/]", "a [note]"):
        assert words in text


def test_figures_are_to_the_right_and_text_to_the_left() -> None:
    rows = [("first", "one", "1"), ("", "another", "1,000")]
    lines = printed(TextTable("t", ("", "target", "figure"), rows, text_columns=2)).splitlines()
    one, thousand = (next(line for line in lines if word in line) for word in ("one", "1,000"))
    assert one.index("one") == thousand.index("another")
    assert one.rstrip().index(" 1") + 2 == len(thousand.rstrip())
