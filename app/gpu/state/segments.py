"""A step's rows, cut along the layer axis into segments, and where memory is short into pieces that run one by one.

Inside one segment the set of rows is fixed, so it runs as one batch. A row that breaks ends at its boundary, a row that
resumes begins at its boundary; both are only loop bounds. So are the boundaries at which something is done to a row
that goes on. A layer inside which something is done is a segment by itself. Pure planning: no tensors.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from app.domain.breakpoints import Intervention
from app.domain.points import HEAD, Point
from app.gpu.state.drafts import Drafted
from app.gpu.state.paths import PassPlan
from app.gpu.state.sequence import TokenSequence, TurnState

BEHIND = frozenset({None, Point.RESID_POST, *HEAD})
"""What is done there is inside of no layer."""
GROW_AFTER = 32
"""Pieces that have to fit before a larger one is tried. One that does not fit costs its own time once more, so this
bounds the cost of trying to a few percent."""


class Row(Struct, eq=False):  # hundreds are made a step: a dataclass takes three times as long
    """One sequence's part of a step, for its `turn`: `length` tokens from position `first`, on their `path`.

    `samples` if its last token's logits choose the next token, `scores_prompt` if every token's logits are wanted. The
    last tokens may be a `draft`, which the history does not have; then the logits before each of them choose too.
    Where memory is too short for a row it is split; the row is accounted for when the last of its cuts has run.
    """

    sequence: TokenSequence
    turn: TurnState
    first: int
    length: int
    path: PassPlan
    samples: bool
    scores_prompt: bool
    draft: tuple[Drafted, ...] = ()
    split_from: Row | None = None
    """The planned row that this one was cut from."""

    @property
    def whole(self) -> Row:
        """The row as it was planned."""
        return self if self.split_from is None else self.split_from

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.first + self.length

    @property
    def ends(self) -> bool:
        """Whether nothing of the planned row comes after it."""
        return self.end == self.whole.end

    def is_plain(self, num_layers: int) -> bool:
        """Whether the row is one token that runs all layers, with nothing to do on its path, and samples."""
        path = self.path
        return self.length == 1 and self.samples and path.lo == 0 and path.hi == num_layers and not path.steps

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the row computes."""
        return self.sequence.tokens[self.first : self.end] + [drafted.token_id for drafted in self.draft]

    @property
    def choices(self) -> int:
        """How many of the row's last tokens' logits choose a token."""
        return 1 + len(self.draft) if self.samples else 0

    @property
    def outputs(self) -> int:
        """How many of the row's last tokens need logits."""
        return self.length if self.scores_prompt else self.choices


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers `[lo, hi)` over `rows`, given as indices into the step's rows."""

    lo: int
    hi: int
    rows: tuple[int, ...]


def cut_segments(rows: Sequence[Row]) -> list[Segment]:
    """Segments from the lowest layer up that cover every row's `[lo, hi)` exactly. Rows keep their order."""
    bounds = {bound for row in rows for bound in (row.path.lo, row.path.hi)}
    for row in rows:
        for step in row.path.steps:
            if step.point not in HEAD:
                bounds.add(step.boundary)
            if step.point not in BEHIND:
                bounds.add(step.boundary - 1)
        if row.path.pauses not in BEHIND:
            bounds.add(row.path.hi - 1)
    segments = []
    for lo, hi in pairwise(sorted(bounds)):
        members = tuple(i for i, row in enumerate(rows) if row.path.lo <= lo and hi <= row.path.hi)
        if members:
            segments.append(Segment(lo, hi, members))
    return segments


def find_alike(
    rows: Sequence[Row], places: Sequence[int], boundary: int, point: Point = Point.RESID_POST
) -> list[tuple[int, int]]:
    """The places of rows of one token each, rising, as runs `[first, end)` that can be edited at once: neighbours with
    the same edits at that point, and nothing else there. Any other place is a run by itself. An edit that sums over a
    position is made alone: on a GPU the bits of its sum may depend on how many there are.
    """
    runs = list[tuple[int, int]]()
    before = list[bytes]()
    for place in places:
        edits = _elementwise_edits(rows[place].path, boundary, point)
        if runs and runs[-1][1] == place and edits and edits == before:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
        before = edits
    return runs


def _elementwise_edits(path: PassPlan, boundary: int, point: Point) -> list[bytes]:
    """The digests of all edits at the point, in order. Empty if something else is done there, or the row pauses."""
    steps = path.at(boundary, point)
    edits = [step.edit.digest() for step in steps if isinstance(step, Intervention) and step.edit.is_elementwise]
    return edits if len(edits) == len(steps) and not path.pauses_at(boundary, point) else []


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
    path, samples = row.path.clip(first, end), row.samples and end == row.end
    return replace(row, first=first, length=end - first, path=path, samples=samples, split_from=row.whole)
