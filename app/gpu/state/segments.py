"""Cutting a step along the layer axis: inside one segment the set of rows is fixed, so it runs as one batch.

A row that breaks ends at its boundary, a row that resumes begins at its boundary; both are only loop bounds. So are the
boundaries at which something is done to a row that goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from app.domain.breakpoints import Intervention
from app.gpu.state.drafter import Drafted
from app.gpu.state.pass_plan import PassPlan
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState


@dataclass(slots=True, eq=False)  # not frozen: hundreds are made a step, and that would take twice as long
class Row:
    """One sequence's part of a step, for its `turn`: `length` tokens from position `first`, through the layers that
    `way` says.

    `samples` if its last token's logits choose the next token, `scores_prompt` if every token's logits are wanted. The
    last tokens may be a `draft`, which the history does not have; then the logits before each of them choose too.
    Where memory is too short for a row it is split; the row is accounted for when the last of its cuts has run.
    """

    sequence: TokenSequence
    turn: TurnState
    first: int
    length: int
    way: PassPlan
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
        """Whether the row is one token that runs all layers, with nothing to do on the way, and samples."""
        way = self.way
        return self.length == 1 and self.samples and way.lo == 0 and way.hi == num_layers and not way.marks

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


def find_alike(rows: Sequence[Row], places: Sequence[int], boundary: int) -> list[tuple[int, int]]:
    """The places of rows of one token each, rising, as runs `[first, end)` that can be edited at once: neighbours with
    the same edits at `boundary`, and nothing else there. Any other place is a run of its own. An edit that sums over a
    position is made alone: on a GPU the bits of its sum may depend on how many there are.
    """
    runs = list[tuple[int, int]]()
    before = list[bytes]()
    for place in places:
        edits = _elementwise_edits(rows[place].way, boundary)
        if runs and runs[-1][1] == place and edits and edits == before:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
        before = edits
    return runs


def _elementwise_edits(way: PassPlan, boundary: int) -> list[bytes]:
    """The digests of all edits at the boundary, in order. Empty if something else is done there, or the row pauses."""
    steps = [step for mark in way.marks if mark.boundary == boundary for step in mark.steps]
    edits = [step.edit.digest() for step in steps if isinstance(step, Intervention) and step.edit.is_elementwise]
    return edits if len(edits) == len(steps) and not (way.pauses and way.hi == boundary) else []


def cut_segments(rows: Sequence[Row]) -> list[Segment]:
    """Segments from the lowest layer up that cover every row's `[lo, hi)` exactly. Rows keep their order."""
    bounds = {bound for row in rows for bound in (row.way.lo, row.way.hi)}
    bounds.update(mark.boundary for row in rows for mark in row.way.marks)
    segments = []
    for lo, hi in pairwise(sorted(bounds)):
        members = tuple(i for i, row in enumerate(rows) if row.way.lo <= lo and hi <= row.way.hi)
        if members:
            segments.append(Segment(lo, hi, members))
    return segments
