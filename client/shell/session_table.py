"""Sessions as a table that fits its terminal."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from client.models import SessionInfo
from client.shell.wording import LATE, due, on_one_line, size, span, turn

GAP = 2
ID_END = 8
"""Ids of one moment begin alike, and end at random."""
NAME_WIDTH = 8
"""What is left of a name at least, before another column goes."""
DISPENSABLE = ("TENANT", "USED", "PHASE", "KV", "PLACE", "TOKENS", "RETURNS", "TOKENS/S", "NAME")
"""Columns that a narrow terminal does without, the first of them first."""
NUMBERS = frozenset({"TOKENS", "KV", "TOKENS/S", "USED", "RETURNS"})
STYLES = {"running": "green", "queued": "yellow", "paused": "magenta"}


@dataclass(frozen=True, slots=True)
class Row:
    """A session at `now_s` (Unix seconds), and how many tokens it gets each second: None if unknown."""

    info: SessionInfo
    now_s: float
    tokens_per_s: float | None = None


COLUMNS: dict[str, Callable[[Row], str]] = {
    "NAME": lambda row: name_of(row.info),
    "ID": lambda row: row.info.id,
    "TENANT": lambda row: on_one_line(row.info.tenant or "-"),
    "TURN": lambda row: turn(row.info.state),
    "PHASE": lambda row: row.info.phase,
    "PLACE": lambda row: row.info.kv.tier or "none",
    "TOKENS": lambda row: str(row.info.tokens),
    "KV": lambda row: size(kv_bytes(row.info)) if row.info.kv.tier else "-",
    "TOKENS/S": lambda row: "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.1f}",
    "RETURNS": lambda row: "-" if row.info.returns_at is None else due(row.info.returns_at - row.now_s),
    "USED": lambda row: span(row.now_s - row.info.used_at),
}


def name_of(info: SessionInfo) -> str:
    """What its client calls it: the label `name`, then the others."""
    labels = dict(info.metadata)
    name = labels.pop("name", "")
    return on_one_line(" ".join([name, *(f"{key}={value}" for key, value in labels.items())])) or "-"


def kv_bytes(info: SessionInfo) -> int:
    """Bytes of its KV, wherever they are."""
    return info.kv.device_bytes + info.kv.host_bytes + info.kv.disk_bytes


def short_id(session: str) -> str:
    """The end of an id, which tells it from others of its time. `djinn chat` takes it for the id."""
    return f"…{session[-ID_END:]}"


def session_table(rows: Sequence[Row], console: Console, *, with_rates: bool = False) -> Table:
    """The table. On a terminal, long names end in `…`, ids begin with it, and columns go until the others fit."""
    left_out = () if with_rates else ("TOKENS/S",)
    if len({row.info.tenant for row in rows}) < 2:
        left_out = ("TENANT", *left_out)
    cells = {title: [cell(row) for row in rows] for title, cell in COLUMNS.items() if title not in left_out}
    if console.is_terminal:
        _fit(cells, console.width)
    return _drawn(cells)


def fitting_table(rows: Sequence[Row], console: Console, lines: int, *, with_rates: bool = False) -> RenderableType:
    """The table with as many of the first rows as fit into so many `lines` of a terminal, and how many others exist."""
    room = max(1, lines - 2)
    if not console.is_terminal or len(rows) <= room + 1:
        return session_table(rows, console, with_rates=with_rates)
    return Group(session_table(rows[:room], console, with_rates=with_rates), Text(f"and {len(rows) - room} more"))


def _fit(cells: dict[str, list[str]], width: int) -> None:
    """Shorten ids and names, and take columns out, until a line has at most `width` cells."""
    if _width(cells) <= width:
        return
    cells["ID"] = [short_id(session) for session in cells["ID"]]
    for title in DISPENSABLE:
        room = width - _width(cells) + _width_of("NAME", cells["NAME"])
        if room >= min(NAME_WIDTH, _width_of("NAME", cells["NAME"])):
            cells["NAME"] = [_cut(name, room) for name in cells["NAME"]]
            return
        cells.pop(title, None)
        if title == "NAME":
            return


def _cut(text: str, width: int) -> str:
    """At most `width` cells of the text: never half of a character that takes two."""
    cut = Text(text)
    cut.truncate(width, overflow="ellipsis")
    return cut.plain


def _width(cells: dict[str, list[str]]) -> int:
    return sum(_width_of(title, column) for title, column in cells.items()) + GAP * (len(cells) - 1)


def _width_of(title: str, column: Iterable[str]) -> int:
    return max(map(cell_len, chain([title], column)))


def _drawn(cells: dict[str, list[str]]) -> Table:
    """Rich is told the widths: it would make room by cutting figures."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for title, column in cells.items():
        width = _width_of(title, column)
        table.add_column(title, justify="right" if title in NUMBERS else "left", no_wrap=True, width=width)
    for line in zip(*cells.values(), strict=True):
        table.add_row(*(Text(cell, style="red" if cell.endswith(LATE) else STYLES.get(cell, "")) for cell in line))
    return table
