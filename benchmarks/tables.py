"""Tables of figures: as Markdown for the repository, by rich for the terminal."""

from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells ready to print; the first column is text, the others are figures."""

    title: str
    header: list[str]
    rows: list[list[str]]


def to_markdown(table: TextTable) -> str:
    """A Markdown table under a heading."""
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.header, rule, *table.rows)]
    return "\n".join([f"## {table.title}", "", *lines, ""])


def to_rich(table: TextTable) -> Table:
    """The same for the terminal."""
    rendered = Table(title=table.title, title_justify="left")
    for index, name in enumerate(table.header):
        rendered.add_column(name, justify="left" if index == 0 else "right")
    for row in table.rows:
        rendered.add_row(*row)
    return rendered
