"""Splitting a step where memory is too short for all of its rows at once. Pure planning: no tensors."""

import sys
from collections import deque
from dataclasses import replace

from app.gpu.state.pass_plan import clip_way
from app.gpu.state.segments import Row

GROW_AFTER = 32
"""Pieces that have to fit before a larger one is tried. One that does not fit costs its own time once more, so this
bounds the cost of trying to a few percent."""


class SplitSize:
    """How many tokens are computed at once, at most `limit`: any number, until a piece has not fitted."""

    def __init__(self) -> None:
        self.limit = sys.maxsize
        self._fitted = 0

    def shrink(self, tokens: int) -> None:
        """A piece of so many tokens, more than one, has not fitted."""
        self.limit = tokens // 2
        self._fitted = 0

    def note_fit(self) -> None:
        """A piece has fitted. After some of them the limit doubles."""
        self._fitted += 1
        if self._fitted == GROW_AFTER:
            self.limit = min(2 * self.limit, sys.maxsize)
            self._fitted = 0


def split_off(rows: deque[Row], limit: int) -> list[Row]:
    """Take the next piece of a step off the front: as many rows as have `limit` tokens together, which keeps rows of
    one token first. A row that alone has more is cut, and its front is a piece by itself. Two cuts of one row may lie
    one behind the other since an attempt that did not fit; they are never in one piece.
    """
    if rows[0].length > limit:
        row = rows.popleft()
        rows.appendleft(_cut(row, row.first + limit, row.end))
        return [_cut(row, row.first, row.first + limit)]
    piece, left = list[Row](), limit
    while rows and rows[0].length <= left and not (piece and rows[0].whole is piece[-1].whole):
        left -= rows[0].length
        piece.append(rows.popleft())
    return piece


def without_draft(row: Row) -> Row:
    """The row's part that has to be computed."""
    return replace(row, length=row.length - len(row.draft), draft=(), split_from=row.whole) if row.draft else row


def _cut(row: Row, first: int, end: int) -> Row:
    """Positions `[first, end)` of a row."""
    return replace(
        row,
        first=first,
        length=end - first,
        way=clip_way(row.way, first, end),
        samples=row.samples and end == row.end,
        split_from=row.whole,
    )
