"""One step on its way up the layers, segment by segment."""

import time
from typing import Any

import numpy as np
from torch import Tensor

from app.domain.breakpoints import Intervention
from app.gpu.attention.batch import Batch
from app.gpu.device.staging import Put
from app.gpu.device.streams import DeviceStreams
from app.gpu.models.base import LayerStack
from app.gpu.passes.pass_plan import LoadCheckpoint, Mark, Record
from app.gpu.passes.segments import Row, Segment, cut_segments
from app.gpu.programs.run import RunLayers
from app.gpu.state.checkpoints import Captured
from app.gpu.step.activations import HostTensor
from app.gpu.step.batches import Batches
from app.gpu.step.chosen import Chosen
from app.gpu.step.edits import DeviceVectors, apply_edit

Place = tuple[Segment, Batch, "slice | Tensor"]
"""A segment, the batch of its rows, and where their tokens are."""


class Walk:
    """`hidden` is the residual stream of all rows packed, `[tokens, hidden_size]`: each row's part is at the boundary
    that the row has reached. `run` makes it.

    A walk puts its inputs on the device when it is made; they must be there before `run`. Only the tensors of edits
    come later, through `vectors`.
    """

    hidden: Tensor

    def __init__(
        self,
        stack: LayerStack,
        run_layers: RunLayers,
        batches: Batches,
        streams: DeviceStreams,
        rows: list[Row],
        put: Put,
        vectors: DeviceVectors,
    ) -> None:
        self._stack, self._run_layers, self._batches = stack, run_layers, batches
        self._streams, self._rows, self._vectors = streams, rows, vectors
        self._starts: dict[Row, int] = {}
        total = 0
        for row in rows:
            self._starts[row] = total
            total += row.length
        positions = np.concatenate([np.arange(row.first, row.first + row.length) for row in rows])
        self._token_ids, self._positions = put(token_ids_of(rows)), put(positions)
        self._outputs = put(np.array(self._find_outputs(), np.int64))
        self._places = self._place_segments(put)
        self._chosen = Chosen(rows, put)
        self.captured: dict[Row, list[Captured]] = {}
        """Captures of breakpoints; the sessions get them only when the step is over."""
        self.stopped: dict[Row, HostTensor] = {}
        """The residual stream of each row that pauses, where it has stopped."""

    def run(self) -> Tensor:
        """Launch all of it; returns float32 logits `[outputs, vocab_size]`: for each row in order, those of its last
        `row.outputs` tokens.
        """
        self.hidden = self._stack.embed(self._token_ids, self._positions)
        for row in self._rows:
            if row.way.lo:
                self._load_checkpoint(row)
        for place in self._places:
            self._run_segment(*place)
        if not len(self._outputs):
            return self.hidden.new_empty(0, self._stack.vocab_size)
        return self._stack.head(self.hidden[self._outputs])

    def hidden_of(self, row: Row) -> Tensor:
        """The row's part of the residual stream, `[length, hidden_size]`; writing to it changes the row."""
        return self.hidden[self._starts[row] : self._starts[row] + row.length]

    def _run_segment(self, segment: Segment, batch: Batch, index: slice | Tensor) -> None:
        """Take the segment's rows through its layers, and do what is marked at its upper end. A row that pauses there
        is saved before the others go on: nothing changes its part of `hidden` any more.
        """
        self.hidden[index] = self._run_layers(segment.lo, segment.hi, self.hidden[index], batch)
        for row in (self._rows[number] for number in segment.rows):
            for mark in row.way.marks:
                if mark.boundary == segment.hi:
                    self._act(row, mark)
            if row.way.pauses and row.way.hi == segment.hi:
                self.stopped[row] = HostTensor.save(self.hidden_of(row), self._streams)

    def _place_segments(self, put: Put) -> list[Place]:
        """Segments of the same rows share their batch."""
        placed: dict[tuple[int, ...], tuple[Batch, slice | Tensor]] = {}
        segments = cut_segments(self._rows)
        for segment in segments:
            if segment.rows not in placed:
                members = [self._rows[number] for number in segment.rows]
                placed[segment.rows] = self._batches.place(members, put), self._tokens(members, put)
        return [(segment, *placed[segment.rows]) for segment in segments]

    def _find_outputs(self) -> list[int]:
        """Packed positions of the tokens that need logits."""
        ends = [(self._starts[row] + row.length, row.outputs) for row in self._rows]
        return [index for end, outputs in ends for index in range(end - outputs, end)]

    def _tokens(self, members: list[Row], put: Put) -> slice | Tensor:
        """Where the rows' tokens are: a slice, which costs no copy, if they are neighbours."""
        first, end = self._starts[members[0]], self._starts[members[-1]] + members[-1].length
        if end - first == sum(row.length for row in members):
            return slice(first, end)
        return put(np.array([self._starts[row] + offset for row in members for offset in range(row.length)], np.int64))

    def _load_checkpoint(self, row: Row) -> None:
        checkpoint = row.sequence.checkpoint
        assert checkpoint is not None
        assert isinstance(checkpoint.hidden, HostTensor)
        began = time.perf_counter()
        checkpoint.hidden.load(self.hidden_of(row), row.first - checkpoint.first)
        checkpoint.restore_ms = (time.perf_counter() - began) * 1000

    def _act(self, row: Row, mark: Mark) -> None:
        hidden = self.hidden_of(row)
        for step in mark.steps:
            match step:
                case Intervention():
                    with self._chosen.changing(row, step.runs, hidden) as chosen:
                        apply_edit(chosen, step.edit, self._vectors.place)
                case Record():
                    self.captured.setdefault(row, []).append(self._capture(row, step, hidden))
                case LoadCheckpoint():
                    self._load_checkpoint(row)

    def _capture(self, row: Row, record: Record, hidden: Tensor) -> Captured:
        positions, token_ids = self._chosen.tokens(row, record.runs)
        seen = HostTensor.save(self._chosen.copy(row, record.runs, hidden), self._streams)
        return Captured(record.breakpoint, record.boundary - 1, positions, token_ids, seen)


def whole_pass(stack: LayerStack, run_layers: RunLayers, token_ids: Tensor, batch: Batch) -> Tensor:
    """Every layer and the head over a batch of which every token needs logits.

    `token_ids` is `[tokens]` int64; returns float32 logits `[tokens, vocab_size]`.
    """
    hidden = stack.embed(token_ids, batch.positions)
    return stack.head(run_layers(0, stack.num_layers, hidden, batch))


def token_ids_of(rows: list[Row]) -> np.ndarray[Any, Any]:
    """The tokens that the rows compute, packed, `[tokens]` int64."""
    return np.array([token_id for row in rows for token_id in row.token_ids], np.int64)
