"""Checkpoints of paused passes, and captures: residual streams that a session keeps. Tensors are behind a protocol."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from app.domain.activations import MAX_CAPTURE_BYTES, CheckpointInfo, ResumeCost
from app.domain.breakpoints import Edit, Gate, Pass, Probe, TensorData, TensorParts, TopFeatures
from app.domain.points import Place, Point, place_of

GetUpload = Callable[[str], Mapping[str, Any]]
"""The tensors of an upload by name, from its digest. Raises `NotFound` if it is not loaded."""
Reads = Probe | TopFeatures | Gate
"""What makes something of what stands at a point: a probe its value; features the activations of the most active ones,
and then their numbers, which float32 has exactly; a gate 1 where it holds, else 0.
"""


class StoredTensor(Protocol):
    """What stands at a point, `[positions, width]`, in host memory. It never changes: edits make another one. So are
    states stored, whose bytes nobody edits.
    """

    dtype: str
    """PyTorch's name."""
    shape: tuple[int, int]
    nbytes: int
    save_ms: float
    """How long the engine thread took to save it."""

    def read(self, first: int, end: int) -> TensorData:
        """Rows `[first, end)` as bytes."""
        ...

    def view(self) -> TensorParts:
        """All rows, without a copy."""
        ...

    def edited(self, first: int, end: int, edit: Edit, get: GetUpload) -> StoredTensor:
        """The same with `edit` applied to rows `[first, end)`."""
        ...

    def chosen(self, rows: Sequence[int]) -> StoredTensor:
        """These rows alone."""
        ...

    def norms(self, first: int, end: int) -> list[float]:
        """The L2 length of rows `[first, end)`."""
        ...

    def cosines(self, first: int, end: int, vector: TensorData) -> list[float]:
        """The cosine of rows `[first, end)` to a vector `[hidden_size]`; NaN for a row of zeros."""
        ...

    def is_finite(self) -> bool:
        """Whether it has neither NaN nor infinity."""
        ...


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A pass over positions `[first, first + length)` that has stopped at a point, and what stood there: `hidden`. It
    goes on at `boundary`: behind the layer of `resid_post`, else below the layer, with `base`, the residual stream
    there, which only a pass that begins at the embeddings lacks.

    `held`: the KV of the layers below is in the session's blocks, after that of the computed tokens. KV that has been
    lost is recomputed, up to the boundary, where the checkpoint takes its place again.
    """

    boundary: int
    first: int
    length: int
    hidden: StoredTensor
    in_pass: Pass
    breakpoint: str | None
    created_at: float
    point: Point = Point.RESID_POST
    base: StoredTensor | None = None
    states: StoredTensor | None = None
    """What layers below that fold have left, as bytes `[1, bytes]`, until the pass ends: the session's blocks have the
    states of before it. Of use as long as the pass is `held`.
    """
    held: bool = True
    dispatch_ms: float = 0.0
    """How long the command to resume took."""
    restore_ms: float = 0.0
    """How long the engine thread took to put `hidden` back on the device."""

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.first + self.length

    @property
    def is_inside(self) -> bool:
        """Whether it has stopped inside a layer."""
        return self.point is not Point.RESID_POST

    @property
    def layer(self) -> int:
        """The layer of the point."""
        return self.boundary if self.is_inside else self.boundary - 1

    @property
    def place(self) -> Place:
        """Where in the pass it has stopped."""
        return place_of(self.layer + 1, self.point)

    @property
    def nbytes(self) -> int:
        """Of all that it keeps in host memory."""
        return sum(kept.nbytes for kept in (self.hidden, self.base, self.states) if kept is not None)

    def cost(self) -> ResumeCost:
        """How long it took to go on from here."""
        return ResumeCost(self.dispatch_ms, self.restore_ms)

    def info(self) -> CheckpointInfo:
        """The checkpoint as a client sees it."""
        return CheckpointInfo(
            layer=self.layer,
            first=self.first,
            end=self.end,
            hidden_size=self.hidden.shape[1],
            dtype=self.hidden.dtype,
            bytes=self.hidden.nbytes,
            in_pass=self.in_pass,
            breakpoint=self.breakpoint,
            saved_ms=self.hidden.save_ms,
            created_at=self.created_at,
            point=self.point,
        )


@dataclass(slots=True)
class Captured:
    """What one `capture` breakpoint has recorded in one pass, at `positions` in their order: of each it is of `shape`.

    Those from `current_to` on are not of the history any more: it has been cut since.
    """

    breakpoint: str
    layer: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    hidden: StoredTensor
    point: Point
    shape: tuple[int, ...]
    heads: tuple[int, ...] = ()
    """Which ones, where not all were chosen."""
    current_to: int = sys.maxsize
    reads: Reads | None = None
    """`hidden` is what it has made of each position, `[positions, numbers]` in float32."""
    holds: StoredTensor | None = None
    """Whether a gate did at each position, `[positions, 1]` in float32."""

    def where_it_holds(self) -> Captured | None:
        """The positions at which its gate held, if there are any."""
        if self.holds is None:
            return self
        found = array("f", self.holds.read(0, len(self.positions)).data)
        rows = [row for row, holds in enumerate(found) if holds]
        if not rows:
            return None
        at, tokens = (tuple(each[row] for row in rows) for each in (self.positions, self.token_ids))
        return replace(self, positions=at, token_ids=tokens, hidden=self.hidden.chosen(rows), holds=None)


@dataclass(slots=True)
class CaptureLog:
    """A session's captures, oldest first, up to `MAX_CAPTURE_BYTES`; `dropped` more found no room."""

    records: list[Captured] = field(default_factory=list)
    nbytes: int = 0
    dropped: int = 0

    def add(self, captured: Captured) -> None:
        """Keep one more, if there is room."""
        if self.nbytes + captured.hidden.nbytes > MAX_CAPTURE_BYTES:
            self.dropped += 1
            return
        self.records.append(captured)
        self.nbytes += captured.hidden.nbytes

    def cut(self, length: int) -> None:
        """The history has been cut to `length` tokens. What was recorded beyond stays, as a record of what has been."""
        for captured in self.records:
            captured.current_to = min(captured.current_to, length)

    def clear(self) -> None:
        """Forget all."""
        self.records.clear()
        self.nbytes = self.dropped = 0


T = TypeVar("T")
InParts = Generator[Callable[[], object] | None, None, T]
"""Work that stops after each short part, so that others may use the device. Where it goes on only once the device has
done something, it yields what waits for that. It returns its result.
"""
Cell = tuple[int, int, StoredTensor, int]
"""One residual stream `[hidden_size]`: its layer and position, and the row of the tensor that it is."""
CellMap = tuple[Sequence[Cell], Mapping[int, Cell], Mapping[tuple[int, int], Cell] | None]
"""Cells; by position those after the last layer, which may not be among them; and by layer and position those of
another session, if they are compared with one.
"""
KeptRows = tuple[int, Sequence[int], StoredTensor]
"""A layer, rising positions, and the tensor that has a row for each."""
Rows = tuple[StoredTensor, int, int]
"""Rows `[first, end)` of a residual stream."""


def kept_rows(
    log: CaptureLog,
    checkpoint: Checkpoint | None,
    layers: Collection[int] | None,
    point: Point = Point.RESID_POST,
) -> list[KeptRows]:
    """What a session keeps of a point of `layers` (None: all), with all heads, at positions that its history still has.
    Later ones are newer; the checkpoint, which may have been edited, is the last.
    """
    kept: list[KeptRows] = [
        (record.layer, record.positions[: bisect_left(record.positions, record.current_to)], record.hidden)
        for record in log.records
        if record.point is point and not record.heads
    ]
    if checkpoint is not None and checkpoint.point is point:
        kept.append((checkpoint.layer, range(checkpoint.first, checkpoint.end), checkpoint.hidden))
    return [each for each in kept if each[1] and (layers is None or each[0] in layers)]


def join_cells(cells: Iterable[Cell]) -> list[Rows]:
    """The rows of `cells` in their order, in as few pieces as there can be."""
    joined: list[Rows] = []
    for _, _, hidden, row in cells:
        if joined and joined[-1][0] is hidden and joined[-1][2] == row:
            joined[-1] = (hidden, joined[-1][1], row + 1)
        else:
            joined.append((hidden, row, row + 1))
    return joined
