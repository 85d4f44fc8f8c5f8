"""What breakpoints do at a layer boundary: edits, captures and checkpoints of rows, and their copies in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.domain.breakpoints import Edit, EditOp, Intervention, TensorData
from app.domain.positions import Runs, positions_of
from app.gpu.device.hardware import dtype_name
from app.gpu.device.streams import PASSED, DeviceStreams, Event, Put
from app.gpu.state.checkpoints import Captured, StoredTensor
from app.gpu.state.paths import LoadCheckpoint, Record
from app.gpu.state.segments import Row

KEPT_VECTORS = 256
PlaceTensor = Callable[[TensorData], Tensor]
"""Gives the tensor of an edit where the residual stream is. It is not to be written to."""


def as_tensor(data: TensorData) -> Tensor:
    """The tensor in its own shape and dtype, in host memory. Not to be written to."""
    return torch.frombuffer(bytearray(data.data), dtype=getattr(torch, data.dtype)).view(data.shape)


def vectors_on(device: torch.device, streams: DeviceStreams) -> PlaceTensor:
    """Brings tensors of edits to the device, as float32 and without waiting. Keeps vectors: each step may ask again."""

    def bring(data: TensorData) -> Tensor:
        here = as_tensor(data)
        sent = streams.host_tensor(tuple(here.shape), here.dtype).copy_(here)
        there = torch.empty(here.shape, dtype=here.dtype, device=device)
        streams.compute.copy(there, sent)
        return there.float()

    kept = lru_cache(maxsize=KEPT_VECTORS)(bring)
    return lambda data: kept(data) if len(data.shape) == 1 else bring(data)


def apply_edit(hidden: Tensor, edit: Edit, place: PlaceTensor = as_tensor) -> None:
    """Change `hidden` `[positions, hidden_size]` in place. `place` gives the edit's tensor where `hidden` is."""
    before = hidden.float()
    after = _changed(before, edit, place)
    if edit.max_norm is not None:
        change = after - before
        length = torch.linalg.vector_norm(change, dim=-1, keepdim=True, dtype=torch.float64)  # squares overflow float32
        after = before + change * (edit.max_norm / length).clamp(max=1.0)
    hidden.copy_(after)


def _changed(hidden: Tensor, edit: Edit, place: PlaceTensor) -> Tensor:
    """`hidden` float32 `[positions, hidden_size]` after the edit, without its `max_norm`."""
    if edit.op is EditOp.SCALE:
        return hidden * edit.factor
    if edit.op is EditOp.ABLATE:
        return torch.zeros_like(hidden)
    assert edit.vector is not None
    vector = place(edit.vector).float()
    if edit.op is EditOp.ADD:
        return hidden + edit.factor * vector
    if edit.op is EditOp.REPLACE:
        return vector.expand_as(hidden)
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    # Unlike a product's, the bits of a sum on a CPU are the same for any number of rows.
    component = (hidden * unit).sum(-1, keepdim=True)
    wanted = edit.factor if edit.op is EditOp.CLAMP else 0.0
    return hidden + (wanted - component) * unit


class HostTensor:
    """`[positions, hidden_size]`, complete when `tensor` is read. Nothing changes it."""

    def __init__(self, tensor: Tensor, streams: DeviceStreams, copied: Event = PASSED, save_ms: float = 0.0) -> None:
        self._tensor = tensor
        self._streams = streams
        self._copied = copied
        self.save_ms = save_ms
        self.dtype = dtype_name(tensor.dtype)
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.nbytes = tensor.nbytes

    @classmethod
    def save(cls, hidden: Tensor, streams: DeviceStreams) -> HostTensor:
        """Copy `[positions, hidden_size]` once computed, beside the next work. Nothing may write to it any more."""
        began = time.perf_counter()
        saved = streams.host_tensor(tuple(hidden.shape), hidden.dtype)
        streams.saves.wait(streams.compute.record())
        streams.saves.copy(saved, hidden)
        return cls(saved, streams, streams.saves.record(), (time.perf_counter() - began) * 1000)

    @classmethod
    def of(cls, data: TensorData, streams: DeviceStreams) -> HostTensor:
        """A tensor that a client has sent."""
        return cls(_copy(as_tensor(data), streams), streams)

    @classmethod
    def joined(cls, parts: Sequence[StoredTensor]) -> HostTensor:
        """The rows of all parts, in this order. Waits for them."""
        saved = [part for part in parts if isinstance(part, HostTensor)]
        if len(saved) == 1:
            return saved[0]
        streams, save_ms = saved[0]._streams, sum(part.save_ms for part in saved)
        return cls(_copy(torch.cat([part.tensor for part in saved]), streams), streams, save_ms=save_ms)

    @property
    def tensor(self) -> Tensor:
        """Waits for the copy if it is still under way."""
        self._copied.synchronize()
        return self._tensor

    def load(self, hidden: Tensor, first: int = 0) -> None:
        """Put rows from `first` on into `hidden`, as many as it has, before what is launched next reads it."""
        self._streams.compute.wait(self._copied)
        self._streams.compute.copy(hidden, self._tensor[first : first + len(hidden)])

    def read(self, first: int, end: int) -> TensorData:
        """Rows `[first, end)` as bytes."""
        rows = self.tensor[first:end].contiguous()
        return TensorData(self.dtype, tuple(rows.shape), rows.view(torch.uint8).numpy().tobytes())

    def edited(self, first: int, end: int, edit: Edit) -> HostTensor:
        """The same with `edit` applied to rows `[first, end)`."""
        changed = _copy(self.tensor, self._streams)
        apply_edit(changed[first:end], edit)
        return HostTensor(changed, self._streams, save_ms=self.save_ms)

    def norms(self, first: int, end: int) -> list[float]:
        """The L2 length of rows `[first, end)`. In float64, as squares of large numbers would overflow."""
        found: list[float] = torch.linalg.vector_norm(self.tensor[first:end].double(), dim=1).tolist()
        return found

    def cosines(self, first: int, end: int, vector: TensorData) -> list[float]:
        """The cosine of rows `[first, end)` to a vector `[hidden_size]`; NaN for a row of zeros."""
        rows, wanted = self.tensor[first:end].double(), as_tensor(vector).double()
        found: list[float] = (rows @ wanted / torch.linalg.vector_norm(rows, dim=1) / wanted.norm()).tolist()
        return found

    def is_finite(self) -> bool:
        """Whether it has neither NaN nor infinity."""
        return bool(torch.isfinite(self.tensor).all())


def _copy(tensor: Tensor, streams: DeviceStreams) -> Tensor:
    """The same in memory that is fast to copy to the device."""
    return streams.host_tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor)


class Stopped(NamedTuple):
    """A row that has paused: its residual stream there, and what layers below that fold have left, if any do."""

    hidden: HostTensor
    states: HostTensor | None


class BoundaryActions:
    """Edits, captures and checkpoints of a step's rows at layer boundaries. `hidden` is always the row's part of the
    residual stream, `[length, hidden_size]`. Indices of scattered positions are put on the device when this is made;
    only the tensors of edits come later, through `place`.
    """

    def __init__(self, rows: Sequence[Row], put: Put, streams: DeviceStreams, place: PlaceTensor) -> None:
        self._streams, self._place = streams, place
        self.captured: dict[Row, list[Captured]] = {}
        """Captures of breakpoints; the sessions get them only when the step is over."""
        self.stopped: dict[Row, Stopped] = {}
        """What is kept of each row that pauses."""
        self._tokens: dict[tuple[Row, Runs], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Chosen positions, and the tokens there: found once, at however many boundaries they are captured."""
        self._indices: dict[tuple[Row, Runs], Tensor] = {}
        for row in rows:
            for step in row.path.steps:
                if isinstance(step, LoadCheckpoint) or len(step.runs) == 1 or (row, step.runs) in self._indices:
                    continue
                index = np.fromiter(positions_of(step.runs), np.int64) - row.first
                self._indices[row, step.runs] = put(index)

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
                case Intervention():
                    chosen = hidden if row.length == 1 else self._choose(row, step.runs, hidden)
                    apply_edit(chosen, step.edit, self._place)
                    if len(step.runs) > 1:
                        hidden.index_copy_(0, self._indices[row, step.runs], chosen)
                case Record():
                    self.captured.setdefault(row, []).append(self._capture(row, step, hidden))
                case LoadCheckpoint():
                    self.load_checkpoint(row, hidden)

    def stop(self, row: Row, hidden: Tensor, states: Tensor | None) -> None:
        """Save a row that pauses here, and the `states` that layers below have left, `[1, bytes]`; nothing may write to
        these any more.
        """
        kept = None if states is None else HostTensor.save(states, self._streams)
        self.stopped[row] = Stopped(HostTensor.save(hidden, self._streams), kept)

    def _choose(self, row: Row, runs: Runs, hidden: Tensor) -> Tensor:
        """The chosen positions, `[positions, hidden_size]`: a view where they are one run, else a copy."""
        if len(runs) > 1:
            return hidden.index_select(0, self._indices[row, runs])
        [run] = runs
        return hidden[run.first - row.first : run.end - row.first : run.step]

    def _capture(self, row: Row, record: Record, hidden: Tensor) -> Captured:
        """The chosen positions as they are now, in memory that nothing else writes to."""
        runs = record.runs
        if (row, runs) not in self._tokens:
            positions = tuple(positions_of(runs))
            self._tokens[row, runs] = positions, tuple(row.sequence.tokens[position] for position in positions)
        chosen = self._choose(row, runs, hidden)
        if len(runs) == 1:
            chosen = chosen.clone(memory_format=torch.contiguous_format)
        seen = HostTensor.save(chosen, self._streams)
        return Captured(record.breakpoint, record.boundary - 1, *self._tokens[row, runs], seen)
