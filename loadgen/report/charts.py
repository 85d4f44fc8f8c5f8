"""Charts of a report's rows, as they are written to its file: `drawing` draws them. Nothing here needs Matplotlib."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadgen.report.tables import Cell, Row, Table

Kind = Literal["lines", "steps", "cdf", "bars", "stack", "areas"]


@dataclass(frozen=True, slots=True)
class Chart:
    """Columns `x` and `y` of the table of that title, in a colour for each value of column `by`, of the rows that have
    all values of `where`. `cdf` draws the shares of `x` alone; `bars` and `stack` have a group for each value of `x`.

    `levels` are horizontal lines with their names, `marks` thin vertical ones.
    """

    title: str
    caption: str
    kind: Kind
    table: str
    x: str
    y: str = ""
    by: str = ""
    where: Mapping[str, Cell] = field(default_factory=dict)
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[float] = ()

    @property
    def slug(self) -> str:
        """The title as a part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def rows(self, tables: Sequence[Table]) -> list[Row]:
        """What is drawn; empty where there is nothing to see."""
        needed = (self.x,) if self.kind == "cdf" else (self.x, self.y)
        return [
            row
            for table in tables
            if table.title == self.table
            for row in table.rows
            if all(row.get(name) == value for name, value in self.where.items())
            and all(row.get(name) is not None for name in needed)
        ]
