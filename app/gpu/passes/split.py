"""A step in parts, where memory is too short for all of its rows at once. Pure planning: no tensors."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace

from app.gpu.passes.segments import Row
from app.gpu.passes.ways import clip_way

GROW_AFTER = 32
"""Parts that have to fit before a larger one is tried. One that does not fit costs its own time once more, so this
bounds what trying costs to a few percent."""


class PartSize:
    """How many tokens are computed at once, at most `limit`: any number, until a part has not fitted."""

    def __init__(self) -> None:
        self.limit = sys.maxsize
        self._fitted = 0

    def shrink(self, tokens: int) -> None:
        """A part of so many tokens, more than one, has not fitted."""
        self.limit = tokens // 2
        self._fitted = 0

    def note_fit(self) -> None:
        """A part has fitted. After some of them the limit doubles."""
        self._fitted += 1
        if self._fitted == GROW_AFTER:
            self.limit = min(2 * self.limit, sys.maxsize)
            self._fitted = 0


def take_part(rows: deque[Row], limit: int) -> list[Row]:
    """Take the rows of the next part off the front: as many as have `limit` tokens together, which keeps rows of one
    token first. A row that has more than that alone is cut, and what is taken of it is a part by itself. Two pieces of
    one row, which may lie in front of each other since an attempt that did not fit, are never in one part.
    """
    if rows[0].length > limit:
        row = rows.popleft()
        rows.appendleft(_cut(row, row.first + limit, row.end))
        return [_cut(row, row.first, row.first + limit)]
    part, left = list[Row](), limit
    while rows and rows[0].length <= left and not (part and rows[0].whole is part[-1].whole):
        left -= rows[0].length
        part.append(rows.popleft())
    return part


def _cut(row: Row, first: int, end: int) -> Row:
    """Positions `[first, end)` of a row."""
    return replace(
        row,
        first=first,
        length=end - first,
        way=clip_way(row.way, first, end),
        samples=row.samples and end == row.end,
        part_of=row.whole,
    )
