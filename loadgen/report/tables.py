"""Tables of flat rows: made once, shown on a terminal, on a page and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from loadgen.report.figures import Figure, Outcome
from loadgen.report.text import number

Cell = str | int | float | bool | None | Sequence[float]
Row = Mapping[str, Cell]

GOOD = {Outcome.MET.value, "held", "equal", "chosen"}
BAD = {Outcome.MISSED.value, "failed", "failed early", "DIFFERENT", "none"}
STYLES = {"good": "green", "bad": "bold red"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with a name for each column; a column that no row has a value of is not shown. `note` goes below it.

    What is not `shown` is only kept: the raw rows behind figures and charts.
    """

    title: str
    rows: Sequence[Row]
    note: str = ""
    shown: bool = True

    @classmethod
    def of(cls, title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]], note: str = "") -> Table:
        """With these columns."""
        return cls(title, [dict(zip(header, row, strict=True)) for row in rows], note)

    @property
    def header(self) -> list[str]:
        """Columns with a value in some row, in the order of the rows."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in names if any(row.get(name) not in (None, "") for row in self.rows)]

    def is_text(self, column: str) -> bool:
        """Whether a column holds words, and not numbers."""
        return any(isinstance(row.get(column), str | bool) for row in self.rows) and not _is_measured(self.rows, column)

    def cells(self) -> Iterator[list[str]]:
        """What is written. A first cell that is that of the row above is left out, where the rows are grouped by it."""
        header, before = self.header, None
        grouped = len(header) > 2 and bool(header) and self.is_text(header[0])
        for row in self.rows:
            found = [text(row.get(name)) for name in header]
            yield ["", *found[1:]] if grouped and found[0] == before else found
            before = found[0]


def _is_measured(rows: Sequence[Row], column: str) -> bool:
    """A column of numbers, some of which come with words, such as bounds or units."""
    words = [row[column] for row in rows if isinstance(row.get(column), str) and row[column]]
    return bool(words) and all(str(word)[0] in "0123456789<" for word in words)


def text(cell: Cell) -> str:
    """What is written of a value."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int | float):
        return number(cell)
    return cell if isinstance(cell, str) else ", ".join(map(number, cell))


def mark(cell: str) -> str:
    """How a cell is set off: `good`, `bad` or empty."""
    return "good" if cell in GOOD else "bad" if cell in BAD else ""


def figure_table(title: str, figures: Iterable[Figure], note: str = "") -> Table:
    """A row for each figure: of what it is, its value, target and outcome."""
    rows = [
        {**each.by, "figure": each.name, "value": each.value, "must be": each.wanted, "outcome": each.outcome or ""}
        for each in figures
    ]
    return Table(title, rows, note)


def pivot(title: str, figures: Sequence[Figure], column: str, note: str = "", *, ratios: bool = False) -> Table:
    """A row for each name (and what else it is of), a column for each value of `by[column]`; with `ratios` the cells
    say how many times the first column's each is.
    """
    columns = list(dict.fromkeys(each.by[column] for each in figures))
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    firsts: dict[tuple[str, ...], float] = {}
    for each in figures:
        others = {name: value for name, value in each.by.items() if name != column}
        key = (each.name, *others.values())
        row = rows.setdefault(
            key, {"": f"{each.name}, {each.unit}".removesuffix(", "), **others, **dict.fromkeys(columns)}
        )
        if each.spread is None:
            continue
        shown = Figure("", "", each.spread).value
        base = firsts.setdefault(key, each.spread.median) if each.by[column] == columns[0] else firsts.get(key)
        if ratios and base and each.by[column] != columns[0]:
            shown += f" ({each.spread.median / base:,.3g}×)"
        row[each.by[column]] = shown
    return Table(title, list(rows.values()), note)


def to_rich(tables: Iterable[Table]) -> Group:
    """The tables for a terminal."""
    return Group(*(part for table in tables if table.shown and table.rows for part in _rich(table)))


def to_markdown(table: Table) -> str:
    """A Markdown table under a heading, and its note."""
    header = table.header
    rule = ["---" if table.is_text(name) else "---:" for name in header]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, rule, *table.cells())]
    return "\n".join([f"## {table.title}", "", *lines, "", *([table.note, ""] if table.note else [])])


def _rich(table: Table) -> Iterator[RenderableType]:
    """Title and note apart from the table: within it they would be as narrow as it is."""
    if table.title:
        yield Text(table.title, style="bold")
    shown = RichTable(box=box.SIMPLE_HEAD)
    for name in table.header:
        shown.add_column(Text(name), justify="left" if table.is_text(name) else "right")
    for cells in table.cells():
        shown.add_row(*(Text(cell, style=STYLES.get(mark(cell), "")) for cell in cells))
    yield shown
    if table.note:
        yield Text(f"  {table.note}\n", style="dim")
