"""Edits, captures and checkpoints of rows at layer boundaries."""

import time

from torch import Tensor

from app.domain.breakpoints import Intervention
from app.gpu.device.staging import Put
from app.gpu.device.streams import DeviceStreams
from app.gpu.forward.activations import HostTensor
from app.gpu.forward.chosen import Chosen
from app.gpu.forward.edits import DeviceVectors, apply_edit
from app.gpu.state.checkpoints import Captured
from app.gpu.state.paths import LoadCheckpoint, Record
from app.gpu.state.segments import Row


class Watch:
    """Runs edits, captures and checkpoints at a layer boundary.

    `hidden` is always the row's part of the residual stream, `[length, hidden_size]`.

    It puts its inputs on the device when it is made; only the tensors of edits come later, through `vectors`.
    """

    def __init__(self, rows: list[Row], put: Put, streams: DeviceStreams, vectors: DeviceVectors) -> None:
        self._streams, self._vectors = streams, vectors
        self._chosen = Chosen(rows, put)
        self.captured: dict[Row, list[Captured]] = {}
        """Captures of breakpoints; the sessions get them only when the step is over."""
        self.stopped: dict[Row, HostTensor] = {}
        """The residual stream of each row that pauses, where it has stopped."""

    def load_checkpoint(self, row: Row, hidden: Tensor) -> None:
        """Put the sequence's checkpoint in place."""
        checkpoint = row.sequence.checkpoint
        assert checkpoint is not None
        assert isinstance(checkpoint.hidden, HostTensor)
        began = time.perf_counter()
        checkpoint.hidden.load(hidden, row.first - checkpoint.first)
        checkpoint.restore_ms = (time.perf_counter() - began) * 1000

    def act(self, row: Row, boundary: int, hidden: Tensor) -> None:
        """Do what is marked at the boundary that the row has reached. `hidden` may go on behind a row of one token with
        the neighbours that `find_alike` finds: they are edited at once.
        """
        for step in row.path.at(boundary):
            match step:
                case Intervention() if row.length == 1:
                    apply_edit(hidden, step.edit, self._vectors.place)
                case Intervention():
                    with self._chosen.changing(row, step.runs, hidden) as chosen:
                        apply_edit(chosen, step.edit, self._vectors.place)
                case Record():
                    self.captured.setdefault(row, []).append(self._capture(row, step, hidden))
                case LoadCheckpoint():
                    self.load_checkpoint(row, hidden)

    def stop(self, row: Row, hidden: Tensor) -> None:
        """Save a row that pauses here; nothing may write to `hidden` any more."""
        self.stopped[row] = HostTensor.save(hidden, self._streams)

    def _capture(self, row: Row, record: Record, hidden: Tensor) -> Captured:
        positions, token_ids = self._chosen.tokens(row, record.runs)
        seen = HostTensor.save(self._chosen.copy(row, record.runs, hidden), self._streams)
        return Captured(record.breakpoint, record.boundary - 1, positions, token_ids, seen)
