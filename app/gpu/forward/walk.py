"""One step on its way up the layers, segment by segment."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.gpu.device.staging import Put
from app.gpu.forward.batches import Batches
from app.gpu.forward.program_run import RunLayers
from app.gpu.forward.watch import Watch
from app.gpu.kernels.attention.batch import Batch
from app.gpu.models.base import LayerStack
from app.gpu.state.segments import Row, Segment, cut_segments

TokenIds = Callable[[], Tensor]
"""The tokens of a step's rows, packed, `[tokens]` int64: to be called once the step's inputs have been sent."""
Place = tuple[Segment, Batch, "slice | Tensor"]
"""A segment, the batch of its rows, and where their tokens are."""


class Walk:
    """`hidden` is the residual stream of all rows packed, `[tokens, hidden_size]`: each row's part is at the boundary
    that the row has reached. `run` makes it.

    A walk puts its inputs on the device when it is made; they must be there before `run`. Where all rows go on from
    checkpoints, those are on their way from then on too: nothing of them is embedded.
    """

    hidden: Tensor
    replayed = False
    """Nothing of it has been recorded, as far as a CUDA device is concerned."""

    def __init__(
        self,
        stack: LayerStack,
        run_layers: RunLayers,
        batches: Batches,
        rows: list[Row],
        token_ids: TokenIds,
        put: Put,
        watch: Watch,
    ) -> None:
        self._stack, self._run_layers, self._batches = stack, run_layers, batches
        self._rows, self._watch = rows, watch
        self._starts: dict[Row, int] = {}
        total = 0
        for row in rows:
            self._starts[row] = total
            total += row.length
        self._embeds = not all(row.path.lo for row in rows)
        if not self._embeds:
            self._begin(torch.empty(total, stack.hidden_size, dtype=stack.dtype, device=stack.device))
        positions = np.concatenate([np.arange(row.first, row.first + row.length) for row in rows])
        self._token_ids, self._positions = token_ids, put(positions)
        self._outputs = put(np.array(self._find_outputs(), np.int64))
        self._places = self._place_segments(put)
        self.captured, self.stopped = watch.captured, watch.stopped

    def run(self) -> Tensor:
        """Launch all of it; returns float32 logits `[outputs, vocab_size]`: for each row in order, those of its last
        `row.outputs` tokens.
        """
        if self._embeds:
            self._begin(self._stack.embed(self._token_ids(), self._positions))
        for place in self._places:
            self._run_segment(*place)
        if not len(self._outputs):
            return self.hidden.new_empty(0, self._stack.vocab_size)
        return self._stack.head(self.hidden[self._outputs])

    def _begin(self, hidden: Tensor) -> None:
        """Take this as the rows' residual stream, with the checkpoints of those that have one in place."""
        self.hidden = hidden
        for row in self._rows:
            if row.path.lo:
                self._watch.load_checkpoint(row, self.hidden_of(row))

    def hidden_of(self, row: Row) -> Tensor:
        """The row's part of the residual stream, `[length, hidden_size]`; writing to it changes the row."""
        return self.hidden[self._starts[row] : self._starts[row] + row.length]

    def _run_segment(self, segment: Segment, batch: Batch, index: slice | Tensor) -> None:
        """Take the segment's rows through its layers, and do what is marked at its upper end. A row that pauses there
        is saved before the others go on: nothing changes its part of `hidden` any more.
        """
        self.hidden[index] = self._run_layers(segment.lo, segment.hi, self.hidden[index], batch)
        for row in (self._rows[number] for number in segment.rows):
            self._watch.act(row, segment.hi, self.hidden_of(row))
            if row.path.pauses and row.path.hi == segment.hi:
                self._watch.stop(row, self.hidden_of(row))

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


def whole_pass(stack: LayerStack, run_layers: RunLayers, token_ids: Tensor, batch: Batch) -> Tensor:
    """Every layer and the head over a batch of which every token needs logits.

    `token_ids` is `[tokens]` int64; returns float32 logits `[tokens, vocab_size]`.
    """
    hidden = stack.embed(token_ids, batch.positions)
    return stack.head(run_layers(0, stack.num_layers, hidden, batch))


def token_ids_of(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """The tokens that the rows compute, packed, `[tokens]` int64."""
    return np.array([token_id for row in rows for token_id in row.token_ids], np.int64)
