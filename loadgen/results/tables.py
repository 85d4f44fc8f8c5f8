"""Tables of text: made once, shown on a terminal and on a page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


class Mark(StrEnum):
    """How a cell is set off from the others; the name of its class on a page."""

    GOOD = "good"
    BAD = "bad"


COLORS = {Mark.GOOD: "green", Mark.BAD: "bold red"}


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells ready to print.

    The first `text_columns` columns are text, the others figures. A row whose first cell is empty belongs to the row
    above it. Cells whose text is in `marks` are set off. `note` goes below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    text_columns: int = 1
    marks: Mapping[str, Mark] = field(default_factory=dict)

    @property
    def grouped(self) -> bool:
        """Whether some rows belong to the one above."""
        return any(not row[0] for row in self.rows)


def to_rich(tables: Iterable[TextTable]) -> Group:
    """The tables for a terminal."""
    return Group(*(part for table in tables for part in _rich(table)))


def to_markdown(table: TextTable) -> str:
    """A Markdown table under a heading, and its note."""
    rule = ["---" if place < table.text_columns else "---:" for place in range(len(table.header))]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.header, rule, *table.rows)]
    return "\n".join([f"## {table.title}", "", *lines, "", *([table.note, ""] if table.note else [])])


def _rich(table: TextTable) -> Iterator[RenderableType]:
    """Title and note apart from the table: within it they would be as narrow as it is."""
    if table.title:
        yield Text(table.title, style="bold")
    yield _grid(table)
    if table.note:
        yield Text(f"  {table.note}\n", style="dim")


def _grid(table: TextTable) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    for place, name in enumerate(table.header):
        shown.add_column(Text(name), justify="left" if place < table.text_columns else "right")
    for place, row in enumerate(table.rows):
        if place and table.grouped and row[0]:
            shown.add_section()
        shown.add_row(*(Text(cell, style=COLORS[table.marks[cell]] if cell in table.marks else "") for cell in row))
    return shown
