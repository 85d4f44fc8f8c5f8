"""Figures and the targets that they are held against, and tables of flat rows: made once, shown on a terminal, on a
page and in Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

MIB = 1 << 20
DIRECTIONS = {"out": "device to host", "in": "host to device", "to_disk": "host to disk", "from_disk": "disk to host"}
"""What Djinn's own names mean, by which KV moves."""


def number(value: float, *, ratio: bool = False, whole: bool = False) -> str:
    """As many digits as count: three of a ratio behind the point. `whole`: a bound that somebody has chosen."""
    if float(value).is_integer() and (whole or not ratio or abs(value) >= 1000):
        return f"{value:,.0f}"
    if whole:
        return f"{value:g}"
    if ratio or abs(value) < 1:
        return f"{value:.3f}"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def three_digits(value: float) -> str:
    """Such as 0.42, 12.3 and 4,567: no more of them count."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def in_bytes(size: float) -> str:
    """In powers of two."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{three_digits(size)} {unit}"
        size /= 1024
    return f"{three_digits(size)} TiB"


def in_seconds(seconds: float) -> str:
    """In microseconds, milliseconds or seconds."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds)} s"


def in_speed(bytes_per_s: float) -> str:
    """In powers of ten, as links are sold."""
    for unit, factor in (("kB/s", 1e-3), ("MB/s", 1e-6)):
        if bytes_per_s * factor < 1000:
            return f"{three_digits(bytes_per_s * factor)} {unit}"
    return f"{three_digits(bytes_per_s * 1e-9)} GB/s"


def milliseconds(seconds: float | None) -> float | None:
    """None stays None."""
    return None if seconds is None else 1000 * seconds


def counts(numbers: Mapping[str, int]) -> str:
    """Such as "RateLimited 3, Timeout 1"; "none" where all are 0."""
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items() if number) or "none"


def duration(seconds: float) -> str:
    """Such as 4:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of `count` values, and the two ends, or the bounds of what the middle may be."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of the values that there are; None if there are none."""
        known = [value for value in values if value is not None]
        return cls.over(known) if known else None

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        """Of all of them. Raises ValueError if there are none."""
        return cls(median(values), min(values), max(values), len(values))

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a median has to keep, itself included."""

    bound: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        """Whether `value` is on the right side of the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


class Outcome(StrEnum):
    """Whether a figure is what it should be."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "within the noise"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `unit` is `×` for a ratio. `by` says of what it is, such as which target; `target` is None for what
    is only reported. Without a `spread` it could not be measured.
    """

    name: str
    unit: str
    spread: Spread | None
    target: Target | None = None
    by: Mapping[str, str] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome | None:
        """None without a target. Within the noise: the target is missed, but lies within the bounds."""
        if self.target is None:
            return None
        if self.spread is None:
            return Outcome.UNKNOWN
        if self.target.is_met(self.spread.median):
            return Outcome.MET
        best = self.spread.high if self.target.at_least else self.spread.low
        return Outcome.UNDECIDED if self.target.is_met(best) else Outcome.MISSED

    @property
    def value(self) -> str:
        """The median and its bounds, to be read."""
        if self.spread is None:
            return ""
        shown = [number(x, ratio=self.unit == "×") for x in (self.spread.median, self.spread.low, self.spread.high)]
        return f"{shown[0]} {self.unit}".strip() + ("" if shown[1] == shown[2] else f" [{shown[1]}, {shown[2]}]")

    @property
    def wanted(self) -> str:
        """The target, to be read."""
        if self.target is None:
            return ""
        sign = "≥" if self.target.at_least else "≤"
        return f"{sign} {number(self.target.bound, ratio=self.unit == '×', whole=True)} {self.unit}".strip()


By = Mapping[str, str]
_WHOLE: By = {}


def exact(name: str, unit: str, value: float | None, target: Target | None = None, by: By = _WHOLE) -> Figure:
    """A figure of one value; None: it could not be measured."""
    return Figure(name, unit, None if value is None else Spread(value, value, value, 1), target, by)


def all_of(name: str, right: int, whole: int, by: By = _WHOLE) -> Figure:
    """So many of the whole, where all should be; of nothing it is not measured."""
    return exact(name, f"of {whole:,}", right if whole else None, Target(whole, at_least=True), by)


def none_of(name: str, count: int, by: By = _WHOLE) -> Figure:
    """How many there are of what should not be."""
    return exact(name, "", count, Target(0), by)


def some(name: str, count: int, least: int = 1, by: By = _WHOLE) -> Figure:
    """How many there are of what there should be at least so many of."""
    return exact(name, "", count, Target(least, at_least=True), by)


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


@dataclass(frozen=True, slots=True)
class _Columns:
    """A table on a terminal. If it is too wide, words take more lines, and columns that still do not fit beside the
    others come below them, behind those that tell the rows apart.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        header, rows, room = self.table.header, [*self.table.cells()], options.max_width - 1
        words = [self.table.is_text(name) for name in header]
        sizes = [3 + max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]  # with spaces

        def within(most: int) -> list[int]:
            return [min(size, max(8, most)) if is_text else size for size, is_text in zip(sizes, words, strict=True)]

        widths = [within(most) for most in range(room, room // 4, -1)]
        sizes = next((each for each in widths if sum(each) <= room), widths[-1])
        told = [[text(row.get(name)) for name in header] for row in self.table.rows]
        keys = next((n for n in range(len(header)) if len({tuple(row[:n]) for row in told}) == len(told)), 0)

        def part(columns: Sequence[int]) -> RichTable:
            shown = RichTable(box=box.SIMPLE_HEAD)
            for each in columns:
                side: JustifyMethod = "left" if words[each] else "right"
                shown.add_column(Text(header[each]), justify=side, overflow="fold", max_width=sizes[each] - 3)
            for cells in rows:
                shown.add_row(*(Text(cells[each], style=STYLES.get(mark(cells[each]), "")) for each in columns))
            return shown

        columns = [*range(keys)]
        for each in range(keys, len(header)):
            if len(columns) > keys and sum(sizes[one] for one in (*columns, each)) > room:
                yield part(columns)
                columns = [*range(keys)]
            columns.append(each)
        yield part(columns)


def _rich(table: Table) -> Iterator[RenderableType]:
    """Title and note apart from the table: within it they would be as narrow as it is."""
    if table.title:
        yield Text(table.title, style="bold")
    yield _Columns(table)
    if table.note:
        yield Text(f"  {table.note}\n", style="dim")
